"""A Mamba-2 hybrid (Nemotron-H, random weights) on vLLM on the CPU: recorded, restarted, rebuilt, substituted."""

from __future__ import annotations

import pytest
import torch

from fliptrace.errors import InputError
from fliptrace.numerics import integer_view
from fliptrace.pair import load_engine
from fliptrace.trace import Kind
from fliptrace_interventions import CacheEdit, CachePart, Workbench

STATES = ((0, "conv"), (0, "ssm"), (3, "conv"), (3, "ssm"))
IDS = tuple(range(5, 45))


@pytest.fixture(scope="module")
def hybrid(vllm_cpu, tiny, tmp_path_factory):
    """Mamba-2, attention, MLP, Mamba-2; every projection that vLLM adapts is adapted, out_proj included."""
    root = tmp_path_factory.mktemp("hybrid")
    model = tiny.write_model(root / "model", tiny.nemotron_configuration())
    targets = (*tiny.HYBRID_PROJECTIONS, "out_proj")
    adapter = tiny.write_plain_adapter(root / "adapter", model, targets, strength=1.0)
    engine = load_engine(str(model), str(adapter), engine="vllm", device="cpu")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def pair(hybrid, load_neighbour, tiny, repository_root, tmp_path_factory):
    """Two executions of which one has a shrink of the first Mamba layer pushed: a late row, as a state forgets."""
    planting = load_neighbour(repository_root / "tests" / "interventions" / "planting.py")
    site = next(number for number, site in enumerate(hybrid.sites) if "in_proj[1]" in site.path)
    nudge = planting.Nudge(site, 0, {(18, 2): 64})
    folder = tmp_path_factory.mktemp("pair")
    with planting.record_pair(hybrid, tiny.prompt_ids(20), folder, nudge, tokens=6) as recorded:
        yield recorded


def judged(pair):
    """Return a step whose cache both executions have."""
    flip = pair.diff.flip
    return 4 if flip is None else max(flip.step, 1)


def equal(one, other):
    return torch.equal(integer_view(one), integer_view(other))


def test_layers_and_sites_are_named(hybrid):
    """Groups of vLLM's with recurrent state are told from those with rows; in_proj has a site per slice."""
    assert hybrid.cache_layers == (1,)
    assert hybrid.state_keys == STATES
    assert hybrid.describe()["engine"]["state_layers"] == [0, 3]
    assert hybrid.not_observed() == ()
    modules = {site.path.partition("[")[0] for site in hybrid.sites}
    assert {
        f"model.layers.{layer}.mixer.{name}" for layer in (0, 3) for name in ("in_proj", "out_proj")
    } < modules
    assert sum("layers.0.mixer.in_proj[" in site.path for site in hybrid.sites) == 5


def test_a_restart_is_bit_equal(hybrid, generate):
    """From rows and slots read before a step, after another request: all later logits have the same bits."""
    hybrid.set_reduction("unsplit")
    tokens, rows = generate(hybrid, IDS, 6)
    kept = {}
    hybrid.start(IDS)
    assert hybrid.read_state() == ()
    for step, token in enumerate((None, *tokens[:-1])):
        if step:
            kept[step] = hybrid.read_cache(), hybrid.read_state()
        hybrid.step(token)
    for step, (content, states) in kept.items():
        generate(hybrid, (7, 8, 9), 2)
        hybrid.write_cache(content, step, states)
        for now, then in zip(hybrid.read_state(), states, strict=True):
            assert equal(now.values, then.values)
        for later in range(step, 6):
            assert equal(hybrid.step(tokens[later - 1]), rows[later]), (step, later)


def test_states_that_do_not_fit_are_refused(hybrid, generate):
    """Missing, given twice or of another shape: nothing is written."""
    generate(hybrid, IDS, 2)
    content, states = hybrid.read_cache(), hybrid.read_state()
    for spoiled in ((), states[1:], (*states, states[0])):
        with pytest.raises(InputError, match="none twice"):
            hybrid.write_cache(content, 2, spoiled)
    states[1].values.resize_(0)
    with pytest.raises(InputError, match="needs torch"):
        hybrid.write_cache(content, 2, states)


def test_recordings_are_rebuilt_with_their_states(hybrid, pair):
    """Rows, states and logits of both executions come out of the shrinks alone, bit by bit."""
    assert [entry.key for entry in pair.reference.frame(3, Kind.STATE).layout.entries] == [
        f"state.{layer}.{name}" for layer, name in STATES
    ]
    first = pair.diff.state_differences[0]
    assert (first.layer, first.step) == (0, 0)
    assert pair.diff.foreign_root is None
    for found in Workbench(pair, hybrid, target=judged(pair)).reconstruct():
        assert (found.equal, found.first_mismatch, found.restored_start) == (True, None, True)


@pytest.mark.parametrize("part", [CachePart.WHOLE, CachePart.BOTH, CachePart.STATE])
def test_what_was_kept_is_substituted(hybrid, pair, part):
    """Everything named arrives at attention and mixers, and nothing else changes."""
    step = judged(pair)
    found = Workbench(pair, hybrid, target=step).screen([CacheEdit(step, part=part)])
    assert str(found.judgement) != "void", found.reasons
    assert any(r.digest_before != r.digest_written for r in found.edited.receipts)
    for receipt in found.edited.receipts:
        assert receipt.landed
        named = "recurrent state" if receipt.place.startswith("recurrent") else "cache"
        if (part is CachePart.STATE and named == "cache") or (
            part is CachePart.BOTH and named != "cache"
        ):
            assert receipt.digest_before == receipt.digest_written
