"""The goals of the table and whether its times meet them; arithmetic only.

A goal compares our repeatable reductions with a baseline over many cells. Which of ours counts in a
cell is a choice, and three are stated:

- `cell`: the fastest in each cell. A row's bits may then depend on the number of rows.
- `shape`: one reduction for each K and rank, whatever the number of rows: batch-invariant.
- `one`: one reduction for the whole table: batch-invariant, too.

Each is judged by its worst cell. The reduction of `shape` and `one` is the one whose worst cell is
best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fliptrace_kernels.bench.cells import Cell

Times = Mapping[Cell, Mapping[str, float]]
"""Microseconds per call by cell and kernel."""

CHOICES: Final = ("cell", "shape", "one")
DECODE_ROWS: Final = 16
PREFILL_ROWS: Final = 128
FEW_ROWS: Final = 256


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of the goals.

    Attributes:
        name: for people.
        baseline: kernel that ours is divided by.
        limit: largest ratio allowed.
        includes: whether a cell belongs to the goal.
        choice: which of `CHOICES` the goal is judged by.
    """

    name: str
    baseline: str
    limit: float
    includes: Callable[[Cell], bool]
    choice: str


@dataclass(frozen=True, slots=True)
class Worst:
    """The worst cell under one choice.

    Attributes:
        ratio: ours over the baseline.
        cell: where.
        kernel: which of ours was chosen there.
    """

    ratio: float
    cell: Cell
    kernel: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the table says about a goal.

    Attributes:
        goal: the goal.
        cells: how many cells belong to it.
        measured: how many of them have a time of the baseline and of one of ours.
        worst: worst cell by choice; None where no reduction was measured in all measured cells.
        met: in how many measured cells the goal's choice stays within the limit.
    """

    goal: Goal
    cells: int
    measured: int
    worst: Mapping[str, Worst | None]
    met: int

    @property
    def passed(self) -> bool | None:
        """Whether the goal is met; None until every cell is measured."""
        worst = self.worst[self.goal.choice]
        if worst is not None and worst.ratio > self.goal.limit:
            return False
        return True if worst is not None and self.measured == self.cells else None


def table_goals(default: str) -> list[Goal]:
    """Return the project's goals.

    Args:
        default: the kernel that stands for vLLM's default: its own, or ours with its choices.
    """
    decode = f"decode, M ≤ {DECODE_ROWS}, ranks 16 and 32"

    def is_decode(cell: Cell) -> bool:
        return cell.rows <= DECODE_ROWS and cell.rank in (16, 32)

    return [
        Goal(f"{decode}: over vLLM's default", default, 0.70, is_decode, "cell"),
        Goal(f"{decode}: over the floor", "floor", 1.25, is_decode, "cell"),
        Goal(
            f"M ≥ {PREFILL_ROWS}: over vLLM's default",
            default,
            0.55,
            lambda cell: cell.rows >= PREFILL_ROWS,
            "cell",
        ),
        Goal("every cell: never slower than vLLM's default", default, 1.0, lambda _: True, "cell"),
        Goal(
            f"batch-invariant, M ≤ {FEW_ROWS}: over two launches",
            "two-launch",
            0.80,
            lambda cell: cell.rows <= FEW_ROWS,
            "shape",
        ),
        Goal(
            f"batch-invariant, M > {FEW_ROWS}: over two launches",
            "two-launch",
            1.0,
            lambda cell: cell.rows > FEW_ROWS,
            "shape",
        ),
    ]


def judge(goal: Goal, cells: Sequence[Cell], times: Times, ours: Sequence[str]) -> Outcome:
    """Compare the table with a goal.

    Args:
        goal: the goal.
        cells: every cell of the table, measured or not.
        times: what was measured.
        ours: the reductions that may be chosen, all of them repeatable.
    """
    inside = [cell for cell in cells if goal.includes(cell)]
    ratios = {cell: found for cell in inside if (found := _ratios(goal, cell, times, ours))}
    worst = {choice: _worst(ratios, choice) for choice in CHOICES}
    chosen = _chosen(ratios, goal.choice)
    met = sum(ratios[cell][kernel] <= goal.limit for cell, kernel in chosen.items())
    return Outcome(goal, len(inside), len(ratios), worst, met)


def best_of(times: Mapping[str, float], ours: Iterable[str]) -> str | None:
    """Return the fastest of ours among the times of one cell."""
    return min((name for name in ours if name in times), key=lambda name: times[name], default=None)


def _ratios(goal: Goal, cell: Cell, times: Times, ours: Sequence[str]) -> dict[str, float]:
    found = times.get(cell, {})
    if goal.baseline not in found:
        return {}
    return {name: found[name] / found[goal.baseline] for name in ours if name in found}


def _worst(ratios: Mapping[Cell, Mapping[str, float]], choice: str) -> Worst | None:
    chosen = _chosen(ratios, choice)
    if not chosen or len(chosen) != len(ratios):
        return None
    cell = max(chosen, key=lambda cell: ratios[cell][chosen[cell]])
    return Worst(ratios[cell][chosen[cell]], cell, chosen[cell])


def _chosen(ratios: Mapping[Cell, Mapping[str, float]], choice: str) -> dict[Cell, str]:
    """Return the reduction chosen in each cell; a cell without one is left out."""
    groups: dict[object, list[Cell]] = {}
    for cell in ratios:
        group: object = {"cell": cell, "shape": (cell.k, cell.rank), "one": None}[choice]
        groups.setdefault(group, []).append(cell)
    chosen: dict[Cell, str] = {}
    for members in groups.values():
        # A reduction that is missing in a cell of its group cannot stand for the group.
        common = set.intersection(*(set(ratios[cell]) for cell in members))
        if common:
            name = min(
                sorted(common),
                key=lambda name: max(ratios[cell][name] for cell in members),
            )
            chosen |= dict.fromkeys(members, name)
    return chosen
