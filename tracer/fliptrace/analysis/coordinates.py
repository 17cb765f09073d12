"""Turns differing rows into values for people: coordinates with bits, boundary and distance.

Boundaries of many coordinates are found in one pass of torch; fliptrace.numerics.boundary_report is the specification
against which that pass is tested, one pair at a time and some fifty times slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from fliptrace.analysis.evidence import ShrinkValues, StepEvidence
from fliptrace.numerics import (
    BoundaryReport,
    CoordinateClass,
    classify,
    integer_view,
    round_to,
    special_difference,
    ulp_distance,
)
from fliptrace.numerics.rounding import SIXTEEN_BIT_TYPES
from fliptrace.sites import Coordinate, Site
from fliptrace.trace import dtype_name
from fliptrace.verdicts import CoordinateDifference, Fate, Origin, RowDifference

#: How many coordinates a row shows; the rest is counted.
COORDINATES_PER_ROW = 64

_ORIGINS = (None, Origin.ROOT, Origin.INHERITED, Origin.CONFIGURATION_VARIANT, Origin.UNLOCATED)


@cache
def site_of(key: str) -> Site:
    """Return the site of a record's key."""
    return Site.from_path(key)


def row_difference(
    evidence: StepEvidence,
    order: int,
    row: int,
    dtype: torch.dtype,
    most: int = COORDINATES_PER_ROW,
) -> RowDifference:
    """Describe one differing row.

    Args:
        evidence: the step, its shrink values still there.
        order: the record's row in the step's matrices.
        row: the token row.
        dtype: the type that the consumer rounds to.
        most: how many coordinates to describe.
    """
    site = site_of(evidence.keys[order])
    position = evidence.first_position + row
    origin = _ORIGINS[int(evidence.origins[order, row])]
    return RowDifference(
        site=site,
        step=evidence.step,
        position=position,
        order=order,
        origin=origin or Origin.UNLOCATED,
        row_class=CoordinateClass(int(evidence.classes[order, row])),
        fate=fate_of(evidence, order, row),
        latent=int(evidence.latent[order, row]),
        surviving=int(evidence.surviving[order, row]),
        coordinates=_coordinates(evidence, order, row, site, dtype, most),
    )


def fate_of(evidence: StepEvidence, order: int, row: int) -> Fate:
    """Say what the projection's output row shows, whatever the row's class."""
    if not bool(evidence.projection.known[order, row]):
        return Fate.NOT_OBSERVED
    return Fate.PROPAGATING if bool(evidence.projection.differs[order, row]) else Fate.ABSORBED


def _coordinates(
    evidence: StepEvidence, order: int, row: int, site: Site, dtype: torch.dtype, most: int
) -> tuple[CoordinateDifference, ...]:
    for values in evidence.values:
        place = (values.sites == order).nonzero()
        if place.numel() and row >= values.offset:
            one, other = _row_values(values, int(place[0, 0]), row)
            classes = classify(one, other, dtype)
            indices = (classes == int(CoordinateClass.SURVIVING)).nonzero().squeeze(1)[:most]
            if indices.numel() == 0:
                indices = (classes > 0).nonzero().squeeze(1)[:1]
            places = [
                Coordinate(site, evidence.step, evidence.first_position + row, index)
                for index in indices.tolist()
            ]
            return coordinate_differences(places, one[indices], other[indices], dtype)
    return ()


def _row_values(values: ShrinkValues, place: int, row: int) -> tuple[Tensor, Tensor]:
    at = row - values.offset
    return values.reference[place, at], values.candidate[place, at]


def coordinate_differences(
    places: Sequence[Coordinate], reference: Tensor, candidate: Tensor, dtype: torch.dtype
) -> tuple[CoordinateDifference, ...]:
    """Describe differing coordinates.

    Args:
        places: where, one per value.
        reference: FP32 [N].
        candidate: FP32 [N], bits different from the reference's at every place.
        dtype: the type that the consumer rounds to.
    """
    classes = classify(reference, candidate, dtype).tolist()
    rounded = [round_to(values, dtype) for values in (reference, candidate)]
    distances = ulp_distance(reference, candidate).tolist()
    reports = boundary_reports(reference, candidate, dtype)
    bits = [_bits(values) for values in (reference, candidate, *rounded)]
    floats = [values.tolist() for values in (reference, candidate)]
    name = dtype_name(dtype)
    return tuple(
        CoordinateDifference(
            coordinate=place,
            reference=floats[0][at],
            candidate=floats[1][at],
            reference_bits=bits[0][at],
            candidate_bits=bits[1][at],
            coordinate_class=CoordinateClass(classes[at]),
            rounded_dtype=name,
            rounded_reference_bits=bits[2][at],
            rounded_candidate_bits=bits[3][at],
            distance_ulp=distances[at],
            boundary=reports[at],
            special=special_difference(floats[0][at], floats[1][at]),
        )
        for at, place in enumerate(places)
    )


