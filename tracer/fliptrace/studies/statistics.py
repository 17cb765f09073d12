"""Bounds and tests that respect what shares what: the only module that imports scipy.

Comparisons of one prompt share its repetition 0, so they are no independent trials. Shares over prompts get exact
(Clopper-Pearson) intervals; shares over comparisons get a bootstrap that draws whole prompts. Where no comparison was a
hit, or every one, a bootstrap has nothing to vary: then the exact bound over prompts takes its place, which holds for
comparisons, too, since a share of a prompt's comparisons is at most the chance that the prompt has any hit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fliptrace.errors import InputError

CONFIDENCE = 0.95
_RESAMPLES = 9_999
_SEED = 20_261_130
#: Up to so many pairs a sign test enumerates all signs.
_ENUMERATED = 13
#: Below so many prompts a percentile bootstrap over them is clearly too narrow.
_ENOUGH_CLUSTERS = 10
#: From so many engine starts on, a start is the unit of a ratio.
_TRIALS = 3


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval; ``sided`` is 2, or 1 for a bound from one side."""

    low: float
    high: float
    sided: int


@dataclass(frozen=True, slots=True)
class Share:
    """A share of trials with its interval.

    Attributes:
        hits: how many.
        trials: of how many.
        interval: None where there is none: no trials, or some hits in one single cluster.
        method: how the interval was made.
    """

    hits: int
    trials: int
    interval: Interval | None
    method: str

    @property
    def value(self) -> float | None:
        """The share, None without trials."""
        return self.hits / self.trials if self.trials else None

    def __str__(self) -> str:
        """Say it for a person: ``3 of 20 (15 %; 95 %: 3.2 to 37.9 %)``; a zero always comes with its bound."""
        if not self.trials:
            return "nothing compared"
        text = f"{self.hits:,} of {self.trials:,}"
        if self.interval is None:
            return f"{text} ({_percent(self.hits / self.trials)}; one prompt gives no interval)"
        if self.hits == 0:
            return f"{text} (95 %: at most {_percent(self.interval.high)})"
        between = f"{_percent(self.interval.low)} to {_percent(self.interval.high)}"
        return f"{text} ({_percent(self.hits / self.trials)}; 95 %: {between})"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "hits": self.hits,
            "trials": self.trials,
            "share": self.value,
            "interval": None
            if self.interval is None
            else {"low": self.interval.low, "high": self.interval.high},
            "sided": None if self.interval is None else self.interval.sided,
            "method": self.method,
        }


