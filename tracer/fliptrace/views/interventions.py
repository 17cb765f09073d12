"""What a report says of interventions: the values it is given, and the rows of its tables, the same for every view.

Rows are plain text with every hostile character made visible; page, terminal and notebook only lay them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fliptrace.judgements import (
    Arm,
    CoordinateResult,
    DirectionResult,
    Investigation,
    Judgement,
    RootResult,
    Screening,
    TwoByTwo,
    Value,
    Verdict,
)
from fliptrace.views.escaping import quoted, said, visible
from fliptrace.views.wording import brief, count, exact, listed

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class ClaimResult(Value):
    """A claim that a person asked for.

    Attributes:
        verdict: its proof.
        continuations: free arms to the end of the answer, where they were run.
    """

    verdict: Verdict
    continuations: tuple[Arm, ...] = ()


@dataclass(frozen=True, slots=True)
class InterventionReport(Value):
    """What trace-intervene adds to a pair's report.

    Attributes:
        investigation: the whole story; None where only single claims were run.
        claims: claims that a person asked for, proved.
        command: how to repeat the run, None where it is not known.
    """

    investigation: Investigation | None
    claims: tuple[ClaimResult, ...] = ()
    command: str | None = None

    @property
    def judgement(self) -> Judgement:
        """The best that was found: sufficient before all others; then void, changes, not sufficient, not applicable."""
        found = [claim.verdict.judgement for claim in self.claims]
        if self.investigation is not None:
            found.append(self.investigation.judgement)
        order = (
            Judgement.SUFFICIENT,
            Judgement.VOID,
            Judgement.CHANGES,
            Judgement.NOT_SUFFICIENT,
            Judgement.NOT_APPLICABLE,
        )
        return next(judgement for judgement in order if judgement in found)


#: Judgement -> how a table shows it, with a sign that is no colour.
SIGNS = {
    Judgement.SUFFICIENT: "✓",
    Judgement.CHANGES: "≠",
    Judgement.NOT_SUFFICIENT: "✗",
    Judgement.NOT_APPLICABLE: "–",
    Judgement.VOID: "!",
}


def judged(judgement: Judgement) -> str:
    """Name a judgement with its sign: ``✓ sufficient``."""
    return f"{SIGNS[judgement]} {judgement.value}"


def direction_name(recipient: str, donor: str) -> str:
    """Name a direction: whose execution it is and whose value was put in."""
    return f"{recipient} ← {donor}"


def token_name(token_id: int | None, text: str) -> str:
    """Name a token by its text and id; an arm that ended before its target step has none."""
    if token_id is None:
        return "none: it ended before"
    return f"{quoted(text, 24)} (id {token_id})" if text else f"id {token_id}"


@dataclass(frozen=True, slots=True)
class ArmRow:
    """One arm of a claim, as a table shows it.

    Attributes:
        direction: whose execution, whose value.
        arm: its name.
        token: the token it chose.
        gives: whose token that is: ``recipient's``, ``donor's`` or ``another``.
        margin: between the two largest logits; a tie with how many share the largest.
        receipts: how many edited places were proved to have been consumed.
        repeats: how often it ran, and whether the repeats were bit-equal.
        ended: where it stopped early or left the shared prefix, "" where it ran to its end.
    """

    direction: str
    arm: str
    token: str
    gives: str
    margin: str
    receipts: str
    repeats: str
    ended: str


def arm_rows(result: DirectionResult) -> tuple[ArmRow, ...]:
    """List the arms of one direction, in the order in which they are read."""
    arms = (result.unedited, result.edited, result.free_unedited, result.free)
    return tuple(_arm_row(result, arm) for arm in arms if arm is not None)


def _arm_row(result: DirectionResult, arm: Arm) -> ArmRow:
    return ArmRow(
        direction=direction_name(result.recipient, result.donor),
        arm=visible(arm.name),
        token=token_name(arm.token_id, arm.token_text),
        gives=whose(arm.token_id, result),
        margin=margin_words(arm),
        receipts=receipt_words(arm),
        repeats=f"{arm.repeats}, {'bit-equal' if arm.repeatable else 'NOT equal'}",
        ended=ending(arm),
    )


def whose(token_id: int | None, result: DirectionResult | Screening) -> str:
    """Say whose token an arm chose."""
    if token_id == result.recipient_token:
        return "recipient's"
    return "donor's" if token_id == result.donor_token else "another"


def margin_words(arm: Arm) -> str:
    """The top-2 margin, or the tie that decided."""
    if arm.token_id is None:
        return "none"
    return f"tie of {arm.tied}" if arm.decided_by_tie_break else brief(arm.margin)


def margin_phrase(arm: Arm) -> str:
    """The same within a sentence: ``margin 0.03125``, ``a tie of 3``."""
    if arm.token_id is None:
        return "no margin"
    return f"a {margin_words(arm)}" if arm.decided_by_tie_break else f"margin {margin_words(arm)}"


def receipt_words(arm: Arm) -> str:
    """How many edited places were proved to have reached their consumer."""
    if not arm.receipts:
        return "none due"
    landed = sum(receipt.landed for receipt in arm.receipts)
    return f"{landed} of {len(arm.receipts)} landed"


def ending(arm: Arm) -> str:
    """Say where an arm stopped early, or where a free one left the prefix; "" where there is nothing to say."""
    parts = []
    if arm.stopped_early_at is not None:
        parts.append(
            f"stopped after step {arm.stopped_early_at}: state bit-equal to the unedited arm's"
        )
    if arm.left_prefix_at is not None:
        parts.append(f"left the shared tokens at step {arm.left_prefix_at}")
    if arm.changed_operands:
        names = [visible(name) for name in arm.changed_operands[:3]]
        more = len(arm.changed_operands) - len(names)
        tail = f" and {more} more" if more else ""
        parts.append(
            f"recorded shrinks were handed over on other operands at {listed(names)}{tail}"
        )
    return "; ".join(parts)


def token_margin(arm: Arm, wanted: int, other: int) -> float | None:
    """Return the logit of one token minus that of another: z_wanted - z_other, as the paper's figure 5 draws it.

    None where one of the two is not among the arm's two largest logits, so that its logit was not kept.
    """
    logits = dict(zip(arm.top_ids, arm.top_values, strict=True))
    if wanted not in logits or other not in logits:
        return None
    return 0.0 if logits[wanted] == logits[other] else logits[wanted] - logits[other]


@dataclass(frozen=True, slots=True)
class ClaimEntry:
    """One proved claim with its heading.

    Attributes:
        kind: ``cache``, ``coordinate``, ``root``, ``set`` or ``given``.
        heading: what kind of cause was tried.
        verdict: the claim with its evidence.
        continuations: free arms to the end of the answer, where the claim has its own.
    """

    kind: str
    heading: str
    verdict: Verdict
    continuations: tuple[Arm, ...] = ()

    @property
    def claim(self) -> str:
        """The edits in words."""
        return said(self.verdict.claim)


def proved_claims(report: InterventionReport) -> tuple[ClaimEntry, ...]:
    """List everything that was proved, none twice: cache, coordinates, roots, the minimal set, one's own claims."""
    entries: list[ClaimEntry] = []
    for entry in _claims(report):
        if all(entry.verdict is not known.verdict for known in entries):
            entries.append(entry)
    return tuple(entries)


