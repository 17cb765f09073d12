"""Tensors of the calls that are timed: random, cold where a model's would be cold.

x was just written by the operation before, so every call of a cell shares one. Weights were last
read a whole forward ago, so every call of a graph has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fliptrace_kernels.bench.cells import Cell


@dataclass(frozen=True, slots=True)
class Call:
    """What the kernels of one cell are given.

    Attributes:
        cell: the shape.
        x: inputs, [M, K].
        weights: per call of a graph one A per slice, each [1, R, K].
        mapping: adapter of each row, [M], int32: all 0, as when every token uses one adapter.
        out: outputs, [slices, M, R], FP32.
    """

    cell: Cell
    x: Tensor
    weights: tuple[tuple[Tensor, ...], ...]
    mapping: Tensor
    out: Tensor


class Pool:
    """Random numbers in one place, lent to cell after cell as views."""

    def __init__(
        self,
        calls: Mapping[Cell, int],
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Draw as many numbers as the largest cell needs.

        Args:
            calls: how many calls each cell's graph holds.
            device: where.
            dtype: of x and A.
        """
        self._calls = dict(calls)
        self._x = _draw(max(cell.rows * cell.k for cell in calls), 1, device, dtype)
        self._weights = _draw(
            max(count * cell.slices * cell.rank * cell.k for cell, count in calls.items()),
            2,
            device,
            dtype,
        )
        most = max(cell.slices * cell.rows * cell.rank for cell in calls)
        self._out = torch.empty(most, dtype=torch.float32, device=device)
        self._mapping = torch.zeros(
            max(cell.rows for cell in calls), dtype=torch.int32, device=device
        )

    def call_for(self, cell: Cell) -> Call:
        """Lend the tensors of one cell; the output is filled with NaN."""
        size = cell.rank * cell.k
        matrices = self._weights[: self._calls[cell] * cell.slices * size].view(
            self._calls[cell], cell.slices, 1, cell.rank, cell.k
        )
        out = self._out[: cell.slices * cell.rows * cell.rank]
        return Call(
            cell,
            self._x[: cell.rows * cell.k].view(cell.rows, cell.k),
            tuple(tuple(matrices[call]) for call in range(self._calls[cell])),
            self._mapping[: cell.rows],
            out.view(cell.slices, cell.rows, cell.rank).fill_(float("nan")),
        )


def exact(call: Call) -> Tensor:
    """Return the first call's result in FP64, [slices, M, R]."""
    x = call.x.double()
    return torch.stack([x @ a[0].double().T for a in call.weights[0]])


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of what is expected; NaN stays NaN."""
    difference = torch.linalg.vector_norm(result.double() - expected)
    return float(difference / torch.linalg.vector_norm(expected))


def _draw(count: int, seed: int, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(count, dtype=dtype, device=device).normal_(generator=generator)
