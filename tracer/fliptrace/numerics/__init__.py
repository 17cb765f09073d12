"""Exact arithmetic on bits: digests, rounding boundaries, classes of differences. Pure functions on tensors."""

from __future__ import annotations

from fliptrace.numerics.classes import (
    CoordinateClass,
    SpecialDifference,
    classify,
    special_difference,
)
from fliptrace.numerics.digest import combine_digests, digest_hex, digest_rows, digest_tensor
from fliptrace.numerics.rounding import (
    BoundaryReport,
    boundary_report,
    float32_from_bits,
    integer_view,
    ordered_integers,
    round_to,
    ulp_distance,
)

__all__ = [
    "BoundaryReport",
    "CoordinateClass",
    "SpecialDifference",
    "boundary_report",
    "classify",
    "combine_digests",
    "digest_hex",
    "digest_rows",
    "digest_tensor",
    "float32_from_bits",
    "integer_view",
    "ordered_integers",
    "round_to",
    "special_difference",
    "ulp_distance",
]
