"""How a verdict was reached, as the few questions that decide it: one row per question, one column per direction.

A row says yes, no, or what is open; nothing in it is computed anew. The claim is the one that the headline is about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fliptrace.views.escaping import said
from fliptrace.views.interventions import (
    InterventionReport,
    direction_name,
    judged,
    margin_phrase,
    proved_claims,
    receipt_words,
    token_name,
)
from fliptrace.views.wording import count

if TYPE_CHECKING:
    from fliptrace.judgements import Arm, DirectionResult, Investigation, Verdict

#: How an answer is marked, with a sign that is no colour.
MARKS = {"yes": "✓", "no": "✗", "open": "–", "note": "•"}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in one direction.

    Attributes:
        mark: ``yes``, ``no``, ``open`` (not run, or not possible) or ``note`` (a number to weigh).
        text: in a few words.
    """

    mark: str
    text: str

    @property
    def sign(self) -> str:
        """The mark as a sign."""
        return MARKS[self.mark]


@dataclass(frozen=True, slots=True)
class Checks:
    """The questions about one claim.

    Attributes:
        claim: the edits in words.
        directions: their names.
        rows: (question, an answer per direction), in the order in which a doubt would ask them.
    """

    claim: str
    directions: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Answer, ...]], ...]


def checks(report: InterventionReport) -> Checks | None:
    """Return the questions about the claim that the headline is about; None where nothing was proved in a direction."""
    verdict = _headline_claim(report)
    if verdict is None:
        return None
    results = verdict.directions
    found = report.investigation
    rows: list[tuple[str, tuple[Answer, ...]]] = []
    if found is not None and found.reconstruction:
        rows.append(
            (
                "Can the recipient's recording be replayed bit by bit?",
                tuple(_replayed(found, result.recipient) for result in results),
            )
        )
    for question, answer in (
        ("Without the edit, does it give its own token?", _unedited),
        ("With the donor's value, does it give the donor's token?", _edited),
        ("Did the value arrive where it is consumed?", _arrived),
        ("Did every repeat give the same bits?", _repeated),
        ("Do the controls change nothing?", _controlled),
        ("Does it hold without forcing the tokens before?", _free),
        ("Would a push elsewhere have done as well?", _specific),
    ):
        rows.append((question, tuple(answer(result) for result in results)))
    verdicts = tuple(Answer("note", judged(result.judgement)) for result in results)
    rows.append(("Verdict", verdicts))
    names = tuple(direction_name(result.recipient, result.donor) for result in results)
    return Checks(said(verdict.claim), names, tuple(rows))


def _headline_claim(report: InterventionReport) -> Verdict | None:
    """Choose the smallest proved cause, else the whole cache, else the first claim of one's own."""
    found = report.investigation
    candidates: list[Verdict | None] = []
    if found is not None:
        candidates = [
            found.best_coordinate.verdict if found.best_coordinate is not None else None,
            found.minimal_set.verdict if found.minimal_set is not None else None,
            found.cache_substitution,
        ]
        candidates += [root.verdict for root in found.roots]
    candidates += [entry.verdict for entry in proved_claims(report)]
    run = [verdict for verdict in candidates if verdict is not None and verdict.directions]
    best = [verdict for verdict in run if verdict.judgement is report.judgement]
    return next(iter(best or run), None)


def _replayed(found: Investigation, recipient: str) -> Answer:
    replays = [item for item in found.reconstruction if item.which == recipient]
    if not replays:
        return Answer("open", "not run")
    replay = replays[0]
    if replay.equal and replay.restored_start:
        return Answer("yes", f"{count(replay.steps, 'step')} bit-equal")
    wrong = replay.first_mismatch or "the restored start"
    return Answer("no", f"differs: {said(wrong)}")


def _chose(arm: Arm) -> str:
    return f"{token_name(arm.token_id, arm.token_text)}, {margin_phrase(arm)}"


def _unedited(result: DirectionResult) -> Answer:
    arm = result.unedited
    if arm is None:
        return Answer("open", "nothing had to run")
    return Answer("yes" if arm.token_id == result.recipient_token else "no", _chose(arm))


def _edited(result: DirectionResult) -> Answer:
    arm = result.edited
    if arm is None:
        return Answer("open", "nothing had to run")
    return Answer("yes" if arm.token_id == result.donor_token else "no", _chose(arm))


def _arrived(result: DirectionResult) -> Answer:
    arm = result.edited
    if arm is None or not arm.receipts:
        return Answer("open", "no receipt was due")
    landed = all(receipt.landed for receipt in arm.receipts)
    return Answer("yes" if landed else "no", f"receipts: {receipt_words(arm)}")


def _repeated(result: DirectionResult) -> Answer:
    arms = [arm for arm in (result.unedited, result.edited) if arm is not None]
    if not arms:
        return Answer("open", "nothing had to run")
    equal = all(arm.repeatable for arm in arms)
    least = min(arm.repeats for arm in arms)
    return Answer("yes" if equal else "no", f"{least} runs each{'' if equal else ', NOT equal'}")


def _controlled(result: DirectionResult) -> Answer:
    if not result.controls:
        return Answer("open", "not run")
    failed = [control for control in result.controls if control.passed is False]
    if failed:
        return Answer("no", f"failed: {', '.join(said(control.name) for control in failed)}")
    passed = sum(control.passed is True for control in result.controls)
    impossible = len(result.controls) - passed
    rest = f", {impossible} not possible" if impossible else ""
    return Answer("yes" if passed else "open", f"{passed} of {len(result.controls)} passed{rest}")


def _free(result: DirectionResult) -> Answer:
    arm = result.free
    if arm is None:
        return Answer("open", "not run")
    return Answer("yes" if arm.token_id == result.donor_token else "no", _chose(arm))


def _specific(result: DirectionResult) -> Answer:
    special = result.specificity
    if special is None:
        return Answer("open", "not run")
    return Answer(
        "note", f"{special.other_token} of {count(special.shams, 'other coordinate')} flip it too"
    )
