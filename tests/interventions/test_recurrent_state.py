"""A hybrid's recurrent state in experiments: reconstructed, substituted whole or alone, and evidenced by receipts."""

from __future__ import annotations

import dataclasses
import json
import random
from types import SimpleNamespace

import pytest
import torch

from fliptrace.capture.decoding import generate
from fliptrace.capture.recorder import RecorderOptions
from fliptrace.errors import InputError
from fliptrace.judgements import Judgement
from fliptrace.numerics import integer_view
from fliptrace.pair import load_engine
from fliptrace.sites import Coordinate
from fliptrace_interventions import CacheEdit, CachePart, GivenValue, ShrinkEdit, Workbench
from fliptrace_interventions.audit import ArmAudit, Expectation
from fliptrace_interventions.edits import edits_from_json, edits_to_json
from fliptrace_interventions.recorded import RecordedExecution
from fliptrace_interventions.searches.first_step import first_differing_step
from fliptrace_interventions.searches.layers import take_cache_apart
from fliptrace_interventions.searches.trials import Trials

pytestmark = pytest.mark.filterwarnings("ignore")
STATES = [(0, "conv"), (0, "ssm"), (3, "conv"), (3, "ssm")]
ROWS, STATE = "cache of", "recurrent state of"


@pytest.fixture(scope="module")
def plant(planting, tiny, tmp_path_factory):
    """A pair of Nemotron-H (Mamba-2, attention, MLP, Mamba-2) in which one coordinate flips a later token."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("hybrid")
    model = tiny.write_model(root / "model", tiny.nemotron_configuration())
    adapter = tiny.write_adapter(
        root / "adapter", model, strength=1.0, target_modules=list(tiny.HYBRID_PROJECTIONS)
    )
    engine = load_engine(str(model), str(adapter), device="cpu")
    with engine.reducing("unsplit"):
        return searched(planting, tiny, engine, root / "pair")


def searched(planting, tiny, engine, folder):
    """Push one coordinate of a shrink far, late in a prompt, until a token after the first two is another."""
    choose = random.Random(0)
    for seed in range(200):
        prompt = tiny.prompt_ids(10, seed=seed)
        site, place = choose.randrange(len(engine.sites)), (8, choose.randrange(16))
        nudge = planting.Nudge(site, 0, {place: 128})
        runs = [generate(engine, prompt, max_new_tokens=planting.TOKENS, end_ids=()).token_ids]
        runs.append(planting.tokens_under(engine, prompt, nudge))
        differing = [step for step in range(planting.TOKENS) if runs[0][step] != runs[1][step]]
        if differing and differing[0] >= 2:
            return SimpleNamespace(
                pair=planting.record_pair(engine, prompt, folder, nudge),
                engine=engine,
                prompt=prompt,
                cause=Coordinate(engine.sites[site], 0, *place),
                step=differing[0],
                nudge=nudge,
            )
    raise AssertionError("no coordinate of 200 flips a later token")


@pytest.fixture(scope="module")
def bench(plant):
    """A workbench on it."""
    return Workbench(plant.pair, plant.engine, shams=2)


def test_reconstruction_compares_states(bench, plant, monkeypatch):
    """All states come out of token ids and shrinks alone; one flipped bit in a recorded one is found and named."""
    for found in bench.reconstruct():
        assert (found.equal, found.first_mismatch, found.restored_start) == (True, None, True)
    whole = RecordedExecution.state_digests

    def spoiled(self, step):
        digests = whole(self, step).clone()
        if step == 1:
            digests[3, 0] ^= 1
        return digests

    monkeypatch.setattr(RecordedExecution, "state_digests", spoiled)
    for found in Workbench(plant.pair, plant.engine).reconstruct():
        assert found.first_mismatch == "step 1: the recurrent state ssm of layer 3 differs"


def test_states_before_a_step_are_those_the_step_before_left(bench):
    """Copies, on the engine's device; before the prefill there is none."""
    own = bench.reference
    for state in own.state_before(2):
        state.values.zero_()
    found = [(state.layer, state.name) for state in own.state_before(2)]
    assert found == STATES
    assert all(bool(state.values.any()) for state in own.state_before(2))
    with pytest.raises(InputError, match="before step 0"):
        own.state_before(0)


def test_the_whole_cache_is_sufficient_with_its_states(bench, plant):
    """Keys, values and states of the donor give the donor's token; every consumer got what was written."""
    verdict = bench.prove([CacheEdit(plant.step)])
    assert verdict.judgement is Judgement.SUFFICIENT, verdict.reasons
    for result in verdict.directions:
        places = [receipt.place for receipt in result.edited.receipts]
        assert places == [
            f"{ROWS} layer 1 before step {plant.step}",
            f"{STATE} layer 0 before step {plant.step}",
            f"{STATE} layer 3 before step {plant.step}",
        ]
        for receipt in result.edited.receipts:
            assert receipt.landed
            assert receipt.digest_written == receipt.digest_consumed
        assert {control.passed for control in result.controls if control.passed is not None} == {
            True
        }


