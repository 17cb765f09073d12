"""Budgets are read, kept and said."""

from __future__ import annotations

import pytest

from fliptrace.errors import InputError
from fliptrace_interventions.budget import Budget, BudgetSpentError, Spending


@pytest.mark.parametrize(
    ("text", "budget", "words"),
    [
        ("200 runs", Budget(runs=200), "200 runs"),
        ("1", Budget(runs=1), "1 run"),
        ("15 minutes", Budget(minutes=15), "15 minutes"),
        ("2.5m", Budget(minutes=2.5), "2.5 minutes"),
        ("30s", Budget(minutes=0.5), "0.5 minutes"),
        ("300 runs, 1h", Budget(300, 60), "300 runs and 60 minutes"),
    ],
)
def test_a_budget_is_read_and_said(text, budget, words):
    """What a person writes becomes numbers, and the numbers become words again."""
    assert Budget.parse(text) == budget
    assert str(budget) == words


@pytest.mark.parametrize(
    "text", ["", "soon", "-3", "1.5 runs", "0", "0 minutes", "3 weeks", "nan m"]
)
def test_a_budget_that_means_nothing_is_refused(text):
    """Nothing is guessed."""
    with pytest.raises(InputError, match="budget"):
        Budget.parse(text)


def test_runs_stop_before_the_limit_is_passed():
    """A piece of work that does not fit is not started, a smaller one still is."""
    spending = Spending(Budget(runs=5))
    spending.add(3, 1.0)
    spending.require(2)
    with pytest.raises(BudgetSpentError, match="no room for 3 more runs: 3 were spent"):
        spending.require(3)


def test_minutes_stop_the_next_run():
    """A run that has begun ends; the next one is not started."""
    spending = Spending(Budget(minutes=1))
    spending.add(1, 59.9)
    spending.require()
    spending.add(1, 0.2)
    with pytest.raises(BudgetSpentError, match="1 minute is spent"):
        spending.require()


def test_no_budget_is_no_limit():
    """Without a budget everything may run."""
    spending = Spending()
    spending.add(10**9, 10.0**9)
    spending.require(10**9)
    assert str(spending.budget) == "no limit"
