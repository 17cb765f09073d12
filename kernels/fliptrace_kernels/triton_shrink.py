"""Triton kernels for CUDA: the orders of `specification`, on hardware.

Good enough to trace with: one launch for up to three slices, any K, many adapters. It is imported
on first use only, because Triton is not on every machine.

What a kernel keeps of the specification: how K is cut and dealt, FP32 accumulation block after
block, where the scale is applied and how partials are added. What it does not keep: the order
inside one block and between a block and its accumulator belongs to the matrix instruction. Tiles,
warps and stages come from a table and depend on rank, K block and dtype alone; the number of rows
is never specialised on. Contraction to fused multiply-adds is switched off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from fliptrace_kernels.configurations import Launch, launch_for
from fliptrace_kernels.errors import LaunchError
from fliptrace_kernels.reduction import Reduction

SLICES_PER_LAUNCH: Final = 3  # q, k and v


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


def shrink(
    x: Tensor,
    a_slices: Sequence[Tensor],
    mapping: Tensor | None,
    reduction: Reduction,
    scale: float,
) -> Tensor:
    """Run one shrink on the device of x; arguments as `lora_shrink` has checked them.

    Returns:
        Outputs, [slices, M, R], FP32, contiguous.

    Raises:
        LaunchError: if a tile does not fit this device.
    """
    return _shrink(x, a_slices, mapping, reduction, scale, None)


def shrink_with_partials(
    x: Tensor,
    a_slices: Sequence[Tensor],
    mapping: Tensor | None,
    reduction: Reduction,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run one `deterministic` shrink and keep the partials it added.

    Args:
        x: as for `shrink`.
        a_slices: as for `shrink`, at most three.
        mapping: as for `shrink`.
        reduction: `deterministic` with at least two splits.
        scale: as for `shrink`.

    Returns:
        Outputs, [slices, M, R], and unscaled partials, [S, slices, M, R], both FP32. Partials of
        rows without an adapter are NaN.

    Raises:
        LaunchError: if the call has no such partials, or a tile does not fit this device.
    """
    if reduction.kind != "deterministic" or reduction.splits == 1:
        raise LaunchError(f"only deterministic reductions store partials; got {reduction}")
    if len(a_slices) > SLICES_PER_LAUNCH:
        raise LaunchError(
            f"partials are kept for at most {SLICES_PER_LAUNCH} slices; got {len(a_slices)}"
        )
    kept = torch.full(
        (reduction.splits, len(a_slices), x.shape[0], a_slices[0].shape[-2]),
        float("nan"),
        dtype=torch.float32,
        device=x.device,
    )
    return _shrink(x, a_slices, mapping, reduction, scale, kept), kept


def describe_launch(
    x_shape: tuple[int, ...],
    a_shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    reduction: Reduction,
) -> dict[str, Any]:
    """Return what `shrink` launches for these shapes, as JSON values; one grid per launch."""
    rank = a_shapes[0][-2]
    adapters = a_shapes[0][0] if len(a_shapes[0]) == 3 else 1
    launch = launch_for(rank=rank, block_k=reduction.block_k, element_bytes=dtype.itemsize)
    kernel = _KERNELS[_kernel_kind(reduction)]
    grids = [
        list(_grid(x_shape[0], rank, slices, adapters, reduction.splits, launch))
        for slices in _slices_per_launch(len(a_shapes))
    ]
    return {
        "implementation": "triton",
        "kernel": kernel.fn.__name__,
        "grid": grids if x_shape[0] else [],
        "block_m": launch.block_m,
        "block_n": launch.block_n,
        "block_k": reduction.block_k,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "fp_contraction": "off (enable_fp_fusion=False)",
        "triton": triton.__version__,
    }


_KERNELS: Final[dict[str, Any]] = {
    "unsplit": lora_shrink_unsplit,
    "atomic": lora_shrink_atomic,
    "deterministic": lora_shrink_deterministic,
}


def _kernel_kind(reduction: Reduction) -> str:
    return "unsplit" if reduction.splits == 1 else reduction.kind


def _slices_per_launch(slices: int) -> list[int]:
    return [min(SLICES_PER_LAUNCH, slices - i) for i in range(0, slices, SLICES_PER_LAUNCH)]


