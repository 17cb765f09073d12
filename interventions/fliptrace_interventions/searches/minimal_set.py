"""Substitute all root rows together, and shrink that set to one from which nothing can be left out.

One row alone is often not enough: differences are tiny, and which of them add up is a matter of rounding, not of size.
Nor need all rows together be enough: what follows the edits is computed under another reduction than in the recordings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from fliptrace.judgements import Judgement, MinimalSet, RootResult, Screening
from fliptrace.verdicts import RowDifference
from fliptrace_interventions.budget import BudgetSpentError
from fliptrace_interventions.edits import ShrinkEdit
from fliptrace_interventions.searches.coordinates import surviving_coordinates
from fliptrace_interventions.searches.delta_debugging import minimise
from fliptrace_interventions.searches.trials import Trials
from fliptrace_interventions.workbench import EXECUTIONS

#: What the shrinks between several edited sites are, in the order in which it is tried: computed from what the edits
#: changed, as they would be in an execution that had these values, or kept as recorded.
WAYS = ("recomputed", "recorded")


@dataclass(frozen=True, slots=True)
class Elements:
    """What a set is made of.

    Attributes:
        unit: ``rows`` or ``coordinates``.
        names: of the elements; edits: one per element.
    """

    unit: str
    names: tuple[str, ...]
    edits: tuple[ShrinkEdit, ...]

    @classmethod
    def of_rows(cls, rows: Sequence[RowDifference]) -> Elements:
        """Take whole rows."""
        return cls("rows", tuple(row.name for row in rows), tuple(map(ShrinkEdit.of_row, rows)))

    @classmethod
    def of_coordinates(cls, rows: Sequence[RowDifference]) -> Elements:
        """Take the surviving coordinates of rows."""
        chosen = [coordinate for row in rows for coordinate in surviving_coordinates(row)]
        return cls(
            "coordinates",
            tuple(coordinate.coordinate.name for coordinate in chosen),
            tuple(map(ShrinkEdit.of_coordinate, chosen)),
        )


def screen_all_together(
    trials: Trials, rows: Sequence[RowDifference]
) -> tuple[tuple[tuple[str, Screening], ...], str]:
    """Screen all rows as one edit, in both directions and both ways between the sites.

    Returns:
        (way, screening) of each, and why it ended early ("" when it did not).
    """
    edits = Elements.of_rows(rows).edits
    found = []
    for number, (recipient, way) in enumerate(product(EXECUTIONS, WAYS)):
        trials.report("all root rows together", number, len(EXECUTIONS) * len(WAYS))
        try:
            found.append((way, trials.screen(edits, recipient, between=way)))
        except BudgetSpentError as error:
            return tuple(found), str(error)
    return tuple(found), ""


def minimal_set(
    trials: Trials, elements: Elements, recipient: str, between: str
) -> tuple[MinimalSet | None, str]:
    """Shrink a set of edits to a 1-minimal one that still gives the donor's token.

    Args:
        trials: runs them. Nothing can be said of a subset whose screening is void, as where its own unedited arm loses
            the recipient's token: the search goes on as if it did not flip, and the set is not called 1-minimal.
        elements: the whole set.
        recipient: in whose execution.
        between: what the shrinks between the sites are.

    Returns:
        The set, None when the whole one does not flip, and why it ended early ("" when it did not).
    """
    asked = 0

    def flips(subset: tuple[int, ...]) -> bool | None:
        nonlocal asked
        trials.report(f"minimal set of {elements.unit}, {recipient}", asked, asked + 1)
        asked += 1
        edits = [elements.edits[number] for number in subset]
        screening = trials.screen(edits, recipient, between=between)
        return None if screening.judgement is Judgement.VOID else screening.gives_donor_token

    found = minimise(len(elements.edits), flips)
    if not found.kept:
        return None, found.spent
    kept = MinimalSet(
        edits=tuple(elements.edits[number].to_json() for number in found.kept),
        names=tuple(elements.names[number] for number in found.kept),
        recipient=recipient,
        runs=found.asked,
        one_minimal=found.one_minimal,
        unit=elements.unit,
        whole=len(elements.edits),
        between=between,
        undecided=found.undecided,
    )
    return kept, found.spent


def single_row_set(root: RootResult, screening: Screening, whole: int) -> MinimalSet:
    """Return the set that a sufficient row is by itself: without it nothing is edited, and nothing flips."""
    return MinimalSet(
        edits=root.edits,
        names=(root.name,),
        recipient=screening.recipient,
        runs=1,
        one_minimal=True,
        verdict=root.verdict,
        unit="rows",
        whole=whole,
    )
