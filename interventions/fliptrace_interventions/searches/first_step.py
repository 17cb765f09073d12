"""Find the first step at which the caches alone flip the token of the target step.

Before each step one arm continues from either execution's cache, with the same tokens and everything computed anew.
Where the reference's cache gives the reference's token and the candidate's the candidate's, what the caches hold by
then decides. This need not be so from some step on for good, so a first step is only called first when every earlier
one was tried. Bisection only chooses the order: a search that ends early leaves a close upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fliptrace.judgements import FirstCacheStep, Judgement
from fliptrace_interventions.budget import BudgetSpentError
from fliptrace_interventions.edits import CacheEdit
from fliptrace_interventions.searches.trials import Trials

#: Forward passes that the search takes at the most unless told otherwise.
SCAN_FORWARDS = 3000


def first_differing_step(trials: Trials) -> int | None:
    """Return the first step whose incoming cache differs between the executions, None when none up to the target."""
    diff = trials.workbench.pair.diff
    written = [found.step for found in diff.cache_differences]
    written += [found.step for found in diff.state_differences]
    first = min(written, default=trials.workbench.target_step) + 1
    return first if first <= trials.workbench.target_step else None


def first_cache_step(
    trials: Trials, first: int, *, limit: int | None = SCAN_FORWARDS
) -> tuple[FirstCacheStep, str]:
    """Try the steps from ``first`` to the target step until the first one that flips is known.

    Both directions are these same two arms, so one says all: the reference's arm is unedited in one and edited in the
    other.

    Args:
        trials: runs them.
        first: from first_differing_step.
        limit: forward passes at the most, None for any number: all pairs of arms take about the square of the steps.

    Returns:
        What was found, and why it ended early ("" when it did not).
    """
    last = trials.workbench.target_step
    answers: dict[int, bool] = {}
    void: set[int] = set()
    spent, forwards = "", 0
    try:
        for step in scan_order(first, last, answers):
            forwards += 2 * (last - step + 1)
            if limit is not None and forwards > limit:
                spent = f"the search for it is limited to {limit} forward passes"
                break
            trials.report("first step at which the caches flip", len(answers), last - first + 1)
            screening = trials.screen((CacheEdit(step),), "reference")
            answers[step] = screening.gives_donor_token
            if screening.judgement is Judgement.VOID:
                void.add(step)
    except BudgetSpentError as error:
        spent = str(error)
    tried = tuple(sorted(answers))
    flips = tuple(step for step in tried if answers[step])
    found = FirstCacheStep(
        recipient="reference",
        step=flips[0] if flips else None,
        tried=tried,
        runs=len(tried),
        sentence=_sentence(first, last, tried, flips) + _of_void(sorted(void)),
        flips=flips,
    )
    return found, spent


def scan_order(first: int, last: int, answers: dict[int, bool]) -> Iterator[int]:
    """Yield the last step, the first, halves towards the earliest flip; then the others up to the first that flips.

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
        if answers[step]:
            return


def _sentence(first: int, last: int, tried: tuple[int, ...], flips: tuple[int, ...]) -> str:
    steps = f"steps {first} to {last}" if first < last else f"step {first}"
    if not flips:
        scope = "all" if len(tried) == last - first + 1 else f"{len(tried)}"
        return f"the caches alone flip the token at no step tried ({scope} of {steps} were)"
    skipped = [step for step in range(first, flips[0]) if step not in tried]
    not_after = [step for step in tried if step > flips[0] and step not in flips]
    again = (
        f"; not at every later step, though: not before step {', '.join(map(str, not_after))}"
        if not_after
        else ""
    )
    if skipped:
        return (
            f"the caches alone flip the token before step {flips[0]}, perhaps earlier: {len(skipped)} of the steps "
            f"{first} to {flips[0] - 1} were not tried{again}"
        )
    earlier = (
        f"every earlier step from {first} on, where the caches first differ, was tried"
        if flips[0] > first
        else "the first one whose incoming caches differ"
    )
    return f"the caches alone flip the token first before step {flips[0]}: {earlier}{again}"


def _of_void(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    listed = ", ".join(map(str, steps[:8])) + (" and others" if len(steps) > 8 else "")
    return (
        f"; nothing can be said of {len(steps)} of the steps tried (void: before step {listed} an execution's own "
        "cache does not keep its own token)"
    )
