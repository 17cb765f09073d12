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
from fliptrace.views.wording import capitalised, count, exact, generated_name, listed, verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fliptrace.judgements import FirstCacheStep, LayerNeed, TwoByTwo


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
            return f"one FP32 value: {visible(found.best_coordinate.name)}"
        if found.minimal_set is not None:
            return f"{count(len(found.minimal_set.edits), 'edit')} together"
        return "the cache before the flip"
    verdicts = [claim.verdict for claim in report.claims]
    return next(said(v.claim) for v in verdicts if v.judgement is Judgement.SUFFICIENT)


_NOTHING_FOUND = {
    Judgement.VOID: "nothing can be said: the experiment is void",
    Judgement.CHANGES: "nothing that gives the donor's token, but another token was reached",
    Judgement.NOT_SUFFICIENT: "nothing found within what was run",
    Judgement.NOT_APPLICABLE: "there was nothing to substitute",
}


def _proved(coordinate: CoordinateResult) -> bool:
    return coordinate.verdict is not None and bool(coordinate.verdict.sufficient_directions)


def story_sentences(report: InterventionReport) -> tuple[str, ...]:
    """Tell what was found and what was tried: the cause first, then the experiment in its order, the caveat last."""
    sentences = [headline(report)]
    if report.investigation is not None:
        sentences += _investigation(report.investigation)
        sentences += [claim_sentence(claim.verdict) for claim in report.claims]
    for claim in report.claims:
        answers = answer_sentence(claim.continuations)
        sentences += [answers] if answers else []
    return (*sentences, CAVEAT)


def leading(report: InterventionReport) -> int:
    """Count the sentences of story_sentences that a first screen needs: the verdict, and the cause with its values."""
    found = report.investigation
    return 2 if found is not None and found.best_coordinate is not None else 1


def _investigation(found: Investigation) -> list[str]:
    sentences = []
    if found.best_coordinate is not None:
        sentences.append(coordinate_sentence(found.best_coordinate))
        if found.best_coordinate.verdict is not None:
            sentences += specificity_sentences(found.best_coordinate.verdict)
    sentences.append(reconstruction_sentence(found))
    if found.cache_substitution is not None:
        sentences.append(claim_sentence(found.cache_substitution))
    sentences.append(roots_sentence(found))
    if found.minimal_set is not None:
        sentences.append(minimal_set_sentence(found))
    if found.two_by_two is not None:
        sentences.append(square_sentence(found.two_by_two))
    sentences += layer_sentences(found.layers)
    if found.first_cache_step is not None:
        sentences.append(first_step_sentence(found.first_cache_step))
    answers = answer_sentence(found.continuations)
    return [*sentences, *([answers] if answers else [])]


def reconstruction_sentence(found: Investigation) -> str:
    """Say whether both recordings could be replayed bit by bit."""
    failed = [item for item in found.reconstruction if not item.equal]
    if not found.reconstruction:
        return "Neither recording was reconstructed."
    if failed:
        where = listed(
            [
                f"the {item.which} from {said(item.first_mismatch or 'an unknown place')}"
                for item in failed
            ]
        )
        return f"Reconstruction failed: replayed from token ids and shrinks alone, {where} has other bits."
    steps = max(item.steps for item in found.reconstruction)
    return (
        f"Reconstruction: replayed from an empty cache by token ids and shrinks alone, "
        f"{listed([item.which for item in found.reconstruction])} "
        f"{verb(len(found.reconstruction), 'agree')} with the record in every K/V row and all logits, bit by bit, "
        f"through {count(steps, 'step')}."
    )


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


def roots_sentence(found: Investigation) -> str:
    """Count the roots, those that were tried, and those that are enough alone."""
    tried = len(found.roots)
    enough = sum(
        any(screening.gives_donor_token for screening in root.screenings) for root in found.roots
    )
    alone = sum(
        any(screening.gives_donor_token for screening in coordinate.screenings)
        for coordinate in found.coordinates
    )
    return (
        f"Of {count(found.roots_in_pair, 'surviving root row')} {tried:,} {verb_was(tried)} tried, substituted whole "
        f"one by one: {enough:,} {'gives' if enough == 1 else 'give'} the donor's token in some direction. "
        f"Of {count(len(found.coordinates), 'single coordinate')} tried, {alone:,} "
        f"{'does' if alone == 1 else 'do'}."
    )


