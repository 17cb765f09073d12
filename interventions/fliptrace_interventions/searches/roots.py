"""Substitute every root row of a pair, whole and one by one, in execution order."""

from __future__ import annotations

from collections.abc import Sequence

from fliptrace.judgements import RootResult, Screening
from fliptrace.verdicts import RowDifference
from fliptrace_interventions.budget import BudgetSpentError
from fliptrace_interventions.edits import ShrinkEdit
from fliptrace_interventions.searches.trials import Trials
from fliptrace_interventions.workbench import EXECUTIONS


def root_rows(trials: Trials) -> tuple[RowDifference, ...]:
    """Return the pair's surviving root rows up to the target step, in execution order."""
    rows = trials.workbench.pair.diff.roots
    chosen = [row for row in rows if row.step <= trials.workbench.target_step]
    return tuple(sorted(chosen, key=lambda row: (row.step, row.order, row.position)))


def screen_roots(
    trials: Trials, rows: Sequence[RowDifference]
) -> tuple[tuple[RootResult, ...], str]:
    """Screen rows in both directions: first all of them in the reference's execution, then in the candidate's.

    Args:
        trials: runs them.
        rows: from root_rows.

    Returns:
        The rows that were tried, in execution order, and why it ended early ("" when it did not).
    """
    screened: list[list[Screening]] = [[] for _ in rows]
    spent = ""
    try:
        for recipient in EXECUTIONS:
            for number, row in enumerate(rows):
                trials.report(f"root rows, {recipient}", number, len(rows))
                screened[number].append(trials.screen((ShrinkEdit.of_row(row),), recipient))
    except BudgetSpentError as error:
        spent = str(error)
    found = tuple(
        RootResult(
            name=row.name,
            site=row.site.path,
            step=row.step,
            position=row.position,
            order=row.order,
            surviving=row.surviving,
            edits=(ShrinkEdit.of_row(row).to_json(),),
            screenings=tuple(screenings),
            fate=row.fate.value,
        )
        for row, screenings in zip(rows, screened, strict=True)
        if screenings
    )
    return found, spent


def is_sufficient(result: RootResult) -> bool:
    """Tell whether the row alone gave the donor's token in some direction."""
    return any(screening.gives_donor_token for screening in result.screenings)
