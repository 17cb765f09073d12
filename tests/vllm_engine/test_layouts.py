"""The arithmetic of paged caches, and the same against the kernels that write them."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from fliptrace.capture.vllm_engine.layouts import (
    Layout,
    layout_of,
    pack,
    read_positions,
    unpack,
    write_positions,
)
from fliptrace.errors import UnsupportedModelError

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed here"
)
BLOCKS, HEADS = 5, 3


def random_bits(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int32)
    return bits.to(torch.int16).view(torch.bfloat16)


def bits_equal(first, second):
    return torch.equal(first.view(torch.int16), second.view(torch.int16))


def empty_cache(layout, size, dim, strided):
    if layout is Layout.HALVES and strided:
        # NHD: positions outside, heads inside, as FlashAttention and Triton keep them by default.
        return random_bits(BLOCKS, size, HEADS, 2 * dim).transpose(1, 2)
    return random_bits(BLOCKS, HEADS, size, 2 * dim)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize(("size", "dim"), [(32, 32), (128, 64), (16, 80)])
@pytest.mark.parametrize("strided", [False, True])
def test_what_is_written_is_read_and_nothing_else_changes(layout, size, dim, strided):
    """Rows across block borders come back bit by bit; every other element of the cache keeps its bits."""
    cache = empty_cache(layout, size, dim, strided)
    before = cache.clone()
    blocks = torch.tensor([3, 1, 4])
    first, count = size - 5, size + 7
    rows = random_bits(2, count, HEADS, dim, seed=1)
    write_positions(layout, cache, blocks, first, rows)
    assert bits_equal(read_positions(layout, cache, blocks, first, first + count), rows)
    changed = (cache.contiguous().view(torch.int16) != before.contiguous().view(torch.int16)).sum()
    assert 0 < changed <= rows.numel()
    assert bits_equal(cache[[0, 2]].contiguous(), before[[0, 2]].contiguous())
    head = read_positions(layout, cache, blocks, 0, first)
    assert bits_equal(head, read_positions(layout, before, blocks, 0, first))


@pytest.mark.parametrize("layout", list(Layout))
def test_pack_inverts_unpack(layout):
    """Every element of a block has exactly one place."""
    blocks = random_bits(BLOCKS, HEADS, 32, 64)
    rows = unpack(layout, blocks)
    assert bits_equal(pack(layout, rows, 32), blocks)
    numbered = torch.arange(2 * 32 * HEADS * 32, dtype=torch.float32).view(2, 32, HEADS, 32)
    assert pack(layout, numbered, 32).unique().numel() == numbered.numel()


def test_layouts_differ():
    """A wrong layout is not read as if it were right."""
    rows = random_bits(2, 32, HEADS, 32)
    packed = {layout: pack(layout, rows, 32) for layout in Layout}
    for written, blocks in packed.items():
        for read in Layout:
            assert bits_equal(unpack(read, blocks), rows) == (read is written)


@pytest.mark.parametrize("backend", [("MAMBA", None), ("CPU_ATTN", "neon"), ("CPU_ATTN", None)])
def test_unknown_layouts_are_refused(backend):
    """A backend whose layout nobody has checked is named, not guessed."""
    with pytest.raises(UnsupportedModelError, match=backend[0]):
        layout_of(*backend)


@needs_vllm
@pytest.mark.parametrize(
    ("instruction_set", "size", "dim"),
    [("vec", 128, 32), ("vec", 128, 128), ("vec16", 32, 80), ("amx", 128, 32), ("amx", 64, 128)],
)
def test_vllm_writes_what_is_read(instruction_set, size, dim):
    """vLLM's own kernel writes rows: what is read has their bits, and what is written here equals its bytes."""
    from vllm import _custom_ops as operations

    cache = torch.zeros(BLOCKS, HEADS, size, 2 * dim, dtype=torch.bfloat16)
    keys, values = cache.view(BLOCKS, HEADS, 2 * size, dim).chunk(2, dim=2)
    rows = random_bits(2, size + 9, HEADS, dim)
    blocks = torch.tensor([4, 2])
    positions = torch.arange(rows.shape[1])
    slots = blocks[positions // size] * size + positions % size
    operations.cpu_attn_reshape_and_cache(
        rows[0].contiguous(),
        rows[1].contiguous(),
        keys,
        values,
        slots,
        instruction_set,
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype="auto",
    )
    layout = layout_of("CPU_ATTN", instruction_set)
    assert bits_equal(read_positions(layout, cache, blocks, 0, rows.shape[1]), rows)
    ours = torch.zeros_like(cache)
    write_positions(layout, ours, blocks, 0, rows)
    assert bits_equal(ours, cache)
