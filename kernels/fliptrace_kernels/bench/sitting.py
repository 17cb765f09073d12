"""One sitting: measure what is missing until it is done or the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from triton.errors import TritonError

from fliptrace_kernels.bench import two_launch
from fliptrace_kernels.bench.cells import Cell
from fliptrace_kernels.bench.device import this_machine
from fliptrace_kernels.bench.in_processes import in_processes
from fliptrace_kernels.bench.inputs import Call, Pool, exact, relative_error
from fliptrace_kernels.bench.results import (
    Copy,
    Key,
    Machine,
    Row,
    append_results,
    read_results,
)
from fliptrace_kernels.bench.timing import Stopwatch, calls_for
from fliptrace_kernels.bench.variants import Candidate, Variant, variant_of
from fliptrace_kernels.errors import LaunchError

ROUNDS: Final = 2
"""How often each kernel is timed in a cell, with the others in between: the noise."""

SECONDS_PER_CELL: Final = 0.3
SECONDS_TO_START: Final = 40.0
"""Estimates from an NVIDIA H200 with 16 cores; only told to the person who waits."""

_LARGEST_ERROR: Final = 1e-4  # relative; FP32 sums of 16-bit products are near 1e-6
_FAILURES: Final = (RuntimeError, ValueError, TypeError, ImportError, AssertionError, TritonError)

Progress = Callable[[int, int, str], None]
"""Told the number of finished cells, of all cells, and what is going on."""


@dataclass(frozen=True, slots=True)
class Sitting:
    """What a sitting did.

    Attributes:
        machine: where.
        finished: cells that are complete now.
        cells: all cells.
        seconds: how long it took.
        problems: what went wrong while compiling ahead.
    """

    machine: Machine
    finished: int
    cells: int
    seconds: float
    problems: tuple[str, ...]


@dataclass(slots=True)
class _Running:
    """A kernel whose graph is ready to be timed in this cell."""

    variant: Variant
    candidate: Candidate  # owns tensors that the graph reads and writes
    graph: torch.cuda.CUDAGraph
    microseconds: list[float]
    details: dict[str, Any]


def run_sitting(
    path: Path,
    cells: Sequence[Cell],
    names: Sequence[str],
    *,
    seconds: float,
    progress: Progress,
) -> Sitting:
    """Measure the cells that a file lacks on this machine, and add them to it.

    Args:
        path: file of results.
        cells: the table, in order of importance.
        names: kernels, see `variants.variant_of`.
        seconds: no cell is begun later than this after the call.
        progress: is told how far it is.

    Raises:
        ResultsError: if the file cannot be read or written, or a kernel has no such name.
        LaunchError: if the device is no longer usable.
    """
    started = time.monotonic()
    machine = this_machine()
    variants = [variant_of(name) for name in names]
    measured = read_results(path).measured
    missing = {
        cell: [v for v in variants if Key(machine, v.name, v.source, cell) not in measured]
        for cell in cells
    }
    missing = {cell: found for cell, found in missing.items() if found}
    done = len(cells) - len(missing)
    if not missing:
        return Sitting(machine, done, len(cells), time.monotonic() - started, ())
    progress(done, len(cells), "compiling")
    pool = Pool({cell: calls_for(cell) for cell in missing}, "cuda")
    wanted = [v for v in variants if any(v in found for found in missing.values())]
    jobs = [
        job
        for name, variant in zip(names, variants, strict=True)
        for job in _jobs(name, variant, missing)
    ]
    with in_processes(compile_ahead, jobs) as problems:
        for variant in wanted:
            if variant.compiled_here:
                mine = [cell for cell, found in missing.items() if variant in found]
                problems.extend(_launch_once(variant, mine, compiled_here=True))
    progress(done, len(cells), "measuring")
    stopwatch = Stopwatch()
    append_results(path, [Copy(machine, stopwatch.copy_bytes_per_second)])
    for cell, found in missing.items():
        if time.monotonic() - started > seconds:
            break
        append_results(path, measure_cell(machine, pool.call_for(cell), found, stopwatch))
        done += 1
        progress(done, len(cells), str(cell))
    return Sitting(machine, done, len(cells), time.monotonic() - started, tuple(problems))


def compile_ahead(job: tuple[str, tuple[Cell, ...]]) -> str:
    """Run one kernel once in every shape, so that Triton's cache on the disk holds it.

    Args:
        job: name of the kernel and its cells.

    Returns:
        What went wrong, or an empty text.
    """
    name, cells = job
    return "; ".join(_launch_once(variant_of(name), cells, compiled_here=False))


def measure_cell(
    machine: Machine, call: Call, variants: Sequence[Variant], stopwatch: Stopwatch
) -> list[Row]:
    """Check and time kernels in one cell, in turn, several times.

    Raises:
        LaunchError: if a kernel left the device unusable.
    """
    expected = exact(call)
    rows: list[Row] = []
    running: list[_Running] = []
    for variant in variants:
        try:
            running.append(_ready(variant, call, expected, stopwatch))
        except _FAILURES as error:
            _require_usable(variant, call.cell, error)
            key = Key(machine, variant.name, variant.source, call.cell)
            rows.append(Row(key, (), _first_line(error)))
    for number in range(ROUNDS):
        for kernel in running if number % 2 == 0 else reversed(running):
            median, replays = stopwatch.time(kernel.graph, len(call.weights), call.x)
            kernel.microseconds.append(median)
            kernel.details["replays"] = replays
    for kernel in running:
        key = Key(machine, kernel.variant.name, kernel.variant.source, call.cell)
        rows.append(Row(key, tuple(kernel.microseconds), "", kernel.details))
        kernel.graph.reset()
    running.clear()
    # Graphs keep memory of their own; the next cell's need it.
    torch.cuda.empty_cache()
    return rows


def _ready(variant: Variant, call: Call, expected: Tensor, stopwatch: Stopwatch) -> _Running:
    """Check a kernel, then capture the fastest of its candidates."""
    calls = len(call.weights)
    details: dict[str, Any] = {
        "role": variant.role,
        "calls": calls,
        "launch": variant.describe(call.cell),
    }
    best: tuple[float, Candidate, torch.cuda.CUDAGraph] | None = None
    times: dict[str, float] = {}
    failures: dict[str, str] = {}
    candidates = variant.candidates(call)
    for candidate in candidates:
        try:
            _check(candidate, call, expected)
            if variant.name == two_launch.SAME_ORDER:
                details["same_bits_as_two_launch"] = _same_bits_as_two_launch(candidate, call)
            graph = stopwatch.capture(candidate.launch, calls)
        except _FAILURES as error:
            # A tiling that does not fit this GPU leaves the others to be tried.
            if len(candidates) == 1:
                raise
            _require_usable(variant, call.cell, error)
            failures[candidate.name] = _first_line(error)
            continue
        # A single candidate is timed with the others of its cell; no need to know its time now.
        screened = stopwatch.screen(graph, calls, call.x) if len(candidates) > 1 else 0.0
        times[candidate.name] = screened
        if best is None or screened < best[0]:
            if best is not None:
                best[2].reset()
            best = screened, candidate, graph
        else:
            graph.reset()
    if best is None:
        raise LaunchError(f"{variant.name} has no way to run {call.cell}: {failures}")
    if len(candidates) > 1:
        details |= {"candidates": times, "fastest": best[1].name, "failures": failures}
    return _Running(variant, best[1], best[2], [], details)


def _check(candidate: Candidate, call: Call, expected: Tensor) -> None:
    """A kernel that computes something else has no time."""
    call.out.fill_(float("nan"))
    candidate.launch(0)
    error = relative_error(candidate.result(), expected)
    if not error <= _LARGEST_ERROR:
        raise LaunchError(f"wrong result: {error:.3g} of its norm away from the exact one")


def _same_bits_as_two_launch(candidate: Candidate, call: Call) -> bool:
    other = two_launch.shrink(call.x, call.weights[0], call.mapping)
    return torch.equal(candidate.result().view(torch.int32), other.view(torch.int32))


def _require_usable(variant: Variant, cell: Cell, error: Exception) -> None:
    try:
        torch.cuda.synchronize()
    except RuntimeError as broken:
        raise LaunchError(
            f"{variant.name} in {cell} left the device unusable: {error}. "
            "What was measured before is kept; leave this kernel out of --kernels"
        ) from broken


def _jobs(
    name: str, variant: Variant, missing: Mapping[Cell, Sequence[Variant]]
) -> Iterator[tuple[str, tuple[Cell, ...]]]:
    """Yield what one process each should compile of a kernel."""
    cells = [cell for cell, found in missing.items() if variant in found]
    # vLLM's tiles are the same for every rank.
    groups = {cell.rank if variant.role != "vllm" else 0 for cell in cells}
    for group in groups:
        yield name, tuple(cell for cell in cells if group in (0, cell.rank))


def _launch_once(variant: Variant, cells: Sequence[Cell], *, compiled_here: bool) -> list[str]:
    """Start candidates once in every shape; what they cannot do shows again when it is measured."""
    if not cells:
        return []
    problems: dict[str, str] = {}
    pool = Pool(dict.fromkeys(cells, 1), "cuda")
    for cell in cells:
        try:
            candidates = variant.candidates(pool.call_for(cell))
        except _FAILURES as error:
            problems.setdefault(_first_line(error), f"{variant.name}, {cell}: {_first_line(error)}")
            continue
        for candidate in candidates:
            if candidate.compiled_here != compiled_here:
                continue
            try:
                candidate.launch(0)
            except _FAILURES as error:
                where = f"{variant.name} {candidate.name}, {cell}"
                problems.setdefault(_first_line(error), f"{where}: {_first_line(error)}")
    torch.cuda.synchronize()
    return list(problems.values())


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
