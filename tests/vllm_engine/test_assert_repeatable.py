"""fliptrace.assert_repeatable on vLLM's own LLM, as in a user's tests."""

from __future__ import annotations

import pytest

import fliptrace as ft
from fliptrace.errors import InputError

PROMPTS = ["Tom has 3 apples. How many?", "Eve has 40 eggs and eats 2."]


@pytest.fixture(scope="module")
def llm(make_llm):
    """Three requests at once, and vLLM's own settings else."""
    return make_llm(max_model_len=256, max_num_seqs=3)


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


def test_what_vllm_sums_on_a_cpu_repeats(llm, lora):
    """With the adapter and without; arguments of generate are passed on, a reduction is refused with the way out."""
    ft.assert_repeatable(llm, PROMPTS, runs=2, max_new_tokens=12, lora_request=lora)
    ft.assert_repeatable(llm, PROMPTS[:1], runs=2, max_new_tokens=4)
    with pytest.raises(InputError, match="FLIPTRACE_SHRINK"):
        ft.assert_repeatable(llm, PROMPTS, reduction="deterministic:8")


def test_an_llm_that_changes_is_named_by_prompt_run_and_token(llm, lora):
    """Two runs of it agree; the third is other tokens."""
    options = {"max_new_tokens": 12, "lora_request": lora}
    ft.assert_repeatable(Forgetful(llm), PROMPTS, runs=2, **options)
    with pytest.raises(AssertionError, match=r"prompt \d is not repeatable: run 3 chose another"):
        ft.assert_repeatable(Forgetful(llm), PROMPTS, runs=3, **options)
