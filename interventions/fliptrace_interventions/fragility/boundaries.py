"""How far FP32 shrink coordinates are from the rounding boundaries of the type that their consumer rounds to.

fliptrace.numerics describes one pair of values exactly; this is the same distance for whole tensors at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fliptrace.numerics import round_to
from fliptrace.numerics.rounding import SIXTEEN_BIT_TYPES

#: Distances are binned by powers of two of the FP32 ULP; the last bin holds all that are farther.
DISTANCE_BINS = 18


def boundary_distances(
    values: Tensor, dtype: torch.dtype, *, scale: Tensor | None = None
) -> Tensor:
    """Measure the distance of FP32 values to the nearest rounding boundary of a 16-bit type.

    Args:
        values: any shape, FP32.
        dtype: torch.bfloat16 or torch.float16; under torch.float32 there is no boundary.
        scale: FP32, same shape: in whose ULP distances are given; each value's own where None. A sum that cancels is
            small beside its summands, and errors are as large as theirs: see summand_scale.

    Returns:
        FP64, same shape, in FP32 ULP; 0 exactly on a boundary. Infinity where there is no boundary (an FP32 model,
        NaN, infinities) or the scale is zero.
    """
    none = torch.full_like(values, float("inf"), dtype=torch.float64)
    if dtype not in SIXTEEN_BIT_TYPES:
        return none
    rounded = round_to(values, dtype)
    exact = values.double()
    nearest = none
    for direction in (-float("inf"), float("inf")):
        neighbour = torch.nextafter(rounded, torch.full_like(rounded, direction))
        middle = (rounded.double() + neighbour.double()) / 2
        nearest = torch.minimum(nearest, (exact - middle).abs())
    sized = values if scale is None else scale
    _, exponent = torch.frexp(sized)
    ulp = torch.ldexp(torch.ones_like(exact), (exponent - 24).clamp(min=-149).double())
    usable = values.isfinite() & (sized != 0) & rounded.isfinite() & nearest.isfinite()
    return torch.where(usable, nearest / ulp, none)


def summand_scale(operand: Tensor, weight: Tensor) -> Tensor:
    """Return how large a shrink's partial sums typically are: the root of the sum of squared products.

    Args:
        operand: [T, K].
        weight: A, [R, K].

    Returns:
        FP32 [T, R].
    """
    return (operand.float().square() @ weight.float().square().T).sqrt()


def distance_bins(distances: Tensor) -> Tensor:
    """Return the bin of each distance: 0 for less than 1 ULP, b for 2^(b-1) up to 2^b, the last for all farther."""
    bins = torch.where(distances < 1, 0.0, torch.floor(torch.log2(distances.clamp(min=1))) + 1)
    return bins.clamp(max=DISTANCE_BINS - 1).long()
