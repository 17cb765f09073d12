"""--vllm-argument NAME=VALUE: what is read, and what is refused with which words."""

from __future__ import annotations

import pytest

from fliptrace.command_line.vllm_arguments import read_vllm_arguments
from fliptrace.errors import InputError


def test_values_are_json_or_bare_words():
    """Numbers, truth values, null, objects, quoted and unquoted texts; dashes and underscores name the same."""
    words = [
        "max_model_len=2048",
        "gpu-memory-utilization=0.3",
        "disable_custom_all_reduce=true",
        "revision=null",
        "attention_backend=TRITON_ATTN",
        'download_dir="/a b"',
        'override_generation_config={"top_k": 3}',
    ]
    assert read_vllm_arguments(words, "vllm") == {
        "max_model_len": 2048,
        "gpu_memory_utilization": 0.3,
        "disable_custom_all_reduce": True,
        "revision": None,
        "attention_backend": "TRITON_ATTN",
        "download_dir": "/a b",
        "override_generation_config": {"top_k": 3},
    }
    assert read_vllm_arguments(None, "transformers") == {}


@pytest.mark.parametrize(
    ("words", "engine", "said"),
    [
        (["max_model_len=7"], "auto", "goes with --engine vllm"),
        (["max_model_len"], "vllm", "must be NAME=VALUE"),
        (["=7"], "vllm", "must be NAME=VALUE"),
        (["a=1", "a=2"], "vllm", "given twice"),
        (["a=True"], "vllm", "written true"),
        (["a={1: 2}"], "vllm", "must be JSON"),
        (["a=1 2"], "vllm", "must be JSON"),
    ],
)
def test_what_cannot_be_read_is_refused(words, engine, said):
    """Another engine, another form, a name given twice, and what is no JSON."""
    with pytest.raises(InputError, match=said):
        read_vllm_arguments(words, engine)
