"""One call for every device: check the arguments, then run the implementation that fits.

CPU tensors run the plain-torch specification (in its vectorised form), CUDA tensors run Triton
kernels, or for `local` a CUDA kernel. Nothing falls back silently: a call that cannot run as asked
is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from fliptrace_kernels import hand_over_counters, vectorised
from fliptrace_kernels.arrival import ArrivalSchedule
from fliptrace_kernels.errors import LaunchError, ReductionError, ShrinkInputError
from fliptrace_kernels.reduction import Reduction, as_reduction

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def lora_shrink(
    x: Tensor,
    a_slices: Sequence[Tensor],
    mapping: Tensor | None = None,
    *,
    reduction: Reduction | str,
    scale: float = 1.0,
    schedule: ArrivalSchedule | None = None,
    call_key: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Compute z = scale * (x Aᵀ) in FP32, summed over K in a stated order.

    Args:
        x: inputs, [M, K], BF16, FP16 or FP32 (`local` on CUDA: BF16 or FP16), on CPU or CUDA, any
            strides. M may be 0.
        a_slices: one tensor per slice, all [R, K] or all [adapters, R, K], dtype and device of x.
        mapping: adapter of each row, [M], int32, on the device of x; -1 means none, and such
            rows come out as 0.0. None means adapter 0 for every row, and needs a single adapter.
            On CUDA an index beyond the adapters cannot be refused without waiting for the device:
            its row comes out as NaN.
        reduction: a `Reduction` or its name.
        scale: factor, applied where the reduction says.
        schedule: for `atomic` on the CPU: simulated orders of arrival. Repeatable reductions do
            not look at it. On CUDA the hardware orders, and a schedule is refused.
        call_key: names this call to the schedule, such as a number built from step and site.
        out: where to write, [slices, M, R], FP32, on the device of x, any strides as long as no
            two elements share memory, and none with the inputs. Every element is written. None means a
            new tensor.

    Returns:
        Outputs, [slices, M, R], FP32, on the device of x: `out`, or a new contiguous tensor.

    Raises:
        ReductionError: if the reduction is unknown, `atomic` has no schedule on the CPU, or a
            schedule is given on CUDA.
        ShrinkInputError: if the tensors do not fit together.
        LaunchError: if the kernel cannot be started.

    Order:
        See `fliptrace_kernels.specification`.
    """
    reduction = as_reduction(reduction)
    _check(x, a_slices, mapping)
    reduction = reduction.for_rows(x.shape[0])
    if out is not None:
        _check_out(out, (len(a_slices), x.shape[0], a_slices[0].shape[-2]), x.device)
    if x.device.type == "cuda":
        if schedule is not None:
            raise ReductionError(
                f"on {x.device} the hardware decides the order of arrival; "
                f"got a {schedule.describe()}. Leave schedule out, or move the tensors to the CPU"
            )
        _check_cuda_dtype(x.dtype, reduction)
        if out is None:
            out = torch.empty(
                (len(a_slices), x.shape[0], a_slices[0].shape[-2]),
                dtype=torch.float32,
                device=x.device,
            )
        if reduction.kind == "local":
            if mapping is not None:
                mapping = mapping.contiguous()
            _local().shrink(x, a_slices, mapping, reduction.splits, float(scale), out)
        else:
            _triton_shrink().shrink(x, a_slices, mapping, reduction, scale, out)
        return out
    if schedule is None and reduction.needs_arrival_order:
        raise ReductionError(
            f"{reduction} on the CPU needs a schedule, since its order of arrival is simulated "
            "there; got none. Pass schedule=ArrivalSchedule(seed)"
        )
    z = vectorised.shrink(x.contiguous(), a_slices, mapping, reduction, scale, schedule, call_key)
    return z if out is None else out.copy_(z)


