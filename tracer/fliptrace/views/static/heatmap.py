"""The heatmap of a pair on paper: layer × module by token position and by step, as in the paper's figure 4.

On paper large differences are dark and small ones light, equal is the lightest gray, and what was not observed is
hatched, so that a gray copy still tells them apart.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fliptrace.errors import InputError
from fliptrace.numerics import CoordinateClass
from fliptrace.views import palette
from fliptrace.views.heatmap import (
    COLOURINGS,
    column_names,
    logarithms,
    root_mark,
    unseen_outline,
)
from fliptrace.views.pooling import Array, Cells, pool
from fliptrace.views.static.canvas import COLUMN, PAGE, drawable, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fliptrace.sites import Site
    from fliptrace.trace import Trace
    from fliptrace.verdicts import PairDiff

#: More columns than this are merged: a printer could not show them.
_COLUMNS = 400
#: Rows up to which each has a label of its own.
_LABELLED = 40
#: Inches that a column's label needs.
_LABEL_ROOM = 0.085
_DRAWN = (
    CoordinateClass.EQUAL,
    CoordinateClass.LATENT,
    CoordinateClass.SURVIVING,
    CoordinateClass.STRUCTURAL,
)


@dataclass(frozen=True, slots=True)
class _Panel:
    """One phase, ready to be drawn."""

    phase: str
    cells: Cells
    names: list[str]
    mark: tuple[int, int] | None
    flip: int | None

    @property
    def share(self) -> int:
        return len(self.cells.columns)


@styled
def heatmap_picture(
    diff: PairDiff,
    reference: Trace | None = None,
    *,
    colour: str = "magnitude",
    width: float = PAGE,
) -> Figure:
    """Draw prefill and decode side by side, or one above the other in a single column, with the margins below.

    Args:
        diff: what was found.
        reference: the trace whose token texts label the columns; without it they have numbers only.
        colour: ``magnitude`` (max |reference - candidate|, log scale) or ``class``.
        width: in inches; PAGE and COLUMN are the widths of a two-column paper.

    Returns:
        A matplotlib figure for write_picture.

    Raises:
        InputError: no such colouring, or nothing was compared.
    """
    if colour not in COLOURINGS:
        raise InputError(f"colour must be one of {', '.join(COLOURINGS)}; got {colour!r}")
    panels = _panels(diff, reference)
    if not panels:
        raise InputError("there is nothing to draw: the comparison has no rows or no columns")
    wide = width >= (COLUMN + PAGE) / 2 and len(panels) > 1
    rows = max(len(panel.cells.rows) for panel in panels)
    tall = min(5.2, max(1.4, rows * (0.1 if rows <= _LABELLED else 0.03)))
    figure = new_figure(width, (tall if wide else tall * len(panels)) + 2.1)
    maps, lane = _axes(figure, panels, wide, tall)
    scale = _scale([panel.cells for panel in panels])
    room = width / len(panels) if wide else width
    for axis, panel in zip(maps, panels, strict=True):
        _draw(axis, panel, colour, scale, room)
        if wide and axis is not maps[0]:
            axis.tick_params(labelleft=False)
    figure.align_xlabels(maps)
    _draw_margins(lane, diff)
    _explain(figure, maps, panels, colour, scale)
    return figure


def _panels(diff: PairDiff, reference: Trace | None) -> list[_Panel]:
    root = diff.first_propagating or diff.first_surviving
    panels = []
    for phase, grid in diff.grids.items():
        if not grid.rows or not grid.columns:
            continue
        cells = pool(grid, cell_budget=max(1, len(grid.rows) * _COLUMNS))
        flip = None
        if diff.flip is not None and phase == "decode":
            step = diff.flip.step
            flip = next((n for n, group in enumerate(cells.columns) if step in group), None)
        panels.append(
            _Panel(
                phase,
                cells,
                column_names(cells, phase, reference, limit=11),
                root_mark(root, cells, phase),
                flip,
            )
        )
    return panels


def _axes(figure: Figure, panels: list[_Panel], wide: bool, tall: float) -> tuple[list[Axes], Axes]:
    """Lay out the maps and the lane of margins; side by side, no panel gets less than a quarter of the width."""
    if wide:
        total = sum(panel.share for panel in panels)
        shares = [max(0.25, panel.share / total) for panel in panels]
        grid = figure.add_gridspec(2, len(panels), width_ratios=shares, height_ratios=[tall, 0.75])
        maps = [figure.add_subplot(grid[0, number]) for number in range(len(panels))]
        return maps, figure.add_subplot(grid[1, :])
    grid = figure.add_gridspec(len(panels) + 1, 1, height_ratios=[*[tall] * len(panels), 0.75])
    maps = [figure.add_subplot(grid[number, 0]) for number in range(len(panels))]
    return maps, figure.add_subplot(grid[len(panels), 0])


def _scale(cells: list[Cells]) -> tuple[int, int] | None:
    """Choose whole decades that hold every magnitude; None where nothing has one."""
    known = np.concatenate([logarithms(part.magnitudes).ravel() for part in cells])
    known = known[np.isfinite(known)]
    if not known.size:
        return None
    low = math.floor(float(known.min()))
    return low, max(low + 1, math.ceil(float(known.max())))


def _shades() -> Any:
    """Return the magnitudes' colours: viridis without its lightest part, small light and large dark."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["viridis"](np.linspace(0.78, 0.0, 256)))


