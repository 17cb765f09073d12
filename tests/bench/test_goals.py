"""Arithmetic of the goals."""

from __future__ import annotations

import pytest

from fliptrace_kernels.bench.cells import Cell, table_cells
from fliptrace_kernels.bench.goals import Goal, best_of, judge, table_goals

OURS = ["deterministic:8/128", "local:32/32"]


def cell(rows, k=3072, rank=16):
    return Cell(rows, k, 1, rank)


def goal(choice, limit=0.7, baseline="vllm"):
    return Goal("test", baseline, limit, lambda _: True, choice)


def test_the_fastest_of_each_cell_may_change():
    """`cell` takes the faster one in each cell; its worst cell is named with it."""
    times = {
        cell(1): {"vllm": 4.0, OURS[0]: 4.0, OURS[1]: 2.0},
        cell(16): {"vllm": 4.0, OURS[0]: 2.4, OURS[1]: 4.0},
    }
    outcome = judge(goal("cell"), list(times), times, OURS)
    worst = outcome.worst["cell"]
    assert (worst.ratio, worst.cell, worst.kernel) == (0.6, cell(16), OURS[0])
    assert outcome.passed is True
    assert (outcome.met, outcome.measured, outcome.cells) == (2, 2, 2)


def test_one_reduction_for_all_rows():
    """`shape` and `one` keep one reduction over M: the one whose worst cell is best."""
    times = {
        cell(1): {"vllm": 10.0, OURS[0]: 9.0, OURS[1]: 2.0},
        cell(16): {"vllm": 10.0, OURS[0]: 2.0, OURS[1]: 8.0},
        cell(1, k=576): {"vllm": 10.0, OURS[0]: 1.0, OURS[1]: 9.5},
    }
    outcome = judge(goal("shape"), list(times), times, OURS)
    assert (outcome.worst["shape"].ratio, outcome.worst["shape"].kernel) == (0.8, OURS[1])
    assert (outcome.worst["one"].ratio, outcome.worst["one"].kernel) == (0.9, OURS[0])
    assert outcome.worst["cell"].ratio == 0.2
    assert outcome.passed is False
    assert outcome.met == 2  # K 576 and M 1


def test_a_reduction_missing_in_a_cell_cannot_stand_for_the_group():
    """With gaps, only reductions that are there throughout are chosen."""
    times = {
        cell(1): {"vllm": 10.0, OURS[0]: 9.0, OURS[1]: 2.0},
        cell(16): {"vllm": 10.0, OURS[0]: 8.0},
    }
    outcome = judge(goal("one"), list(times), times, OURS)
    assert outcome.worst["one"].kernel == OURS[0]
    times[cell(2)] = {"vllm": 10.0, OURS[1]: 1.0}
    outcome = judge(goal("one"), list(times), times, OURS)
    assert outcome.worst["one"] is None
    assert outcome.passed is None


def test_nothing_passes_before_every_cell_is_measured():
    """An open cell leaves a goal open; a cell that is too slow settles it."""
    times = {cell(1): {"vllm": 4.0, OURS[0]: 2.0}}
    cells = [cell(1), cell(2)]
    assert judge(goal("cell"), cells, times, OURS).passed is None
    times[cell(2)] = {OURS[0]: 2.0}  # no baseline
    assert judge(goal("cell"), cells, times, OURS).passed is None
    times[cell(2)]["vllm"] = 2.0
    assert judge(goal("cell"), cells, times, OURS).passed is False
    assert judge(goal("cell"), cells, {}, OURS).worst == {"cell": None, "shape": None, "one": None}


def test_the_limit_itself_is_allowed():
    """A goal says at most."""
    times = {cell(1): {"vllm": 10.0, OURS[0]: 7.0}}
    assert judge(goal("cell"), [cell(1)], times, OURS).passed is True
    times = {cell(1): {"vllm": 10.0, OURS[0]: 7.0001}}
    assert judge(goal("cell"), [cell(1)], times, OURS).passed is False


@pytest.mark.parametrize(
    ("index", "count", "limit", "baseline"),
    [
        (0, 11 * 5 * 2, 0.70, "vllm-0.26.0"),
        (1, 11 * 5 * 2, 1.25, "floor"),
        (2, 11 * 5 * 3, 0.55, "vllm-0.26.0"),
        (3, 11 * 12 * 3, 1.0, "vllm-0.26.0"),
        (4, 11 * 9 * 3, 0.80, "two-launch"),
        (5, 11 * 3 * 3, 1.0, "two-launch"),
    ],
)
def test_the_goals_of_the_project(index, count, limit, baseline):
    """Each goal has its limit, its baseline and its cells."""
    found = table_goals("vllm-0.26.0")[index]
    assert (found.limit, found.baseline) == (limit, baseline)
    assert sum(found.includes(one) for one in table_cells()) == count


def test_best_of_a_cell():
    """The fastest of ours, None if none was measured."""
    assert best_of({"vllm": 1.0, OURS[0]: 3.0, OURS[1]: 2.0}, OURS) == OURS[1]
    assert best_of({"vllm": 1.0}, OURS) is None
