"""LoRA shrink reductions: z = x Aᵀ in FP32, summed over K in an order that has a name.

`lora_shrink` runs the plain-torch specification on a CPU and Triton kernels on CUDA. Using this
package needs torch alone. Importing it does not even load that: a name is looked up when it is
first used, because vLLM imports the plugin inside this package in every process, wanted or not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fliptrace_kernels.arrival import ArrivalSchedule
    from fliptrace_kernels.dispatch import launch_configuration, lora_shrink, prepare
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
    "prepare",
]

_HOMES: Final = ("arrival", "dispatch", "errors", "reduction", "specification")
"""The modules that define the names above."""


def __getattr__(name: str) -> object:
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"{__name__}.{home}")
            found: object = getattr(module, name, None)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
