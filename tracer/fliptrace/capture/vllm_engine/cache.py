"""A request's keys and values in vLLM's paged cache, by block table, seen in canonical form.

Each attention layer belongs to a KV group with a block table of its own. Groups of sliding-window layers free the
blocks that no window reaches any more; the canonical form of such a layer keeps the last ``window - 1`` rows, as
transformers' caches do, and freed blocks are never touched. Each layer's layout is proved before it is trusted: the
backend's own kernel writes random bits, which must be read back, and what is written here must equal its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fliptrace.capture.engine import CacheLayer
from fliptrace.capture.vllm_engine.layouts import (
    Layout,
    layout_of,
    read_positions,
    write_positions,
)
from fliptrace.errors import InputError, RecordingError, UnsupportedModelError

_NUMBER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class PagedLayer:
    """One attention layer that owns a cache.

    Attributes:
        number: 0-based layer number.
        name: of the layer in vLLM.
        module: the attention module, to which the cache is bound.
        group: number of its KV group.
        layout: how its blocks are kept.
        window: how many positions attention sees, None for all.
        block_positions: how many positions a block of the table has; the backend's own blocks may be parts of it, as
            beside recurrent state, whose slots are as large as blocks.
    """

    number: int
    name: str
    module: Any
    group: int
    layout: Layout
    window: int | None
    block_positions: int

    @property
    def cache(self) -> Tensor:
        """[blocks, kv_heads, block_size, 2 * head_dim]; looked up each time, as vLLM may bind another."""
        cache: Tensor = self.module.kv_cache
        return cache

    @property
    def block_size(self) -> int:
        """Positions in one of the backend's blocks."""
        return int(self.cache.shape[2])

    def own_blocks(self, table: Tensor) -> Tensor:
        """Turn a block table into one of the backend's blocks; freed blocks, the null block 0, stay 0."""
        parts = self.block_positions // self.block_size
        if parts == 1:
            return table
        blocks = table.unsqueeze(1) * parts + torch.arange(parts, device=table.device)
        return torch.where(table.unsqueeze(1) == 0, 0, blocks).reshape(-1)

    @property
    def row_shape(self) -> tuple[int, int]:
        """(kv_heads, head_dim)."""
        return int(self.cache.shape[1]), int(self.cache.shape[3]) // 2

    def first_kept(self, length: int) -> int:
        """Return the first position that the canonical form keeps after ``length`` tokens."""
        return 0 if self.window is None else max(0, length - (self.window - 1))


def paged_layer(name: str, module: Any, group: int, content: Any) -> PagedLayer:
    """Look an attention layer over.

    Args:
        name: in vLLM.
        module: the layer, whose cache is bound.
        group: number of its KV group.
        content: vLLM's KVCacheGroupSpec.

    Raises:
        UnsupportedModelError: it keeps something other than keys and values, or in an unknown layout.
    """
    cache = getattr(module, "kv_cache", None)
    backend = getattr(module, "attn_backend", None)
    if not isinstance(cache, Tensor) or backend is None or cache.dim() != 4:
        kept = type(cache).__name__ if not isinstance(cache, Tensor) else f"{list(cache.shape)}"
        raise UnsupportedModelError(
            f"{name} ({type(module).__name__}) must keep keys and values as [blocks, heads, positions, 2 * dim]; it "
            f"keeps {kept}. Latent attention cannot be traced yet"
        )
    if module.head_size != module.head_size_v or cache.shape[3] != 2 * module.head_size:
        raise UnsupportedModelError(
            f"{name} must cache keys and values of one width; it has {module.head_size} and {module.head_size_v}, "
            f"in rows of {cache.shape[3]}"
        )
    if getattr(backend, "forward_includes_kv_cache_update", False):
        raise UnsupportedModelError(
            f"{name}: the backend {backend.get_name()} writes its cache inside attention, so new rows cannot be seen "
            "before it reads them; choose another (attention_backend=...)"
        )
    isa = getattr(module, "isa", None) if backend.get_name() == "CPU_ATTN" else None
    window = getattr(module, "sliding_window", None)
    return PagedLayer(
        number_of(name),
        name,
        module,
        group,
        layout_of(backend.get_name(), isa),
        int(window) if window else None,
        _block_positions(content, cache, name),
    )


def _block_positions(content: Any, cache: Tensor, name: str) -> int:
    """Return how many positions a block of a group's table has.

    Raises:
        UnsupportedModelError: no whole number of the backend's own blocks.
    """
    size, own = int(content.kv_cache_spec.block_size), int(cache.shape[2])
    if size % own:
        raise UnsupportedModelError(
            f"{name}: a block of {size} positions must hold whole blocks of the attention backend, which have {own}"
        )
    return size


def number_of(name: str) -> int:
    """Return the number of a layer with a cache.

    Raises:
        UnsupportedModelError: its name has none.
    """
    match = _NUMBER.search(name)
    if match is None:
        raise UnsupportedModelError(
            f"the attention layer {name} has no number in its name, so its cache could not be told from others"
        )
    return int(match.group(1))


@torch.inference_mode()
def prove_layouts(layers: Sequence[PagedLayer]) -> None:
    """Check each kind of cache against the kernel that writes it. Nothing may run on the engine meanwhile.

    Raises:
        UnsupportedModelError: what is read back has other bits, or what is written here has.
    """
    proved = set()
    for layer in layers:
        cache = layer.cache
        kind = (layer.layout, cache.shape[1:], cache.stride()[1:], cache.dtype)
        if kind in proved:
            continue
        proved.add(kind)
        blocks = torch.arange(2, device=cache.device) + (cache.shape[0] - 2)
        saved = cache.index_select(0, blocks)
        try:
            _prove(layer, blocks)
        finally:
            cache.index_copy_(0, blocks, saved)


