"""The heatmap of a pair: layer and module by token position (prefill) or step (decode), as in the paper's figure 4.

Cells that were not observed are left open and hatched: they can never be taken for equal ones. Equal is gray in both
colourings; magnitudes are on a logarithmic scale, and a difference without a magnitude (sign of zero, NaN) keeps a
colour of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from fliptrace.errors import InputError
from fliptrace.numerics import CoordinateClass
from fliptrace.views import palette
from fliptrace.views.escaping import clipped, plotly_label, visible
from fliptrace.views.pooling import Array, Cells, pool
from fliptrace.views.wording import TokenNames, brief, row_label

if TYPE_CHECKING:
    from fliptrace.grids import Grid
    from fliptrace.sites import Site
    from fliptrace.trace import Trace
    from fliptrace.verdicts import PairDiff, RowDifference

#: Most cells of a figure with hover texts of its own (the page has a budget of its own).
FIGURE_CELLS = 40_000
COLOURINGS = ("class", "magnitude")
ORIGIN_NAMES = ("", "root", "inherited", "configuration-variant", "unlocated")
#: What the ring marks, by whether a surviving root propagates.
ROOT_MARKS = {True: "first surviving propagating root", False: "first surviving root"}
#: Rows up to which each has a label; beyond it, each layer has one.
LABELLED_ROWS = 80
LABELLED_COLUMNS = 60


def heatmap_figure(
    diff: PairDiff,
    *,
    phase: str = "prefill",
    colour: str = "class",
    reference: Trace | None = None,
) -> go.Figure:
    """Draw one phase of a comparison.

    Args:
        diff: what was found.
        phase: ``prefill`` (columns are token positions) or ``decode`` (columns are steps).
        colour: ``class`` or ``magnitude`` (max |reference - candidate|, log scale).
        reference: the trace whose token texts label the columns; without it they have numbers only.

    Returns:
        A plotly figure to show or restyle; max-pooled above FIGURE_CELLS, and then it says so.

    Raises:
        InputError: no such phase or colouring.
    """
    if phase not in diff.grids:
        raise InputError(f"phase must be one of {', '.join(diff.grids) or 'none'}; got {phase!r}")
    if colour not in COLOURINGS:
        raise InputError(f"colour must be one of {', '.join(COLOURINGS)}; got {colour!r}")
    grid = diff.grids[phase]
    cells = pool(grid, cell_budget=FIGURE_CELLS)
    columns = column_labels(cells, phase, reference)
    flip_step = diff.flip.step if diff.flip is not None else None
    figure = skeleton(cells, phase, columns=columns, flip_step=flip_step)
    hover = _hover_texts(cells, phase, columns)
    figure.data[1].update(z=_class_values(cells.classes), text=hover)
    if colour == "magnitude":
        shades = logarithms(cells.magnitudes)
        equal_only = palette.class_scale()
        for stop in equal_only[2:6]:
            stop[1] = "#111111"
        figure.data[1].update(colorscale=equal_only)
        figure.data[2].update(z=shades, text=hover, visible=True, **magnitude_ticks(shades))
    mark = root_mark(diff.first_propagating or diff.first_surviving, cells, phase)
    if mark is not None:
        name = ROOT_MARKS[diff.first_propagating is not None]
        figure.data[3].update(x=[mark[1]], y=[mark[0]], visible=True, name=name)
    for label in CoordinateClass:
        _add_legend_entry(figure, label)
    figure.update_layout(
        title={"text": f"Differences, {phase}", "subtitle": {"text": cells.badge}},
        legend={"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom", "x": 0},
        margin={"b": 130, "t": 130 if colour == "magnitude" else 80},
    )
    return figure


def skeleton(
    cells: Cells, phase: str, *, columns: list[str], flip_step: int | None = None
) -> go.Figure:
    """Build the figure without its cell values: hatch, class cells, magnitude cells, root marker, flip, axes.

    The page fills the values in the browser, from the compact arrays that it also uses for its texts.
    """
    ink = palette.INK["light"]
    row_count, column_count = cells.classes.shape
    outline = unseen_outline(cells.classes)
    hatch = go.Scatter(
        x=outline[0],
        y=outline[1],
        fill="toself",
        mode="lines",
        line={"width": 0},
        fillcolor="rgba(0,0,0,0)",
        fillpattern={
            "shape": "/",
            "size": 6,
            "solidity": 0.25,
            "fgcolor": ink["hatch"],
            "bgcolor": "rgba(0,0,0,0)",
        },
        hoverinfo="skip",
        showlegend=False,
    )
    classes = go.Heatmap(
        zmin=-0.5,
        zmax=3.5,
        colorscale=palette.class_scale(),
        showscale=False,
        hoverinfo="text",
        hoverongaps=True,
        x0=0,
        dx=1,
        y0=0,
        dy=1,
    )
    magnitudes = go.Heatmap(
        colorscale=palette.MAGNITUDE_SCALE,
        hoverinfo="text",
        hoverongaps=False,
        visible=False,
        x0=0,
        dx=1,
        y0=0,
        dy=1,
        colorbar={
            "title": {"text": "max |difference|", "side": "top", "font": {"size": 11}},
            "orientation": "h",
            "thickness": 10,
            "ypad": 24,
            "len": 0.6,
            "x": 0,
            "xanchor": "left",
            "y": 1,
            "yanchor": "bottom",
        },
    )
    marker = go.Scatter(
        x=[],
        y=[],
        mode="markers",
        marker={
            "symbol": "circle-open",
            "size": 16,
            "color": ink["text"],
            "line": {"width": 2.5, "color": ink["text"]},
        },
        name=ROOT_MARKS[True],
        hoverinfo="skip",
        visible=False,
        showlegend=True,
    )
    figure = go.Figure([hatch, classes, magnitudes, marker])
    row_height = 14 if row_count <= LABELLED_ROWS else max(2, min(6, 1400 // row_count))
    row_values, row_texts = row_ticks(cells)
    stride = max(1, -(-column_count // LABELLED_COLUMNS))
    shown = list(range(0, column_count, stride))
    figure.update_layout(
        height=max(260, row_count * row_height + 170),
        margin={"l": 130, "r": 24, "t": 30, "b": 110},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="closest",
        font={"size": 12},
        xaxis={
            "tickvals": shown,
            "ticktext": [columns[number] for number in shown],
            "tickangle": -90,
            "tickfont": {"size": 10},
            "range": [-0.5, column_count - 0.5],
            "automargin": True,
            "showgrid": False,
            "zeroline": False,
            "ticks": "outside",
        },
        yaxis={
            "tickvals": row_values,
            "ticktext": row_texts,
            "tickfont": {"size": 10},
            "range": [row_count - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
            "ticks": "outside",
        },
    )
    figure.add_annotation(  # plotly puts an axis title over long tick labels
        text="position" if phase == "prefill" else "step",
        xref="paper",
        yref="paper",
        x=0,
        y=0,
        xshift=-10,
        yshift=-8,
        xanchor="right",
        yanchor="top",
        showarrow=False,
    )
    flips = [n for n, group in enumerate(cells.columns) if phase == "decode" and flip_step in group]
    if flips:
        figure.add_vline(
            x=flips[0],
            line={"color": ink["text"], "width": 1.5, "dash": "dot"},
            annotation={"text": "flip"},
            annotation_position="top",
        )
    return figure


def unseen_outline(classes: Array) -> tuple[list[float | None], list[float | None]]:
    """Outline the cells that were not observed as rectangles, merged along rows and then over equal rows.

    Returns:
        x and y of the corners, rectangles separated by None: what a plotly trace with ``fill="toself"`` takes.
    """
    xs: list[float | None] = []
    ys: list[float | None] = []
    running: dict[tuple[int, int], int] = {}
    row_count = classes.shape[0]
    for row in range(row_count + 1):
        runs: set[tuple[int, int]] = set()
        if row < row_count:
            unseen = np.concatenate(
                ([False], classes[row] == CoordinateClass.NOT_OBSERVED, [False])
            )
            edges = np.flatnonzero(unseen[1:] != unseen[:-1])
            runs = {(int(s), int(e)) for s, e in zip(edges[::2], edges[1::2], strict=True)}
        for start, end in [run for run in running if run not in runs]:
            top, bottom = running.pop((start, end)) - 0.5, row - 0.5
            left, right = start - 0.5, end - 0.5
            xs += [left, right, right, left, left, None]
            ys += [top, top, bottom, bottom, top, None]
        for run in runs:
            running.setdefault(run, row)
    return xs, ys


def column_labels(cells: Cells, phase: str, reference: Trace | None) -> list[str]:
    """Label every column group for plotly: number and token text, or the range that was merged."""
    return [plotly_label(name) for name in column_names(cells, phase, reference)]


def column_names(cells: Cells, phase: str, reference: Trace | None, limit: int = 14) -> list[str]:
    """Name every column group: ``47:  apples``, a merged one ``40–47``. Not escaped."""
    tokens = TokenNames(reference) if reference is not None else None
    names = []
    for group in cells.columns:
        if len(group) > 1:
            names.append(f"{group[0]}–{group[-1]}")
            continue
        number = group[0]
        text = None
        if tokens is not None:
            text = tokens.text(number) if phase == "prefill" else tokens.generated(number)
        names.append(f"{number}" if text is None else f"{number}: {clipped(text, limit)}")
    return names


def row_names(cells: Cells) -> list[str]:
    """Name every row group; a merged one by its first and last member. Not escaped."""
    names = []
    for group in cells.rows:
        first = row_label(*group[0])
        names.append(first if len(group) == 1 else f"{first} … {row_label(*group[-1])}")
    return names


def row_ticks(cells: Cells) -> tuple[list[int], list[str]]:
    """Label every row where there is room, else the first row of every layer."""
    if len(cells.rows) <= LABELLED_ROWS:
        labels = [plotly_label(clipped(row_tick(*group[0]), 22)) for group in cells.rows]
        return list(range(len(labels))), labels
    values, texts = [], []
    previous: int | None = None
    for number, group in enumerate(cells.rows):
        layer = _layer(group[0][1])
        if layer is not None and layer != previous:
            values.append(number)
            texts.append(f"layer {layer}")
        previous = layer
    stride = max(1, -(-len(values) // 48))
    return values[::stride], texts[::stride]


def _layer(place: Site | int) -> int | None:
    return place if isinstance(place, int) else place.layer


def row_tick(kind: str, place: Site | int) -> str:
    """Name a row in few characters: ``2 mlp.up_proj``; of a fused projection its slice, ``2 [q_proj]``."""
    if isinstance(place, int):
        return f"{place} {'K' if kind == 'key' else 'V'}"
    if place.slice and place.layer is not None:
        return visible(f"{place.layer} [{place.slice}]")
    return row_label(kind, place).removeprefix("layer ")


def root_mark(row: RowDifference | None, cells: Cells, phase: str) -> tuple[int, int] | None:
    """Find the cell (row group, column group) of a root row in one phase, None when it is elsewhere."""
    if row is None or (row.step == 0) != (phase == "prefill"):
        return None
    column = row.position if phase == "prefill" else row.step
    rows = [n for n, group in enumerate(cells.rows) if ("shrink", row.site) in group]
    columns = [n for n, group in enumerate(cells.columns) if column in group]
    return (rows[0], columns[0]) if rows and columns else None


def _class_values(classes: Array) -> Array:
    values = classes.astype(np.float32)
    return np.where(classes == CoordinateClass.NOT_OBSERVED, np.float32(np.nan), values)


def logarithms(magnitudes: Array) -> Array:
    """Return log10 of positive finite magnitudes, NaN (an open cell) for all others."""
    drawable = np.isfinite(magnitudes) & (magnitudes > 0)
    return np.where(drawable, np.log10(np.where(drawable, magnitudes, 1.0)), np.nan)


def magnitude_ticks(logarithms: Array) -> dict[str, Any]:
    """Choose the range and the labels of the logarithmic colour bar."""
    known = logarithms[np.isfinite(logarithms)]
    if not known.size:
        return {"zmin": -1.0, "zmax": 0.0, "showscale": False}
    low, high = int(np.floor(known.min())), int(np.ceil(known.max()))
    high = max(high, low + 1)
    stride = max(1, (high - low) // 8)
    values = list(range(low, high + 1, stride))
    return {
        "zmin": float(low),
        "zmax": float(high),
        "colorbar": {"tickvals": values, "ticktext": [f"1e{value}" for value in values]},
    }


def _hover_texts(cells: Cells, phase: str, columns: list[str]) -> list[list[str]]:
    rows = [plotly_label(name) for name in row_names(cells)]
    unit = "token position" if phase == "prefill" else "step"
    return [
        [
            f"{rows[r]}<br>{unit} {columns[c]}<br>{cell_text(cells, r, c)}"
            for c in range(len(columns))
        ]
        for r in range(len(rows))
    ]


def cell_text(cells: Cells, row: int, column: int) -> str:
    """Say what one cell holds: class, origin, magnitude, ULP and how many coordinates survive."""
    label = CoordinateClass(int(cells.classes[row, column]))
    if label in (CoordinateClass.EQUAL, CoordinateClass.NOT_OBSERVED):
        return label.label
    origin = ORIGIN_NAMES[int(cells.origins[row, column])]
    surviving = int(cells.surviving[row, column])
    parts = [f"{label.label}, {origin}" if origin else label.label]
    parts.append(f"max |difference| {brief(float(cells.magnitudes[row, column]))}")
    parts.append(f"up to {int(cells.ulps[row, column]):,} ULP")
    if surviving:
        parts.append(f"{surviving:,} surviving")
    return "<br>".join(parts)


def grid_counts(grid: Grid) -> list[dict[str, Any]]:
    """Summarise every row of a grid for a table: cells of each class, first differing column, largest magnitude."""
    classes = grid.classes.cpu().numpy()
    magnitudes = grid.magnitudes.cpu().numpy()
    summaries = []
    for number, (kind, place) in enumerate(grid.rows):
        line = classes[number]
        differing = np.flatnonzero(line > CoordinateClass.EQUAL)
        finite = magnitudes[number][np.isfinite(magnitudes[number])]
        summaries.append(
            {
                "name": row_label(kind, place),
                **{label.name.lower(): int((line == label).sum()) for label in CoordinateClass},
                "first": int(grid.columns[differing[0]]) if differing.size else None,
                "largest": float(finite.max()) if finite.size else 0.0,
            }
        )
    return summaries


def _add_legend_entry(figure: go.Figure, label: CoordinateClass) -> None:
    colours = palette.CLASS_COLOURS["light"]
    marker: dict[str, Any] = {"symbol": "square", "size": 12, "color": colours.get(label)}
    if label is CoordinateClass.NOT_OBSERVED:
        hatch = palette.INK["light"]["hatch"]
        marker = {"symbol": "square-x-open", "size": 11, "color": hatch}
    figure.add_trace(
        go.Scatter(x=[None], y=[None], mode="markers", name=label.label, marker=marker)
    )
