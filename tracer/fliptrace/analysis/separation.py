"""Tells what a shrink added to a difference from what it inherited, where operands were kept and the weights are given.

A shrink is linear: of two outputs z and z' with operands x and x', the part that the operands account for is
A·(x' - x). What is left of z' - z is the difference of the two rounding errors of summation: the shrink's own. Products
and sums are taken in FP64, whose own error is some 2^-29 of that of FP32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fliptrace.errors import InputError
from fliptrace.trace import Kind, Trace


@dataclass(frozen=True, eq=False)
class Separation:
    """One shrink's difference, candidate minus reference, in two parts.

    Attributes:
        inherited: what the operands account for, FP64 [T, R]; exactly 0 in rows with equal operands.
        added: the rest, FP64 [T, R]: what the two sums added by rounding in their own orders.
    """

    inherited: Tensor
    added: Tensor


def separate(
    reference: Trace, candidate: Trace, key: str, step: int, weight: Tensor, *, scale: float = 1.0
) -> Separation:
    """Separate one shrink's difference into inherited and added.

    Args:
        reference: a trace recorded with its operands (``--operands``).
        candidate: likewise.
        key: the site's path.
        step: which step.
        weight: the adapter's A at this site, in the dtype in which it ran, [R, K].
        scale: by what the engine multiplies before the shrink is recorded; 1 where it scales after it.

    Raises:
        InputError: the weight does not fit, or the records do not have one shape.
        SiteNotFoundError: shrink or operand were not recorded.
    """
    shrinks, operands = (
        [trace.record(key, kind, step).to(torch.float64) for trace in (reference, candidate)]
        for kind in (Kind.SHRINK, Kind.OPERAND_VALUES)
    )
    wanted = (shrinks[0].shape[-1], operands[0].shape[-1])
    if tuple(weight.shape) != wanted:
        raise InputError(
            f"the weight A of {key} must be [rank, inputs] = {list(wanted)} as recorded; got {list(weight.shape)}; "
            "pass lora_A's weight of this site, not transposed"
        )
    for name, pair in (("shrink", shrinks), ("operand", operands)):
        if pair[0].shape != pair[1].shape:
            raise InputError(
                f"the {name} records of {key} in step {step} must have one shape; got {list(pair[0].shape)} and "
                f"{list(pair[1].shape)}; only steps that are fed the same tokens can be separated"
            )
    inherited = scale * (operands[1] - operands[0]) @ weight.to(torch.float64).T
    return Separation(inherited, (shrinks[1] - shrinks[0]) - inherited)
