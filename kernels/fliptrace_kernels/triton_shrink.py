"""Start the Triton kernels and keep the buffers they hand partials over in.

This module is imported on first use only, because Triton is not on every machine. Tiles, warps
and stages come from a table and depend on rank, K block and dtype alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from fliptrace_kernels.configurations import Launch, launch_for
from fliptrace_kernels.errors import LaunchError
from fliptrace_kernels.reduction import Reduction
from fliptrace_kernels.triton_kernels import (
    lora_shrink_atomic,
    lora_shrink_deterministic,
    lora_shrink_unsplit,
)

SLICES_PER_LAUNCH: Final = 3  # q, k and v


def shrink(
    x: Tensor,
    a_slices: Sequence[Tensor],
    mapping: Tensor | None,
    reduction: Reduction,
    scale: float,
    out: Tensor,
) -> None:
    """Run one shrink on the device of x into out; arguments as `lora_shrink` has checked them.

    Raises:
        LaunchError: if a tile does not fit this device.
    """
    out.copy_(_shrink(x, a_slices, mapping, reduction, scale, None))


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
) -> Iterator[tuple[Tensor, Tensor]]:
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
