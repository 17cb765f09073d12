"""Load compiled kernels into a CUDA context and start them. Knows nothing about tensors."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from fliptrace_kernels.errors import LaunchError
from fliptrace_kernels.local.compilation import Compiled, Variant, compile_for, cuda_bindings

SLICES_PER_LAUNCH: Final = 4

# The struct Arguments of source.cu.
LAYOUT: Final = struct.Struct("@PqPPqqqPqqP4P4q4qiiif")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A kernel that can be started.

    Attributes:
        function: its CUfunction.
        context: the primary CUcontext of its device.
        threads: threads per block.
        shared_bytes: dynamic shared memory per block.
        kernel: its name.
    """

    function: Any
    context: Any
    threads: int
    shared_bytes: int
    kernel: str


class _Slot(threading.local):
    """Memory for the arguments of one launch; the driver copies them before a launch returns."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(LAYOUT.size)
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.address = ctypes.addressof(self.pointers)


_slot = _Slot()
_loaded: dict[tuple[Variant, int], Loaded] = {}
_loading = threading.Lock()


def loaded(variant: Variant, device: int) -> Loaded:
    """Return a kernel on a device, compiling and loading it on first use.

    Loading is allowed while a stream is captured: it is no work of the stream.

    Args:
        variant: the kernel.
        device: index of the CUDA device, which must be torch's current one.

    Raises:
        LaunchError: if it cannot be compiled or loaded.
    """
    found = _loaded.get((variant, device))
    if found is not None:
        return found
    load_all([variant], device)
    return _loaded[variant, device]


def load_all(variants: Iterable[Variant], device: int) -> None:
    """Compile and load kernels, several at once.

    Args:
        variants: the kernels.
        device: index of the CUDA device, which must be torch's current one.

    Raises:
        LaunchError: if one cannot be compiled or loaded.
    """
    with _loading:
        missing = [v for v in dict.fromkeys(variants) if (v, device) not in _loaded]
        capability = torch.cuda.get_device_capability(device)
        if len(missing) > 1:
            with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1)) as pool:
                images = list(pool.map(compile_for, missing, [capability] * len(missing)))
        else:
            images = [compile_for(variant, capability) for variant in missing]
        for variant, image in zip(missing, images, strict=True):
            _loaded[variant, device] = _load(variant, image, device)


def start(
    kernel: Loaded, grid: tuple[int, int, int], stream: int, arguments: Sequence[int | float]
) -> None:
    """Start a kernel.

    Args:
        kernel: what `loaded` returned.
        grid: blocks along x, y and z.
        stream: CUDA stream, as an address.
        arguments: the fields of `LAYOUT`.

    Raises:
        LaunchError: if the driver refuses.
    """
    slot = _slot
    LAYOUT.pack_into(slot.buffer, 0, *arguments)
    driver = _driver()
    launch = (kernel.function, *grid, kernel.threads, 1, 1, kernel.shared_bytes, stream)
    (error,) = driver.cuLaunchKernel(*launch, slot.address, 0)
    if error and error == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
        # A thread new to CUDA. Nothing was started, and a thread that captures is not new.
        driver.cuCtxSetCurrent(kernel.context)
        (error,) = driver.cuLaunchKernel(*launch, slot.address, 0)
    if error:
        raise LaunchError(
            f"{kernel.kernel} must start with grid {grid}, {kernel.threads} threads and "
            f"{kernel.shared_bytes} bytes of shared memory; the driver answered {error!r}"
        )


def _load(variant: Variant, compiled: Compiled, device: int) -> Loaded:
    driver = _driver()
    torch.cuda.set_device(device)  # a thread new to CUDA has no context yet
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    error, before = driver.cuThreadExchangeStreamCaptureMode(mode)
    _require(error, "relaxing the capture mode", variant)
    try:
        context = _primary_context(device)
        (error,) = driver.cuCtxSetCurrent(context)
        _require(error, "entering the device's context", variant)
        error, module = driver.cuModuleLoadData(compiled.image)
        _require(error, f"loading code for {compiled.target}", variant)
        error, function = driver.cuModuleGetFunction(module, variant.kernel.encode())
        _require(error, "looking the kernel up", variant)
        shared_bytes = variant.arrangement.shared_bytes(variant.splits)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (error,) = driver.cuFuncSetAttribute(function, attribute, shared_bytes)
        _require(error, f"asking for {shared_bytes} bytes of shared memory", variant)
        (error,) = driver.cuFuncLoad(function)
        _require(error, "loading the kernel", variant)
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)
    threads = variant.arrangement.threads(variant.splits)
    return Loaded(function, context, threads, shared_bytes, variant.kernel)


@cache
def _primary_context(device: int) -> Any:
    """Return the context that torch works in too; retained once and kept."""
    error, context = _driver().cuDevicePrimaryCtxRetain(device)
    _require(error, "taking the primary context", f"device {device}")
    return context


def _require(error: Any, doing: str, what: Variant | str) -> None:
    if int(error):
        raise LaunchError(f"{doing} must succeed for {what}; the driver answered {error!r}")


@cache
def _driver() -> Any:
    return cuda_bindings("driver")
