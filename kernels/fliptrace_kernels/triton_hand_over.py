"""The kernel of `deterministic`: partials are handed over between the blocks of one launch.

Each split of a tile stores its partial and takes a ticket. The block that takes the last one adds
all partials of the tile up in increasing split order. Which block that is changes from run to run;
the sum does not.

How the partials get from one block to another, in the terms of the PTX memory model:

1. Every thread stores its part of the partial.
2. A barrier over the block orders those stores before the ticket of the one thread that takes it.
3. The ticket is an acquire-release atomic at GPU scope. Its release makes the stores of step 1
   visible to whoever acquires it; its acquire makes the stores of earlier tickets visible here.
4. A second barrier orders the ticket before the reads of all other threads of the block, and hands
   its value to them.
5. The last block reads past the L1 cache, adds, stores the output, and sets the counter back to 0
   for the next launch: nothing has to be reset from outside.

Source:
    Paper, Algorithm 1, without its initialisation launch. Its fence is the release of step 3.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fliptrace_kernels.triton_kernels import (
    UNSPECIALISED,
    adapters_of_rows,
    count_launch,
    has_work,
    output_pointers,
    partial_sum,
    rows_of_adapter,
    tile_of_program,
    zero_rows_without_adapter,
)


@triton.jit
def add_in_order(
    p_partials: tl.tensor, split_stride: tl.tensor, b_mask: tl.tensor, SPLITS: tl.constexpr
) -> tl.tensor:
    """Add SPLITS partials to 0.0 in increasing split order; their loads do not wait for each other.

    The loop is unrolled. A row's partial is contiguous over its ranks, so that each load is whole
    memory sectors, and rows without a partial are neither read nor written.
    """
    b_total = tl.zeros(b_mask.shape, dtype=tl.float32)
    for i in tl.static_range(SPLITS):
        b_total += tl.load(
            p_partials + i * split_stride, mask=b_mask, other=0.0, cache_modifier=".cg"
        )
    return b_total


@triton.jit(do_not_specialize=UNSPECIALISED)
def lora_shrink_deterministic(
    out_ptr: tl.tensor,  # [slices, M, R] FP32
    scratch_ptr: tl.tensor,  # [SPLITS, slices, M, R] FP32
    counter_ptr: tl.tensor,  # [adapters, slices, tiles] int32, 0 before and after
    x_ptr: tl.tensor,  # [M, K]
    a0_ptr: tl.tensor,  # [adapters, R, K], one pointer per slice
    a1_ptr: tl.tensor,
    a2_ptr: tl.tensor,
    mapping_ptr: tl.tensor,  # [M] int32
    launches_ptr: tl.tensor,  # [1] int64
    M: tl.tensor,
    K: tl.tensor,
    R: tl.tensor,
    out_slice_stride: tl.tensor,
    out_row_stride: tl.tensor,
    out_rank_stride: tl.tensor,
    x_stride: tl.tensor,
    a_adapter_stride: tl.tensor,
    a_rank_stride: tl.tensor,
    adapters: tl.tensor,
    scale: tl.tensor,
    HAS_MAPPING: tl.constexpr,
    OUT_ALIGNED: tl.constexpr,
    ONE_ADAPTER: tl.constexpr,
    COUNT_LAUNCHES: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SLICES: tl.constexpr,
    TILES_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    X_EVICTION: tl.constexpr,
    A_EVICTION: tl.constexpr,
) -> None:
    """Sum each split in a program of its own; the last to finish a tile adds the partials up.

    Order:
        Within a split as in the specification; the partials in increasing split order, starting
        from 0.0; then the scale.
    """
    count_launch(launches_ptr, COUNT_LAUNCHES)
    i_split, i_slice, i_tile, o_m, o_n = tile_of_program(
        M, SPLITS, SLICES, TILES_N, BLOCK_M, BLOCK_N, False
    )
    i_adapter = tl.program_id(1)
    b_adapter = adapters_of_rows(mapping_ptr, o_m, M, HAS_MAPPING)
    b_owned = rows_of_adapter(b_adapter, i_adapter, adapters)
    b_inside = (o_m < M)[:, None] & (o_n < R)[None, :]
    p_out = output_pointers(
        out_ptr, i_slice, o_m, o_n, out_slice_stride, out_row_stride, out_rank_stride, OUT_ALIGNED
    )
    if has_work(b_owned, ONE_ADAPTER):
        b_sum = partial_sum(
            x_ptr,
            a0_ptr,
            a1_ptr,
            a2_ptr,
            b_adapter,
            b_owned,
            i_adapter,
            i_slice,
            i_split,
            o_m,
            o_n,
            M,
            K,
            R,
            x_stride,
            a_adapter_stride,
            a_rank_stride,
            adapters,
            HAS_MAPPING,
            ONE_ADAPTER,
            EVEN_K,
            SPLITS,
            SLICES,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            X_EVICTION,
            A_EVICTION,
        )
        b_mask = b_owned[:, None] & b_inside
        p_partials = scratch_ptr + (i_slice.to(tl.int64) * M + o_m)[:, None] * R + o_n[None, :]
        split_stride = M.to(tl.int64) * R * SLICES
        tl.store(p_partials + i_split * split_stride, b_sum, mask=b_mask)
        tl.debug_barrier()
        tiles = tl.num_programs(0) // (SPLITS * SLICES)
        p_counter = counter_ptr + (i_adapter * SLICES + i_slice) * tiles + i_tile
        b_ticket = tl.atomic_add(p_counter, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if b_ticket == SPLITS - 1:
            b_total = add_in_order(p_partials, split_stride, b_mask, SPLITS)
            tl.store(p_out, b_total * scale, mask=b_mask)
            tl.store(p_counter, 0)
    zero_rows_without_adapter(p_out, b_adapter, i_adapter, i_split, b_inside, HAS_MAPPING)
