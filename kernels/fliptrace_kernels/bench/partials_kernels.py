"""Triton kernels to measure against: two launches as vLLM 0.32 does it, and partials alone.

The two-launch kernel follows the description of vLLM 0.32's batch-invariant shrink (K blocks of
256, 8 splits, 32 × 16 tiles, 4 warps, 2 stages): launch 1 stores unscaled partials, launch 2 adds
them in increasing split order and scales. Its order is that of `deterministic:8/256`, so the two
must agree bit for bit. It is not zeroed first, as vLLM's is: rows without an adapter keep what the
output held.

The partials-only kernels are a floor: they do what every split kernel does before its blocks hand
anything over, and stop. Tilings are tried, not tuned: see `floor`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _slice_pointer(
    a0_ptr: tl.tensor, a1_ptr: tl.tensor, a2_ptr: tl.tensor, i_slice: tl.tensor
) -> tl.tensor:
    a_ptr = a0_ptr
    if i_slice == 1:
        a_ptr = a1_ptr
    if i_slice == 2:
        a_ptr = a2_ptr
    return a_ptr


@triton.jit
def _rows_of(
    mapping_ptr: tl.tensor,
    i_adapter: tl.tensor,
    o_m: tl.tensor,
    M: tl.tensor,
    HAS_MAPPING: tl.constexpr,
) -> tl.tensor:
    b_rows = o_m < M
    if HAS_MAPPING:
        b_rows = b_rows & (tl.load(mapping_ptr + o_m, mask=b_rows, other=-1) == i_adapter)
    return b_rows


@triton.jit(do_not_specialize=["M"])
def two_launch_partials(
    partial_ptr: tl.tensor,  # [slices, SPLITS, M, R] FP32
    x_ptr: tl.tensor,  # [M, K]
    a0_ptr: tl.tensor,  # [adapters, R, K], one pointer per slice
    a1_ptr: tl.tensor,
    a2_ptr: tl.tensor,
    mapping_ptr: tl.tensor,  # [M] int32
    M: tl.tensor,
    K: tl.constexpr,
    R: tl.constexpr,
    HAS_MAPPING: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Store the unscaled sum of blocks p, p + SPLITS, ... of one tile."""
    tiles_n = tl.cdiv(R, BLOCK_N)
    i_split = tl.program_id(0) % SPLITS
    i_tile = tl.program_id(0) // SPLITS
    i_slice = tl.program_id(1)
    i_adapter = tl.program_id(2)
    o_m = (i_tile // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = (i_tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    b_rows = _rows_of(mapping_ptr, i_adapter, o_m, M, HAS_MAPPING)
    if tl.max(b_rows.to(tl.int32), axis=0) > 0:
        a_ptr = _slice_pointer(a0_ptr, a1_ptr, a2_ptr, i_slice) + i_adapter.to(tl.int64) * R * K
        p_x = x_ptr + o_m[:, None] * K + o_k[None, :]
        p_a = a_ptr + o_n[None, :] * K + o_k[:, None]
        b_ranks = o_n < R
        b_sum = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for i_block in range(i_split, tl.cdiv(K, BLOCK_K), SPLITS):
            i_k = i_block * BLOCK_K
            if K % BLOCK_K == 0:
                b_x = tl.load(p_x + i_k, mask=b_rows[:, None], other=0.0)
                b_a = tl.load(p_a + i_k, mask=b_ranks[None, :], other=0.0)
            else:
                b_inside = o_k + i_k < K
                b_x = tl.load(p_x + i_k, mask=b_rows[:, None] & b_inside[None, :], other=0.0)
                b_a = tl.load(p_a + i_k, mask=b_inside[:, None] & b_ranks[None, :], other=0.0)
            b_sum += tl.dot(b_x, b_a, input_precision="ieee")
        p_out = partial_ptr + (
            ((i_slice.to(tl.int64) * SPLITS + i_split) * M + o_m)[:, None] * R + o_n[None, :]
        )
        tl.store(p_out, b_sum, mask=b_rows[:, None] & b_ranks[None, :])


@triton.jit(do_not_specialize=["M"])
def two_launch_sum(
    out_ptr: tl.tensor,  # [slices, M, R] FP32
    partial_ptr: tl.tensor,  # [slices, SPLITS, M, R] FP32
    mapping_ptr: tl.tensor,  # [M] int32
    M: tl.tensor,
    scale: tl.tensor,
    R: tl.constexpr,
    HAS_MAPPING: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Add the partials of one tile in increasing split order, starting from 0.0, then scale."""
    tiles_n = tl.cdiv(R, BLOCK_N)
    i_tile = tl.program_id(0)
    i_slice = tl.program_id(1)
    i_adapter = tl.program_id(2)
    o_m = (i_tile // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = (i_tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_rows = _rows_of(mapping_ptr, i_adapter, o_m, M, HAS_MAPPING)
    b_mask = b_rows[:, None] & (o_n < R)[None, :]
    o_out = o_m[:, None] * R + o_n[None, :]
    b_total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i in range(SPLITS):
        i_partial = (i_slice.to(tl.int64) * SPLITS + i) * M * R
        b_total += tl.load(partial_ptr + i_partial + o_out, mask=b_mask, other=0.0)
    tl.store(out_ptr + i_slice.to(tl.int64) * M * R + o_out, b_total * scale, mask=b_mask)


@triton.jit(do_not_specialize=["M", "splits"])
def partials_only(
    partial_ptr: tl.tensor,  # [splits, slices, M, R] FP32
    x_ptr: tl.tensor,  # [M, K]
    a0_ptr: tl.tensor,  # [R, K], one pointer per slice
    a1_ptr: tl.tensor,
    a2_ptr: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    R: tl.tensor,
    splits: tl.tensor,
    EVEN_K: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Store the sum of one split of one tile; with ONE_BLOCK a split is a single K block."""
    tiles_n = tl.cdiv(R, BLOCK_N)
    i_split = tl.program_id(0) % splits
    i_tile = tl.program_id(0) // splits
    i_slice = tl.program_id(1)
    slices = tl.num_programs(1)
    o_m = (i_tile // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = (i_tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    a_ptr = _slice_pointer(a0_ptr, a1_ptr, a2_ptr, i_slice)
    p_x = x_ptr + o_m[:, None] * K + o_k[None, :]
    p_a = a_ptr + o_n[None, :] * K + o_k[:, None]
    b_rows = (o_m < M)[:, None]
    b_ranks = (o_n < R)[None, :]
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if ONE_BLOCK:
        i_k = i_split * BLOCK_K
        b_inside = o_k + i_k < K
        if EVEN_K:
            b_x = tl.load(p_x + i_k, mask=b_rows, other=0.0)
            b_a = tl.load(p_a + i_k, mask=b_ranks, other=0.0)
        else:
            b_x = tl.load(p_x + i_k, mask=b_rows & b_inside[None, :], other=0.0)
            b_a = tl.load(p_a + i_k, mask=b_inside[:, None] & b_ranks, other=0.0)
        b_sum = tl.dot(b_x, b_a, b_sum, input_precision="ieee")
    else:
        for i_block in range(i_split, tl.cdiv(K, BLOCK_K), splits):
            i_k = i_block * BLOCK_K
            if EVEN_K:
                b_x = tl.load(p_x + i_k, mask=b_rows, other=0.0)
                b_a = tl.load(p_a + i_k, mask=b_ranks, other=0.0)
            else:
                b_inside = o_k + i_k < K
                b_x = tl.load(p_x + i_k, mask=b_rows & b_inside[None, :], other=0.0)
                b_a = tl.load(p_a + i_k, mask=b_inside[:, None] & b_ranks, other=0.0)
            b_sum = tl.dot(b_x, b_a, b_sum, input_precision="ieee")
    o_out = ((i_split.to(tl.int64) * slices + i_slice) * M + o_m)[:, None] * R + o_n[None, :]
    tl.store(partial_ptr + o_out, b_sum, mask=b_rows & b_ranks)


@triton.jit(do_not_specialize=["M", "splits"])
def partials_only_by_row(
    partial_ptr: tl.tensor,  # [splits, slices, M, R] FP32
    x_ptr: tl.tensor,  # [M, K]
    a0_ptr: tl.tensor,  # [R, K], one pointer per slice
    a1_ptr: tl.tensor,
    a2_ptr: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    R: tl.tensor,
    splits: tl.tensor,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Store the sum of one K block for one row of x, without a matrix instruction."""
    i_split = tl.program_id(0) % splits
    i_tile = tl.program_id(0) // splits
    i_slice = tl.program_id(1)
    i_row = tl.program_id(2)
    slices = tl.num_programs(1)
    o_n = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = i_split * BLOCK_K + tl.arange(0, BLOCK_K)
    a_ptr = _slice_pointer(a0_ptr, a1_ptr, a2_ptr, i_slice)
    b_ranks = o_n < R
    p_x = x_ptr + i_row.to(tl.int64) * K + o_k
    p_a = a_ptr + o_n[:, None] * K + o_k[None, :]
    if EVEN_K:
        b_x = tl.load(p_x)
        b_a = tl.load(p_a, mask=b_ranks[:, None], other=0.0)
    else:
        b_x = tl.load(p_x, mask=o_k < K, other=0.0)
        b_a = tl.load(p_a, mask=b_ranks[:, None] & (o_k < K)[None, :], other=0.0)
    b_sum = tl.sum(b_a.to(tl.float32) * b_x.to(tl.float32)[None, :], axis=1)
    o_out = ((i_split.to(tl.int64) * slices + i_slice) * M + i_row) * R + o_n
    tl.store(partial_ptr + o_out, b_sum, mask=b_ranks)
