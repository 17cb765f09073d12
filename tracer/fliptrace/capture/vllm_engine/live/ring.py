"""Rings on the device that shrinks are recorded into, by a Triton kernel on CUDA and by plain torch on the CPU.

The number of the next row is on the device, because a replayed graph runs no Python: what writes reads it there, and
one addition per forward advances it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fliptrace.capture.vllm_engine.live.layout import (
    LAYER_HEADER_WORDS,
    RecordLayout,
    low_halves,
)
from fliptrace.errors import RecordingError
from fliptrace.numerics import digest_rows
from fliptrace.numerics.digest import dtype_tag


class Ring:
    """Preallocated buffers of one engine.

    Attributes:
        layout: of a row.
        rows: int32 [capacity, words].
        operands: int64 [capacity of operands, words], or None.
        counter: int64 [1], number of the next row; it starts at 1, so that zeros are never a row.
    """

    def __init__(
        self, layout: RecordLayout, device: torch.device, capacity: int, operand_bytes: int
    ) -> None:
        """Allocate; not during a capture."""
        self.layout = layout
        self.capacity = capacity
        line = layout.operand_starts[-1] * 8
        kept = min(capacity, operand_bytes // line) if line else 0
        # Tensors made under inference mode could not be changed outside it.
        with torch.inference_mode(False):
            self.rows = torch.zeros((capacity, layout.starts[-1]), dtype=torch.int32, device=device)
            self.operands = (
                torch.empty((kept, layout.operand_starts[-1]), dtype=torch.int64, device=device)
                if kept
                else None
            )
            self.counter = torch.ones(1, dtype=torch.int64, device=device)
            self.table = layout.table().to(device)
        self.tag = dtype_tag(layout.dtype)
        self.on_cuda = device.type == "cuda"

    @property
    def bytes(self) -> int:
        """Device memory taken."""
        kept = 0 if self.operands is None else self.operands.nbytes
        return self.rows.nbytes + kept

    def prepare(self, mapping: Tensor, x: Tensor, z: Tensor) -> None:
        """Compile and load what a capture must not: launches that write only the next row, which is written again."""
        if not self.on_cuda:
            return
        from fliptrace_kernels.vllm_plugin.record_rows import record

        nowhere = torch.zeros((len(self.layout.layers), 2), dtype=torch.int64, device=x.device)
        for operands in (self._operands_for(1), None):
            shared = (self.rows, operands, self.counter, self.table, mapping)
            record(*shared, rows=1, tag=self.tag, layer=0, x=x, z=z)
            record(*shared, rows=1, tag=self.tag, addresses=nowhere)

    def record_layer(self, layer: int, x: Tensor, z: Any, mapping: Tensor) -> None:
        """Record one layer of a forward.

        Args:
            layer: which.
            x: operands, [M, K].
            z: FP32 shrinks per slice, each [M, R].
            mapping: adapter of each row, [M] or longer.
        """
        if x.shape[0] > self.capacity:
            return
        if not self.on_cuda:
            self._record_by_torch(layer, x, z, mapping)
            return
        from fliptrace_kernels.vllm_plugin.record_rows import keeps_bits, record

        if not keeps_bits(x) or not z.is_contiguous():
            raise RecordingError(
                f"operands must be contiguous 16-bit rows of whole 64-bit words and shrinks contiguous; got "
                f"{tuple(x.shape)} {x.dtype} with strides {x.stride()} and {z.stride()}"
            )
        record(
            self.rows,
            self._operands_for(x.shape[0]),
            self.counter,
            self.table,
            mapping,
            rows=x.shape[0],
            tag=self.tag,
            layer=layer,
            x=x,
            z=z,
        )

    def record_all(
        self, held: Sequence[tuple[int, Tensor, Any]], addresses: Tensor, mapping: Tensor, rows: int
    ) -> None:
        """Record all layers of a forward in one launch.

        Args:
            held: layer, operands and shrinks of each.
            addresses: int64 [layers, 2] on the device, filled before the launch runs.
            mapping: adapter of each row.
            rows: M.
        """
        if rows > self.capacity:
            return
        if not self.on_cuda:
            for layer, x, z in held:
                self._record_by_torch(layer, x, z, mapping)
            return
        from fliptrace_kernels.vllm_plugin.record_rows import record

        record(
            self.rows,
            self._operands_for(rows),
            self.counter,
            self.table,
            mapping,
            rows=rows,
            tag=self.tag,
            addresses=addresses,
        )

    def advance(self, rows: int) -> None:
        """End a forward: the next row has another number."""
        self.counter.add_(rows)

    def operand(self, number: int, layer: int) -> Tensor | None:
        """Copy an operand row, [K], that may have been overwritten: compare its digest."""
        if self.operands is None:
            return None
        start, words = self.layout.operand_starts[layer], self.layout.words(layer)
        row = self.operands[number % self.operands.shape[0], start : start + words]
        return row.clone().cpu().view(self.layout.dtype)

    def _operands_for(self, rows: int) -> Tensor | None:
        kept = self.operands
        return kept if kept is not None and rows <= kept.shape[0] else None

    def _record_by_torch(self, layer: int, x: Tensor, z: Any, mapping: Tensor) -> None:
        count = x.shape[0]
        numbers = self.counter + torch.arange(count)
        slots = numbers % self.capacity
        start, shape = self.layout.starts[layer], self.layout.layers[layer]
        if layer == 0:
            header = torch.empty((count, 4), dtype=torch.int32)
            header[:, :2] = numbers.view(torch.int32).view(count, 2)
            header[:, 2] = mapping[:count]
            header[:, 3] = count
            self.rows[slots, :4] = header
        entry = torch.zeros((count, LAYER_HEADER_WORDS + shape.values), dtype=torch.int32)
        entry[:, 0] = low_halves(numbers)
        entry[:, 2:6] = digest_rows(x).view(torch.int32)
        values = torch.stack([part[:count] for part in z], dim=1).reshape(count, -1)
        entry[:, 6:] = values.contiguous().view(torch.int32)
        self.rows[slots, start : start + entry.shape[1]] = entry
        kept = self._operands_for(count)
        if kept is not None:
            first = self.layout.operand_starts[layer]
            words = x.contiguous().view(torch.int64)
            kept[numbers % kept.shape[0], first : first + words.shape[1]] = words
