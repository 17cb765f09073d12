"""The cells of the table: layer shapes of real models, ranks and numbers of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 8192)
RANKS: Final = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class Layer:
    """One shrink of a model's layer.

    Attributes:
        model: name of the model.
        name: which projections share the input; as many as there are slices.
        k: K, length of the sums.
        slices: how many A matrices are applied in one call.
    """

    model: str
    name: str
    k: int
    slices: int


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One shape of a call: x [rows, k] and `slices` matrices A [rank, k].

    Attributes:
        rows: M, number of tokens.
        k: K, length of the sums.
        slices: number of A matrices.
        rank: R, rows of each A.
    """

    rows: int
    k: int
    slices: int
    rank: int

    def __str__(self) -> str:
        """Return text such as `M 1, K 3072, 3 slices, rank 16`."""
        plural = "" if self.slices == 1 else "s"
        return f"M {self.rows}, K {self.k}, {self.slices} slice{plural}, rank {self.rank}"

    @property
    def least_bytes(self) -> int:
        """Bytes that any implementation moves: 16-bit inputs and weights read, FP32 written."""
        return 2 * self.k * (self.rows + self.slices * self.rank) + (
            4 * self.slices * self.rows * self.rank
        )


def _layers(model: str, hidden: int, attention: int, feed_forward: int) -> tuple[Layer, ...]:
    return (
        Layer(model, "q k v", hidden, 3),
        Layer(model, "o", attention, 1),
        Layer(model, "gate up", hidden, 2),
        Layer(model, "down", feed_forward, 1),
    )


MODELS: Final[dict[str, tuple[Layer, ...]]] = {
    "Llama-3.2-3B": _layers("Llama-3.2-3B", hidden=3072, attention=3072, feed_forward=8192),
    "SmolLM2-135M": _layers("SmolLM2-135M", hidden=576, attention=576, feed_forward=1536),
    "Qwen3-0.6B": _layers("Qwen3-0.6B", hidden=1024, attention=2048, feed_forward=3072),
}
"""Layers by model: hidden size, width of the attention's output, width of the feed-forward."""


def layers_of(k: int, slices: int) -> str:
    """Name the layers that have this shape, such as `Llama-3.2-3B o, Qwen3-0.6B down`."""
    return ", ".join(
        f"{layer.model} {layer.name}"
        for layers in MODELS.values()
        for layer in layers
        if (layer.k, layer.slices) == (k, slices)
    )


def table_cells(
    models: Iterable[str] = tuple(MODELS),
    rows: Sequence[int] = ROWS,
    ranks: Sequence[int] = RANKS,
) -> list[Cell]:
    """List the cells in the order in which they are measured.

    Shapes that two models share come once. Rank 16 comes before the others and, within a rank, few
    rows before many, so that a table that is cut short has what matters most.
    """
    shapes = dict.fromkeys((layer.k, layer.slices) for model in models for layer in MODELS[model])
    return [Cell(row, k, slices, rank) for rank in ranks for row in rows for k, slices in shapes]
