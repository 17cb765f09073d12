"""Digests tell apart whatever differs in bits, order, place, dtype or shape, and never change their values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fliptrace.numerics import combine_digests, digest_hex, digest_rows, digest_tensor
from fliptrace.numerics.digest import mix_words, position_terms

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32]
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORD = 2**64 - 1

shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


def random_tensor(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    width = _INTEGERS[dtype.itemsize]
    limits = torch.iinfo(width)
    return torch.randint(limits.min, limits.max, shape, dtype=width, generator=generator).view(
        dtype
    )


def flip_bit(tensor, element, bit):
    """A copy of which one bit differs."""
    width = _INTEGERS[tensor.element_size()]
    copy = tensor.clone()
    flat = copy.view(width).reshape(-1)
    bits = 8 * tensor.element_size()
    mask = 1 << bit
    flat[element] ^= mask - (1 << bits) if mask >= 1 << (bits - 1) else mask
    return flat.view(tensor.dtype).view(tensor.shape)


def mixed(word):
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & WORD
    return word ^ word >> 31


def specified_row(data, tag):
    """The digest of one row in Python integers; data are the row's bytes."""
    padded = data + bytes(-len(data) % 8)
    lanes = [0, 0]
    for place in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * place : 8 * place + 8], "little")
        first = mixed(word ^ ((place + 1) * 0x9E3779B97F4A7C15 & WORD))
        lanes[0] += first
        lanes[1] += mixed(first ^ 0xD1B54A32D192ED03)
    seal = (len(data) * 256 + tag) * 0x8CB92BA72F3D8DD7
    return [mixed((lane + seal) & WORD) for lane in lanes]


@settings(max_examples=60)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31))
def test_rows_follow_the_specification(shape, dtype, seed):
    """Against plain Python integers, with and without padding."""
    tensor = random_tensor(shape, dtype, seed)
    tag = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.int64: 5, torch.int32: 6}[
        dtype
    ]
    found = digest_rows(tensor)
    for row, digest in zip(tensor, found.tolist(), strict=True):
        data = bytes(row.contiguous().reshape(-1).view(torch.uint8).numpy())
        assert [lane & WORD for lane in digest] == specified_row(data, tag)


@settings(max_examples=100)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31), data=st.data())
def test_one_bit_always_changes_the_digest(shape, dtype, seed, data):
    """Any bit of any element; both lanes react, and only the row that holds it."""
    tensor = random_tensor(shape, dtype, seed)
    element = data.draw(st.integers(0, tensor.numel() - 1))
    changed = flip_bit(tensor, element, data.draw(st.integers(0, 8 * tensor.element_size() - 1)))
    assert bool((digest_tensor(tensor) != digest_tensor(changed)).all())
    differs = (digest_rows(tensor) != digest_rows(changed)).any(1)
    row = element // (tensor.numel() // shape[0])
    assert differs.nonzero().flatten().tolist() == [row]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("distance", [1, 2, 4, 16])
def test_pairs_of_sign_flips_do_not_cancel(dtype, distance):
    """A plain weighted sum would not see them: the weights of sign bits cancel modulo 2**64."""
    tensor = random_tensor((1, 64), dtype, 3)
    top = 8 * tensor.element_size() - 1
    seen = {digest_hex(digest_tensor(tensor))}
    for element in range(64 - distance):
        changed = flip_bit(flip_bit(tensor, element, top), element + distance, top)
        seen.add(digest_hex(digest_tensor(changed)))
    assert len(seen) == 64 - distance + 1


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    rows=st.integers(2, 6),
    width=st.integers(1, 9),
)
def test_order_of_rows_and_elements_matters(dtype, seed, rows, width):
    """Exchanged rows, or exchanged elements within a row, give another digest."""
    tensor = random_tensor((rows, width), dtype, seed)
    swapped = tensor.flip(0)
    if not torch.equal(
        swapped.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
    ):
        assert digest_hex(digest_tensor(swapped)) != digest_hex(digest_tensor(tensor))
        assert torch.equal(digest_rows(swapped), digest_rows(tensor).flip(0))
    turned = tensor.flip(1)
    if not torch.equal(
        turned.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
    ):
        assert digest_hex(digest_tensor(turned)) != digest_hex(digest_tensor(tensor))