def _grid(
    rows: int, rank: int, slices: int, adapters: int, splits: int, launch: Launch
) -> tuple[int, int, int]:
    tiles = -(-rows // launch.block_m) * -(-rank // launch.block_n)
    return tiles * splits, slices, adapters


def _shrink(
    x: Tensor,
    a_slices: Sequence[Tensor],
    mapping: Tensor | None,
    reduction: Reduction,
    scale: float,
    kept: Tensor | None,
) -> Tensor:
    rows, size = x.shape
    first = a_slices[0]
    rank = first.shape[-2]
    adapters = first.shape[0] if first.ndim == 3 else 1
    kind = _kernel_kind(reduction)
    # Every element is stored unless partials are added to it or its row has no adapter.
    make = torch.zeros if kind == "atomic" or mapping is not None else torch.empty
    out = make((len(a_slices), rows, rank), dtype=torch.float32, device=x.device)
    if rows == 0:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    launch = launch_for(rank=rank, block_k=reduction.block_k, element_bytes=x.element_size())
    constants = {
        "HAS_MAPPING": mapping is not None,
        "EVEN_K": size % reduction.block_k == 0,
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "BLOCK_K": reduction.block_k,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": False,
    }
    if kind != "unsplit":
        constants["SPLITS"] = reduction.splits
    for start in range(0, len(a_slices), SLICES_PER_LAUNCH):
        weights = [a.contiguous() for a in a_slices[start : start + SLICES_PER_LAUNCH]]
        grid = _grid(rows, rank, len(weights), adapters, reduction.splits, launch)
        arguments = [
            x,
            *weights,
            *weights[:1] * (SLICES_PER_LAUNCH - len(weights)),
            x if mapping is None else mapping,
            rows,
            size,
            rank,
            size if rows == 1 else x.stride(0),
            adapters,
            float(scale),
        ]
        target = out[start:] if start else out
        with _device_of(x):
            if kind == "deterministic":
                with _hand_over(x.device, grid, target, reduction.splits, kept) as buffers:
                    _start(_KERNELS[kind], grid, [target, *buffers, *arguments], constants)
            else:
                _start(_KERNELS[kind], grid, [target, *arguments], constants)
    return out


def _start(
    kernel: Any, grid: tuple[int, int, int], arguments: list[Any], constants: dict[str, Any]
) -> None:
    launcher: Callable[..., object] = kernel[grid]
    try:
        launcher(*arguments, **constants)
    except OutOfResources as error:
        raise LaunchError(
            f"a tile of {kernel.fn.__name__} must fit this device; {error} "
            f"Use a smaller K block than {constants['BLOCK_K']}"
        ) from error


def _device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


_buffers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
"""Scratch (FP32) and counters (int32, all 0 between launches) per device index and stream."""


@contextlib.contextmanager
def _hand_over(
    device: torch.device,
    grid: tuple[int, int, int],
    out: Tensor,
    splits: int,
    kept: Tensor | None,
) -> Any:
    """Lend scratch and zeroed counters to one launch of `lora_shrink_deterministic`.

    Launches on one stream follow one another, so they share buffers. A captured launch may be
    replayed next to anything, so it owns its buffers, which the capture zeroes. If the launch
    does not start, its buffers are dropped: the next call begins with fresh ones.
    """
    scratch_size = splits * grid[1] * out.shape[1] * out.shape[2]
    counters_size = grid[0] // splits * grid[1] * grid[2]
    if kept is not None or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        scratch = kept
        if scratch is None:
            scratch = torch.empty(scratch_size, dtype=torch.float32, device=device)
        yield scratch, torch.zeros(counters_size, dtype=torch.int32, device=device)
        return
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    found = _buffers.get(key)
    if found is None or found[0].numel() < scratch_size or found[1].numel() < counters_size:
        found = _buffers[key] = (
            torch.empty(scratch_size, dtype=torch.float32, device=device),
            torch.zeros(max(counters_size, 1024), dtype=torch.int32, device=device),
        )
    try:
        yield found
    except BaseException:
        _buffers.pop(key, None)
        raise
