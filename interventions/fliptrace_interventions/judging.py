"""The truth table: evidence in, judgement and reasons out. A pure function; nothing runs here.

Guards come first: each looks at one thing that would make the experiment say nothing, and any reason that it returns
makes the claim void. Only then does the edited arm's token decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fliptrace.judgements import Arm, Control, Judgement, Reconstruction


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that a judgement in one direction rests on.

    Attributes:
        recipient: ``reference`` or ``candidate``.
        recipient_token: the token that the recipient's recording has at the target step; donor_token likewise.
        target_step: that step.
        reduction: of the continuations.
        not_applicable: why there was nothing to run; none when there was.
        reconstructions: of both recordings.
        unedited: the arm with the recipient's own values, None where nothing ran; edited likewise.
        others: further arms: free ones.
        wrong_operand: the first edited site whose operand was not the recorded one, "" when all is well.
        controls: what had to change nothing.
        trace_changes: recorded tensors that changed while experiments ran.
    """

    recipient: str
    recipient_token: int
    donor_token: int
    target_step: int
    reduction: str
    not_applicable: tuple[str, ...] = ()
    reconstructions: tuple[Reconstruction, ...] = ()
    unedited: Arm | None = None
    edited: Arm | None = None
    others: tuple[Arm, ...] = ()
    wrong_operand: str = ""
    controls: tuple[Control, ...] = ()
    trace_changes: tuple[str, ...] = ()

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Every arm that ran."""
        pair = (arm for arm in (self.unedited, self.edited) if arm is not None)
        return (*pair, *self.others)


def judge(evidence: Evidence) -> tuple[Judgement, tuple[str, ...]]:
    """Judge a claim in one direction.

    Returns:
        The judgement and its reasons, sentences for people.
    """
    if evidence.not_applicable:
        return Judgement.NOT_APPLICABLE, evidence.not_applicable
    voids = void_reasons(evidence)
    if voids:
        return Judgement.VOID, voids
    return _judge_tokens(evidence)


def void_reasons(evidence: Evidence) -> tuple[str, ...]:
    """Return what the guards say of the evidence so far; none when nothing voids it."""
    return tuple(reason for guard in GUARDS for reason in guard(evidence))


def _judge_tokens(evidence: Evidence) -> tuple[Judgement, tuple[str, ...]]:
    edited = evidence.edited
    if edited is None or edited.token_id is None:
        return Judgement.VOID, ("the edited arm gave no token at the target step; run it again",)
    step, token = evidence.target_step, edited.token_id
    own, donors = evidence.recipient_token, evidence.donor_token
    tie = (
        f"; {edited.tied} tokens share the largest logit, so the lowest id decided"
        if edited.decided_by_tie_break
        else ""
    )
    said = f"with the edit, step {step} gives token {token} ({edited.token_text!r}){tie}"
    if own == donors:
        if token != own:
            return Judgement.CHANGES, (f"{said}, which neither recording has there",)
        return Judgement.NOT_APPLICABLE, (
            f"both recordings have token {own} at step {step}, so there is no donor's token to reach; {said}",
        )
    if token == donors:
        return Judgement.SUFFICIENT, (f"{said}: the donor's token",)
    if token != own:
        return Judgement.CHANGES, (f"{said}: neither the recipient's token nor the donor's",)
    return Judgement.NOT_SUFFICIENT, (f"{said}: still the recipient's token",)


def reconstructed(evidence: Evidence) -> tuple[str, ...]:
    """Both recordings must be reconstructed, bit by bit, here and now."""
    if not evidence.reconstructions:
        return ("neither recording was reconstructed; call reconstruct() first",)
    reasons = []
    for found in evidence.reconstructions:
        if not found.equal:
            reasons.append(
                f"the {found.which} cannot be reconstructed from its token ids and shrinks: {found.first_mismatch}. "
                "This machine does not compute what was recorded; compare the environments, or record the pair again "
                "here"
            )
        elif not found.restored_start:
            reasons.append(
                f"restoring the {found.which}'s cache before step {evidence.target_step} does not give the recorded "
                "logits, although recomputing it from the start does; arms that start from a restored cache would "
                "mislead. Report this as a bug of the engine"
            )
    return tuple(reasons)


def recordings_unchanged(evidence: Evidence) -> tuple[str, ...]:
    """No recorded tensor may have changed while experiments ran."""
    return tuple(
        f"{place} changed in memory during the experiment: something wrote into a recorded tensor. Load the pair "
        "again and repeat; if it comes back, report it"
        for place in evidence.trace_changes
    )


def own_token_kept(evidence: Evidence) -> tuple[str, ...]:
    """The unedited arm must give the recipient's token: else what follows the edit decides, and not the edit."""
    arm = evidence.unedited
    if arm is None or arm.token_id == evidence.recipient_token:
        return ()
    what = (
        "already gives the donor's token"
        if arm.token_id == evidence.donor_token
        else "gives neither recording's token"
    )
    reason = (
        f"the unedited arm {what} ({arm.token_id}, {arm.token_text!r}) at step {evidence.target_step}, not the "
        f"{evidence.recipient}'s own ({evidence.recipient_token}): computing what follows under {evidence.reduction} "
        "changes the token without any edit, so nothing can be said of the edit. Edit a later place, continue under "
        "another reduction, or keep the recorded rounding errors (continuation 'recorded'), which asks another question"
    )
    return (reason,)


