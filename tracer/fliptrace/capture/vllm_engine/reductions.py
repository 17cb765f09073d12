"""How the shrinks of a vLLM engine sum: one of the kernels' reductions, or whatever vLLM itself runs."""

from __future__ import annotations

from typing import Any

import torch

from fliptrace.capture.vllm_engine.shrinks import ShrinkRuntime
from fliptrace.errors import InputError
from fliptrace_kernels import (
    ArrivalSchedule,
    FliptraceKernelsError,
    Reduction,
    ReductionError,
    launch_configuration,
    parse_reduction,
)

#: The name of whatever shrink vLLM itself runs.
OWN_REDUCTION = "vllm-own"


def choose_reduction(
    name: str, seed: int | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Reduction | None, ArrivalSchedule | None]:
    """Read a reduction's name.

    Args:
        name: an identity such as ``atomic:8``, or ``vllm-own``.
        seed: arrival schedule of simulated atomics.
        shape: of a site's A, [R, K].
        dtype: of A.
        device: where shrinks run; off CUDA atomics are simulated.

    Returns:
        The reduction, None for vLLM's own, and its schedule, None where there is none.

    Raises:
        InputError: unknown, not available here, or with a seed too many or too few.
    """
    if name == OWN_REDUCTION:
        return None, None
    try:
        parsed = parse_reduction(name)
        launch_configuration((1, shape[1]), [shape], dtype, device, parsed)
    except (ReductionError, FliptraceKernelsError) as error:
        raise InputError(str(error)) from error
    if parsed.is_repeatable:
        return parsed, None
    if device.type == "cuda":
        if seed is not None:
            raise InputError(
                f"a schedule seed simulates arrival orders where there are no real ones; {parsed} on {device} uses the "
                "hardware's atomics, so leave the seed out"
            )
        return parsed, None
    if seed is None:
        raise InputError(f"{parsed} on {device} is simulated and needs a schedule seed")
    return parsed, ArrivalSchedule(seed)


def describe_reduction(runtime: ShrinkRuntime, device: torch.device) -> dict[str, Any]:
    """Return the manifest's reduction section."""
    reduction, schedule = runtime.reduction, runtime.schedule
    if reduction is None:
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
    hardware = "none" if reduction.is_repeatable else "hardware"
    return {
        "identity": str(reduction),
        "description": reduction.describe(),
        "repeatable_by_construction": reduction.is_repeatable,
        "schedule": hardware if schedule is None else schedule.describe(),
        "seed": None if schedule is None else schedule.seed,
    }