def _claims(report: InterventionReport) -> Iterator[ClaimEntry]:
    found = report.investigation
    if found is not None:
        if found.cache_substitution is not None:
            yield ClaimEntry("cache", "The whole cache before the flip", found.cache_substitution)
        best = found.best_coordinate
        if best is not None and best.verdict is not None:
            yield ClaimEntry("coordinate", "The best single coordinate", best.verdict)
        for coordinate in found.coordinates:
            if coordinate.verdict is not None and coordinate != best:
                yield ClaimEntry("coordinate", "A single coordinate", coordinate.verdict)
        for root in found.roots:
            if root.verdict is not None:
                yield ClaimEntry("root", "A root row", root.verdict)
        if found.minimal_set is not None and found.minimal_set.verdict is not None:
            yield ClaimEntry("set", "The minimal set", found.minimal_set.verdict)
    for claim in report.claims:
        yield ClaimEntry("given", "A claim of one's own", claim.verdict, claim.continuations)


@dataclass(frozen=True, slots=True)
class TriedRow:
    """A root row or coordinate that was tried, as a table shows it.

    Attributes:
        name: where it is.
        detail: for a root its surviving coordinates and its fate; for a coordinate its two values.
        outcomes: (direction, judgement in words, token) per direction that was run.
        proved: the judgement of the proof, "" where it was only screened.
        kind: ``sufficient``, ``changes``, ``not_sufficient``, ``not_applicable`` or ``void``: the best of the outcomes.
    """

    name: str
    detail: str
    outcomes: tuple[tuple[str, str, str], ...]
    proved: str
    kind: str


