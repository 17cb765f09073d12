"""Eight ways to fool an experiment. Each is noticed, and each test shows what would be said without the guard."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fliptrace.errors import InputError
from fliptrace.judgements import Judgement
from fliptrace.manifest import Manifest
from fliptrace.pair import Pair
from fliptrace.store import open_trace
from fliptrace.trace import Trace
from fliptrace_interventions import (
    CacheEdit,
    ForcedTokens,
    GivenValue,
    RecordedExecution,
    ReplayShrinks,
    ShrinkEdit,
    Source,
    Workbench,
    bench,
    identity,
    judging,
    recorded,
    selection,
)
from fliptrace_kernels import ArrivalSchedule


@pytest.fixture
def without(monkeypatch):
    """A function that takes one guard out of the truth table."""

    def remove(guard):
        rest = tuple(kept for kept in judging.GUARDS if kept is not guard)
        assert len(rest) < len(judging.GUARDS)
        monkeypatch.setattr(judging, "GUARDS", rest)

    return remove


def site_of(plant):
    """The index of the planted site."""
    return [site.path for site in plant.engine.sites].index(plant.cause.site.path)


# 1 --------------------------------------------------------------------------------------------------------------------


def test_an_edit_at_a_site_that_never_executes(planted, monkeypatch, without):
    """The adapter of one layer is disabled, so the edit is never written; without the guard it "is not sufficient"."""
    plant = planted()
    workbench = Workbench(plant.pair, plant.engine)
    workbench.reconstruct()
    voids = []
    for site, (path, layer) in enumerate(plant.engine._layers):
        edit = ShrinkEdit(plant.engine.sites[site].path, plant.step, value=GivenValue.of(1.0))
        with monkeypatch.context() as patch:
            patch.setattr(layer, "_disable_adapters", True)
            found = Workbench.screen(_fresh(workbench), [edit])
        if "site did not run" in " ".join(found.reasons) and len(found.reasons) == 1:
            assert found.judgement is Judgement.VOID
            assert found.edited.receipts[0].digest_written == ""
            voids.append((path, layer, edit))
    assert voids
    _, layer, edit = voids[0]
    without(judging.edits_landed)
    monkeypatch.setattr(layer, "_disable_adapters", True)
    assert _fresh(workbench).screen([edit]).judgement is Judgement.NOT_SUFFICIENT


def _fresh(workbench):
    """The same workbench without remembered arms."""
    workbench._bench._unedited.clear()
    return workbench


# 2 --------------------------------------------------------------------------------------------------------------------


def test_a_consumer_fed_a_stale_copy(plant, monkeypatch, without):
    """The interceptor is heard, but what it returns is not used; without the guard the cause "is not sufficient"."""
    workbench = Workbench(plant.pair, plant.engine)
    edit = ShrinkEdit.of_coordinate(plant.cause)
    assert workbench.screen([edit]).judgement is Judgement.SUFFICIENT
    module = plant.engine._shrinks[site_of(plant)]
    original, runtime = module.forward, plant.engine.runtime

    def stale(x):
        interceptor, runtime.interceptor = runtime.interceptor, None
        computed = original(x)
        runtime.interceptor = interceptor
        original(x)
        return computed

    monkeypatch.setattr(module, "forward", stale)
    found = workbench.screen([edit])
    assert found.judgement is Judgement.VOID
    assert "but its reader got" in found.reasons[0]
    assert found.edited.receipts[0].digest_consumed != found.edited.receipts[0].digest_written
    without(judging.edits_landed)
    assert workbench.screen([edit]).judgement is Judgement.NOT_SUFFICIENT


# 3 --------------------------------------------------------------------------------------------------------------------


def test_a_donor_trace_mutated_by_a_continuation(plant, monkeypatch, without):
    """A consumer writes into its input; with copies that harms nobody, without them it is noticed."""
    edits = [CacheEdit(plant.step), ReplayShrinks(Source.DONOR, (plant.step, plant.step))]
    for _, layer in plant.engine._layers:
        (adapter,) = layer.lora_A.values()
        forward = adapter.round.forward

        def writes_into_its_input(z, forward=forward):
            rounded = forward(z).clone()
            z.neg_()
            return rounded

        monkeypatch.setattr(adapter.round, "forward", writes_into_its_input)
    workbench = Workbench(plant.pair, plant.engine)
    for _ in range(2):
        assert workbench.screen(edits).judgement is Judgement.SUFFICIENT
    assert workbench.reference.changes() == workbench.candidate.changes() == ()

    monkeypatch.setattr(RecordedExecution, "_copy", staticmethod(lambda kept: kept))
    found = workbench.screen(edits)
    assert found.judgement is Judgement.VOID
    assert f"candidate's shrinks of step {plant.step}" in " ".join(found.reasons)
    workbench.candidate.forget()
    workbench.reference.forget()
    without(judging.recordings_unchanged)
    assert workbench.screen(edits).judgement is Judgement.SUFFICIENT
    assert workbench.screen(edits).judgement is not Judgement.SUFFICIENT


def test_a_cache_that_is_not_copied_is_noticed(plant, monkeypatch):
    """Cached rows that are handed out without a copy, and written to, are named with their layer."""
    workbench = Workbench(plant.pair, plant.engine)
    layer = plant.engine.cache_layers[0]
    workbench.candidate.cache_rows(0, layer).zero_()
    assert workbench.candidate.changes() == ()
    monkeypatch.setattr(RecordedExecution, "_copy", staticmethod(lambda kept: kept))
    workbench.candidate.cache_rows(0, layer)[0, 0, 0, 0] += 1
    assert workbench.candidate.changes() == (f"the candidate's cached rows of layer {layer}",)


# 4 --------------------------------------------------------------------------------------------------------------------


def test_a_reduction_that_does_not_repeat(load, planting, tiny, tmp_path, monkeypatch, without):
    """It must be asked for; then repeats that differ make the claim void, and those of one schedule do not."""
    engine = load("llama", dtype="float32")  # no rounding hides what the arrival order changes
    pair = planting.record_pair(engine, tiny.prompt_ids(8), tmp_path, None, tokens=4)
    with pytest.raises(InputError, match=r"not repeatable by construction.*allow_unrepeatable"):
        Workbench(pair, engine, reduction="atomic:8", target=3)
    allowed = {"reduction": "atomic:8", "allow_unrepeatable": True, "target": 3}
    edits = [ShrinkEdit(site.path, 0, value=GivenValue.of(9.0)) for site in engine.sites[:7]]
    steady = Workbench(pair, engine, **allowed, repeats=3).screen(edits)
    assert steady.judgement is Judgement.CHANGES, steady.reasons
    assert (steady.edited.repeats, steady.edited.repeatable) == (3, True)

    real, counter = bench.run_arm, iter(range(10**6))

    def hardware_like(engine, *arguments):
        engine.runtime.schedule = ArrivalSchedule(next(counter))
        return real(engine, *arguments)

    monkeypatch.setattr(bench, "run_arm", hardware_like)
    workbench = Workbench(pair, engine, **allowed, repeats=3)
    found = workbench.screen(edits)
    assert not found.unedited.repeatable
    assert found.judgement is Judgement.VOID
    assert "not bit-equal under atomic:8/32" in " ".join(found.reasons)
    without(judging.repeats_equal)
    assert _fresh(workbench).screen(edits).judgement is Judgement.CHANGES


# 5 --------------------------------------------------------------------------------------------------------------------


def test_a_write_to_an_evicted_position(planted, monkeypatch):
    """A sliding window has moved on: refused by name. Without the guard another row is edited and judged."""
    plant = planted("gemma")
    workbench = Workbench(plant.pair, plant.engine)
    layer = next(layer for layer, window in plant.engine.cache_windows.items() if window)
    first = workbench.reference.first_kept_position(plant.step, layer)
    assert first > 0
    edit = CacheEdit(plant.step, (layer,), positions=(first - 1,), value=GivenValue.of(1.0))
    with pytest.raises(InputError) as raised:
        workbench.screen([edit])
    for words in (f"layer {layer}", f"evicted position {first - 1}", f"keeps is {first}"):
        assert words in str(raised.value)
    kept = dataclasses.replace(edit, positions=(first,))
    found = workbench.screen([kept])
    assert found.edited.receipts[0].landed
    monkeypatch.setattr(selection, "check_cache_places", lambda *_: None)
    wrong = workbench.screen([edit])
    assert wrong.judgement is not Judgement.VOID
    assert wrong.edited.receipts[0].digest_written != wrong.edited.receipts[0].digest_before


# 6 --------------------------------------------------------------------------------------------------------------------


def test_a_trace_of_another_adapter(planted, load, monkeypatch):
    """Refused by the adapter's hash; were it not, reconstruction would find it out; were that gone, it would judge."""
    plant = planted()
    other = load("llama", adapter_seed=2)
    with pytest.raises(InputError, match=r"adapter\.sha256.*load the adapter that was recorded"):
        Workbench(plant.pair, other)
    monkeypatch.setattr(recorded, "check_trace", lambda *_: None)
    workbench = Workbench(plant.pair, other)
    found = workbench.screen([CacheEdit(plant.step)])
    assert found.judgement is Judgement.VOID
    assert "cannot be reconstructed" in found.reasons[0]
    assert found.edited is None
    _pretend_reconstruction(monkeypatch)
    monkeypatch.setattr(judging, "GUARDS", ())
    workbench = Workbench(plant.pair, other)
    assert workbench.screen([CacheEdit(plant.step)]).judgement is not Judgement.VOID


