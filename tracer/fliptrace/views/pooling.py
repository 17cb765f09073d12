"""Grids made small enough to draw, so that the worst news of every group of cells stays.

A page of a long execution would hold a million cells. Above a budget neighbouring columns (then rows) are merged to the
worst class, the largest magnitude and the sum of surviving coordinates. Sampling or averaging would be simpler and
would lose exactly the one surviving coordinate that the page exists to show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fliptrace.numerics import CoordinateClass

if TYPE_CHECKING:
    from fliptrace.grids import Grid
    from fliptrace.sites import Site

#: Most cells of one phase that a page embeds.
PAGE_CELLS = 300_000

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Cells:
    """A grid, possibly pooled. Arrays are [row groups, column groups].

    Attributes:
        rows: per row group, its labels in execution order (as in Grid.rows).
        columns: per column group, its token positions or steps.
        classes: int8, the worst class; equal only if every member is equal.
        magnitudes: float32, the largest; ulps: int64 likewise.
        origins: int8, as in Grid; root if any member is a root.
        surviving: int64, summed.
        places: int64, row * columns + column (in the grid) of the worst member: class, then magnitude.
        row_pool: how many rows one group merges at most; column_pool likewise. 1: not pooled.
    """

    rows: tuple[tuple[tuple[str, Site | int], ...], ...]
    columns: tuple[tuple[int, ...], ...]
    classes: Array
    magnitudes: Array
    ulps: Array
    origins: Array
    surviving: Array
    places: Array
    row_pool: int
    column_pool: int

    @property
    def pooled(self) -> bool:
        """Some cells were merged."""
        return self.row_pool > 1 or self.column_pool > 1

    @property
    def badge(self) -> str:
        """One sentence that says what was merged, "" when nothing was."""
        if not self.pooled:
            return ""
        return (
            f"Max-pooled: each cell shows the worst of up to {self.row_pool} × {self.column_pool} cells "
            f"(rows × columns); no differing coordinate is hidden."
        )


def pool(grid: Grid, *, cell_budget: int = PAGE_CELLS) -> Cells:
    """Merge neighbouring cells of a grid until it fits a budget: columns first, rows only when it must be.

    Args:
        grid: the classes and magnitudes of one phase.
        cell_budget: most cells of the result, at least 1.

    Returns:
        The cells; unchanged when the grid fits.
    """
    row_count, column_count = len(grid.rows), len(grid.columns)
    row_pool = max(1, math.ceil(row_count / cell_budget))
    row_groups = max(1, math.ceil(row_count / row_pool))
    column_pool = max(1, math.ceil(column_count / max(1, cell_budget // row_groups)))
    classes = _array(grid.classes)
    worst = _merge(classes, row_pool, column_pool, np.maximum, CoordinateClass.NOT_OBSERVED)
    unseen = _merge(
        classes == CoordinateClass.NOT_OBSERVED, row_pool, column_pool, np.logical_or, False
    )
    worst = np.where(
        (worst == CoordinateClass.EQUAL) & unseen, int(CoordinateClass.NOT_OBSERVED), worst
    )
    origins = _array(grid.origins).astype(np.int64)
    first_origin = _merge(np.where(origins == 0, 9, origins), row_pool, column_pool, np.minimum, 9)
    return Cells(
        rows=_groups(grid.rows, row_pool),
        columns=_groups(grid.columns, column_pool),
        classes=worst.astype(np.int8),
        magnitudes=_merge(
            _array(grid.magnitudes).astype(np.float32), row_pool, column_pool, np.fmax, np.nan
        ),
        ulps=_merge(_array(grid.ulps).astype(np.int64), row_pool, column_pool, np.maximum, 0),
        origins=np.where(first_origin == 9, 0, first_origin).astype(np.int8),
        surviving=_merge(_array(grid.surviving).astype(np.int64), row_pool, column_pool, np.add, 0),
        places=_worst_places(grid, row_pool, column_pool),
        row_pool=row_pool,
        column_pool=column_pool,
    )


def _worst_places(grid: Grid, row_pool: int, column_pool: int) -> Array:
    """Return where the worst member of every group is: not observed is worse than equal, then by class and size."""
    classes = _array(grid.classes).astype(np.float64)
    places = np.arange(classes.size, dtype=np.int64).reshape(classes.shape)
    if row_pool == 1 and column_pool == 1:
        return places
    badness = np.where(classes == CoordinateClass.EQUAL, -2.0, classes)
    sizes = np.nan_to_num(_array(grid.magnitudes).astype(np.float64), nan=1e39, posinf=1e39)
    score = badness * 1e40 + np.minimum(sizes, 1e39)
    best = _merge(score, row_pool, column_pool, np.maximum, -np.inf)
    spread = np.repeat(np.repeat(best, row_pool, 0), column_pool, 1)
    is_best = score == spread[: score.shape[0], : score.shape[1]]
    return _merge(
        np.where(is_best, places, classes.size), row_pool, column_pool, np.minimum, classes.size
    )


def _array(values: torch.Tensor) -> Array:
    return values.detach().cpu().numpy()


def _groups(labels: tuple[Any, ...], size: int) -> tuple[tuple[Any, ...], ...]:
    return tuple(labels[start : start + size] for start in range(0, len(labels), size))


def _merge(values: Array, row_pool: int, column_pool: int, merge: np.ufunc, fill: Any) -> Array:
    """Reduce blocks of [row_pool, column_pool] with a ufunc; the ragged edge is filled with a neutral value."""
    if row_pool == 1 and column_pool == 1:
        return values
    rows, columns = values.shape
    padded = np.pad(
        values,
        ((0, -rows % row_pool), (0, -columns % column_pool)),
        constant_values=fill,
    )
    blocks = padded.reshape(
        padded.shape[0] // row_pool, row_pool, padded.shape[1] // column_pool, column_pool
    )
    merged: Array = merge.reduce(merge.reduce(blocks, axis=3), axis=1)
    return merged
