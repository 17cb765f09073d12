"""What an arm does: what keeps recorded values, what is computed, when it stops, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import random

import psutil
import pytest
import torch

from fliptrace.capture.decoding import choose
from fliptrace.errors import InputError
from fliptrace.judgements import Judgement
from fliptrace.numerics import digest_hex, digest_rows, digest_tensor
from fliptrace.trace import Kind
from fliptrace_interventions import (
    CacheEdit,
    ForcedTokens,
    GivenValue,
    ReplayShrinks,
    ShrinkEdit,
    Source,
    Workbench,
)
from fliptrace_interventions.arms import ArmRun, Handover, run_arm
from fliptrace_interventions.bench import FORCED, Bench
from fliptrace_interventions.pushing import latent_neighbour


@pytest.fixture(scope="module")
def noisy(planting, llama, tiny, tmp_path_factory):
    """Two recordings of one prompt under real arrival orders: their shrinks differ from unsplit ones everywhere."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("noisy")
    prompt = tiny.prompt_ids(9, seed=2)
    paths = [
        planting.record(
            llama, prompt, folder / f"{seed}.trace", reduction="atomic:8", seed=seed, tokens=6
        )
        for seed in (1, 2)
    ]
    from fliptrace.pair import diff_traces

    with diff_traces(*paths) as pair:
        yield pair


@pytest.fixture
def handed(monkeypatch):
    """What every interceptor call got and gave, by (step, site): (computed, handed over), as digests."""
    calls = {}
    original = Handover.__call__

    def spied(self, site, operand, z):
        given = original(self, site, operand, z)
        calls[self.step, site] = digest_hex(digest_tensor(z)), digest_hex(digest_tensor(given))
        return given

    monkeypatch.setattr(Handover, "__call__", spied)
    return calls


def first_flip_free_step(pair):
    """A step of the pair that both recordings have, for a workbench that needs a target."""
    return pair.diff.flip.step if pair.diff.flip else 4


def bits(value):
    """The 32 bits of an FP32 element."""
    return int(value.view(torch.int32)) & 0xFFFFFFFF


def test_before_the_site_recorded_values_after_it_computed_ones(noisy, llama, handed):
    """Sites before the edit hand over the record, the edited one the record with the edit, later ones what comes."""
    workbench = Workbench(noisy, llama, target=first_flip_free_step(noisy))
    workbench.reconstruct()
    site, step = 9, 2
    own = workbench.reference.shrink(step, site)
    edit = ShrinkEdit(llama.sites[site].path, step, None, (3,), GivenValue.of(0.5), expect=1)
    handed.clear()
    workbench.screen([edit])
    expected = own.clone()
    expected[0, 3] = 0.5
    for (at, number), (computed, given) in handed.items():
        if (at, number) < (step, site):
            assert given == workbench.reference.shrink_digest(at, number)
        elif (at, number) == (step, site):
            assert given == digest_hex(digest_tensor(expected))
        else:
            assert given == computed
    assert min(handed) == (step, 0)
    differs = [place for place, (computed, given) in handed.items() if computed != given]
    assert (step, site) in differs
    assert len(differs) > 1, "unsplit would have given the recorded values by itself"


def test_whole_tensors_slices_and_coordinates(noisy, llama, handed):
    """An edit without positions or rank indices takes the whole record, else what it names, from the donor."""
    workbench = Workbench(noisy, llama, target=first_flip_free_step(noisy))
    workbench.reconstruct()
    step = 0
    site = next(
        number
        for number in range(len(llama.sites))
        if not torch.equal(
            workbench.reference.shrink(step, number).view(torch.int32),
            workbench.candidate.shrink(step, number).view(torch.int32),
        )
    )
    own, donors = workbench.reference.shrink(step, site), workbench.candidate.shrink(step, site)
    row, rank = torch.nonzero(own.view(torch.int32) != donors.view(torch.int32))[0].tolist()
    path = llama.sites[site].path
    for edit, count in (
        (ShrinkEdit(path, step), own.numel()),
        (ShrinkEdit(path, step, (row,)), own.shape[1]),
        (ShrinkEdit(path, step, rank_indices=(rank,)), own.shape[0]),
        (ShrinkEdit(path, step, (row,), (rank,)), 1),
    ):
        assert workbench.select([edit]).elements == count
        handed.clear()
        workbench.screen([edit])
        expected = own.clone()
        rows = slice(None) if edit.positions is None else row
        ranks = slice(None) if edit.rank_indices is None else rank
        expected[rows, ranks] = donors[rows, ranks]
        assert handed[step, site][1] == digest_hex(digest_tensor(expected))


