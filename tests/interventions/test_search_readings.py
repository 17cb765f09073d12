"""How tokens are read into findings: the 2 x 2, the first step."""

from __future__ import annotations

import itertools

import pytest

from fliptrace_interventions.searches.first_step import scan_order
from fliptrace_interventions.searches.two_by_two import decide

REFERENCE, CANDIDATE, THIRD = 5, 9, 7


@pytest.mark.parametrize(
    ("candidate_shrinks", "candidate_cache", "decided_by"),
    [
        (REFERENCE, CANDIDATE, "cache"),
        (CANDIDATE, REFERENCE, "shrinks"),
        (CANDIDATE, CANDIDATE, "either"),
        (REFERENCE, REFERENCE, "both together"),
        (THIRD, CANDIDATE, "neither"),
        (REFERENCE, THIRD, "neither"),
        (None, CANDIDATE, "neither"),
    ],
)
def test_the_crossed_arms_decide(candidate_shrinks, candidate_cache, decided_by):
    """Four readings, and none where a third token comes up."""
    own = {"reference": REFERENCE, "candidate": CANDIDATE}
    crossed = {"reference": candidate_shrinks, "candidate": candidate_cache}
    said, sentence = decide((REFERENCE, CANDIDATE), own, crossed)
    assert said == decided_by
    assert sentence


@pytest.mark.parametrize(
    "own", [(REFERENCE, REFERENCE), (CANDIDATE, CANDIDATE), (THIRD, CANDIDATE)]
)
def test_nothing_is_decided_where_an_execution_loses_its_own_token(own):
    """The crossed arms then say nothing of past and present."""
    said, _ = decide(
        (REFERENCE, CANDIDATE),
        dict(zip(("reference", "candidate"), own, strict=True)),
        {"reference": REFERENCE, "candidate": CANDIDATE},
    )
    assert said == "neither"


def test_the_first_step_is_first_for_every_truth_table():
    """Whatever flips, monotone or not: each step at most once, and no step before the first flip is left out."""
    for length in range(1, 9):
        for truth in itertools.product((False, True), repeat=length):
            answers = {}
            for step in scan_order(3, 2 + length, answers):
                assert step not in answers
                answers[step] = truth[step - 3]
            flips = [step for step in answers if answers[step]]
            first = next((number + 3 for number, flip in enumerate(truth) if flip), None)
            assert min(flips, default=None) == first
            assert set(range(3, first or 3 + length)) <= set(answers)


def test_halves_come_before_the_scan():
    """A budget that ends after a few runs leaves a close upper bound where the truth is monotone."""
    answers = {}
    for step in itertools.islice(scan_order(1, 100, answers), 9):
        answers[step] = step >= 37
    assert min(step for step in answers if answers[step]) == 37
