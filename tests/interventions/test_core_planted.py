"""A planted cause is found sufficient, its decoys are not, and what is said of both holds."""

from __future__ import annotations

import json

import pytest

from fliptrace.judgements import Judgement, Verdict
from fliptrace_interventions import CacheEdit, GivenValue, ShrinkEdit, Workbench


@pytest.fixture
def bench(plant):
    """A workbench on the planted pair, with few shams."""
    return Workbench(plant.pair, plant.engine, shams=6)


def test_the_pair_is_what_was_planted(plant):
    """The comparison names rows of the planted record as roots, and the planted flip."""
    diff = plant.pair.diff
    assert diff.flip.step == plant.step
    assert {row.site.path for row in diff.roots if row.step == plant.cause.step} >= {
        plant.cause.site.path
    }


def test_both_recordings_are_reconstructed(bench, plant):
    """From an empty cache, token ids and shrinks give every cache row and logits row bit by bit."""
    found = bench.reconstruct()
    assert [entry.which for entry in found] == ["reference", "candidate"]
    for entry in found:
        assert (entry.equal, entry.first_mismatch, entry.restored_start) == (True, None, True)
        assert entry.steps == plant.step + 1
    runs = bench.runs
    bench.reconstruct()
    assert bench.runs == runs


def test_the_cause_alone_is_sufficient_in_both_directions(bench, plant):
    """Substituting the planted coordinate gives the donor's token, either way round."""
    edit = ShrinkEdit.of_coordinate(plant.cause)
    for recipient in ("reference", "candidate"):
        found = bench.screen([edit], recipient)
        assert found.judgement is Judgement.SUFFICIENT, found.reasons
        assert found.edited.token_id == found.donor_token
        assert found.unedited.token_id == found.recipient_token
    assert bench.mirrored([edit]).recipient == "candidate"


def test_no_decoy_is_sufficient(bench, plant):
    """Each of ten surviving coordinates of the same record leaves the token as it is."""
    assert len(plant.decoys) >= 10
    for decoy in plant.decoys:
        found = bench.screen([ShrinkEdit.of_coordinate(decoy)])
        assert found.judgement is Judgement.NOT_SUFFICIENT, (decoy, found.reasons)
        selected = bench.select([ShrinkEdit.of_coordinate(decoy)])
        assert (selected.elements, selected.differing) == (1, 1)


def test_all_decoys_together_are_not_the_cause(bench, plant):
    """The cause among its decoys flips; edits that compose count as one."""
    everything = [ShrinkEdit.of_coordinate(place) for place in (plant.cause, *plant.decoys)]
    assert bench.select(everything).elements == 1 + len(plant.decoys)
    assert bench.screen(everything).judgement is Judgement.SUFFICIENT


def test_the_proof_holds_all_its_evidence(bench, plant):
    """Controls, shams, footprint, receipts, free arms, and the sentence on necessity; lossless as JSON."""
    verdict = bench.prove([ShrinkEdit.of_coordinate(plant.cause)])
    assert verdict.judgement is Judgement.SUFFICIENT, verdict.reasons
    assert verdict.sufficient_directions == ("reference <- candidate", "candidate <- reference")
    assert "not mean necessary" in verdict.caveat
    for result in verdict.directions:
        assert (result.unedited.repeats, result.edited.repeats) == (2, 2)
        assert result.unedited.repeatable
        assert result.edited.repeatable
        (receipt,) = result.edited.receipts
        assert receipt.landed
        assert receipt.digest_written == receipt.digest_consumed != receipt.digest_before
        passed = {control.name: control.passed for control in result.controls}
        assert passed == {"self-substitution": True, "latent sham": True, "sham receipts": True}
        assert result.specificity.shams == result.specificity.asked == 6
        assert result.footprint.keys + result.footprint.values > 0
        assert result.free.token_id == result.edited.token_id or result.free.left_prefix_at
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict
    assert verdict.environment_differences == ()


def test_the_cache_before_the_flip_is_sufficient(bench, plant):
    """Whole-cache substitution gives both tokens, and every layer's consumer got what was written."""
    verdict = bench.prove([CacheEdit(plant.step)])
    assert verdict.judgement is Judgement.SUFFICIENT, verdict.reasons
    for result in verdict.directions:
        assert len(result.edited.receipts) == len(plant.engine.cache_layers)
        assert all(receipt.landed for receipt in result.edited.receipts)
        assert result.specificity is None


def test_shams_follow_the_seed(plant):
    """One seed gives one draw; the cause's own coordinate is never among them."""
    edit = ShrinkEdit.of_coordinate(plant.cause)
    seen = []
    for seed in (0, 0, 1):
        workbench = Workbench(plant.pair, plant.engine, shams=4, seed=seed)
        verdict = workbench.prove([edit], "reference", free=False)
        seen.append(verdict.directions[0].specificity)
    assert seen[0] == seen[1]
    assert seen[2].seed == 1


def test_what_a_whole_record_leaves_as_it_is_may_be_a_sham(plant):
    """An edit of every row changes the cause and its decoys only; all other coordinates can still be pushed."""
    edit = ShrinkEdit(plant.cause.site.path, plant.cause.step)
    workbench = Workbench(plant.pair, plant.engine, shams=3)
    found = workbench.prove([edit], "reference", free=False).directions[0]
    assert found.judgement is Judgement.SUFFICIENT
    assert found.specificity.shams == 3


def test_small_records_and_fp32_models_say_what_could_not_be_tried(
    planted, planting, load, tiny, tmp_path
):
    """A decode record gives its other coordinates twice, then says that there are no more; FP32 has no boundaries."""
    plant = planted()
    workbench = Workbench(plant.pair, plant.engine, shams=100)
    value = float(workbench.reference.shrink(plant.step, 20)[0, 0]) * (1 + 2.0**-7)
    edit = ShrinkEdit(plant.engine.sites[20].path, plant.step, None, (0,), GivenValue.of(value))
    found = workbench.prove([edit], "reference", free=False).directions[0]
    assert 15 <= found.specificity.shams <= 30
    assert "100 were asked for" in found.specificity.sentence

    engine = load("llama", dtype="float32")
    pair = planting.record_pair(engine, tiny.prompt_ids(6), tmp_path, None, tokens=3)
    edit = ShrinkEdit(engine.sites[3].path, 0, (1,), (0,), GivenValue.of(40.0))
    result = Workbench(pair, engine, target=2).prove([edit], "reference", free=False).directions[0]
    controls = {control.name: control for control in result.controls}
    assert controls["latent sham"].passed is None
    assert "every change survives" in controls["latent sham"].sentence
    assert controls["sham receipts"].passed is None
    assert result.specificity.shams == 0
