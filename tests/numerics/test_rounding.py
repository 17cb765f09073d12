"""Rounding, boundaries and classes against specifications in plain integers and fractions."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from fliptrace.numerics import (
    CoordinateClass,
    SpecialDifference,
    boundary_report,
    classify,
    float32_from_bits,
    integer_view,
    ordered_integers,
    round_to,
    special_difference,
    ulp_distance,
)
from fliptrace.numerics.rounding import nearest_boundary

BITS = st.integers(0, 2**32 - 1)
#: mantissa bits, smallest exponent of a normal value, largest exponent
FORMATS = {torch.bfloat16: (7, -126, 127), torch.float16: (10, -14, 15)}
SIXTEEN = pytest.mark.parametrize("dtype", list(FORMATS))


def value_of(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def bits_of(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


def from_bits(*bits):
    signed = [one - (1 << 32) if one >= 1 << 31 else one for one in bits]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def sixteen_bits(values):
    return [one & 0xFFFF for one in values.view(torch.int16).tolist()]


def value_of_sixteen(bits, dtype):
    """The exact value of a 16-bit pattern as a fraction; None for infinities and NaN."""
    mantissa_bits, lowest, highest = FORMATS[dtype]
    magnitude = bits & 0x7FFF
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    if exponent == (1 << (15 - mantissa_bits)) - 1:
        return None
    scale = Fraction(2) ** (max(exponent, 1) - 1 + lowest - mantissa_bits)
    value = scale * (mantissa + ((1 << mantissa_bits) if exponent else 0))
    assert value < Fraction(2) ** (highest + 1)
    return -value if bits >> 15 else value


def specified_rounding(bits, dtype):
    """Round to nearest, ties to even, on integers alone: the 16-bit pattern, None for NaN."""
    mantissa_bits, lowest, _ = FORMATS[dtype]
    sign, exponent, mantissa = bits >> 31, bits >> 23 & 0xFF, bits & 0x7FFFFF
    infinity = ((1 << (15 - mantissa_bits)) - 1) << mantissa_bits
    if exponent == 0xFF:
        return None if mantissa else sign << 15 | infinity
    significand = mantissa | (1 << 23 if exponent else 0)
    power = max(exponent, 1) - 127 - 23  # value = significand * 2**power
    # The unit of the result's last place: fixed below the smallest normal exponent.
    top = power + significand.bit_length() - 1 if significand else lowest
    unit = max(top, lowest) - mantissa_bits
    shift = unit - power
    if shift <= 0:
        quotient = significand << -shift
    else:
        quotient, rest = divmod(significand, 1 << shift)
        half = 1 << (shift - 1)
        quotient += rest > half or (rest == half and quotient & 1)
    # A carry out of the mantissa moves into the exponent by itself.
    biased = max(top, lowest) - lowest
    pattern = (biased << mantissa_bits) + quotient
    return sign << 15 | min(pattern, infinity)


@SIXTEEN
@settings(max_examples=400)
@given(bits=BITS)
@example(bits=0)
@example(bits=0x80000000)
@example(bits=1)
@example(bits=0x007FFFFF)
@example(bits=0x00800000)
@example(bits=0x7F7FFFFF)
@example(bits=0x7F800000)
@example(bits=0x7F800001)
@example(bits=0xFFC12345)
@example(bits=0x477FEFFF)
@example(bits=0x477FF000)
@example(bits=0x33000000)
@example(bits=0x33000001)
@example(bits=0x7F7F7FFF)
@example(bits=0x7F7F8000)
def test_rounding_is_to_nearest_ties_to_even(dtype, bits):
    """Normal, subnormal, overflow to infinity, infinities and NaN."""
    (found,) = sixteen_bits(round_to(from_bits(bits), dtype))
    expected = specified_rounding(bits, dtype)
    if expected is None:
        assert bool(torch.isnan(round_to(from_bits(bits), dtype)))
    else:
        assert found == expected


@SIXTEEN
@settings(max_examples=300)
@given(upper=st.integers(0, 2**16 - 1), offset=st.integers(-2, 2))
def test_rounding_at_ties(dtype, upper, offset):
    """Exactly halfway between two 16-bit values, and up to two FP32 ULP beside it."""
    value = value_of_sixteen(upper, dtype)
    above = value_of_sixteen(upper + 1, dtype) if (upper & 0x7FFF) < 0x7FFF else None
    assume(value is not None and above is not None)
    midpoint = float((value + above) / 2)
    bits = bits_of(midpoint)
    assume(value_of(bits) == midpoint)
    bits = (bits + offset) % 2**32
    expected = specified_rounding(bits, dtype)
    assume(expected is not None)
    assert sixteen_bits(round_to(from_bits(bits), dtype)) == [expected]


def test_a_float32_model_rounds_nothing():
    """Its boundary does not exist."""
    values = from_bits(0x3F800001, 0x7F800001, 0x80000000)
    assert torch.equal(integer_view(round_to(values, torch.float32)), integer_view(values))


def test_the_example_of_the_paper():
    """Section 6.2: a tie rounds up to even, its neighbour 1.9e-9 below rounds down."""
    report = boundary_report(0.010345458984375, 0.010345457121729851, torch.bfloat16)
    assert report.rounded_reference == 0.0103759765625
    assert report.rounded_candidate == 0.01031494140625
    assert report.boundary == 0.010345458984375
    assert report.boundaries_crossed == 1
    assert report.reference_on_boundary
    assert not report.candidate_on_boundary
    assert report.reference_distance == 0
    assert report.candidate_distance == pytest.approx(-1.862645149230957e-09)
    mirrored = boundary_report(0.010345457121729851, 0.010345458984375, torch.bfloat16)
    assert mirrored.boundary == report.boundary
    assert mirrored.candidate_on_boundary
    assert not mirrored.reference_on_boundary


def test_an_example_with_a_value_on_each_side():
    """Neither value is a tie, and the boundary between them is 1 + 2**-8."""
    below, above = value_of(0x3F807FFF), value_of(0x3F808001)
    report = boundary_report(below, above, torch.bfloat16)
    assert (report.rounded_reference, report.rounded_candidate) == (1.0, 1.0078125)
    assert report.boundary == 1 + 2**-8
    assert report.reference_distance == -(2**-23)
    assert report.candidate_distance == 2**-23
    assert not report.reference_on_boundary
    assert not report.candidate_on_boundary


def exact_boundaries(bits, dtype):
    """The midpoints next to a 16-bit pattern as fractions: towards zero and away from it.

    Where infinity comes next, the other is the value that would: rounding overflows in the middle (IEEE 754, 4.3.1).
    """
    beyond = Fraction(2) ** (FORMATS[dtype][2] + 1)
    here = value_of_sixteen(bits, dtype)
    magnitude, sign = bits & 0x7FFF, bits & 0x8000
    found = []
    for neighbour in (magnitude - 1, magnitude + 1):
        if neighbour < 0:
            other = value_of_sixteen((sign ^ 0x8000) | 1, dtype)
        else:
            other = value_of_sixteen(sign | neighbour, dtype)
        if other is None:
            other = -beyond if sign else beyond
        found.append((here + other) / 2)
    return found


@SIXTEEN
@settings(max_examples=300)
@given(bits=BITS)
@example(bits=0)
@example(bits=0x80000000)
@example(bits=1)
@example(bits=0x00008000)
@example(bits=0x33000000)
def test_nearest_boundary_is_exact(dtype, bits):
    """Over all midpoints around the value, none is nearer; checked in fractions."""
    value = value_of(bits)
    rounded = specified_rounding(bits, dtype)
    found = nearest_boundary(value, dtype)
    if not math.isfinite(value):
        assert found is None
        return
    exact = Fraction(value)
    if value_of_sixteen(rounded, dtype) is None:  # its boundaries are those of the largest value
        rounded -= 1
    candidates = exact_boundaries(rounded, dtype)
    nearest = min(abs(exact - one) for one in candidates)
    assert found is not None
    assert Fraction(found) in candidates
    assert abs(exact - Fraction(found)) == nearest


@SIXTEEN
@settings(max_examples=400)
@given(bits=BITS, distance=st.one_of(st.integers(-3, 3), st.integers(-(2**18), 2**18)))
def test_reports_are_exact(dtype, bits, distance):
    """Rounded values, crossings, ties and distances against integers and fractions."""
    other = (bits + distance) % 2**32
    values = value_of(bits), value_of(other)
    assume(all(math.isfinite(value) for value in values))
    report = boundary_report(*values, dtype)
    patterns = [specified_rounding(one, dtype) for one in (bits, other)]
    exact = [value_of_sixteen(one, dtype) for one in patterns]
    for rounded, expected in zip(
        (report.rounded_reference, report.rounded_candidate), exact, strict=True
    ):
        assert math.isinf(rounded) if expected is None else Fraction(rounded) == expected
    order = [-(one & 0x7FFF) - 1 if one >> 15 else one for one in patterns]
    assert report.boundaries_crossed == abs(order[0] - order[1])
    if report.boundary is not None:
        assert report.reference_distance == float(Fraction(values[0]) - Fraction(report.boundary))
        assert report.candidate_distance == float(Fraction(values[1]) - Fraction(report.boundary))
        if report.boundaries_crossed and None not in exact and exact[0] != exact[1]:
            low, high = sorted(map(Fraction, values))
            assert low <= Fraction(report.boundary) <= high
            assert Fraction(report.boundary) in exact_boundaries(patterns[0], dtype)
    for on_boundary, value, pattern, rounded in zip(
        (report.reference_on_boundary, report.candidate_on_boundary),
        values,
        patterns,
        exact,
        strict=True,
    ):
        if rounded is not None:
            assert on_boundary == (Fraction(value) in exact_boundaries(pattern, dtype))


def test_reports_without_a_boundary():
    """NaN, infinities, zeros of both signs and FP32 models have none."""
    for reference, candidate in ((math.nan, 1.0), (1.0, math.inf), (-math.inf, math.inf)):
        report = boundary_report(reference, candidate, torch.bfloat16)
        assert report.boundary is None
        assert report.reference_distance is None
    zeros = boundary_report(0.0, -0.0, torch.bfloat16)
    assert zeros.boundaries_crossed == 1
    assert zeros.boundary is None
    full = boundary_report(1.0, 1.5, torch.float32)
    assert (full.boundary, full.boundaries_crossed) == (None, 0)
    assert (full.rounded_reference, full.rounded_candidate) == (1.0, 1.5)


@pytest.mark.parametrize(
    ("reference", "candidate", "crossed", "on_boundary"),
    [
        (65519.0, 65521.0, 1, (False, False)),
        (65521.0, 65519.0, 1, (False, False)),
        (65519.0, 65520.0, 1, (False, True)),
        (65519.0, 65519.5, 0, (False, False)),
        (65521.0, 70000.0, 0, (False, False)),
        (70000.0, 65472.0, 2, (False, False)),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_overflow_has_a_boundary(reference, candidate, crossed, on_boundary, sign):
    """Beyond the largest FP16 value 65504 rounding goes to infinity from 65520 on."""
    report = boundary_report(sign * reference, sign * candidate, torch.float16)
    assert report.boundary == sign * 65520.0
    assert report.boundaries_crossed == crossed
    assert (report.reference_on_boundary, report.candidate_on_boundary) == on_boundary
    assert report.reference_distance == sign * (reference - 65520.0)


def test_no_number_of_boundaries_lies_beside_nan():
    """NaN is nowhere on the number line."""
    assert boundary_report(math.nan, 1.0, torch.bfloat16).boundaries_crossed == 0


@settings(max_examples=200)
@given(first=BITS, second=BITS, dtype=st.sampled_from([*FORMATS, torch.float32]))
def test_classes_do_not_depend_on_direction(first, second, dtype):
    """Reference and candidate may be exchanged, and a value is equal to itself only by its bits."""
    one, other = from_bits(first), from_bits(second)
    forth, back = classify(one, other, dtype), classify(other, one, dtype)
    assert torch.equal(forth, back)
    assert (int(forth) == CoordinateClass.EQUAL) == (first == second)
    assert int(classify(one, one, dtype)) == CoordinateClass.EQUAL
    if first != second and dtype in FORMATS:
        patterns = [specified_rounding(bits, dtype) for bits in (first, second)]
        if None not in patterns:
            expected = (
                CoordinateClass.LATENT if patterns[0] == patterns[1] else CoordinateClass.SURVIVING
            )
            assert int(forth) == expected


def test_classes_of_special_values():
    """Zeros of both signs survive, since their 16-bit patterns differ; NaN equals itself by its bits."""
    zeros = classify(torch.tensor([0.0]), torch.tensor([-0.0]), torch.bfloat16)
    assert zeros.tolist() == [CoordinateClass.SURVIVING]
    nan = from_bits(0x7FC00000)
    assert classify(nan, nan, torch.bfloat16).tolist() == [CoordinateClass.EQUAL]
    rounded = torch.tensor([1.0], dtype=torch.bfloat16)
    assert classify(rounded, rounded + 0.01, torch.bfloat16).tolist() == [CoordinateClass.SURVIVING]
    assert classify(torch.tensor([1.0]), from_bits(0x3F800001), torch.float32).tolist() == [
        CoordinateClass.SURVIVING
    ]
    assert special_difference(0.0, -0.0) is SpecialDifference.SIGN_OF_ZERO
    assert special_difference(math.nan, math.nan) is SpecialDifference.NAN_PAYLOAD
    assert special_difference(0.0, 1.0) is None
    assert special_difference(math.nan, 1.0) is None


def test_classes_need_one_shape_and_dtype():
    """Anything else is structural, and the caller's to report."""
    with pytest.raises(ValueError, match="one shape and dtype"):
        classify(torch.zeros(2), torch.zeros(3), torch.bfloat16)
    with pytest.raises(ValueError, match="one shape and dtype"):
        classify(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ordered_integers_are_monotone(dtype):
    """All 65,536 patterns: larger values are larger integers, neighbours neighbours, each pattern its own."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    keys = ordered_integers(patterns)
    assert len(set(keys.tolist())) == 2**16
    ordered = patterns[keys.argsort()].float()
    numbers = ordered[~ordered.isnan()]
    assert bool((numbers[1:] >= numbers[:-1]).all())
    assert torch.equal(keys.sort().values, torch.arange(-(2**15), 2**15))


@settings(max_examples=200)
@given(first=BITS, second=BITS)
def test_ordered_integers_follow_float32(first, second):
    """For FP32 too, and the distance of neighbours is one."""
    one, other = from_bits(first), from_bits(second)
    if float(one) < float(other):
        assert int(ordered_integers(one)) < int(ordered_integers(other))
    assert int(ulp_distance(one, other)) == int(ulp_distance(other, one))
    assert (int(ulp_distance(one, other)) == 0) == (first == second)
    assume(math.isfinite(value_of(first)))
    upwards = torch.nextafter(one, torch.tensor(math.inf))
    if float(one) != 0 and float(upwards) != 0:
        assert int(ulp_distance(one, upwards)) == 1


def test_distances_around_zero():
    """The sign of zero is one step."""
    values = from_bits(0x80000001, 0x80000000, 0, 1)
    assert ordered_integers(values).tolist() == [-2, -1, 0, 1]
    assert ulp_distance(values[:-1], values[1:]).tolist() == [1, 1, 1]


@settings(max_examples=100)
@given(bits=BITS)
def test_values_from_bits(bits):
    """The pattern comes back, also of negative values."""
    value = float32_from_bits(bits)
    expected = value_of(bits)
    assert math.isnan(value) if math.isnan(expected) else bits_of(value) == bits
