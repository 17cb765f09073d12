"""fliptrace.assert_repeatable on vLLM's own LLM, as in a user's tests."""

from __future__ import annotations

import pytest

import fliptrace as ft
from fliptrace.errors import InputError

PROMPTS = ["Tom has 3 apples. How many?", "Eve has 40 eggs and eats 2."]


@pytest.fixture(scope="module")
def llm(bundled):
    """vLLM's LLM on the bundled model, three requests at once."""
    from vllm import LLM

    return LLM(
        model=bundled.model,
        enable_lora=True,
        max_lora_rank=16,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=3,
        kv_cache_memory_bytes=2**27,
    )


@pytest.fixture(scope="module")
def adapter(bundled):
    """Its adapter as vLLM takes it."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("bundled", 1, str(bundled.adapter))


class Forgetful:
    """An LLM that leaves the adapter out from its third call on."""

    def __init__(self, llm):
        self.llm, self.calls = llm, 0

    def get_default_sampling_params(self):
        return self.llm.get_default_sampling_params()

    def generate(self, prompts, parameters, *, lora_request, use_tqdm):
        self.calls += 1
        kept = lora_request if self.calls < 3 else None
        return self.llm.generate(prompts, parameters, lora_request=kept, use_tqdm=use_tqdm)


def test_what_vllm_sums_on_a_cpu_repeats(llm, adapter):
    """With the adapter and without; arguments of generate are passed on, a reduction is refused with the way out."""
    ft.assert_repeatable(llm, PROMPTS, runs=2, max_new_tokens=12, lora_request=adapter)
    ft.assert_repeatable(llm, PROMPTS[:1], runs=2, max_new_tokens=4)
    with pytest.raises(InputError, match="FLIPTRACE_SHRINK"):
        ft.assert_repeatable(llm, PROMPTS, reduction="deterministic:8")


def test_an_llm_that_changes_is_named_by_prompt_run_and_token(llm, adapter):
    """Two runs of it agree; the third is other tokens."""
    options = {"max_new_tokens": 12, "lora_request": adapter}
    ft.assert_repeatable(Forgetful(llm), PROMPTS, runs=2, **options)
    with pytest.raises(AssertionError, match=r"prompt \d is not repeatable: run 3 chose another"):
        ft.assert_repeatable(Forgetful(llm), PROMPTS, runs=3, **options)
