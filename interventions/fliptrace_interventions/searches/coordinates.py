"""Substitute single coordinates of root rows, one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fliptrace.judgements import CoordinateResult, Judgement, RootResult, Screening
from fliptrace.numerics.classes import CoordinateClass
from fliptrace.numerics.rounding import SIXTEEN_BIT_TYPES
from fliptrace.trace import dtype_from_name
from fliptrace.verdicts import CoordinateDifference, RowDifference
from fliptrace_interventions.budget import BudgetSpentError
from fliptrace_interventions.edits import ShrinkEdit
from fliptrace_interventions.searches.trials import Trials
from fliptrace_interventions.workbench import EXECUTIONS

#: Said where a coordinate's arm is its row's: the row's other elements round alike in both executions.
_SAME_ARM = (
    "the only coordinate of its row that survives rounding: its consumer gets what it got with the whole row, so "
    "this arm is the row's"
)


def surviving_coordinates(row: RowDifference) -> tuple[CoordinateDifference, ...]:
    """Return the row's coordinates that survive rounding; of more than 64 the first 64."""
    return tuple(
        coordinate
        for coordinate in row.coordinates
        if coordinate.coordinate_class is CoordinateClass.SURVIVING
    )


def screen_coordinates(
    trials: Trials, rows: Sequence[RowDifference], roots: Sequence[RootResult]
) -> tuple[tuple[CoordinateResult, ...], str]:
    """Screen every surviving coordinate of some rows in both directions.

    Args:
        trials: runs them.
        rows: whose coordinates.
        roots: what was found of these rows as wholes; a row that is missing is not relied on.

    Returns:
        The coordinates that were tried, in execution order, and why it ended early ("" when it did not).
    """
    whole = {(root.site, root.step, root.position): root for root in roots}
    chosen = [
        (coordinate, whole.get((row.site.path, row.step, row.position)) if alone else None)
        for row in rows
        for coordinate in surviving_coordinates(row)
        for alone in (row.surviving == 1 and _rounds(coordinate),)
    ]
    screened: list[list[Screening]] = [[] for _ in chosen]
    spent = ""
    try:
        for recipient in EXECUTIONS:
            for number, (coordinate, row_result) in enumerate(chosen):
                trials.report(f"single coordinates, {recipient}", number, len(chosen))
                screening = _of_the_row(row_result, coordinate, recipient) or trials.screen(
                    (ShrinkEdit.of_coordinate(coordinate),), recipient
                )
                screened[number].append(screening)
    except BudgetSpentError as error:
        spent = str(error)
    found = tuple(
        _result(coordinate, tuple(screenings))
        for (coordinate, _), screenings in zip(chosen, screened, strict=True)
        if screenings
    )
    return found, spent


def best_first(coordinates: Sequence[CoordinateResult]) -> list[CoordinateResult]:
    """Return the coordinates that were sufficient alone: in both directions before in one, then by execution order."""

    def directions(coordinate: CoordinateResult) -> int:
        return sum(screening.gives_donor_token for screening in coordinate.screenings)

    return sorted(
        (coordinate for coordinate in coordinates if directions(coordinate)),
        key=lambda coordinate: -directions(coordinate),
    )


def _rounds(coordinate: CoordinateDifference) -> bool:
    return dtype_from_name(coordinate.rounded_dtype) in SIXTEEN_BIT_TYPES


def _of_the_row(
    row: RootResult | None, coordinate: CoordinateDifference, recipient: str
) -> Screening | None:
    """Return the row's screening as the coordinate's, where both are one arm and it was not sufficient.

    A sufficient one is run again: what is claimed has receipts of its own.
    """
    if row is None:
        return None
    for screening in row.screenings:
        settled = screening.judgement in (Judgement.NOT_SUFFICIENT, Judgement.CHANGES)
        if screening.recipient == recipient and settled and screening.edited is not None:
            return dataclasses.replace(
                screening,
                edits=(ShrinkEdit.of_coordinate(coordinate).to_json(),),
                reasons=(*screening.reasons, _SAME_ARM),
                edited=dataclasses.replace(screening.edited, receipts=()),
            )
    return None


def _result(
    difference: CoordinateDifference, screenings: tuple[Screening, ...]
) -> CoordinateResult:
    place = difference.coordinate
    return CoordinateResult(
        name=place.name,
        site=place.site.path,
        step=place.step,
        position=place.position,
        rank_index=place.rank_index,
        reference=difference.reference,
        candidate=difference.candidate,
        reference_bits=difference.reference_bits,
        candidate_bits=difference.candidate_bits,
        rounded_reference_bits=difference.rounded_reference_bits,
        rounded_candidate_bits=difference.rounded_candidate_bits,
        boundary=difference.boundary.boundary,
        edits=(ShrinkEdit.of_coordinate(difference).to_json(),),
        screenings=screenings,
    )
