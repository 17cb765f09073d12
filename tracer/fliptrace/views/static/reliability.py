"""Predicted probabilities against what came: points on the diagonal are right on average."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fliptrace.errors import InputError
from fliptrace.views import palette
from fliptrace.views.static.canvas import COLUMN, drawable, new_figure, styled
from fliptrace.views.static.replay import checked_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KEYS = ("predicted", "observed", "low", "high", "comparisons")
#: Colour and marker of a series: told apart in gray, too.
_MARKS = (("#0072b2", "o"), ("#d55e00", "D"), ("#009e73", "s"), ("#cc79a7", "^"))
#: Areas of the markers, in square points, of the least and the most comparisons.
_SMALLEST, _LARGEST = 8.0, 36.0


@styled
def reliability_picture(
    series: Mapping[str, Iterable[Mapping[str, Any]]], *, width: float = COLUMN
) -> Figure:
    """Draw bins of predictions: the mean prediction of each against the share that came, with its interval.

    A marker's area grows with the comparisons behind it.

    Args:
        series: bins by the name of what was predicted; of each bin ``predicted`` and ``observed`` in [0, 1], ``low``
            and ``high``, the ends of the observed share's interval, and ``comparisons``, how many there were.
        width: in inches; the picture is square, with the legend below it.

    Returns:
        A matplotlib figure for write_picture.

    Raises:
        InputError: no series, more than four, or a series without bins or with one that lacks a key.
    """
    if not 1 <= len(series) <= len(_MARKS):
        raise InputError(
            f"a reliability picture takes 1 to {len(_MARKS)} series of bins; got {len(series)}"
        )
    listed = {name: checked_rows(rows, _KEYS) for name, rows in series.items()}
    most = max(float(row["comparisons"]) for rows in listed.values() for row in rows)
    ink = palette.INK["light"]
    figure = new_figure(width, width + 0.15 * len(series))
    axis = figure.subplots()
    axis.plot([0, 100], [0, 100], color=ink["muted"], linewidth=0.8, linestyle=":")
    for (name, rows), (colour, marker) in zip(listed.items(), _MARKS, strict=False):
        predicted = [100 * float(row["predicted"]) for row in rows]
        observed = [100 * float(row["observed"]) for row in rows]
        axis.vlines(
            predicted,
            [100 * float(row["low"]) for row in rows],
            [100 * float(row["high"]) for row in rows],
            color=colour,
            linewidth=0.8,
        )
        axis.scatter(
            predicted,
            observed,
            s=[
                _SMALLEST + (_LARGEST - _SMALLEST) * float(row["comparisons"]) / most
                for row in rows
            ],
            color=colour,
            marker=marker,
            linewidths=0,
            zorder=3,
            label=drawable(name),
        )
    axis.set_xlim(-2, 102)
    axis.set_ylim(-2, 102)
    axis.set_aspect("equal")
    axis.set_xlabel("predicted, %")
    axis.set_ylabel("observed, % (95 %)")
    axis.grid(color=ink["grid"], linewidth=0.5)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    handles, names = axis.get_legend_handles_labels()
    legend = figure.legend(handles, names, loc="outside lower center", frameon=False)
    for handle in legend.legend_handles:
        if handle is not None and hasattr(handle, "set_sizes"):
            handle.set_sizes([20.0])
    return figure
