"""Delta debugging against oracles whose truth is known."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from fliptrace_interventions.budget import Budget, BudgetSpentError, Spending
from fliptrace_interventions.searches.delta_debugging import minimise, split


def is_one_minimal(kept, flips):
    """Decide by hand: it flips, and with any one left out it does not."""
    rests = [tuple(e for e in kept if e != left_out) for left_out in kept]
    return flips(kept) and not any(flips(rest) for rest in rests if rest)


@given(st.integers(1, 40), st.data())
@settings(max_examples=150, deadline=None)
def test_needed_elements_are_found_exactly(count, data):
    """Where a set flips as soon as it holds certain elements, exactly these are left."""
    needed = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=6))
    found = minimise(count, lambda subset: needed <= set(subset))
    assert set(found.kept) == needed
    assert found.one_minimal


@given(st.integers(1, 9), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_any_oracle_gives_a_one_minimal_set(count, random):
    """Flips need not be monotone: for arbitrary truth tables the result flips and no single removal does."""
    table = {
        subset: random.random() < 0.35
        for size in range(1, count + 1)
        for subset in itertools.combinations(range(count), size)
    }
    table[tuple(range(count))] = True
    asked = []

    def flips(subset):
        asked.append(subset)
        return table[subset]

    found = minimise(count, flips)
    assert found.one_minimal
    assert is_one_minimal(found.kept, table.__getitem__)
    assert len(asked) == len(set(asked)) == found.asked
    assert () not in asked


def test_the_check_of_minimality_fails_on_a_larger_set():
    """The check above tells a 1-minimal set from one that is not."""
    assert is_one_minimal((1, 2), lambda subset: {1, 2} <= set(subset))
    assert not is_one_minimal((1, 2, 3), lambda subset: {1, 2} <= set(subset))
    assert not is_one_minimal((1,), lambda subset: {1, 2} <= set(subset))


def test_a_whole_set_that_does_not_flip_leaves_nothing():
    """Nothing is searched below a set that does not flip, even where a subset would."""
    found = minimise(5, lambda subset: subset == (2,))
    assert (found.kept, found.one_minimal, found.asked) == ((), False, 1)


def test_a_spent_budget_leaves_the_smallest_set_so_far():
    """What flips is kept, and 1-minimality is not claimed."""
    spending = Spending(Budget(runs=6))

    def flips(subset):
        spending.require()
        spending.add(1, 0.0)
        return {3, 17} <= set(subset)

    found = minimise(20, flips)
    assert {3, 17} <= set(found.kept)
    assert not found.one_minimal
    assert found.asked == 6
    assert "no room for another run" in found.spent


def test_a_budget_without_a_run_says_so():
    """Not even the whole set was asked."""

    def flips(_subset):
        raise BudgetSpentError("spent")

    found = minimise(3, flips)
    assert (found.kept, found.one_minimal, found.asked, found.spent) == ((), False, 0, "spent")


def test_parts_cover_everything_once():
    """A cut loses and doubles nothing, and its parts are even."""
    for length, parts in itertools.product(range(1, 12), range(1, 12)):
        cut = split(range(length), parts)
        assert sum(cut, ()) == tuple(range(length))
        assert max(map(len, cut)) - min(map(len, cut)) <= 1


def test_a_removal_of_which_nothing_is_known_leaves_minimality_open():
    """An oracle that cannot say is not taken for a no: the set is kept, and not called 1-minimal."""

    def flips(subset):
        return None if subset == (1,) else {1, 2} <= set(subset)

    found = minimise(4, flips)
    assert found.kept == (1, 2)
    assert (found.one_minimal, found.undecided) == (False, 1)
