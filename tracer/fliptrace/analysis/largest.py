"""Picks what a reader of one cell wants to see: its differing elements, surviving ones first, then the largest.

Of a surviving root every element is kept (up to a bound), elsewhere a few: what is left out is counted in the grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fliptrace.analysis.frame_rows import magnitude
from fliptrace.numerics import CoordinateClass, classify, integer_view

#: Elements kept of a cell, and of the cell of a surviving root.
CELL_ELEMENTS, ROOT_ELEMENTS = 4, 64
_SURVIVING = int(CoordinateClass.SURVIVING)


@dataclass(frozen=True)
class Elements:
    """Differing elements of one step, those of a cell together.

    Attributes:
        rows: int64 [N], the record's row among the step's cells; columns: the token row.
        heads: int32 [N], -1 where the record has none; indices: rank index, or element of the head.
        reference: [N] in float32, which holds every 16-bit value exactly; candidate likewise.
    """

    rows: Tensor
    columns: Tensor
    heads: Tensor
    indices: Tensor
    reference: Tensor
    candidate: Tensor

    @classmethod
    def joined(cls, parts: list[Elements]) -> Elements | None:
        """Put parts together, None where there are none."""
        if not parts:
            return None
        return cls(
            *(torch.cat(values) for values in zip(*(vars(p).values() for p in parts), strict=True))
        )


def largest_of_rows(one: Tensor, other: Tensor, head_dim: int) -> tuple[Tensor, Elements]:
    """Pick the elements of differing rows of keys or values.

    Args:
        one: [rows, heads * head_dim], every row different from other's.
        other: the candidate's, likewise.
        head_dim: elements of a head.

    Returns:
        The elements, whose ``rows`` and ``columns`` are still to be filled, and each one's row.
    """
    limits = torch.full((one.shape[0],), CELL_ELEMENTS)
    cell, index = picked(one, other, limits, None)
    empty = torch.zeros_like(cell)
    return cell, Elements(
        rows=empty,
        columns=empty,
        heads=torch.div(index, head_dim, rounding_mode="floor").to(torch.int32),
        indices=(index % head_dim).to(torch.int32),
        reference=one[cell, index].to(torch.float32),
        candidate=other[cell, index].to(torch.float32),
    )


def picked(
    one: Tensor, other: Tensor, limits: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Choose what is kept of every row, surviving elements first, then by size.

    Args:
        one: [rows, elements].
        other: [rows, elements].
        limits: how many elements to keep of every row at most, int64 [rows].
        dtype: the type that decides survival; None: every difference survives.

    Returns:
        (row, element) of each.
    """
    differs = integer_view(one) != integer_view(other)
    score = magnitude(one, other).to(torch.float64).clamp(max=1e39)
    if dtype is not None:
        score = torch.where(classify(one, other, dtype) == _SURVIVING, score + 1e40, score)
    score = torch.where(differs, score, -1.0)
    most = min(one.shape[1], int(limits.max()) if limits.numel() else 0)
    found = score.topk(most, dim=1)
    kept = (found.values >= 0) & (torch.arange(most) < limits.unsqueeze(1))
    cell, place = kept.nonzero(as_tuple=True)
    return cell, found.indices[cell, place]
