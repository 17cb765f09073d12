"""The counters that blocks of one launch take their tickets from, all 0 between launches.

A launch sets the counters that it used back to 0, so they are zeroed once in their life. Launches
on one stream follow one another and share counters. A captured launch may be replayed next to
anything, so it owns its counters: a slice of a reserve that was zeroed outside of any capture.
Nothing in a graph resets them.

The reserve cannot be made during a capture, since the zeroing would be captured with the rest and
its memory would belong to the graph. `prepare` makes it, and so does the first call outside of a
capture, which also tops it up. A capture that finds too little is refused by name.

A slice is not given back: whether a graph will be replayed again cannot be known. So each captured
launch, discarded or not, keeps 4 bytes per tile, slice and adapter (at least 128) for the life of
the process: about 1.4 MB for 100 graphs of 112 small launches each.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fliptrace_kernels.errors import LaunchError

RESERVE: Final = 1 << 20
"""Counters set aside per device for captured launches, 4 MiB."""

_STREAM_COUNTERS: Final = 1 << 10
_GRAIN: Final = 32  # captured launches do not share cache lines


@dataclass
class _Reserve:
    """Zeroed counters of one device; those before `used` belong to captured launches."""

    counters: Tensor
    used: int = 0

    @property
    def left(self) -> int:
        return self.counters.numel() - self.used

    def take(self, count: int) -> Tensor:
        taken = self.counters[self.used : self.used + count]
        self.used += -(-count // _GRAIN) * _GRAIN
        return taken


_lock = threading.Lock()
_by_stream: dict[tuple[int, int], Tensor] = {}
_reserves: dict[int, list[_Reserve]] = {}
"""Per device index; the last one is taken from, and graphs still use those before it."""


def prepare(device: torch.device, counters: int = RESERVE) -> None:
    """Make sure that captured launches on `device` find so many counters; waits for the device.

    Args:
        device: a CUDA device.
        counters: tiles * slices * adapters, each rounded up to a multiple of 32, summed over the
            launches of the captures to come.

    Raises:
        LaunchError: if the current stream is being captured.
    """
    with torch.cuda.device(device), _lock:
        if torch.cuda.is_current_stream_capturing():
            raise LaunchError(
                "counters must be zeroed outside of a CUDA graph capture; got a call inside one. "
                f"Call fliptrace_kernels.prepare('{device}') before it"
            )
        reserves = _reserves.setdefault(torch.cuda.current_device(), [])
        if not reserves or reserves[-1].left < counters:
            zeroed = torch.zeros(max(counters, RESERVE), dtype=torch.int32, device=device)
            # A graph may be replayed on any stream.
            torch.cuda.current_stream().synchronize()
            reserves.append(_Reserve(zeroed))


@contextlib.contextmanager
def lend(device: torch.device, count: int) -> Iterator[Tensor]:
    """Lend `count` counters that are 0 to one launch on the current stream of `device`.

    If the launch does not start, its counters are dropped: the next call begins with fresh ones.

    Args:
        device: where the launch runs, with an index if it is a CUDA device.
        count: tiles * slices * adapters.

    Raises:
        LaunchError: if the launch is captured and the reserve does not have so many counters.
    """
    if device.type != "cuda":  # Triton's interpreter
        yield torch.zeros(count, dtype=torch.int32, device=device)
        return
    if torch.cuda.is_current_stream_capturing():
        yield _owned_by_capture(device, count)
        return
    if _left(device) < RESERVE // 2:
        prepare(device)
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    found = _by_stream.get(key)
    if found is None or found.numel() < count:
        found = torch.zeros(max(count, _STREAM_COUNTERS), dtype=torch.int32, device=device)
        _by_stream[key] = found
    try:
        yield found
    except BaseException:
        _by_stream.pop(key, None)
        raise


def _owned_by_capture(device: torch.device, count: int) -> Tensor:
    with _lock:
        if _left(device) < count:
            raise LaunchError(
                f"a captured launch needs {count} counters that were zeroed before the capture; "
                f"{device} has {_left(device)} left. Before capturing, call "
                f"fliptrace_kernels.prepare('{device}', counters=...) with the sum over all "
                "launches of tiles * slices * adapters, each rounded up to a multiple of 32, or "
                "run the call once without a capture"
            )
        return _reserves[device.index][-1].take(count)


def _left(device: torch.device) -> int:
    reserves = _reserves.get(device.index)
    return reserves[-1].left if reserves else 0