def _bits(values: Tensor) -> list[str]:
    digits = values.element_size() * 2
    mask = (1 << (digits * 4)) - 1
    return [f"0x{value & mask:0{digits}x}" for value in integer_view(values).tolist()]


def boundary_reports(
    reference: Tensor, candidate: Tensor, dtype: torch.dtype
) -> list[BoundaryReport]:
    """Describe how pairs of FP32 values lie to rounding boundaries, as fliptrace.numerics.boundary_report does.

    Args:
        reference: FP32 [N].
        candidate: FP32 [N].
        dtype: torch.bfloat16, torch.float16 or torch.float32.
    """
    rounded = [round_to(values, dtype) for values in (reference, candidate)]
    shown = [values.to(torch.float64).tolist() for values in rounded]
    exact = [values.to(torch.float64) for values in (reference, candidate)]
    if dtype not in SIXTEEN_BIT_TYPES:
        return [
            BoundaryReport(one, other, None, 0, False, False, None, None)
            for one, other in zip(*shown, strict=True)
        ]
    numbers = ~(exact[0].isnan() | exact[1].isnan())
    crossed = ulp_distance(*rounded) * numbers
    nearest = [_nearest_boundaries(values, dtype) for values in exact]
    on_boundary = [(near == values).tolist() for near, values in zip(nearest, exact, strict=True)]
    between = _boundaries_between(rounded[0], rounded[1])
    boundary = torch.where(crossed > 0, between, nearest[0])
    finite = exact[0].isfinite() & exact[1].isfinite() & boundary.isfinite()
    distances = [(values - boundary).tolist() for values in exact]
    return [
        BoundaryReport(
            rounded_reference=shown[0][at],
            rounded_candidate=shown[1][at],
            boundary=place if known else None,
            boundaries_crossed=count,
            reference_on_boundary=on_boundary[0][at],
            candidate_on_boundary=on_boundary[1][at],
            reference_distance=distances[0][at] if known else None,
            candidate_distance=distances[1][at] if known else None,
        )
        for at, (place, known, count) in enumerate(
            zip(boundary.tolist(), finite.tolist(), crossed.tolist(), strict=True)
        )
    ]


def _towards(values: Tensor, upwards: Tensor) -> Tensor:
    """Return the neighbours of finite 16-bit values, float64; of the largest, where the next would lie."""
    direction = torch.where(upwards, torch.inf, -torch.inf).to(values.dtype)
    neighbours = torch.nextafter(values, direction).to(torch.float64)
    before = torch.nextafter(values, -direction).to(torch.float64)
    return torch.where(neighbours.isinf(), 2 * values.to(torch.float64) - before, neighbours)


def _nearest_boundaries(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the boundary nearest to each float64 value, NaN where there is none.

    Each value lies between the two midpoints around its rounded value. Twice the value against their sum decides which
    is nearer; both are exact in float64, which the distances themselves are not always.
    """
    largest = torch.finfo(dtype).max
    rounded = values.to(torch.float32).to(dtype).clamp(-largest, largest)
    as_double = rounded.to(torch.float64)
    lower, upper = (
        (as_double + _towards(rounded, torch.full_like(values, up, dtype=torch.bool))) / 2
        for up in (False, True)
    )
    twice, total = values * 2, lower + upper
    # Of two that are equally near, the one of larger magnitude; of equal magnitudes, the lower.
    take_upper = (twice > total) | ((twice == total) & (upper.abs() > lower.abs()))
    nearest = torch.where(take_upper, upper, lower)
    return torch.where(values.isfinite(), nearest, torch.nan)


def _boundaries_between(reference: Tensor, candidate: Tensor) -> Tensor:
    """Return the boundary next to each rounded reference on the candidate's side, NaN where there is none."""
    one, other = reference.to(torch.float64), candidate.to(torch.float64)
    # From infinity the first boundary is that of the largest value, on infinity's side.
    upwards = torch.where(one.isinf(), one > 0, other > one)
    largest = torch.finfo(reference.dtype).max
    within = reference.clamp(-largest, largest)
    midpoint = (within.to(torch.float64) + _towards(within, upwards)) / 2
    return torch.where(one != other, midpoint, torch.nan)
