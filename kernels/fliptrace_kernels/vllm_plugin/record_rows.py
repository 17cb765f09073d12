"""A Triton kernel that writes shrinks, digests of their operands and the operands into rings on the device.

It is launched after shrinks, from Python that runs once per captured graph; the position in the rings is read from a
counter on the device, so that a replay of the graph writes the next rows. What a row of the ring holds, and on the CPU
the same in plain torch, is in ``fliptrace.capture.vllm_engine.live``. The digest of an operand row is that of
``fliptrace.numerics.digest``, whose constants are repeated here because nothing of fliptrace is imported below it; a
test holds the two together bit by bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MULTIPLY_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MULTIPLY_2 = tl.constexpr(0x94D049BB133111EB)
LANE = tl.constexpr(0xD1B54A32D192ED03)
ROW = tl.constexpr(0x8CB92BA72F3D8DD7)

#: Columns of the table that describes the layers: 64-bit words of an operand row, slices, rank, first 32-bit word of
#: the layer in a row of the ring, first 64-bit word of its operand in a row of the other ring.
LAYER_COLUMNS = 5
HEADER_WORDS = 4
#: Words before a layer's shrinks: the row's number, padding, four of the digest.
LAYER_HEADER_WORDS = 6


@triton.jit
def _mix(words: tl.tensor) -> tl.tensor:
    mixed = (words ^ (words >> 30)) * tl.full((), MULTIPLY_1, tl.uint64)
    mixed = (mixed ^ (mixed >> 27)) * tl.full((), MULTIPLY_2, tl.uint64)
    return mixed ^ (mixed >> 31)


# A capture must not compile, so arguments that change from call to call must not ask for another variant.
@triton.jit(
    do_not_specialize=[
        "x_address",
        "z_address",
        "rows",
        "first_layer",
        "capacity",
        "operand_capacity",
        "row_words",
        "operand_words",
        "tag",
    ]
)
def record_kernel(
    ring: tl.tensor,
    operands: tl.tensor,
    counter: tl.tensor,
    layers: tl.tensor,
    addresses: tl.tensor,
    mapping: tl.tensor,
    x_address: tl.tensor,
    z_address: tl.tensor,
    rows: tl.tensor,
    first_layer: tl.tensor,
    capacity: tl.tensor,
    operand_capacity: tl.tensor,
    row_words: tl.tensor,
    operand_words: tl.tensor,
    tag: tl.tensor,
    DIRECT: tl.constexpr,
    OPERANDS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    LAYER_COLUMNS: tl.constexpr,
) -> None:
    """Record one row of one layer per program; see `record` for the arguments."""
    index = tl.program_id(0)
    layer = first_layer + tl.program_id(1)
    number = tl.load(counter) + index
    words = tl.load(layers + layer * LAYER_COLUMNS)
    slices = tl.load(layers + layer * LAYER_COLUMNS + 1)
    rank = tl.load(layers + layer * LAYER_COLUMNS + 2)
    start = tl.load(layers + layer * LAYER_COLUMNS + 3)
    operand_start = tl.load(layers + layer * LAYER_COLUMNS + 4)
    if DIRECT:
        x_place = x_address
        z_place = z_address
    else:
        x_place = tl.load(addresses + layer * 2)
        z_place = tl.load(addresses + layer * 2 + 1)
    if x_place != 0:
        x = x_place.to(tl.pointer_type(tl.uint64)) + index.to(tl.int64) * words
        z = z_place.to(tl.pointer_type(tl.int32))
        row = ring + (number % capacity) * row_words
        if layer == 0:
            tl.store(row, number.to(tl.int32))
            tl.store(row + 1, (number >> 32).to(tl.int32))
            tl.store(row + 2, tl.load(mapping + index).to(tl.int32))
            tl.store(row + 3, rows.to(tl.int32))
        first = tl.zeros((BLOCK,), tl.uint64)
        second = tl.zeros((BLOCK,), tl.uint64)
        for begin in range(0, words, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            inside = place < words
            value = tl.load(x + place, mask=inside, other=0)
            seed = (place + 1).to(tl.uint64) * tl.full((), GOLDEN, tl.uint64)
            lane = _mix(value ^ seed)
            other = _mix(lane ^ tl.full((), LANE, tl.uint64))
            first += tl.where(inside, lane, tl.zeros((BLOCK,), tl.uint64))
            second += tl.where(inside, other, tl.zeros((BLOCK,), tl.uint64))
            if OPERANDS:
                kept = operands + (number % operand_capacity) * operand_words + operand_start
                tl.store(kept + place, value.to(tl.int64, bitcast=True), mask=inside)
        seal = (words * 8 * 256 + tag).to(tl.uint64) * tl.full((), ROW, tl.uint64)
        low = _mix(tl.sum(first, 0) + seal)
        high = _mix(tl.sum(second, 0) + seal)
        place = row + start
        tl.store(place, number.to(tl.int32))
        tl.store(place + 2, low.to(tl.int32))
        tl.store(place + 3, (low >> 32).to(tl.int32))
        tl.store(place + 4, high.to(tl.int32))
        tl.store(place + 5, (high >> 32).to(tl.int32))
        total = slices * rank
        for begin in range(0, total, BLOCK_Z):
            column = begin + tl.arange(0, BLOCK_Z)
            inside = column < total
            source = ((column // rank) * rows + index).to(tl.int64) * rank + column % rank
            bits = tl.load(z + source, mask=inside, other=0)
            tl.store(place + 6 + column, bits, mask=inside)


def record(
    ring: Tensor,
    operands: Tensor | None,
    counter: Tensor,
    layers: Tensor,
    mapping: Tensor,
    *,
    rows: int,
    tag: int,
    layer: int | None = None,
    x: Tensor | None = None,
    z: Tensor | None = None,
    addresses: Tensor | None = None,
) -> None:
    """Record one layer from its tensors, or all layers from a table of their addresses.

    Args:
        ring: int32 [capacity, words]; slot of row number n is n modulo the capacity.
        operands: int64 [capacity, words], likewise; None keeps no operands.
        counter: int64 [1]: number of the forward's first row. It is read, not advanced.
        layers: int64 [layers, LAYER_COLUMNS].
        mapping: adapter of each row, [rows].
        rows: of this forward, with padding.
        tag: the operands' dtype in a digest.
        layer: which layer x and z are of; None: all layers, from addresses.
        x: operands [rows, K], contiguous, K a multiple of 4, 16-bit.
        z: FP32 [slices, rows, rank], contiguous.
        addresses: int64 [layers, 2]: x and z of each layer; a layer whose x is 0 is left out.
    """
    direct = layer is not None and x is not None and z is not None
    grid = (rows, 1 if direct else layers.shape[0])
    record_kernel[grid](
        ring,
        ring if operands is None else operands,
        counter,
        layers,
        layers if addresses is None else addresses,
        mapping,
        x.data_ptr() if direct and x is not None else 0,
        z.data_ptr() if direct and z is not None else 0,
        rows,
        layer if layer is not None else 0,
        ring.shape[0],
        1 if operands is None else operands.shape[0],
        ring.shape[1],
        0 if operands is None else operands.shape[1],
        tag,
        DIRECT=direct,
        OPERANDS=operands is not None,
        BLOCK=256,
        BLOCK_Z=64,
        LAYER_COLUMNS=LAYER_COLUMNS,
        num_warps=2,
    )


def keeps_bits(x: Tensor) -> bool:
    """Whether the kernel can read these operands: contiguous rows of whole 64-bit words."""
    return (
        x.is_contiguous()
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[-1] % 4 == 0
        and x.data_ptr() % 8 == 0
    )
