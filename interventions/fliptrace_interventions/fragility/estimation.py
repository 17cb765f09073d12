"""From margins and few replays to flip probabilities with intervals; arithmetic on rows, without a model.

Replays are draws of what an execution does, given that some shrink leaves the reference (the row's weight says how
probable that is). Counting flips among a handful of them is rough, so each count is drawn toward what the margins say:
differences of logits, in ULP, are pooled over all prompts and put on a step's two best logits; the share that changes
the choice is the step's expectation, and a prompt's is that of any step in reach. How much that expectation is worth,
and how far off it is, is fitted to the replays of all prompts (empirical Bayes, beta-binomial), never to repetitions,
which the result is held against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fliptrace.studies.statistics import exact_interval

if TYPE_CHECKING:
    from fliptrace_interventions.fragility.reference import ReferenceRun

Floats = NDArray[np.float64]

#: Pooled differences that are put on each step; a fixed draw where there are more.
_POOL = 4_000
_DRAWS = 4_000
_SEED = 20_261_130
_LEAST = 1e-4
#: Below so many prompts with replays nothing is fitted.
_LEAST_PROMPTS = 10
_OFFSETS = tuple(np.arange(-4.0, 4.01, 0.5))
_SLOPES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
_STRENGTHS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class Prior:
    """How an expectation from margins becomes a beta prior.

    Attributes:
        offset: added to its log-odds.
        slope: by which its log-odds are multiplied first.
        strength: how many replays the prior is worth.
        fitted: to how many counts; 0 where there were too few.
    """

    offset: float = 0.0
    slope: float = 1.0
    strength: float = 1.0
    fitted: int = 0

    def mean(self, expectation: float) -> float:
        """Return the prior's mean for an expectation."""
        bounded = min(max(expectation, _LEAST), 1 - _LEAST)
        odds = self.offset + self.slope * math.log(bounded / (1 - bounded))
        return min(max(1 / (1 + math.exp(-odds)), _LEAST), 1 - _LEAST)


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """How probably a step in reach chooses another token, after the reference's tokens.

    Attributes:
        step: its number; margin: in ULP.
        expectation: from margins and pooled differences alone.
        flips: replays that chose another token here.
        probability: the estimate.
        low: lower end of its 95 % interval; high: upper end.
    """

    step: int
    margin: float
    expectation: float
    flips: int
    probability: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PromptEstimate:
    """How probably a fresh execution of a prompt has other tokens than the reference.

    Attributes:
        prompt: its name.
        reduction: its identity.
        weight: the share of executions that leave the reference at all.
        expectation: from margins and pooled differences alone, given that one does.
        replays: how many ran; flipped: in how many some token was another.
        probability: the estimate.
        low: lower end of its 95 % interval; high: upper end.
        steps: those in reach.
        forwards: of the reference and its replays together; length: steps of the reference.
    """

    prompt: str
    reduction: str
    weight: float
    expectation: float
    replays: int
    flipped: int
    probability: float
    low: float
    high: float
    steps: tuple[StepEstimate, ...]
    forwards: int
    length: int


def estimate_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[list[PromptEstimate], Prior, Prior]:
    """Estimate every prompt of one reduction.

    Args:
        rows: rows of estimates, as the study's items or measure make them.

    Returns:
        The estimates in the order of the rows, the prior of prompts and that of steps.
    """
    pool = pooled_differences(rows)
    generator = np.random.default_rng(_SEED)
    expected = [
        [
            flip_share(pool, values, ids, ulp)
            for values, ids, ulp in zip(row["top_values"], row["top_ids"], row["ulps"], strict=True)
        ]
        for row in rows
    ]
    # A prompt flips where any step does. Steps share their noise, so this is too much, which the fit corrects.
    expectations = [1 - math.prod(1 - share for share in shares) for shares in expected]
    flipped = [sum(bool(replay["flips"]) for replay in row["replays"]) for row in rows]
    counts = [len(row["replays"]) for row in rows]
    prompts = fit_prior(expectations, flipped, counts)
    flat = [
        (share, sum(step in replay["flips"] for replay in row["replays"]), len(row["replays"]))
        for row, shares in zip(rows, expected, strict=True)
        for step, share in zip(row["near"], shares, strict=True)
    ]
    steps = fit_prior(
        [each[0] for each in flat], [each[1] for each in flat], [each[2] for each in flat]
    )
    found = []
    for row, shares, expectation, hits in zip(rows, expected, expectations, flipped, strict=True):
        weights = _weights(row, generator)
        total = len(row["replays"])
        probability, low, high = _posterior(
            prompts, expectation, hits, total, row["weight"], weights, generator
        )
        if not row["near"]:
            probability, low, high = 0.0, 0.0, 0.0
        found.append(
            PromptEstimate(
                prompt=row["prompt"],
                reduction=row["reduction"],
                weight=row["weight"],
                expectation=expectation,
                replays=total,
                flipped=hits,
                probability=probability,
                low=low,
                high=high,
                steps=tuple(
                    _step(row, step, share, steps, weights, generator)
                    for step, share in zip(row["near"], shares, strict=True)
                ),
                forwards=row["forwards"],
                length=len(row["token_ids"]),
            )
        )
    return found, prompts, steps


