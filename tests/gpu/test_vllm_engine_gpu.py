"""The vllm engine on CUDA: layouts proved, shrinks as specified, vLLM's own kernel recorded; skipped without a GPU."""

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
from fliptrace.pair import bundled_model, load_engine
from fliptrace_interventions import CacheEdit, Workbench
from fliptrace_kernels import lora_shrink

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
#: FlashAttention comes as a module of its own, which a slim build of vLLM may lack.
FLASH = importlib.util.find_spec("vllm.vllm_flash_attn") is not None
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


def run(engine, ids, count):
    engine.start(ids)
    tokens, rows, token = [], [], None
    for _ in range(count):
        rows.append(engine.step(token))
        token = int(rows[-1].float().argmax())
        tokens.append(token)
    return tokens, rows


def test_the_settings_of_the_worker_are_stated(engine):
    """What was set is what the worker has; the runner and the backend are named."""
    stated = engine.describe()
    settings = stated["engine"]["settings_read_in_worker"]
    assert settings["enforce_eager"] is True
    assert not settings["cuda_graphs"]
    assert settings["runner"] in ("V1", "V2")
    assert stated["model"]["attention"] in BACKENDS


def test_an_unsplit_run_repeats(engine, ids):
    """Logits of twelve steps, bit by bit, three times."""
    engine.set_reduction("unsplit")
    _, first = run(engine, ids, 12)
    for _ in range(2):
        _, again = run(engine, ids, 12)
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


def test_a_cache_is_restored(engine, ids):
    """Read before a step and written after another prompt: the step and the next have the same logits."""
    engine.set_reduction("unsplit")
    tokens, rows = run(engine, ids, 6)
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


def test_a_pair_under_vllms_own_kernel(engine, tmp_path):
    """Traced with the observer control; both executions are rebuilt bit by bit, and the donor's cache arrives."""
    for number, prompt in enumerate(bundled_model().prompts[:10]):
        with ft.trace_pair(
            engine,
            prompt=prompt.text,
            reduction="vllm-own",
            attempts=6,
            max_new_tokens=60,
            directory=tmp_path / f"pair-{number}",
        ) as pair:
            if pair.diff.flip is None or not pair.diff.flip.step:
                continue
            workbench = Workbench(pair, engine)
            for found in workbench.reconstruct():
                assert found.equal, found.first_mismatch
            verdict = workbench.prove([CacheEdit(pair.diff.flip.step)], free=False, shams=0)
            assert str(verdict.judgement) != "void", verdict.reasons
            return
    pytest.skip("no prompt of ten flipped within 60 tokens and 6 attempts under vLLM's own kernel")
