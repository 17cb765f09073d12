"""Small copies on one CUDA device, asked of the CUDA runtime without PyTorch's dispatcher.

A recorded step of a vLLM engine copies some 90 tensors the moment they are seen. ``Tensor.copy_`` ends in the same
asynchronous copy on the same stream, after more time on the host than the call itself takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fliptrace.errors import RecordingError

_DEVICE_TO_DEVICE = 3
_MAPS = Path("/proc/self/maps")

#: Copies all bytes of a contiguous tensor to an address on its device, in the order of the current stream.
DeviceCopy = Callable[[int, Tensor], None]


def find_device_copy(device: torch.device) -> DeviceCopy | None:
    """Return the copy for a device; None where it is no CUDA device, or the runtime's function does not copy as asked.

    Args:
        device: on which everything lies that is copied.
    """
    function = _runtime_copy() if device.type == "cuda" else None
    if function is None:
        return None
    number = torch.empty(0, device=device).device.index
    stream_of: Any = torch._C._cuda_getCurrentRawStream

    def copy(address: int, source: Tensor) -> None:
        code = function(
            address, source.data_ptr(), source.nbytes, _DEVICE_TO_DEVICE, stream_of(number)
        )
        if code:
            raise RecordingError(
                f"the CUDA runtime refused a copy of {source.nbytes} bytes on {device} (error {code}); this recording "
                "is void. After an error of the device nothing more runs in this process: begin another"
            )

    return copy if _copies(copy, device) else None


def _runtime_copy() -> Any:
    """Return cudaMemcpyAsync of the runtime library that PyTorch loaded, or None."""
    try:
        lines = _MAPS.read_text("utf-8").splitlines()
        paths = {line.split(maxsplit=5)[-1] for line in lines if "libcudart" in line}
        # Several runtimes in one process would each have streams of their own.
        (path,) = paths
        # PyDLL: the call takes a few microseconds, and letting another thread in would cost more.
        function: Any = ctypes.PyDLL(path).cudaMemcpyAsync
    except (OSError, ValueError, AttributeError):
        return None
    function.restype = ctypes.c_int
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    return function


def _copies(copy: DeviceCopy, device: torch.device) -> bool:
    """Try it once: bits that arrive as they were."""
    source = torch.arange(1, 130, dtype=torch.int64, device=device)
    target = torch.zeros_like(source)
    copy(target.data_ptr(), source)
    return torch.equal(source, target)
