"""Triton kernels for CUDA: the orders of `specification`, on hardware.

Good enough to trace with: one launch for up to three slices, any K, many adapters.

What a kernel keeps of the specification: how K is cut and dealt, FP32 accumulation block after
block, where the scale is applied and how partials are added. What it does not keep: the order
inside one block and between a block and its accumulator belongs to the matrix instruction (FP32
inputs use fused multiply-adds instead, one element of K after the other). Elsewhere contraction is
switched off by whoever launches. The number of rows is never specialised on.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _live_rows(
    mapping_ptr: tl.tensor,
    i_adapter: tl.tensor,
    o_m: tl.tensor,
    M: tl.tensor,
    adapters: tl.tensor,
    HAS_MAPPING: tl.constexpr,
) -> tl.tensor:
    """Tell which rows this program owns; adapter 0 owns rows with an impossible index too."""
    b_rows = o_m < M
    if HAS_MAPPING:
        b_adapter = tl.load(mapping_ptr + o_m, mask=b_rows, other=-1)
        b_stray = (b_adapter >= adapters) & (i_adapter == 0)
        b_rows = b_rows & ((b_adapter == i_adapter) | b_stray)
    return b_rows


@triton.jit
def _partial_sum(
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    mapping_ptr: tl.tensor,
    i_split: tl.tensor,
    o_m: tl.tensor,
    o_n: tl.tensor,
    b_rows: tl.tensor,
    K: tl.tensor,
    R: tl.tensor,
    x_stride: tl.tensor,
    adapters: tl.tensor,
    HAS_MAPPING: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Add up blocks i_split, i_split + SPLITS, ... of one tile in FP32."""
    o_k = tl.arange(0, BLOCK_K)
    p_x = x_ptr + o_m[:, None] * x_stride + o_k[None, :]
    p_a = a_ptr + o_n[None, :] * K + o_k[:, None]
    b_ranks = o_n < R
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i_block in range(i_split, tl.cdiv(K, BLOCK_K), SPLITS):
        i_k = i_block * BLOCK_K
        if EVEN_K:
            b_x = tl.load(p_x + i_k, mask=b_rows[:, None], other=0.0)
            b_a = tl.load(p_a + i_k, mask=b_ranks[None, :], other=0.0)
        else:
            b_inside = o_k + i_k < K
            b_x = tl.load(p_x + i_k, mask=b_rows[:, None] & b_inside[None, :], other=0.0)
            b_a = tl.load(p_a + i_k, mask=b_inside[:, None] & b_ranks[None, :], other=0.0)
        b_sum = tl.dot(b_x, b_a, b_sum, input_precision="ieee")
    if HAS_MAPPING:
        b_adapter = tl.load(mapping_ptr + o_m, mask=b_rows, other=-1)
        b_sum = tl.where((b_adapter >= adapters)[:, None], float("nan"), b_sum)
    return b_sum