def test_dtype_and_shape_matter():
    """The same bytes under another dtype or shape are another record; so is one more row or column of zeros."""
    base = torch.zeros(4, 8, dtype=torch.bfloat16)
    variants = [
        base,
        base.view(torch.float16),
        base.view(torch.int16),
        base.view(torch.float32),
        base.view(8, 4),
        base.view(2, 16),
        base.view(32),
        base.view(4, 8, 1),
        base.view(1, 4, 8),
        base.view(4, 2, 4),
        torch.zeros(5, 8, dtype=torch.bfloat16),
        torch.zeros(4, 9, dtype=torch.bfloat16),
        torch.zeros(4, 7, dtype=torch.bfloat16),
        torch.zeros(0, 8, dtype=torch.bfloat16),
        torch.zeros(8, 0, dtype=torch.bfloat16),
    ]
    assert len({digest_hex(digest_tensor(one)) for one in variants}) == len(variants)


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    width=st.integers(1, 9),
)
def test_layout_in_memory_does_not_matter(dtype, seed, rows, width):
    """Transposed, strided, offset and expanded views give what their contiguous copies give."""
    tensor = random_tensor((rows, width), dtype, seed)
    wide = random_tensor((rows, 2 * width + 1), dtype, seed + 1)
    wide[:, 1::2] = tensor
    for view in (tensor.t().contiguous().t(), wide[:, 1::2], torch.cat((tensor[:1], tensor))[1:]):
        assert torch.equal(digest_rows(view), digest_rows(tensor))
        assert torch.equal(digest_tensor(view), digest_tensor(tensor))
    spread = tensor[:1].expand(3, width)
    assert torch.equal(digest_rows(spread), digest_rows(spread.contiguous()))


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 8))
def test_combination_follows_positions_not_listing(seed, count):
    """Rows listed in another order with their positions give the same digest; other positions another one."""
    rows = digest_rows(random_tensor((count, 5), torch.float32, seed))
    positions = torch.arange(count) + 7
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    whole = combine_digests(rows, positions)
    assert torch.equal(whole, combine_digests(rows[order], positions[order]))
    assert not torch.equal(whole, combine_digests(rows, positions + 1))
    assert torch.equal(combine_digests(rows), combine_digests(rows, torch.arange(count)))
    parts = position_terms(rows, positions)
    assert torch.equal(whole, mix_words(parts[: count // 2].sum(0) + parts[count // 2 :].sum(0)))


def test_equal_rows_do_not_cancel():
    """Two equal rows are not one, and not none."""
    row = digest_rows(torch.ones(1, 4))
    found = {digest_hex(combine_digests(row.expand(count, 2))) for count in range(5)}
    assert len(found) == 5


def test_scalars_and_empty_rows():
    """A scalar is digested as such; a row without elements has a digest."""
    assert not torch.equal(digest_tensor(torch.tensor(1.0)), digest_tensor(torch.tensor([1.0])))
    assert digest_rows(torch.zeros(3, 0)).shape == (3, 2)
    with pytest.raises(ValueError, match="at least one dimension"):
        digest_rows(torch.tensor(1.0))


def test_unknown_dtypes_are_refused():
    """A dtype without a number of its own is named."""
    with pytest.raises(ValueError, match="complex64"):
        digest_rows(torch.zeros(2, dtype=torch.complex64))


KNOWN = {
    "float32 ramp": "66acdb69a7c37e922754594ab7ba2e51",
    "bfloat16 ramp": "35c79233def30dd535d93a7b2562fc94",
    "float16 odd width": "4ab35d6a38f20910cbe8016443844dc9",
    "int64": "e5ca1d52f1979ffe599fc6d3bef2abc5",
    "scalar": "df5f9558bacfcc74eb8ceeb522f553e5",
    "empty": "e59262bdde1fded1e59262bdde1fded1",
    "three dimensions": "39e704cbe5b6de08d838e5e4483642a6",
}


def known_tensors():
    ramp = torch.arange(24, dtype=torch.float32).view(3, 8) / 8 - 1
    return {
        "float32 ramp": ramp,
        "bfloat16 ramp": ramp.bfloat16(),
        "float16 odd width": ramp[:, :7].half(),
        "int64": torch.arange(-3, 3),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
        "three dimensions": ramp.view(2, 3, 4),
    }


@pytest.mark.parametrize("name", list(KNOWN))
def test_digests_keep_their_values(name):
    """Stored traces hold these digests: another value would make every one of them unreadable."""
    assert digest_hex(digest_tensor(known_tensors()[name])) == KNOWN[name]


def test_row_digests_keep_their_values():
    """Operands are stored as row digests."""
    found = digest_rows(known_tensors()["bfloat16 ramp"])
    assert [digest_hex(row) for row in found] == [
        "ff50bee09afdcc8070aab7ac82046a00",
        "74055318f4b144b94d9f10a0d664b1a7",
        "a8f9209efe413ad4e3702263e4c5b56b",
    ]


def test_single_rows_of_wider_tensors():
    """A row cut out of a wider tensor keeps that tensor's stride, which 64-bit views do not accept."""
    for dtype in (torch.bfloat16, torch.float32):
        wide = random_tensor((1, 9), dtype, 4)
        assert torch.equal(digest_rows(wide[:, :8]), digest_rows(wide[:, :8].clone()))
        assert torch.equal(digest_rows(wide[:, 1:]), digest_rows(wide[:, 1:].clone()))
