"""Where FP32 values fall between neighbouring 16-bit values, and when a difference survives the rounding.

A shrink leaves FP32 values; the next operation rounds each to the model's 16-bit type, to nearest, ties to even. Two
FP32 values that differ by one unit in the last place nearly always round to the same 16-bit value. They do not when a
rounding boundary, the midpoint of two neighbouring 16-bit values, lies between them or exactly on one of them. Worked
example from the paper: 0.010345458984375 lies exactly on a BF16 boundary and rounds (ties to even) to 0.0103759765625;
0.010345457121729851 lies 1.9e-9 below it and rounds to 0.01031494140625.

Everything here works on integer views of the bits. Nothing compares floats with ``==``: that would merge +0 with -0 and
split NaN from itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

_INTEGER_TYPES = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float64: torch.int64,
}

SIXTEEN_BIT_TYPES = (torch.bfloat16, torch.float16)


def integer_view(values: Tensor) -> Tensor:
    """View the bits of a floating-point tensor as signed integers of the same width, without a copy.

    Args:
        values: any shape, FP32, BF16, FP16 or FP64; integer tensors come back as they are.

    Returns:
        The same storage as int32, int16 or int64.
    """
    target = _INTEGER_TYPES.get(values.dtype)
    return values if target is None else values.view(target)


def ordered_integers(values: Tensor) -> Tensor:
    """Map floating-point values to int64 so that neighbouring values are neighbouring integers.

    -0 maps to -1 and +0 to 0, so that the sign of zero counts as one step and is never lost. NaNs map beyond the
    infinities by their payload.

    Args:
        values: any shape, FP32, BF16 or FP16.

    Returns:
        int64, same shape.
    """
    bits = integer_view(values).to(torch.int64)
    largest = (1 << (values.element_size() * 8 - 1)) - 1
    return torch.where(bits >= 0, bits, -(bits & largest) - 1)


def ulp_distance(reference: Tensor, candidate: Tensor) -> Tensor:
    """Count the representable values between two tensors, element by element (units in the last place).

    Args:
        reference: any shape, FP32, BF16 or FP16.
        candidate: same shape and dtype.

    Returns:
        int64 distances, same shape; 1 between neighbours, 1 between +0 and -0.
    """
    return (ordered_integers(reference) - ordered_integers(candidate)).abs()


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round FP32 values to a 16-bit type, to nearest, ties to even: what the consumer of a shrink does.

    Args:
        values: any shape, FP32.
        dtype: torch.bfloat16, torch.float16, or torch.float32 (returned unchanged: an FP32 model has no boundary).

    Returns:
        The rounded values, same shape, in ``dtype``.
    """
    return values.to(dtype)


def float32_from_bits(bits: int) -> float:
    """Return the FP32 value with the given 32-bit pattern (0 .. 2**32 - 1) as a Python float."""
    signed = bits - (1 << 32) if bits >= (1 << 31) else bits
    return float(torch.tensor(signed, dtype=torch.int32).view(torch.float32))


@dataclass(frozen=True, slots=True)
class BoundaryReport:
    """How two FP32 values lie to the rounding boundaries of a 16-bit type.

    Attributes:
        rounded_reference: the reference after rounding.
        rounded_candidate: the candidate after rounding.
        boundary: the boundary between the two rounded values that is nearest to the reference, or, when both round
            alike, the boundary nearest to the reference; None where there is none (NaN, infinity, an FP32 model).
        boundaries_crossed: how many boundaries lie between the two values: the distance of the rounded values in ULP
            of the 16-bit type; 0 where one is NaN.
        reference_on_boundary: the reference lies exactly on a boundary (a tie, rounded to even).
        candidate_on_boundary: likewise for the candidate.
        reference_distance: reference - boundary, rounded once to float64 (exact unless the two differ by a factor of
            2**29 or more); None without a boundary.
        candidate_distance: candidate - boundary.
    """

    rounded_reference: float
    rounded_candidate: float
    boundary: float | None
    boundaries_crossed: int
    reference_on_boundary: bool
    candidate_on_boundary: bool
    reference_distance: float | None
    candidate_distance: float | None


