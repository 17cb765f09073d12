"""What one row of the recorder's ring holds: a header, then per LoRA layer its operand's digest and its shrinks.

A row belongs to one token row of one forward. As 32-bit words: the row's number (two), its adapter's slot, the rows of
its forward with padding; then per layer the low half of the row's number, a word of padding, the 128-bit digest of the
operand row (fliptrace.numerics.digest) and the FP32 shrinks of all slices as bits. A layer that did not run leaves an
older number, so that nothing stale is taken for new. Operands lie in a ring of their own, as 64-bit words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from fliptrace.errors import UnsupportedModelError

HEADER_WORDS = 4
LAYER_HEADER_WORDS = 6


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a LoRA layer's shrinks.

    Attributes:
        size: K, elements of an operand row.
        slices: fused projections.
        rank: columns of a shrink, with vLLM's padding.
    """

    size: int
    slices: int
    rank: int

    @property
    def values(self) -> int:
        """Shrink values of one row."""
        return self.slices * self.rank


@dataclass(frozen=True)
class RecordLayout:
    """Where the layers lie in a row.

    Attributes:
        layers: in execution order.
        dtype: of operands.
    """

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        odd = [layer.size for layer in self.layers if layer.size * self.dtype.itemsize % 8]
        if odd:
            raise UnsupportedModelError(
                f"operand rows must be whole 64-bit words to be digested on the device; one has {odd[0]} elements of "
                f"{self.dtype}"
            )

    def words(self, layer: int) -> int:
        """64-bit words of a layer's operand row."""
        return self.layers[layer].size * self.dtype.itemsize // 8

    @property
    def starts(self) -> tuple[int, ...]:
        """First 32-bit word of each layer, then the length of a row; all even."""
        sizes = (LAYER_HEADER_WORDS + layer.values + layer.values % 2 for layer in self.layers)
        return tuple(accumulate(sizes, initial=HEADER_WORDS))

    @property
    def operand_starts(self) -> tuple[int, ...]:
        """First 64-bit word of each layer's operand, then the length of an operand row."""
        return tuple(accumulate((self.words(n) for n in range(len(self.layers))), initial=0))

    def table(self) -> Tensor:
        """Return what the kernel reads: int64 [layers, 5]."""
        return torch.tensor(
            [
                (self.words(number), layer.slices, layer.rank, start, operand)
                for number, (layer, start, operand) in enumerate(
                    zip(self.layers, self.starts, self.operand_starts, strict=False)
                )
            ],
            dtype=torch.int64,
        )

    def digests(self, rows: Tensor) -> Tensor:
        """Operand digests, int64 [N, layers, 2], of recorded rows, int32 [N, words]."""
        columns = torch.tensor([[start + 2 + k for k in range(4)] for start in self.starts[:-1]])
        return rows[:, columns].contiguous().view(torch.int64)

    def stamps(self, rows: Tensor) -> Tensor:
        """Numbers, low halves, that the layers left: int32 [N, layers]."""
        return rows[:, list(self.starts[:-1])]

    def shrinks(self, rows: Tensor, layer: int) -> Tensor:
        """FP32 shrinks of a layer, [N, slices, rank]."""
        shape, start = self.layers[layer], self.starts[layer] + LAYER_HEADER_WORDS
        values = rows[:, start : start + shape.values].contiguous().view(torch.float32)
        return values.view(rows.shape[0], shape.slices, shape.rank)


def row_numbers(rows: Tensor) -> Tensor:
    """Numbers, int64 [N], in the headers of recorded rows."""
    return rows[:, :2].contiguous().view(torch.int64)[:, 0]


def low_halves(numbers: Tensor) -> Tensor:
    """Low 32 bits of row numbers as the kernel stores them: int32."""
    return numbers.contiguous().view(torch.int32).view(*numbers.shape, 2)[..., 0]


def shape_of(stacked: Sequence[Tensor]) -> LayerShape:
    """Return the sizes of a layer from its stacked A matrices, per slice [adapters, 1, R, K]."""
    return LayerShape(int(stacked[0].shape[-1]), len(stacked), int(stacked[0].shape[-2]))
