"""Which reduction an engine's shrinks take, and how the manifest names it: the same for every engine."""

from __future__ import annotations

from typing import Any

import torch

from fliptrace.errors import InputError
from fliptrace_kernels import (
    ArrivalSchedule,
    FliptraceKernelsError,
    Reduction,
    launch_configuration,
    parse_reduction,
)


def choose_reduction(
    name: str,
    seed: int | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Reduction, ArrivalSchedule | None]:
    """Read a reduction's name, and see that it can run before a forward does.

    Args:
        name: an identity such as ``atomic:8``, short or long.
        seed: arrival schedule of simulated atomics.
        shape: of a site's A, [R, K].
        dtype: of A.
        device: where shrinks run; off CUDA atomics are simulated.

    Returns:
        The reduction and its schedule, None where nothing is simulated.

    Raises:
        InputError: unknown, not available here, or with a seed too many or too few.
    """
    try:
        parsed = parse_reduction(name)
    except FliptraceKernelsError as error:
        raise InputError(str(error)) from error
    check_launch(parsed, shape, dtype, device)
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


def check_launch(
    reduction: Reduction, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a reduction that cannot run on a model's A [R, K], before a forward does.

    Raises:
        InputError: its kernel takes no such dtype, or is not available here.
    """
    try:
        launch_configuration((1, shape[-1]), [shape], dtype, device, reduction)
    except FliptraceKernelsError as error:
        raise InputError(str(error)) from error


def describe_reduction(reduction: Reduction, schedule: ArrivalSchedule | None) -> dict[str, Any]:
    """Return the manifest's reduction section."""
    hardware = "none" if reduction.is_repeatable else "hardware"
    return {
        "identity": str(reduction),
        "description": reduction.describe(),
        "repeatable_by_construction": reduction.is_repeatable,
        "schedule": hardware if schedule is None else schedule.describe(),
        "seed": None if schedule is None else schedule.seed,
    }
