"""The heatmap as data for the page: rows with what they are, columns with their tokens, packed arrays, elements.

Shrinks, keys, values and, where they were recorded, module outputs share one grid, so that the page can show any of
them together in execution order. Elements (single values with their bits) have a budget of their own: surviving roots
come first, then other surviving cells, then the rest, one of every cell before the second of any.
"""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fliptrace.grids import Grid, LargestElements
from fliptrace.numerics import CoordinateClass
from fliptrace.sites import Site
from fliptrace.views import heatmap
from fliptrace.views.escaping import visible
from fliptrace.views.keys_values import records_cache
from fliptrace.views.pooling import Array, Cells, pool

if TYPE_CHECKING:
    from fliptrace.trace import Trace
    from fliptrace.verdicts import PairDiff

#: Elements of one phase that a page embeds.
PAGE_ELEMENTS = 40_000
_ROOT = 1
KINDS = {"shrink": "shrinks", "key": "K", "value": "V", "module": "modules"}
_NOT_RECORDED = {
    "shrink": "not recorded",
    "key": "not recorded",
    "value": "not recorded",
    "module": "not recorded: --modules records them",
}


def page_grid(diff: PairDiff, phase: str) -> Grid:
    """Put module outputs among the other rows of a phase, each module after the shrink that it holds."""
    grid, modules = diff.grids[phase], diff.module_grids.get(phase)
    if modules is None or not modules.rows:
        return grid
    order = _woven(grid, modules)
    index = torch.tensor(order)
    merged = {
        name: torch.cat([getattr(grid, name), getattr(modules, name)])[index]
        for name in ("classes", "magnitudes", "ulps", "origins", "surviving")
    }
    for name in ("inherited", "added"):
        mine = getattr(grid, name)
        if mine is not None:
            blank = torch.full(modules.classes.shape, torch.nan)
            merged[name] = torch.cat([mine, blank])[index]
    rows = (*grid.rows, *modules.rows)
    largest = grid.largest
    if largest is not None:
        width = len(grid.columns)
        place_of = torch.empty(len(order), dtype=torch.int64)
        place_of[index] = torch.arange(len(order))
        cells = largest.cells.to(torch.int64)
        moved = place_of[torch.div(cells, width, rounding_mode="floor")] * width + cells % width
        sort = moved.argsort(stable=True)
        largest = LargestElements(
            cells=moved[sort].to(torch.int32),
            positions=largest.positions[sort],
            heads=largest.heads[sort],
            indices=largest.indices[sort],
            reference=largest.reference[sort],
            candidate=largest.candidate[sort],
            cache_dtype=largest.cache_dtype,
        )
    return Grid(phase, tuple(rows[n] for n in order), grid.columns, **merged, largest=largest)


def _woven(grid: Grid, modules: Grid) -> list[int]:
    """Return the order of the rows of both grids, modules numbered after the others."""
    shrinks = {site.path: n for n, (kind, site) in enumerate(grid.rows) if isinstance(site, Site)}
    order: list[int] = []
    taken = 0
    for number, (_, module) in enumerate(modules.rows):
        end = shrinks.get(module.path, -1) if isinstance(module, Site) else -1
        order.extend(range(taken, end + 1))
        taken = max(taken, end + 1)
        order.append(len(grid.rows) + number)
    order.extend(range(taken, len(grid.rows)))
    return order


def kind_choices(diff: PairDiff) -> list[dict[str, Any]]:
    """Say of every kind of row whether it was recorded, and whether the page shows it at first."""
    cached = records_cache(diff)
    present = {kind for grid in diff.grids.values() for kind, _ in grid.rows}
    recorded = {
        "shrink": "shrink" in present,
        "key": cached,
        "value": cached,
        "module": bool(diff.module_grids),
    }
    return [
        {
            "kind": kind,
            "label": label,
            "recorded": recorded[kind],
            "shown": recorded[kind] and kind != "module",
            "why": "" if recorded[kind] else _NOT_RECORDED[kind],
        }
        for kind, label in KINDS.items()
    ]


def page_cells(diff: PairDiff) -> dict[str, tuple[Grid, Cells]]:
    """Return every phase that has cells: its grid, and what of it the page embeds."""
    found = {}
    for phase, grid in diff.grids.items():
        if grid.classes.numel():
            merged = page_grid(diff, phase)
            found[phase] = (merged, pool(merged))
    return found


def phase_data(diff: PairDiff, grid: Grid, cells: Cells, reference: Trace) -> dict[str, Any]:
    """Return everything that the page's script draws one phase from.

    Args:
        diff: what was found.
        grid: the phase, as page_grid made it.
        cells: the same, pooled to the page's budget.
        reference: the trace whose token texts label the columns.
    """
    phase = grid.phase
    mark = heatmap.root_mark(diff.first_propagating or diff.first_surviving, cells, phase)
    return {
        "rows": [_row(kind, place) for kind, place in grid.rows],
        "columns": list(grid.columns),
        "names": [visible(n) for n in heatmap.column_names(cells, phase, reference, limit=48)],
        "labels": heatmap.column_labels(cells, phase, reference),
        "pooled": [cells.row_pool, cells.column_pool],
        "shape": list(cells.classes.shape),
        "classes": packed(cells.classes),
        "magnitudes": packed(cells.magnitudes.astype(np.float32)),
        "ulps": packed(smallest(cells.ulps)),
        "origins": packed(cells.origins),
        "surviving": packed(smallest(cells.surviving)),
        "inherited": _of_worst(grid.inherited, cells),
        "added": _of_worst(grid.added, cells),
        "places": packed(cells.places.astype(np.uint32)) if cells.pooled else None,
        "elements": _elements(grid, reference),
        "positions": _positions(grid, reference),
        "root": mark,
        "lane": lane(diff, cells, phase),
    }