def _pretend_reconstruction(monkeypatch):
    real = bench.reconstruct

    def pretend(*arguments):
        found, forwards = real(*arguments)
        return dataclasses.replace(
            found, equal=True, first_mismatch=None, restored_start=True
        ), forwards

    monkeypatch.setattr(bench, "reconstruct", pretend)


# 7 --------------------------------------------------------------------------------------------------------------------


class Altered:
    """A trace source whose manifest says something else."""

    def __init__(self, source, changes):
        self._source = source
        sections = {name: dict(section) for name, section in source.manifest.sections.items()}
        for key, value in changes.items():
            section, _, name = key.partition(".")
            sections[section][name] = value
        self.manifest = Manifest(sections)

    def __getattr__(self, name):
        return getattr(self._source, name)


def altered_pair(pair, changes):
    """The same recordings under a changed manifest."""
    return Pair(
        *(Trace(Altered(trace.source, changes)) for trace in (pair.reference, pair.candidate))
    )


@pytest.mark.parametrize(
    "key",
    [
        "model.sha256",
        "model.dtype",
        "model.attention",
        "adapter.sha256",
        "adapter.scaling_sha256",
        "engine.name",
    ],
)
def test_a_stale_manifest_is_refused(planted, monkeypatch, key):
    """Each key that must be equal is named, with what was recorded, what is here and what to do."""
    plant = planted()
    stale = "float16" if key == "model.dtype" else "another"
    pair = altered_pair(plant.pair, {key: stale})
    with pytest.raises(
        InputError, match=rf"{key} = {stale}; this engine has .*record the pair again"
    ):
        Workbench(pair, plant.engine)
    monkeypatch.delitem(identity.REFUSED_KEYS, key)
    assert Workbench(pair, plant.engine).screen([CacheEdit(plant.step)]).judgement is (
        Judgement.SUFFICIENT
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recording.expected_sites": ["model.layers.0.mlp.up_proj"]}, "its manifest name 1"),
        ({"prompt.ids": [5, 6, 7]}, "not the trace of its manifest"),
        ({"recording.redacted": True}, "redacted"),
        ({"model.sha256": None}, "model.sha256 = None"),
    ],
)
def test_a_manifest_of_other_records_is_refused(planted, changes, words):
    """Sites, prompt and redaction must be those of the records."""
    plant = planted()
    with pytest.raises(InputError, match=words):
        Workbench(altered_pair(plant.pair, changes), plant.engine)


