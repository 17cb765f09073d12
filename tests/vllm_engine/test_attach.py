"""Attaching to an LLM that somebody already has."""

from __future__ import annotations

import pytest
import torch

import fliptrace as ft
from fliptrace.errors import InputError, RecordingError


def answer(llm, lora, ids):
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate(
        {"prompt_token_ids": list(ids)}, parameters, lora_request=lora, use_tqdm=False
    )
    return list(output.outputs[0].token_ids)


def test_a_pair_is_traced_and_the_llm_is_as_before(llm, lora, bundled, tmp_path):
    """Inside, trace_pair runs on it; outside, nothing of it is left and the same tokens come."""
    before = answer(llm, lora, (5, 6, 7, 8))
    with ft.attach(llm, lora) as tracer:
        wrapper = tracer._wrapper
        with ft.trace_pair(
            tracer,
            prompt=bundled.prompts[1].text,
            reduction="vllm-own",
            attempts=1,
            max_new_tokens=4,
            directory=tmp_path / "pair",
        ) as pair:
            assert str(pair.diff.outcome) == "identical"
            manifest = pair.reference.manifest
            assert manifest.get("reduction.identity") == "vllm-own"
            assert (
                "vllm sgmv_shrink"
                in pair.reference.frame(0, ft.Kind.SHRINK).layout.entries[0].launch
            )
            assert manifest.get("adapter.sha256")
            assert manifest.get("engine.name") == "vllm"
    assert not {"add_shrink", "add_expand"} & set(vars(wrapper))
    model = tracer.host.runner.model
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in vars(layer.module.impl) for layer in tracer.paged)
    assert answer(llm, lora, (5, 6, 7, 8)) == before
    with pytest.raises(RecordingError):
        tracer.step()


def test_the_folder_of_an_adapter_is_enough(llm, bundled):
    """vLLM loads it under a number of ours; a path may be given as text."""
    with ft.attach(llm, bundled.adapter, reduction="unsplit") as tracer:
        tracer.start((5, 6, 7))
        assert torch.isfinite(tracer.step()).all()


def test_another_request_voids_the_recording(llm, lora):
    """A forward over two requests is not the one that was to be recorded; waiting requests are told before."""
    from vllm import SamplingParams

    with ft.attach(llm, lora) as tracer:
        tracer.start((5, 6, 7, 8))
        other = llm.llm_engine.add_request(
            "other", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=2)
        )
        try:
            with pytest.raises(RecordingError, match=r"3 of others in step 0"):
                tracer.step()
            with pytest.raises(RecordingError, match="1 other requests"):
                tracer.start((5, 6, 7))
        finally:
            llm.llm_engine.abort_request([other], internal=True)
        tracer.start((5, 6, 7))
        tracer.step()


def test_what_cannot_be_attached_to_is_refused(llm, lora):
    """Something that is no LLM, something that is no adapter, a reduction that is none."""
    with (
        pytest.raises(InputError, match=r"vllm\.LLM is required; got object"),
        ft.attach(object(), lora),
    ):
        pass
    with pytest.raises(InputError, match="got int"), ft.attach(llm, 7):
        pass
    with pytest.raises(InputError, match="reduction"), ft.attach(llm, lora, reduction="nonsense"):
        pass
    with ft.attach(llm, lora) as tracer:
        tracer.start((5, 6))
        tracer.step()
