"""How long one launch takes: many calls in a CUDA graph, replayed with a cold L2 cache.

A replay's time over its calls is one measurement; a kernel's time is the median of many. Before
each replay a buffer larger than the L2 cache is read, so that no weight is left in it, and then x,
which a model's previous operation would have just written. Each call of a graph has weights of its
own. Launch gaps between calls belong to the time, as they do in a model's graph; the start of a
graph (about 3 µs, shared by its calls) does, too.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from fliptrace_kernels.bench.cells import Cell

Launch = Callable[[int], None]
"""Starts the call with this number on the current stream."""

_GRAPH_MICROSECONDS: Final = 250.0
_SHORTEST_CALL: Final = 2.5
_FEWEST_CALLS: Final = 8
_MOST_CALLS: Final = 96
_ROUND_MICROSECONDS: Final = 8000.0
_FEWEST_REPLAYS: Final = 5
_MOST_REPLAYS: Final = 15
_BYTES_PER_MICROSECOND: Final = 3e6  # only to choose the length of a graph
_COPIED_BYTES: Final = 1 << 30


def calls_for(cell: Cell) -> int:
    """Return how many calls a cell's graph holds: fewer where one call takes longer."""
    expected = max(_SHORTEST_CALL, cell.least_bytes / _BYTES_PER_MICROSECOND)
    return min(_MOST_CALLS, max(_FEWEST_CALLS, round(_GRAPH_MICROSECONDS / expected)))


class Stopwatch:
    """Times graphs on the current CUDA device."""

    def __init__(self) -> None:
        """Allocate what is read to empty the L2 cache, and warm the clocks up."""
        properties = torch.cuda.get_device_properties()
        self.l2_bytes = int(properties.L2_cache_size)
        self._filler = torch.ones(2 * self.l2_bytes // 4, dtype=torch.float32, device="cuda")
        self._sink = torch.empty((), dtype=torch.float32, device="cuda")
        self._stream = torch.cuda.Stream()
        self.copy_bytes_per_second = _copy_bandwidth()

    def capture(self, launch: Launch, calls: int) -> torch.cuda.CUDAGraph:
        """Record calls 0, 1, ... into a graph of its own memory.

        Not `torch.cuda.graph`, which empties caches and may collect garbage each time.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin()
            try:
                for call in range(calls):
                    launch(call)
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def screen(self, graph: torch.cuda.CUDAGraph, calls: int, x: Tensor) -> float:
        """Return the median of three replays, in microseconds per call."""
        return statistics.median(self._replay(graph, calls, x, 3))

    def time(self, graph: torch.cuda.CUDAGraph, calls: int, x: Tensor) -> tuple[float, int]:
        """Return the median of many replays, in microseconds per call, and their number."""
        once = self._replay(graph, calls, x, 1)[0] * calls
        wanted = round(_ROUND_MICROSECONDS / (once + 80.0))
        count = min(_MOST_REPLAYS, max(_FEWEST_REPLAYS, wanted))
        return statistics.median(self._replay(graph, calls, x, count)), count

    def _replay(
        self, graph: torch.cuda.CUDAGraph, calls: int, x: Tensor, count: int
    ) -> list[float]:
        # The first replay is left out: while it is prepared the device may be waiting.
        marks = [_events() for _ in range(count + 1)]
        for start, end in marks:
            torch.sum(self._filler, dim=0, out=self._sink)
            x.sum(dtype=torch.float32)
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) / calls for start, end in marks[1:]]


def _events() -> tuple[Any, Any]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _copy_bandwidth() -> float:
    """Copy a large buffer many times; bytes read plus bytes written per second, median."""
    source = torch.empty(_COPIED_BYTES // 4, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    marks = [_events() for _ in range(40)]
    for start, end in marks:
        start.record()
        target.copy_(source)
        end.record()
    torch.cuda.synchronize()
    milliseconds = [float(start.elapsed_time(end)) for start, end in marks[10:]]
    seconds = statistics.median(milliseconds) / 1e3
    return 2 * _COPIED_BYTES / seconds
