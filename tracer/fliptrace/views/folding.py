"""The heatmap folded to a few characters or rectangles: one row per layer, as many columns as there is room.

Merged cells show the worst of their members. What was not observed never turns into equal by merging: equal is only
what was seen to be equal in every member.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fliptrace.numerics import CoordinateClass
from fliptrace.views.pooling import Array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fliptrace.grids import Grid
    from fliptrace.sites import Site
    from fliptrace.verdicts import PairDiff, RowDifference


@dataclass(frozen=True, eq=False)
class FoldedMap:
    """Both phases of a comparison, folded.

    Attributes:
        rows: per row its first and last layer; (None, None) holds what lies in no layer.
        phases: prefill, decode, or both; those without columns are left out.
        merged_rows: how many layers a row holds at most.
    """

    rows: tuple[tuple[int | None, int | None], ...]
    phases: tuple[FoldedPhase, ...]
    merged_rows: int

    @property
    def merged_columns(self) -> int:
        """How many positions or steps a cell holds at most."""
        return max((len(group) for phase in self.phases for group in phase.columns), default=1)

    @property
    def differs(self) -> bool:
        """Some cell is not equal."""
        return any((phase.classes != CoordinateClass.EQUAL).any() for phase in self.phases)

    def row_name(self, number: int) -> str:
        """Name a row: ``layer 3``, ``layer 4-7``, ``other``."""
        first, last = self.rows[number]
        if first is None:
            return "other"
        return f"layer {first}" if first == last else f"layer {first}-{last}"


@dataclass(frozen=True, eq=False)
class FoldedPhase:
    """One phase.

    Attributes:
        phase: ``prefill`` or ``decode``.
        columns: per column its token positions or steps.
        classes: int8 [rows, columns], the worst of the cell.
        root: (row, column) of the first surviving root, None where it is in the other phase.
    """

    phase: str
    columns: tuple[tuple[int, ...], ...]
    classes: Array
    root: tuple[int, int] | None


def fold(diff: PairDiff, *, width: int, height: int) -> FoldedMap:
    """Fold the grids of a comparison.

    Args:
        diff: what was found.
        width: most columns of all phases together, at least 2.
        height: most rows, at least 2.
    """
    grids = [grid for grid in diff.grids.values() if grid.rows and grid.columns]
    layers = list(dict.fromkeys(_layer(place) for grid in grids for _, place in grid.rows))
    inside = sorted(layer for layer in layers if layer is not None)
    room = max(1, height - (None in layers))
    per_row = max(1, math.ceil(len(inside) / room))
    rows: list[tuple[int | None, int | None]] = [
        (inside[start], inside[min(start + per_row, len(inside)) - 1])
        for start in range(0, len(inside), per_row)
    ]
    if None in layers:
        rows.append((None, None))
    root = diff.first_propagating or diff.first_surviving
    shares = _shares([len(grid.columns) for grid in grids], width)
    phases = tuple(
        _fold_phase(grid, rows, share, root) for grid, share in zip(grids, shares, strict=True)
    )
    return FoldedMap(tuple(rows), phases, per_row)


def _layer(place: Site | int) -> int | None:
    return place if isinstance(place, int) else place.layer


def _shares(counts: Sequence[int], width: int) -> list[int]:
    """Give every phase its part of the width; one that needs less leaves the rest to the other."""
    total = sum(counts)
    if total <= width:
        return list(counts)
    smallest = max(1, min(8, width // max(1, len(counts))))
    shares = [min(count, max(smallest, width * count // total)) for count in counts]
    while sum(shares) > width:
        shares[shares.index(max(shares))] -= 1
    return shares


def _fold_phase(
    grid: Grid,
    rows: Sequence[tuple[int | None, int | None]],
    share: int,
    root: RowDifference | None,
) -> FoldedPhase:
    size = math.ceil(len(grid.columns) / share)
    columns = [grid.columns[start : start + size] for start in range(0, len(grid.columns), size)]
    classes = grid.classes.cpu().numpy()
    layers = [_layer(place) for _, place in grid.rows]
    folded = np.full((len(rows), len(columns)), int(CoordinateClass.NOT_OBSERVED), np.int8)
    for row, (first, last) in enumerate(rows):
        members = [n for n, layer in enumerate(layers) if _within(layer, first, last)]
        for column in range(len(columns)) if members else ():
            part = classes[members, column * size : (column + 1) * size]
            folded[row, column] = _worst(part)
    return FoldedPhase(
        grid.phase, tuple(columns), folded, _root_place(root, grid.phase, rows, columns)
    )


def _within(layer: int | None, first: int | None, last: int | None) -> bool:
    if layer is None or first is None or last is None:
        return layer is None and first is None
    return first <= layer <= last


def _worst(part: Array) -> int:
    worst = int(part.max())
    unseen = bool((part == CoordinateClass.NOT_OBSERVED).any())
    return int(CoordinateClass.NOT_OBSERVED) if worst == CoordinateClass.EQUAL and unseen else worst


def _root_place(
    root: RowDifference | None,
    phase: str,
    rows: Sequence[tuple[int | None, int | None]],
    columns: Sequence[tuple[int, ...]],
) -> tuple[int, int] | None:
    if root is None or (root.step == 0) != (phase == "prefill"):
        return None
    column = root.position if phase == "prefill" else root.step
    at_row = [n for n, (first, last) in enumerate(rows) if _within(root.site.layer, first, last)]
    at_column = [n for n, group in enumerate(columns) if column in group]
    return (at_row[0], at_column[0]) if at_row and at_column else None
