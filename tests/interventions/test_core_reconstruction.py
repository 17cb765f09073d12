"""Reconstruction reads token ids and shrinks alone, and breaks when one of their surviving bits is another."""

from __future__ import annotations

import pytest
import torch

from fliptrace.numerics import integer_view, round_to
from fliptrace.pair import diff_traces
from fliptrace_interventions import RecordedExecution, Workbench
from fliptrace_interventions.pushing import latent_neighbour, moved
from fliptrace_interventions.reconstruction import reconstruct

LAST = 4


@pytest.fixture(scope="module", params=["llama", "gemma"])
def noisy(request, planting, tiny, tmp_path_factory):
    """Two recordings under simulated arrival orders."""
    torch.set_num_threads(1)
    engine = request.getfixturevalue(request.param)
    folder = tmp_path_factory.mktemp("noisy")
    paths = [
        planting.record(
            engine,
            tiny.prompt_ids(12, seed=3),
            folder / f"{seed}.trace",
            reduction="atomic:8",
            seed=seed,
            tokens=LAST + 2,
        )
        for seed in (1, 2)
    ]
    with diff_traces(*paths) as pair:
        yield engine, pair


def test_atomic_executions_are_reconstructed_under_unsplit(noisy):
    """The recordings' own reduction is gone; cache rows and logits still come out bit by bit."""
    engine, pair = noisy
    for found in Workbench(pair, engine, target=LAST).reconstruct():
        assert (found.equal, found.restored_start, found.steps) == (True, True, LAST + 1)


def test_it_starts_from_an_empty_cache(noisy, monkeypatch):
    """During the replay nothing writes a cache or reads recorded values other than shrinks."""
    engine, pair = noisy
    recorded = RecordedExecution(pair.reference, engine)
    started = []
    real = engine.start
    monkeypatch.setattr(engine, "start", lambda ids: (started.append(tuple(ids)), real(ids))[1])
    with monkeypatch.context() as patch:
        patch.setattr(engine, "write_cache", lambda *_: pytest.fail("a cache was restored"))
        with engine.reducing("unsplit"):
            found, forwards = reconstruct(engine, recorded, 0)
    assert started == [recorded.prompt_ids]
    assert (found.equal, forwards) == (True, 1)


@pytest.mark.parametrize("place", [(0, 0, 5, 3), (0, 11, 0, 0), (2, 4, 0, 7), (LAST, 20, 0, 15)])
def test_one_flipped_surviving_bit_breaks_it(noisy, monkeypatch, place):
    """One bit of one replayed shrink that survives rounding, and the mismatch names its step."""
    engine, pair = noisy
    step, site, row, rank = place
    original = RecordedExecution.shrink

    def flipped(self, at, number):
        z = original(self, at, number)
        if (at, number) == (step, site):
            bits = integer_view(z)
            bits[row, rank] ^= 1 << 22  # the highest bit of the significand, kept in 16 bits
        return z

    monkeypatch.setattr(RecordedExecution, "shrink", flipped)
    found, _ = reconstruct(engine, RecordedExecution(pair.reference, engine), LAST)
    assert not found.equal
    assert not found.restored_start
    assert found.first_mismatch.startswith(f"step {step}:")
    monkeypatch.undo()
    found, _ = reconstruct(engine, RecordedExecution(pair.reference, engine), LAST)
    assert found.equal


def test_latent_bits_do_not_matter(noisy, monkeypatch):
    """Every replayed shrink moved to a neighbour that rounds alike: still equal, since only rounded values act."""
    engine, pair = noisy
    original = RecordedExecution.shrink
    changed = []

    def nudged(self, at, number):
        z = original(self, at, number)
        other = latent_neighbour(z[0, 0].cpu(), engine.dtype)
        if other is not None:
            changed.append((at, number))
            z[0, 0] = other
        return z

    monkeypatch.setattr(RecordedExecution, "shrink", nudged)
    found, _ = reconstruct(engine, RecordedExecution(pair.reference, engine), LAST)
    assert found.equal
    assert len(changed) > LAST * len(engine.sites) / 2