def _draw(
    axis: Axes, panel: _Panel, colour: str, scale: tuple[int, int] | None, room: float
) -> None:
    cells, ink = panel.cells, palette.INK["light"]
    axis.imshow(_pixels(cells, colour, scale), aspect="auto", interpolation="nearest")
    for corners in _rectangles(cells.classes):
        axis.fill(
            *corners, facecolor="white", hatch="//////", edgecolor=ink["hatch"], linewidth=0.0
        )
    if panel.mark is not None:
        row, column = panel.mark
        for size, tint in ((3.0, "white"), (1.2, "black")):
            axis.plot(
                column, row, "o", ms=7, mfc="none", mec=tint, mew=size, clip_on=False, zorder=5
            )
    if panel.flip is not None:
        axis.annotate(
            "flip",
            (panel.flip, -0.5),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=6.0,
            arrowprops={"arrowstyle": "-|>", "lw": 0.6, "shrinkA": 0, "shrinkB": 0},
            annotation_clip=False,
        )
    places, names = _row_labels(cells.rows)
    axis.set_yticks(places, [drawable(name) for name in names])
    for border in _layer_borders(cells.rows):
        axis.axhline(border, color="white", linewidth=0.4)
    stride = max(1, math.ceil(panel.share / max(4, (room - 0.8) / _LABEL_ROOM)))
    shown = list(range(0, panel.share, stride))
    axis.set_xticks(shown, [drawable(panel.names[n]) for n in shown], rotation=90, fontsize=5.0)
    axis.set_xlabel("token position" if panel.phase == "prefill" else "decode step")
    early = panel.flip is not None and panel.flip < panel.share / 3
    axis.set_title(panel.phase, loc="right" if early else "left", pad=4)
    axis.tick_params(length=1.5, pad=1.5)


def _pixels(cells: Cells, colour: str, scale: tuple[int, int] | None) -> Array:
    """Return the cells' colours [rows, columns, RGBA]; those that were not observed stay transparent."""
    from matplotlib.colors import to_rgba

    tints = {label: to_rgba(palette.CLASS_COLOURS["light"][label]) for label in _DRAWN}
    pixels = np.zeros((*cells.classes.shape, 4))
    for label, tint in tints.items():
        pixels[cells.classes == label] = tint
    if colour == "magnitude":
        # As in the interactive figure: a difference without a magnitude (sign of zero, NaN) is black.
        pixels[cells.classes > CoordinateClass.EQUAL] = (0.0, 0.0, 0.0, 1.0)
        shades = logarithms(cells.magnitudes)
        drawn = np.isfinite(shades) & (cells.classes > CoordinateClass.EQUAL)
        if scale is not None:
            low, high = scale
            pixels[drawn] = _shades()((shades[drawn] - low) / (high - low))
        pixels[cells.classes == CoordinateClass.EQUAL] = to_rgba("#e4e7ea")
        pixels[cells.classes == CoordinateClass.NOT_OBSERVED] = 0.0
    return pixels


def _rectangles(classes: Array) -> list[tuple[list[float], list[float]]]:
    """Return the corners of what was not observed, one polygon each."""
    xs, ys = unseen_outline(classes)
    found: list[tuple[list[float], list[float]]] = [([], [])]
    for x, y in zip(xs, ys, strict=True):
        if x is None or y is None:
            found.append(([], []))
        else:
            found[-1][0].append(x)
            found[-1][1].append(y)
    return [corners for corners in found if corners[0]]


def _place(entry: tuple[str, Site | int]) -> tuple[int | None, str]:
    """Return a row's layer and what it is there."""
    kind, place = entry
    if isinstance(place, int):
        return place, "K" if kind == "key" else "V"
    return place.layer, place.module.rpartition(".")[2]


def _row_labels(
    rows: tuple[tuple[tuple[str, Site | int], ...], ...],
) -> tuple[list[float], list[str]]:
    """Label every row of a small map, else the middle of each layer."""
    parts = [_place(group[0]) for group in rows]
    if len(rows) <= _LABELLED:
        names = [name if layer is None else f"{layer} {name}" for layer, name in parts]
        return [float(number) for number in range(len(rows))], names
    spans: dict[int, list[int]] = {}
    for number, (layer, _) in enumerate(parts):
        if layer is not None:
            spans.setdefault(layer, []).append(number)
    stride = max(1, math.ceil(len(spans) / 32))
    kept = list(spans)[::stride]
    places = [(spans[layer][0] + spans[layer][-1]) / 2 for layer in kept]
    return places, [f"layer {layer}" for layer in kept]


def _layer_borders(rows: tuple[tuple[tuple[str, Site | int], ...], ...]) -> list[float]:
    layers = [_place(group[0])[0] for group in rows]
    return [n - 0.5 for n in range(1, len(layers)) if layers[n] != layers[n - 1]]