def nearest_boundary(value: float, dtype: torch.dtype) -> float | None:
    """Return the rounding boundary of a 16-bit type that is nearest to an FP32 value.

    Args:
        value: an FP32 value.
        dtype: torch.bfloat16 or torch.float16.

    Returns:
        The midpoint of two neighbouring 16-bit values, exact in float64; of two that are equally near, the one of
        larger magnitude. Beyond the largest value it is the one at which rounding overflows. None for NaN, infinities,
        and FP32.
    """
    if dtype not in SIXTEEN_BIT_TYPES or not math.isfinite(value):
        return None
    largest = torch.finfo(dtype).max
    rounded = torch.tensor(value, dtype=torch.float32).to(dtype).clamp(-largest, largest)
    midpoints = [_midpoint(rounded, direction) for direction in (-math.inf, math.inf)]
    return min(
        midpoints, key=lambda midpoint: (abs(Fraction(midpoint) - Fraction(value)), -abs(midpoint))
    )


def boundary_report(reference: float, candidate: float, dtype: torch.dtype) -> BoundaryReport:
    """Describe how two FP32 values lie to the rounding boundaries of the type that their consumer rounds to.

    Args:
        reference: FP32 value of the reference execution.
        candidate: FP32 value of the candidate execution.
        dtype: torch.bfloat16, torch.float16 or torch.float32.

    Returns:
        The report; for FP32 both values stand as they are and there is no boundary.

    Source:
        The paper, section 6.2, generalised to any number of crossed boundaries.
    """
    pair = torch.tensor([reference, candidate], dtype=torch.float32)
    rounded = round_to(pair, dtype)
    has_boundary = dtype in SIXTEEN_BIT_TYPES
    is_number = not (math.isnan(reference) or math.isnan(candidate))
    crossed = int(ulp_distance(rounded[:1], rounded[1:])[0]) if has_boundary and is_number else 0
    on_boundary = []
    for value in (reference, candidate):
        near = nearest_boundary(value, dtype)
        on_boundary.append(near is not None and near == value)
    boundary = nearest_boundary(reference, dtype)
    if crossed and math.isfinite(reference) and math.isfinite(candidate):
        boundary = _boundary_towards(float(rounded[0]), float(rounded[1]), dtype)
    if not (math.isfinite(reference) and math.isfinite(candidate)):
        boundary = None
    return BoundaryReport(
        rounded_reference=float(rounded[0]),
        rounded_candidate=float(rounded[1]),
        boundary=boundary,
        boundaries_crossed=crossed,
        reference_on_boundary=on_boundary[0],
        candidate_on_boundary=on_boundary[1],
        reference_distance=None if boundary is None else reference - boundary,
        candidate_distance=None if boundary is None else candidate - boundary,
    )


def _boundary_towards(
    rounded_reference: float, rounded_candidate: float, dtype: torch.dtype
) -> float | None:
    """Return the boundary between the rounded reference and its neighbour on the candidate's side."""
    if rounded_reference == rounded_candidate:  # +0 and -0: no midpoint between them
        return None
    if math.isinf(rounded_reference):  # the finite values begin where the largest one rounds up
        return _midpoint(
            torch.tensor(math.copysign(torch.finfo(dtype).max, rounded_reference), dtype=dtype),
            rounded_reference,
        )
    direction = math.inf if rounded_candidate > rounded_reference else -math.inf
    return _midpoint(torch.tensor(rounded_reference, dtype=dtype), direction)


def _midpoint(value: torch.Tensor, direction: float) -> float:
    """Return the middle between a finite 16-bit value and its neighbour in a direction, exact in float64.

    The largest value's neighbour is where the next one would lie without infinity: rounding overflows at that middle.
    """
    neighbour = float(torch.nextafter(value, torch.tensor(direction, dtype=value.dtype)))
    if math.isinf(neighbour):
        before = float(torch.nextafter(value, torch.tensor(-direction, dtype=value.dtype)))
        neighbour = 2 * float(value) - before
    return (float(value) + neighbour) / 2
