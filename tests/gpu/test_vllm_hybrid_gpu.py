"""A Mamba-2 hybrid (Nemotron-H, random weights) on vLLM and CUDA: pair, diff, restart, reconstruction, substitution.

python -m pytest tests/gpu/test_vllm_hybrid_gpu.py -q -p no:cacheprovider; needs no model: a folder is written here.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here", allow_module_level=True)
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import fliptrace as ft
from fliptrace.numerics import integer_view
from fliptrace.pair import load_engine
from fliptrace.trace import Kind
from fliptrace_interventions import CacheEdit, CachePart, Workbench

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
#: Mamba layers with states as wide as real ones: Triton's kernels are tuned for them.
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "head_dim": 64,
    "mamba_num_heads": 16,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "chunk_size": 128,
}
STATES = (0, 3, 4)
PROMPTS = [" ".join(f"w{number}" for number in range(first, first + 40)) for first in (80, 5, 150)]


@pytest.fixture(scope="module")
def engine(tiny, tmp_path_factory):
    """Random weights, and an adapter of rank 16 on every projection that vLLM adapts, out_proj included."""
    root = tmp_path_factory.mktemp("hybrid")
    model = tiny.write_model(root / "model", tiny.nemotron_configuration("M*-MM*-", **WIDE))
    targets = (*tiny.HYBRID_PROJECTIONS, "out_proj")
    adapter = tiny.write_plain_adapter(root / "adapter", model, targets, strength=0.2)
    engine = load_engine(
        str(model),
        str(adapter),
        engine="vllm",
        attention="TRITON_ATTN",
        vllm_arguments={"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 2**29},
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def pairs(engine, tmp_path_factory):
    """Pairs of vLLM's own shrink, three prompts."""
    made = [
        ft.trace_pair(
            engine,
            prompt=prompt,
            reduction="vllm-own",
            attempts=3,
            max_new_tokens=80,
            chat_template=False,
            directory=tmp_path_factory.mktemp(f"pair-{number}"),
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    yield made
    for pair in made:
        pair.close()


def same(one, other):
    return torch.equal(integer_view(one), integer_view(other))


def test_what_a_hybrid_keeps_is_stated(engine):
    """Attention layers keep rows, Mamba layers two tensors each; all projections have sites, in_proj five slices."""
    assert engine.cache_layers == (1, 5)
    assert engine.state_keys == tuple((layer, name) for layer in STATES for name in ("conv", "ssm"))
    assert engine.describe()["engine"]["state_layers"] == list(STATES)
    modules = {site.path.partition("[")[0].rpartition(".")[2] for site in engine.sites}
    assert modules == {"in_proj", "out_proj", "qkv_proj", "o_proj", "up_proj", "down_proj"}
    assert sum("in_proj" in site.path for site in engine.sites) == 5 * len(STATES)


def test_a_restart_from_recorded_state_is_bit_equal(engine, runs):
    """Rows and states read before a step and written after another prompt: the steps from there have the same bits."""
    ids = tuple(range(5, 45))
    engine.set_reduction("unsplit")
    tokens, rows = runs.run(engine, ids, 8)
    kept = {}
    engine.start(ids)
    for step, token in enumerate((None, *tokens[:-1])):
        if step:
            kept[step] = engine.read_cache(), engine.read_state()
        engine.step(token)
    for step, (content, states) in kept.items():
        runs.run(engine, (5, 6, 7), 3)
        engine.write_cache(content, step, states)
        for now, then in zip(engine.read_state(), states, strict=True):
            assert same(now.values, then.values)
        for later in range(step, 8):
            assert same(engine.step(tokens[later - 1]), rows[later]), (step, later)


def test_recordings_are_rebuilt_with_their_states(engine, pairs):
    """Every pair of vLLM's own kernel: rows, states and logits come out of the shrinks alone, bit by bit."""
    for pair in pairs:
        for trace in (pair.reference, pair.candidate):
            frame = trace.frame(len(trace.steps) - 1, Kind.STATE)
            assert len(frame.layout.entries) == len(engine.state_keys)
        target = None if pair.diff.flip else min(40, len(pair.reference.steps) - 1)
        for found in Workbench(pair, engine, target=target).reconstruct():
            assert found.equal, found.first_mismatch
            assert found.restored_start


@pytest.fixture(scope="module")
def planted(engine, load_neighbour, repository_root, tiny, tmp_path_factory):
    """Two unsplit executions of which one has a shrink of the first Mamba layer pushed in a late row of the prompt."""
    planting = load_neighbour(repository_root / "tests" / "interventions" / "planting.py")
    site = next(number for number, site in enumerate(engine.sites) if "in_proj[1]" in site.path)
    nudge = planting.Nudge(site, 0, {(38, 2): 64})
    folder = tmp_path_factory.mktemp("planted")
    with planting.record_pair(engine, tiny.prompt_ids(40), folder, nudge, tokens=6) as pair:
        yield pair


PARTS = pytest.mark.parametrize("part", ["whole", "both", "state"])


def check_receipts(receipts, part):
    """Everything arrived; what was named changed, and nothing else."""
    assert receipts
    assert all(receipt.landed for receipt in receipts)
    changed = {
        receipt.place.partition(" of ")[0]
        for receipt in receipts
        if receipt.digest_before != receipt.digest_written
    }
    wanted = {"whole": {"cache", "recurrent state"}, "both": {"cache"}}
    assert changed
    assert changed <= wanted.get(part, {"recurrent state"})


def test_a_planted_difference_is_seen_in_states(planted):
    """It entered through a shrink, and the first Mamba layer's state is among the first that differ."""
    assert planted.diff.foreign_root is None
    assert {(one.step, one.layer) for one in planted.diff.state_differences} >= {(0, 0)}


@PARTS
def test_a_planted_pair_is_rebuilt_and_substituted(engine, planted, part):
    """Both are rebuilt bit by bit; the other's cache and state, keys and values alone, state alone, arrive."""
    flip = planted.diff.flip
    step = 4 if flip is None else max(flip.step, 1)
    bench = Workbench(planted, engine, target=step)
    for found in bench.reconstruct():
        assert found.equal, found.first_mismatch
    found = bench.screen([CacheEdit(step, part=CachePart(part))])
    assert str(found.judgement) != "void", found.reasons
    check_receipts(found.edited.receipts, part)


def flips_after_its_root(pair):
    """Whether a token flipped in a later step than the first root's, so that what is kept differs before it."""
    flip, root = pair.diff.flip, pair.diff.first_propagating
    return flip is not None and root is not None and root.step < flip.step


@PARTS
def test_a_flip_is_judged(engine, pairs, part):
    """Of vLLM's own kernel: the donor's cache and state is sufficient; parts alone arrive and are judged."""
    pair = next(filter(flips_after_its_root, pairs), None)
    if pair is None:
        pytest.skip("no prompt of three flipped after its first root under vLLM's own kernel")
    bench = Workbench(pair, engine)
    edit = CacheEdit(bench.target_step, part=CachePart(part))
    verdict = bench.prove([edit], free=False, shams=0)
    assert str(verdict.judgement) not in ("void", "not applicable"), verdict.reasons
    for direction in verdict.directions:
        check_receipts(direction.edited.receipts, part)
    if part == "whole":
        assert str(verdict.judgement) == "sufficient", verdict.reasons
