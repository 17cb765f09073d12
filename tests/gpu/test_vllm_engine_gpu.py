"""The vllm engine on CUDA: layouts proved, shrinks as specified, vLLM's own kernel recorded; skipped without a GPU."""

from __future__ import annotations

import contextlib
import importlib
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
from fliptrace.pair import bundled_model, load_engine
from fliptrace_interventions import CacheEdit, Workbench
from fliptrace_kernels import lora_shrink

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
#: FlashAttention is an extension of its own, which a slim build of vLLM may lack, or hold without its operators.
with contextlib.suppress(ImportError):
    importlib.import_module("vllm.vllm_flash_attn")
FLASH = hasattr(torch.ops._vllm_fa2_C, "varlen_fwd")
BACKENDS = ("TRITON_ATTN", *(("FLASH_ATTN",) if FLASH else ()))


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request):
    """The bundled model on one attention backend; its cache layout is proved on loading."""
    bundled = bundled_model()
    engine = load_engine(
        bundled.model,
        bundled.adapter,
        engine="vllm",
        attention=request.param,
        vllm_arguments={"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 2**29},
    )
    yield engine
    engine.close()


@pytest.fixture
def ids():
    """Token ids of some prompt."""
    return tuple(range(5, 45))


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def test_the_settings_of_the_worker_are_stated(engine):
    """What was set is what the worker has; the runner and the backend are named."""
    stated = engine.describe()
    settings = stated["engine"]["settings_read_in_worker"]
    assert settings["enforce_eager"] is True
    assert not settings["cuda_graphs"]
    assert settings["runner"] in ("V1", "V2")
    assert stated["model"]["attention"] in BACKENDS


def test_an_unsplit_run_repeats(engine, runs, ids):
    """Logits of twelve steps, bit by bit, three times."""
    engine.set_reduction("unsplit")
    _, first = runs.run(engine, ids, 12)
    for _ in range(2):
        _, again = runs.run(engine, ids, 12)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("reduction", ["unsplit", "deterministic:8"])
def test_shrinks_are_what_the_kernels_give(engine, ids, reduction):
    """Each site's shrink alone, from its operand and weight, has the recorded bits."""
    seen = {}

    def keep(site, operand, z):
        seen[site] = (operand.clone(), z.clone())
        return z

    engine.set_reduction(reduction)
    engine.start(ids)
    with engine.intercepted(keep):
        for token in (None, 7):
            engine.step(token)
            assert sorted(seen) == list(range(len(engine.sites)))
            for site, (operand, z) in seen.items():
                alone = lora_shrink(operand, (engine.shrink_weight(site),), reduction=reduction)[0]
                assert torch.equal(bits(alone), bits(z)), engine.sites[site].name


def test_vllms_own_kernel_is_recorded_and_replayed(engine, ids):
    """Shrinks of vLLM's own operator, handed over again under unsplit, give the same logits bit by bit."""
    recorded, logits = [], []

    def keep(site, operand, z):
        recorded.append(z.clone())
        return z

    engine.set_reduction("vllm-own")
    engine.start(ids)
    with engine.intercepted(keep):
        logits.extend([engine.step(token) for token in (None, 9, 11)])
    engine.set_reduction("unsplit")
    again = iter(recorded)
    engine.start(ids)
    with engine.intercepted(lambda site, operand, z: next(again)):
        for token, expected in zip((None, 9, 11), logits, strict=True):
            assert torch.equal(bits(engine.step(token)), bits(expected))


def test_a_cache_is_restored(engine, runs, ids):
    """Read before a step and written after another prompt: the step and the next have the same logits."""
    engine.set_reduction("unsplit")
    tokens, rows = runs.run(engine, ids, 6)
    engine.start(ids)
    for token in (None, *tokens[:3]):
        engine.step(token)
    content = engine.read_cache()
    engine.start((5, 6, 7))
    engine.step()
    engine.write_cache(content, 4)
    for place, now in enumerate(engine.read_cache()):
        assert torch.equal(bits(now.values), bits(content[place].values))
    assert torch.equal(bits(engine.step(tokens[3])), bits(rows[4]))
    assert torch.equal(bits(engine.step(tokens[4])), bits(rows[5]))


def test_slots_hold_what_calls_report(engine, runs, ids, tmp_path):
    """Every frame of eight steps is the same, byte by byte; digests come from the captured graph by then."""
    engine.set_reduction("deterministic:8")

    def digested_by_the_graph(recorder):
        assert recorder._arena._finishing.is_captured

    found = {}
    for by_calls in (False, True):
        path = tmp_path / f"{by_calls}.trace"
        runs.record(engine, ids, path, by_calls=by_calls, recorder_seen=digested_by_the_graph)
        found[by_calls] = runs.frames(path)
    assert found[False] == found[True]


def test_a_recording_under_vllms_own_kernel_is_rebuilt(engine, tmp_path):
    """Two executions of 16 tokens: both are rebuilt bit by bit from their shrinks."""
    with ft.trace_pair(
        engine,
        prompt=bundled_model().prompts[0].text,
        reduction="vllm-own",
        attempts=1,
        max_new_tokens=16,
        directory=tmp_path / "pair",
    ) as pair:
        target = None if pair.diff.flip else 8
        for found in Workbench(pair, engine, target=target).reconstruct():
            assert found.equal, found.first_mismatch


def test_a_flip_under_vllms_own_kernel_is_judged(engine, tmp_path):
    """The donor's cache arrives before the flip; of four prompts, three attempts and 40 tokens, where one flips."""
    for number, prompt in enumerate(bundled_model().prompts[:4]):
        with ft.trace_pair(
            engine,
            prompt=prompt.text,
            reduction="vllm-own",
            attempts=3,
            max_new_tokens=40,
            directory=tmp_path / f"pair-{number}",
        ) as pair:
            if pair.diff.flip is None or not pair.diff.flip.step:
                continue
            verdict = Workbench(pair, engine).prove(
                [CacheEdit(pair.diff.flip.step)], free=False, shams=0
            )
            assert str(verdict.judgement) != "void", verdict.reasons
            return
    pytest.skip("no prompt of four flipped within 40 tokens and 3 attempts under vLLM's own kernel")


@pytest.mark.parametrize("reduction", ["vllm-own", "deterministic:8"])
def test_one_of_a_batch_of_sixteen(runs, tmp_path, reduction):
    """15 neighbours, one without adapter: a pair is recorded and rebuilt bit by bit; slots hold what calls report."""
    bundled = bundled_model()
    texts = [prompt.text for prompt in bundled.prompts[1:16]]
    engine = load_engine(
        bundled.model,
        bundled.adapter,
        engine="vllm",
        attention=BACKENDS[0],
        vllm_arguments={"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 2**29},
        neighbours=[ft.Neighbour(texts[0], None), *texts[1:4], None, *texts[4:]],
    )
    try:
        with ft.trace_pair(
            engine,
            prompt=bundled.prompts[0].text,
            reduction=reduction,
            attempts=2,
            max_new_tokens=16,
            directory=tmp_path / "pair",
        ) as pair:
            assert "tokens and digests of all logits equal" in pair.diff.coverage.observer_control
            launch = pair.reference.frame(3, ft.Kind.SHRINK).layout.entries[0].launch
            assert "batch_rows=16 first_row=4" in launch
            if reduction == "deterministic:8":
                assert str(pair.diff.outcome) == "identical"
            target = None if pair.diff.flip is not None else 15
            for found in Workbench(pair, engine, target=target).reconstruct():
                assert found.equal, found.first_mismatch
            tokens = [step.chosen for step in pair.reference.steps]
        engine.set_reduction("deterministic:8")
        ids = ft.encode_prompt(engine.tokenizer, bundled.prompts[0].text).ids
        found = {}
        for by_calls in (False, True):
            path, steps = tmp_path / f"{by_calls}.trace", len(tokens)
            runs.record(engine, ids, path, by_calls=by_calls, steps=steps, forced=tuple(tokens))
            found[by_calls] = [frame[:3] for frame in runs.frames(path, steps)]
        assert found[False] == found[True]
    finally:
        engine.close()