def _of_worst(values: torch.Tensor | None, cells: Cells) -> dict[str, str] | None:
    """Return a grid's values at the worst member of every embedded cell; None where there are none."""
    if values is None:
        return None
    return packed(values.numpy().ravel()[cells.places].astype(np.float32))


def _row(kind: str, place: Site | int) -> dict[str, Any]:
    if isinstance(place, int):
        name = "K" if kind == "key" else "V"
        return {
            "kind": kind,
            "layer": place,
            "name": f"layer {place} {name}",
            "short": f"{place} {name}",
        }
    name = visible(place.name)
    ending = " output" if kind == "module" else ""
    return {
        "kind": kind,
        "layer": place.layer,
        "name": name + ending,
        "short": heatmap.row_tick(kind, place),
        "site": place.path,
        "slice": place.slice,
    }


def _positions(grid: Grid, reference: Trace) -> list[int]:
    """Return the absolute token position of every column's first row."""
    if grid.phase == "prefill":
        return list(grid.columns)
    steps = {step.step: step.first_position for step in reference.steps}
    return [steps.get(step, -1) for step in grid.columns]


def _elements(grid: Grid, reference: Trace) -> dict[str, Any] | None:
    found = grid.largest
    if found is None:
        return None
    chosen = _chosen(grid, found)
    cells = found.cells.numpy()[chosen]
    heads = found.heads.numpy()[chosen].astype(np.int64)
    indices = found.indices.numpy()[chosen].astype(np.int64)
    positions = found.positions.numpy()[chosen]
    derived = np.array(_positions(grid, reference))[cells % len(grid.columns)]
    return {
        "cells": packed(cells.astype(np.uint32)),
        "indices": packed(smallest(np.where(heads >= 0, (heads << 16) | indices, indices))),
        "reference": packed(found.reference.view(torch.int32).numpy()[chosen].view(np.uint32)),
        "candidate": packed(found.candidate.view(torch.int32).numpy()[chosen].view(np.uint32)),
        "positions": None
        if np.array_equal(derived, positions)
        else packed(positions.astype(np.uint32)),
        "cache_dtype": found.cache_dtype,
        "left_out": len(found.cells) - len(chosen),
    }


def _chosen(grid: Grid, found: LargestElements) -> Array:
    """Return which elements fit the budget, in the order of their cells."""
    cells = found.cells.numpy()
    if len(cells) <= PAGE_ELEMENTS:
        return np.arange(len(cells))
    classes = grid.classes.numpy().ravel()[cells]
    origins = grid.origins.numpy().ravel()[cells]
    sizes = np.nan_to_num(grid.magnitudes.numpy().ravel()[cells], posinf=math.inf)
    rank = np.arange(len(cells)) - np.searchsorted(cells, cells)
    surviving = classes == CoordinateClass.SURVIVING
    root = surviving & (origins == _ROOT)
    order = np.lexsort((-sizes, rank, ~surviving, ~root))
    return np.sort(order[:PAGE_ELEMENTS])


def lane(diff: PairDiff, cells: Cells, phase: str) -> dict[str, Any] | None:
    """Return what is drawn below the heatmap on its own columns: margins, ties and the flip; None without steps.

    In the prefill only the last position chooses a token, so that only it has a margin.
    """
    column_of = {number: at for at, group in enumerate(cells.columns) for number in group}
    if phase == "prefill":
        places = {0: len(cells.columns) - 1} if cells.columns else {}
    else:
        places = column_of
    steps = [step for step in diff.steps if step.step in places]
    if not steps:
        return None
    positive = [
        value
        for step in diff.steps
        for value in (step.reference_margin, step.candidate_margin)
        if value > 0 and math.isfinite(value)
    ]
    flip = diff.flip.step if diff.flip is not None else None
    return {
        "x": [places[step.step] for step in steps],
        "steps": [step.step for step in steps],
        "reference": [_number(step.reference_margin) for step in steps],
        "candidate": [_number(step.candidate_margin) for step in steps],
        "ties": [[step.reference_tied, step.candidate_tied] for step in steps],
        "range": [min(positive, default=0.1), max(positive, default=1.0)],
        "flip": places.get(flip) if flip is not None else None,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def smallest(values: Array) -> Array:
    """Use the smallest type that holds every value; JavaScript has no 64-bit integers in its plain numbers."""
    largest = int(values.max()) if values.size else 0
    for dtype in (np.uint8, np.uint16, np.uint32):
        if largest <= np.iinfo(dtype).max:
            return values.astype(dtype)
    return values.astype(np.float64)


def packed(values: Array) -> dict[str, str]:
    """Return an array as its type and its little-endian bytes in base64."""
    little = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"))
    return {
        "dtype": values.dtype.name,
        "base64": base64.b64encode(little.tobytes()).decode("ascii"),
    }
