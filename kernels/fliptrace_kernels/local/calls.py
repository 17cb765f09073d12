"""Turn a call with tensors into what its launches need. Starts nothing and asks no device."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fliptrace_kernels.errors import ReductionError, ShrinkInputError
from fliptrace_kernels.local import compilation, device
from fliptrace_kernels.local.arrangements import ROW_STEPS, SPLITS, Arrangement, choose
from fliptrace_kernels.local.compilation import Variant

DEFAULT_SPLITS: Final = 32
"""What `local` alone stands for."""

_ELEMENTS: Final = {torch.bfloat16: "bf16", torch.float16: "f16"}
_BLOCKS_DOWN: Final = 65535  # the most a grid has along y
WORD: Final = 8
"""Elements of one 16-byte load."""


@dataclass(slots=True)
class Kernel:
    """A kernel for some weights and number of rows, and how its grid grows.

    Attributes:
        variant: what is compiled.
        across: blocks along x.
        tokens: rows per block.
        deep: most blocks along z.
        loaded: the kernel on the device of the weights, once it was asked for.
    """

    variant: Variant
    across: int
    tokens: int
    deep: int
    loaded: device.Loaded | None = None

    def load(self, index: int) -> device.Loaded:
        """Compile and load it on its device, the current one."""
        self.loaded = device.loaded(self.variant, index)
        return self.loaded


@dataclass(slots=True)
class _Weights:
    """Slices of one launch, checked: all that a call needs to know about them.

    Attributes:
        begin: number of the first slice.
        slices: how many.
        fields: their addresses and strides, as the kernel takes them.
        vector: whether all may be read 16 bytes at a time.
        memory: copies of slices that could not be used as they are.
        kernels: by row step, vector, kind and arrangement.
    """

    begin: int
    slices: int
    fields: tuple[int, ...]
    vector: bool
    memory: list[Tensor]
    kernels: dict[tuple[int, bool, int, Arrangement | None], Kernel]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Slices of one call, checked, by launch."""

    rank: int
    adapters: int
    mode: int
    launches: tuple[_Weights, ...]