@pytest.mark.parametrize("between", ["recorded", "recomputed"])
def test_between_several_edited_sites(noisy, llama, handed, between):
    """Sites between keep recorded values or are computed, as asked; a changed operand later on is named."""
    workbench = Workbench(noisy, llama, target=first_flip_free_step(noisy))
    workbench.reconstruct()
    first, last, step = 3, 13, 1
    edits = [
        ShrinkEdit(llama.sites[site].path, step, value=GivenValue.of(2.0)) for site in (first, last)
    ]
    handed.clear()
    found = workbench.screen(edits, between=between)
    recorded = {
        site: handed[step, site][1] == workbench.reference.shrink_digest(step, site)
        for site in range(len(llama.sites))
    }
    computed = {site: handed[step, site][0] == handed[step, site][1] for site in recorded}
    between_sites = range(first + 1, last)
    if between == "recorded":
        assert all(recorded[site] for site in between_sites)
        assert f"{llama.sites[last].name}, step {step}" in found.edited.changed_operands
        assert len(found.edited.changed_operands) > 2
    else:
        assert all(computed[site] for site in between_sites)
        assert not any(recorded[site] for site in between_sites)
        assert found.edited.changed_operands == (f"{llama.sites[last].name}, step {step}",)
    assert all(recorded[site] for site in range(first))
    with pytest.raises(InputError, match="between must be one of recorded, recomputed"):
        workbench.screen(edits, between="whatever")


def test_a_replayed_donor_is_the_donor(noisy, llama):
    """All shrinks of the donor from the prefill on give the donor's logits; its cache and shrinks those of one step."""
    step = first_flip_free_step(noisy)
    workbench = Workbench(noisy, llama, target=step)
    for edits in (
        [ReplayShrinks()],
        [CacheEdit(step), ReplayShrinks(Source.DONOR, (step, step))],
    ):
        found = workbench.screen(edits)
        assert found.edited.logits_digest == workbench.candidate.logits_digest(step)
        assert found.unedited.logits_digest == workbench.reference.logits_digest(step)
        assert all(receipt.landed for receipt in found.edited.receipts)


def test_cache_edits_put_in_what_they_name(noisy, llama, monkeypatch):
    """Layers, keys or values, positions, heads and single elements; the rest stays the recipient's, bit by bit."""
    step = first_flip_free_step(noisy)
    workbench = Workbench(noisy, llama, target=step)
    workbench.reconstruct()
    written = []
    real = llama.write_cache
    monkeypatch.setattr(
        llama,
        "write_cache",
        lambda layers, at, states=(): (written.append(layers), real(layers, at, states))[1],
    )
    layer = llama.cache_layers[1]
    own = {entry.layer: entry.values for entry in workbench.reference.cache_before(step)}
    cases = {
        CacheEdit(step, (layer,), value=GivenValue.of(1.0)): (slice(None),) * 4,
        CacheEdit(step, (layer,), "keys", value=GivenValue.of(1.0)): (0, *(slice(None),) * 3),
        CacheEdit(step, (layer,), "values", (2, 5), value=GivenValue.of(1.0)): (1, [2, 5]),
        CacheEdit(step, (layer,), "keys", (3,), (1,), (7,), GivenValue.of(1.0), 1): (0, 3, 1, 7),
    }
    for edit, place in cases.items():
        written.clear()
        found = workbench.screen([edit])
        assert found.judgement is not Judgement.VOID
        edited = {entry.layer: entry.values for entry in written[-1]}
        expected = own[layer].clone()
        expected[place] = 1.0
        for number, values in edited.items():
            wanted = expected if number == layer else own[number]
            assert torch.equal(values.view(torch.int16), wanted.view(torch.int16))
        selected = workbench.select([edit])
        assert selected.elements == int(torch.ones_like(expected)[place].sum())


def test_a_cache_edit_in_mid_arm(noisy, llama):
    """A later cache edit takes the arm's own cache and replaces what it names; its consumer gets that."""
    step = first_flip_free_step(noisy)
    workbench = Workbench(noisy, llama, target=step)
    shrink = ShrinkEdit(llama.sites[4].path, 1, value=GivenValue.of(0.25))
    cache = CacheEdit(step - 1, (0,), "values", (2,), value=GivenValue.of(0.5))
    found = workbench.screen([shrink, cache])
    places = [receipt.place for receipt in found.edited.receipts]
    assert f"cache of layer 0 before step {step - 1}" in places
    assert all(receipt.landed for receipt in found.edited.receipts)
    assert found.edited.first_step == 1
    assert found.judgement is not Judgement.VOID, found.reasons


