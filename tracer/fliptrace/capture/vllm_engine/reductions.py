"""How the shrinks of a vLLM engine sum: one of the kernels' reductions, or whatever vLLM itself runs."""

from __future__ import annotations

from typing import Any

import torch

from fliptrace.capture import reductions
from fliptrace.capture.vllm_engine.shrinks import ShrinkRuntime
from fliptrace_kernels import ArrivalSchedule, Reduction

#: The name of whatever shrink vLLM itself runs.
OWN_REDUCTION = "vllm-own"


def choose_reduction(
    name: str, seed: int | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Reduction | None, ArrivalSchedule | None]:
    """Read a reduction's name: None for vLLM's own, else as fliptrace.capture.reductions does."""
    if name == OWN_REDUCTION:
        return None, None
    return reductions.choose_reduction(name, seed, shape, dtype, device)


def describe_reduction(runtime: ShrinkRuntime, device: torch.device) -> dict[str, Any]:
    """Return the manifest's reduction section."""
    if runtime.reduction is not None:
        return reductions.describe_reduction(runtime.reduction, runtime.schedule)
    on_cuda = device.type == "cuda"
    return {
        "identity": OWN_REDUCTION,
        "description": "vLLM's own operator vllm::lora_shrink"
        if on_cuda
        else "vLLM's own shrink: an FP32 einsum of torch",
        "repeatable_by_construction": False,
        "schedule": "hardware" if on_cuda else "none",
        "seed": None,
    }