@triton.jit(do_not_specialize=["M", "adapters"])
def lora_shrink_unsplit(
    out_ptr: tl.tensor,  # [slices, M, R] FP32
    x_ptr: tl.tensor,  # [M, K]
    a0_ptr: tl.tensor,  # [adapters, R, K], one pointer per slice
    a1_ptr: tl.tensor,
    a2_ptr: tl.tensor,
    mapping_ptr: tl.tensor,  # [M] int32
    M: tl.tensor,
    K: tl.tensor,
    R: tl.tensor,
    x_stride: tl.tensor,
    adapters: tl.tensor,
    scale: tl.tensor,
    HAS_MAPPING: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Sum all of K in one program.

    Order:
        Blocks 0, 1, 2, ... in FP32, then the scale.
    """
    tiles_n = tl.cdiv(R, BLOCK_N)
    i_tile = tl.program_id(0)
    i_slice = tl.program_id(1)
    i_adapter = tl.program_id(2)
    o_m = (i_tile // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = (i_tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_rows = _live_rows(mapping_ptr, i_adapter, o_m, M, adapters, HAS_MAPPING)
    if tl.max(b_rows.to(tl.int32), axis=0) > 0:
        a_ptr = a0_ptr
        if i_slice == 1:
            a_ptr = a1_ptr
        if i_slice == 2:
            a_ptr = a2_ptr
        a_ptr += i_adapter.to(tl.int64) * R * K
        b_sum = _partial_sum(
            x_ptr,
            a_ptr,
            mapping_ptr,
            0,
            o_m,
            o_n,
            b_rows,
            K,
            R,
            x_stride,
            adapters,
            HAS_MAPPING,
            EVEN_K,
            1,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        p_out = out_ptr + (i_slice.to(tl.int64) * M + o_m)[:, None] * R + o_n[None, :]
        tl.store(p_out, b_sum * scale, mask=b_rows[:, None] & (o_n < R)[None, :])


@triton.jit(do_not_specialize=["M", "adapters"])
def lora_shrink_atomic(
    out_ptr: tl.tensor,  # [slices, M, R] FP32, zeroed
    x_ptr: tl.tensor,  # [M, K]
    a0_ptr: tl.tensor,  # [adapters, R, K], one pointer per slice
    a1_ptr: tl.tensor,
    a2_ptr: tl.tensor,
    mapping_ptr: tl.tensor,  # [M] int32
    M: tl.tensor,
    K: tl.tensor,
    R: tl.tensor,
    x_stride: tl.tensor,
    adapters: tl.tensor,
    scale: tl.tensor,
    HAS_MAPPING: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Sum each split in a program of its own and add it to the output when it is ready.

    Order:
        Within a split as in the specification; the scaled partials in order of arrival.
    """
    tiles_n = tl.cdiv(R, BLOCK_N)
    i_split = tl.program_id(0) % SPLITS
    i_tile = tl.program_id(0) // SPLITS
    i_slice = tl.program_id(1)
    i_adapter = tl.program_id(2)
    o_m = (i_tile // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = (i_tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_rows = _live_rows(mapping_ptr, i_adapter, o_m, M, adapters, HAS_MAPPING)
    if tl.max(b_rows.to(tl.int32), axis=0) > 0:
        a_ptr = a0_ptr
        if i_slice == 1:
            a_ptr = a1_ptr
        if i_slice == 2:
            a_ptr = a2_ptr
        a_ptr += i_adapter.to(tl.int64) * R * K
        b_sum = _partial_sum(
            x_ptr,
            a_ptr,
            mapping_ptr,
            i_split,
            o_m,
            o_n,
            b_rows,
            K,
            R,
            x_stride,
            adapters,
            HAS_MAPPING,
            EVEN_K,
            SPLITS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        p_out = out_ptr + (i_slice.to(tl.int64) * M + o_m)[:, None] * R + o_n[None, :]
        b_mask = b_rows[:, None] & (o_n < R)[None, :]
        tl.atomic_add(p_out, b_sum * scale, mask=b_mask, sem="relaxed")


@triton.jit(do_not_specialize=["M", "adapters"])
def lora_shrink_deterministic(
    out_ptr: tl.tensor,  # [slices, M, R] FP32
    scratch_ptr: tl.tensor,  # [SPLITS, slices, M, R] FP32
    counter_ptr: tl.tensor,  # [adapters, slices, tiles] int32, 0 before and after
    x_ptr: tl.tensor,  # [M, K]
    a0_ptr: tl.tensor,  # [adapters, R, K], one pointer per slice
    a1_ptr: tl.tensor,
    a2_ptr: tl.tensor,
    mapping_ptr: tl.tensor,  # [M] int32
    M: tl.tensor,
    K: tl.tensor,
    R: tl.tensor,
    x_stride: tl.tensor,
    adapters: tl.tensor,
    scale: tl.tensor,
    HAS_MAPPING: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Sum each split in a program of its own; the last to finish a tile adds the partials up.

    Order:
        Within a split as in the specification; the partials in increasing split order, starting
        from 0.0; then the scale.

    Source:
        Paper, Algorithm 1, without its initialisation launch.
    """
    tiles_n = tl.cdiv(R, BLOCK_N)
    i_split = tl.program_id(0) % SPLITS
    i_tile = tl.program_id(0) // SPLITS
    i_slice = tl.program_id(1)
    i_adapter = tl.program_id(2)
    slices = tl.num_programs(1)
    o_m = (i_tile // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = (i_tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_rows = _live_rows(mapping_ptr, i_adapter, o_m, M, adapters, HAS_MAPPING)
    if tl.max(b_rows.to(tl.int32), axis=0) > 0:
        a_ptr = a0_ptr
        if i_slice == 1:
            a_ptr = a1_ptr
        if i_slice == 2:
            a_ptr = a2_ptr
        a_ptr += i_adapter.to(tl.int64) * R * K
        b_sum = _partial_sum(
            x_ptr,
            a_ptr,
            mapping_ptr,
            i_split,
            o_m,
            o_n,
            b_rows,
            K,
            R,
            x_stride,
            adapters,
            HAS_MAPPING,
            EVEN_K,
            SPLITS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        o_out = (i_slice.to(tl.int64) * M + o_m)[:, None] * R + o_n[None, :]
        b_mask = b_rows[:, None] & (o_n < R)[None, :]
        split_stride = slices.to(tl.int64) * M * R
        tl.store(scratch_ptr + i_split * split_stride + o_out, b_sum, mask=b_mask)
        # Every thread's stores come before the one thread that takes the ticket releases them,
        # and that thread's acquire comes before any thread reads them back.
        tl.debug_barrier()
        p_counter = (
            counter_ptr + (i_adapter * slices + i_slice) * (tl.num_programs(0) // SPLITS) + i_tile
        )
        b_ticket = tl.atomic_add(p_counter, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if b_ticket == SPLITS - 1:
            b_total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for i in range(SPLITS):
                b_total += tl.load(
                    scratch_ptr + i * split_stride + o_out,
                    mask=b_mask,
                    other=0.0,
                    cache_modifier=".cg",
                )
            tl.store(out_ptr + o_out, b_total * scale, mask=b_mask)
            tl.store(p_counter, 0)