def test_forced_tokens_are_fed(noisy, llama, monkeypatch):
    """The step after the first forced one reads the new token; a forced recorded token changes nothing."""
    step = first_flip_free_step(noisy)
    workbench = Workbench(noisy, llama, target=step)
    workbench.reconstruct()
    fed = []
    real = llama.step
    monkeypatch.setattr(
        llama, "step", lambda token=None: (fed.append((llama.step_number, token)), real(token))[1]
    )
    recorded = workbench.reference.token_ids
    other = next(token for token in range(5, 40) if token not in recorded)
    workbench.screen([ForcedTokens(1, (other,))])
    unedited, edited = fed[: step - 1], fed[step - 1 :]
    assert unedited == [(at, recorded[at - 1]) for at in range(2, step + 1)]
    assert edited == [(2, other), *((at, recorded[at - 1]) for at in range(3, step + 1))]
    same = workbench.screen([ForcedTokens(1, (recorded[1],))])
    assert same.judgement is Judgement.NOT_APPLICABLE


def test_unedited_arms_run_once(plant):
    """The second screening at a site costs one arm; another site of the same record place shares nothing."""
    workbench = Workbench(plant.pair, plant.engine)
    workbench.reconstruct()
    before = workbench.runs, workbench.forwards
    workbench.screen([ShrinkEdit.of_coordinate(plant.cause)])
    assert workbench.runs - before[0] == 2
    for decoy in plant.decoys[:3]:
        runs = workbench.runs
        workbench.screen([ShrinkEdit.of_coordinate(decoy)])
        assert workbench.runs - runs == 1
    assert workbench.forwards - before[1] <= 5 * (plant.step + 1)


def test_an_arm_stops_when_its_state_is_the_unedited_one(plant):
    """A latent change is gone after its own step: one forward, and the sentence says where it stopped."""
    workbench = Workbench(plant.pair, plant.engine)
    site = plant.engine.sites.index(plant.cause.site)
    value = workbench.reference.shrink(0, site)[plant.cause.position, plant.cause.rank_index]
    other = latent_neighbour(value, plant.engine.dtype)
    found = workbench.screen([ShrinkEdit.of_coordinate(plant.cause, GivenValue(bits(other)))])
    assert (found.edited.stopped_early_at, found.edited.forwards) == (0, 1)
    assert found.edited.logits_digest == found.unedited.logits_digest
    assert found.edited.token_ids == found.unedited.token_ids
    assert found.edited.receipts[0].landed
    assert found.judgement is Judgement.NOT_SUFFICIENT


def test_stopping_early_changes_no_result(plant, monkeypatch):
    """Random edits, with and without stopping: the same tokens and states; some of them did stop."""
    workbench = Workbench(plant.pair, plant.engine)
    workbench.reconstruct()
    choose_edit = random.Random(4)
    stopped = 0
    for _ in range(12):
        site = choose_edit.randrange(len(plant.engine.sites))
        step = choose_edit.randrange(plant.step + 1)
        rank = choose_edit.randrange(16)
        position = workbench.reference.positions(step)[0]
        value = workbench.reference.shrink(step, site)[0, rank] * (1 + 2.0**-12)
        edit = ShrinkEdit(
            plant.engine.sites[site].path, step, (position,), (rank,), GivenValue(bits(value))
        )
        early = workbench.screen([edit]).edited
        if early is None:  # zero stays zero: the padding token's row
            continue
        with monkeypatch.context() as patch:
            patch.setattr(Bench, "_may_stop_early", False)
            full = workbench.screen([edit]).edited
        stopped += early.stopped_early_at is not None
        assert full.stopped_early_at is None
        assert (early.token_ids, early.logits_digest) == (full.token_ids, full.logits_digest)
        assert (early.token_id, early.top_values) == (full.token_id, full.top_values)
    assert stopped