def estimate_run(
    run: ReferenceRun, measured: Mapping[str, Any], *, reduction: str = "", prompt: str = ""
) -> PromptEstimate:
    """Estimate one execution by itself, with the plain prior: nothing was fitted to other prompts.

    Args:
        run: the execution.
        measured: what measure returned for it.
        reduction: for the result.
        prompt: its name, for the result.
    """
    row = {**measured, "token_ids": run.token_ids, "reduction": reduction, "prompt": prompt}
    (found,), _, _ = estimate_rows([row])
    return found


def _step(
    row: Mapping[str, Any],
    step: int,
    share: float,
    prior: Prior,
    weights: Floats,
    generator: np.random.Generator,
) -> StepEstimate:
    flips = sum(step in replay["flips"] for replay in row["replays"])
    probability, low, high = _posterior(
        prior, share, flips, len(row["replays"]), row["weight"], weights, generator
    )
    return StepEstimate(step, row["margins"][step], share, flips, probability, low, high)


def pooled_differences(rows: Sequence[Mapping[str, Any]]) -> Floats:
    """Return replays' logits less the reference's at every step in reach, in ULP.

    Returns:
        [n, TOP], at most a fixed number of rows; replays count alike whichever prompt they are of.
    """
    pieces = []
    for row in rows:
        for replay in row["replays"]:
            for step, made, values, ulp in zip(
                row["near"], replay["values"], row["top_values"], row["ulps"], strict=True
            ):
                if step >= replay["first_step"]:
                    pieces.append((np.asarray(made) - np.asarray(values)) / ulp)
    if not pieces:
        return np.zeros((1, 1))
    width = min(map(len, pieces))
    pool = np.array([piece[:width] for piece in pieces], dtype=np.float64)
    if len(pool) > _POOL:
        pool = pool[np.random.default_rng(_SEED).permutation(len(pool))[:_POOL]]
    return pool


def flip_share(pool: Floats, values: Sequence[float], ids: Sequence[int], ulp: float) -> float:
    """Return the share of pooled differences that would change a step's choice.

    Args:
        pool: [n, TOP] in ULP.
        values: the reference's largest logits.
        ids: their token ids; the lowest wins among equals.
        ulp: of this step.
    """
    count = min(pool.shape[1], len(values))
    made = np.asarray(values[:count]) + pool[:, :count] * ulp
    names = np.asarray(ids[:count])
    best = made == made.max(axis=1, keepdims=True)
    chosen = np.where(best, names, np.iinfo(np.int64).max).min(axis=1)
    own = min(name for value, name in zip(values, ids, strict=True) if value == max(values))
    return float((chosen != own).mean())


def fit_prior(
    expectations: Sequence[float], flipped: Sequence[int], counts: Sequence[int]
) -> Prior:
    """Fit offset, slope and strength to counts of flips among replays, by the largest marginal likelihood on a grid.

    Args:
        expectations: one per prompt or step.
        flipped: how many of its replays flipped.
        counts: how many there are.

    Returns:
        The prior; the plain one where fewer than ten have replays.
    """
    groups: dict[tuple[float, int, int], int] = {}
    for expectation, hits, count in zip(expectations, flipped, counts, strict=True):
        if count:
            # Equal cases are counted once, which makes thousands of steps quick.
            key = (round(expectation, 3), hits, count)
            groups[key] = groups.get(key, 0) + 1
    total = sum(groups.values())
    if total < _LEAST_PROMPTS:
        return Prior()

    def likelihood(prior: Prior) -> float:
        return sum(
            number * _beta_binomial(hits, count, prior.mean(expectation), prior.strength)
            for (expectation, hits, count), number in groups.items()
        )

    return max(
        (
            Prior(float(offset), slope, strength, total)
            for offset, slope, strength in product(_OFFSETS, _SLOPES, _STRENGTHS)
        ),
        key=likelihood,
    )


def _beta_binomial(hits: int, count: int, mean: float, strength: float) -> float:
    """Return the log-likelihood of hits, without the term that the prior does not change."""
    a, b = mean * strength, (1 - mean) * strength
    ln: Callable[[float], float] = math.lgamma
    return ln(a + hits) + ln(b + count - hits) - ln(a + b + count) - ln(a) - ln(b) + ln(a + b)


def _weights(row: Mapping[str, Any], generator: np.random.Generator) -> Floats:
    """Draw the share of executions that leave the reference as uncertain as so many replays of shrinks leave it.

    The chance of an equal execution is a product over calls, so its log has about the variance of a count of crossings
    divided by the executions.
    """
    survival = row["survival"]
    if survival is None or not row["weight"] < 1:
        return np.full(_DRAWS, float(row["weight"]))
    crossings = -math.log(1 - row["weight"]) * survival["executions"]
    drawn = generator.poisson(crossings, _DRAWS) / survival["executions"]
    return np.asarray(1 - np.exp(-drawn), dtype=np.float64)


def _posterior(
    prior: Prior,
    expectation: float,
    hits: int,
    count: int,
    weight: float,
    weights: Floats,
    generator: np.random.Generator,
) -> tuple[float, float, float]:
    mean = prior.mean(expectation)
    a, b = mean * prior.strength + hits, (1 - mean) * prior.strength + count - hits
    drawn = weights * generator.beta(a, b, _DRAWS)
    low, high = (float(end) for end in np.quantile(drawn, (0.025, 0.975)))
    if not prior.fitted and count:
        # Margins that no replay of other prompts has tried say how probable a flip is, and not how surely.
        exact = exact_interval(hits, count)
        least, most = np.quantile(weights, (0.025, 0.975))
        low, high = min(low, float(least * exact.low)), max(high, float(most * exact.high))
    return float(weight * a / (a + b)), low, high
