"""Triton kernels for CUDA: the orders of `specification`, on hardware.

Here is what all kernels share, and the kernels whose blocks hand nothing over: `unsplit` and
`atomic`. Those that hand partials over in one launch are in `triton_hand_over`, those that do so
between two launches in `triton_two_launches`.

What a kernel keeps of the specification: how K is cut and dealt, FP32 accumulation block after
block, where the scale is applied and how partials are added. What it does not keep: the order
inside one block and between a block and its accumulator belongs to the matrix instruction (FP32
inputs use fused multiply-adds instead, one element of K after the other). Elsewhere contraction is
switched off by whoever launches. One compiled kernel serves every number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What every launch leaves open: never specialised on, so it cannot choose another binary.
UNSPECIALISED = ("M", "adapters", "out_slice_stride")


@triton.jit
def tile_of_program(
    M: tl.tensor,
    SPLITS: tl.constexpr,
    SLICES: tl.constexpr,
    TILES_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS_FIRST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Say what a program works on: split, slice, tile, its rows [BLOCK_M] and ranks [BLOCK_N].

    With SPLITS_FIRST the splits of a tile are neighbours and slices are furthest apart, as in vLLM.
    Otherwise slices are neighbours, then tiles of ranks: they read the same part of x.
    """
    i = tl.program_id(0)
    if SPLITS_FIRST:
        i_split = i % SPLITS
        i = i // SPLITS
        i_n = i % TILES_N
        i = i // TILES_N
        tiles_m = tl.cdiv(M, BLOCK_M)
        i_m = i % tiles_m
        i_slice = i // tiles_m
    else:
        i_slice = i % SLICES
        i = i // SLICES
        i_n = i % TILES_N
        i = i // TILES_N
        i_split = i % SPLITS
        i_m = i // SPLITS
    o_m = i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = (i_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    return i_split, i_slice, i_m * TILES_N + i_n, o_m, o_n


@triton.jit
def adapters_of_rows(
    mapping_ptr: tl.tensor, o_m: tl.tensor, M: tl.tensor, HAS_MAPPING: tl.constexpr
) -> tl.tensor:
    """Load the adapter of each row, [BLOCK_M] int32; -1 for none and beyond the last row."""
    if HAS_MAPPING:
        b_adapter = tl.load(mapping_ptr + o_m, mask=o_m < M, other=-1)
    else:
        b_adapter = tl.where(o_m < M, 0, -1)
    return b_adapter


@triton.jit
def rows_of_adapter(b_adapter: tl.tensor, i_adapter: tl.tensor, adapters: tl.tensor) -> tl.tensor:
    """Tell which rows a program owns; adapter 0 owns rows with an impossible index too."""
    return (b_adapter == i_adapter) | ((b_adapter >= adapters) & (i_adapter == 0))


@triton.jit
def has_work(b_owned: tl.tensor, ONE_ADAPTER: tl.constexpr) -> tl.tensor:
    """Tell whether a program has rows to sum; with one adapter it does not wait to find out."""
    if ONE_ADAPTER:
        return True
    else:  # noqa: RET505 (Triton compiles what follows a return, but not a dead else)
        return tl.max(b_owned.to(tl.int32), axis=0) > 0


@triton.jit
def partial_sum(
    x_ptr: tl.tensor,
    a0_ptr: tl.tensor,
    a1_ptr: tl.tensor,
    a2_ptr: tl.tensor,
    b_adapter: tl.tensor,
    b_owned: tl.tensor,
    i_adapter: tl.tensor,
    i_slice: tl.tensor,
    i_split: tl.tensor,
    o_m: tl.tensor,
    o_n: tl.tensor,
    M: tl.tensor,
    K: tl.tensor,
    R: tl.tensor,
    x_stride: tl.tensor,
    a_adapter_stride: tl.tensor,
    a_rank_stride: tl.tensor,
    adapters: tl.tensor,
    HAS_MAPPING: tl.constexpr,
    ONE_ADAPTER: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    X_EVICTION: tl.constexpr,
    A_EVICTION: tl.constexpr,
) -> tl.tensor:
    """Add up blocks i_split, i_split + SPLITS, ... of one tile in FP32.

    Rows with an impossible adapter index come out as NaN. With one adapter, rows without it are
    summed too, as the mapping may arrive later than x and A, and are not stored.
    """
    a_ptr = a0_ptr
    # Which of the three pointers exist is decided by the compiler, which of them it is by the GPU.
    if SLICES > 1:  # noqa: SIM102
        if i_slice == 1:
            a_ptr = a1_ptr
    if SLICES > 2:  # noqa: SIM102
        if i_slice == 2:
            a_ptr = a2_ptr
    if not ONE_ADAPTER:
        a_ptr += i_adapter.to(tl.int64) * a_adapter_stride
    o_k = tl.arange(0, BLOCK_K)
    p_x = x_ptr + o_m[:, None] * x_stride + o_k[None, :]
    p_a = a_ptr + o_n[None, :] * a_rank_stride + o_k[:, None]
    b_rows = o_m < M
    if not ONE_ADAPTER:
        b_rows = b_owned
    b_ranks = o_n < R
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i_block in range(i_split, tl.cdiv(K, BLOCK_K), SPLITS):
        i_k = i_block * BLOCK_K
        b_x_mask = b_rows[:, None]
        b_a_mask = b_ranks[None, :]
        if not EVEN_K:
            b_inside = o_k.to(tl.int64) + i_k < K
            b_x_mask = b_x_mask & b_inside[None, :]
            b_a_mask = b_a_mask & b_inside[:, None]
        b_x = tl.load(p_x + i_k, mask=b_x_mask, other=0.0, eviction_policy=X_EVICTION)
        b_a = tl.load(p_a + i_k, mask=b_a_mask, other=0.0, eviction_policy=A_EVICTION)
        b_sum = tl.dot(b_x, b_a, b_sum, input_precision="ieee")
    if HAS_MAPPING:
        b_sum = tl.where((b_adapter >= adapters)[:, None], float("nan"), b_sum)
    return b_sum


@triton.jit
def output_pointers(
    out_ptr: tl.tensor,
    i_slice: tl.tensor,
    o_m: tl.tensor,
    o_n: tl.tensor,
    out_slice_stride: tl.tensor,
    out_row_stride: tl.tensor,
    out_rank_stride: tl.tensor,
    OUT_ALIGNED: tl.constexpr,
) -> tl.tensor:
    """Point at the outputs of a tile, [BLOCK_M, BLOCK_N].

    OUT_ALIGNED promises that slices lie a multiple of 16 elements apart, which the compiler cannot
    know as this distance is never specialised on, but needs to store several ranks at once.
    """
    if OUT_ALIGNED:
        out_slice_stride = out_slice_stride // 16 * 16
    p_out = out_ptr + i_slice.to(tl.int64) * out_slice_stride
    return p_out + o_m[:, None] * out_row_stride + o_n[None, :] * out_rank_stride


@triton.jit
def count_launch(counter_ptr: tl.tensor, COUNT: tl.constexpr) -> None:
    """Raise the counter of launches by 1, once per launch, if somebody counts."""
    if COUNT:  # noqa: SIM102 (decided by the compiler)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.atomic_add(counter_ptr, 1, sem="relaxed")


@triton.jit
def zero_rows_without_adapter(
    p_out: tl.tensor,
    b_adapter: tl.tensor,
    i_adapter: tl.tensor,
    i_split: tl.tensor,
    b_inside: tl.tensor,
    HAS_MAPPING: tl.constexpr,
) -> None:
    """Store 0.0 where no adapter's program does, from the programs of adapter 0 and split 0."""
    if HAS_MAPPING:
        b_mask = b_inside & (b_adapter < 0)[:, None] & (i_adapter == 0) & (i_split == 0)
        tl.store(p_out, tl.zeros(p_out.shape, dtype=tl.float32), mask=b_mask)


@triton.jit(do_not_specialize=UNSPECIALISED)
def lora_shrink_unsplit(
    out_ptr: tl.tensor,  # [slices, M, R] FP32
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
    SPLITS: tl.constexpr,  # 1
    SLICES: tl.constexpr,
    TILES_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    X_EVICTION: tl.constexpr,
    A_EVICTION: tl.constexpr,
) -> None:
    """Sum all of K in one program.

    Order:
        Blocks 0, 1, 2, ... in FP32, then the scale.
    """
    count_launch(launches_ptr, COUNT_LAUNCHES)
    i_split, i_slice, _, o_m, o_n = tile_of_program(
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
        tl.store(p_out, b_sum * scale, mask=b_owned[:, None] & b_inside)
    zero_rows_without_adapter(p_out, b_adapter, i_adapter, i_split, b_inside, HAS_MAPPING)


@triton.jit(do_not_specialize=UNSPECIALISED)
def lora_shrink_atomic(
    out_ptr: tl.tensor,  # [slices, M, R] FP32, zeroed
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
    """Sum each split in a program of its own and add it to the output when it is ready.

    Order:
        Within a split as in the specification; the scaled partials in order of arrival.

    Source:
        vLLM 0.26 to 0.32, _lora_shrink_kernel.
    """
    count_launch(launches_ptr, COUNT_LAUNCHES)
    i_split, i_slice, _, o_m, o_n = tile_of_program(
        M, SPLITS, SLICES, TILES_N, BLOCK_M, BLOCK_N, True
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
        p_out = output_pointers(
            out_ptr,
            i_slice,
            o_m,
            o_n,
            out_slice_stride,
            out_row_stride,
            out_rank_stride,
            OUT_ALIGNED,
        )
        b_mask = b_owned[:, None] & (o_n < R)[None, :]
        tl.atomic_add(p_out, b_sum * scale, mask=b_mask, sem="relaxed")
