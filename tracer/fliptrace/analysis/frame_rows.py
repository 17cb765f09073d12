"""What all comparisons of whole frames share: differing rows, distances, the largest of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from fliptrace.analysis.align import Group, group_tensor
from fliptrace.numerics import integer_view
from fliptrace.trace import Frame


def rows_that_differ(group: Group, before: Frame, after: Frame) -> Tensor:
    """Say which rows of paired records differ in any bit: bool [records, rows]."""
    one, other = (
        integer_view(group_tensor(frame, places, group.entry)).reshape(
            len(places), group.entry.shape[0], -1
        )
        for frame, places in ((before, group.rows), (after, group.columns))
    )
    return (one != other).any(dim=2)


def magnitude(reference: Tensor, candidate: Tensor) -> Tensor:
    """Return |reference - candidate| as float32, infinite where either is NaN (no distance is known)."""
    difference = (reference.to(torch.float32) - candidate.to(torch.float32)).abs()
    return difference.nan_to_num(nan=torch.inf, posinf=torch.inf)


def largest_per_row(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return the largest non-negative value of every row, 0 where a row has none: [count]."""
    return torch.zeros(count, dtype=values.dtype).scatter_reduce_(0, rows, values, "amax")


def row_width(shape: tuple[int, ...]) -> int:
    """Return how many elements a row of a record has."""
    return element_count(shape[1:])


def element_count(shape: tuple[int, ...]) -> int:
    """Return how many elements a record has."""
    count = 1
    for size in shape:
        count *= size
    return count
