"""What was claimed of an edit, what its arms showed, and how it was judged."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fliptrace.judgements.documents import Value

#: Said with every verdict.
CAVEAT = (
    "Sufficient means: with this value in place, and everything after it computed as stated, the donor's token "
    "follows. It does not mean necessary: other differences may be sufficient too, and without this one the token may "
    "flip all the same."
)


class Judgement(StrEnum):
    """The five outcomes of an experiment. VOID says nothing about the edit: the experiment itself failed."""

    SUFFICIENT = "sufficient"
    CHANGES = "changes, but not to the donor's token"
    NOT_SUFFICIENT = "not sufficient"
    NOT_APPLICABLE = "not applicable"
    VOID = "void"


@dataclass(frozen=True, slots=True)
class Receipt(Value):
    """Evidence that an edit reached the operation that reads it. All digests are 32 hexadecimal digits.

    Attributes:
        place: ``layer 2 mlp.up_proj, prefill`` or ``cache of layer 3 before step 36``.
        digest_before: of the recipient's recorded value.
        digest_written: of the tensor that was handed over.
        digest_consumed: of the tensor that arrived, hashed inside its consumer; "" when the consumer never ran.
        landed: written and consumed are equal and there.
    """

    place: str
    digest_before: str
    digest_written: str
    digest_consumed: str
    landed: bool


@dataclass(frozen=True, slots=True)
class Arm(Value):
    """One continuation, with all its repeats.

    Attributes:
        name: ``unedited``, ``edited``, ``edited, free`` …
        first_step: the step at which it starts; target_step: the step whose token is its answer.
        token_id: the token chosen at the target step, None when a free arm ended before it.
        token_text: its text.
        top_values: the two largest logits at the target step; top_ids: their tokens, lowest id first among equals.
        tied: how many tokens share the largest logit exactly (1: no tie).
        logits_digest: of the whole logits row at the target step.
        repeats: how often it ran; repeatable: tokens and logits digests of every step were bit-equal in all of them.
        forwards: forward passes of one repeat.
        stopped_early_at: the step after which its state was bit-equal to the unedited arm's (an unedited arm's: to that
            of another one from the same start), so that the rest is equal by construction; None: it ran to its end.
        receipts: one per edited place, of the first repeat that fails, else of the first.
        changed_operands: sites at which the shrink's operand was not the recorded one although the recorded shrink, or
            the edit, was handed over; named, in execution order.
        token_ids: the tokens chosen from ``first_step`` on; forced arms choose, but are fed the recorded ones.
        left_prefix_at: in a free arm the first step whose token is not the recorded one, before the target step.
        text: in a free arm that ran to the end, the whole generated text; answer: what was extracted from it.
        correct: the answer equals the expected one; None without an expected answer.
        stop_reason: why a free arm ended.
    """

    name: str
    first_step: int
    target_step: int
    token_id: int | None
    token_text: str
    top_values: tuple[float, float]
    top_ids: tuple[int, int]
    tied: int
    logits_digest: str
    repeats: int
    repeatable: bool
    forwards: int
    stopped_early_at: int | None = None
    receipts: tuple[Receipt, ...] = ()
    changed_operands: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    left_prefix_at: int | None = None
    text: str | None = None
    answer: str | None = None
    correct: bool | None = None
    stop_reason: str = ""

    @property
    def margin(self) -> float:
        """Largest logit minus the second largest; 0.0 is a tie."""
        largest, second = self.top_values
        return 0.0 if largest == second else largest - second

    @property
    def decided_by_tie_break(self) -> bool:
        """The token was chosen among exact equals, the lowest id first."""
        return self.tied > 1


@dataclass(frozen=True, slots=True)
class Specificity(Value):
    """How special the cause is: what other coordinates of its record do when pushed as far.

    Attributes:
        shams: how many were tried; asked: how many were asked for.
        other_token: how many gave another token than the recipient's; donor_token: of these, how many the donor's.
        seed: of the draw.
        ulp: by how many 16-bit ULP each was pushed, as the cause.
        record: whose coordinates they are.
        sentence: for people.
    """

    shams: int
    asked: int
    other_token: int
    donor_token: int
    seed: int
    ulp: int
    record: str
    sentence: str


@dataclass(frozen=True, slots=True)
class FootprintLayer(Value):
    """Key and value elements of one layer that the edit changed in one step's rows, beside what was observed there.

    Attributes:
        layer: its number.
        keys: key elements that differ between the edited and the unedited arm; values likewise.
        observed_keys: key elements that differ between the two recordings in the same token rows; observed_values
            likewise.
        positions: the changed rows' token positions, at most 64.
        same_positions: the changed elements are exactly the observed ones of these rows.
        same_bits: every changed element has the donor's recorded bits.
    """

    layer: int
    keys: int
    values: int
    observed_keys: int
    observed_values: int
    positions: tuple[int, ...]
    same_positions: bool
    same_bits: bool


@dataclass(frozen=True, slots=True)
class Footprint(Value):
    """What the edit left in the cache, among the rows written from its own step to the target step.

    Attributes:
        keys: key elements that differ between the edited and the unedited arm, all steps; values likewise.
        step: the first step in whose rows something changed, None when nothing did.
        layers: of that step, the layers with any, in order.
        same_positions: in the first of these layers the elements are exactly those that differ between the two
            recordings; None when nothing changed.
        same_bits: and they have the donor's recorded bits; None when nothing changed.
        sentence: for people.
    """

    keys: int
    values: int
    step: int | None
    layers: tuple[FootprintLayer, ...]
    same_positions: bool | None
    same_bits: bool | None
    sentence: str


@dataclass(frozen=True, slots=True)
class Control(Value):
    """One control of a claim.

    Attributes:
        name: ``self-substitution``, ``latent sham``, ``restored start`` …
        passed: None where it was not possible; the sentence says why.
        sentence: for people.
    """

    name: str
    passed: bool | None
    sentence: str


@dataclass(frozen=True, slots=True)
class Screening(Value):
    """One edited arm beside the unedited arm of the same start: cheap, with receipts, without controls.

    Attributes:
        recipient: ``reference`` or ``candidate``; donor: the other.
        recipient_token: token id at the target step in the recording; donor_token likewise.
        edits: as JSON.
        judgement: what this one pair of arms says; a proof may still find it void.
        reasons: sentences.
        unedited: None where nothing had to run; edited likewise.
    """

    recipient: str
    donor: str
    recipient_token: int
    donor_token: int
    edits: tuple[dict[str, Any], ...]
    judgement: Judgement
    reasons: tuple[str, ...]
    unedited: Arm | None
    edited: Arm | None

    @property
    def gives_donor_token(self) -> bool:
        """The donor's value gave the donor's token, and nothing voids it."""
        return self.judgement is Judgement.SUFFICIENT

    @property
    def changes_token(self) -> bool:
        """The token is another than the recipient's, and nothing voids it."""
        return self.judgement in (Judgement.SUFFICIENT, Judgement.CHANGES)


