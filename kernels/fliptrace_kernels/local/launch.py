"""Turn a shrink of tensors into launches of `source.cu`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fliptrace_kernels.errors import ReductionError, ShrinkInputError
from fliptrace_kernels.local import compilation, device
from fliptrace_kernels.local.arrangements import (
    BLOCK_K,
    SPLITS,
    Arrangement,
    choices,
    choose,
)
from fliptrace_kernels.local.compilation import Variant

DEFAULT_SPLITS: Final = 32
"""What `local` alone stands for."""

_ELEMENTS: Final = {torch.bfloat16: "bf16", torch.float16: "f16"}
_BLOCKS_DOWN: Final = 65535  # the most a grid has along y
_WORD: Final = 8  # elements of one 16-byte load


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
    _check_splits(splits)
    element = _element(dtype)
    mode = _mode(adapters, mapping)
    index = torch.cuda.current_device() if index is None else index
    variants = {
        Variant(size, rank, splits, arrangement, element, mode, size % _WORD == 0)
        for launched in set(_slices_per_launch(slices))
        for arrangement in choices(size=size, rank=rank, slices=launched, splits=splits)
    }
    with torch.cuda.device(index):
        for variant in variants:
            device.loaded(variant, index)
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
    _check_splits(splits)
    rows, size = x_shape
    rank = a_shapes[0][-2]
    adapters = a_shapes[0][0] if len(a_shapes[0]) == 3 else 1
    mode = _mode(adapters, mapping)
    chosen = [
        (launched, choose(rows=rows, size=size, rank=rank, slices=launched, splits=splits))
        for launched in (_slices_per_launch(len(a_shapes)) if rows else [])
    ]
    seen = adapters if mode == compilation.MANY_ADAPTERS else 1
    first = chosen[0][1] if chosen else None
    variant = None
    if first is not None:
        variant = Variant(size, rank, splits, first, _element(dtype), mode, size % _WORD == 0)
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
    if not x.is_cuda:
        raise ShrinkInputError(f"local kernels run on CUDA; x is on {x.device}")
    index = x.get_device()
    stream = torch.cuda.current_stream(index).cuda_stream
    with _device_of(index):
        for variant, grid, arguments in launches(
            x, a_slices, mapping, splits, scale, out, partials, arrangement, launch_counter, kind
        ):
            device.start(device.loaded(variant, index), grid, stream, arguments)


def launches(
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
) -> Iterator[tuple[Variant, tuple[int, int, int], tuple[int | float, ...]]]:
    """Yield what a call starts: kernel, grid and the fields of `device.LAYOUT`.

    Each must be started before the next is asked for, since the memory behind it may go then.
    Arguments and errors as for `shrink`; the device is not looked at.
    """
    _check_splits(splits)
    element = _element(x.dtype)
    _check(x, a_slices, mapping, out, launch_counter)
    rows, size = x.shape
    if rows == 0:
        return
    first = a_slices[0]
    rank = first.shape[-2]
    adapters = first.shape[0] if first.ndim == 3 else 1
    mode = _mode(adapters, mapping is not None)
    many = adapters if mode == compilation.MANY_ADAPTERS else 1
    if x.stride(1) != 1:
        x = x.contiguous()
    x_row = size if rows == 1 else x.stride(0)
    x_vector = size % _WORD == 0 and x.data_ptr() % 16 == 0 and x_row % _WORD == 0
    for begin in range(0, len(a_slices), device.SLICES_PER_LAUNCH):
        weights = [
            a if a.stride(-1) == 1 else a.contiguous()
            for a in a_slices[begin : begin + device.SLICES_PER_LAUNCH]
        ]
        addresses = [a.data_ptr() for a in weights]
        per_adapter = [a.stride(0) if adapters > 1 else 0 for a in weights]
        per_rank = [a.stride(-2) if rank > 1 else 0 for a in weights]
        vector = (
            x_vector
            and not any(address % 16 for address in addresses)
            and not any(stride % _WORD for stride in (*per_adapter, *per_rank))
        )
        slices = len(weights)
        layout = arrangement or choose(
            rows=rows, size=size, rank=rank, slices=slices, splits=splits
        )
        variant = Variant(size, rank, splits, layout, element, mode, vector, kind)
        unused = [0] * (device.SLICES_PER_LAUNCH - slices)
        chunk = _BLOCKS_DOWN * layout.tokens
        for row in range(0, rows, chunk):
            here = min(chunk, rows - row)
            yield (
                variant,
                layout.grid(here, rank, slices, many),
                (
                    x.data_ptr() + x.element_size() * row * x_row,
                    x_row,
                    0 if mapping is None else mapping.data_ptr() + 4 * row,
                    out.data_ptr() + 4 * (begin * out.stride(0) + row * out.stride(1)),
                    *out.stride(),
                    *_partials_arguments(partials, begin, row),
                    0 if launch_counter is None else launch_counter.data_ptr(),
                    *(*addresses, *unused),
                    *(*per_adapter, *unused),
                    *(*per_rank, *unused),
                    here,
                    slices,
                    adapters,
                    scale,
                ),
            )


def _partials_arguments(partials: Tensor | None, begin: int, row: int) -> tuple[int, int, int]:
    if partials is None:
        return 0, 0, 0
    offset = begin * partials.stride(1) + row * partials.stride(2)
    return partials.data_ptr() + 4 * offset, partials.stride(0), partials.stride(1)


def _empty_partials(x: Tensor, a_slices: Sequence[Tensor], splits: int) -> Tensor:
    _check_splits(splits)
    shape = (splits, len(a_slices), x.shape[0], a_slices[0].shape[-2])
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _mode(adapters: int, mapping: bool) -> int:
    if not mapping:
        return compilation.NO_MAPPING
    return compilation.ONE_ADAPTER if adapters == 1 else compilation.MANY_ADAPTERS


def _slices_per_launch(slices: int) -> list[int]:
    step = device.SLICES_PER_LAUNCH
    return [min(step, slices - i) for i in range(0, slices, step)]


def _element(dtype: torch.dtype) -> str:
    element = _ELEMENTS.get(dtype)
    if element is None:
        raise ShrinkInputError(
            f"local reductions take bfloat16 or float16; got {dtype}. Use deterministic:8"
        )
    return element


def _check_splits(splits: int) -> None:
    if splits not in SPLITS:
        raise ReductionError(
            f"local takes {', '.join(str(s) for s in SPLITS)} splits; got {splits}. "
            f"Try: local:{DEFAULT_SPLITS}"
        )


def _check(
    x: Tensor,
    a_slices: Sequence[Tensor],
    mapping: Tensor | None,
    out: Tensor,
    launch_counter: Tensor | None,
) -> None:
    first = a_slices[0]
    for a in a_slices:
        if a.shape != first.shape or a.dtype != x.dtype or a.device != x.device:
            raise ShrinkInputError(
                f"every slice must be {list(first.shape)}, {x.dtype} on {x.device}; "
                f"got {list(a.shape)}, {a.dtype} on {a.device}"
            )
    if first.ndim not in (2, 3) or first.shape[-1] != x.shape[1] or first.numel() == 0:
        raise ShrinkInputError(
            f"A must be [R, K] or [adapters, R, K] with K = {x.shape[1]}; got {list(first.shape)}"
        )
    if mapping is None:
        if first.ndim == 3 and first.shape[0] != 1:
            raise ShrinkInputError(
                f"with {first.shape[0]} adapters a mapping must say which row uses which; got none"
            )
    elif (
        mapping.shape != x.shape[:1]
        or mapping.dtype != torch.int32
        or mapping.device != x.device
        or not mapping.is_contiguous()
    ):
        raise ShrinkInputError(
            f"mapping must be contiguous int32 [{x.shape[0]}] on {x.device}; got "
            f"{mapping.dtype} {list(mapping.shape)}, strides {mapping.stride()}, on {mapping.device}"
        )
    expected = (len(a_slices), x.shape[0], first.shape[-2])
    if out.shape != expected or out.dtype != torch.float32 or out.device != x.device:
        raise ShrinkInputError(
            f"out must be float32 {list(expected)} on {x.device}; "
            f"got {out.dtype} {list(out.shape)} on {out.device}"
        )
    if launch_counter is not None and (
        launch_counter.dtype != torch.int64
        or launch_counter.numel() != 1
        or launch_counter.device != x.device
    ):
        raise ShrinkInputError(
            f"launch_counter must be one int64 on {x.device}; got {launch_counter.dtype} "
            f"{list(launch_counter.shape)} on {launch_counter.device}"
        )


def _device_of(index: int) -> contextlib.AbstractContextManager[object]:
    if index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(index)
