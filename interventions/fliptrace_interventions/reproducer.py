"""A folder that shows one root again without the model: what one attaches to a bug report about a kernel.

It holds the root's operands (recovered by replaying the recording), both observed outputs, the launch, a copy of the
kernels package and a short script. The kernels are copied rather than required: whoever gets the folder needs torch,
and triton on CUDA, and runs exactly what ran here.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fliptrace.capture.engine import Engine
from fliptrace.errors import InputError, StorageError
from fliptrace.numerics import digest_rows
from fliptrace.pair import Pair
from fliptrace.pair.engines import VLLM_OWN
from fliptrace.pair.pair import move_into_place, require_new
from fliptrace.trace import Kind, Trace, dtype_name
from fliptrace.verdicts import PairDiff, RowDifference
from fliptrace_interventions.recorded import RecordedExecution
from fliptrace_kernels import parse_reduction

#: The folder's size stays below this.
LARGEST_BYTES = 1_000_000
#: What x and A may take of it together; and x alone, before it is cut to the rows of one tile.
_OPERAND_BYTES, _INPUT_BYTES = 700_000, 300_000
#: Rows and ranks that one tile of the kernels covers at least.
_TILE = 16
_NAMES = ("reference", "candidate")


def find_root(diff: PairDiff, name: str) -> RowDifference:
    """Find the root that a person named.

    Args:
        diff: the comparison.
        name: its number in the report's table of surviving roots, from 1; or ``SITE:STEP:POSITION`` with the site's
            path, its name or the end of either, and the step as a number or ``prefill``.

    Raises:
        InputError: no such root, or several.
    """
    if not diff.roots:
        raise InputError(
            "this pair has no surviving root: "
            + (
                "no row with equal operands differs after rounding"
                if diff.same_reduction
                else "its executions used different reductions, so every difference is the variant's"
            )
        )
    if name.isdecimal():
        if not 1 <= int(name) <= len(diff.roots):
            raise InputError(f"a root's number runs from 1 to {len(diff.roots)}; got {name}")
        return diff.roots[int(name) - 1]
    parts = name.rsplit(":", 2)
    step = "0" if len(parts) == 3 and parts[1] == "prefill" else parts[1] if len(parts) == 3 else ""
    if len(parts) != 3 or not step.isdecimal() or not parts[2].isdecimal():
        raise InputError(
            f"a root is named by its number (1 to {len(diff.roots)}) or as SITE:STEP:POSITION, such as "
            f"{root_name(diff.roots[0])}; got {name!r}"
        )
    found = [
        row
        for row in diff.roots
        if (row.step, row.position) == (int(step), int(parts[2])) and _is_called(row, parts[0])
    ]
    if not found:
        raise InputError(f"no surviving root is called {name}; they are {_some_names(diff.roots)}")
    if len(found) > 1:
        raise InputError(f"{name} names {len(found)} roots: {_some_names(found)}; name one of them")
    return found[0]


def root_name(row: RowDifference) -> str:
    """Return the name by which a root can be exported: ``model.layers.2.mlp.up_proj:0:47``."""
    return f"{row.site.path}:{row.step}:{row.position}"


def _is_called(row: RowDifference, site: str) -> bool:
    return site in (row.site.path, row.site.name) or row.site.path.endswith(f".{site}")


def _some_names(rows: tuple[RowDifference, ...] | list[RowDifference]) -> str:
    names = ", ".join(root_name(row) for row in rows[:5])
    return f"{names} and {len(rows) - 5} more" if len(rows) > 5 else names


def recover_operand(recorded: RecordedExecution, engine: Engine, step: int, site: int) -> Tensor:
    """Recover a shrink's input by running its step with every recorded shrink handed over.

    Args:
        recorded: the execution.
        engine: its model.
        step: which step.
        site: the site's number.

    Returns:
        The operand, [T, K], on the host.

    Raises:
        InputError: this machine computes another operand than was recorded.
    """
    found: list[Tensor] = []

    def hand_over(index: int, operand: Tensor, output: Tensor) -> Tensor:
        if index == site:
            found.append(operand.detach().cpu().clone())
        return recorded.shrink(step, index).to(output.device)

    with engine.reducing("unsplit"), engine.intercepted(hand_over):
        if step == 0:
            engine.start(recorded.prompt_ids)
            engine.step()
        else:
            engine.write_cache(recorded.cache_before(step), step, recorded.state_before(step))
            engine.step(recorded.token_ids[step - 1])
    (operand,) = found
    if not torch.equal(digest_rows(operand), recorded.operand_digests(step, site)):
        raise InputError(
            f"the operand of {engine.sites[site].name} in step {step} has other bits here than in the recording: this "
            "machine computes something before it differently. Export where the pair was recorded, or record the pair "
            "here"
        )
    return operand


def export_reproducer(
    pair: Pair, engine: Engine, row: RowDifference, directory: str | Path
) -> Path:
    """Write a folder that shows a root again without the model.

    Args:
        pair: the recorded pair.
        engine: with its model and adapter.
        row: one of ``pair.diff.roots``; see find_root.
        directory: a new folder.

    Returns:
        The path of its script.

    Raises:
        InputError: the pair or the root cannot be used here, or the folder is not empty.
        StorageError: it cannot be written.
    """
    target = Path(directory).resolve()
    require_new(target)
    site = [entry.path for entry in engine.sites].index(row.site.path)
    recorded = [
        RecordedExecution(trace, engine, name)
        for trace, name in zip((pair.reference, pair.candidate), _NAMES, strict=True)
    ]
    operand = recover_operand(recorded[0], engine, row.step, site)
    weight = engine.shrink_weight(site).cpu()
    kept = _kept(row, recorded[0].positions(row.step).index(row.position), operand, weight)
    case = _case(pair, engine, row, site, operand, weight, kept)
    case["observed"] = {
        item.which: [
            f"0x{bits & 0xFFFFFFFF:08x}"
            for bits in item.shrink(row.step, site)[kept.row, list(kept.ranks)]
            .cpu()
            .view(torch.int32)
            .tolist()
        ]
        for item in recorded
    }
    values = torch.cat([operand[list(kept.rows)], weight[list(kept.ranks)]])
    _write(target, case, bytes(values.contiguous().view(torch.uint8).numpy()))
    return target / "reproduce.py"


@dataclass(frozen=True, slots=True)
class _Kept:
    """What of the operands is written.

    Attributes:
        row: the root's row in the call; rank_index: its first surviving coordinate.
        rows: rows of x; ranks: rows of A.
    """

    row: int
    rank_index: int
    rows: range
    ranks: range


def _kept(row: RowDifference, index: int, operand: Tensor, weight: Tensor) -> _Kept:
    """Keep all of x and A where they are small, else the tile that computes the root, else the root alone."""
    rank_index = row.coordinates[0].coordinate.rank_index
    rows, ranks = range(operand.shape[0]), range(weight.shape[0])
    line = operand.shape[1] * operand.element_size()
    if len(rows) * line > _INPUT_BYTES:
        rows = _tile(rows, index)
    if (len(rows) + len(ranks)) * line > _OPERAND_BYTES:
        ranks = _tile(ranks, rank_index)
    if (len(rows) + len(ranks)) * line > _OPERAND_BYTES:
        rows = range(index, index + 1)
    if (len(rows) + len(ranks)) * line > _OPERAND_BYTES:
        ranks = range(rank_index, rank_index + 1)
    return _Kept(index, rank_index, rows, ranks)


def _tile(every: range, index: int) -> range:
    start = index // _TILE * _TILE
    return range(start, min(start + _TILE, every.stop))


def _case(
    pair: Pair,
    engine: Engine,
    row: RowDifference,
    site: int,
    operand: Tensor,
    weight: Tensor,
    kept: _Kept,
) -> dict[str, Any]:
    """Return what the script and its reader need to know, except the observed outputs."""
    manifests = [trace.manifest for trace in (pair.reference, pair.candidate)]
    seeds = [manifest.get("reduction.seed") for manifest in manifests]
    first = row.coordinates[0]
    return {
        "what": (
            f"LoRA shrink of {row.name}: x is [{operand.shape[0]}, {operand.shape[1]}], A is "
            f"[{weight.shape[0]}, {weight.shape[1]}]; rank index {kept.rank_index} came out as {first.reference!r} and "
            f"as {first.candidate!r}, which round to {first.rounded_reference_bits} and {first.rounded_candidate_bits}"
        ),
        "site": row.site.path,
        "step": row.step,
        "position": row.position,
        "rank_index": kept.rank_index,
        "reduction": _reduction(str(manifests[0].get("reduction.identity"))),
        "dtype": dtype_name(operand.dtype),
        "rounded_to": first.rounded_dtype,
        "rows": operand.shape[0],
        "k": operand.shape[1],
        "rank": weight.shape[0],
        "row": kept.row,
        "column": kept.ranks.index(kept.rank_index),
        "kept_rows": list(kept.rows),
        "kept_ranks": list(kept.ranks),
        "mapping": None,
        "scale": 1.0,
        "call_key": row.step * len(engine.sites) + site,
        "seeds": None if None in seeds else seeds,
        "launch": {
            name: _launch(trace, row)
            for name, trace in zip(_NAMES, (pair.reference, pair.candidate), strict=True)
        },
        "recorded_on": {
            name: {
                key: manifest.get(key)
                for key in (
                    "environment.processor",
                    "environment.gpu.name",
                    "environment.gpu.driver",
                    "environment.versions",
                    "reduction.schedule",
                )
            }
            for name, manifest in zip(_NAMES, manifests, strict=True)
        },
    }


def _reduction(identity: str) -> str:
    """Return what the script runs: vLLM's own kernel has no specification here, so the script looks for vLLM."""
    return identity if identity == VLLM_OWN else str(parse_reduction(identity))


