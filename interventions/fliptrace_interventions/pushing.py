"""Move one FP32 value to the nearest other one that rounds alike, or just across rounding boundaries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fliptrace.numerics import integer_view, ordered_integers, round_to, ulp_distance
from fliptrace.numerics.rounding import SIXTEEN_BIT_TYPES, nearest_boundary

_SIGN_BITS = {torch.float32: (torch.int32, 31), torch.bfloat16: (torch.int16, 15)}
_SIGN_BITS[torch.float16] = _SIGN_BITS[torch.bfloat16]


def latent_neighbour(value: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return another FP32 value with the same rounded bits.

    Args:
        value: FP32, one element.
        dtype: the type that the consumer rounds to.

    Returns:
        The next value above or else below, None where no other value lies in the same rounding interval: always so for
        torch.float32, which rounds nothing away.
    """
    for step in (1, -1):
        other = moved(value, step)
        if other is not None and torch.equal(
            integer_view(round_to(other, dtype)), integer_view(round_to(value, dtype))
        ):
            return other
    return None


def pushed_across(
    value: Tensor, ulp: int, dtype: torch.dtype, *, away: bool = False
) -> Tensor | None:
    """Return the FP32 value just beyond the boundary that lies ``ulp`` rounded values off.

    Args:
        value: FP32, one element.
        ulp: by how many 16-bit units in the last place the rounded value shall move, at least 1.
        dtype: torch.bfloat16 or torch.float16.
        away: push in the direction of the farther neighbouring boundary instead of the nearest.

    Returns:
        The value; None where there is none: NaN, infinities, a push that leaves the finite values or changes the sign,
        and FP32, which has no boundary.
    """
    boundary = nearest_boundary(float(value), dtype)
    if boundary is None or dtype not in SIXTEEN_BIT_TYPES:
        return None
    rounded = round_to(value, dtype)
    number = float(value)
    upwards = boundary > number or (boundary == number and float(rounded) < boundary)
    direction = 1 if upwards != away else -1
    last, target = moved(rounded, direction * (ulp - 1)), moved(rounded, direction * ulp)
    if last is None or target is None or not math.isfinite(float(target)):
        return None
    if math.copysign(1.0, float(target)) != math.copysign(1.0, float(rounded)):
        return None
    midpoint = torch.tensor((float(last) + float(target)) / 2, dtype=torch.float32)
    for candidate in (midpoint, torch.nextafter(midpoint, torch.tensor(math.inf * direction))):
        if torch.equal(integer_view(round_to(candidate, dtype)), integer_view(target)):
            return candidate
    return None


def moved(value: Tensor, steps: int) -> Tensor | None:
    """Return the value of the same dtype a number of representable values further up, None beyond the last one.

    Args:
        value: FP32, BF16 or FP16, one element.
        steps: negative to go down; the two zeros are one step apart.
    """
    integer, sign_bit = _SIGN_BITS[value.dtype]
    ordered = int(ordered_integers(value)) + steps
    limit = 1 << sign_bit
    if not -limit <= ordered < limit:
        return None
    bits = ordered if ordered >= 0 else -(ordered + 1) - limit
    return torch.tensor(bits, dtype=integer).view(value.dtype)


def rounded_distance(before: Tensor, after: Tensor, dtype: torch.dtype) -> Tensor:
    """Count the ULP of a 16-bit type between the rounded values, element by element; int64."""
    return ulp_distance(round_to(before, dtype), round_to(after, dtype))