def launch_configuration(
    x_shape: Sequence[int],
    a_shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device | str,
    reduction: Reduction | str,
) -> dict[str, Json]:
    """Say what `lora_shrink` runs for such a call; meant for a manifest.

    Args:
        x_shape: [M, K].
        a_shapes: per slice [R, K] or [adapters, R, K].
        dtype: dtype of x.
        device: device of x.
        reduction: a `Reduction` or its name.

    Returns:
        JSON values: reduction (what a call of this many rows runs), implementation ('torch
        specification', 'triton' or 'cuda'), kernel (for `tree` also second_kernel), grid, block sizes,
        num_warps, num_stages and versions. What an implementation does not have is None.

    Raises:
        ReductionError: if the reduction is unknown.
        ShrinkInputError: if shapes, dtype or device are not those of a shrink.
        LaunchError: if the kernels are not available here.
    """
    reduction = as_reduction(reduction).for_rows(x_shape[0])
    device = torch.device(device)
    _check_kinds(dtype, device)
    common: dict[str, Json] = {
        "reduction": str(reduction),
        "scale_at": reduction.scale_at,
        "dealing": reduction.dealing,
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        _check_cuda_dtype(dtype, reduction)
        shapes = tuple(x_shape), [tuple(shape) for shape in a_shapes]
        described: dict[str, Json] = (
            _local().describe_launch(*shapes, dtype, reduction.splits)
            if reduction.kind == "local"
            else _triton_shrink().describe_launch(*shapes, dtype, reduction)
        )
        if reduction.kind == "tree":
            described["second_kernel"] = "lora_shrink_add_partials"
        return common | described
    return common | {
        "implementation": "torch specification",
        "kernel": "fliptrace_kernels.vectorised.shrink",
        "grid": None,
        "block_m": None,
        "block_n": None,
        "block_k": reduction.block_k,
        "num_warps": None,
        "num_stages": None,
        "fp_contraction": "none: elementwise operations",
        "triton": None,
    }


def prepare(device: torch.device | str, *, counters: int | None = None) -> None:
    """Zero now what shrinks captured in CUDA graphs on `device` will need; waits for the device.

    A capture cannot do it: its zeroing would be repeated by each replay. One call outside of a
    capture does the same, so this is for programs whose first shrink is captured, or whose capture
    was refused for a lack of counters. On a CPU there is nothing to do.

    Args:
        device: where the shrinks will run.
        counters: how many counters captures will take: tiles * slices * adapters, each rounded up
            to a multiple of 32, summed over their launches of `deterministic`. None means about a
            million.

    Raises:
        ShrinkInputError: if the device is neither a CPU nor a CUDA device.
        LaunchError: if the current stream is being captured.
    """
    device = torch.device(device)
    _check_kinds(torch.float32, device)
    if device.type == "cuda":
        hand_over_counters.prepare(device, counters or hand_over_counters.RESERVE)


def _check(x: Tensor, a_slices: Sequence[Tensor], mapping: Tensor | None) -> None:
    if x.ndim != 2:
        raise ShrinkInputError(f"x must be [M, K]; got {list(x.shape)}. Flatten its rows first")
    if not a_slices:
        raise ShrinkInputError("a_slices must hold at least one weight; got none")
    _check_kinds(x.dtype, x.device)
    first = a_slices[0]
    for index, a in enumerate(a_slices):
        if (
            a.shape != first.shape
            or a.ndim not in (2, 3)
            or a.shape[-1] != x.shape[1]
            or a.numel() == 0
            or a.dtype != x.dtype
            or a.device != x.device
        ):
            raise ShrinkInputError(
                f"every slice must be [R, K] or [adapters, R, K] with K = {x.shape[1]}, "
                f"dtype {x.dtype} and device {x.device}, and as large as slice 0 "
                f"{list(first.shape)}; slice {index} (counted from 0) is {list(a.shape)}, "
                f"{a.dtype}, {a.device}"
            )
    adapters = first.shape[0] if first.ndim == 3 else 1
    if mapping is None:
        if adapters != 1:
            raise ShrinkInputError(
                f"with {adapters} adapters a mapping must say which row uses which; got none"
            )
        return
    if mapping.shape != x.shape[:1] or mapping.dtype != torch.int32 or mapping.device != x.device:
        raise ShrinkInputError(
            f"mapping must be int32 [{x.shape[0]}] on {x.device}; "
            f"got {mapping.dtype} {list(mapping.shape)} on {mapping.device}"
        )
    if mapping.device.type == "cpu" and mapping.numel():
        lowest, highest = mapping.aminmax()
        if lowest < -1 or highest >= adapters:
            raise ShrinkInputError(
                f"mapping must hold adapter indices from -1 (none) to {adapters - 1}; "
                f"got {int(lowest)} to {int(highest)}"
            )


def _check_out(out: Tensor, shape: tuple[int, int, int], device: torch.device) -> None:
    if out.shape != shape or out.dtype != torch.float32 or out.device != device:
        raise ShrinkInputError(
            f"out must be float32 {list(shape)} on {device}; "
            f"got {out.dtype} {list(out.shape)} on {out.device}"
        )
    strides = sorted(
        (stride, size) for stride, size in zip(out.stride(), shape, strict=True) if size > 1
    )
    reach = 1  # elements that the dimensions seen so far cover, from first to last
    for stride, size in strides:
        if out.numel() and stride < reach:
            raise ShrinkInputError(
                "out must give every element memory of its own; got strides "
                f"{list(out.stride())} for shape {list(shape)}. Pass a tensor that is not expanded"
            )
        reach += stride * (size - 1)


def _check_cuda_dtype(dtype: torch.dtype, reduction: Reduction) -> None:
    if reduction.kind == "local" and dtype not in (torch.bfloat16, torch.float16):
        raise ShrinkInputError(
            f"{reduction} on CUDA takes bfloat16 or float16; got {dtype}. "
            f"Use deterministic:{reduction.splits} for it, or run {reduction} on the CPU"
        )


def _check_kinds(dtype: torch.dtype, device: torch.device) -> None:
    if dtype not in _DTYPES:
        raise ShrinkInputError(f"a shrink takes bfloat16, float16 or float32; got {dtype}")
    if device.type not in ("cpu", "cuda"):
        raise ShrinkInputError(f"a shrink runs on cpu or cuda; got {device}")


@cache
def _local() -> ModuleType:
    """Import the CUDA kernel of `local` on first use."""
    try:
        return import_module("fliptrace_kernels.local")
    except ImportError as error:
        raise LaunchError(
            f"local on CUDA needs its compiled kernel; importing it failed: {error}. "
            "Use deterministic:8, or run local on the CPU"
        ) from error


@cache
def _triton_shrink() -> ModuleType:
    """Import the Triton kernels on first use."""
    try:
        from fliptrace_kernels import triton_shrink
    except ImportError as error:
        raise LaunchError(
            "a shrink on CUDA needs Triton, which torch's CUDA builds bring along; "
            f"importing it failed: {error}. Install triton, or run on the CPU"
        ) from error
    return triton_shrink
