"""What the vllm engine refuses before it loads anything; most of it needs no vLLM."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest

from fliptrace.errors import InputError, UnsupportedModelError
from fliptrace.pair import bundled_model, load_engine
from fliptrace.sites import Site

BUNDLED = bundled_model()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
def test_without_vllm_the_engine_says_what_to_install():
    """One sentence, not a traceback of an import."""
    with pytest.raises(InputError, match="install vllm"):
        load_engine(BUNDLED.model, BUNDLED.adapter, engine="vllm")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enforce_eager": False}, "CUDA graphs"),
        ({"enable_prefix_caching": True}, "cached prefix"),
        ({"async_scheduling": True}, "next forward"),
        ({"enable_chunked_prefill": True}, "one forward"),
        ({"quantization": "fp8"}, "quantization"),
    ],
)
def test_arguments_that_would_hide_records_are_refused(arguments, message):
    """Each with its reason, before vLLM is imported."""
    with pytest.raises(InputError, match=message):
        load_engine(BUNDLED.model, BUNDLED.adapter, engine="vllm", vllm_arguments=arguments)


def test_options_of_one_engine_are_not_taken_by_the_other():
    """vLLM's arguments without vLLM, transformers' attention with it."""
    with pytest.raises(InputError, match="engine='vllm'"):
        load_engine(BUNDLED.model, BUNDLED.adapter, vllm_arguments={"seed": 1})
    with pytest.raises(InputError, match="eager is transformers'"):
        load_engine(BUNDLED.model, BUNDLED.adapter, engine="vllm", attention="eager")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("alpha_pattern", {"q_proj": 8}),
        ("rank_pattern", {"q_proj": 4}),
        ("init_lora_weights", "olora"),
    ],
)
def test_adapters_that_vllm_computes_differently_are_refused(vllm_cpu, tmp_path, setting, value):
    """vLLM would run another function than PEFT; a trace of it would mislead."""
    folder = tmp_path / "adapter"
    shutil.copytree(BUNDLED.adapter, folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {setting: value}))
    with pytest.raises(UnsupportedModelError, match=setting):
        load_engine(BUNDLED.model, str(folder), engine="vllm")


def test_paths_of_slices_and_ranks_are_read_back():
    """A record's key is all that a stored trace has of a site."""
    site = Site.from_path("model.layers.3.self_attn.qkv_proj[k_proj]@rank1")
    assert (site.layer, site.module, site.slice, site.parallel_rank) == (
        3,
        "self_attn.qkv_proj",
        "k_proj",
        1,
    )
    assert site.name == "layer 3 self_attn.qkv_proj[k_proj] (rank 1)"
    assert Site.from_path("model.layers.3.mlp.up_proj").slice is None