@pytest.mark.parametrize("part", [CachePart.STATE, CachePart.BOTH])
def test_a_part_alone_leaves_the_rest_as_recorded(bench, plant, part):
    """What is not named keeps the recipient's bits, and arrives so; the rest is judged either way."""
    found = bench.screen([CacheEdit(plant.step, part=part)])
    assert found.judgement not in (Judgement.VOID, Judgement.NOT_APPLICABLE), found.reasons
    kept = ROWS if part is CachePart.STATE else STATE
    for receipt in found.edited.receipts:
        assert receipt.landed
        if receipt.place.startswith(kept):
            assert receipt.digest_before == receipt.digest_written
    assert any(r.digest_before != r.digest_written for r in found.edited.receipts)


def test_parts_add_up(bench, plant):
    """State and keys and values together select what the whole cache does, and give its token."""
    step = plant.step
    together = [CacheEdit(step, part=CachePart.STATE), CacheEdit(step, part=CachePart.BOTH)]
    whole = [CacheEdit(step)]
    assert bench.select(together).elements == bench.select(whole).elements
    assert bench.select(together).differing == bench.select(whole).differing > 0
    assert bench.screen(together).edited.token_id == bench.screen(whole).edited.token_id


def test_one_layer_alone(bench, plant):
    """A Mamba layer's state, by its number: the other layer's and all rows stay."""
    selected = bench.select([CacheEdit(plant.step, (3,))])
    assert selected.elements == 320 * 4 + 8 * 32 * 16
    found = bench.screen([CacheEdit(plant.step, (3,))])
    changed = [r.place for r in found.edited.receipts if r.digest_before != r.digest_written]
    assert changed == [f"{STATE} layer 3 before step {plant.step}"]


def test_a_given_value_fills_a_state(bench, plant):
    """Zero everywhere in both tensors of a layer arrives; the convolution's type must hold the value."""
    edit = CacheEdit(plant.step, (0,), CachePart.STATE, value=GivenValue.of(0.0))
    found = bench.screen([edit])
    assert found.judgement is not Judgement.VOID
    assert all(receipt.landed for receipt in found.edited.receipts)
    with pytest.raises(InputError, match="does not hold"):
        bench.select([dataclasses.replace(edit, value=GivenValue.of(0.1))])


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ([CacheEdit(2, (1,), CachePart.STATE)], "layer 1 keeps no recurrent state"),
        ([CacheEdit(2, (0,), CachePart.KEYS)], "layer 0 has no cache of its own"),
        ([CacheEdit(2, (0,), positions=(3,))], "layer 0 has no cache of its own"),
        ([CacheEdit(2, part=CachePart.STATE, positions=(3,))], "no token positions"),
        ([CacheEdit(2, (2,))], "layer 2 has no cache of its own"),
        ([CacheEdit(2), CacheEdit(2, (3,), CachePart.STATE)], "more than one edit"),
    ],
)
def test_what_cannot_be_selected_is_refused(bench, edits, said):
    """By name, before anything runs."""
    with pytest.raises(InputError, match=said):
        bench.select(edits)


def test_positions_narrow_to_keys_and_values(bench, plant):
    """The whole cache at a position is keys and values there; states have none and stay."""
    found = bench.screen([CacheEdit(plant.step, positions=(0, 1), value=GivenValue.of(1.0))])
    states = [r for r in found.edited.receipts if r.place.startswith(STATE)]
    assert states
    assert all(r.digest_before == r.digest_written for r in states)


def test_edits_survive_json():
    """The parts have names of their own, for machines and people."""
    edits = (CacheEdit(3), *(CacheEdit(3, part=part) for part in CachePart))
    assert edits_from_json(json.loads(json.dumps(edits_to_json(edits)))) == edits
    assert CacheEdit(3).name == "cache before step 3 := the donor's"
    assert len({edit.name for edit in edits}) == len(CachePart)


def test_a_state_that_does_not_arrive_voids(plant, monkeypatch):
    """An engine that drops the state it is given gives no verdict."""
    engine = plant.engine
    workbench = Workbench(plant.pair, engine)
    own = workbench.reference.state_before(plant.step)
    workbench.reconstruct()
    real = engine.write_cache
    monkeypatch.setattr(engine, "write_cache", lambda rows, step, states=(): real(rows, step, own))
    found = workbench.screen([CacheEdit(plant.step, part=CachePart.STATE)])
    assert found.judgement is Judgement.VOID


