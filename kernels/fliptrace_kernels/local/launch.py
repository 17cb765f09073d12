"""The calls of this package: check, then start `source.cu` on the current stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fliptrace_kernels.errors import ShrinkInputError
from fliptrace_kernels.local import compilation, device
from fliptrace_kernels.local.arrangements import BLOCK_K, Arrangement, choices, choose
from fliptrace_kernels.local.calls import (
    DEFAULT_SPLITS,
    WORD,
    adapters_mode,
    check_splits,
    element_of,
    launches,
)
from fliptrace_kernels.local.compilation import Variant


def shrink(
    x: Tensor,
    a_slices: Sequence[Tensor],
    mapping: Tensor | None,
    splits: int,
    scale: float,
    out: Tensor,
    *,
    arrangement: Arrangement | None = None,
    launch_counter: Tensor | None = None,
) -> None:
    """Compute out = scale * (x Aᵀ) in FP32 on the current stream of x's device.

    Allocates nothing, waits for nothing and may be captured, unless x or an A slice has a last
    stride other than 1: then it is copied first.

    Args:
        x: inputs, [M, K], BF16 or FP16, on CUDA.
        a_slices: one tensor per slice, all [R, K] or all [adapters, R, K], dtype and device of x.
        mapping: adapter of each row, [M], int32, contiguous. Rows below 0 come out as 0.0, rows
            beyond the adapters as NaN. None means adapter 0 for every row.
        splits: S, one of 8, 16, 32 and 64.
        scale: factor of the total.
        out: [slices, M, R], FP32, any strides; every element is written.
        arrangement: layout of the launch; it changes no bit. None lets the table choose.
        launch_counter: one int64 on the device, raised by 1 by each launch: proof that it ran.

    Raises:
        ReductionError: if there is no such number of splits.
        ShrinkInputError: if the tensors do not fit together.
        LaunchError: if the kernel cannot be compiled, loaded or started.

    Order:
        See `source.cu`: partials as for `deterministic:S/32`, four consecutive ones added in
        increasing order, then those sums in increasing order, then the scale.
    """
    _run(x, a_slices, mapping, splits, scale, out, None, arrangement, launch_counter)


def with_partials(
    x: Tensor,
    a_slices: Sequence[Tensor],
    mapping: Tensor | None,
    splits: int,
    scale: float,
    out: Tensor,
    *,
    arrangement: Arrangement | None = None,
) -> Tensor:
    """Run `shrink` and keep the partials it added.

    Args:
        x: as for `shrink`.
        a_slices: as for `shrink`.
        mapping: as for `shrink`.
        splits: as for `shrink`.
        scale: as for `shrink`.
        out: as for `shrink`.
        arrangement: as for `shrink`.

    Returns:
        Unscaled partials, [S, slices, M, R], FP32. Those of rows without an adapter are NaN.

    Raises:
        ReductionError: as `shrink`.
        ShrinkInputError: as `shrink`.
        LaunchError: as `shrink`.
    """
    kept = _empty_partials(x, a_slices, splits).fill_(float("nan"))
    _run(
        x, a_slices, mapping, splits, scale, out, kept, arrangement, None, compilation.WITH_PARTIALS
    )
    return kept


def partials_only(
    x: Tensor,
    a_slices: Sequence[Tensor],
    splits: int,
    partials: Tensor,
    *,
    arrangement: Arrangement | None = None,
) -> None:
    """Compute and store the partials and add nothing up: a floor to measure `shrink` against.

    Args:
        x: as for `shrink`.
        a_slices: as for `shrink`, of one adapter.
        splits: as for `shrink`.
        partials: [S, slices, M, R], FP32, contiguous; written.
        arrangement: as for `shrink`.

    Raises:
        ReductionError: as `shrink`.
        ShrinkInputError: as `shrink`.
        LaunchError: as `shrink`.
    """
    expected = (splits, len(a_slices), x.shape[0], a_slices[0].shape[-2])
    if partials.shape != expected or not partials.is_contiguous():
        raise ShrinkInputError(
            f"partials must be contiguous {list(expected)}; got {list(partials.shape)} with "
            f"strides {partials.stride()}"
        )
    _run(
        x,
        a_slices,
        None,
        splits,
        1.0,
        partials[0],
        partials,
        arrangement,
        None,
        compilation.PARTIALS_ONLY,
    )


def prepare(
    *,
    size: int,
    rank: int,
    slices: int,
    dtype: torch.dtype,
    splits: int = DEFAULT_SPLITS,
    adapters: int = 1,
    mapping: bool = True,
    index: int | None = None,
) -> int:
    """Compile and load every kernel that shrinks of this shape may start, for any number of rows.

    Called at start-up, so that no later call, captured or not, waits for a compiler.

    Args:
        size: K.
        rank: R.
        slices: slices of a call.
        dtype: dtype of x.
        splits: S.
        adapters: adapters that A holds.
        mapping: whether calls come with a mapping.
        index: CUDA device; None means torch's current one.

    Returns:
        Number of kernels that are ready.

    Raises:
        ReductionError: if there is no such number of splits.
        ShrinkInputError: if the dtype is not BF16 or FP16.
        LaunchError: if a kernel cannot be compiled or loaded.
    """
    check_splits(splits)
    element = element_of(dtype)
    mode = adapters_mode(adapters, mapping)
    index = torch.cuda.current_device() if index is None else index
    variants = {
        Variant(size, rank, splits, arrangement, element, mode, size % WORD == 0)
        for launched in set(_slices_per_launch(slices))
        for arrangement in choices(size=size, rank=rank, slices=launched, splits=splits)
    }
    with torch.cuda.device(index):
        device.load_all(variants, index)
    return len(variants)


def describe_launch(
    x_shape: Sequence[int],
    a_shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    splits: int = DEFAULT_SPLITS,
    *,
    mapping: bool = False,
) -> dict[str, Any]:
    """Return what `shrink` launches for these shapes, as JSON values; one grid per launch.

    Everything but the grids is that of the first launch: with more than four slices the others may
    have another arrangement. VECTOR is 1 where K allows it: tensors that are not aligned to 16 bytes
    are read element by element. Neither changes a bit.

    Args:
        x_shape: [M, K].
        a_shapes: per slice [R, K] or [adapters, R, K].
        dtype: dtype of x.
        splits: S.
        mapping: whether the call comes with a mapping.

    Raises:
        ReductionError: if there is no such number of splits.
        ShrinkInputError: if the dtype is not BF16 or FP16.
        LaunchError: if NVRTC is missing.
    """
    check_splits(splits)
    rows, size = x_shape
    rank = a_shapes[0][-2]
    adapters = a_shapes[0][0] if len(a_shapes[0]) == 3 else 1
    mode = adapters_mode(adapters, mapping)
    chosen = [
        (launched, choose(rows=rows, size=size, rank=rank, slices=launched, splits=splits))
        for launched in (_slices_per_launch(len(a_shapes)) if rows else [])
    ]
    seen = adapters if mode == compilation.MANY_ADAPTERS else 1
    first = chosen[0][1] if chosen else None
    variant = None
    if first is not None:
        variant = Variant(size, rank, splits, first, element_of(dtype), mode, size % WORD == 0)
    return {
        "implementation": "cuda",
        "kernel": variant.kernel if variant else None,
        "grid": [list(a.grid(rows, rank, launched, seen)) for launched, a in chosen],
        "block_m": first.tokens if first else None,
        "block_n": first.ranks if first else None,
        "block_k": BLOCK_K,
        "num_warps": first.threads(splits) // 32 if first else None,
        "num_stages": first.depth_for(size, splits) if first else None,
        "arrangement": variant.constants if variant else None,
        "fp_contraction": "off (__fadd_rn, __fmul_rn, --fmad=false)",
        "nvrtc": ".".join(str(part) for part in compilation.nvrtc_version()),
    }


def _run(
    x: Tensor,
    a_slices: Sequence[Tensor],
    mapping: Tensor | None,
    splits: int,
    scale: float,
    out: Tensor,
    partials: Tensor | None = None,
    arrangement: Arrangement | None = None,
    launch_counter: Tensor | None = None,
    kind: int = compilation.WITHOUT_PARTIALS,
) -> None:
    index = x.get_device()
    if index < 0:
        raise ShrinkInputError(f"local kernels run on CUDA; x is on {x.device}")
    started = launches(
        x, a_slices, mapping, splits, scale, out, partials, arrangement, launch_counter, kind
    )
    stream = torch._C._cuda_getCurrentRawStream(index)
    if index == torch.cuda.current_device():
        for kernel, grid, arguments in started:
            device.start(kernel.loaded or kernel.load(index), grid, stream, arguments)
        return
    with torch.cuda.device(index):
        for kernel, grid, arguments in started:
            device.start(kernel.loaded or kernel.load(index), grid, stream, arguments)


def _empty_partials(x: Tensor, a_slices: Sequence[Tensor], splits: int) -> Tensor:
    check_splits(splits)
    shape = (splits, len(a_slices), x.shape[0], a_slices[0].shape[-2])
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _slices_per_launch(slices: int) -> list[int]:
    step = device.SLICES_PER_LAUNCH
    return [min(step, slices - i) for i in range(0, slices, step)]
