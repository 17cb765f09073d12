"""Where records are drawn: their columns in execution order, the names of what is merged, and the layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from fliptrace.analysis.coordinates import site_of
from fliptrace.analysis.differing_records import Node
from fliptrace.analysis.roles import Role, role_of

#: A node's place within a step: layer, stage, order among sites of no known role.
Column = tuple[int, int, int]
LAST_LAYER = 2**30
_STAGES = {
    Role.QUERY: 0,
    Role.KEY: 0,
    Role.VALUE: 0,
    Role.ATTENTION_IN: 0,
    Role.ATTENTION_OUT: 2,
    Role.MLP_IN: 3,
    Role.MLP_OUT: 4,
    Role.OTHER: 5,
}
_CACHE_STAGE = 1
_BLOCKS = (
    "attention inputs",
    "keys and values",
    "attention output",
    "MLP inputs",
    "MLP output",
    "other modules",
)
_HALVES = ("attention inputs, keys and values", "attention output and MLP")


@dataclass(frozen=True)
class Grain:
    """How coarsely records are merged: by site, block or half of a layer, or by this many layers."""

    name: str
    layers: int = 0

    def place(self, node: Node, order: int) -> tuple[Column, str]:
        """Return a record's column and the name of its place."""
        _, what, where = node
        if what in ("logits", "flip"):
            return (LAST_LAYER, 8 + (what == "flip"), 0), what
        site = site_of(where) if isinstance(where, str) else None
        layer = where if isinstance(where, int) else site.layer if site is not None else None
        stage = _CACHE_STAGE if site is None else _STAGES[role_of(site)]
        at = LAST_LAYER if layer is None else layer
        if layer is None:
            other = site.part if site is not None and self.name == "projection" else _BLOCKS[5]
            return (at, 5, order if self.name == "projection" else 0), other
        if self.name == "projection":
            name = what if site is None else site.part
            return (at, stage, order if stage == 5 else 0), f"layer {layer} {name}"
        if self.name == "block":
            return (at, stage, 0), f"layer {layer} {_BLOCKS[stage]}"
        if self.name == "half layer":
            half = int(stage > _CACHE_STAGE)
            return (at, half, 0), f"layer {layer} {_HALVES[half]}"
        first = layer // self.layers * self.layers
        many = f"layers {first} to {first + self.layers - 1}"
        return (first, 0, 0), many if self.layers > 1 else f"layer {layer}"


GRAINS = (
    Grain("projection"),
    Grain("block"),
    Grain("half layer"),
    Grain("layer", 1),
    *(Grain("layers", 2**power) for power in range(1, 12)),
)


def laid_out(places: Sequence[tuple[int, int]]) -> tuple[list[tuple[float, float]], int]:
    """Place nodes by networkx's multipartite layout: a line per column, a row of slots per band.

    Args:
        places: (band, column) per node.

    Returns:
        (x, y) per node from 0 to 1, y downwards, and how many slots lie above one another.
    """
    import networkx as nx

    together: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        together[place].append(number)
    bands, columns = (1 + max(place[at] for place in places) for at in (0, 1))
    heights = [
        max((len(found) for (at, _), found in together.items() if at == band), default=0)
        for band in range(bands)
    ]
    starts = [sum(heights[:band]) + band for band in range(bands)]  # an empty slot between bands
    rows = starts[-1] + heights[-1]
    slots = {column: [(column, row) for row in range(rows)] for column in range(columns)}
    found = nx.multipartite_layout(list(chain(*slots.values())), subset_key=slots)
    left, right = (float(found[column, 0][0]) for column in (0, columns - 1))
    top, bottom = (float(found[0, row][1]) for row in (0, rows - 1))
    at: dict[int, tuple[float, float]] = {}
    for (band, column), numbers in together.items():
        first = starts[band] + (heights[band] - len(numbers)) / 2
        for lane, number in enumerate(numbers):
            # A column with fewer nodes than its band has slots is centred between them.
            low, high = int(first) + lane, int(first + 0.5) + lane
            y = (float(found[column, low][1]) + float(found[column, high][1])) / 2
            x = float(found[column, low][0])
            at[number] = (_share(x, left, right), _share(y, top, bottom))
    return [at[number] for number in range(len(places))], rows


def _share(value: float, low: float, high: float) -> float:
    return round((value - low) / (high - low), 6) if high != low else 0.5
