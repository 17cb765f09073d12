"""Mutants of the hand-over kernel, and delays that make races likely: what a stress test can catch.

A stress test that no broken kernel fails proves nothing. `run_mutant` runs a copy of the kernel of
`deterministic` with one thing broken:

    faithful        nothing; its instructions are those of the real kernel (tests/kernels)
    no barrier      no block barrier before the ticket
    relaxed ticket  the ticket neither publishes nor acquires the partials
    no reset        the counter is not set back to 0

Delays are injected before a partial is stored, per block and per warp, so that partials arrive in
any order, and the warps of a block far apart. Scratch is filled with NaN before each launch, and so
is the output: a partial that was read too early, or an output that was never written, shows.

Not here: launching many of them and comparing; that is the stress test's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from fliptrace_kernels import parse_reduction
from fliptrace_kernels.configurations import launch_for
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
    zero_rows_without_adapter,
)

MUTANTS: Final[dict[str, dict[str, Any]]] = {
    "faithful": {"BARRIER": True, "TICKET": "acq_rel", "RESET": True},
    "no barrier": {"BARRIER": False, "TICKET": "acq_rel", "RESET": True},
    "relaxed ticket": {"BARRIER": True, "TICKET": "relaxed", "RESET": True},
    "no reset": {"BARRIER": True, "TICKET": "acq_rel", "RESET": False},
}
"""What each mutant does, by name."""


@triton.jit
def _now() -> tl.tensor:
    """Read the global timer, nanoseconds."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _store_late(
    p_partial: tl.tensor,
    b_sum: tl.tensor,
    b_mask: tl.tensor,
    delays_ptr: tl.tensor,
    warps: tl.constexpr,
) -> None:
    """Store a partial after as many nanoseconds as this block's entry says for each warp.

    Wait and store are one piece of assembly: Triton may put a barrier between two.
    """
    i_block = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred again, stored;
        .reg .u32 warp, delay;
        .reg .u64 address, now, length;
        mov.u32 warp, %tid.x;
        shr.u32 warp, warp, 5;
        mul.wide.u32 address, warp, 4;
        add.u64 address, address, $4;
        ld.global.u32 delay, [address];
        cvt.u64.u32 length, delay;
        wait:
        mov.u64 now, %globaltimer;
        sub.u64 now, now, $5;
        setp.lt.u64 again, now, length;
        @again bra wait;
        setp.ne.u32 stored, $3, 0;
        @stored st.global.f32 [$1], $2;
        mov.u32 $0, 0;
        }
        """,
        "=r,l,f,r,l,l",
        [
            p_partial.to(tl.int64),
            b_sum,
            b_mask.to(tl.int32),
            (delays_ptr + i_block * warps).to(tl.int64),
            _now(),
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _ticket_without_barrier(p_counter: tl.tensor) -> tl.tensor:
    """Take a ticket without waiting for the other threads of the block first.

    Triton's own atomic has a barrier before it whenever the block has used shared memory. The one
    after it hands the ticket to the other threads, and no kernel can do without.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .pred first;
        .reg .u32 thread, ticket;
        .shared .align 4 .b32 shared_ticket;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first atom.global.gpu.acq_rel.add.u32 ticket, [$1], 1;
        @first st.shared.u32 [shared_ticket], ticket;
        bar.sync 0;
        ld.shared.u32 $0, [shared_ticket];
        }
        """,
        "=r,l",
        [p_counter.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=UNSPECIALISED)
def lora_shrink_mutant(
    out_ptr: tl.tensor,  # [slices, M, R] FP32
    scratch_ptr: tl.tensor,  # [SPLITS, slices, M, R] FP32
    counter_ptr: tl.tensor,  # [adapters, slices, tiles] int32
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
    delays_ptr: tl.tensor,  # [blocks, warps] int32, nanoseconds
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
    BARRIER: tl.constexpr,
    TICKET: tl.constexpr,
    RESET: tl.constexpr,
    DELAYED_WARPS: tl.constexpr,  # 0: no delays
) -> None:
    """Do what `lora_shrink_deterministic` does, except for what the last four arguments say."""
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
        if DELAYED_WARPS > 0:
            p_partial = p_partials + i_split * split_stride
            _store_late(p_partial, b_sum, b_mask, delays_ptr, DELAYED_WARPS)
        else:
            tl.store(p_partials + i_split * split_stride, b_sum, mask=b_mask)
        if BARRIER:
            tl.debug_barrier()
        tiles = tl.num_programs(0) // (SPLITS * SLICES)
        p_counter = counter_ptr + (i_adapter * SLICES + i_slice) * tiles + i_tile
        if BARRIER:
            b_ticket = tl.atomic_add(p_counter, 1, sem=TICKET, scope="gpu")
            tl.debug_barrier()
        else:
            b_ticket = _ticket_without_barrier(p_counter)
        if b_ticket == SPLITS - 1:
            b_total = add_in_order(p_partials, split_stride, b_mask, SPLITS)
            tl.store(p_out, b_total * scale, mask=b_mask)
            if RESET:
                tl.store(p_counter, 0)
    zero_rows_without_adapter(p_out, b_adapter, i_adapter, i_split, b_inside, HAS_MAPPING)


def delays_shape(
    x: Tensor, a_slices: Sequence[Tensor], reduction: str = "deterministic:8"
) -> tuple[int, int]:
    """Return [blocks, warps] of the launch that `run_mutant` starts for these arguments."""
    named = parse_reduction(reduction)
    first = a_slices[0]
    rank = first.shape[-2]
    adapters = first.shape[0] if first.ndim == 3 else 1
    launch = launch_for(
        kind=named.kind, rank=rank, block_k=named.block_k, element_bytes=x.element_size()
    )
    tiles = -(-x.shape[0] // launch.block_m) * -(-rank // launch.block_n)
    return tiles * named.splits * len(a_slices) * adapters, launch.num_warps


def run_mutant(
    name: str,
    x: Tensor,
    a_slices: Sequence[Tensor],
    mapping: Tensor | None = None,
    *,
    reduction: str = "deterministic:8",
    scale: float = 1.0,
    delays: Tensor | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """Run one launch of a mutant on the current stream.

    Args:
        name: a key of MUTANTS.
        x: inputs, [M, K], contiguous, BF16, FP16 or FP32, on CUDA.
        a_slices: one to three contiguous tensors, all [R, K] or all [adapters, R, K].
        mapping: adapter of each row, [M] int32, or None.
        reduction: `deterministic:S`, S at least 2.
        scale: factor on the total.
        delays: nanoseconds per block and warp, int32, of `delays_shape`, on the device of x; at the
            resolution of %globaltimer. None injects nothing.
        counters: int32, at least blocks / splits of them, as the launch before left them. None takes
            new ones, all 0. The mutant without a reset needs those of its last launch to fail.

    Returns:
        Outputs, [slices, M, R], FP32; NaN where nobody wrote.
    """
    named = parse_reduction(reduction)
    rows, size = x.shape
    first = a_slices[0]
    rank = first.shape[-2]
    adapters = first.shape[0] if first.ndim == 3 else 1
    slices = len(a_slices)
    launch = launch_for(
        kind=named.kind, rank=rank, block_k=named.block_k, element_bytes=x.element_size()
    )
    blocks, warps = delays_shape(x, a_slices, reduction)
    options: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    out = torch.full((slices, rows, rank), float("nan"), **options)
    scratch = torch.full((named.splits, slices, rows, rank), float("nan"), **options)
    if counters is None:
        counters = torch.zeros(blocks // named.splits, dtype=torch.int32, device=x.device)
    launcher: Any = lora_shrink_mutant[(blocks // adapters, adapters, 1)]
    launcher(
        out,
        scratch,
        counters,
        x,
        *a_slices,
        *a_slices[:1] * (3 - slices),
        x if mapping is None else mapping,
        x,
        rows,
        size,
        rank,
        *out.stride(),
        size,
        first.stride(0) if first.ndim == 3 else 0,
        size,
        adapters,
        scale,
        counters if delays is None else delays,
        HAS_MAPPING=mapping is not None,
        OUT_ALIGNED=rank % 16 == 0,
        ONE_ADAPTER=adapters == 1,
        COUNT_LAUNCHES=False,
        EVEN_K=size % named.block_k == 0,
        SPLITS=named.splits,
        SLICES=slices,
        TILES_N=-(-rank // launch.block_n),
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=named.block_k,
        X_EVICTION=launch.x_eviction,
        A_EVICTION=launch.a_eviction,
        DELAYED_WARPS=0 if delays is None else warps,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=False,
        **MUTANTS[name],
    )
    return out
