"""Start the Triton kernels.

This module is imported on first use only, because Triton is not on every machine. Tiles, warps
and stages come from a table and depend on the reduction, the rank and the dtype alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from fliptrace_kernels import hand_over_counters
from fliptrace_kernels.configurations import Launch, launch_for
from fliptrace_kernels.errors import LaunchError
from fliptrace_kernels.reduction import Reduction
from fliptrace_kernels.triton_hand_over import lora_shrink_deterministic
from fliptrace_kernels.triton_kernels import lora_shrink_atomic, lora_shrink_unsplit
from fliptrace_kernels.triton_two_launches import lora_shrink_add_partials, lora_shrink_partials

SLICES_PER_LAUNCH: Final = 3  # q, k and v

_ADDING: Final = Launch(16, 16, 4, 1)
"""Launch of the second kernel of `tree`: a tile of it holds S partials in registers."""

_MAX_GRID: Final = ((1 << 31) - 1, (1 << 16) - 1)

Grid = tuple[int, int, int]


def shrink(
    x: Tensor,
    a_slices: Sequence[Tensor],
    mapping: Tensor | None,
    reduction: Reduction,
    scale: float,
    out: Tensor,
    *,
    launch_counter: Tensor | None = None,
    launch: Launch | None = None,
) -> None:
    """Run one shrink on the current stream of x's device.

    Args:
        x: as `lora_shrink` has checked it; so are the others.
        a_slices: more than three are run in several launches.
        mapping: adapter of each row, or None.
        reduction: any kind but `local` and `vllm`.
        scale: factor, applied where the reduction says.
        out: [slices, M, R], FP32, any strides; every element is written.
        launch_counter: one int64 on the device, raised by 1 by each launch: proof that it ran.
            The second launch of `tree` is not counted. None compiles the counting away.
        launch: launch numbers to use instead of the table's, for measuring them.

    Raises:
        LaunchError: if a tile does not fit this device, there are too many tiles or adapters, or a
            capture finds too few counters (see `hand_over_counters`).
    """
    _run(x, a_slices, mapping, reduction, scale, out, None, launch_counter, launch)


def shrink_with_partials(
    x: Tensor,
    a_slices: Sequence[Tensor],
    mapping: Tensor | None,
    reduction: Reduction,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run one shrink and keep the partials it added.

    Args:
        x: as for `shrink`.
        a_slices: as for `shrink`, at most three.
        mapping: as for `shrink`.
        reduction: `deterministic` or `tree` with at least two splits.
        scale: as for `shrink`.

    Returns:
        Outputs, [slices, M, R], and unscaled partials, [S, slices, M, R], both FP32. Partials of
        rows without an adapter are NaN.

    Raises:
        LaunchError: if the call has no such partials, or as for `shrink`.
    """
    if reduction.kind not in ("deterministic", "tree") or reduction.splits == 1:
        raise LaunchError(f"only deterministic and tree store partials; got {reduction}")
    if len(a_slices) > SLICES_PER_LAUNCH:
        raise LaunchError(
            f"partials are kept for at most {SLICES_PER_LAUNCH} slices; got {len(a_slices)}"
        )
    shape = (len(a_slices), x.shape[0], a_slices[0].shape[-2])
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    kept = torch.full(
        (reduction.splits, *shape), float("nan"), dtype=torch.float32, device=x.device
    )
    _run(x, a_slices, mapping, reduction, scale, out, kept, None, None)
    return out, kept


def shrink_in_two_launches(
    x: Tensor,
    a_slices: Sequence[Tensor],
    mapping: Tensor | None,
    reduction: Reduction,
    scale: float,
    out: Tensor,
) -> None:
    """Run `deterministic` in two launches, the second of which adds: an oracle for its hand-over.

    Arguments and errors as for `shrink`; the bits must be the same.
    """
    if reduction.kind != "deterministic" or reduction.splits == 1:
        raise LaunchError(f"two launches need deterministic with 2 splits or more; got {reduction}")
    _run(x, a_slices, mapping, reduction, scale, out, None, None, None, two_launches=True)


