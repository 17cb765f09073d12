"""Hold estimates against free repetitions: scores, reliability, and what the same certainty costs by repeating.

A repetition has a schedule of its own that no replay has seen. Repetitions of a prompt share its reference, so
everything that is averaged over them gets its interval from a bootstrap of whole prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fliptrace.studies.repeat import first_divergence
from fliptrace.studies.statistics import (
    Interval,
    Share,
    clustered_share,
    exact_interval,
    ratio_interval,
)
from fliptrace_interventions.fragility.estimation import PromptEstimate

#: Where predictions are cut for the reliability of prompts and of steps.
PROMPT_BINS = (0.0, 0.02, 0.05, 0.15, 0.35, 0.65, 1.0)
STEP_BINS = (0.0, 0.002, 0.01, 0.05, 0.15, 0.35, 0.65, 1.0)
_CLIP = 1e-3
_MOST_REPETITIONS = 5_000
#: Narrower than this no interval is asked of repeating: where nothing is in reach, an estimate has no width.
_LEAST_WIDTH = 0.01


@dataclass(frozen=True, slots=True)
class Observed:
    """Free repetitions of a prompt against its reference.

    Attributes:
        estimate: of the prompt.
        divergences: per repetition, the first step with another token; None without one.
    """

    estimate: PromptEstimate
    divergences: tuple[int | None, ...]

    @property
    def changed(self) -> int:
        """How many repetitions had other tokens."""
        return sum(step is not None for step in self.divergences)


@dataclass(frozen=True, slots=True)
class Score:
    """A mean score over comparisons; less is better.

    Attributes:
        value: the mean; interval: 95 %, over prompts; None with a single prompt.
    """

    value: float
    interval: Interval | None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "value": self.value,
            "interval": None if self.interval is None else [self.interval.low, self.interval.high],
        }


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Predictions that lie together, and what came.

    Attributes:
        low: the bin's edge; high: the other.
        count: prompts, or steps.
        predicted: mean prediction over comparisons.
        observed: the share that flipped, of so many comparisons.
    """

    low: float
    high: float
    count: int
    predicted: float
    observed: Share


def observe(
    estimates: Sequence[PromptEstimate], rows: Sequence[Mapping[str, Any]]
) -> list[Observed]:
    """Compare repetitions with the reference of their prompt and reduction.

    Args:
        estimates: of prompts.
        rows: of the study, estimates and repetitions.
    """
    references = {
        (row["prompt"], row["reduction"]): row["token_ids"]
        for row in rows
        if row["repetition"] is None
    }
    divergences: dict[tuple[str, str], list[int | None]] = {}
    for row in rows:
        key = row["prompt"], row["reduction"]
        if row["repetition"] is not None and key in references:
            divergences.setdefault(key, []).append(
                first_divergence(references[key], row["token_ids"])
            )
    found = []
    for estimate in estimates:
        of_prompt = divergences.get((estimate.prompt, estimate.reduction))
        if of_prompt:
            found.append(Observed(estimate, tuple(of_prompt)))
    return found


def score(
    observed: Sequence[Observed], predictions: Sequence[float], *, logarithmic: bool = False
) -> Score:
    """Score predictions over all comparisons.

    Args:
        observed: prompts with repetitions.
        predictions: one per prompt.
        logarithmic: the negative log-likelihood per comparison, predictions kept within 0.001 and 0.999; else Brier.
    """
    sums, sizes = [], []
    for each, predicted in zip(observed, predictions, strict=True):
        hits, total = each.changed, len(each.divergences)
        if logarithmic:
            bounded = min(max(predicted, _CLIP), 1 - _CLIP)
            sums.append(-hits * math.log(bounded) - (total - hits) * math.log(1 - bounded))
        else:
            sums.append(hits * (1 - predicted) ** 2 + (total - hits) * predicted**2)
        sizes.append(float(total))
    interval = ratio_interval(sums, sizes) if len(sums) > 1 else None
    return Score(sum(sums) / sum(sizes), interval)


def rate_of_others(observed: Sequence[Observed]) -> list[float]:
    """Predict each prompt by the share that changed among the repetitions of all other prompts."""
    hits = sum(each.changed for each in observed)
    total = sum(len(each.divergences) for each in observed)
    return [(hits - each.changed + 0.5) / (total - len(each.divergences) + 1) for each in observed]


def halves(observed: Sequence[Observed]) -> tuple[list[float], list[Observed]]:
    """Predict by the first half of each prompt's repetitions (k + 1/2 of n + 1), to be scored on the second."""
    predictions, rest = [], []
    for each in observed:
        middle = len(each.divergences) // 2
        first = each.divergences[:middle]
        predictions.append((sum(step is not None for step in first) + 0.5) / (middle + 1))
        rest.append(Observed(each.estimate, each.divergences[middle:]))
    return predictions, rest


