"""Shrink a set that flips to one from which nothing can be left out, asking an oracle about subsets.

This is delta debugging (ddmin of Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002) with
an explicit last pass. Flips need not be monotone: a set may flip although one of its supersets does not, and may flip
although none of its subsets with one element less does. So the result is 1-minimal (no single element can be left out),
which the last pass checks element by element, and it is neither the smallest set nor the only one.

Nothing here knows of models; an oracle is any function that says whether a subset flips.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fliptrace_interventions.budget import BudgetSpentError

#: Says whether the elements with these indices, in ascending order, flip the token when all are edited together.
Oracle = Callable[[tuple[int, ...]], bool | None]


@dataclass(frozen=True, slots=True)
class Minimised:
    """What was left of a set.

    Attributes:
        kept: indices of the elements that still flip together, ascending; empty when the whole set does not flip.
        one_minimal: every set with one of them left out was asked and does not flip.
        undecided: how many of those sets the oracle could say nothing of.
        asked: how many different subsets the oracle was asked about.
        spent: why it ended early, "" when it did not.
    """

    kept: tuple[int, ...]
    one_minimal: bool
    asked: int
    spent: str = ""
    undecided: int = 0


def minimise(count: int, flips: Oracle) -> Minimised:
    """Find a 1-minimal subset of ``count`` elements that flips.

    Args:
        count: how many elements there are.
        flips: the oracle: None where nothing can be said of a subset. No subset is asked twice. It may raise
            BudgetSpentError; what was found by then is returned.

    Returns:
        The subset. The empty set is never asked: nothing edited is the unedited arm, which does not flip.
    """
    search = _Search(flips)
    everything = tuple(range(count))
    try:
        if not search.flips(everything):
            return Minimised((), False, search.asked)
        search.kept = everything
        search.divide()
        search.leave_out_one_by_one()
    except BudgetSpentError as error:
        return Minimised(search.kept, False, search.asked, str(error))
    undecided = search.undecided()
    return Minimised(search.kept, not undecided, search.asked, undecided=undecided)


class _Search:
    """The smallest flipping set so far, and every answer."""

    def __init__(self, oracle: Oracle) -> None:
        self.kept: tuple[int, ...] = ()
        self._oracle = oracle
        self._answers: dict[tuple[int, ...], bool | None] = {(): False}

    @property
    def asked(self) -> int:
        return len(self._answers) - 1

    def flips(self, subset: tuple[int, ...]) -> bool:
        if subset not in self._answers:
            self._answers[subset] = self._oracle(subset)
        return bool(self._answers[subset])

    def undecided(self) -> int:
        """Return of how many sets with one element left out nothing is known."""
        rests = [_without(self.kept, (element,)) for element in self.kept]
        return sum(self._answers.get(rest) is None for rest in rests)

    def divide(self) -> None:
        """Try ever smaller parts, and what is left without each."""
        parts = 2
        while len(self.kept) >= 2:
            chunks = split(self.kept, parts)
            part = next((chunk for chunk in chunks if self.flips(chunk)), None)
            if part is not None:
                self.kept, parts = part, 2
                continue
            rests = (_without(self.kept, chunk) for chunk in chunks) if parts > 2 else iter(())
            rest = next((rest for rest in rests if self.flips(rest)), None)
            if rest is not None:
                self.kept, parts = rest, parts - 1
            elif parts >= len(self.kept):
                return
            else:
                parts = min(2 * parts, len(self.kept))

    def leave_out_one_by_one(self) -> None:
        """Leave out single elements until none can be: the claim of 1-minimality rests on this pass alone."""
        while True:
            rests = (_without(self.kept, (element,)) for element in self.kept)
            rest = next((rest for rest in rests if self.flips(rest)), None)
            if rest is None:
                return
            self.kept = rest


def split(elements: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Cut a sequence into ``parts`` runs whose lengths differ by one at the most."""
    bounds = [len(elements) * part // parts for part in range(parts + 1)]
    return [tuple(elements[start:end]) for start, end in pairwise(bounds)]


def _without(elements: tuple[int, ...], left_out: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(element for element in elements if element not in left_out)
