"""What trace-intervene does once its options are understood: claims of one's own, or the whole story of a pair."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fliptrace.judgements import Arm, Judgement, Verdict
from fliptrace.views.interventions import ClaimResult, InterventionReport
from fliptrace_interventions.budget import Budget
from fliptrace_interventions.edits import Edit
from fliptrace_interventions.journal import Journal
from fliptrace_interventions.workbench import EXECUTIONS, Workbench

SUFFICIENT, NOTHING_FOUND, VOID = 0, 1, 3
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Task:
    """What to do with a pair.

    Attributes:
        claims: claims of one's own; none means the whole story.
        recipient: ``reference`` or ``candidate``, None for both.
        budget: of the whole story's search.
    """

    claims: tuple[tuple[Edit, ...], ...]
    recipient: str | None
    budget: Budget

    @property
    def searches(self) -> bool:
        """The whole story is asked for."""
        return not self.claims

    def check(self, workbench: Workbench) -> None:
        """Resolve every claim before anything runs.

        Raises:
            InputError: a claim selects nothing, another number than it says, or what is not there.
        """
        for edits in self.claims:
            for recipient in self.recipients:
                workbench.select(edits, recipient)

    @property
    def recipients(self) -> tuple[str, ...]:
        """The executions in which values are substituted."""
        return EXECUTIONS if self.recipient is None else (self.recipient,)


def run_task(
    workbench: Workbench, task: Task, journal: Journal, progress: Progress
) -> InterventionReport:
    """Run claims, or the whole story, and return what to report."""
    if task.searches:
        from fliptrace_interventions.searches.investigation import investigate

        return InterventionReport(
            investigate(workbench, budget=task.budget, progress=progress, journal=journal)
        )
    results = []
    for number, edits in enumerate(task.claims):
        progress("claims", number, len(task.claims))
        verdict = workbench.prove(edits, task.recipient)
        results.append(ClaimResult(verdict, _continuations(workbench, edits, verdict)))
    progress("claims", len(task.claims), len(task.claims))
    return InterventionReport(None, tuple(results))


def _continuations(
    workbench: Workbench, edits: Sequence[Edit], verdict: Verdict
) -> tuple[Arm, ...]:
    """Continue every direction whose token changed to the end of the answer, unedited and edited."""
    arms = []
    for result in verdict.directions:
        if result.judgement not in (Judgement.SUFFICIENT, Judgement.CHANGES):
            continue
        for unedited in (True, False):
            arm = workbench.continue_freely(edits, result.recipient, unedited=unedited)
            what = "own values" if unedited else f"{result.donor}'s values"
            arms.append(dataclasses.replace(arm, name=f"{result.recipient} with {what}"))
    return tuple(arms)


def exit_code(report: InterventionReport) -> int:
    """Return 0 when something sufficient was found, 3 when nothing was and something is void, else 1.

    As in a search, one direction is enough: what is sufficient there is a cause, whatever the other one says.
    """
    in_one = any(claim.verdict.sufficient_directions for claim in report.claims)
    if in_one or report.judgement is Judgement.SUFFICIENT:
        return SUFFICIENT
    return VOID if report.judgement is Judgement.VOID else NOTHING_FOUND