def test_equal_rows_with_other_states_are_not_the_same(plant):
    """What later steps depend on includes the state: an arm may not stop early where only that differs."""
    engine, audit = plant.engine, ArmAudit()
    found = []
    for change in (0, 1):
        engine.start(plant.prompt)
        audit.begin(Expectation(0, len(plant.prompt)))
        with engine.audited(audit):
            logits = engine.step()
            states = engine.read_state()
        integer_view(states[1].values)[0, 0, 0] ^= change
        found.append(audit.finish(logits, states)[1])
    one, other = found
    assert (one.rows, one.residual, one.logits) == (other.rows, other.residual, other.logits)
    assert not one.is_equal(other)


def test_a_cache_is_taken_apart_down_to_its_states(plant):
    """Mamba layers are tried beside attention layers, and states beside keys and values."""
    found = take_cache_apart(Trials(Workbench(plant.pair, plant.engine, shams=0)))
    assert {3} <= {need.layer for need in found.layers} <= {0, 1, 3}
    states = [need for need in found.parts if need.part == "state"]
    assert states
    assert all(set(need.layers) <= {0, 3} for need in states)
    assert all(set(need.layers) <= {1} for need in found.parts if need.part != "state")


def test_the_first_step_counts_states(plant, monkeypatch):
    """The search for the first step whose cache decides begins after the first row or state that differs."""
    trials = Trials(Workbench(plant.pair, plant.engine, shams=0))
    diff = plant.pair.diff
    first = min(found.step for found in (*diff.cache_differences, *diff.state_differences))
    assert first_differing_step(trials) == first + 1
    monkeypatch.setattr(plant.pair, "diff", dataclasses.replace(diff, cache_differences=()))
    assert first_differing_step(trials) == min(one.step for one in diff.state_differences) + 1


def test_a_cause_in_a_mixers_projection_is_sufficient(bench, plant):
    """The planted coordinate alone, wherever it lies, gives the donor's token through rows and states."""
    found = bench.screen([ShrinkEdit.of_coordinate(plant.cause)])
    assert found.judgement is Judgement.SUFFICIENT, found.reasons


@pytest.fixture(scope="module")
def sparse(plant, planting, tmp_path_factory):
    """The planted pair again, with whole states in every third step only."""
    folder = tmp_path_factory.mktemp("sparse")
    return planting.record_pair(
        plant.engine, plant.prompt, folder, plant.nudge, options=RecorderOptions(state_every=3)
    )


def test_states_between_are_replayed(plant, bench, sparse):
    """Digests at every step, states at some: those between come out of shrinks, bit by bit, and verdicts are equal."""
    frames = [step.frames for step in sparse.reference.steps]
    assert ["state" in kinds for kinds in frames[:5]] == [True, False, False, True, False]
    assert ["state_digest" in kinds for kinds in frames[:5]] == [False, True, True, False, True]
    workbench = Workbench(sparse, plant.engine, shams=0)
    for step in range(plant.step + 1):
        for now, then in zip(
            workbench.candidate.state_after(step), bench.candidate.state_after(step), strict=True
        ):
            assert torch.equal(integer_view(now.values), integer_view(then.values))
    for found in workbench.reconstruct():
        assert (found.equal, found.restored_start) == (True, True)
    for part in (CachePart.WHOLE, CachePart.STATE):
        edit = [CacheEdit(plant.step, part=part)]
        one, other = (each.prove(edit, free=False, shams=0) for each in (workbench, bench))
        assert one.judgement == other.judgement
        assert [r.edited.receipts for r in one.directions] == [
            r.edited.receipts for r in other.directions
        ]


def test_digests_alone_are_compared_too(plant, sparse):
    """The comparison finds the same steps, layers and names, and counts where whole states are at hand."""
    dense, found = plant.pair.diff.state_differences, sparse.diff.state_differences
    assert [(one.step, one.layer, one.name) for one in found] == [
        (one.step, one.layer, one.name) for one in dense
    ]
    for one, other in zip(found, dense, strict=True):
        assert one.differing == (other.differing if one.step % 3 == 0 else None)
    assert sparse.diff.foreign_root == plant.pair.diff.foreign_root


def test_a_replay_that_gives_other_states_is_refused(plant, sparse, monkeypatch):
    """A machine that computes other states than were recorded is told so, by step."""
    recorded = Workbench(sparse, plant.engine).reference
    monkeypatch.setattr(RecordedExecution, "state_digests", lambda self, step: torch.zeros(4, 2))
    with pytest.raises(InputError, match="after step 2 by its digests alone; replayed from step 0"):
        recorded.state_after(2)


def test_what_is_computed_between_two_steps_is_nobodys():
    """Rows of a state that is replayed after a step are not taken for those that the step wrote."""
    audit, rows = ArmAudit(), torch.ones(2, 1, 4)
    audit.begin(Expectation(3, 1))
    audit.cache_consumed(1, rows, rows)
    arrived, _ = audit.finish(torch.zeros(8))
    audit.cache_consumed(1, 2 * rows, rows)
    assert torch.equal(arrived.rows[1], torch.ones(2, 1, 2, 4))