def _prove(layer: PagedLayer, blocks: Tensor) -> None:
    cache, size = layer.cache, layer.block_size
    count = size + size // 2 + 1
    generator = torch.Generator().manual_seed(layer.number)
    integer = _INTEGERS[cache.element_size()]
    bits = torch.randint(
        torch.iinfo(integer).min, 0, (2, count, *layer.row_shape), generator=generator
    )
    rows = bits.to(integer).view(cache.dtype).to(cache.device)
    positions = torch.arange(count, device=cache.device)
    slots = blocks[positions // size] * size + positions % size
    cache.index_fill_(0, blocks, 0.0)
    layer.module.impl.do_kv_cache_update(
        layer.module, rows[0].contiguous(), rows[1].contiguous(), cache, slots
    )
    theirs = cache.index_select(0, blocks).contiguous().view(integer)
    read = read_positions(layer.layout, cache, blocks, 0, count).view(integer)
    cache.index_fill_(0, blocks, 0.0)
    write_positions(layer.layout, cache, blocks, 0, rows)
    ours = cache.index_select(0, blocks).contiguous().view(integer)
    if not torch.equal(read, rows.view(integer)) or not torch.equal(ours, theirs):
        raise UnsupportedModelError(
            f"{layer.name}: the cache of {layer.module.attn_backend.get_name()} is not laid out as "
            f"{layer.layout.value}: rows that vLLM's own kernel wrote were not read back bit by bit, so no cache "
            "could be recorded faithfully"
        )


def read_cache(
    layers: Sequence[PagedLayer], block_ids: Sequence[Sequence[int]], length: int
) -> tuple[CacheLayer, ...]:
    """Copy a request's cache into canonical form.

    Args:
        layers: which.
        block_ids: per group the request's blocks, from position 0 on; freed ones are the null block 0.
        length: how many tokens the request has cached.
    """
    tables = _tables(layers, block_ids)
    return tuple(
        CacheLayer(
            layer.number,
            read_rows(layer, tables[layer.group], layer.first_kept(length), length),
            layer.first_kept(length),
            layer.window,
        )
        for layer in layers
    )


def read_rows(layer: PagedLayer, table: Tensor, first: int, last: int) -> Tensor:
    """Copy the rows of some positions of one layer: [2, last - first, kv_heads, head_dim].

    Raises:
        RecordingError: a block that should hold them was freed.
    """
    table = layer.own_blocks(table)
    needed = table[first // layer.block_size : -(-last // layer.block_size)]
    if last > first and bool((needed == 0).any()):
        raise RecordingError(
            f"layer {layer.number}: vLLM freed blocks that hold positions {first} to {last - 1}, so the cache cannot "
            "be read"
        )
    return read_positions(layer.layout, layer.cache, table, first, last)


@torch.inference_mode()
def write_cache(
    layers: Sequence[PagedLayer],
    block_ids: Sequence[Sequence[int]],
    content: Sequence[CacheLayer],
) -> None:
    """Put canonical content where a request of that length has its blocks; the content was checked."""
    tables = _tables(layers, block_ids)
    given = {layer.layer: layer for layer in content}
    for layer in layers:
        rows = given[layer.number]
        write_positions(
            layer.layout,
            layer.cache,
            layer.own_blocks(tables[layer.group]),
            rows.first_position,
            rows.values.to(layer.cache.device),
        )


def check_content(layers: Sequence[PagedLayer], content: Sequence[CacheLayer]) -> int:
    """Check that canonical content fits an engine's cache.

    Returns:
        How many tokens it has seen.

    Raises:
        InputError: a layer is missing or given twice, or its shape, dtype or positions do not fit.
    """
    numbers = [layer.number for layer in layers]
    given = [layer.layer for layer in content]
    if sorted(given) != numbers:
        raise InputError(
            f"every cache layer of {numbers} must be given, and none twice; got {given}"
        )
    by_number = {layer.number: layer for layer in layers}
    ends = set()
    for rows in content:
        layer, values = by_number[rows.layer], rows.values
        heads, dim = layer.row_shape
        expected = (2, heads, dim, layer.cache.dtype)
        if values.dim() != 4 or (values.shape[0], *values.shape[2:], values.dtype) != expected:
            raise InputError(
                f"cache layer {rows.layer} needs {layer.cache.dtype} [2, T, {heads}, {dim}]; got {values.dtype} "
                f"{list(values.shape)}"
            )
        ends.add(rows.first_position + values.shape[1])
    if len(ends) != 1:
        raise InputError(f"cache layers must end at one position; got ends {sorted(ends)}")
    length = ends.pop()
    for rows in content:
        layer = by_number[rows.layer]
        if rows.first_position != layer.first_kept(length):
            raise InputError(
                f"cache layer {rows.layer} after {length} tokens begins at position {layer.first_kept(length)} (window "
                f"{layer.window}); got {rows.first_position}"
            )
    return length


def _tables(layers: Sequence[PagedLayer], block_ids: Sequence[Sequence[int]]) -> dict[int, Tensor]:
    return {
        layer.group: torch.tensor(
            block_ids[layer.group], dtype=torch.int64, device=layer.cache.device
        )
        for layer in layers
    }
