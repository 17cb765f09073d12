"""Values pushed across boundaries land where they must; answers are read as GSM8K writes them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fliptrace.numerics import integer_view, round_to, ulp_distance
from fliptrace_interventions.outcomes import gsm8k_answer, same_answer
from fliptrace_interventions.pushing import latent_neighbour, moved, pushed_across, rounded_distance

SIXTEEN = [torch.bfloat16, torch.float16]
numbers = st.floats(-60000, 60000, width=32)


@pytest.mark.parametrize("dtype", SIXTEEN)
@given(number=numbers, ulp=st.integers(1, 9), away=st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_push_crosses_as_many_boundaries_as_asked(dtype, number, ulp, away):
    """The rounded value moves by exactly that many ULP, and one FP32 value less far it would move by one fewer."""
    value = torch.tensor(number, dtype=torch.float32)
    pushed = pushed_across(value, ulp, dtype, away=away)
    if pushed is None:
        return
    assert int(rounded_distance(value.view(1), pushed.view(1), dtype)[0]) == ulp
    back = torch.nextafter(pushed, value)
    assert int(rounded_distance(value.view(1), back.view(1), dtype)[0]) == ulp - 1
    other = pushed_across(value, ulp, dtype, away=not away)
    if other is not None and float(value) != 0:
        assert (pushed > value) != (other > value)


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_the_nearest_boundary_is_taken_first(dtype):
    """A value just below a boundary is pushed up, just above it down, and on it to the side it did not round to."""
    one_up = torch.nextafter(torch.tensor(1.0, dtype=dtype), torch.tensor(2.0, dtype=dtype))
    middle = torch.tensor((1.0 + float(one_up)) / 2)
    below, above = moved(middle, -1), moved(middle, 1)
    assert pushed_across(below, 1, dtype) > middle
    assert torch.equal(integer_view(pushed_across(above, 1, dtype)), integer_view(middle))
    assert float(round_to(middle, dtype)) == 1.0
    assert torch.equal(integer_view(pushed_across(middle, 1, dtype)), integer_view(above))


def test_pushes_that_cannot_be():
    """No push over infinity, through zero, of a NaN, or where nothing is rounded."""
    largest = torch.tensor(torch.finfo(torch.bfloat16).max, dtype=torch.float32)
    for away in (False, True):
        assert pushed_across(torch.tensor(math.nan), 1, torch.bfloat16, away=away) is None
        assert pushed_across(torch.tensor(1.0), 1, torch.float32, away=away) is None
    assert None in [pushed_across(largest, 1, torch.bfloat16, away=a) for a in (False, True)]
    tiny = torch.tensor(1e-41)
    pushes = [pushed_across(tiny, 99, torch.bfloat16, away=a) for a in (False, True)]
    assert None in pushes


@pytest.mark.parametrize("dtype", SIXTEEN)
@given(number=numbers)
@settings(max_examples=100, deadline=None)
def test_latent_neighbours_round_alike(dtype, number):
    """Another FP32 value, one ULP away, with the same 16 bits."""
    value = torch.tensor(number, dtype=torch.float32)
    other = latent_neighbour(value, dtype)
    assert int(ulp_distance(value.view(1), other.view(1))[0]) == 1
    assert torch.equal(integer_view(round_to(value, dtype)), integer_view(round_to(other, dtype)))


def test_fp32_models_have_no_latent_neighbours():
    """Every change survives where nothing is rounded."""
    assert latent_neighbour(torch.tensor(0.3), torch.float32) is None


def test_moves_end_at_the_last_value():
    """Zeros are neighbours, and nothing lies beyond the last pattern."""
    zero = torch.tensor(0.0)
    assert math.copysign(1, float(moved(zero, -1))) == -1
    assert torch.equal(integer_view(moved(moved(zero, -5), 5)), integer_view(zero))
    assert moved(torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32), 1) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so 3 + 4 = 7.\nFinal answer: 7", "7"),
        ("Final answer: 5 apples, no: Final answer: $1,200.50", "1200.5"),
        ("He pays 18 dollars.\n#### 18", "18"),
        ("The final answer is -3.", "-3"),
        ("first 4 then 12", "12"),
        ("Final answer: 007.0", "7"),
        ("Final answer: -0", "0"),
        ("no number here", None),
        ("", None),
        ("**Final answer:** 42", "42"),
    ],
)
def test_answers_are_extracted(text, expected):
    """The marked number, else the last one, in plain digits."""
    assert gsm8k_answer(text) == expected


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("7", 7, True),
        ("7.0", "7", True),
        ("1,200", 1200, True),
        ("8", 7, False),
        (None, 7, False),
        ("yes", "yes ", True),
        ("yes", "no", False),
        ("7", None, False),
    ],
)
def test_answers_are_compared_as_numbers(found, expected, same):
    """Numbers by value, all else as text; no answer is never right."""
    assert same_answer(found, expected) is same


def test_digests_of_many_are_those_of_each():
    """Tensors of several shapes and dtypes digested together give what digest_tensor gives for each."""
    from fliptrace.numerics import digest_tensor
    from fliptrace_interventions.digests import digest_tensors

    generator = torch.Generator().manual_seed(3)
    tensors = [
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((2, 5, 2, 8), (2, 5, 2, 8), (2, 7, 1, 3), (4, 3), (6,))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    together = digest_tensors(tensors)
    for tensor, digest in zip(tensors, together, strict=True):
        assert torch.equal(digest, digest_tensor(tensor))
