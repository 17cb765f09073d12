"""The cells of a heatmap as tensors: plain values that fliptrace.analysis fills and fliptrace.views draws."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fliptrace.sites import Site


@dataclass(frozen=True, eq=False)
class LargestElements:
    """Differing elements of a grid's cells: all of a surviving root's (at most 64), elsewhere the largest four.

    Attributes:
        cells: int32 [N], row * columns + column, ascending; within a cell surviving ones first, then by size.
        positions: int32 [N], absolute token positions.
        heads: int32 [N], key/value heads, -1 for shrinks; indices: rank index, or the element within the head.
        reference: float32 [N] (16-bit values are exact in it); candidate likewise.
        cache_dtype: the type of keys and values, "" where none were recorded.
    """

    cells: Tensor
    positions: Tensor
    heads: Tensor
    indices: Tensor
    reference: Tensor
    candidate: Tensor
    cache_dtype: str = ""


@dataclass(frozen=True, eq=False)
class Grid:
    """Classes and magnitudes of one phase, ready to be drawn.

    Attributes:
        phase: ``prefill`` (columns are token positions) or ``decode`` (columns are steps 1 .. n).
        rows: labels with what they are: ("shrink", Site) or ("key", layer) or ("value", layer), in execution order.
        columns: absolute token positions, or steps.
        classes: int8 [rows, columns] of CoordinateClass, the worst of the cell; NOT_OBSERVED where nothing was
            recorded.
        magnitudes: float32 [rows, columns], max |reference - candidate| (FP32 for shrinks, 16-bit values for K and V);
            0 where equal.
        ulps: int64 [rows, columns], max distance in ULP of the record's dtype.
        origins: int8 [rows, columns]: 0 no difference, 1 root, 2 inherited, 3 configuration-variant, 4 unlocated;
            shrink rows only, 0 elsewhere.
        surviving: int32 [rows, columns], surviving coordinates (for K and V: differing elements).
        largest: elements with their values, None where nothing differs.
        inherited: float32 [rows, columns], the largest |part| of a shrink's difference that its operands account for;
            NaN where that is not known. None where no operand was kept or no weight was given.
        added: float32 [rows, columns], likewise of what is left: the shrink's own rounding.
    """

    phase: str
    rows: tuple[tuple[str, Site | int], ...]
    columns: tuple[int, ...]
    classes: Tensor
    magnitudes: Tensor
    ulps: Tensor
    origins: Tensor
    surviving: Tensor
    largest: LargestElements | None = None
    inherited: Tensor | None = None
    added: Tensor | None = None
