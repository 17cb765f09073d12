"""The truth table, over every combination of what can be seen."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from fliptrace.judgements import Arm, Control, Judgement, Receipt, Reconstruction
from fliptrace_interventions.judging import GUARDS, Evidence, combined, judge

OWN, DONORS, THIRD = 5, 6, 7


def arm(name, token, *, repeatable=True, landed=True):
    """An arm whose token at step 3 is known."""
    receipt = Receipt("layer 0 mlp.up_proj, prefill", "a" * 32, "b" * 32, "b" * 32, landed)
    return Arm(
        name=name,
        first_step=0,
        target_step=3,
        token_id=token,
        token_text=f"w{token}",
        top_values=(2.0, 1.0),
        top_ids=(token or 0, 1),
        tied=1,
        logits_digest="c" * 32,
        repeats=2,
        repeatable=repeatable,
        forwards=4,
        receipts=(receipt,),
    )


def reconstruction(*, equal=True, restored=True):
    """What both reconstructions showed."""
    return tuple(
        Reconstruction(which, 4, equal, None if equal else "step 0: the logits differ", restored)
        for which in ("reference", "candidate")
    )


#: Name -> what to change in good evidence so that one guard objects.
FAULTS = {
    "not reconstructed": {"reconstructions": reconstruction(equal=False)},
    "not restored": {"reconstructions": reconstruction(restored=False)},
    "never reconstructed": {"reconstructions": ()},
    "trace changed": {"trace_changes": ("the candidate's shrinks of step 3",)},
    "unedited gives the donor's": {"unedited": arm("unedited", DONORS)},
    "unedited gives a third": {"unedited": arm("unedited", THIRD)},
    "unedited gives none": {"unedited": arm("unedited", None)},
    "unedited does not repeat": {"unedited": arm("unedited", OWN, repeatable=False)},
    "free arm does not repeat": {"others": (arm("edited, free", OWN, repeatable=False),)},
    "free receipt missing": {"others": (arm("edited, free", OWN, landed=False),)},
    "wrong operand": {"wrong_operand": "layer 0 mlp.up_proj, prefill"},
    "control failed": {"controls": (Control("latent sham", False, "step 2 differs"),)},
}


def evidence(edited_token, *, donors=DONORS, **changes):
    """Evidence in which all is well."""
    settings = {
        "recipient": "reference",
        "recipient_token": OWN,
        "donor_token": donors,
        "target_step": 3,
        "reduction": "unsplit/64",
        "reconstructions": reconstruction(),
        "unedited": arm("unedited", OWN),
        "edited": arm("edited", edited_token),
        "controls": (Control("self-substitution", True, ""), Control("latent sham", None, "")),
    }
    return Evidence(**(settings | changes))


@pytest.mark.parametrize(
    ("edited", "donors", "expected"),
    [
        (DONORS, DONORS, Judgement.SUFFICIENT),
        (THIRD, DONORS, Judgement.CHANGES),
        (OWN, DONORS, Judgement.NOT_SUFFICIENT),
        (THIRD, OWN, Judgement.CHANGES),
        (OWN, OWN, Judgement.NOT_APPLICABLE),
        (None, DONORS, Judgement.VOID),
    ],
)
def test_tokens_decide_when_all_is_well(edited, donors, expected):
    """Sufficient only when the edited arm gives the donor's token; each outcome says what came out."""
    judgement, reasons = judge(evidence(edited, donors=donors))
    assert judgement is expected
    assert reasons
    assert edited is None or str(edited) in reasons[0]


@pytest.mark.parametrize("edited", [OWN, DONORS, THIRD])
def test_any_fault_voids(edited):
    """Every combination of faults is void, with at least one reason for each fault, whatever the token."""
    names = list(FAULTS)
    for count in (1, 2, 3):
        for chosen in itertools.combinations(names, count):
            changes = {}
            for name in chosen:
                changes |= FAULTS[name]
            judgement, reasons = judge(evidence(edited, **changes))
            assert judgement is Judgement.VOID, chosen
            assert len(reasons) >= len({key for name in chosen for key in FAULTS[name]})


def test_an_edited_arm_that_missed_or_varied_voids():
    """The edited arm's own receipts and repeats count, and a receipt says how it was missed."""
    for changes, words in (
        ({"landed": False}, "its reader got"),
        ({"repeatable": False}, "not bit-equal"),
    ):
        judgement, reasons = judge(evidence(DONORS, edited=arm("edited", DONORS, **changes)))
        assert judgement is Judgement.VOID
        assert words in reasons[0]
    missed = arm("edited", DONORS)
    for written, consumed, words in (("", "", "never written"), ("b" * 32, "", "never ran")):
        receipt = Receipt("here", "a" * 32, written, consumed, False)
        lost = dataclasses.replace(missed, receipts=(receipt,))
        assert words in judge(evidence(DONORS, edited=lost))[1][0]


def test_not_applicable_comes_before_everything():
    """Where there was nothing to run nothing can be void."""
    for fault in FAULTS.values():
        found = judge(evidence(None, not_applicable=("caches are equal",), **fault))
        assert found == (Judgement.NOT_APPLICABLE, ("caches are equal",))


def test_each_guard_is_needed(monkeypatch):
    """Without its guard each fault would be judged as if nothing were wrong."""
    from fliptrace_interventions import judging

    owners = {}
    for name, changes in FAULTS.items():
        (guard,) = [guard for guard in GUARDS if guard(evidence(DONORS, **changes))]
        owners[name] = guard
    for name, changes in FAULTS.items():
        rest = tuple(guard for guard in GUARDS if guard is not owners[name])
        monkeypatch.setattr(judging, "GUARDS", rest)
        assert judge(evidence(DONORS, **changes))[0] is Judgement.SUFFICIENT, name
    assert set(owners.values()) == set(GUARDS)


def test_a_tie_is_told():
    """A token chosen among exact equals is said to be."""
    tied = dataclasses.replace(arm("edited", DONORS), tied=3)
    assert "3 tokens share the largest logit" in judge(evidence(DONORS, edited=tied))[1][0]


def test_directions_combine_to_the_least():
    """A claim in both directions is what the weaker one is."""
    order = [
        Judgement.VOID,
        Judgement.NOT_APPLICABLE,
        Judgement.NOT_SUFFICIENT,
        Judgement.CHANGES,
        Judgement.SUFFICIENT,
    ]
    assert sorted(Judgement, key=order.index) == order
    for first, second in itertools.product(range(5), repeat=2):
        expected = order[min(first, second)]
        assert combined((order[first], order[second])) is expected
