"""Who is shown every shrink and has it recorded: at once, or, inside a captured graph, all layers at the end.

A kernel per layer costs a decode step of a small model a tenth or more; one for all layers costs nothing that matters.
But by the end of a forward a layer's operand may have been overwritten. That is tried out, for every number of rows
that is captured later: vLLM runs each size once before it captures it, and that run compares what every layer's
operand and shrinks are when the layer runs with what they are at the end, and where they lie. A size that was not
tried or did not pass is recorded layer by layer. While a graph is captured the tensors are held, so that the graph's
memory pool gives their memory to nobody else before the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fliptrace.capture.vllm_engine.live.layout import LayerShape, RecordLayout, shape_of
from fliptrace.capture.vllm_engine.live.ring import Ring
from fliptrace.capture.vllm_engine.shrinks import own_launch, weights_key

#: Larger forwards are not captured by vLLM, and are recorded layer by layer.
_MOST_ROWS_AT_ONCE = 512
#: Tables of addresses kept ready; a capture takes one and cannot allocate any.
_SPARE_TABLES = 8


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class ShrinkWriter:
    """Learns the layers of the engine that is made next, then records their shrinks.

    Attributes:
        ring: None until every layer has run once.
        keys: addresses of the layers' weights, in execution order.
        launches: description of a launch by layer and rows.
        at_end: numbers of rows whose layers are recorded at the end of a captured forward.
        captured: numbers of rows of every captured forward, and whether its layers are recorded at its end.
    """

    def __init__(
        self,
        capacity: int,
        operand_bytes: int,
        *,
        at_end: bool = True,
        is_capturing: Callable[[], bool] = _is_capturing,
    ) -> None:
        """Allocate nothing yet.

        Args:
            capacity: rows of the ring.
            operand_bytes: most memory for operands.
            at_end: record captured forwards at their end where that was found to be safe.
            is_capturing: whether a graph is being captured.
        """
        self.capacity = capacity
        self.operand_bytes = operand_bytes
        self.ring: Ring | None = None
        self.launches: dict[tuple[int, int], str] = {}
        self.at_end: set[int] = set()
        self.captured: list[tuple[int, bool]] = []
        self.is_watched = False
        self._wants_end = at_end
        self._is_capturing = is_capturing
        self._shapes: dict[tuple[int, ...], LayerShape] = {}
        self._numbers: dict[tuple[int, ...], int] = {}
        self._tried: set[int] = set()
        self._spare: list[Tensor] = []
        self._unfilled: list[tuple[Tensor, list[tuple[int, int, int]]]] = []
        self._in_graphs: list[Tensor] = []  # graphs read these tables, and do not own them
        self._capturing = self._deferring = self._trying = False
        self._held: list[tuple[int, Tensor, Any]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []

    @property
    def keys(self) -> tuple[tuple[int, ...], ...]:
        """Addresses of the layers' weights, in execution order."""
        return tuple(self._numbers)

    def show(self, x: Tensor, stacked: Sequence[Tensor], z: Any, mapping: Tensor) -> None:
        """Take one layer's shrink: operands [M, K], weights, FP32 shrinks per slice [M, R], adapter of each row."""
        key = weights_key(stacked)
        if self.ring is None:
            if key not in self._shapes:
                self._shapes[key] = shape_of(stacked)
                return
            if self._is_capturing():
                # Too late to allocate; this graph does not record, which its rows will show.
                self.captured.append((x.shape[0], False))
                return
            self._allocate(x, z, mapping)
        number = self._numbers.get(key)
        if number is None or self.ring is None:  # another engine's
            return
        rows = x.shape[0]
        if number == 0:
            self._begin(rows)
        if (number, rows) not in self.launches:
            self.launches[number, rows] = _launch_of(x, stacked)
        if self._deferring:
            self._held.append((number, x, z))
        else:
            self.ring.record_layer(number, x, z, mapping)
        if self._trying:
            self._held.append((number, x, z))
            self._copies.append((x.clone(), z.clone()))
        if number == len(self._numbers) - 1:
            self._end(rows, mapping)

    def fill_tables(self) -> None:
        """Write the addresses that captures have left, before anything is replayed that is to be read."""
        while self._unfilled:
            table, places = self._unfilled.pop()
            filled = torch.zeros(tuple(table.shape), dtype=torch.int64)
            for number, x, z in places:
                filled[number, 0], filled[number, 1] = x, z
            table.copy_(filled)
            self._in_graphs.append(table)

    def _allocate(self, x: Tensor, z: Any, mapping: Tensor) -> None:
        self._numbers = {key: number for number, key in enumerate(self._shapes)}
        layout = RecordLayout(tuple(self._shapes.values()), x.dtype)
        self.ring = Ring(layout, x.device, self.capacity, self.operand_bytes)
        self.ring.prepare(mapping, x, z)

    def _begin(self, rows: int) -> None:
        self._held, self._copies = [], []
        self._capturing = self._is_capturing()
        self._deferring = self._capturing and rows in self.at_end and bool(self._spare)
        self._trying = (
            self._wants_end
            and not self._capturing
            and not self.is_watched
            and rows <= _MOST_ROWS_AT_ONCE
            and rows not in self._tried
        )
        if not self._capturing and not self.is_watched:
            self.fill_tables()
            self._refill()

    def _end(self, rows: int, mapping: Tensor) -> None:
        ring = self.ring
        if ring is None:  # set before any forward begins
            return
        if self._deferring:
            table = self._spare.pop()
            places = [(n, x.data_ptr(), z.data_ptr()) for n, x, z in self._held]
            self._unfilled.append((table, places))
            ring.record_all(self._held, table, mapping, rows)
        ring.advance(rows)
        if self._capturing:
            self.captured.append((rows, self._deferring))
        if self._trying:
            self._tried.add(rows)
            if self._kept_until_end():
                self.at_end.add(rows)
        self._held, self._copies = [], []
        self._capturing = self._deferring = self._trying = False

    def _refill(self) -> None:
        """Keep tables ready, for all graphs of one size."""
        if self.ring is None or not self._wants_end:
            return
        shape, device = (len(self._numbers), 2), self.ring.rows.device
        with torch.inference_mode(False):
            while len(self._spare) < _SPARE_TABLES:
                self._spare.append(torch.zeros(shape, dtype=torch.int64, device=device))

    def _kept_until_end(self) -> bool:
        """Whether every layer's operand and shrinks still have their bits, in memory of their own."""
        if len(self._held) != len(self._numbers):
            return False
        places = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
            for _, x, z in self._held
            for tensor in (x, z)
        )
        if any(end > begin for (_, end), (begin, _) in pairwise(places)):
            return False
        return all(
            torch.equal(x.view(torch.int16), x_then.view(torch.int16))
            and torch.equal(z.view(torch.int32), z_then.view(torch.int32))
            for (_, x, z), (x_then, z_then) in zip(self._held, self._copies, strict=True)
        )


def _launch_of(x: Tensor, stacked: Sequence[Tensor]) -> str:
    """Describe a launch by all that its sums depend on."""
    found = own_launch(x, stacked)
    return " ".join(f"{name}={value}" for name, value in found.items())