def verb_was(number: int) -> str:
    """Return ``was`` for one, ``were`` for more."""
    return "was" if number == 1 else "were"


def coordinate_sentence(coordinate: CoordinateResult) -> str:
    """Name the best coordinate with its values, the boundary and the rounded values."""
    boundary = (
        f"; the rounding boundary between them is {exact(coordinate.boundary)}"
        if coordinate.boundary is not None
        else ""
    )
    return (
        f"The best single coordinate: {visible(coordinate.name)}. FP32 values: reference "
        f"{exact(coordinate.reference)} ({visible(coordinate.reference_bits)}), candidate "
        f"{exact(coordinate.candidate)} ({visible(coordinate.candidate_bits)}){boundary}."
    )


def specificity_sentences(verdict: Verdict) -> list[str]:
    """Say, per direction, what other coordinates of the record do when pushed as far."""
    return [
        f"Specificity, {direction_name(result.recipient, result.donor)}: "
        f"{stopped(result.specificity.sentence)}"
        for result in verdict.directions
        if result.specificity is not None
    ]


def minimal_set_sentence(found: Investigation) -> str:
    """Say how many edits flip the token together, and whether each is needed among them."""
    smallest = found.minimal_set
    if smallest is None:
        return "No set of root rows was found that flips the token."
    if not smallest.one_minimal:
        need = "; the budget ended before every single removal was tried"
    elif len(smallest.edits) == 1:
        need = " alone"
    else:
        need = (
            "; leaving out any one of them no longer flips it (1-minimal: neither the smallest such set nor the only "
            "one need be found)"
        )
    names = listed([visible(name) for name in smallest.names[:4]])
    more = f" and {len(smallest.names) - 4} more" if len(smallest.names) > 4 else ""
    return (
        f"Minimal set, in the {smallest.recipient}'s execution: {count(len(smallest.edits), 'edit')} "
        f"{'flips' if len(smallest.edits) == 1 else 'flip together'} the token, {need}: {names}{more}. It took "
        f"{count(smallest.runs, 'run')}."
    )


def layer_sentences(layers: Sequence[LayerNeed]) -> list[str]:
    """Say, per direction, which layers' cache suffices alone and which is needed."""
    sentences = []
    for recipient in dict.fromkeys(layer.recipient for layer in layers):
        of_one = [layer for layer in layers if layer.recipient == recipient]
        alone = [f"{layer.layer}" for layer in of_one if layer.sufficient_alone]
        needed = [f"{layer.layer}" for layer in of_one if layer.needed]
        not_run = sum(layer.sufficient_alone is None and layer.needed is None for layer in of_one)
        gap = f" ({count(not_run, 'layer')} not run)" if not_run else ""
        sentences.append(
            f"Cache by layer, in the {recipient}'s execution: alone "
            f"{_layers(alone, 'suffices', 'suffice')}; needed {_layers(needed, 'is', 'are')}{gap}."
        )
    return sentences


def _layers(names: list[str], one: str, more: str) -> str:
    if not names:
        return f"no layer {one}" if one != "is" else "is none"
    if one == "is":
        return f"{one if len(names) == 1 else more} layer{'s' if len(names) > 1 else ''} {listed(names)}"
    return (
        f"layer{'s' if len(names) > 1 else ''} {listed(names)} {one if len(names) == 1 else more}"
    )


def square_sentence(square: TwoByTwo) -> str:
    """Say whether the past or the present decided."""
    return f"Cache × shrinks of the judged step: {stopped(square.sentence)}"


def first_step_sentence(first: FirstCacheStep) -> str:
    """Say since when the caches alone flip the token."""
    return f"In the {first.recipient}'s execution: {stopped(first.sentence)}"


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
