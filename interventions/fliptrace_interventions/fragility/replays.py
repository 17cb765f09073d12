"""Forced replays: fresh executions that are fed the reference's tokens, so that every step gives a draw of its choice.

A replay takes the same forwards as a free execution, one prefill and then one row at a time, since one pass over all
tokens would be other launches with other roundings. Up to its first other choice it is a free execution; after that it
still draws what a later step chooses after the reference's tokens. It ends after the last step whose margin is in
reach, and where no step is, there is none.

Where replays of single shrinks say how probable it is that an execution still equals the reference bit by bit
(survival), that share of executions needs no forward at all: it cannot flip. Replays are then drawn from the rest, by
the first call that survives, and begin at its step from the reference's cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fliptrace.capture.decoding import choose
from fliptrace.capture.engine import CacheLayer
from fliptrace.pair.recording import set_reduction
from fliptrace_interventions.fragility.reference import ReferenceRun
from fliptrace_interventions.fragility.survival import CallSurvival


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a replay leaves the reference.

    Attributes:
        call: number of the first call, in execution order, whose difference survives; None for a replay from the
            prompt of which nothing is known beforehand.
        output: what that call hands over.
    """

    call: int | None = None
    output: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ForcedReplay:
    """One replay.

    Attributes:
        seed: its schedule, where atomics are simulated.
        first_step: where it began; before it everything equals the reference.
        first_call: number of the first call that survives, None where that is not known.
        flips: steps at which it chose another token than the reference.
        values: logits of the reference's TOP ids at each step in reach, as FP32.
        forwards: how many forwards it took.
    """

    seed: int
    first_step: int
    first_call: int | None
    flips: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    forwards: int


def surviving_weight(survival: Sequence[CallSurvival]) -> float:
    """Return the probability that some call survives: 1 less that of an execution equal to the reference."""
    return 1.0 - float(np.prod([1.0 - each.rate for each in survival]))


def beginnings(
    survival: Sequence[CallSurvival], count: int, generator: np.random.Generator
) -> list[Beginning]:
    """Draw where replays leave the reference, given that they do.

    The chance that a call is the first one that survives is its own rate times that of no survival before. Draws are
    systematic: one from each of ``count`` equal parts of the distribution, which spreads them over its modes.

    Args:
        survival: every call in execution order up to the last step that counts.
        count: how many.
        generator: where chance comes from.

    Returns:
        The beginnings, none where no call ever survived.
    """
    rates = np.array([each.rate for each in survival])
    first = rates * np.concatenate(([1.0], np.cumprod(1.0 - rates)[:-1]))
    if not first.sum() > 0:
        return []
    places = (np.arange(count) + generator.random(count)) / count
    bounds = np.cumsum(first) / first.sum()
    calls = np.minimum(np.searchsorted(bounds, places, side="right"), np.flatnonzero(first)[-1])
    return [
        Beginning(
            int(call), survival[call].outputs[generator.integers(len(survival[call].outputs))]
        )
        for call in calls
    ]


def forced_replays(
    engine: Any,
    run: ReferenceRun,
    begin: Sequence[Beginning],
    *,
    reduction: str,
    seed: int,
    reach: float,
) -> list[ForcedReplay]:
    """Run replays.

    Args:
        engine: where the reference ran.
        run: the reference.
        begin: one beginning per replay.
        reduction: a name.
        seed: the first replay's schedule; the next ones follow.
        reach: largest margin, in ULP, of a step that is looked at.

    Returns:
        The replays; none where no step is in reach.
    """
    near = run.near_steps(reach)
    if not near:
        return []
    return [
        _replay(engine, run, beginning, near, reduction, seed + number)
        for number, beginning in enumerate(begin)
    ]


def _replay(
    engine: Any,
    run: ReferenceRun,
    beginning: Beginning,
    near: Sequence[int],
    reduction: str,
    seed: int,
) -> ForcedReplay:
    set_reduction(engine, reduction, seed)
    sites, call = len(engine.sites), beginning.call
    first = run.calls[call].step if call is not None and run.restarts else 0
    step = first

    def until_the_call(site: int, _: Tensor, z: Tensor) -> Tensor:
        number = step * sites + site
        if call is None or number > call:
            return z
        if number == call and beginning.output is not None:
            return beginning.output
        return run.calls[number].output

    token: int | None = None
    if first:
        engine.write_cache(_before(run, first), first)
        token = run.token_ids[first - 1]
    else:
        engine.start(run.prompt_ids)
    flips: list[int] = []
    values: dict[int, tuple[float, ...]] = {
        number: run.steps[number].values for number in near if number < first
    }
    intercepting = contextlib.nullcontext() if call is None else engine.intercepted(until_the_call)
    with intercepting:
        for step in range(first, near[-1] + 1):
            logits = engine.step(token)
            if choose(logits, step).token != run.steps[step].token:
                flips.append(step)
            if step in near:
                ids = torch.tensor(run.steps[step].ids, device=logits.device)
                values[step] = tuple(logits.float()[ids].tolist())
            token = run.token_ids[step]
    return ForcedReplay(
        seed,
        first,
        call,
        tuple(flips),
        tuple(values[number] for number in near),
        near[-1] + 1 - first,
    )


def _before(run: ReferenceRun, step: int) -> list[CacheLayer]:
    """Return the reference's cache before a step."""
    length = len(run.prompt_ids) + step - 1
    return [
        CacheLayer(
            layer.layer,
            layer.values[:, :length].clone(),
            0,
            layer.window,
            layer.shares_with,
        )
        for layer in run.cache
    ]
