"""What interventions found, in plain sentences: the same on the page, in the terminal and in the report for machines.

They say what was run and what came of it, never more: a search that found nothing says within how many runs, and every
verdict comes with the sentence that sufficient is not necessary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fliptrace.judgements import (
    CAVEAT,
    Arm,
    CoordinateResult,
    DirectionResult,
    Investigation,
    Judgement,
    Verdict,
)
from fliptrace.views.escaping import said, stopped, visible
from fliptrace.views.interventions import (
    InterventionReport,
    direction_name,
    margin_words,
    token_name,
    whose,
)
from fliptrace.views.wording import capitalised, count, generated_name

if TYPE_CHECKING:
    from collections.abc import Sequence


def headline(report: InterventionReport) -> str:
    """The verdict in one or two plain sentences."""
    if report.investigation is not None:
        return stopped(report.investigation.sentence)
    return " ".join(claim_sentence(claim.verdict) for claim in report.claims)


def gist(report: InterventionReport) -> str:
    """The verdict in a few words, for a list of facts."""
    if report.judgement is not Judgement.SUFFICIENT:
        return _NOTHING_FOUND[report.judgement]
    found = report.investigation
    if found is not None and found.judgement is Judgement.SUFFICIENT:
        if found.best_coordinate is not None and _proved(found.best_coordinate):
            return f"one FP32 value, {visible(found.best_coordinate.name)}"
        if found.minimal_set is not None:
            names = found.minimal_set.names
            return visible(names[0]) if len(names) == 1 else f"{len(names)} root rows together"
        return "the cache before the flip"
    verdicts = [claim.verdict for claim in report.claims]
    return next(said(v.claim) for v in verdicts if v.judgement is Judgement.SUFFICIENT)


_NOTHING_FOUND = {
    Judgement.VOID: "the experiment is void, so that nothing can be said",
    Judgement.CHANGES: "nothing that gives the donor's token, but another token was reached",
    Judgement.NOT_SUFFICIENT: "nothing found within what was run",
    Judgement.NOT_APPLICABLE: "there was nothing to substitute",
}


def _proved(coordinate: CoordinateResult) -> bool:
    return coordinate.verdict is not None and bool(coordinate.verdict.sufficient_directions)


def story_sentences(report: InterventionReport) -> tuple[str, ...]:
    """Tell what was found, the most informative first, and the caveat last."""
    found = report.investigation
    sentences = list(found_sentences(found)) if found is not None else []
    for claim in report.claims:
        sentences.append(claim_sentence(claim.verdict))
        answers = answer_sentence(claim.continuations)
        sentences += [answers] if answers else []
    told = sentences if found is not None or len(report.claims) > 1 else sentences[1:]
    return (headline(report), *told, CAVEAT)


def found_sentences(found: Investigation) -> tuple[str, ...]:
    """Return an investigation's own sentences, without its headline and the caveat that ends every story."""
    headlines = (found.sentence.rstrip("."), CAVEAT)
    return tuple(
        stopped(sentence) for sentence in found.sentences if not sentence.startswith(headlines)
    )


def leading(report: InterventionReport) -> int:
    """Count the sentences of story_sentences that a first screen needs: the verdict, and the cause with its values."""
    found = report.investigation
    return 2 if found is not None and found.best_coordinate is not None else 1


def claim_sentence(verdict: Verdict) -> str:
    """Say what a claim was and how each direction was judged."""
    if not verdict.directions:
        reasons = " ".join(stopped(reason) for reason in verdict.reasons)
        return f"{capitalised(said(verdict.claim))}: {verdict.judgement.value}. {reasons}".rstrip()
    parts = [
        f"{direction_name(result.recipient, result.donor)}: {direction_words(result)}"
        for result in verdict.directions
    ]
    return f"{capitalised(said(verdict.claim))}: {'; '.join(parts)}."


def direction_words(result: DirectionResult) -> str:
    """One direction's judgement with the token that the edited arm chose."""
    arm = result.edited
    if arm is None:
        reason = said(result.reasons[0]).rstrip(".") if result.reasons else ""
        return f"{result.judgement.value}{f' ({reason})' if reason else ''}"
    token = token_name(arm.token_id, arm.token_text)
    tied = (
        f", decided by tie-break among {arm.tied}"
        if arm.decided_by_tie_break
        else f", margin {margin_words(arm)}"
    )
    return (
        f"{result.judgement.value}, the {whose(arm.token_id, result)} token {token}{tied}".replace(
            "the another token", "another token"
        )
    )


def answer_sentence(continuations: Sequence[Arm]) -> str:
    """Compare the answers of the continuations; "" where there are none to compare."""
    ended = [arm for arm in continuations if arm.text is not None]
    if len(ended) < 2:
        return ""
    answers = [
        f"{visible(arm.name)}: "
        f"{'no answer found' if arm.answer is None else said(arm.answer)}{_correctness(arm)}"
        for arm in ended
    ]
    changed = len({arm.answer for arm in ended}) > 1
    return (
        f"Continued freely to the end, the extracted final answer "
        f"{'changes' if changed else 'stays the same'}: {'; '.join(answers)}."
    )


def _correctness(arm: Arm) -> str:
    return {None: "", True: " (correct)", False: " (wrong)"}[arm.correct]


def judged_sentence(found: Investigation) -> str:
    """Say which token was judged, and under which continuation."""
    reference = token_name(*found.reference_token)
    candidate = token_name(*found.candidate_token)
    return (
        f"Judged: {generated_name(found.target_step)}, where the reference chose {reference} and the candidate "
        f"{candidate}. Everything after an edit ran under {visible(found.reduction)}, every proof "
        f"{count(found.repeats, 'time')}."
    )


def effort_sentence(found: Investigation) -> str:
    """Say what was spent of which budget."""
    minutes, seconds = divmod(round(found.seconds), 60)
    time = f"{minutes} min {seconds} s" if minutes else f"{found.seconds:.1f} s"
    return (
        f"It took {count(found.runs, 'run')} with {count(found.forwards, 'forward pass', 'forward passes')} in "
        f"{time}; the budget was {said(found.budget)}."
    )


def gaps(report: InterventionReport) -> tuple[str, ...]:
    """Say what the interventions did not cover."""
    found = report.investigation
    return () if found is None else tuple(stopped(sentence) for sentence in found.not_covered)
