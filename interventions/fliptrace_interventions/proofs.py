"""Prove a claim in one direction: arms with repeats, free arms, controls, shams, footprint, and the judgement."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fliptrace.judgements import (
    Arm,
    Control,
    DirectionResult,
    Footprint,
    Judgement,
    Reconstruction,
    Specificity,
)
from fliptrace_interventions.arms import ArmRun, ArmSettings
from fliptrace_interventions.bench import FORCED, Bench
from fliptrace_interventions.controls import (
    cause_of,
    latent_sham,
    self_substitution,
    surviving_shams,
)
from fliptrace_interventions.footprint import footprint
from fliptrace_interventions.judging import Evidence, judge
from fliptrace_interventions.plans import Plan


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a proof is run.

    Attributes:
        free: also the arms without forced tokens; end_ids: tokens that end them.
        shams: surviving shams; seed: of their draw.
    """

    free: bool
    end_ids: tuple[int, ...]
    shams: int
    seed: int


def prove_direction(
    bench: Bench,
    plan: Plan,
    evidence: Evidence,
    reconstructions: tuple[Reconstruction, ...],
    extent: Extent,
) -> DirectionResult:
    """Run everything and judge. What voids the claim ends it: nothing more is run then.

    Args:
        bench: where arms run; the caller has chosen the reduction.
        plan: of the edited arm.
        evidence: what is known before anything ran.
        reconstructions: of both recordings.
        extent: how much to run.
    """
    evidence = dataclasses.replace(evidence, reconstructions=reconstructions)
    if evidence.not_applicable or not all(
        found.equal and found.restored_start for found in reconstructions
    ):
        return _result(plan, evidence)
    unedited = bench.unedited(plan, FORCED, bench.repeats - 1)
    with_rows = dataclasses.replace(FORCED, keep_rows=True)
    own_rows = bench.run(plan.unedited(), with_rows)
    edited = bench.repeated(plan, FORCED, unedited[:1], bench.repeats - 1)
    edited.append(bench.run(plan, with_rows, unedited[:1]))
    evidence = dataclasses.replace(
        evidence,
        unedited=bench.arm("unedited", [*unedited, own_rows]),
        edited=bench.arm("edited", edited),
        wrong_operand=edited[0].wrong_operand,
        trace_changes=_trace_changes(plan),
    )
    if judge(evidence)[0] is Judgement.VOID:
        return _result(plan, evidence)
    left = footprint(own_rows.rows, edited[-1].rows, plan.recipient, plan.donor)
    free = _free_arms(bench, plan, extent) if extent.free else ()
    controls, specificity = _controls(bench, plan, evidence, unedited[0], extent)
    evidence = dataclasses.replace(
        evidence, others=free, controls=controls, trace_changes=_trace_changes(plan)
    )
    return _result(plan, evidence, specificity, left)


def _free_arms(bench: Bench, plan: Plan, extent: Extent) -> tuple[Arm, ...]:
    """Run the unedited and the edited arm without forced tokens, up to the target step."""
    settings = ArmSettings(free=True, end_ids=extent.end_ids)
    unedited = bench.unedited(plan, settings, bench.repeats)
    edited = bench.repeated(plan, settings, unedited[:1], bench.repeats)
    return bench.arm("unedited, free", unedited), bench.arm("edited, free", edited)


def _controls(
    bench: Bench, plan: Plan, evidence: Evidence, unedited: ArmRun, extent: Extent
) -> tuple[tuple[Control, ...], Specificity | None]:
    def run(sham: Plan) -> ArmRun:
        return bench.run(sham, FORCED, (unedited,))

    cause = cause_of(plan, bench.engine)
    controls = [
        self_substitution(plan, unedited, run),
        latent_sham(cause, plan, unedited, run, bench.engine),
    ]
    if cause is None or extent.shams == 0:
        why = "no recorded shrink is edited" if cause is None else "none were asked for"
        controls.append(Control("surviving shams", None, f"not run: {why}"))
        return tuple(controls), None
    specificity, arrived = surviving_shams(
        cause,
        plan,
        run,
        bench.engine,
        count=extent.shams,
        seed=extent.seed,
        tokens=(evidence.recipient_token, evidence.donor_token),
    )
    return (*controls, arrived), specificity


def _trace_changes(plan: Plan) -> tuple[str, ...]:
    return (*plan.recipient.changes(), *plan.donor.changes())


def _result(
    plan: Plan,
    evidence: Evidence,
    specificity: Specificity | None = None,
    left: Footprint | None = None,
) -> DirectionResult:
    judgement, reasons = judge(evidence)
    free_unedited, free = evidence.others or (None, None)
    return DirectionResult(
        recipient=plan.recipient.which,
        donor=plan.donor.which,
        recipient_token=evidence.recipient_token,
        donor_token=evidence.donor_token,
        unedited=evidence.unedited,
        edited=evidence.edited,
        free=free,
        free_unedited=free_unedited,
        controls=evidence.controls,
        specificity=specificity,
        footprint=left,
        judgement=judgement,
        reasons=reasons,
    )