# By everything that was checked, so that memory which is used again for others is no hit.
_prepared: dict[tuple[object, ...], _Prepared] = {}
_MOST_PREPARED: Final = 4096


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
) -> Iterator[tuple[Kernel, tuple[int, int, int], tuple[int | float, ...]]]:
    """Yield what a call starts: kernel, grid and the fields of `device.LAYOUT`.

    Each must be started before the next is asked for, since the memory behind it may go then.
    Arguments and errors as for `shrink`; the device is not looked at.
    """
    key = (
        splits,
        x.dtype,
        x.shape[1],
        x.get_device(),
        mapping is None,
        *[(a.data_ptr(), a.shape, a.stride(), a.dtype, a.get_device()) for a in a_slices],
    )
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _prepare(x, a_slices, mapping, splits)
        if not any(weights.memory for weights in prepared.launches):
            if len(_prepared) >= _MOST_PREPARED:
                _prepared.clear()
            _prepared[key] = prepared
    rows, size = x.shape
    rank, adapters = prepared.rank, prepared.adapters
    _check(x, mapping, out, launch_counter, (len(a_slices), rows, rank))
    if rows == 0:
        return
    x_row, x_last = x.stride()
    if x_last != 1:
        x = x.contiguous()
        x_row = size
    if rows == 1:
        x_row = size
    x_address = x.data_ptr()
    x_vector = (size | x_row) % WORD == 0 and x_address % 16 == 0
    out_strides = out.stride()
    step = bisect_left(ROW_STEPS, rows)
    for weights in prepared.launches:
        which = (step, x_vector and weights.vector, kind, arrangement)
        kernel = weights.kernels.get(which)
        if kernel is None:
            kernel = _kernel(x, prepared, weights, splits, which)
            weights.kernels[which] = kernel
        chunk = _BLOCKS_DOWN * kernel.tokens
        for row in range(0, rows, chunk):
            here = min(chunk, rows - row)
            yield (
                kernel,
                (kernel.across, -(-here // kernel.tokens), min(kernel.deep, here)),
                (
                    x_address + 2 * row * x_row,
                    x_row,
                    0 if mapping is None else mapping.data_ptr() + 4 * row,
                    out.data_ptr() + 4 * (weights.begin * out_strides[0] + row * out_strides[1]),
                    *out_strides,
                    *_partials_arguments(partials, weights.begin, row),
                    0 if launch_counter is None else launch_counter.data_ptr(),
                    *weights.fields,
                    here,
                    weights.slices,
                    adapters,
                    scale,
                ),
            )


def _prepare(
    x: Tensor, a_slices: Sequence[Tensor], mapping: Tensor | None, splits: int
) -> _Prepared:
    check_splits(splits)
    element_of(x.dtype)
    _check_weights(x, a_slices, mapping)
    first = a_slices[0]
    rank = first.shape[-2]
    adapters = first.shape[0] if first.ndim == 3 else 1
    prepared = []
    for begin in range(0, len(a_slices), device.SLICES_PER_LAUNCH):
        given = a_slices[begin : begin + device.SLICES_PER_LAUNCH]
        copies = [a.contiguous() for a in given if a.stride(-1) != 1]
        weights = [a.contiguous() for a in given] if copies else list(given)
        addresses = [a.data_ptr() for a in weights]
        per_adapter = [a.stride(0) if adapters > 1 else 0 for a in weights]
        per_rank = [a.stride(-2) if rank > 1 else 0 for a in weights]
        vector = not any(address % 16 for address in addresses) and not any(
            stride % WORD for stride in (*per_adapter, *per_rank)
        )
        unused = [0] * (device.SLICES_PER_LAUNCH - len(weights))
        fields = (*addresses, *unused, *per_adapter, *unused, *per_rank, *unused)
        memory = weights if copies else []
        prepared.append(_Weights(begin, len(weights), fields, vector, memory, {}))
    mode = adapters_mode(adapters, mapping is not None)
    return _Prepared(rank, adapters, mode, tuple(prepared))


def _kernel(
    x: Tensor,
    prepared: _Prepared,
    weights: _Weights,
    splits: int,
    which: tuple[int, bool, int, Arrangement | None],
) -> Kernel:
    _, vector, kind, layout = which
    rows, size = x.shape
    rank, slices = prepared.rank, weights.slices
    if layout is None:
        layout = choose(rows=rows, size=size, rank=rank, slices=slices, splits=splits)
    variant = Variant(size, rank, splits, layout, element_of(x.dtype), prepared.mode, vector, kind)
    many = prepared.adapters if prepared.mode == compilation.MANY_ADAPTERS else 1
    across, _, deep = layout.grid(layout.tokens, rank, slices, many)
    return Kernel(variant, across, layout.tokens, deep)


def _partials_arguments(partials: Tensor | None, begin: int, row: int) -> tuple[int, int, int]:
    if partials is None:
        return 0, 0, 0
    offset = begin * partials.stride(1) + row * partials.stride(2)
    return partials.data_ptr() + 4 * offset, partials.stride(0), partials.stride(1)


def adapters_mode(adapters: int, mapping: bool) -> int:
    """Return the ADAPTERS_MODE of `source.cu`."""
    if not mapping:
        return compilation.NO_MAPPING
    return compilation.ONE_ADAPTER if adapters == 1 else compilation.MANY_ADAPTERS


def element_of(dtype: torch.dtype) -> str:
    """Return the ELEMENT of `source.cu`, or refuse the dtype."""
    element = _ELEMENTS.get(dtype)
    if element is None:
        raise ShrinkInputError(
            f"local reductions take bfloat16 or float16; got {dtype}. Use deterministic:8"
        )
    return element


def check_splits(splits: int) -> None:
    """Refuse a number of splits that `local` does not take."""
    if splits not in SPLITS:
        raise ReductionError(
            f"local takes {', '.join(str(s) for s in SPLITS)} splits; got {splits}. "
            f"Try: local:{DEFAULT_SPLITS}"
        )


def _check_weights(x: Tensor, a_slices: Sequence[Tensor], mapping: Tensor | None) -> None:
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
    if mapping is None and first.ndim == 3 and first.shape[0] != 1:
        raise ShrinkInputError(
            f"with {first.shape[0]} adapters a mapping must say which row uses which; got none"
        )


def _check(
    x: Tensor,
    mapping: Tensor | None,
    out: Tensor,
    launch_counter: Tensor | None,
    expected: tuple[int, int, int],
) -> None:
    index = x.get_device()
    if mapping is not None and (
        mapping.shape != x.shape[:1]
        or mapping.dtype != torch.int32
        or mapping.get_device() != index
        or not mapping.is_contiguous()
    ):
        raise ShrinkInputError(
            f"mapping must be contiguous int32 [{x.shape[0]}] on {x.device}; got "
            f"{mapping.dtype} {list(mapping.shape)}, strides {mapping.stride()}, on {mapping.device}"
        )
    if out.shape != expected or out.dtype != torch.float32 or out.get_device() != index:
        raise ShrinkInputError(
            f"out must be float32 {list(expected)} on {x.device}; "
            f"got {out.dtype} {list(out.shape)} on {out.device}"
        )
    if launch_counter is not None and (
        launch_counter.dtype != torch.int64
        or launch_counter.numel() != 1
        or launch_counter.get_device() != index
    ):
        raise ShrinkInputError(
            f"launch_counter must be one int64 on {x.device}; got {launch_counter.dtype} "
            f"{list(launch_counter.shape)} on {launch_counter.device}"
        )
