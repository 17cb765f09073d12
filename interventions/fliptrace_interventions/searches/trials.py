"""Runs a search's experiments: through the journal, within the budget, with progress.

Every search asks here and nowhere else, so a run that was finished once is never repeated, by no search and in no later
sitting, and what a search has spent does not depend on where it was interrupted. Finished is a screening, or a proof in
one direction; a kill in the middle of one repeats that one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from fliptrace.judgements import (
    Arm,
    DirectionResult,
    Reconstruction,
    Screening,
    Verdict,
)
from fliptrace_interventions.budget import Budget, Spending
from fliptrace_interventions.edits import CacheEdit, Edit, edits_to_json
from fliptrace_interventions.journal import Entry, Journal, content_key
from fliptrace_interventions.judging import combined
from fliptrace_interventions.workbench import EXECUTIONS, Workbench

#: Called as progress(what, done, total); the total is one more than done where it cannot be known.
Progress = Callable[[str, int, int], None]


class Trials:
    """The experiments of one investigation.

    Attributes:
        workbench: where they run.
        spending: what they took, in this sitting and in earlier ones.
        forwards: forward passes, likewise.
        resumed: how many of them an earlier sitting had finished.
    """

    def __init__(
        self,
        workbench: Workbench,
        *,
        budget: Budget | None = None,
        journal: Journal | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Start with nothing spent; without a journal finished runs are kept in memory."""
        self.workbench = workbench
        self.spending = Spending(budget)
        self.forwards = 0
        self.resumed = 0
        self._journal = Journal() if journal is None else journal
        self._progress = progress
        self._asked: set[str] = set()
        bench = workbench
        self._pair: dict[str, Any] = {
            "traces": [bench.reference.fingerprint(), bench.candidate.fingerprint()],
            "target_step": bench.target_step,
            "reduction": bench.reduction,
            "seed": bench.seed,
            "environment": bench.environment,
        }

    def report(self, what: str, done: int, total: int) -> None:
        """Tell how far a search is."""
        if self._progress is not None:
            self._progress(what, done, total)

    def reconstruct(self) -> tuple[Reconstruction, ...]:
        """Reconstruct both recordings. It counts as no run, and is done whatever the budget."""

        def run() -> Any:
            return [found.to_json() for found in self.workbench.reconstruct()]

        found = self._known("reconstruct", {}, 0, run, lambda _: 0)
        return tuple(Reconstruction.from_json(document) for document in found)

    def screen(
        self, edits: Sequence[Edit], recipient: str, *, between: str = "recorded"
    ) -> Screening:
        """Screen edits; see Workbench.screen.

        Raises:
            BudgetSpentError: there is no room for it.
        """

        def run() -> Any:
            return self.workbench.screen(edits, recipient, between=between).to_json()

        question = {
            "edits": edits_to_json(edits),
            "recipient": recipient,
            "between": between,
            "repeats": self.workbench.repeats,
        }
        found = self._known("screen", question, 1, run, _was_run)
        return Screening.from_json(found)

    def prove(
        self,
        edits: Sequence[Edit],
        recipients: Sequence[str] = EXECUTIONS,
        *,
        between: str = "recorded",
    ) -> Verdict:
        """Prove a claim, one direction after another; see Workbench.prove.

        Raises:
            BudgetSpentError: there is no room for it in every direction; nothing is run then.
        """
        cost = self.cost_of_proof(edits)
        self.spending.require(cost * len(recipients))
        verdicts = [self._prove(edits, recipient, between, cost) for recipient in recipients]
        results = tuple(result for verdict in verdicts for result in verdict.directions)
        return dataclasses.replace(
            verdicts[0],
            judgement=combined(tuple(result.judgement for result in results)),
            directions=results,
            reasons=tuple(reason for verdict in verdicts for reason in verdict.reasons),
        )

    def cost_of_proof(self, edits: Sequence[Edit]) -> int:
        """Return how many runs a proof in one direction takes at the most."""
        bench = self.workbench
        shams = 0 if all(isinstance(edit, CacheEdit) for edit in edits) else bench.shams
        return 2 * bench.repeats + 2 + shams

    def continue_freely(
        self,
        edits: Sequence[Edit],
        recipient: str,
        *,
        between: str = "recorded",
        unedited: bool = False,
    ) -> Arm:
        """Continue to the end of the answer; see Workbench.continue_freely.

        Raises:
            BudgetSpentError: there is no room for it.
        """

        def run() -> Any:
            return self.workbench.continue_freely(
                edits, recipient, between=between, unedited=unedited
            ).to_json()

        question = {
            "edits": edits_to_json(edits),
            "recipient": recipient,
            "between": between,
            "unedited": unedited,
            "repeats": self.workbench.repeats,
            "ending": self.workbench.ending,
        }
        found = self._known(
            "continue", question, self.workbench.repeats, run, lambda arm: int(arm["repeats"])
        )
        return Arm.from_json(found)

    def _prove(self, edits: Sequence[Edit], recipient: str, between: str, cost: int) -> Verdict:
        def run() -> Any:
            return self.workbench.prove(edits, recipient, between=between).to_json()

        question = {
            "edits": edits_to_json(edits),
            "recipient": recipient,
            "between": between,
            "repeats": self.workbench.repeats,
            "shams": self.workbench.shams,
        }
        found = self._known(
            "prove",
            question,
            cost,
            run,
            lambda document: sum(map(_runs_of, Verdict.from_json(document).directions)),
        )
        return Verdict.from_json(found)

    def _known(
        self,
        what: str,
        question: dict[str, Any],
        cost: int,
        run: Callable[[], Any],
        runs_of: Callable[[Any], int],
    ) -> Any:
        """Return what is known of a question, or run it and keep the answer."""
        key = content_key({"what": what, **self._pair, **question})
        entry = self._journal.get(key)
        if entry is not None and key in self._asked:
            return entry.value
        if cost:
            self.spending.require(cost)
        if entry is None:
            started, before = time.perf_counter(), self.workbench.forwards
            value = run()
            entry = self._journal.put(
                key,
                Entry(
                    what,
                    value,
                    runs_of(value),
                    self.workbench.forwards - before,
                    time.perf_counter() - started,
                ),
            )
        else:
            self.resumed += 1
        self._asked.add(key)
        self.spending.add(entry.runs, entry.seconds)
        self.forwards += entry.forwards
        return entry.value


def _was_run(screening: dict[str, Any]) -> int:
    return int(screening["edited"] is not None)


def _runs_of(result: DirectionResult) -> int:
    """Count what a proof ran in one direction beyond the unedited arms."""
    arms = sum(arm.repeats for arm in (result.edited, result.free) if arm is not None)
    substituted = ("self-substitution", "latent sham")
    controls = sum(c.name in substituted and c.passed is not None for c in result.controls)
    return arms + controls + (result.specificity.shams if result.specificity else 0)