def edits_landed(evidence: Evidence) -> tuple[str, ...]:
    """Every edit must have arrived, as written, at the operation that reads it."""
    reasons = []
    for arm in evidence.arms:
        for receipt in arm.receipts:
            if receipt.landed:
                continue
            what = (
                "was never written: the site did not run"
                if not receipt.digest_written
                else "was written, but its reader never ran"
                if not receipt.digest_consumed
                else f"was written as {receipt.digest_written}, but its reader got {receipt.digest_consumed}"
            )
            reasons.append(
                f"{arm.name} arm: the value for {receipt.place} {what}. Check that nothing else hooks or disables this "
                "layer"
            )
    return tuple(reasons)


def operand_recorded(evidence: Evidence) -> tuple[str, ...]:
    """What enters the first edited site must be what was recorded, or the restored state is not the recipient's."""
    if not evidence.wrong_operand:
        return ()
    reason = (
        f"the operand of {evidence.wrong_operand}, the first edited site, is not the recorded one although nothing "
        "before it was edited: the arm does not start from the recipient's state. Check reconstruct()"
    )
    return (reason,)


def repeats_equal(evidence: Evidence) -> tuple[str, ...]:
    """Repeats of an arm must agree bit by bit."""
    return tuple(
        f"{arm.name} arm: its {arm.repeats} repeats were not bit-equal under {evidence.reduction}. Continue under a "
        "reduction that is repeatable, such as unsplit"
        for arm in evidence.arms
        if not arm.repeatable
    )


def controls_passed(evidence: Evidence) -> tuple[str, ...]:
    """What must change nothing changed nothing."""
    return tuple(
        f"control {control.name} failed: {control.sentence}"
        for control in evidence.controls
        if control.passed is False
    )


#: In the order in which their reasons are told.
GUARDS: tuple[Callable[[Evidence], tuple[str, ...]], ...] = (
    reconstructed,
    recordings_unchanged,
    own_token_kept,
    edits_landed,
    operand_recorded,
    repeats_equal,
    controls_passed,
)


def combined(judgements: tuple[Judgement, ...]) -> Judgement:
    """Return the judgement of a claim over its directions: of unequal ones, the one that says least for the edit."""
    order = (
        Judgement.VOID,
        Judgement.NOT_APPLICABLE,
        Judgement.NOT_SUFFICIENT,
        Judgement.CHANGES,
        Judgement.SUFFICIENT,
    )
    return min(judgements, key=order.index)