def test_another_library_or_gpu_is_told(planted):
    """Reconstruction decides whether it matters; the difference is listed with the verdict."""
    plant = planted()
    environment = dict(plant.pair.reference.manifest.sections["environment"])
    versions = dict(environment["versions"]) | {"torch": "1.0"}
    pair = altered_pair(
        plant.pair,
        {"environment.versions": versions, "environment.gpu": {"name": "Another GPU"}},
    )
    workbench = Workbench(pair, plant.engine)
    told = {key: (before, now) for key, before, now in workbench.environment_differences}
    assert told == {
        "environment.versions.torch": ("1.0", torch.__version__),
        "environment.gpu.name": ("Another GPU", None),
    }
    verdict = workbench.prove([CacheEdit(plant.step)], "reference", free=False)
    assert verdict.judgement is Judgement.SUFFICIENT
    assert dict(verdict.environment)["environment"]["versions"]["torch"] == torch.__version__
    assert len(verdict.environment_differences) == 2


def test_records_of_another_adapter_under_a_fitting_manifest(
    planted, planting, load, tmp_path, monkeypatch
):
    """Only reconstruction can see it; without it the pair would be judged."""
    plant = planted()
    other = load("llama", adapter_seed=2)
    foreign = planting.record_pair(other, plant.prompt, tmp_path, plant.nudge)
    sections = plant.pair.reference.manifest.sections
    lie = {"adapter.sha256": sections["adapter"]["sha256"]}
    pair = altered_pair(foreign, lie)
    workbench = Workbench(pair, plant.engine, target=0)
    edit = ShrinkEdit.of_coordinate(plant.cause)
    found = workbench.screen([edit])
    assert found.judgement is Judgement.VOID
    assert all("cannot be reconstructed" in reason for reason in found.reasons)
    _pretend_reconstruction(monkeypatch)
    monkeypatch.setattr(judging, "GUARDS", ())
    assert Workbench(pair, plant.engine, target=0).screen([edit]).judgement is not Judgement.VOID


