"""A folder that replays a root's launch without the model: operands, weights, both outputs, and a script."""

from __future__ import annotations

import json
import shutil
import tempfile
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fliptrace.capture.environment import describe_environment
from fliptrace.capture.vllm_engine.live.layout import row_numbers
from fliptrace.errors import InputError, StorageError
from fliptrace.verdicts import Origin

if TYPE_CHECKING:
    from fliptrace.capture.vllm_engine.live.comparison import LiveComparison
    from fliptrace.capture.vllm_engine.live.recorder import LiveRecorder

#: Operands of the root's neighbours in the batch are kept up to here; beyond, its row alone.
_NEIGHBOUR_BYTES = 1_000_000


def export_root(recorder: LiveRecorder, comparison: LiveComparison, directory: Path) -> Path:
    """Write the folder: case.json, operands.bin (x, then A per slice), reproduce.py and a copy of the kernels.

    x is the operand row, whose bits are checked against the recorded digest, at its place among as many rows as the
    launch had; its neighbours' operands are kept where they are small, as they share the launch.

    Args:
        recorder: with the candidate's rows.
        comparison: with verdict root.
        directory: new, or empty.

    Returns:
        The path of reproduce.py.

    Raises:
        InputError: there is no root, its operand has been overwritten, or the folder is not empty.
        StorageError: the folder cannot be written.
    """
    first = comparison.first
    if first is None or comparison.verdict is not Origin.ROOT:
        raise InputError(
            f"a reproducer needs a root; this comparison's verdict is {comparison.word}: {comparison.why}"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(
            f"a new or empty folder is required for the reproducer; {directory} is not"
        )
    candidate = comparison.candidate
    operand = recorder.operand(candidate, first.candidate_row, first.layer)
    if operand is None:
        raise InputError(
            f"the operand of {first.name} has been overwritten since (or none are kept): export right after the "
            "candidate ran, or pass a larger operand_bytes to prepare_watch"
        )
    weights = recorder.weights(first.layer, candidate, first.candidate_row)
    rows = int(candidate.rows[first.candidate_row, 3])
    place = int(candidate.places[first.candidate_row])
    kept, values = _neighbours(recorder, comparison, rows, place, operand)
    case = _case(recorder, comparison, rows, place, kept, weights)
    data = torch.cat([values, *weights]).contiguous()
    _write(directory, case, bytes(data.view(torch.uint8).numpy()))
    return directory / "reproduce.py"


def _neighbours(
    recorder: LiveRecorder, comparison: LiveComparison, rows: int, place: int, operand: Tensor
) -> tuple[list[int], Tensor]:
    first = comparison.first
    if first is None or rows * operand.nbytes > _NEIGHBOUR_BYTES:
        return [place], operand.unsqueeze(0)
    row = first.candidate_row
    base = int(row_numbers(comparison.candidate.rows[row : row + 1])[0]) - place
    values = []
    for index in range(rows):
        found = operand if index == place else recorder.ring.operand(base + index, first.layer)
        values.append(operand if found is None else found)
    return list(range(rows)), torch.stack(values)


def _case(
    recorder: LiveRecorder,
    comparison: LiveComparison,
    rows: int,
    place: int,
    kept: list[int],
    weights: list[Tensor],
) -> dict[str, Any]:
    first = comparison.first
    if first is None:
        raise InputError("a reproducer needs a root")
    from fliptrace_kernels.vllm_plugin.installation import installed
    from fliptrace_kernels.vllm_plugin.shrink_operator import Operator

    plugin = installed(Operator())
    observed = {}
    for name, execution, row in (
        ("reference", comparison.reference, first.reference_row),
        ("candidate", comparison.candidate, first.candidate_row),
    ):
        bits = execution.shrink(first.layer)[row, first.part].contiguous().view(torch.int32)
        observed[name] = [f"0x{value & 0xFFFFFFFF:08x}" for value in bits.tolist()]
    boundary = first.boundary
    return {
        "what": (
            f"LoRA shrink of {first.name}, in a forward of {rows} rows: it came out as {first.reference!r} and as "
            f"{first.candidate!r}, which round to {boundary.rounded_reference!r} and {boundary.rounded_candidate!r}"
        ),
        "site": first.site.path,
        "step": first.step,
        "position": first.position,
        "reduction": "vllm-own" if plugin is None else str(plugin.settings.reduction),
        "launch": first.launch,
        "dtype": str(recorder.ring.layout.dtype).removeprefix("torch."),
        "rows": rows,
        "kept_rows": kept,
        "row": place,
        "k": recorder.ring.layout.layers[first.layer].size,
        "rank": weights[0].shape[0],
        "slices": len(weights),
        "part": first.part,
        "column": first.rank_index,
        "flip": comparison.flip,
        "observed": observed,
        "recorded_on": describe_environment(torch.device(recorder.host.worker.device)),
    }


def _write(directory: Path, case: dict[str, Any], operands: bytes) -> None:
    """Write the folder in one step: it is whole or not there."""
    scratch: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        (scratch / "case.json").write_text(json.dumps(case, indent=1, default=str) + "\n", "utf-8")
        (scratch / "operands.bin").write_bytes(operands)
        script = resources.files("fliptrace.capture.vllm_engine.live") / "replay_launch.py"
        (scratch / "reproduce.py").write_text(script.read_text("utf-8"), "utf-8")
        kernels = scratch / "fliptrace_kernels"
        kernels.mkdir()
        for module in resources.files("fliptrace_kernels").iterdir():
            if module.name.endswith(".py"):
                (kernels / module.name).write_text(module.read_text("utf-8"), "utf-8")
        scratch.chmod(0o755)
        if directory.exists():
            directory.rmdir()
        scratch.rename(directory)
    except OSError as error:
        raise StorageError(
            f"the reproducer could not be written to {directory} ({error}); nothing was written"
        ) from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)  # gone already when all went well
