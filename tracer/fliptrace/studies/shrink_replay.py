"""Replay real shrink inputs: capture the calls of a forward, execute each many times, count what differs.

Protocol: the paper, section 5.2. Operands and weights of every shrink are taken under ``unsplit``; projections that
share their input are one call, as in vLLM. On a GPU a forward's calls are one CUDA graph; on a CPU orders of arrival of
``atomic`` come from seeds. The comparison itself never waits for the device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fliptrace.errors import RecordingError
from fliptrace.numerics import integer_view, round_to
from fliptrace_kernels import ArrivalSchedule, lora_shrink, parse_reduction

PHASES = ("prefill", "first decode step")


@dataclass
class Call:
    """One shrink as a kernel gets it.

    Attributes:
        x: operand rows, [M, K].
        weights: one A [R, K] per slice.
        mapping: adapter of each row, int32 [M]; None for a single adapter.
        scale: applied by the shrink; 1 where it is applied after expand.
    """

    x: Tensor
    weights: list[Tensor]
    mapping: Tensor | None = None
    scale: float = 1.0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the outputs, [slices, M, R]."""
        return len(self.weights), self.x.shape[0], self.weights[0].shape[0]


@dataclass
class Forward:
    """All shrinks of one forward."""

    phase: str
    calls: list[Call] = field(default_factory=list)


class Collector:
    """An observer that keeps the operands of every shrink, and which A they meet."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """``weights`` holds the A of every site."""
        self.forwards: list[Forward] = []
        self._weights = weights
        self._address = 0

    def begin_step(self, step: int, first_position: int, token_ids: Sequence[int]) -> None:
        """Start a forward."""
        self.forwards.append(Forward(PHASES[step]))
        self._address = 0

    def shrink(self, site: int, operand: Tensor, output: Tensor, launch: str) -> None:
        """Keep a copy of the operand, or add a slice to the call before if it is the same."""
        rows = operand.reshape(-1, operand.shape[-1])
        calls = self.forwards[-1].calls
        weight = self._weights[site]
        if (
            calls
            and rows.data_ptr() == self._address
            and calls[-1].weights[0].shape == weight.shape
            and torch.equal(calls[-1].x, rows)
        ):
            calls[-1].weights.append(weight)
            return
        self._address = rows.data_ptr()
        calls.append(Call(rows.clone(), [weight]))

    def projection(self, site: int, output: Tensor) -> None:
        """Nothing to keep."""

    def cache_rows(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Nothing to keep."""

    def operation(self, key: str, is_module: bool, inputs: Tensor, outputs: Tensor) -> None:
        """Nothing to keep."""

    def end_step(self, logits: Tensor) -> None:
        """Nothing to keep."""


def collect(engine: Any, prompts: Sequence[Sequence[int]]) -> list[Forward]:
    """Run prefill and first decode step of every prompt under ``unsplit`` and keep their shrinks."""
    engine.set_reduction("unsplit")
    weights = [engine.shrink_weight(site).contiguous() for site in range(len(engine.sites))]
    collector = Collector(weights)
    with engine.observed(collector):
        for ids in prompts:
            engine.start(ids)
            token = int(engine.step().argmax())
            engine.step(token)
    return collector.forwards


@dataclass
class Tally:
    """What replays of one reduction in one phase gave.

    Attributes:
        reduction: its identity.
        phase: of the forwards whose calls were replayed.
        calls: different calls.
        comparisons: executions compared with the first of their call.
        comparisons_differing: how many had another bit.
        elements: FP32 outputs compared.
        elements_differing: how many had another bit.
        elements_surviving: how many were still different after rounding to BF16.
        mean_difference: mean of |difference| over all compared elements.
        largest_difference: largest |difference|.
    """

    reduction: str
    phase: str
    calls: int = 0
    comparisons: int = 0
    comparisons_differing: int = 0
    elements: int = 0
    elements_differing: int = 0
    elements_surviving: int = 0
    mean_difference: float = 0.0
    largest_difference: float = 0.0