def _draw_margins(axis: Axes, diff: PairDiff) -> None:
    """Draw the top-2 margins of both executions on a log scale; ties lie on the line below."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    ink, colours = palette.INK["light"], palette.EXECUTION_COLOURS["light"]
    steps = [step.step for step in diff.steps]
    lines = {
        "reference": [step.reference_margin for step in diff.steps],
        "candidate": [step.candidate_margin for step in diff.steps],
    }
    positive = [v for line in lines.values() for v in line if v > 0 and math.isfinite(v)]
    floor = min(positive, default=1.0) / 4
    for name, values in lines.items():
        axis.plot(
            steps,
            [value if value > 0 and math.isfinite(value) else math.nan for value in values],
            color=colours[name],
            linestyle="-" if name == "reference" else "--",
            marker=("o" if name == "reference" else "x") if len(steps) <= 60 else None,
            markersize=2.5,
            label=name,
        )
    ties = [step.step for step in diff.steps if max(step.reference_tied, step.candidate_tied) > 1]
    if ties:
        axis.plot(
            ties,
            [floor] * len(ties),
            "D",
            color="#cc79a7",
            mec="black",
            mew=0.4,
            markersize=3.5,
            label="tie",
            clip_on=False,
        )
    if diff.flip is not None:
        axis.axvline(diff.flip.step, color=ink["text"], linewidth=0.8, linestyle=":", label="flip")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_ylim(floor, max(positive, default=1.0) * 2)
    axis.set_xlim(-0.5, max(steps, default=0) + 0.5)
    axis.set_ylabel("top-2 margin")
    axis.set_xlabel("step that chooses the token (0: prefill)")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(axis="y", color=ink["grid"], linewidth=0.4)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 0.98),
        ncols=4,
        frameon=False,
        handlelength=1.6,
        borderaxespad=0.0,
        columnspacing=1.2,
    )


def _explain(
    figure: Figure,
    maps: list[Axes],
    panels: list[_Panel],
    colour: str,
    scale: tuple[int, int] | None,
) -> None:
    """Add the colour bar, the legend of what is drawn, and the order of rows inside a layer."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    ink, wide = palette.INK["light"], figure.get_figwidth() > 5
    present = {int(value) for panel in panels for value in np.unique(panel.cells.classes)}
    handles: list[Any] = []
    if colour == "class":
        handles += [
            Patch(facecolor=palette.CLASS_COLOURS["light"][label], label=label.label)
            for label in _DRAWN
        ]
    else:
        handles.append(Patch(facecolor="#e4e7ea", label="equal"))
        if scale is not None:
            low, high = scale
            shades = ScalarMappable(LogNorm(10.0**low, 10.0**high), _shades())
            bar = figure.colorbar(
                shades, ax=maps, location="top", shrink=0.5 if wide else 0.9, aspect=40, pad=0.01
            )
            bar.set_label("max |reference - candidate|", fontsize=6.5)
            stride = max(1, math.ceil((high - low) / (10 if wide else 5)))
            decades = range(low, high + 1, stride)
            bar.set_ticks([10.0**n for n in decades], labels=[f"1e{n}" for n in decades])
            bar.ax.minorticks_off()
        if any(_odd(panel.cells) for panel in panels):
            handles.append(Patch(facecolor="black", label="differs without a magnitude"))
    if int(CoordinateClass.NOT_OBSERVED) in present:
        handles.append(
            Patch(facecolor="white", hatch="//////", edgecolor=ink["hatch"], label="not observed")
        )
    if any(panel.mark is not None for panel in panels):
        ring = Line2D([], [], marker="o", ls="", ms=6, mfc="none", mec="black", mew=1.2)
        ring.set_label("first surviving root")
        handles.append(ring)
    notes = [note for note in (_order_note(panels[0].cells.rows), _pooled(panels)) if note]
    room = int(figure.get_figwidth() * 24)
    wrapped = [line for note in notes for line in textwrap.wrap(note, room)]
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=len(handles) if wide else 3,
        frameon=False,
        title="\n".join(wrapped) or None,
        title_fontsize=5.5,
        alignment="left",
    )


def _odd(cells: Cells) -> bool:
    differs = cells.classes > CoordinateClass.EQUAL
    differs &= cells.classes != CoordinateClass.NOT_OBSERVED
    return bool((differs & ~np.isfinite(logarithms(cells.magnitudes))).any())


def _order_note(rows: tuple[tuple[tuple[str, Site | int], ...], ...]) -> str:
    """Say what the rows of a layer are, where they have no labels of their own."""
    if len(rows) <= _LABELLED:
        return ""
    names: dict[str, None] = {}
    for group in rows:
        for entry in group:
            layer, name = _place(entry)
            if layer is not None:
                names.setdefault(name)
    return drawable(f"Rows of a layer, from above: {', '.join(names)}.")


def _pooled(panels: list[_Panel]) -> str:
    merged = [panel for panel in panels if panel.cells.pooled]
    return "; ".join(f"{panel.phase}: {panel.cells.badge}" for panel in merged)
