"""Cross either execution's cache with either execution's shrinks at the target step.

That says whether the past or the present decided: what the executions had cached, or how the step itself was summed.
"""

from __future__ import annotations

from collections.abc import Mapping

from fliptrace.judgements import Arm, Judgement, Screening, TwoByTwo
from fliptrace_interventions.edits import ReplayShrinks, Source
from fliptrace_interventions.searches.trials import Trials
from fliptrace_interventions.workbench import EXECUTIONS


def cross_cache_and_shrinks(trials: Trials) -> tuple[TwoByTwo | None, str]:
    """Run the four arms: one forward each, from a restored cache, with every shrink of the step handed over.

    Returns:
        The square, and ""; or None and why there is none: the shrinks of that step are bit-equal in both executions, so
        that there is nothing to cross, or an arm did not run because its unedited arm is void.

    Raises:
        BudgetSpentError: there is no room for it.
    """
    step = trials.workbench.target_step
    replay = (ReplayShrinks(Source.DONOR, (step, step)),)
    arms: dict[str, Arm] = {}
    void = False
    for number, recipient in enumerate(EXECUTIONS):
        trials.report("cache and shrinks crossed", number, 2)
        screening = trials.screen(replay, recipient)
        if screening.unedited is None or screening.edited is None:
            return None, _nothing_to_cross(screening, step)
        void = void or screening.judgement is Judgement.VOID
        arms[f"{recipient} own"] = screening.unedited
        arms[f"{recipient} crossed"] = screening.edited
    own, crossed = (
        {name: arms[f"{name} {kind}"].token_id for name in EXECUTIONS}
        for kind in ("own", "crossed")
    )
    decided_by, sentence = (
        ("neither", _NOTHING) if void else decide(trials.workbench.tokens, own, crossed)
    )
    square = TwoByTwo(
        reference_cache_reference_shrinks=arms["reference own"],
        reference_cache_candidate_shrinks=arms["reference crossed"],
        candidate_cache_reference_shrinks=arms["candidate crossed"],
        candidate_cache_candidate_shrinks=arms["candidate own"],
        decided_by=decided_by,
        sentence=sentence,
    )
    return square, ""


def _nothing_to_cross(screening: Screening, step: int) -> str:
    if screening.judgement is Judgement.NOT_APPLICABLE:
        return f"all shrinks of step {step} are bit-equal in both executions, so only the past can have decided"
    reasons = "; ".join(screening.reasons)
    return f"the {screening.recipient}'s own arm is void, so nothing can be crossed ({reasons})"


_NOTHING = (
    "nothing can be said of past and present: an arm is void, or an execution's own cache with its own shrinks does "
    "not give its own token"
)
_THIRD = (
    "past and present do not add up: the cache of one execution with the step's shrinks of the other gives a token "
    "that neither chose"
)
_PAST = "the past decided: the token follows the incoming cache, whoever's shrinks the step gets"
_PRESENT = (
    "the present decided: the token follows the step's shrinks as recorded, which carry what came through the cache "
    "into them, whoever's cache comes in beside them"
)
_EITHER = (
    "either is enough to leave the reference's token: the candidate's cache alone, and the candidate's shrinks of the "
    "step alone; seen from the candidate, both must be the reference's to return to it"
)
_BOTH = (
    "past and present are both needed to leave the reference's token: neither the candidate's cache alone nor its "
    "shrinks of the step alone do; seen from the candidate, either of the reference's is enough to return to it"
)


def decide(
    tokens: tuple[int, int], own: Mapping[str, int | None], crossed: Mapping[str, int | None]
) -> tuple[str, str]:
    """Read the four tokens.

    Args:
        tokens: that the executions chose: (reference, candidate).
        own: by whose cache, the token with that execution's own shrinks.
        crossed: by whose cache, the token with the other execution's shrinks.

    Returns:
        ``cache``, ``shrinks``, ``either``, ``both together`` or ``neither``, and the sentence.
    """
    reference, candidate = tokens
    if (own["reference"], own["candidate"]) != tokens:
        return "neither", _NOTHING
    got = (crossed["reference"], crossed["candidate"])
    readings = {
        (reference, candidate): ("cache", _PAST),
        (candidate, reference): ("shrinks", _PRESENT),
        (candidate, candidate): ("either", _EITHER),
        (reference, reference): ("both together", _BOTH),
    }
    return next(
        (reading for tokens, reading in readings.items() if tokens == got), ("neither", _THIRD)
    )
