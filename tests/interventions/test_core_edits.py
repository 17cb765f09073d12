"""Edits as values: what they refuse, JSON and back, and what they select in a pair."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from fliptrace.errors import InputError
from fliptrace.judgements import Judgement
from fliptrace_interventions import (
    CacheEdit,
    CachePart,
    ForcedTokens,
    GivenValue,
    ReplayShrinks,
    ShrinkEdit,
    Source,
    Workbench,
    edits_from_json,
    edits_to_json,
)

SITE = "model.layers.1.mlp.up_proj"
EDITS = (
    ShrinkEdit(SITE, 0),
    ShrinkEdit(SITE, 3, (9, 4), (1,), GivenValue.of(0.5), "gate", 2),
    ShrinkEdit(SITE, 0, value=GivenValue(0x7FC00001)),
    CacheEdit(4),
    CacheEdit(4, (2, 0), CachePart.KEYS, (1,), (0,), (3,), Source.RECIPIENT, 7),
    ReplayShrinks(),
    ReplayShrinks(Source.RECIPIENT, (2, 5)),
    ForcedTokens(2, (7, 8)),
)


@pytest.mark.parametrize("edit", EDITS)
def test_json_and_back(edit):
    """Every edit comes back equal from its JSON, alone, in a list and in a document."""
    text = json.dumps(edit.to_json(), allow_nan=False)
    assert edits_from_json(json.loads(text)) == (edit,)
    assert edits_from_json(json.loads(json.dumps({"edits": edits_to_json(EDITS)}))) == EDITS
    assert hash(edit) == hash(edits_from_json(json.loads(text))[0])


def test_edits_are_immutable_and_canonical():
    """Lists of numbers are put in order, so that equal edits are equal values with one name."""
    edit = ShrinkEdit(SITE, 0, (5, 3))
    assert edit == ShrinkEdit(SITE, 0, [3, 5])
    assert edit.name == "shrink of layer 1 mlp.up_proj, prefill, token position 3, 5 := the donor's"
    with pytest.raises(dataclasses.FrozenInstanceError):
        edit.step = 2
    assert ForcedTokens(2, (7,)).first_step == 3
    assert CacheEdit(1, part="keys", value="recipient") == CacheEdit(
        1, part=CachePart.KEYS, value=Source.RECIPIENT
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ShrinkEdit("", 0), "path of a site"),
        (lambda: ShrinkEdit(SITE, -1), "step of at least 0"),
        (lambda: ShrinkEdit(SITE, True), "step of at least 0"),
        (lambda: ShrinkEdit(SITE, 0, ()), "at least one"),
        (lambda: ShrinkEdit(SITE, 0, (1, 1)), "twice"),
        (lambda: ShrinkEdit(SITE, 0, expect=0), "at least 1"),
        (lambda: CacheEdit(3, layers=(-1,)), "from 0 on"),
        (lambda: ReplayShrinks(steps=(4, 2)), "first and last"),
        (lambda: ForcedTokens(0, ()), "at least one"),
        (lambda: GivenValue(1 << 32), "0 .. 0xffffffff"),
        (lambda: GivenValue.of(math.nan), "by its bits"),
        (lambda: GivenValue.of(1e39), "fit FP32"),
        (lambda: ShrinkEdit(SITE, 0, value=1.0), "GivenValue"),
        (lambda: ShrinkEdit(SITE, 0, slice=5), "slice"),
        (lambda: ShrinkEdit(SITE, 0, positions=5), "whole numbers"),
        (lambda: CacheEdit(1, part="weights"), "keys, values, state"),
        (lambda: ReplayShrinks("reference"), "donor, recipient"),
        (lambda: ForcedTokens(0, 5), "at least one"),
    ],
)
def test_senseless_edits_are_refused(make, words):
    """What can select nothing is refused when it is made."""
    with pytest.raises(InputError, match=words):
        make()


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("text", "a JSON object with the key 'edit'"),
        ([], "at least one of them"),
        ([{"edit": "weights"}], "one of shrink, cache, replay, tokens"),
        ([{"edit": ["shrink"]}], "one of shrink, cache, replay, tokens"),
        ([{"edit": "shrink", "site": SITE}], "edit 0 .shrink. needs step"),
        ([{"edit": "shrink", "site": SITE, "step": 0, "value": 10**400}], "fit FP32"),
        ([{"edit": "shrink", "site": SITE, "step": 0, "slice": [["a"]]}], "slice"),
        ([{"edit": "shrink", "site": SITE, "step": 0, "rank": 3}], "has no 'rank'"),
        ([{"edit": "shrink", "site": SITE, "step": 0, "value": "other"}], "other"),
        ([{"edit": "shrink", "site": SITE, "step": 0, "value": [1]}], "a number, or"),
        ([{"edit": "cache", "step": 1, "part": "weights"}], "weights"),
        ([{"edit": "cache", "step": 1, "value": {"bits": "0xzz"}}], "edit 0"),
    ],
)
def test_documents_that_are_no_edits(document, words):
    """A wrong document is refused with the number of the edit and what was expected."""
    with pytest.raises(InputError, match=words):
        edits_from_json(document)


def test_given_values_keep_their_bits():
    """A value is its bits: zeros keep their sign, NaNs their payload."""
    assert GivenValue.of(-0.0) != GivenValue.of(0.0)
    (edit,) = edits_from_json({"edit": "cache", "step": 1, "value": {"bits": "0x7fc12345"}})
    assert edit.value.bits == 0x7FC12345
    assert edits_from_json({"edit": "cache", "step": 1, "value": 0.5})[0].value.value == 0.5


# What they select -----------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(planted):
    """A workbench on the planted Llama pair."""
    plant = planted()
    return Workbench(plant.pair, plant.engine)


def test_selections_are_counted_and_shown(bench, planted):
    """How many elements, how many of them differ, and where; nothing runs."""
    plant = planted()
    row = next(row for row in plant.pair.diff.roots if row.position == plant.cause.position)
    found = bench.select([ShrinkEdit.of_row(row), CacheEdit(plant.step, (0,))])
    planted_here = [
        place for place in (plant.cause, *plant.decoys) if place.position == row.position
    ]
    assert found.edits[0].elements == 16
    assert found.edits[0].differing == len(planted_here)
    assert found.edits[1].elements == 2 * (len(plant.prompt) + plant.step - 1) * 2 * 64
    assert found.elements == found.edits[0].elements + found.edits[1].elements
    assert plant.cause.site.name in found.describe()
    assert f"{found.edits[1].differing} of them differ" in found.describe()
    assert bench.runs == 0


def test_equal_places_are_not_applicable(bench, planted):
    """Edits that put in what is there are not run, and the reason says so."""
    plant = planted()
    other = next(site for site in plant.engine.sites if site.path != plant.cause.site.path)
    for edits, words in (
        ([ShrinkEdit(other.path, 0, (0,), (0,))], "bit-equal"),
        ([CacheEdit(plant.step, value=Source.RECIPIENT)], "incoming cache is bit-equal"),
        ([CacheEdit(0)], "before step 0 there is no cache"),
        ([ReplayShrinks(Source.RECIPIENT)], "bit-equal"),
    ):
        found = bench.screen(edits)
        assert found.judgement is Judgement.NOT_APPLICABLE
        assert words in found.reasons[0]
        verdict = bench.prove(edits)
        assert verdict.judgement is Judgement.NOT_APPLICABLE
        assert verdict.directions[0].edited is None
    assert bench.runs == 0


def test_a_flip_at_step_0_has_no_cache_before_it(planted, planting, tmp_path):
    """Where the prefill decides, a cache edit is not applicable and a shrink edit is."""
    plant = planted()
    pair = planting.record_pair(plant.engine, plant.prompt, tmp_path, plant.nudge)
    workbench = Workbench(pair, plant.engine, target=0)
    verdict = workbench.prove([CacheEdit(0)])
    assert verdict.judgement is Judgement.NOT_APPLICABLE
    assert all(found.restored_start for found in workbench.reconstruct())
    found = workbench.screen([ShrinkEdit(plant.cause.site.path, 0, value=GivenValue.of(1.0))])
    assert found.edited is not None


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ([], "at least one edit"),
        ([ShrinkEdit("model.layers.9.mlp.up_proj", 0)], "no site is called.*did you mean"),
        ([ShrinkEdit(SITE, 0, slice="gate")], r"no site is called model.*\[gate\]"),
        ([ShrinkEdit(SITE, 99)], "judged token is that of step"),
        ([ShrinkEdit(SITE, 0, (99,))], "token positions 0 to 9; got 99"),
        ([ShrinkEdit(SITE, 1, (3,))], "token positions 10 to 10; got 3"),
        ([ShrinkEdit(SITE, 0, None, (16,))], "rank indices 0 to 15; got 16"),
        ([ShrinkEdit(SITE, 0, (1,), expect=1)], "was to select 1 elements and selects 16"),
        ([CacheEdit(1, layers=(7,))], "layer 7 has no cache of its own"),
        ([CacheEdit(1, positions=(10,))], "ends at position 9; got 10"),
        ([CacheEdit(1, heads=(2,))], "heads 0 to 1; got 2"),
        ([CacheEdit(1, dimensions=(64,))], "dimensions 0 to 63; got 64"),
        ([CacheEdit(1, part=CachePart.STATE)], "no recurrent state"),
        ([CacheEdit(1, value=GivenValue.of(1.001))], "does not hold 1.001.*nearest.*1.0"),
        ([CacheEdit(1), CacheEdit(1, (0,), positions=(2,))], "more than one edit"),
        ([ShrinkEdit(SITE, 0, (1,)), ShrinkEdit(SITE, 0, None, (3,))], "more than one edit"),
        ([ShrinkEdit(SITE, 0), ReplayShrinks(steps=(0, 1))], "must not overlap"),
        ([ReplayShrinks(steps=(0, 1)), ReplayShrinks(steps=(1, 2))], "must not overlap"),
        ([ForcedTokens(0, (5, 6)), ForcedTokens(1, (5,))], "must not overlap"),
        ([ForcedTokens(99, (5,))], "judged token is that of step"),
    ],
)
def test_selections_that_cannot_be(bench, edits, words):
    """An edit that selects nothing, too much, an unknown place, or what another selects, is refused before it runs."""
    with pytest.raises(InputError, match=words):
        bench.screen(edits)
    assert bench.runs == 0


def test_edits_that_touch_do_not_overlap(bench):
    """Neighbouring elements of one record compose."""
    found = bench.select([ShrinkEdit(SITE, 0, (1,), (3,)), ShrinkEdit(SITE, 0, (1,), (4,))])
    assert found.elements == 2


def test_other_arguments_are_checked(planted):
    """Executions, repeats, shams, targets and reductions are refused with what is allowed."""
    plant = planted()
    for arguments, words in (
        ({"repeats": 1}, "at least twice"),
        ({"shams": -1}, "must not be negative"),
        ({"reduction": "sorted"}, "a reduction is written"),
        ({"target": plant.step + 1}, f"0 to {plant.step}, the flip"),
    ):
        with pytest.raises(InputError, match=words):
            Workbench(plant.pair, plant.engine, **arguments)
    workbench = Workbench(plant.pair, plant.engine)
    with pytest.raises(InputError, match="one of reference, candidate"):
        workbench.screen([CacheEdit(1)], "donor")
    with pytest.raises(InputError, match="nothing to continue"):
        workbench.continue_freely([ReplayShrinks(Source.RECIPIENT)])
    assert workbench.tokens == plant.tokens
    assert "step" in repr(workbench)


def test_a_trace_without_its_prompt_ids(planted, planting, tmp_path):
    """A redacted pair is refused, and the message says how to record another."""
    from fliptrace.pair import Prompt, trace_pair

    plant = planted()
    prompt = Prompt(tuple(plant.prompt), "", False, "test")
    settings = {"max_new_tokens": 2, "attempts": 1, "observer_control": False}
    with (
        plant.engine.reducing("unsplit"),
        trace_pair(plant.engine, prompt=prompt, redact=True, **settings) as pair,
        pytest.raises(InputError, match=r"redacted.*without --redact"),
    ):
        Workbench(pair, plant.engine, target=0)
