"""LoRA shrink reductions: z = x Aᵀ in FP32, summed over K in an order that has a name.

`lora_shrink` runs the plain-torch specification on a CPU and Triton kernels on CUDA. Importing
this package needs torch alone.
"""

from __future__ import annotations

from fliptrace_kernels.arrival import ArrivalSchedule
from fliptrace_kernels.dispatch import launch_configuration, lora_shrink
from fliptrace_kernels.errors import (
    FliptraceKernelsError,
    LaunchError,
    ReductionError,
    ShrinkInputError,
)
from fliptrace_kernels.reduction import Reduction, parse_reduction
from fliptrace_kernels.specification import partials

__all__ = [
    "ArrivalSchedule",
    "FliptraceKernelsError",
    "LaunchError",
    "Reduction",
    "ReductionError",
    "ShrinkInputError",
    "launch_configuration",
    "lora_shrink",
    "parse_reduction",
    "partials",
]
