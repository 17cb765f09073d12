"""What is timed: our reductions, vLLM's kernel, two launches, and the floor."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from fliptrace_kernels.bench import vllm_kernel
from fliptrace_kernels.bench.cells import Cell
from fliptrace_kernels.bench.goals import DECODE_ROWS
from fliptrace_kernels.bench.inputs import Call
from fliptrace_kernels.bench.results import ResultsError
from fliptrace_kernels.bench.sources import code_digest
from fliptrace_kernels.bench.timing import Launch
from fliptrace_kernels.dispatch import launch_configuration, lora_shrink
from fliptrace_kernels.errors import ReductionError
from fliptrace_kernels.reduction import Reduction, parse_reduction

OURS: Final = "ours"
"""Role of reductions that are repeatable: the ones the goals are about."""

DEFAULT_NAMES: Final = (
    "floor",
    "vllm",
    "atomic:vllm",
    "atomic:8/32",
    "two-launch",
    "unsplit/64",
    "tree:8/32",
    "deterministic:8/32",
    "deterministic:8/128",
    "deterministic:8/256",
    "local:32/32",
)
"""Kernels of the default table; `vllm` is left out where vLLM is not installed."""

_LOCAL: Final = "fliptrace_kernels.local"
_METHOD: Final = ("fliptrace_kernels.bench.timing", "fliptrace_kernels.bench.inputs")
_LOCAL_FLOOR_RANKS: Final = (16, 32)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a kernel.

    Attributes:
        name: what distinguishes it, empty if there is only one.
        launch: starts a call.
        result: reads what the last call computed, [slices, M, R].
        compiled_here: whether its code is kept in this process alone, so that no other process can
            compile it for this one.
    """

    name: str
    launch: Launch
    result: Callable[[], Tensor]
    compiled_here: bool = False


@dataclass(frozen=True, slots=True)
class Variant:
    """One column of the table.

    Attributes:
        name: its identity.
        role: 'ours', 'atomic', 'vllm', 'two-launch' or 'floor'.
        source: digest of the code that runs, the way of timing included.
        candidates: makes the ways to run it for a call; the fastest counts.
        describe: what runs for a cell, as JSON values.
        compiled_here: whether a candidate may be `Candidate.compiled_here`.
    """

    name: str
    role: str
    source: str
    candidates: Callable[[Call], list[Candidate]]
    describe: Callable[[Cell], dict[str, Any]]
    compiled_here: bool = False


def variant_of(name: str) -> Variant:
    """Return the variant with this name.

    Args:
        name: `floor`, `two-launch`, `vllm` or a reduction.

    Raises:
        ResultsError: if it is none of these, or vLLM is not installed.
    """
    if name == "floor":
        return _bench_variant(name, ("fliptrace_kernels.bench.floor", _LOCAL), _floor, True)
    if name == "two-launch":
        return _bench_variant(name, ("fliptrace_kernels.bench.two_launch",), _two_launch, False)
    if name == "vllm":
        version = vllm_kernel.installed_version()
        if version is None:
            raise ResultsError("vllm is to be timed but not installed; leave it out of --kernels")
        return Variant(
            vllm_kernel.name_of(version),
            "vllm",
            f"{vllm_kernel.source_digest()}-{code_digest(*_METHOD)}",
            lambda call: [Candidate("", vllm_kernel.launches(call), lambda: call.out)],
            lambda _: {"vllm": version},
        )
    try:
        reduction = parse_reduction(name)
    except ReductionError as error:
        raise ResultsError(
            f"a kernel is floor, two-launch, vllm or a reduction; {error}"
        ) from error
    return _ours(reduction)


def default_names() -> list[str]:
    """List the kernels that can be timed here."""
    return [
        name
        for name in DEFAULT_NAMES
        if name != "vllm" or vllm_kernel.installed_version() is not None
    ]


def _ours(reduction: Reduction) -> Variant:
    module = _LOCAL if reduction.kind == "local" else "fliptrace_kernels.triton_shrink"

    def candidates(call: Call) -> list[Candidate]:
        def launch(index: int) -> None:
            lora_shrink(
                call.x, call.weights[index], call.mapping, reduction=reduction, out=call.out
            )

        return [Candidate("", launch, lambda: call.out, reduction.kind == "local")]

    def describe(cell: Cell) -> dict[str, Any]:
        shapes = [[1, cell.rank, cell.k]] * cell.slices
        return launch_configuration([cell.rows, cell.k], shapes, torch.bfloat16, "cuda", reduction)

    return Variant(
        str(reduction),
        OURS if reduction.is_repeatable else "atomic",
        code_digest(module, *_METHOD),
        candidates,
        describe,
        reduction.kind == "local",
    )


def _bench_variant(
    name: str,
    modules: tuple[str, ...],
    candidates: Callable[[Call], list[Candidate]],
    compiled_here: bool,
) -> Variant:
    digest = code_digest(*modules, *_METHOD)
    return Variant(name, name, digest, candidates, lambda _: {}, compiled_here)


def _two_launch(call: Call) -> list[Candidate]:
    from fliptrace_kernels.bench import two_launch

    cell = call.cell
    partials = torch.empty(
        (cell.slices, two_launch.SPLITS, cell.rows, cell.rank),
        dtype=torch.float32,
        device=call.x.device,
    )

    def launch(index: int) -> None:
        two_launch.shrink(
            call.x, call.weights[index], call.mapping, out=call.out, partials=partials
        )

    return [Candidate("", launch, lambda: call.out)]


def _floor(call: Call) -> list[Candidate]:
    from fliptrace_kernels.bench import floor

    def run(tiling: floor.Tiling) -> Callable[[Sequence[Tensor], Tensor], object]:
        return lambda a, out: floor.partials(call.x, a, tiling, out=out)

    found = [
        _partials_candidate(call, str(tiling), tiling.splits, run(tiling))
        for tiling in floor.tilings_for(call.cell)
    ]
    local = _local()
    if local is not None and call.cell.rows <= DECODE_ROWS and call.cell.rank in _LOCAL_FLOOR_RANKS:
        splits = local.DEFAULT_SPLITS
        found.append(
            _partials_candidate(
                call,
                f"local:{splits}",
                splits,
                lambda a, out: local.partials_only(call.x, a, splits, out),
                compiled_here=True,
            )
        )
    return found


def _partials_candidate(
    call: Call,
    name: str,
    splits: int,
    run: Callable[[Sequence[Tensor], Tensor], object],
    *,
    compiled_here: bool = False,
) -> Candidate:
    cell = call.cell
    out = torch.full(
        (splits, cell.slices, cell.rows, cell.rank),
        float("nan"),
        dtype=torch.float32,
        device=call.x.device,
    )

    def launch(index: int) -> None:
        run(call.weights[index], out)

    return Candidate(name, launch, lambda: out.sum(0), compiled_here)


@cache
def _local() -> ModuleType | None:
    """The CUDA kernel of `local`, where its compiler is installed."""
    if importlib.util.find_spec("cuda") is None:
        return None
    from fliptrace_kernels import local

    return local
