"""Kernels of `tree`: one launch stores partials, a second one adds them up.

The second launch can also add in increasing split order. That is what `deterministic` does in one
launch, and vLLM 0.32 in two when it is batch-invariant, so it serves as an oracle and for timing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fliptrace_kernels.triton_hand_over import add_in_order
from fliptrace_kernels.triton_kernels import (
    UNSPECIALISED,
    adapters_of_rows,
    count_launch,
    has_work,
    output_pointers,
    partial_sum,
    rows_of_adapter,
    tile_of_program,
)


@triton.jit(do_not_specialize=UNSPECIALISED)
def lora_shrink_partials(
    scratch_ptr: tl.tensor,  # [SPLITS, slices, M, R] FP32
    x_ptr: tl.tensor,  # [M, K]
    a0_ptr: tl.tensor,  # [adapters, R, K], one pointer per slice
    a1_ptr: tl.tensor,
    a2_ptr: tl.tensor,
    mapping_ptr: tl.tensor,  # [M] int32
    launches_ptr: tl.tensor,  # [1] int64
    M: tl.tensor,
    K: tl.tensor,
    R: tl.tensor,
    x_stride: tl.tensor,
    a_adapter_stride: tl.tensor,
    a_rank_stride: tl.tensor,
    adapters: tl.tensor,
    HAS_MAPPING: tl.constexpr,
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
    """Sum each split in a program of its own and store it; rows without an adapter stay unwritten.

    Order:
        Within a split as in the specification.
    """
    count_launch(launches_ptr, COUNT_LAUNCHES)
    i_split, i_slice, _, o_m, o_n = tile_of_program(
        M, SPLITS, SLICES, TILES_N, BLOCK_M, BLOCK_N, False
    )
    i_adapter = tl.program_id(1)
    b_adapter = adapters_of_rows(mapping_ptr, o_m, M, HAS_MAPPING)
    b_owned = rows_of_adapter(b_adapter, i_adapter, adapters)
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
        p_partial = scratch_ptr + ((i_split * SLICES + i_slice).to(tl.int64) * M + o_m)[:, None] * R
        tl.store(p_partial + o_n[None, :], b_sum, mask=b_owned[:, None] & (o_n < R)[None, :])


@triton.jit
def add_neighbours(
    p_partials: tl.tensor,
    split_stride: tl.tensor,
    b_mask: tl.tensor,
    FIRST: tl.constexpr,
    SPLITS: tl.constexpr,
) -> tl.tensor:
    """Add partials FIRST to FIRST + SPLITS - 1 as a tree of neighbours; SPLITS is a power of two."""
    if SPLITS == 1:
        b_sum = tl.load(
            p_partials + FIRST * split_stride, mask=b_mask, other=0.0, cache_modifier=".cg"
        )
    else:
        HALF: tl.constexpr = SPLITS // 2
        SECOND: tl.constexpr = FIRST + HALF
        b_sum = add_neighbours(p_partials, split_stride, b_mask, FIRST, HALF)
        b_sum += add_neighbours(p_partials, split_stride, b_mask, SECOND, HALF)
    return b_sum


@triton.jit(do_not_specialize=["M", "out_slice_stride"])
def lora_shrink_add_partials(
    out_ptr: tl.tensor,  # [slices, M, R] FP32
    scratch_ptr: tl.tensor,  # [SPLITS, slices, M, R] FP32
    mapping_ptr: tl.tensor,  # [M] int32
    M: tl.tensor,
    R: tl.tensor,
    out_slice_stride: tl.tensor,
    out_row_stride: tl.tensor,
    out_rank_stride: tl.tensor,
    scale: tl.tensor,
    HAS_MAPPING: tl.constexpr,
    OUT_ALIGNED: tl.constexpr,
    TREE: tl.constexpr,
    SPLITS: tl.constexpr,
    SLICES: tl.constexpr,
    TILES_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Add the partials of a tile up and scale the total; rows without an adapter become 0.0.

    Order:
        TREE: neighbours, then neighbouring sums, until one is left. Otherwise in increasing split
        order, starting from 0.0. Then the scale.
    """
    _, i_slice, _, o_m, o_n = tile_of_program(M, 1, SLICES, TILES_N, BLOCK_M, BLOCK_N, False)
    b_adapter = adapters_of_rows(mapping_ptr, o_m, M, HAS_MAPPING)
    b_inside = (o_m < M)[:, None] & (o_n < R)[None, :]
    b_mask = (b_adapter >= 0)[:, None] & b_inside
    p_partials = scratch_ptr + (i_slice.to(tl.int64) * M + o_m)[:, None] * R + o_n[None, :]
    split_stride = M.to(tl.int64) * R * SLICES
    if TREE:
        b_total = add_neighbours(p_partials, split_stride, b_mask, 0, SPLITS)
    else:
        b_total = add_in_order(p_partials, split_stride, b_mask, SPLITS)
    b_total *= scale
    if HAS_MAPPING:
        b_total = tl.where((b_adapter >= 0)[:, None], b_total, 0.0)
    p_out = output_pointers(
        out_ptr, i_slice, o_m, o_n, out_slice_stride, out_row_stride, out_rank_stride, OUT_ALIGNED
    )
    tl.store(p_out, b_total, mask=b_inside)