def _launch(trace: Trace, row: RowDifference) -> str:
    frame = trace.frame(row.step, Kind.SHRINK)
    if frame is None:  # a root has a record in both traces
        return ""
    return frame.layout.entries[frame.layout.index[row.site.path]].launch


def _write(target: Path, case: dict[str, Any], operands: bytes) -> None:
    """Write the folder in one step: it is whole or not there."""
    scratch: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        (scratch / "case.json").write_text(json.dumps(case, indent=1) + "\n", "utf-8")
        (scratch / "operands.bin").write_bytes(operands)
        script = resources.files("fliptrace_interventions") / "reproduce.py"
        (scratch / "reproduce.py").write_text(script.read_text("utf-8"), "utf-8")
        kernels = scratch / "fliptrace_kernels"
        kernels.mkdir()
        for module in resources.files("fliptrace_kernels").iterdir():
            if module.name.endswith(".py"):
                (kernels / module.name).write_text(module.read_text("utf-8"), "utf-8")
        size = sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
        if size > LARGEST_BYTES:
            raise InputError(
                f"a reproducer must stay below {LARGEST_BYTES:,} bytes; this root's would take {size:,}, even with one "
                "row of x and one of A. Choose a root with a smaller K"
            )
        scratch.chmod(0o755)
        move_into_place(scratch, target)
    except OSError as error:
        raise StorageError(
            f"the reproducer could not be written to {target} ({error}); nothing was written"
        ) from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)  # gone already when all went well
