"""Two ranks on two GPUs: what they export is what they would tell, and executions are rebuilt; skipped without them."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA GPUs", allow_module_level=True)
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here", allow_module_level=True)
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import fliptrace as ft
from fliptrace_interventions import Workbench

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def engine():
    """The bundled model on two GPUs."""
    bundled = ft.bundled_model()
    engine = ft.load_engine(
        str(bundled.model),
        str(bundled.adapter),
        engine="vllm",
        attention="TRITON_ATTN",
        vllm_arguments={
            "tensor_parallel_size": 2,
            "gpu_memory_utilization": 0.02,
            "kv_cache_memory_bytes": 2**29,
        },
    )
    yield engine
    engine.close()


def test_each_rank_has_a_gpu_of_its_own(engine):
    """As read in the ranks' processes."""
    stated = engine.describe()["engine"]["tensor_parallel"]
    assert stated["devices"] == ["cuda:0", "cuda:1"]
    assert all(stated["gpus"])


@pytest.mark.parametrize("reduction", ["unsplit", "deterministic:8"])
def test_one_transfer_holds_what_calls_report(engine, runs, tmp_path, reduction):
    """Every frame of eight steps is the same, byte by byte, and both ranks agree."""
    engine.set_reduction(reduction)
    found = {}
    for by_calls in (False, True):
        path = tmp_path / f"{by_calls}.trace"
        runs.record(engine, tuple(range(5, 45)), path, by_calls=by_calls)
        found[by_calls] = runs.frames(path)
    assert found[False] == found[True]
    with ft.diff_traces(tmp_path / "False.trace", tmp_path / "True.trace") as pair:
        assert pair.diff.rank_agreement[0].disagreeing_rows == 0


def test_a_recording_under_vllms_own_kernel_is_rebuilt(engine, tmp_path):
    """Two executions of 16 tokens, both from their shrinks, bit by bit, on both ranks."""
    with ft.trace_pair(
        engine,
        prompt=ft.bundled_model().prompts[0].text,
        reduction="vllm-own",
        attempts=1,
        max_new_tokens=16,
        directory=tmp_path / "pair",
    ) as pair:
        target = None if pair.diff.flip else 8
        for found in Workbench(pair, engine, target=target).reconstruct():
            assert found.equal, found.first_mismatch