def test_unedited_arms_stop_where_they_meet(noisy, llama, monkeypatch):
    """Arms that hand over recorded shrinks up to different sites mostly meet after their step; results are the same."""
    step = first_flip_free_step(noisy)
    met = 0
    edits = [
        ShrinkEdit(llama.sites[site].path, at, value=GivenValue.of(0.5))
        for at in (0, 1)
        for site in (2, 9, 14, 20)
    ]
    workbench, alone = (Workbench(noisy, llama, target=step) for _ in range(2))
    for recipient in ("reference", "candidate"):
        for edit in edits:
            found = workbench.screen([edit], recipient)
            with monkeypatch.context() as patch:
                patch.setattr(Bench, "_known", lambda *_: [])
                expected = alone.screen([edit], recipient)
            met += found.unedited.stopped_early_at is not None
            assert expected.unedited.stopped_early_at is None
            assert found.judgement is expected.judgement
            for ours, theirs in (
                (found.unedited, expected.unedited),
                (found.edited, expected.edited),
            ):
                assert ours.token_ids == theirs.token_ids
                assert ours.logits_digest == theirs.logits_digest
    assert met >= 4
    assert workbench.forwards < alone.forwards


def test_an_unequal_residual_keeps_an_arm_going(plant, monkeypatch):
    """The stop needs residual, cache rows and logits: a state that was never reported is not equal."""
    from fliptrace_interventions import audit

    monkeypatch.setattr(audit.ArmAudit, "residual", lambda self, values: None)
    workbench = Workbench(plant.pair, plant.engine)
    site = plant.engine.sites.index(plant.cause.site)
    value = workbench.reference.shrink(0, site)[plant.cause.position, plant.cause.rank_index]
    other = latent_neighbour(value, plant.engine.dtype)
    found = workbench.screen([ShrinkEdit.of_coordinate(plant.cause, GivenValue(bits(other)))])
    assert found.edited.stopped_early_at is None


def test_the_arm_is_what_the_engine_computes(plant):
    """An edited arm done by hand, with nothing of this package but the recorded values, gives the same logits."""
    workbench = Workbench(plant.pair, plant.engine)
    found = workbench.screen([ShrinkEdit.of_coordinate(plant.cause)]).edited
    engine, reference, candidate = plant.engine, workbench.reference, workbench.candidate
    site = engine.sites.index(plant.cause.site)
    place = plant.cause.position, plant.cause.rank_index

    def hand_over(number, operand, z):
        if engine.step_number or number > site:
            return z
        given = reference.trace.record(engine.sites[number].path, Kind.SHRINK, 0)
        if number == site:
            given[place] = candidate.trace.record(engine.sites[number].path, Kind.SHRINK, 0)[place]
        return given

    engine.start(plant.prompt)
    with engine.reducing("unsplit"), engine.intercepted(hand_over):
        logits = engine.step()
        for step in range(plant.step):
            logits = engine.step(reference.token_ids[step])
    assert digest_hex(digest_rows(logits.unsqueeze(0))[0]) == found.logits_digest
    assert choose(logits, plant.step).token == found.token_id


def test_free_arms_say_where_they_leave_the_prefix(plant):
    """A free arm that chooses another token before the judged step names the step; a forced one never does."""
    workbench = Workbench(plant.pair, plant.engine, shams=0)
    edits = [ShrinkEdit(site.path, 0, value=GivenValue.of(3.0)) for site in plant.engine.sites[:7]]
    result = workbench.prove(edits, "reference").directions[0]
    recorded = workbench.reference.token_ids
    left = result.free.left_prefix_at
    assert left is not None
    assert result.free.token_ids[left] != recorded[left]
    assert result.free.token_ids[:left] == recorded[:left]
    assert result.edited.left_prefix_at is None


def test_continuations_run_to_the_end(plant, planting):
    """Text and answer of the whole continuation; without edits the recipient's own from the judged step on."""
    workbench = Workbench(
        plant.pair, plant.engine, answer=lambda text: text.split()[-1], expected_answer="w1"
    )
    edited = workbench.continue_freely([ShrinkEdit.of_coordinate(plant.cause)])
    assert edited.token_ids == workbench.candidate.token_ids
    assert edited.text == plant.engine.text_of(workbench.candidate.token_ids)
    assert edited.answer == edited.text.split()[-1]
    assert edited.correct is (edited.answer == "w1")
    assert (edited.stop_reason, edited.repeats, edited.repeatable) == ("max new tokens", 2, True)
    own = workbench.continue_freely([ShrinkEdit.of_coordinate(plant.cause)], unedited=True)
    assert own.token_ids == workbench.reference.token_ids
    plain = workbench.continue_freely()
    assert plain.first_step == plant.step
    assert plain.text == own.text
    assert len(own.token_ids) == planting.TOKENS
    ending = workbench.ending
    assert (ending["last_step"], ending["end_ids"]) == (planting.TOKENS - 1, [])
    assert ending["expected_answer"] == "w1"
    assert ending["answer"] != Workbench(plant.pair, plant.engine).ending["answer"]