# 8 --------------------------------------------------------------------------------------------------------------------


def test_an_unedited_arm_that_already_gives_the_donors_token(plant, without):
    """What follows the edit undoes the recipient's own cause; without the guard any edit "is sufficient"."""
    workbench = Workbench(plant.pair, plant.engine)
    harmless = ShrinkEdit(
        plant.engine.sites[0].path, 0, (0,), (0,), workbench_latent_value(workbench), expect=1
    )
    found = workbench.screen([harmless], "candidate")
    assert found.unedited.token_id == found.donor_token
    assert found.judgement is Judgement.VOID
    assert "the unedited arm already gives the donor's token" in found.reasons[0]
    without(judging.own_token_kept)
    assert workbench.screen([harmless], "candidate").judgement is Judgement.SUFFICIENT


def workbench_latent_value(workbench):
    """Another value for the first coordinate of the prefill, one that rounds alike."""
    from fliptrace_interventions.pushing import latent_neighbour

    value = workbench.candidate.shrink(0, 0)[0, 0]
    neighbour = latent_neighbour(value, workbench.engine.dtype)
    return GivenValue(int(neighbour.view(torch.int32)) & 0xFFFFFFFF)


# Beyond the eight -----------------------------------------------------------------------------------------------------


def test_an_operand_that_is_not_the_recorded_one(planted, monkeypatch, without):
    """What enters the first edited site must be what was recorded; for later sites it is reported."""
    plant = planted()
    workbench = Workbench(plant.pair, plant.engine)
    edit = ShrinkEdit.of_coordinate(plant.cause)
    assert workbench.screen([edit]).judgement is Judgement.SUFFICIENT
    original = RecordedExecution.operand_digests

    def foreign(self, step, site):
        return original(self, step, site) + (self.which == "reference")

    monkeypatch.setattr(RecordedExecution, "operand_digests", foreign)
    found = workbench.screen([edit])
    assert found.judgement is Judgement.VOID
    assert plant.cause.site.name in found.reasons[0]
    assert "is not the recorded one" in found.reasons[0]
    without(judging.operand_recorded)
    assert workbench.screen([edit]).judgement is Judgement.SUFFICIENT


