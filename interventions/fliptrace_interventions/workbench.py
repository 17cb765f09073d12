"""The workbench: a recorded pair on an engine, ready for experiments.

Everything that the arms share is kept here: the two recordings, unedited arms that ran already, the check that both
recordings can be reconstructed, and the counts of what was run. An experiment uses the engine's cache; its reduction,
interceptors and hooks are as before when it is over, whatever happened inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fliptrace.capture.engine import Engine
from fliptrace.errors import InputError
from fliptrace.judgements import (
    CAVEAT,
    Arm,
    DirectionResult,
    Reconstruction,
    Screening,
    Verdict,
)
from fliptrace.pair import Pair
from fliptrace_interventions.arms import ArmSettings
from fliptrace_interventions.bench import Bench
from fliptrace_interventions.checks import check_proof
from fliptrace_interventions.edits import Edit
from fliptrace_interventions.identity import told_differences
from fliptrace_interventions.judging import Evidence, combined, judge
from fliptrace_interventions.outcomes import gsm8k_answer
from fliptrace_interventions.plans import Plan
from fliptrace_interventions.proofs import Extent, prove_direction
from fliptrace_interventions.recorded import RecordedExecution
from fliptrace_interventions.selection import Selection, resolve
from fliptrace_kernels import ReductionError, parse_reduction

#: The two executions of a pair.
EXECUTIONS = ("reference", "candidate")
#: How shrinks after an edit may come about, and what that adds to the reduction's name wherever it is told or kept.
CONTINUATIONS = {"computed": "", "recorded": " with the recipient's recorded rounding errors"}


class Workbench:
    """A pair on an engine.

    Attributes:
        pair: the recorded pair.
        engine: where continuations run.
        reference: the reference as it was recorded; candidate likewise.
        target_step: the step whose token is judged: the flip, unless another was asked for.
        reduction: of the continuations, in its long form, and whether recorded rounding errors are kept.
        repeats, shams, seed: as asked.
        environment: the engine's description, without the reduction that it happens to be set to.
        environment_differences: (key, recorded, now): what differs from where the pair was recorded, of all that is
            told and not refused. Reconstruction decides whether it matters.
    """

    def __init__(
        self,
        pair: Pair,
        engine: Engine,
        *,
        reduction: str = "unsplit",
        repeats: int = 2,
        shams: int = 20,
        seed: int = 0,
        target: int | None = None,
        allow_unrepeatable: bool = False,
        answer: Callable[[str], object] | None = None,
        expected_answer: object = None,
        max_new_tokens: int | None = None,
        continuation: str = "computed",
    ) -> None:
        """Check that the pair and the engine belong together.

        Args:
            pair: from trace_pair or load_pair.
            engine: with the pair's model and adapter.
            reduction: of everything after an edit.
            repeats: how often each arm of a proof runs, at least 2.
            shams: surviving shams per direction of a proof.
            seed: of the shams, and the arrival schedule of simulated atomics.
            target: the step whose token is judged; None: the flip step. Needed where nothing flipped.
            allow_unrepeatable: accept a reduction that is not repeatable by construction; the repeats then decide, and
                an experiment whose repeats differ is void.
            answer: takes an answer out of a generated text; None: the final number, as GSM8K asks for it.
            expected_answer: what the answer should be; continuations then say whether it is correct.
            max_new_tokens: at which length of the whole answer a free continuation ends at the latest; None: as
                recorded.
            continuation: ``computed``: everything after an edit is what the reduction gives. ``recorded``: each later
                shrink keeps the rounding error that the recipient recorded: another question, with verdicts of its own;
                ``reduction`` then says so. See fliptrace_interventions.rounding_errors.

        Raises:
            InputError: the traces are redacted, cut short or of another model, adapter, dtype or engine; nothing
                flipped and no target was given; a reduction that is not repeatable was not allowed.
        """
        check_proof(repeats, shams, seed, max_new_tokens)
        self.pair = pair
        self.engine = engine
        self._max_new_tokens = max_new_tokens
        self.reference = RecordedExecution(pair.reference, engine, "reference")
        self.candidate = RecordedExecution(pair.candidate, engine, "candidate")
        self.target_step = self._choose_target(target)
        identity, repeatable = _continuation(reduction, allow_unrepeatable)
        if continuation not in CONTINUATIONS:
            raise InputError(
                f"continuation must be one of {', '.join(CONTINUATIONS)}; got {continuation!r}"
            )
        if continuation == "recorded" and not repeatable:
            raise InputError(
                f"recorded rounding errors are told apart from a reduction that repeats; {identity} does not, so use "
                "unsplit, or continuation='computed'"
            )
        self.reduction = identity + CONTINUATIONS[continuation]
        self.repeats, self.shams, self.seed = repeats, shams, seed
        self.environment: dict[str, Any] = {
            name: dict(section)
            for name, section in engine.describe().items()
            if name != "reduction"  # the engine's own; experiments choose theirs
        }
        self.environment_differences = tuple(
            dict.fromkeys(
                difference
                for trace in (pair.reference, pair.candidate)
                for difference in told_differences(trace, self.environment)
            )
        )
        self._bench = Bench(
            engine,
            identity,
            seed if engine.simulates_atomics and not repeatable else None,
            repeatable_by_construction=repeatable,
            repeats=repeats,
            answer=answer or gsm8k_answer,
            expected_answer=expected_answer,
            recorded_errors=continuation == "recorded",
        )

    @property
    def runs(self) -> int:
        """Arms run so far, reconstructions included."""
        return self._bench.runs

    @property
    def forwards(self) -> int:
        """Forward passes run so far."""
        return self._bench.forwards

    @property
    def ending(self) -> dict[str, Any]:
        """How free continuations end and are read, as JSON: what their result depends on besides the edits."""
        answer = self._bench.answer
        expected = self._bench.expected_answer
        return {
            "last_step": self._last_step,
            "end_ids": list(self._end_ids),
            "answer": f"{answer.__module__}.{getattr(answer, '__qualname__', type(answer).__name__)}",
            "expected_answer": None if expected is None else str(expected),
        }

    @property
    def flip_step(self) -> int | None:
        """The step at which the executions chose different tokens, None when they never did."""
        flip = self.pair.diff.flip
        return None if flip is None else flip.step

    @property
    def tokens(self) -> tuple[int, int]:
        """The tokens chosen at the target step: (reference, candidate)."""
        step = self.target_step
        return self.reference.token_ids[step], self.candidate.token_ids[step]

    def execution(self, which: str) -> RecordedExecution:
        """Return the recording called ``reference`` or ``candidate``.

        Raises:
            InputError: another name.
        """
        if which not in EXECUTIONS:
            raise InputError(f"an execution is one of {', '.join(EXECUTIONS)}; got {which!r}")
        return self.reference if which == "reference" else self.candidate

    def select(self, edits: Sequence[Edit], recipient: str = "reference") -> Selection:
        """Resolve edits without running anything: what they select, how many elements, and whether they differ.

        Raises:
            InputError: an edit selects nothing, another number of elements than it expects, an evicted or unknown
                place, or the same element as another edit.
        """
        return self._resolve(edits, recipient, "recorded")[0]

    def reconstruct(self) -> tuple[Reconstruction, Reconstruction]:
        """Replay both executions from an empty cache by token ids and shrinks alone; done once, then remembered."""
        with self._bench.continuing():
            return self._bench.reconstructions(self.reference, self.candidate, self.target_step)

    def screen(
        self, edits: Sequence[Edit], recipient: str = "reference", *, between: str = "recorded"
    ) -> Screening:
        """Run one edited arm beside the unedited arm of the same start, which is remembered.

        Args:
            edits: what to put in.
            recipient: ``reference`` or ``candidate``; the other is the donor.
            between: what the shrinks between several edited sites are: ``recorded`` or ``recomputed``.

        Raises:
            InputError: see select.
        """
        selection, plan = self._resolve(edits, recipient, between)
        evidence = self._evidence(plan, selection)
        if not evidence.not_applicable:
            with self._bench.continuing():
                reconstructions = self.reconstruct()
                evidence = self._bench.screened(evidence, plan, reconstructions)
        judgement, reasons = judge(evidence)
        return Screening(
            recipient=plan.recipient.which,
            donor=plan.donor.which,
            recipient_token=evidence.recipient_token,
            donor_token=evidence.donor_token,
            edits=tuple(edit.to_json() for edit in edits),
            judgement=judgement,
            reasons=reasons,
            unedited=evidence.unedited,
            edited=evidence.edited,
        )

    def prove(
        self,
        edits: Sequence[Edit],
        recipient: str | None = None,
        *,
        free: bool = True,
        shams: int | None = None,
        between: str = "recorded",
    ) -> Verdict:
        """Run a claim with repeats, controls, shams and footprint, and judge it.

        Args:
            edits: what to put in.
            recipient: ``reference`` or ``candidate``; None: both directions.
            free: also run each arm without forced tokens, up to the target step.
            shams: surviving shams per direction; None: the workbench's number.
            between: see screen.

        Raises:
            InputError: see select.
        """
        chosen = EXECUTIONS if recipient is None else (recipient,)
        resolved = [self._resolve(edits, which, between) for which in chosen]
        extent = Extent(
            free=free,
            end_ids=self._end_ids,
            shams=self.shams if shams is None else shams,
            seed=self.seed,
        )
        results: list[DirectionResult] = []
        with self._bench.continuing():
            for selection, plan in resolved:
                evidence = self._evidence(plan, selection)
                found = () if evidence.not_applicable else self.reconstruct()
                results.append(prove_direction(self._bench, plan, evidence, found, extent))
        return self._verdict(edits, results, between)

    def continue_freely(
        self,
        edits: Sequence[Edit] = (),
        recipient: str = "reference",
        *,
        between: str = "recorded",
        unedited: bool = False,
    ) -> Arm:
        """Continue to the end of the answer without forced tokens; the arm holds the text and the answer.

        Args:
            edits: what to put in; none continues the recipient itself from the target step.
            recipient: in whose execution.
            between: see screen.
            unedited: put the recipient's own values in at the places of the edits: what to compare with.

        Raises:
            InputError: see select.
        """
        if edits:
            selection, plan = self._resolve(edits, recipient, between)
            if selection.not_applicable and not unedited:
                raise InputError(
                    f"there is nothing to continue: {selection.not_applicable[0]}; leave the edits out to continue the "
                    f"{recipient} itself"
                )
            plan = plan.unedited() if unedited else plan
        else:
            own, donor = self._directed(recipient)
            plan = Plan(own, donor, self.target_step, self.target_step)
        settings = ArmSettings(
            free=True, to_end=True, end_ids=self._end_ids, last_step=self._last_step
        )
        with self._bench.continuing():
            runs = self._bench.repeated(plan, settings, (), self.repeats)
        name = "unedited, free" if unedited or not edits else "edited, free"
        return self._bench.arm(name, runs, told=True)

    def mirrored(
        self, edits: Sequence[Edit], recipient: str = "reference", *, between: str = "recorded"
    ) -> Screening:
        """Screen the same edits in the other direction: the recipient's values put into the donor's execution."""
        return self.screen(edits, self._directed(recipient)[1].which, between=between)

    def _choose_target(self, target: int | None) -> int:
        flip = self.flip_step
        if target is None:
            if flip is None:
                raise InputError(
                    "nothing flipped in this pair, so there is no token to judge; give target=STEP to judge the token "
                    "of that step, or record a pair that diverges"
                )
            return flip
        last = min(self.reference.steps, self.candidate.steps) - 1
        last = last if flip is None else min(last, flip)
        if not 0 <= target <= last:
            what = "the flip" if last == flip else "the last step that both executions have"
            raise InputError(
                f"target must be a step from 0 to {last}, {what}; got {target}. After a flip the executions read other "
                "tokens"
            )
        return target

    def _directed(self, recipient: str) -> tuple[RecordedExecution, RecordedExecution]:
        """Return recipient and donor."""
        own = self.execution(recipient)
        return own, self.candidate if own is self.reference else self.reference

    def _resolve(
        self, edits: Sequence[Edit], recipient: str, between: str
    ) -> tuple[Selection, Plan]:
        own, donor = self._directed(recipient)
        return resolve(edits, own, donor, self.engine, self.target_step, between)

    def _evidence(self, plan: Plan, selection: Selection) -> Evidence:
        """Return what is known before anything runs."""
        step = self.target_step
        return Evidence(
            recipient=plan.recipient.which,
            recipient_token=plan.recipient.token_ids[step],
            donor_token=plan.donor.token_ids[step],
            target_step=step,
            reduction=self.reduction,
            not_applicable=selection.not_applicable,
        )

    @property
    def _end_ids(self) -> tuple[int, ...]:
        return tuple(self.pair.reference.manifest.get("decoding.end_ids") or ())

    @property
    def _last_step(self) -> int:
        """The last step that a free continuation may run: as asked, else as far as the recordings were to go."""
        recorded = self.pair.reference.manifest.get("decoding.max_new_tokens")
        limit = self._max_new_tokens or recorded
        return int(limit or max(self.reference.steps, self.candidate.steps)) - 1

    def _verdict(
        self, edits: Sequence[Edit], results: Sequence[DirectionResult], between: str
    ) -> Verdict:
        reasons = tuple(
            f"{result.recipient} <- {result.donor}: {reason}"
            for result in results
            for reason in result.reasons
        )
        return Verdict(
            judgement=combined(tuple(result.judgement for result in results)),
            claim="; ".join(edit.name for edit in edits),
            edits=tuple(edit.to_json() for edit in edits),
            directions=tuple(results),
            reasons=reasons,
            caveat=CAVEAT,
            target_step=self.target_step,
            reduction=self.reduction,
            repeatable_by_construction=self._bench.repeatable_by_construction,
            between=between,
            environment=self.environment,
            environment_differences=self.environment_differences,
        )

    def __repr__(self) -> str:
        """Say in one line what it is."""
        return (
            f"Workbench({self.pair.title}: step {self.target_step}, continuing under {self.reduction}, "
            f"{self.runs} runs so far)"
        )


def _continuation(reduction: str, allow_unrepeatable: bool) -> tuple[str, bool]:
    """Return a reduction's long form and whether it is repeatable by construction.

    Raises:
        InputError: no reduction, or one that is not repeatable and was not asked for.
    """
    try:
        parsed = parse_reduction(reduction)
    except ReductionError as error:
        raise InputError(str(error)) from error
    if not parsed.is_repeatable and not allow_unrepeatable:
        raise InputError(
            f"{parsed} is not repeatable by construction, so a continuation under it may change the token by itself; "
            "use unsplit, or allow it (allow_unrepeatable=True) and let the repeats decide"
        )
    return str(parsed), parsed.is_repeatable
