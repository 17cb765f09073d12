"""Find the first step at which the caches alone flip the token of the target step.

Before each step one arm continues from either execution's cache, with the same tokens and everything computed anew.
Where the reference's cache gives the reference's token and the candidate's the candidate's, what the caches hold by
then decides. This need not be so from some step on for good, so every step is tried. Bisection only chooses the order:
a budget that ends early leaves a close upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator

from fliptrace.judgements import FirstCacheStep
from fliptrace_interventions.budget import BudgetSpentError
from fliptrace_interventions.edits import CacheEdit
from fliptrace_interventions.searches.trials import Trials


def first_differing_step(trials: Trials) -> int | None:
    """Return the first step whose incoming cache differs between the executions, None when none up to the target."""
    written = [difference.step for difference in trials.workbench.pair.diff.cache_differences]
    first = min(written, default=trials.workbench.target_step) + 1
    return first if first <= trials.workbench.target_step else None


def first_cache_step(trials: Trials, first: int) -> tuple[FirstCacheStep, str]:
    """Try the steps from ``first`` to the target step.

    Both directions are these same two arms, so one says all: the reference's arm is unedited in one and edited in the
    other.

    Returns:
        What was found, and why it ended early ("" when it did not).
    """
    last = trials.workbench.target_step
    answers: dict[int, bool] = {}
    spent = ""
    try:
        for step in _order(first, last, answers):
            trials.report("first step at which the caches flip", len(answers), last - first + 1)
            answers[step] = trials.screen((CacheEdit(step),), "reference").gives_donor_token
    except BudgetSpentError as error:
        spent = str(error)
    tried = tuple(sorted(answers))
    flips = tuple(step for step in tried if answers[step])
    found = FirstCacheStep(
        recipient="reference",
        step=flips[0] if flips else None,
        tried=tried,
        runs=len(tried),
        sentence=_sentence(first, last, tried, flips),
        flips=flips,
    )
    return found, spent


def _order(first: int, last: int, answers: dict[int, bool]) -> Iterator[int]:
    """Yield every step once: the last, the first, halves towards the earliest flip, then the rest from the first on.

    ``answers`` is filled by the caller between two steps.
    """
    yield last
    if first < last:
        yield first
    low, high = first, last
    while answers[last] and not answers[first] and high - low > 1:
        middle = (low + high) // 2
        yield middle
        low, high = (low, middle) if answers[middle] else (middle, high)
    for step in range(first, last + 1):
        if step not in answers:
            yield step


def _sentence(first: int, last: int, tried: tuple[int, ...], flips: tuple[int, ...]) -> str:
    steps = f"steps {first} to {last}" if first < last else f"step {first}"
    all_tried = len(tried) == last - first + 1
    scope = f"all {steps} were tried" if all_tried else f"{len(tried)} of {steps} were tried"
    if not flips:
        return f"at no step tried do the caches alone flip the token; {scope}"
    skipped = [step for step in range(first, flips[0]) if step not in tried]
    since = (
        f"the caches alone flip the token first before step {flips[0]}"
        if not skipped
        else f"the caches alone flip the token before step {flips[0]}, perhaps earlier: "
        f"{len(skipped)} earlier steps were not tried"
    )
    not_after = [step for step in tried if step > flips[0] and step not in flips]
    again = (
        f"; not at all later steps, though: not before step {', '.join(map(str, not_after[:5]))}"
        f"{' …' if len(not_after) > 5 else ''}"
        if not_after
        else ""
    )
    return f"{since}{again}; {scope}, and before step {first} the caches are bit-equal"