class Comparison:
    """Compares outputs of a forward's calls, in one buffer, with those of the first execution."""

    def __init__(self, first: Tensor, ends: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
        """``first`` [N] FP32; ``ends`` int64, where each call's outputs end; ``dtype`` to which they are rounded."""
        self._first = first.clone()
        self._dtype = dtype
        self._rounded = integer_view(round_to(first, dtype)).clone()
        self._ends = ends
        counts: dict[str, Any] = {"dtype": torch.int64, "device": first.device}
        self.calls = torch.zeros((), **counts)
        self.elements = torch.zeros((), **counts)
        self.surviving = torch.zeros((), **counts)
        self.total = torch.zeros((), dtype=torch.float64, device=first.device)
        self.largest = torch.zeros((), dtype=torch.float32, device=first.device)

    def add(self, out: Tensor) -> None:
        """Count where another execution differs; nothing waits for the device."""
        unequal = out.view(torch.int32) != self._first.view(torch.int32)
        seen = torch.cumsum(unequal, 0, dtype=torch.int64)[self._ends - 1]
        self.calls += (seen > torch.nn.functional.pad(seen[:-1], (1, 0))).sum()
        self.elements += seen[-1]
        self.surviving += (integer_view(round_to(out, self._dtype)) != self._rounded).sum()
        difference = (out - self._first).abs()
        self.total += difference.sum(dtype=torch.float64)
        self.largest = torch.maximum(self.largest, difference.max())


def executor(
    forward: Forward, reduction: str, out: Tensor, seed: int = 0
) -> tuple[Callable[[int], None], list[Any]]:
    """Return what executes a forward's calls into ``out`` [N], given the number of the execution."""
    named = parse_reduction(reduction)
    sizes = [math.prod(call.shape) for call in forward.calls]
    regions = [
        region.view(call.shape)
        for call, region in zip(forward.calls, out.split(sizes), strict=True)
    ]

    def run(execution: int) -> None:
        for number, (call, region) in enumerate(zip(forward.calls, regions, strict=True)):
            schedule = None
            if named.needs_arrival_order and out.device.type == "cpu":
                schedule = ArrivalSchedule(seed + execution)
            lora_shrink(
                call.x,
                call.weights,
                call.mapping,
                reduction=named,
                scale=call.scale,
                schedule=schedule,
                call_key=number,
                out=region,
            )

    if out.device.type == "cpu":
        return run, []
    run(0)  # compiles
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            run(0)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    return lambda _: graph.replay(), [graph]


def replay_forward(
    forward: Forward,
    reduction: str,
    executions: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Tally:
    """Execute every call of a forward many times and compare each execution with the first.

    Args:
        forward: its calls.
        reduction: a name.
        executions: how many, at least 2; the first is the reference.
        dtype: the type to which outputs are rounded, for what survives.
        seed: where schedule seeds begin, on a CPU.

    Returns:
        The tally; its mean_difference is over all compared elements.

    Raises:
        RecordingError: outputs were left unwritten, or the model's inputs are NaN.
    """
    identity = str(parse_reduction(reduction))
    sizes = torch.tensor([math.prod(call.shape) for call in forward.calls])
    device = forward.calls[0].x.device
    out = torch.full((int(sizes.sum()),), float("nan"), device=device)
    run, keeps = executor(forward, reduction, out, seed)
    out.fill_(float("nan"))
    run(0)
    if bool(out.isnan().any()):
        raise RecordingError(
            f"{identity} left outputs unwritten, or the model's inputs are NaN; check the model's dtype"
        )
    comparison = Comparison(out, sizes.cumsum(0).to(device), dtype)
    for execution in range(1, executions):
        out.fill_(float("nan"))
        run(execution)
        comparison.add(out)
    elements = int(sizes.sum()) * (executions - 1)
    tally = Tally(
        identity,
        forward.phase,
        calls=len(sizes),
        comparisons=len(sizes) * (executions - 1),
        comparisons_differing=int(comparison.calls),
        elements=elements,
        elements_differing=int(comparison.elements),
        elements_surviving=int(comparison.surviving),
        mean_difference=float(comparison.total) / max(1, elements),
        largest_difference=float(comparison.largest),
    )
    for graph in keeps:
        graph.reset()
    return tally


def replay(forwards: Sequence[Forward], reduction: str, executions: int) -> list[Tally]:
    """Execute every call of every forward many times; one tally per phase."""
    tallies = [replay_forward(forward, reduction, executions) for forward in forwards]
    identity = str(parse_reduction(reduction))
    return [
        merged(identity, phase, [tally for tally in tallies if tally.phase == phase])
        for phase in PHASES
    ]


def merged(reduction: str, phase: str, tallies: Sequence[Tally]) -> Tally:
    """Add tallies up; the mean is that of all their elements."""
    counts = {
        name: sum(getattr(tally, name) for tally in tallies)
        for name in (
            "calls",
            "comparisons",
            "comparisons_differing",
            "elements",
            "elements_differing",
            "elements_surviving",
        )
    }
    total = math.fsum(tally.mean_difference * tally.elements for tally in tallies)
    return Tally(
        reduction,
        phase,
        **counts,
        mean_difference=total / max(1, counts["elements"]),
        largest_difference=max((tally.largest_difference for tally in tallies), default=0.0),
    )


def line_of(tally: Tally) -> str:
    """Say in one line what a tally found."""
    share = 100 * tally.comparisons_differing / max(1, tally.comparisons)
    elements = 100 * tally.elements_differing / max(1, tally.elements)
    surviving = tally.elements_surviving / max(1, tally.elements_differing)
    return (
        f"{tally.reduction}, {tally.phase}: {share:.3f} % of {tally.comparisons} comparisons differ "
        f"({tally.calls} calls), {elements:.3f} % of {tally.elements} elements; mean |difference| "
        f"{tally.mean_difference:.3g}, largest {tally.largest_difference:.3g}; {surviving:.3g} of "
        "differing elements survive rounding to BF16"
    )