def prompt_reliability(observed: Sequence[Observed]) -> list[ReliabilityBin]:
    """Sort prompts by their prediction."""
    return _bins(
        [
            (each.estimate.probability, each.changed, len(each.divergences), number)
            for number, each in enumerate(observed)
        ],
        PROMPT_BINS,
    )


def step_reliability(observed: Sequence[Observed]) -> list[ReliabilityBin]:
    """Sort steps in reach by their prediction; a repetition counts up to the step at which it flips."""
    cases = []
    for number, each in enumerate(observed):
        for step in each.estimate.steps:
            reached = [first for first in each.divergences if first is None or first >= step.step]
            if reached:
                hits = sum(first == step.step for first in reached)
                cases.append((step.probability, hits, len(reached), number))
    return _bins(cases, STEP_BINS)


@dataclass(frozen=True, slots=True)
class Reliability:
    """Predictions and what came, of prompts and of steps in reach."""

    prompts: Sequence[ReliabilityBin]
    steps: Sequence[ReliabilityBin]


def reliability_of(observed: Sequence[Observed]) -> Reliability:
    """Sort prompts and steps by their predictions."""
    return Reliability(prompt_reliability(observed), step_reliability(observed))


def _bins(
    cases: Sequence[tuple[float, int, int, int]], edges: Sequence[float]
) -> list[ReliabilityBin]:
    found = []
    for low, high in pairwise(edges):
        within = [case for case in cases if low <= case[0] < high or (high == edges[-1] == case[0])]
        if not within:
            continue
        hits: dict[int, int] = {}
        trials: dict[int, int] = {}
        for _, changed, total, cluster in within:
            hits[cluster] = hits.get(cluster, 0) + changed
            trials[cluster] = trials.get(cluster, 0) + total
        compared = sum(trials.values())
        predicted = sum(case[0] * case[2] for case in within) / compared
        share = clustered_share(list(hits.values()), list(trials.values()))
        found.append(ReliabilityBin(low, high, len(within), predicted, share))
    return found


def plain_bins(bins: Sequence[ReliabilityBin]) -> list[dict[str, float]]:
    """Return bins as fliptrace.views.static.reliability_picture takes them; one prompt's share has no interval."""
    plain = []
    for each in bins:
        value, interval = each.observed.value or 0.0, each.observed.interval
        plain.append(
            {
                "predicted": each.predicted,
                "observed": value,
                "low": value if interval is None else interval.low,
                "high": value if interval is None else interval.high,
                "comparisons": float(each.observed.trials),
            }
        )
    return plain


def repetitions_for(estimate: PromptEstimate) -> int | None:
    """Return how many repetitions give an exact interval as narrow as the estimate's, if they flip as it says.

    Returns:
        Repetitions beyond the reference, at most 5,000; None where the estimate has no width to compare.
    """
    width = estimate.high - estimate.low
    if width < _LEAST_WIDTH:
        return None
    low, high = 1, _MOST_REPETITIONS
    while low < high:
        middle = (low + high) // 2
        found = exact_interval(round(estimate.probability * middle), middle)
        if found.high - found.low <= width:
            high = middle
        else:
            low = middle + 1
    return low


@dataclass(frozen=True, slots=True)
class Cost:
    """What estimates cost beside repetitions of the same certainty.

    Attributes:
        prompts: with an interval to compare.
        forwards: of their references and replays.
        repeat_forwards: of repetitions with intervals as narrow.
        ratio: the second by the first; interval: over prompts.
        widths: mean width of the intervals.
        repetitions: mean number of repetitions that it takes.
    """

    prompts: int
    forwards: int
    repeat_forwards: int
    ratio: float
    interval: Interval | None
    widths: float
    repetitions: float


def cost(estimates: Sequence[PromptEstimate]) -> Cost | None:
    """Compare forwards; None where no estimate has a width."""
    compared = [
        (each, needed)
        for each in estimates
        if each.replays and (needed := repetitions_for(each)) is not None
    ]
    if not compared:
        return None
    spent = [each.forwards for each, _ in compared]
    repeat = [(needed + 1) * each.length for each, needed in compared]
    return Cost(
        prompts=len(compared),
        forwards=sum(spent),
        repeat_forwards=sum(repeat),
        ratio=sum(repeat) / sum(spent),
        interval=ratio_interval(repeat, spent) if len(compared) > 1 else None,
        widths=float(np.mean([each.high - each.low for each, _ in compared])),
        repetitions=float(np.mean([needed for _, needed in compared])),
    )
