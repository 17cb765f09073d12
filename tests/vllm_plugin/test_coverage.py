"""What is refused and what is named, on configurations of the fields that vLLM's have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fliptrace_kernels import parse_reduction
from fliptrace_kernels.vllm_plugin.coverage import check_engine, check_process
from fliptrace_kernels.vllm_plugin.errors import PluginError

LOCAL = parse_reduction("local")


def configuration(
    *, lora=True, sharded=False, parallel=1, lora_dtype="auto", dtype=None, moe=False
):
    return SimpleNamespace(
        lora_config=SimpleNamespace(fully_sharded_loras=sharded, lora_dtype=lora_dtype)
        if lora
        else None,
        parallel_config=SimpleNamespace(tensor_parallel_size=parallel),
        model_config=SimpleNamespace(dtype=dtype or torch.bfloat16, is_moe=moe),
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"parallel": 2},
        {"sharded": True},
        {"lora_dtype": torch.float16},
        {"lora_dtype": "bfloat16", "dtype": torch.float32},
    ],
    ids=str,
)
def test_what_is_covered_needs_no_word(options):
    """Several GPUs are covered; sharding on one GPU shards nothing."""
    assert check_engine(LOCAL, configuration(**options)) == []


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sharded": True, "parallel": 2}, "fully_sharded_loras=True on 2 GPUs"),
        ({"dtype": torch.float32}, "this engine's are torch.float32"),
        ({"lora_dtype": torch.float8_e4m3fn}, "torch.float8_e4m3fn"),
    ],
)
def test_what_would_break_a_promise_is_refused(options, match):
    """The message says which setting and what to do."""
    with pytest.raises(PluginError, match=match):
        check_engine(LOCAL, configuration(**options))


def test_experts_are_named():
    """Adapters on experts keep vLLM's kernel; the other layers are covered."""
    (note,) = check_engine(LOCAL, configuration(moe=True))
    assert "experts" in note
    assert "vllm::fused_moe_lora" in note


def test_an_engine_without_lora_is_named():
    """Whoever set the variable and forgot --enable-lora should hear of it."""
    (note,) = check_engine(LOCAL, configuration(lora=False))
    assert "LoRA is not enabled" in note


@pytest.mark.parametrize(
    ("reduction", "options", "match"),
    [
        ("local", {"platform": "cpu"}, "platform here is 'cpu', whose LoRA layers never call it"),
        ("local", {"platform": "rocm"}, "platform here is 'rocm'"),
        ("unsplit", {"dual_stream": True}, "VLLM_LORA_ENABLE_DUAL_STREAM=1"),
        ("atomic:8", {"batch_invariant": True}, "VLLM_BATCH_INVARIANT=1 asks"),
        ("atomic:vllm", {"batch_invariant": True}, "VLLM_BATCH_INVARIANT=1 asks"),
    ],
)
def test_a_process_that_cannot_be_covered_is_refused(reduction, options, match):
    """Before any engine is built, in the process of whoever asked for it."""
    settings = {"platform": "cuda", "dual_stream": False, "batch_invariant": False} | options
    with pytest.raises(PluginError, match=match):
        check_process(parse_reduction(reduction), **settings)


@pytest.mark.parametrize(
    ("reduction", "batch_invariant"), [("atomic:8", False), ("local", True), ("unsplit", True)]
)
def test_a_process_that_can_be_covered_passes(reduction, batch_invariant):
    """Batch invariance goes with every repeatable reduction."""
    check_process(
        parse_reduction(reduction),
        platform="cuda",
        dual_stream=False,
        batch_invariant=batch_invariant,
    )
