"""What is measured of one execution, as plain values: margins, distances, survival and forced replays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fliptrace.errors import InputError
from fliptrace_interventions.fragility.boundaries import (
    DISTANCE_BINS,
    boundary_distances,
    distance_bins,
    summand_scale,
)
from fliptrace_interventions.fragility.reference import ReferenceRun, ShrinkCall
from fliptrace_interventions.fragility.replays import (
    Beginning,
    ForcedReplay,
    beginnings,
    forced_replays,
    surviving_weight,
)
from fliptrace_interventions.fragility.survival import CallSurvival, replay_shrinks

#: How many coordinates are named: those that cross most often.
_NAMED = 12


@dataclass(frozen=True, slots=True)
class FragilityOptions:
    """How much is spent on one execution.

    Attributes:
        replays: forced replays, 0 or more.
        executions: of every shrink under its recorded operands; 0 leaves that out, and replays then begin at the
            prompt.
        reach: largest margin, in ULP of the best logit, of a step that is looked at.
    """

    replays: int = 6
    executions: int = 32
    reach: float = 4.0

    def check(self) -> None:
        """Refuse what means nothing.

        Raises:
            InputError: which option.
        """
        if not 0 <= self.replays <= MOST_REPLAYS:
            raise InputError(f"replays must be 0 to {MOST_REPLAYS}; got {self.replays}")
        if self.executions < 0:
            raise InputError(f"executions of a shrink must be 0 or more; got {self.executions}")
        if not self.reach >= 0:
            raise InputError(f"the reach must be 0 ULP or more; got {self.reach}")


#: Schedule seeds of one prompt: the reference, its replays, its single shrinks, and from OBSERVED_SEED repetitions.
MOST_REPLAYS, SHRINK_SEED, OBSERVED_SEED = 399, 400, 500


def measure(
    engine: Any, run: ReferenceRun, *, reduction: str, seed: int, options: FragilityOptions
) -> dict[str, Any]:
    """Measure one execution.

    Args:
        engine: where it ran.
        run: the execution, with its shrinks unless ``options.executions`` is 0.
        reduction: how fresh executions sum.
        seed: the reference's schedule; replays take the next ones, single shrinks seed + SHRINK_SEED.
        options: how much.

    Returns:
        JSON values: ``margins`` (ULP, per step), ``near`` (steps in reach), ``top_values``, ``top_ids`` and ``ulps`` of
        those steps, ``weight`` (the share of executions that replays stand for), ``survival`` (None without it),
        ``replays`` and ``forwards``.
    """
    near = run.near_steps(options.reach)
    last = near[-1] if near else -1
    survival: list[CallSurvival] = []
    if options.executions and run.calls:
        survival = replay_shrinks(
            engine,
            [call for call in run.calls if call.step <= last],
            reduction=reduction,
            seed=seed + SHRINK_SEED,
            executions=options.executions,
        )
    begin = [Beginning()] * options.replays
    weight = 1.0
    if survival:
        begin = beginnings(survival, options.replays, np.random.default_rng(seed))
        weight = surviving_weight(survival)
    replays = forced_replays(
        engine, run, begin, reduction=reduction, seed=seed + 1, reach=options.reach
    )
    return {
        "margins": [round(step.margin, 4) for step in run.steps],
        "near": near,
        "top_values": [list(run.steps[step].values) for step in near],
        "top_ids": [list(run.steps[step].ids) for step in near],
        "ulps": [run.steps[step].ulp for step in near],
        "weight": weight if near else 0.0,
        "survival": _survival_values(engine, run, survival, last) if survival else None,
        "replays": [_replay_values(run, replay) for replay in replays],
        "forwards": len(run.steps) + sum(replay.forwards for replay in replays),
    }


def _replay_values(run: ReferenceRun, replay: ForcedReplay) -> dict[str, Any]:
    return {
        "seed": replay.seed,
        "first_step": replay.first_step,
        "first_site": None if replay.first_call is None else run.calls[replay.first_call].site,
        "flips": list(replay.flips),
        "values": [list(values) for values in replay.values],
        "forwards": replay.forwards,
    }


def _survival_values(
    engine: Any, run: ReferenceRun, survival: Sequence[CallSurvival], last: int
) -> dict[str, Any]:
    """Sum up calls per step and coordinates per distance, and name those that cross most often."""
    equal, expected = np.ones(last + 1), np.zeros(last + 1)
    counted = torch.zeros(DISTANCE_BINS, dtype=torch.float64)
    crossing = torch.zeros_like(counted)
    named: list[tuple[float, dict[str, Any]]] = []
    coordinates = 0
    for step, group in groupby(survival, key=lambda each: each.call.step):
        together = list(group)
        values, distances = _distances(engine, [each.call for each in together])
        share = torch.cat([each.hits.flatten() for each in together]).double()
        share /= together[0].executions
        equal[step] = math.prod(1 - each.rate for each in together)
        expected[step] = float(share.sum())
        bins = distance_bins(distances)
        counted += torch.bincount(bins, minlength=DISTANCE_BINS)
        crossing += torch.bincount(bins, weights=share, minlength=DISTANCE_BINS)
        begins = np.cumsum([0] + [each.hits.numel() for each in together])
        coordinates += int(begins[-1])
        for number in share.nonzero().flatten().tolist():
            which = int(np.searchsorted(begins, number, side="right")) - 1
            call = together[which].call
            row, rank = divmod(number - int(begins[which]), call.output.shape[1])
            place = {
                "step": step,
                "site": engine.sites[call.site].path,
                "position": row if step == 0 else len(run.prompt_ids) + step - 1,
                "rank": rank,
                "value": float(values[number]),
                "distance": float(distances[number]),
                "share": float(share[number]),
            }
            named.append((float(share[number]), place))
    named.sort(key=lambda pair: -pair[0])
    return {
        "executions": survival[0].executions,
        "calls": len(survival),
        "coordinates": coordinates,
        "expected": [round(float(value), 6) for value in expected],
        "equal": [float(value) for value in np.cumprod(equal)],
        "bins": [int(value) for value in counted.tolist()],
        "bins_crossing": [round(value, 6) for value in crossing.tolist()],
        "most_crossing": [place for _, place in named[:_NAMED]],
    }


def _distances(engine: Any, calls: Sequence[ShrinkCall]) -> tuple[Tensor, Tensor]:
    """Return all coordinates of a step's calls and their distances to a boundary, on the host, in one transfer each."""
    values = torch.cat([call.output.flatten() for call in calls])
    scales = [summand_scale(call.operand, engine.shrink_weight(call.site)) for call in calls]
    scale = torch.cat([each.flatten() for each in scales])
    return values.cpu(), boundary_distances(values, engine.dtype, scale=scale).cpu()
