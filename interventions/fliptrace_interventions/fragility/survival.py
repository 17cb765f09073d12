"""Run every shrink of an execution again, alone, under its recorded operands: how often does each coordinate cross?

Until the first difference that survives rounding, an execution's operands are those of the reference bit by bit. So
these replays give exact draws of each call's outcome up to there, and with them the probability that an execution is
still equal to the reference before a step. One call is one unit: its coordinates may share arrivals (on a GPU a split
adds a whole tile), different calls are taken for independent. Orders come from where the reduction really takes them:
on a GPU the kernel runs again, with its own atomics, launched as it was; on a CPU the simulated schedule draws them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fliptrace.numerics import integer_view, round_to
from fliptrace.studies.shrink_replay import Call, Forward, executor
from fliptrace_interventions.fragility.reference import ShrinkCall
from fliptrace_kernels import ArrivalSchedule, lora_shrink, parse_reduction

#: Rows of one stacked replay on a CPU.
_STACKED_ROWS = 4096


@dataclass(frozen=True, slots=True)
class CallSurvival:
    """What replays of one call gave.

    Attributes:
        call: what was replayed.
        executions: how often.
        hits: int64 [T, R]: in how many replays each coordinate rounded to another value than the recorded one.
        outputs: the outputs [T, R] of those replays in which some coordinate did.
    """

    call: ShrinkCall
    executions: int
    hits: Tensor
    outputs: tuple[Tensor, ...]

    @property
    def rate(self) -> float:
        """The share of replays with a surviving difference."""
        return len(self.outputs) / self.executions


def replay_shrinks(
    engine: Any,
    calls: Sequence[ShrinkCall],
    *,
    reduction: str,
    seed: int,
    executions: int,
) -> list[CallSurvival]:
    """Run calls again and again.

    Args:
        engine: whose weights they are; every site must be a launch of its own, as with transformers.
        calls: in execution order; a call's place names it to the schedules.
        reduction: a name.
        seed: of the schedules, where atomics are simulated.
        executions: of each call.

    Returns:
        One result per call.
    """
    on_host = engine.device.type == "cpu"
    outputs = _on_host if on_host else _on_device
    weights = {
        site: engine.shrink_weight(site).contiguous() for site in {call.site for call in calls}
    }
    found: list[CallSurvival] = []
    for together, made in outputs(calls, weights, reduction, seed, executions):
        found += _survivals(together, made, engine.dtype)
    return found


def _survivals(
    calls: Sequence[ShrinkCall], made: Tensor, dtype: torch.dtype
) -> Iterator[CallSurvival]:
    """Compare replays of calls, [N, all their coordinates], with the recorded outputs.

    One transfer for all of them: where many processes share a GPU, each wait for it is long.
    """
    executions = made.shape[0]
    recorded = torch.cat([call.output.flatten() for call in calls])
    other = integer_view(round_to(made, dtype)) != integer_view(round_to(recorded, dtype))
    sizes = [call.output.numel() for call in calls]
    pieces = zip(calls, made.split(sizes, dim=1), other.cpu().split(sizes, dim=1), strict=True)
    for call, outputs, differs in pieces:
        crossed = differs.any(1).nonzero().flatten().tolist()
        yield CallSurvival(
            call,
            executions,
            differs.sum(0).view(call.output.shape),
            tuple(outputs[number].view(call.output.shape).clone() for number in crossed),
        )


def _on_host(
    calls: Sequence[ShrinkCall],
    weights: dict[int, Tensor],
    reduction: str,
    seed: int,
    executions: int,
) -> Iterator[tuple[list[ShrinkCall], Tensor]]:
    """Stack a call's replays as rows: a row's sum does not depend on other rows, and each draws orders of its own."""
    named = parse_reduction(reduction)
    for number, call in enumerate(calls):
        rows = call.operand.shape[0]
        pieces = []
        done = 0
        while done < executions:
            count = min(executions - done, max(1, _STACKED_ROWS // rows))
            schedule = ArrivalSchedule(seed + done) if named.needs_arrival_order else None
            made = lora_shrink(
                call.operand.repeat(count, 1),
                (weights[call.site],),
                reduction=named,
                schedule=schedule,
                call_key=number,
            )[0]
            pieces.append(made.view(count, -1))
            done += count
        yield [call], torch.cat(pieces)


def _on_device(
    calls: Sequence[ShrinkCall],
    weights: dict[int, Tensor],
    reduction: str,
    seed: int,
    executions: int,
) -> Iterator[tuple[list[ShrinkCall], Tensor]]:
    """Capture the calls of a step in one graph and run it again and again, each call with its own launch."""
    for step, group in groupby(calls, key=lambda call: call.step):
        together = list(group)
        forward = Forward(
            f"step {step}", [Call(call.operand, [weights[call.site]]) for call in together]
        )
        sizes = [call.output.numel() for call in together]
        out = torch.empty(sum(sizes), device=together[0].operand.device)
        made = torch.empty(executions, sum(sizes), device=out.device)
        run, graphs = executor(forward, reduction, out, seed)
        for execution in range(executions):
            run(execution)
            made[execution] = out
        yield together, made
        for graph in graphs:
            graph.reset()
