"""The propagation graph as it is drawn: records merged into nodes, pruned, each with its place; plain values.

fliptrace.analysis.propagation_chart fills these values and fliptrace.views.propagation draws them. An edge says that
data can flow from one node to the other and that both differ; it does not say that one difference caused the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fliptrace.numerics import CoordinateClass


class NodeKind(StrEnum):
    """What a node stands for."""

    ROOT = "root"
    VARIANT = "configuration-variant"
    ELSEWHERE = "first seen here"
    SHRINKS = "projections"
    CACHE = "keys and values"
    MIXED = "projections, keys and values"
    LOGITS = "logits"
    FLIP = "flip"


@dataclass(frozen=True, slots=True)
class Band:
    """Steps that are drawn as one row of the picture.

    Attributes:
        first: the first step; last: the last one.
        drawn: how many of these steps' records were looked at; the others only by what they left in the cache.
    """

    first: int
    last: int
    drawn: int


@dataclass(frozen=True, slots=True)
class ChartNode:
    """Differing records of one band and place in the network, or a root.

    Attributes:
        name: the place: ``layer 2 keys and values``.
        kind: what it stands for.
        band: its number in PropagationChart.bands.
        column: its column, counted from 0 in execution order within a step.
        x: its place in the picture from 0 (first column) to 1; y: likewise from 0 (top) to 1.
        records: how many differing records it stands for; for a root, rows.
        coordinate_class: the worst class among them; None for the flip.
        magnitude: the largest |difference| of its FP32 shrinks, None without any.
        cache_magnitude: of its keys and values, None without any.
        positions: absolute token positions of its differing rows, at most 16; position_count: how many there are.
        added_rows: surviving shrink rows with bit-equal operands, whose whole difference was added here.
        inherited_rows: surviving shrink rows with a differing operand.
        unlocated_rows: surviving shrink rows whose operand was not recorded, or that were launched differently.
        on_path: it lies on the path that is drawn bold.
        step: the step of what entered here, None for other nodes.
        layer: its first layer, None outside the layers.
    """

    name: str
    kind: NodeKind
    band: int
    column: int
    x: float
    y: float
    records: int
    coordinate_class: CoordinateClass | None
    magnitude: float | None
    cache_magnitude: float | None
    positions: tuple[int, ...]
    position_count: int
    added_rows: int
    inherited_rows: int
    unlocated_rows: int
    on_path: bool
    step: int | None = None
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class ChartEdge:
    """Data flow between two nodes.

    Attributes:
        source: number of a node; target: likewise.
        cached: through keys and values that an earlier band wrote.
        on_path: it lies on the path that is drawn bold.
    """

    source: int
    target: int
    cached: bool
    on_path: bool


@dataclass(frozen=True, slots=True)
class PropagationChart:
    """The propagation graph from the roots to the flip, pruned and laid out.

    Attributes:
        bands: rows of the picture, top to bottom.
        nodes: in execution order; edges: between their numbers.
        columns: how many columns there are; rows: how many nodes fit above one another.
        merged: what a node of a layer holds: ``projection``, ``block``, ``half layer``, ``layer`` or ``layers``.
        reaches_flip: the flip can be reached from a root; None without a flip.
        records: differing records that the nodes stand for.
        left_out: differing records of the looked-at steps from which no way leads to the flip, or to which none leads
            from a root.
        latent: shrink records whose difference ends in rounding, left out.
        roots_drawn: root rows with a node of their own; roots: surviving root rows, of the looked-at steps, from
            which a way leads to the flip (without one, all that left their projection).
        steps_between: steps between the bands' looked-at ones that are drawn only by what they left in the cache.
        operands_kept: both traces hold the operands themselves, not their digests only.
        separated: what shrinks added beyond what they inherited is in the grids (Grid.added).
    """

    bands: tuple[Band, ...]
    nodes: tuple[ChartNode, ...]
    edges: tuple[ChartEdge, ...]
    columns: int
    rows: int
    merged: str
    reaches_flip: bool | None
    records: int
    left_out: int
    latent: int
    roots_drawn: int
    roots: int
    steps_between: int
    operands_kept: bool
    separated: bool = False