def describe_launch(
    x_shape: tuple[int, ...],
    a_shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    reduction: Reduction,
) -> dict[str, Any]:
    """Return what `shrink` launches for these shapes, as JSON values; one grid per launch."""
    rank = a_shapes[0][-2]
    adapters = a_shapes[0][0] if len(a_shapes[0]) == 3 else 1
    launch = launch_for(
        kind=_kind(reduction), rank=rank, block_k=reduction.block_k, element_bytes=dtype.itemsize
    )
    grids = [
        list(_grid(x_shape[0], rank, slices, adapters, reduction.splits, launch))
        for slices in _slices_per_launch(len(a_shapes))
    ]
    numbers = asdict(launch)
    return {
        "implementation": "triton",
        "kernel": _KERNELS[_kind(reduction)].fn.__name__,
        "grid": grids if x_shape[0] else [],
        "block_m": numbers.pop("block_m"),
        "block_n": numbers.pop("block_n"),
        "block_k": reduction.block_k,
        **numbers,
        "fp_contraction": "off (enable_fp_fusion=False)",
        "triton": triton.__version__,
    }


_KERNELS: Final[dict[str, Any]] = {
    "unsplit": lora_shrink_unsplit,
    "atomic": lora_shrink_atomic,
    "deterministic": lora_shrink_deterministic,
    "tree": lora_shrink_partials,
}


def _kind(reduction: Reduction) -> str:
    return "unsplit" if reduction.splits == 1 else reduction.kind


def _slices_per_launch(slices: int) -> list[int]:
    return [min(SLICES_PER_LAUNCH, slices - i) for i in range(0, slices, SLICES_PER_LAUNCH)]