def root_rows(roots: Sequence[RootResult]) -> tuple[TriedRow, ...]:
    """List the roots that were tried, each with its judgement."""
    return tuple(
        _tried(
            root,
            visible(root.name),
            f"{count(root.surviving, 'surviving coordinate')}, {visible(root.fate)}",
        )
        for root in roots
    )


def coordinate_rows(coordinates: Sequence[CoordinateResult]) -> tuple[TriedRow, ...]:
    """List the coordinates that were tried, each with its values and judgement."""
    return tuple(
        _tried(
            coordinate,
            visible(coordinate.name),
            f"{exact(coordinate.reference)} ({visible(coordinate.reference_bits)}) against "
            f"{exact(coordinate.candidate)} ({visible(coordinate.candidate_bits)})",
        )
        for coordinate in coordinates
    )


def _tried(result: RootResult | CoordinateResult, name: str, detail: str) -> TriedRow:
    screenings = result.screenings
    judgements = [screening.judgement for screening in screenings]
    if result.verdict is not None:
        judgements += [direction.judgement for direction in result.verdict.directions]
    order = list(Judgement)
    best = min(judgements, key=order.index, default=Judgement.NOT_APPLICABLE)
    return TriedRow(
        name=name,
        detail=detail,
        outcomes=tuple(_outcome(screening) for screening in screenings),
        proved=judged(result.verdict.judgement) if result.verdict is not None else "",
        kind=best.name.lower(),
    )


def _outcome(screening: Screening) -> tuple[str, str, str]:
    arm = screening.edited
    token = "" if arm is None else token_name(arm.token_id, arm.token_text)
    early = arm is not None and arm.stopped_early_at is not None
    word = judged(screening.judgement)
    if early and screening.judgement is Judgement.NOT_SUFFICIENT and arm is not None:
        word += f" (state bit-equal again after step {arm.stopped_early_at})"
    if screening.judgement in (Judgement.VOID, Judgement.NOT_APPLICABLE) and screening.reasons:
        word += f": {said(screening.reasons[0])}"
    return direction_name(screening.recipient, screening.donor), word, token


def two_by_two_cells(square: TwoByTwo) -> tuple[tuple[str, tuple[tuple[str, Arm], ...]], ...]:
    """Return the rows of the 2 × 2: (whose cache, ((whose shrinks, arm), …))."""
    return (
        (
            "reference",
            (
                ("reference", square.reference_cache_reference_shrinks),
                ("candidate", square.reference_cache_candidate_shrinks),
            ),
        ),
        (
            "candidate",
            (
                ("reference", square.candidate_cache_reference_shrinks),
                ("candidate", square.candidate_cache_candidate_shrinks),
            ),
        ),
    )
