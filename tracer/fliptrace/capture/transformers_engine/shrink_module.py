"""The module that takes the place of PEFT's ``lora_A``: the shrink in FP32, and after it the rounding, apart.

PEFT computes x·Aᵀ in one 16-bit linear, so the FP32 sum never exists where a hook could see it. Here ``Shrink``
returns the FP32 sum under a chosen reduction and ``RoundForExpand`` rounds it to the dtype of B: the boundary that a
difference must survive is between two modules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fliptrace.capture.engine import ConsumptionAudit, Observer, ShrinkInterceptor
from fliptrace.capture.interception import checked_replacement
from fliptrace_kernels import (
    ArrivalSchedule,
    Reduction,
    launch_configuration,
    lora_shrink,
)


@dataclass
class ShrinkRuntime:
    """What all shrinks of one engine share, changed between steps only.

    Attributes:
        reduction: how they sum.
        schedule: the arrival schedule of simulated atomics, else None.
        step: the number of the forward that runs.
        site_count: how many sites there are; with the step it numbers every call of an execution.
        interceptor: gets every shrink before expand does, else None.
        observer: is told of every shrink, after the interceptor, else None. A call and no forward hook: 210 hooks a
            token cost more than what they record.
        audit: is told of every shrink by its consumer, else None.
        launches: descriptions of launches by everything that shapes them.
    """

    reduction: Reduction
    schedule: ArrivalSchedule | None = None
    step: int = 0
    site_count: int = 0
    interceptor: ShrinkInterceptor | None = None
    observer: Observer | None = None
    audit: ConsumptionAudit | None = None
    launches: dict[Any, str] = field(default_factory=dict)


class Shrink(nn.Module):
    """z = x·Aᵀ, FP32 [T, R], under the engine's reduction."""

    def __init__(self, weight: nn.Parameter, index: int, runtime: ShrinkRuntime) -> None:
        """Take A [R, K] from PEFT; ``index`` is the site's number."""
        super().__init__()
        self.weight = weight
        self.index = index
        self.runtime = runtime
        self._last_launch: tuple[torch.Size, tuple[int, ...], Reduction, str] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Sum x [1, T, K] over K. Batch 1 is the engine's promise, so rows are tokens."""
        runtime = self.runtime
        rows = x.reshape(-1, x.shape[-1])
        z = lora_shrink(
            rows,
            (self.weight,),
            reduction=runtime.reduction,
            schedule=runtime.schedule,
            call_key=runtime.step * runtime.site_count + self.index,
        )[0]
        if runtime.interceptor is not None:
            z = checked_replacement(runtime.interceptor(self.index, rows, z), self.index, z)
        if runtime.observer is not None:
            runtime.observer.shrink(self.index, x, z, self._launch_of(rows))
        return z

    def _launch_of(self, rows: Tensor) -> str:
        """Describe the launch for an operand [T, K] in one line: what really runs, and the operand's strides."""
        strides = rows.stride()
        shape = rows.shape
        last = self._last_launch
        if (
            last is not None
            and last[0] == shape
            and last[1] == strides
            and last[2] is self.runtime.reduction
        ):
            return last[3]
        reduction = self.runtime.reduction
        key = (reduction, shape, strides, self.weight.shape, rows.dtype, rows.device)
        text = self.runtime.launches.get(key)
        if text is None:
            configuration = launch_configuration(
                tuple(shape), [tuple(self.weight.shape)], rows.dtype, rows.device, reduction
            )
            words = [f"{name}={value}" for name, value in configuration.items()]
            text = " ".join([*words, f"operand_strides={tuple(strides)}"])
            self.runtime.launches[key] = text
        self._last_launch = (shape, strides, reduction, text)
        return text


class RoundForExpand(nn.Module):
    """Round a shrink to the dtype of B, to nearest, ties to even: the boundary."""

    def __init__(self, dtype: torch.dtype, shrink: Shrink) -> None:
        """``dtype`` is that of B; ``shrink`` knows the site's number and what the engine's shrinks share."""
        super().__init__()
        self.dtype = dtype
        self._of = (shrink,)  # in a tuple: the module belongs to ShrinkThenRound

    def forward(self, z: Tensor) -> Tensor:
        """Round z [T, R] and restore the batch dimension that PEFT's expand expects: [1, T, R]."""
        (shrink,) = self._of
        if shrink.runtime.audit is not None:
            shrink.runtime.audit.shrink_consumed(shrink.index, z)
        return z.to(self.dtype).unsqueeze(0)


class ShrinkThenRound(nn.Module):
    """Stands where ``lora_A[adapter]`` stood; PEFT reads its weight's dtype and calls it."""

    def __init__(self, weight: nn.Parameter, index: int, runtime: ShrinkRuntime) -> None:
        """See Shrink."""
        super().__init__()
        self.shrink = Shrink(weight, index, runtime)
        self.round = RoundForExpand(weight.dtype, self.shrink)

    @property
    def weight(self) -> nn.Parameter:
        """A, [R, K]."""
        return self.shrink.weight

    def forward(self, x: Tensor) -> Tensor:
        """Shrink, then round."""
        rounded: Tensor = self.round(self.shrink(x))
        return rounded