def test_controls_that_change_something_void_a_proof(planted, monkeypatch):
    """A self-substitution that puts other bits in, and a latent sham that crosses its boundary, are noticed."""
    from fliptrace_interventions import controls, plans

    plant = planted()
    edit = ShrinkEdit.of_coordinate(plant.cause)
    workbench = Workbench(plant.pair, plant.engine, shams=0)
    with monkeypatch.context() as patch:
        patch.setattr(controls, "latent_neighbour", lambda value, dtype: value * -3)
        verdict = workbench.prove([edit], "reference", free=False)
        assert verdict.judgement is Judgement.VOID
        assert "control latent sham failed" in verdict.reasons[0]
    with monkeypatch.context() as patch:
        patch.setattr(plans.Plan, "with_own_values", lambda self: self)
        plan = workbench._resolve([edit], "reference", "recorded")[1]
        patch.setattr(plans.Plan, "unedited", lambda self: plan.with_patches({}))
        verdict = workbench.prove([edit], "reference", free=False)
        assert verdict.judgement is Judgement.VOID
        assert "control self-substitution failed" in verdict.reasons[0]
    assert workbench.prove([edit], "reference", free=False).judgement is Judgement.SUFFICIENT


# Traces that cannot be used -------------------------------------------------------------------------------------------


def test_an_incomplete_trace_is_refused(planted, tmp_path, planting):
    """A recording that was cut short is no ground for experiments."""
    plant = planted()
    path = planting.record(plant.engine, plant.prompt, tmp_path / "cut.trace")
    trace = open_trace(path)
    trace.source.closing = dataclasses.replace(trace.closing, complete=False, stop_reason="killed")
    with pytest.raises(InputError, match=r"not complete \(killed\)"):
        RecordedExecution(trace, plant.engine)


def test_a_pair_that_never_flipped_needs_a_target(planted, planting, tmp_path):
    """The message says what to give; with a target an edit that changes the token is an outcome of its own."""
    plant = planted()
    pair = planting.record_pair(plant.engine, plant.prompt, tmp_path, None)
    with pytest.raises(InputError, match=r"nothing flipped.*target=STEP"):
        Workbench(pair, plant.engine)
    for wrong in (-1, planting.TOKENS):
        with pytest.raises(InputError, match="target must be a step from 0 to 9"):
            Workbench(pair, plant.engine, target=wrong)
    workbench = Workbench(pair, plant.engine, target=plant.step)
    donor = Workbench(plant.pair, plant.engine).candidate.shrink(0, site_of(plant))
    row, rank = plant.cause.position, plant.cause.rank_index
    bits = int(donor[row, rank].view(torch.int32)) & 0xFFFFFFFF
    found = workbench.screen([ShrinkEdit.of_coordinate(plant.cause, GivenValue(bits))])
    assert found.judgement is Judgement.CHANGES
    assert found.edited.token_id == plant.tokens[1]
    same = workbench.screen([ShrinkEdit.of_coordinate(plant.cause)])
    assert (same.judgement, same.edited) == (Judgement.NOT_APPLICABLE, None)


# and of tokens --------------------------------------------------------------------------------------------------------


def test_a_forced_token_that_never_reaches_the_embedding(plant, monkeypatch, without):
    """Every forced token has its receipt; an engine that feeds another one is noticed."""
    first, second = (plant.pair.reference.generated_ids[step] ^ 1 for step in (0, 1))
    edit = ForcedTokens(0, (first, second))
    workbench = Workbench(plant.pair, plant.engine)
    found = workbench.screen([edit])
    assert found.judgement is not Judgement.VOID, found.reasons
    assert [receipt.place for receipt in found.edited.receipts] == [
        "token of step 0",
        "token of step 1",
    ]
    assert all(receipt.landed for receipt in found.edited.receipts)
    assert all(r.digest_before != r.digest_written for r in found.edited.receipts)
    step = plant.engine.step
    monkeypatch.setattr(
        plant.engine, "step", lambda token=None: step(first ^ 2 if token == first else token)
    )
    found = workbench.screen([edit])
    assert found.judgement is Judgement.VOID
    assert "its reader got" in found.reasons[0]
    without(judging.edits_landed)
    assert workbench.screen([edit]).judgement is not Judgement.VOID
