"""Ranks of one execution that disagree: the same shrink, computed on several, with other bits on one of them.

Column-parallel layers have all of A on every rank, so with one operand every rank computes the same shrink, each for
itself. Where their bits differ, the execution disagrees with itself: a class of its own, no matter what another
execution did. Row-parallel ranks hold slices of K and give other shrinks by design; they are not compared.
"""

from __future__ import annotations

from fliptrace.numerics import integer_view
from fliptrace.ranks import RankAgreement
from fliptrace.sites import Coordinate, Site
from fliptrace.trace import Frame, Kind, Trace


def rank_agreement(trace: Trace, steps: int | None = None) -> RankAgreement | None:
    """Compare the ranks of one execution with one another.

    Args:
        trace: an execution.
        steps: how many steps; None: all.

    Returns:
        What was found; None for a trace of one rank.
    """
    parallel = trace.manifest.get("engine.tensor_parallel")
    if not isinstance(parallel, dict):
        return None
    different = frozenset(parallel.get("row_parallel_sites", ()))
    found = _Tally(different)
    count = len(trace.steps) if steps is None else min(steps, len(trace.steps))
    for record in trace.steps[:count]:
        shrinks = trace.frame(record.step, Kind.SHRINK)
        operands = trace.frame(record.step, Kind.OPERAND)
        if shrinks is None or operands is None:
            continue
        found.take(record.step, record.first_position, shrinks, operands)
    return RankAgreement(
        ranks=int(parallel["ranks"]),
        compared_rows=found.compared,
        disagreeing_rows=found.disagreeing,
        disagreeing_elements=found.elements,
        steps=tuple(found.steps),
        first=found.first,
    )


class _Tally:
    """Counts over steps."""

    def __init__(self, different: frozenset[str]) -> None:
        self._different = different
        self._groups: dict[tuple[str, ...], list[list[int]]] = {}
        self.compared = self.disagreeing = self.elements = 0
        self.steps: list[int] = []
        self.first: Coordinate | None = None

    def take(self, step: int, first_position: int, shrinks: Frame, operands: Frame) -> None:
        """Compare the ranks of one step."""
        before = self.disagreeing
        for first, *others in self._groups_of(shrinks):
            for other in others:
                self._compare(step, first_position, (shrinks, operands), first, other)
        if self.disagreeing > before:
            self.steps.append(step)

    def _groups_of(self, frame: Frame) -> list[list[int]]:
        """Return the records of one shrink on all ranks, for every shrink that all ranks compute."""
        keys = tuple(entry.key for entry in frame.layout.entries)
        found = self._groups.get(keys)
        if found is None:
            groups: dict[str, list[int]] = {}
            for number, key in enumerate(keys):
                path = key.rpartition("@rank")[0]
                if path and path not in self._different:
                    groups.setdefault(path, []).append(number)
            found = self._groups[keys] = [each for each in groups.values() if len(each) > 1]
        return found

    def _compare(
        self, step: int, first_position: int, frames: tuple[Frame, Frame], first: int, other: int
    ) -> None:
        shrinks, operands = frames
        keys = [shrinks.layout.entries[number].key for number in (first, other)]
        mine, theirs = (operands.tensor(key) for key in keys)
        equal = (mine == theirs).all(1)
        rows = int(equal.sum())
        self.compared += rows
        if not rows or shrinks.record_bytes(first) == shrinks.record_bytes(other):
            return
        differs = (
            integer_view(shrinks.tensor(first)) != integer_view(shrinks.tensor(other))
        ) & equal.unsqueeze(1)
        self.disagreeing += int(differs.any(1).sum())
        self.elements += int(differs.sum())
        if self.first is None and bool(differs.any()):
            row, index = (int(each) for each in differs.nonzero()[0])
            self.first = Coordinate(Site.from_path(keys[1]), step, first_position + row, index)