def shares_to_json(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's entry with its shares as plain values."""
    return {
        name: value.to_json() if isinstance(value, Share) else value
        for name, value in entry.items()
    }


def repeated_bound(prompts: Share) -> str:
    """Say what repeating prompts means for another one: ``a prompt changes with a probability of at most 9 % ...``.

    Args:
        prompts: the share of prompts with a change, none of them, with its exact bound.
    """
    high = 1.0 if prompts.interval is None else prompts.interval.high
    return f"a prompt changes with a probability of at most {_percent(high)} (one-sided 95 % bound)"


def few_clusters(prompts: int) -> str:
    """Say that a bootstrap over so few prompts is too narrow; nothing where it is not."""
    if not 1 < prompts < _ENOUGH_CLUSTERS:
        return ""
    return f" {prompts} are few: intervals of a bootstrap are then too narrow."


def exact_interval(hits: int, trials: int, confidence: float = CONFIDENCE) -> Interval:
    """Return the Clopper-Pearson interval of a share of independent trials.

    Without hits, or with nothing but hits, only one side can be missed, and the bound is one-sided: after n runs
    without a hit at most ``1 - 0.05 ** (1 / n)``.

    Args:
        hits: successes, 0 to ``trials``.
        trials: independent trials, at least 1.
        confidence: above 0, below 1.

    Raises:
        InputError: numbers outside of these ranges.

    Source:
        C. J. Clopper and E. S. Pearson, Biometrika 26 (1934).
    """
    if not 0 <= hits <= trials or trials < 1 or not 0 < confidence < 1:
        raise InputError(
            f"a share needs 0 <= hits <= trials, trials >= 1 and a confidence between 0 and 1; got {hits} of {trials} "
            f"at {confidence}"
        )
    from scipy.stats import binomtest

    if hits == 0:
        found = binomtest(0, trials, alternative="less").proportion_ci(confidence, "exact")
        return Interval(0.0, float(found.high), 1)
    if hits == trials:
        found = binomtest(hits, trials, alternative="greater").proportion_ci(confidence, "exact")
        return Interval(float(found.low), 1.0, 1)
    found = binomtest(hits, trials).proportion_ci(confidence, "exact")
    return Interval(float(found.low), float(found.high), 2)


def exact_share(hits: int, trials: int) -> Share:
    """Return a share of independent trials (prompts) with its exact interval."""
    return Share(hits, trials, exact_interval(hits, trials) if trials else None, "Clopper-Pearson")


def clustered_share(
    hits: Sequence[int], trials: Sequence[int], confidence: float = CONFIDENCE
) -> Share:
    """Return a share of comparisons, with a bootstrap interval over the clusters that they come in.

    Args:
        hits: per cluster (prompt), how many comparisons.
        trials: per cluster, of how many.
        confidence: above 0, below 1.

    Returns:
        The share. Where no comparison, or every one, is a hit, its bound is the exact one over clusters; with some
        hits in one single cluster there is none.

    Source:
        Percentile bootstrap of the ratio of sums, whole clusters drawn with replacement, 9,999 times, fixed seed.
    """
    if len(hits) != len(trials):
        raise InputError(f"every cluster needs hits and trials; got {len(hits)} and {len(trials)}")
    total, of = int(sum(hits)), int(sum(trials))
    clusters = sum(count > 0 for count in trials)
    if total in (0, of) and clusters:
        bound = exact_interval(clusters if total else 0, clusters, confidence)
        return Share(total, of, bound, "Clopper-Pearson over prompts")
    interval = ratio_interval(hits, trials, confidence) if clusters > 1 else None
    return Share(total, of, interval, "cluster bootstrap over prompts")


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], confidence: float = CONFIDENCE
) -> Interval:
    """Return the bootstrap interval of sum(numerators) / sum(denominators), clusters drawn whole.

    Args:
        numerators: one per cluster, at least two clusters.
        denominators: one per cluster, not negative, some above 0.
        confidence: above 0, below 1.
    """
    from scipy.stats import bootstrap

    above, below = np.asarray(numerators, float), np.asarray(denominators, float)
    kept = below > 0
    above, below = above[kept], below[kept]
    if len(above) < 2:
        raise InputError(f"a bootstrap needs two clusters with comparisons; got {len(above)}")

    def ratio(top: Any, bottom: Any, axis: int) -> Any:
        return top.sum(axis=axis) / bottom.sum(axis=axis)

    found = bootstrap(
        (above, below),
        ratio,
        paired=True,
        vectorized=True,
        confidence_level=confidence,
        n_resamples=_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(_SEED),
        batch=1_000,
    ).confidence_interval
    return Interval(float(found.low), float(found.high), 2)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A geometric mean of ratios, with its interval.

    Attributes:
        value: the mean.
        interval: None with fewer than two units.
        units: how many independent units it rests on.
        unit: what they are: ``trial`` or ``round``.
    """

    value: float
    interval: Interval | None
    units: int
    unit: str

    def __str__(self) -> str:
        """Say it for a person: ``-5.1 % (95 %: -7.5 to -2.7, 5 rounds)``."""
        number = f"{100 * (self.value - 1):+.1f} %"
        if self.interval is None:
            return f"{number} ({self.units} {self.unit}: no interval)"
        low, high = (100 * (end - 1) for end in (self.interval.low, self.interval.high))
        return f"{number} (95 %: {low:+.1f} to {high:+.1f}, {self.units} {self.unit}s)"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "ratio": self.value,
            "interval": None
            if self.interval is None
            else {"low": self.interval.low, "high": self.interval.high},
            "units": self.units,
            "unit": self.unit,
            "method": "t on log ratios",
        }


def paired_ratio(
    pairs: Sequence[tuple[Any, float, float]], confidence: float = CONFIDENCE
) -> Ratio | None:
    """Return the geometric mean of numerator / denominator, each pair measured side by side.

    Args:
        pairs: (trial, numerator, denominator), numbers above 0; one per round of a trial.
        confidence: above 0, below 1.

    Returns:
        With three trials or more the trials' means are the units; with fewer, the rounds are, and what a new start
        changes is not in the interval. None without pairs.

    Source:
        Student's t on the logarithms of the ratios.
    """
    if not pairs:
        return None
    if any(not (above > 0 and below > 0) for _, above, below in pairs):
        raise InputError("a ratio needs numbers above 0")
    logs: dict[Any, list[float]] = {}
    for trial, above, below in pairs:
        logs.setdefault(trial, []).append(float(np.log(above) - np.log(below)))
    unit = "trial" if len(logs) >= _TRIALS else "round"
    means = [float(np.mean(found)) for found in logs.values()]
    values = np.asarray(means if unit == "trial" else [v for found in logs.values() for v in found])
    center = float(values.mean())
    if len(values) < 2:
        return Ratio(float(np.exp(center)), None, len(values), unit)
    from scipy.stats import t

    half = float(t.ppf((1 + confidence) / 2, len(values) - 1))
    half *= float(values.std(ddof=1)) / len(values) ** 0.5
    ends = Interval(float(np.exp(center - half)), float(np.exp(center + half)), 2)
    return Ratio(float(np.exp(center)), ends, len(values), unit)


def mcnemar_exact(first_only: int, second_only: int) -> float:
    """Return the two-sided p-value of McNemar's exact test, for pairs that share nothing with each other.

    Args:
        first_only: pairs in which only the first is right.
        second_only: pairs in which only the second is right.

    Returns:
        1.0 without such pairs.

    Source:
        The binomial form of Q. McNemar, Psychometrika 12 (1947).
    """
    if first_only < 0 or second_only < 0:
        raise InputError(f"counts cannot be negative; got {first_only} and {second_only}")
    if first_only + second_only == 0:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(first_only, first_only + second_only, 0.5).pvalue)


def sign_flip_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of a paired permutation test: is the sum of differences beyond chance?

    Each difference may as well have had the other sign if both sides are alike. One difference per prompt: comparisons
    of a prompt move together, so they count as one.

    Args:
        differences: one per independent pair.

    Returns:
        Exact by enumeration up to 13 differences that are not zero, else from 9,999 draws with a fixed seed; 1.0
        without any.
    """
    values = np.asarray([value for value in differences if value], float)
    if not len(values):
        return 1.0
    if len(values) <= _ENUMERATED:
        signs = 1 - 2 * ((np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1)
        sums = np.abs(signs @ values)
        return float(np.mean(sums >= abs(values.sum()) * (1 - 1e-12)))
    generator = np.random.default_rng(_SEED)
    signs = generator.integers(0, 2, (_RESAMPLES, len(values))) * 2 - 1
    extreme = np.abs(signs @ values) >= abs(values.sum()) * (1 - 1e-12)
    return float((extreme.sum() + 1) / (_RESAMPLES + 1))


def rate_bound(events: int, exposure: float, confidence: float = CONFIDENCE) -> float:
    """Return the exact upper bound of a Poisson rate per unit of exposure, from one side.

    Args:
        events: seen, 0 or more.
        exposure: how much was watched (tokens), above 0.
        confidence: above 0, below 1.

    Returns:
        Events per unit; with none seen, -ln(0.05) / exposure.

    Source:
        F. Garwood, Biometrika 28 (1936).
    """
    if events < 0 or not exposure > 0:
        raise InputError(f"a rate needs events >= 0 and exposure > 0; got {events} in {exposure}")
    from scipy.stats import chi2

    return float(chi2.ppf(confidence, 2 * (events + 1)) / 2 / exposure)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
