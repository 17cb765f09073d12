"""Runs arms for a workbench: chooses the reduction, counts, remembers unedited arms, and turns runs into evidence."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fliptrace.capture.engine import Engine
from fliptrace.judgements import Arm, Reconstruction
from fliptrace_interventions.arms import ArmRun, ArmSettings, run_arm
from fliptrace_interventions.judging import Evidence, void_reasons
from fliptrace_interventions.outcomes import same_answer
from fliptrace_interventions.plans import Plan
from fliptrace_interventions.reconstruction import reconstruct
from fliptrace_interventions.recorded import RecordedExecution
from fliptrace_interventions.rounding_errors import Computed, computed_shrinks

#: How many unedited arms are remembered; the least recently used one is run again when needed.
UNEDITED_KEPT = 512

#: A forced arm that ends at the target step: the plain case.
FORCED = ArmSettings()


class Bench:
    """Where arms run.

    Attributes:
        engine: the engine.
        reduction: of the continuations; schedule_seed: its arrival schedule where atomics are simulated, else None.
        repeats: how often an arm runs where repeats are asked for.
        recorded_errors: later shrinks keep the recipient's recorded rounding errors; see rounding_errors.
        runs: arms run so far, reconstructions included; forwards: forward passes so far.
    """

    def __init__(
        self,
        engine: Engine,
        reduction: str,
        schedule_seed: int | None,
        *,
        repeatable_by_construction: bool,
        repeats: int,
        answer: Callable[[str], object],
        expected_answer: object,
        recorded_errors: bool = False,
    ) -> None:
        """Start with nothing run."""
        self.engine = engine
        self.reduction = reduction
        self.schedule_seed = schedule_seed
        self.repeatable_by_construction = repeatable_by_construction
        self.repeats = repeats
        self.answer = answer
        self.expected_answer = expected_answer
        self.recorded_errors = recorded_errors
        self.runs = 0
        self.forwards = 0
        self._unedited: OrderedDict[tuple[Any, ArmSettings], list[ArmRun]] = OrderedDict()
        self._computed: dict[tuple[str, int], Computed] = {}
        self._reconstructions: dict[tuple[str, int], Reconstruction] = {}

    @contextlib.contextmanager
    def continuing(self) -> Iterator[None]:
        """Sum under the continuations' reduction while inside."""
        # A caller's inference mode would make tensors without the version counters that operands are told by.
        with (
            torch.inference_mode(False),
            self.engine.reducing(self.reduction, self.schedule_seed),
        ):
            yield

    @property
    def screening_repeats(self) -> int:
        """One run tells where repeats are equal by construction; elsewhere the repeats decide."""
        return 1 if self.repeatable_by_construction else self.repeats

    def reconstructions(
        self, reference: RecordedExecution, candidate: RecordedExecution, last_step: int
    ) -> tuple[Reconstruction, Reconstruction]:
        """Reconstruct both recordings once."""
        for recorded in (reference, candidate):
            key = (recorded.which, last_step)
            if key not in self._reconstructions:
                found, forwards = reconstruct(self.engine, recorded, last_step)
                self._reconstructions[key] = found
                self.runs += 1
                self.forwards += forwards
        return (
            self._reconstructions[reference.which, last_step],
            self._reconstructions[candidate.which, last_step],
        )

    def run(
        self, plan: Plan, settings: ArmSettings = FORCED, known: Sequence[ArmRun] = ()
    ) -> ArmRun:
        """Run one arm once; with unedited arms that are known it may stop early."""
        computed = self._computed_shrinks(plan) if self.recorded_errors else None
        found = run_arm(
            self.engine, plan, settings, known if self._may_stop_early else (), computed
        )
        self.runs += 1
        self.forwards += found.forwards
        return found

    def _computed_shrinks(self, plan: Plan) -> Computed:
        """Compute a recipient's shrinks anew, once."""
        key = (plan.recipient.which, plan.target)
        if key not in self._computed:
            self._computed[key] = computed_shrinks(self.engine, plan.recipient, plan.target)
            self.forwards += plan.target + 1
        return self._computed[key]

    @property
    def _may_stop_early(self) -> bool:
        """Equal states lead to equal continuations only where the reduction repeats."""
        return self.repeatable_by_construction or self.schedule_seed is not None

    def unedited(self, plan: Plan, settings: ArmSettings, repeats: int) -> list[ArmRun]:
        """Return runs of the unedited arm that belongs to a plan, as many as asked for; run what is missing.

        The first run may stop where it meets an unedited arm that ran before; repeats run to their end.
        """
        own = plan.unedited()
        key = (own.key(), settings)
        found = self._unedited.get(key, [])
        while len(found) < repeats:
            found.append(self.run(own, settings, () if found else self._known(own, settings)))
        self._unedited[key] = found
        self._unedited.move_to_end(key)
        while len(self._unedited) > UNEDITED_KEPT:
            self._unedited.popitem(last=False)
        return found[:repeats]

    def _known(self, plan: Plan, settings: ArmSettings) -> list[ArmRun]:
        """List remembered unedited arms that start from the same state: one step, one cache (none before step 0)."""
        of_either = plan.start == 0 and not self.recorded_errors
        return [
            runs[0]
            for (_, others), runs in self._unedited.items()
            if others == settings
            and runs[0].plan.start == plan.start
            and runs[0].plan.target == plan.target
            and (of_either or runs[0].plan.recipient is plan.recipient)
        ]

    def repeated(
        self, plan: Plan, settings: ArmSettings, known: Sequence[ArmRun], repeats: int
    ) -> list[ArmRun]:
        """Run an arm several times."""
        return [self.run(plan, settings, known) for _ in range(repeats)]

    def screened(
        self, evidence: Evidence, plan: Plan, reconstructions: tuple[Reconstruction, ...]
    ) -> Evidence:
        """Run the pair of arms of a screening; the edited one only where the unedited one does not void it."""
        evidence = dataclasses.replace(evidence, reconstructions=reconstructions)
        if not all(found.equal and found.restored_start for found in reconstructions):
            return evidence
        repeats = self.screening_repeats
        unedited = self.unedited(plan, FORCED, repeats)
        evidence = dataclasses.replace(evidence, unedited=self.arm("unedited", unedited))
        if void_reasons(evidence):
            return evidence
        edited = self.repeated(plan, FORCED, unedited[:1], repeats)
        return dataclasses.replace(
            evidence,
            edited=self.arm("edited", edited),
            wrong_operand=edited[0].wrong_operand,
            trace_changes=(
                *plan.recipient.changes(everything=False),
                *plan.donor.changes(everything=False),
            ),
        )

    def arm(self, name: str, runs: Sequence[ArmRun], *, told: bool = False) -> Arm:
        """Turn the repeats of one arm into a value.

        Args:
            name: of the arm.
            runs: its repeats.
            told: it ran to the end of the answer: add text and answer.
        """
        run = next((run for run in runs if not all(r.landed for r in run.receipts)), runs[0])
        plan = run.plan
        choice = run.choice(plan.target)
        recorded = plan.recipient.token_ids
        left = next(
            (
                step
                for step, token in enumerate(run.fed, start=plan.start)
                if step < plan.target and token != plan.tokens.get(step, recorded[step])
            ),
            None,
        )
        state = None if choice is None else run.states[plan.target - plan.start]
        text = answer = correct = None
        if told:
            prefix = [plan.tokens.get(step, recorded[step]) for step in range(plan.start)]
            text = self.engine.text_of([*prefix, *run.fed])
            extracted = self.answer(text)
            answer = None if extracted is None else str(extracted)
            if self.expected_answer is not None:
                correct = same_answer(extracted, self.expected_answer)
        return Arm(
            name=name,
            first_step=plan.start,
            target_step=plan.target,
            token_id=None if choice is None else choice.token,
            token_text="" if choice is None else self.engine.text_of([choice.token], special=True),
            top_values=(math.nan, math.nan) if choice is None else choice.top_values,
            top_ids=(-1, -1) if choice is None else choice.top_ids,
            tied=0 if choice is None else choice.tied,
            logits_digest="" if state is None else state.logits,
            repeats=len(runs),
            repeatable=all(runs[0].is_equal(other) for other in runs[1:]),
            forwards=run.forwards,
            stopped_early_at=run.stopped_early_at,
            receipts=tuple(run.receipts),
            changed_operands=tuple(run.changed_operands),
            token_ids=_chosen(run),
            left_prefix_at=left,
            text=text,
            answer=answer,
            correct=correct,
            stop_reason=run.stop_reason,
        )


def _chosen(run: ArmRun) -> tuple[int, ...]:
    return tuple(choice.token for choice in run.choices)