def test_nothing_is_left_behind(plant, monkeypatch):
    """After an exception anywhere in an arm: no interceptor, no audit, no hook, and the reduction of before."""
    engine = plant.engine
    engine.set_reduction("deterministic:4")
    before = engine.runtime.reduction, engine.runtime.schedule
    hooks = len(engine._last_layer()._forward_hooks)
    workbench = Workbench(plant.pair, engine)

    def explode(*arguments, **keywords):
        raise ZeroDivisionError

    for target, name in ((Handover, "__call__"), (engine, "step"), (engine, "write_cache")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, explode)
            with pytest.raises(ZeroDivisionError):
                workbench.screen([CacheEdit(plant.step)])
        assert (engine.runtime.reduction, engine.runtime.schedule) == before
        assert engine.runtime.interceptor is engine.runtime.audit is engine._audit is None
        assert len(engine._last_layer()._forward_hooks) == hooks
    assert workbench.screen([CacheEdit(plant.step)]).judgement is Judgement.SUFFICIENT
    assert (engine.runtime.reduction, engine.runtime.schedule) == before
    engine.set_reduction("unsplit")


def test_a_callers_inference_mode_does_no_harm(plant):
    """Inside torch.inference_mode everything runs as outside."""
    edits = [ShrinkEdit.of_coordinate(plant.cause)]
    with torch.inference_mode():
        found = Workbench(plant.pair, plant.engine, shams=2).prove(edits)
        assert torch.is_inference_mode_enabled()
    assert found == Workbench(plant.pair, plant.engine, shams=2).prove(edits)


def test_a_cut_arm_counts_no_run(plant, monkeypatch):
    """A run that failed is not remembered as an unedited arm."""
    workbench = Workbench(plant.pair, plant.engine)
    workbench.reconstruct()
    runs = workbench.runs
    with monkeypatch.context() as patch:
        patch.setattr(ArmRun, "choice", lambda *_: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            workbench.screen([CacheEdit(plant.step)])
    assert workbench.screen([CacheEdit(plant.step)]).judgement is Judgement.SUFFICIENT
    assert workbench.runs > runs


def test_memory_stays_flat(planted):
    """Two hundred screenings of changing places leave the process as large as the first hundred did."""
    plant = planted()
    workbench = Workbench(plant.pair, plant.engine)
    process = psutil.Process()
    choose_edit = random.Random(1)
    sizes = []
    for number in range(200):
        site = choose_edit.randrange(len(plant.engine.sites))
        step = plant.step - number % 2
        edit = ShrinkEdit(plant.engine.sites[site].path, step, value=GivenValue(number))
        workbench.screen([edit if number % 3 else CacheEdit(step)])
        if number in (100, 199):
            sizes.append(process.memory_info().rss)
    assert len(workbench._bench._unedited) <= 2 * (len(plant.engine.sites) + 1)
    assert sizes[1] - sizes[0] < 8 * 2**20


def test_forgotten_records_are_read_again(plant, monkeypatch):
    """Kept shrinks are bounded; what was dropped is read from the trace again, equal."""
    from fliptrace_interventions import recorded

    workbench = Workbench(plant.pair, plant.engine)
    before = digest_tensor(workbench.reference.shrink(0, 2))
    monkeypatch.setattr(recorded, "KEPT_SHRINK_BYTES", 1)
    workbench.reference.shrink(1, 2)
    assert list(workbench.reference._shrinks) == [1]
    assert torch.equal(digest_tensor(workbench.reference.shrink(0, 2)), before)


def test_plans_of_one_arm(plant):
    """run_arm alone: the same plan gives the same run, and a run equals itself."""
    workbench = Workbench(plant.pair, plant.engine)
    plan = workbench._resolve([CacheEdit(plant.step)], "reference", "recorded")[1]
    with plant.engine.reducing("unsplit"):
        first, again = (run_arm(plant.engine, plan, FORCED) for _ in range(2))
        own = run_arm(plant.engine, plan.unedited(), FORCED)
    assert first.is_equal(again)
    assert first.first_difference(again) is None
    assert first.first_difference(own) == plant.step
