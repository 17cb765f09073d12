"""Bounds and tests against known values and against what must hold for all counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fliptrace.errors import InputError
from fliptrace.studies.statistics import (
    clustered_share,
    exact_interval,
    exact_share,
    few_clusters,
    mcnemar_exact,
    rate_bound,
    ratio_interval,
    repeated_bound,
    sign_flip_test,
)


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [
        # R: binom.test(3, 20)$conf.int, binom.test(1, 10), and 1 - 0.05^(1/n) for none.
        (3, 20, 0.03207094, 0.3789268),
        (1, 10, 0.002528579, 0.4450161),
        (0, 5, 0.0, 0.4507197),
        (0, 64, 0.0, 0.0457297),
        (5, 5, 0.5492803, 1.0),
    ],
)
def test_exact_intervals_of_the_tables(hits, trials, low, high):
    """Clopper-Pearson as R prints it; one-sided where there is none or nothing else."""
    found = exact_interval(hits, trials)
    assert (found.low, found.high) == pytest.approx((low, high), abs=2e-7)
    assert found.sided == (2 if 0 < hits < trials else 1)


@given(trials=st.integers(1, 200), data=st.data())
def test_exact_intervals_hold_the_share(trials, data):
    """The interval holds the share, and its tails are what 95 % leaves."""
    from scipy.stats import binom

    hits = data.draw(st.integers(0, trials))
    found = exact_interval(hits, trials)
    assert 0 <= found.low <= hits / trials <= found.high <= 1
    tail = 0.05 if found.sided == 1 else 0.025
    if hits < trials:
        assert binom.cdf(hits, trials, found.high) == pytest.approx(tail, abs=1e-6)
    if hits:
        assert binom.sf(hits - 1, trials, found.low) == pytest.approx(tail, abs=1e-6)


@pytest.mark.parametrize("case", [(-1, 5, 0.9), (6, 5, 0.9), (0, 0, 0.9), (1, 5, 1.0)])
def test_impossible_counts_are_refused(case):
    """No interval of what cannot have been counted."""
    with pytest.raises(InputError, match="share"):
        exact_interval(*case)


def test_a_zero_is_never_said_without_its_bound():
    """0 of N comes with the bound over what is independent: the prompts, however many comparisons there are."""
    assert str(exact_share(0, 5)) == "0 of 5 (95 %: at most 45.1 %)"
    many = clustered_share([0] * 20, [9] * 20)
    assert str(many) == "0 of 180 (95 %: at most 13.9 %)"
    assert many.interval == exact_interval(0, 20)
    assert str(clustered_share([], [])) == "nothing compared"
    assert "no interval" in str(clustered_share([2], [9]))


def test_bounds_and_narrow_bootstraps_in_words():
    """1 - 0.05 ** (1 / 20) for twenty prompts; two to nine prompts are few, ten are not, one has no bootstrap."""
    assert "at most 13.9 % (one-sided 95 % bound)" in repeated_bound(exact_share(0, 20))
    assert [bool(few_clusters(count)) for count in (0, 1, 2, 9, 10)] == [
        *(False, False, True, True, False)
    ]


def test_clusters_widen_the_interval():
    """The same 45 of 450 comparisons: all in five prompts says less than spread over all prompts."""
    gathered = clustered_share([9] * 5 + [0] * 45, [9] * 50)
    spread = clustered_share([1] * 40 + [0] * 5 + [1] * 5, [9] * 50)
    assert gathered.value == spread.value == 0.1

    def width(share):
        return share.interval.high - share.interval.low

    assert width(gathered) > 3 * width(spread)
    assert gathered.interval.low < 0.1 < gathered.interval.high


def test_the_bootstrap_covers():
    """Over 200 made-up studies the 95 % interval holds the true share in 88 to 99 % of them."""
    draw = np.random.default_rng(5)
    covered = 0
    for _ in range(200):
        chances = draw.beta(0.6, 1.4, 40)  # of mean 0.3, far from alike
        hits = draw.binomial(9, chances)
        interval = ratio_interval(hits, [9] * 40)
        covered += interval.low <= 0.3 <= interval.high
    assert 176 <= covered <= 198


def test_the_bootstrap_repeats():
    """The same counts give the same bounds."""
    first, second = (ratio_interval([1, 4, 0, 2], [9, 9, 9, 9]) for _ in range(2))
    assert first == second


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=2, max_size=12),
)
def test_bootstrap_intervals_hold_the_share(counts):
    """Whatever was counted, the share lies between the extremes of clusters and mostly within its interval's ends."""
    hits = [min(one, of) for one, of in counts]
    trials = [of for _, of in counts]
    share = clustered_share(hits, trials)
    ratios = [one / of for one, of in zip(hits, trials, strict=True)]
    assert share.hits == sum(hits)
    if 0 < share.hits < share.trials:
        assert min(ratios) - 1e-12 <= share.interval.low <= share.interval.high
        assert share.interval.high <= max(ratios) + 1e-12
    else:
        assert share.interval.sided == 1


@pytest.mark.parametrize(
    ("first", "second", "p"),
    # 2 * sum(comb(n, k) for k <= min(b, c)) / 2**n, at most 1
    [(10, 2, 0.03857422), (45, 39, 0.58564679), (0, 0, 1.0), (6, 0, 0.03125), (3, 3, 1.0)],
)
def test_mcnemar_of_the_tables(first, second, p):
    """Exact McNemar, the tails of a fair coin summed; the paper's 45 against 39 shows no direction."""
    assert mcnemar_exact(first, second) == pytest.approx(p, abs=2e-6)


def test_sign_flips_by_hand():
    """Three differences of one sign: 2 of 8 signs are as extreme; symmetric in sign; zeros do not count."""
    assert sign_flip_test([1, 2, 3]) == pytest.approx(2 / 8)
    assert sign_flip_test([-1, -2, -3, 0, 0]) == pytest.approx(2 / 8)
    assert sign_flip_test([1, -1]) == 1.0
    assert sign_flip_test([]) == 1.0


@given(differences=st.lists(st.sampled_from([-1, 1]), min_size=1, max_size=13))
def test_sign_flips_of_ones_are_mcnemar(differences):
    """With differences of one the permutation test is McNemar's."""
    up, down = differences.count(1), differences.count(-1)
    assert sign_flip_test(differences) == pytest.approx(mcnemar_exact(up, down))


def test_many_sign_flips_are_drawn_and_repeat():
    """Beyond enumeration the p-value is an estimate near the exact one, the same each time."""
    differences = [1] * 20 + [-1] * 10
    found = sign_flip_test(differences)
    assert found == sign_flip_test(differences)
    assert found == pytest.approx(mcnemar_exact(20, 10), abs=0.02)


def test_rate_bounds_of_the_tables():
    """Garwood's: none seen in n is -ln(0.05) / n; two seen, 6.2958."""
    assert rate_bound(0, 1000) == pytest.approx(-math.log(0.05) / 1000)
    assert rate_bound(2, 1) == pytest.approx(6.295794, abs=1e-6)
    with pytest.raises(InputError):
        rate_bound(1, 0)