def _grid(rows: int, rank: int, slices: int, adapters: int, splits: int, launch: Launch) -> Grid:
    tiles = -(-rows // launch.block_m) * -(-rank // launch.block_n)
    return tiles * splits * slices, adapters, 1


@dataclass(frozen=True, slots=True)
class _Weights:
    """The A slices of one launch, all with the same strides."""

    slices: list[Tensor]
    adapters: int
    adapter_stride: int
    rank_stride: int

    @classmethod
    def of(cls, a_slices: Sequence[Tensor]) -> _Weights:
        strides = a_slices[0].stride()
        if any(a.stride() != strides for a in a_slices) or (
            strides[-1] != 1 and a_slices[0].shape[-1] > 1
        ):
            a_slices = [a.contiguous() for a in a_slices]
            strides = a_slices[0].stride()
        several = a_slices[0].ndim == 3
        adapters = a_slices[0].shape[0] if several else 1
        return cls(list(a_slices), adapters, strides[0] if several else 0, strides[-2])


def _run(
    x: Tensor,
    a_slices: Sequence[Tensor],
    mapping: Tensor | None,
    reduction: Reduction,
    scale: float,
    out: Tensor,
    kept: Tensor | None,
    launch_counter: Tensor | None,
    launch: Launch | None,
    *,
    two_launches: bool = False,
) -> None:
    rows, size = x.shape
    kernel = lora_shrink_partials if two_launches else _KERNELS[_kind(reduction)]
    if kernel is lora_shrink_atomic:
        out.zero_()
    if rows == 0:
        return
    if x.stride(1) != 1 and size > 1:
        x = x.contiguous()
    if mapping is not None:
        mapping = mapping.contiguous()
    rank = a_slices[0].shape[-2]
    if launch is None:
        launch = launch_for(
            kind=_kind(reduction),
            rank=rank,
            block_k=reduction.block_k,
            element_bytes=x.element_size(),
        )
    for start in range(0, len(a_slices), SLICES_PER_LAUNCH):
        weights = _Weights.of(a_slices[start : start + SLICES_PER_LAUNCH])
        slices = len(weights.slices)
        grid = _grid(rows, rank, slices, weights.adapters, reduction.splits, launch)
        _check_grid(grid)
        target = out[start : start + slices]
        constants = _tile_constants(launch, rank, slices, mapping) | {
            "ONE_ADAPTER": weights.adapters == 1,
            "COUNT_LAUNCHES": launch_counter is not None,
            "EVEN_K": size % reduction.block_k == 0,
            "SPLITS": reduction.splits,
            "BLOCK_K": reduction.block_k,
            "X_EVICTION": launch.x_eviction,
            "A_EVICTION": launch.a_eviction,
            "num_stages": launch.num_stages,
        }
        # By the rank, not by whether M * R happens to be a multiple of 16.
        aligned = {"OUT_ALIGNED": rank % 16 == 0 and target.stride(0) % 16 == 0}
        # What a kernel is told not to look at still has to be some tensor.
        adapter_of_row = x if mapping is None else mapping
        operands = [
            x,
            *weights.slices,
            *weights.slices[:1] * (SLICES_PER_LAUNCH - slices),
            adapter_of_row,
            x if launch_counter is None else launch_counter,
            rows,
            size,
            rank,
        ]
        # One row has no stride of its own; a fixed number keeps it from choosing another binary.
        strides = [size if rows == 1 else x.stride(0), weights.adapter_stride, weights.rank_stride]
        ending = [*target.stride(), *strides, weights.adapters, float(scale)]
        with _device_of(x):
            if kernel in (lora_shrink_unsplit, lora_shrink_atomic):
                _start(kernel, grid, [target, *operands, *ending], constants | aligned)
                continue
            scratch = kept
            if scratch is None:
                shape = (reduction.splits, slices, rows, rank)
                scratch = torch.empty(shape, dtype=torch.float32, device=x.device)
            if kernel is lora_shrink_deterministic:
                tiles = grid[0] // reduction.splits * weights.adapters
                with hand_over_counters.lend(x.device, tiles) as counters:
                    buffers = [target, scratch, counters]
                    _start(kernel, grid, [*buffers, *operands, *ending], constants | aligned)
                continue
            _start(kernel, grid, [scratch, *operands, *strides, weights.adapters], constants)
            _start(
                lora_shrink_add_partials,
                _grid(rows, rank, slices, 1, 1, _ADDING),
                [target, scratch, adapter_of_row, rows, rank, *target.stride(), float(scale)],
                _tile_constants(_ADDING, rank, slices, mapping)
                | aligned
                | {"SPLITS": reduction.splits, "TREE": reduction.kind == "tree"},
            )


def _tile_constants(
    launch: Launch, rank: int, slices: int, mapping: Tensor | None
) -> dict[str, Any]:
    return {
        "HAS_MAPPING": mapping is not None,
        "SLICES": slices,
        "TILES_N": -(-rank // launch.block_n),
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "num_warps": launch.num_warps,
        "enable_fp_fusion": False,
    }


def _check_grid(grid: Grid) -> None:
    if any(size > limit for size, limit in zip(grid, _MAX_GRID, strict=False)):
        raise LaunchError(
            f"a launch has at most {_MAX_GRID[0]} blocks per adapter and {_MAX_GRID[1]} adapters; "
            f"this call needs {grid[0]} and {grid[1]}. Split its rows or its adapters"
        )


def _start(kernel: Any, grid: Grid, arguments: list[Any], constants: dict[str, Any]) -> None:
    launcher: Callable[..., object] = kernel[grid]
    try:
        launcher(*arguments, **constants)
    except OutOfResources as error:
        raise LaunchError(
            f"a tile of {kernel.fn.__name__} must fit this device; {error} "
            f"Use a smaller K block than {constants.get('BLOCK_K')}"
        ) from error


def _device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
