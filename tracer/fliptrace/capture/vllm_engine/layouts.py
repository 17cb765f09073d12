"""Where a key or value element lies inside a block of vLLM's paged cache: tensors in, tensors out, no vLLM.

A block holds ``block_size`` positions of all heads of one layer. vLLM shows every attention cache as
[blocks, kv_heads, block_size, 2 * head_dim]; what a backend keeps inside differs:

* ``HALVES`` (Triton, FlashAttention, FlashInfer, Flex): the last dimension is the key, then the value. The strides are
  the backend's (heads or positions outermost), and indexing respects them.
* ``CPU_VECTOR`` (CPU attention on x86 without AMX, isa ``vec`` and ``vec16``): per head first all keys transposed,
  [head_dim, block_size], then all values, [block_size, head_dim].
* ``CPU_AMX`` (CPU attention with AMX tiles, 16-bit types): keys in groups of 16 positions of pairs of dimensions,
  values in groups of 16 dimensions of pairs of positions.

An engine proves a layout on its own cache before it trusts it (cache.py); this module only knows the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import torch
from torch import Tensor

from fliptrace.errors import UnsupportedModelError

#: Rows of an AMX tile, and its columns of 32 bits.
_TILE = 16
#: 16-bit elements in 32 bits.
_PAIR = 2


class Layout(StrEnum):
    """How a block keeps keys and values."""

    HALVES = "key and value side by side"
    CPU_VECTOR = "CPU: keys transposed, then values"
    CPU_AMX = "CPU: AMX tiles"


#: Backend's name, and for CPU attention its instruction set, to the layout.
_LAYOUTS = {
    ("TRITON_ATTN", None): Layout.HALVES,
    ("FLASH_ATTN", None): Layout.HALVES,
    ("FLASHINFER", None): Layout.HALVES,
    ("FLEX_ATTENTION", None): Layout.HALVES,
    ("CPU_ATTN", "vec"): Layout.CPU_VECTOR,
    ("CPU_ATTN", "vec16"): Layout.CPU_VECTOR,
    ("CPU_ATTN", "amx"): Layout.CPU_AMX,
}


def layout_of(backend: str, instruction_set: str | None = None) -> Layout:
    """Return the layout of a backend.

    Args:
        backend: vLLM's name, such as ``TRITON_ATTN``.
        instruction_set: of CPU attention, such as ``vec``; None for the others.

    Raises:
        UnsupportedModelError: a layout that is not known here.
    """
    found = _LAYOUTS.get((backend, instruction_set))
    if found is None:
        known = ", ".join(f"{name}/{isa}" if isa else name for name, isa in _LAYOUTS)
        shown = f"{backend}/{instruction_set}" if instruction_set else backend
        raise UnsupportedModelError(
            f"the cache layout of vLLM's attention backend must be one of {known}; this engine runs {shown}. Choose "
            "another backend (attention_backend=...), or report this one"
        )
    return found


def unpack(layout: Layout, blocks: Tensor) -> Tensor:
    """Copy blocks into canonical order.

    Args:
        layout: how the blocks are kept.
        blocks: [blocks, kv_heads, block_size, 2 * head_dim]; for the CPU's layouts each block contiguous.

    Returns:
        [2, blocks * block_size, kv_heads, head_dim], keys first, contiguous.
    """
    count, heads, size, width = blocks.shape
    keys, values = _UNPACK[layout](blocks, size, width // 2)  # [blocks, heads, size, dim] each
    stacked = torch.stack((keys, values)).transpose(2, 3)  # [2, blocks, size, heads, dim]
    return stacked.reshape(2, count * size, heads, width // 2).contiguous()


def pack(layout: Layout, rows: Tensor, block_size: int) -> Tensor:
    """Turn canonical rows into blocks; the inverse of unpack.

    Args:
        layout: how the blocks are to be kept.
        rows: [2, blocks * block_size, kv_heads, head_dim].
        block_size: positions in a block.

    Returns:
        [blocks, kv_heads, block_size, 2 * head_dim], contiguous.
    """
    _, total, heads, dim = rows.shape
    count = total // block_size
    split = rows.reshape(2, count, block_size, heads, dim).transpose(2, 3)
    packed = _PACK[layout](split[0], split[1])
    return packed.reshape(count, heads, block_size, 2 * dim)


def read_positions(
    layout: Layout, cache: Tensor, block_ids: Tensor, first: int, last: int
) -> Tensor:
    """Copy the rows of positions out of a paged cache.

    Args:
        layout: of the cache.
        cache: [all blocks, kv_heads, block_size, 2 * head_dim].
        block_ids: int64 [blocks of the request], from position 0 on.
        first: first position.
        last: one past the last position.

    Returns:
        [2, last - first, kv_heads, head_dim], contiguous.
    """
    size = cache.shape[2]
    begin = first // size
    rows = unpack(layout, cache.index_select(0, block_ids[begin : -(-last // size)]))
    return rows[:, first - begin * size : last - begin * size].contiguous()


def write_positions(
    layout: Layout, cache: Tensor, block_ids: Tensor, first: int, rows: Tensor
) -> None:
    """Put rows into a paged cache; nothing else in the touched blocks changes.

    Args:
        layout: of the cache.
        cache: [all blocks, kv_heads, block_size, 2 * head_dim], changed in place.
        block_ids: int64 [blocks of the request], from position 0 on.
        first: position of the first row.
        rows: [2, T, kv_heads, head_dim].
    """
    size, last = cache.shape[2], first + rows.shape[1]
    begin = first // size
    touched = block_ids[begin : -(-last // size)]
    content = unpack(layout, cache.index_select(0, touched))
    content[:, first - begin * size : last - begin * size] = rows
    cache.index_copy_(0, touched, pack(layout, content, size))


def _unpack_halves(blocks: Tensor, _size: int, dim: int) -> tuple[Tensor, Tensor]:
    return blocks[..., :dim], blocks[..., dim:]


def _pack_halves(keys: Tensor, values: Tensor) -> Tensor:
    return torch.cat((keys, values), dim=-1)


def _unpack_vector(blocks: Tensor, size: int, dim: int) -> tuple[Tensor, Tensor]:
    keys, values = _split(blocks)
    return keys.unflatten(-1, (dim, size)).transpose(-1, -2), values.unflatten(-1, (size, dim))


def _pack_vector(keys: Tensor, values: Tensor) -> Tensor:
    return torch.cat((keys.transpose(-1, -2).flatten(-2), values.flatten(-2)), dim=-1)


def _unpack_amx(blocks: Tensor, size: int, dim: int) -> tuple[Tensor, Tensor]:
    keys, values = _split(blocks)
    # keys: [group, pair of dimensions, position in the group, dimension in the pair]
    keys = keys.unflatten(-1, (size // _TILE, dim // _PAIR, _TILE, _PAIR)).transpose(-2, -3)
    # values: [group of dimensions, pair of positions, dimension in the group, position in the pair]
    values = values.unflatten(-1, (dim // _TILE, size // _PAIR, _TILE, _PAIR))
    values = values.permute(0, 1, 3, 5, 2, 4)
    return (
        keys.reshape(*blocks.shape[:2], size, dim),
        values.reshape(*blocks.shape[:2], size, dim),
    )


def _pack_amx(keys: Tensor, values: Tensor) -> Tensor:
    size, dim = keys.shape[-2:]
    keys = keys.unflatten(-1, (dim // _PAIR, _PAIR)).unflatten(-3, (size // _TILE, _TILE))
    values = values.unflatten(-1, (dim // _TILE, _TILE)).unflatten(-3, (size // _PAIR, _PAIR))
    return torch.cat(
        (keys.transpose(-2, -3).flatten(2), values.permute(0, 1, 4, 2, 5, 3).flatten(2)), dim=-1
    )


def _split(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return a block's two halves, [blocks, heads, block_size * head_dim] each."""
    flat = blocks.flatten(2)
    half = flat.shape[2] // 2
    return flat[..., :half], flat[..., half:]


_UNPACK: dict[Layout, Callable[[Tensor, int, int], tuple[Tensor, Tensor]]] = {
    Layout.HALVES: _unpack_halves,
    Layout.CPU_VECTOR: _unpack_vector,
    Layout.CPU_AMX: _unpack_amx,
}
_PACK: dict[Layout, Callable[[Tensor, Tensor], Tensor]] = {
    Layout.HALVES: _pack_halves,
    Layout.CPU_VECTOR: _pack_vector,
    Layout.CPU_AMX: _pack_amx,
}