def test_a_wrong_token_or_cache_row_is_found(noisy, monkeypatch):
    """Another fed token breaks it; so does another recorded cache row, with its layer and position."""
    engine, pair = noisy
    with monkeypatch.context() as patch:
        tokens = list(pair.reference.generated_ids)
        tokens[1] = next(token for token in range(5, 99) if token != tokens[1])
        patch.setattr(RecordedExecution, "token_ids", property(lambda self: tuple(tokens)))
        found, _ = reconstruct(engine, RecordedExecution(pair.reference, engine), LAST)
        assert found.first_mismatch.startswith("step 2:")
    layer = engine.cache_layers[-1]
    original = RecordedExecution.cache_rows

    def spoiled(self, step, number):
        rows = original(self, step, number)
        if (step, number) == (0, layer):
            integer_view(rows)[1, 4, 0, 0] ^= 1
        return rows

    monkeypatch.setattr(RecordedExecution, "cache_rows", spoiled)
    found, _ = reconstruct(engine, RecordedExecution(pair.reference, engine), LAST)
    assert f"1 elements of layer {layer}'s" in found.first_mismatch
    assert "values of token position 4" in found.first_mismatch


def test_a_restored_start_that_differs_is_told(noisy, monkeypatch):
    """The replay is equal, but the cache restored from the record is not what was written."""
    engine, pair = noisy
    original = RecordedExecution.cache_before

    def spoiled(self, step):
        layers = original(self, step)
        layers[0].values[0] = layers[0].values[0].roll(1, 0)
        return layers

    monkeypatch.setattr(RecordedExecution, "cache_before", spoiled)
    found, _ = reconstruct(engine, RecordedExecution(pair.reference, engine), LAST)
    assert (found.equal, found.restored_start) == (True, False)


def test_fingerprints_follow_the_content(noisy, planting, tmp_path):
    """The same recording has one fingerprint wherever it lies; another recording has another."""
    from fliptrace.store import copy_trace, open_trace

    engine, pair = noisy
    reference = RecordedExecution(pair.reference, engine)
    copied = tmp_path / "copy.trace"
    copy_trace(pair.reference.name, copied)
    with open_trace(copied) as trace:
        assert RecordedExecution(trace, engine).fingerprint() == reference.fingerprint()
    assert RecordedExecution(pair.candidate, engine).fingerprint() != reference.fingerprint()


def test_recorded_values_are_those_of_the_trace(noisy):
    """Shrinks, cache rows, whole caches and digests come out as they were recorded, also in sliding windows."""
    engine, pair = noisy
    from fliptrace.numerics import digest_hex, digest_tensor
    from fliptrace.trace import Kind

    recorded = RecordedExecution(pair.reference, engine)
    for step in (0, 3):
        for site in (0, 7, 20):
            z = recorded.shrink(step, site)
            expected = pair.reference.record(engine.sites[site].path, Kind.SHRINK, step)
            assert torch.equal(integer_view(z), integer_view(expected))
            assert digest_hex(digest_tensor(z)) == recorded.shrink_digest(step, site)
            digests = pair.reference.record(engine.sites[site].path, Kind.OPERAND, step)
            assert torch.equal(recorded.operand_digests(step, site), digests)
    engine.start(recorded.prompt_ids)

    def replay(site, operand, z):
        return recorded.shrink(engine.step_number, site)

    with engine.intercepted(replay):
        engine.step()
        for step in range(3):
            engine.step(recorded.token_ids[step])
    for now, kept in zip(engine.read_cache(), recorded.cache_before(4), strict=True):
        assert (now.layer, now.first_position, now.window) == (
            kept.layer,
            kept.first_position,
            kept.window,
        )
        assert torch.equal(integer_view(now.values), integer_view(kept.values))
        assert tuple(kept.values.shape) == recorded.cache_shape(4, kept.layer)


def test_flipping_that_bit_survives_rounding():
    """The bit that the tests above flip is one that BF16 and FP16 keep."""
    for number in (1.0, -0.37, 1e-3):
        value = torch.tensor(number)
        other = (value.view(torch.int32) ^ (1 << 22)).view(torch.float32)
        for dtype in (torch.bfloat16, torch.float16):
            assert not torch.equal(
                integer_view(round_to(value, dtype)), integer_view(round_to(other, dtype))
            )
    assert moved(torch.tensor(1.0), 1) > 1