@dataclass(frozen=True, slots=True)
class DirectionResult(Value):
    """A claim in one direction: the donor's values put into the recipient's execution.

    Attributes:
        recipient: ``reference`` or ``candidate``; donor: the other.
        recipient_token: token id at the target step in the recording; donor_token likewise.
        unedited: the arm with the recipient's own values; edited: with the donor's. None where nothing had to run.
        free: the edited arm without forced tokens; free_unedited: the unedited one.
        controls: what had to change nothing.
        specificity: surviving shams; None where they make no sense or were not asked for.
        footprint: what changed in the cache.
        judgement: by the truth table.
        reasons: sentences.
    """

    recipient: str
    donor: str
    recipient_token: int
    donor_token: int
    unedited: Arm | None
    edited: Arm | None
    free: Arm | None
    free_unedited: Arm | None
    controls: tuple[Control, ...]
    specificity: Specificity | None
    footprint: Footprint | None
    judgement: Judgement
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict(Value):
    """A judgement with all its evidence.

    Attributes:
        judgement: the claim in every direction that was run: where directions disagree, the one that says least for
            the edit (void first, then not applicable, not sufficient, changes). ``sufficient_directions`` has the rest.
        claim: the edits in words.
        edits: the edits as JSON; they can be run again.
        directions: one result per direction.
        reasons: sentences; for a void claim, what to do.
        caveat: that sufficiency is not necessity.
        target_step: the step whose token was judged.
        reduction: under which everything after the edit ran; repeatable_by_construction: whether it is.
        between: ``recorded`` or ``recomputed``: what the shrinks between several edited sites were.
        environment: the engine's description where the experiment ran.
        environment_differences: (key, recorded, now): what differs from where the pair was recorded.
    """

    judgement: Judgement
    claim: str
    edits: tuple[dict[str, Any], ...]
    directions: tuple[DirectionResult, ...]
    reasons: tuple[str, ...]
    caveat: str
    target_step: int
    reduction: str
    repeatable_by_construction: bool
    between: str
    environment: dict[str, Any]
    environment_differences: tuple[tuple[str, Any, Any], ...]

    @property
    def sufficient_directions(self) -> tuple[str, ...]:
        """The directions in which the donor's value was sufficient: ``reference <- candidate``."""
        return tuple(
            f"{result.recipient} <- {result.donor}"
            for result in self.directions
            if result.judgement is Judgement.SUFFICIENT
        )
