"""The rounding boundary of one coordinate and the token margins under its two values, as in the paper's figure 5."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fliptrace.errors import InputError
from fliptrace.views import palette
from fliptrace.views.escaping import quoted
from fliptrace.views.static.canvas import COLUMN, PAGE, drawable, new_figure, styled
from fliptrace.views.wording import brief, exact

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fliptrace.verdicts import CoordinateDifference, Flip

#: Heights of the two executions above the number line.
_HEIGHTS = {"reference": 0.62, "candidate": 0.30}
_HATCHES = {"reference": "", "candidate": "////"}


@dataclass(frozen=True, slots=True)
class Margin:
    """The lead of the reference's token over the candidate's in one run.

    Attributes:
        name: what ran, ``candidate's execution``.
        value_of: whose value was in place: ``reference`` or ``candidate``.
        margin: z(reference's token) - z(candidate's token), None where one of them was not kept.
        token: the token that was chosen, as text for people.
    """

    name: str
    value_of: str
    margin: float | None
    token: str


def recorded_margins(flip: Flip) -> tuple[Margin, Margin]:
    """Return the margins of both recorded executions at the flip: what was observed, not what one value does."""
    first, second = flip.reference_token, flip.candidate_token

    def lead(one: float | None, other: float | None) -> float | None:
        return None if one is None or other is None else one - other

    return (
        Margin(
            "reference",
            "reference",
            lead(first.reference_logit, second.reference_logit),
            quoted(first.text, 16) if first.text else f"id {first.token_id}",
        ),
        Margin(
            "candidate",
            "candidate",
            lead(first.candidate_logit, second.candidate_logit),
            quoted(second.text, 16) if second.text else f"id {second.token_id}",
        ),
    )


@styled
def boundary_picture(
    coordinate: CoordinateDifference,
    margins: Sequence[Margin] = (),
    *,
    title: str = "",
    margins_title: str = "",
    width: float = COLUMN,
) -> Figure:
    """Draw both FP32 values around their rounding boundary, where each is rounded to, and the margins as bars.

    Args:
        coordinate: a difference with a rounding boundary.
        margins: bars beside (PAGE) or below (COLUMN) the number lines; none leaves them out.
        title: above the number lines.
        margins_title: above the bars.
        width: in inches.

    Returns:
        A matplotlib figure for write_picture.

    Raises:
        InputError: the coordinate has no rounding boundary, so there is nothing to draw.
    """
    boundary = coordinate.boundary.boundary
    if boundary is None:
        raise InputError(
            "this coordinate has no rounding boundary (an FP32 model, NaN, infinity or the sign of a zero); "
            "choose another one"
        )
    wide = width >= (COLUMN + PAGE) / 2
    tall = 0.4 + 0.34 * len(margins)
    if not margins:
        figure = new_figure(width, 1.9)
        lines = list(figure.subplots(2, 1))
    elif wide:
        figure = new_figure(width, max(2.1, tall + 0.5))
        grid = figure.add_gridspec(2, 2, width_ratios=[1.5, 1])
        lines = [figure.add_subplot(grid[number, 0]) for number in (0, 1)]
        bars = figure.add_subplot(grid[:, 1])
    else:
        figure = new_figure(width, 1.9 + tall + 0.45)
        grid = figure.add_gridspec(3, 1, height_ratios=[0.95, 0.95, tall + 0.3])
        lines = [figure.add_subplot(grid[number, 0]) for number in (0, 1)]
        bars = figure.add_subplot(grid[2, 0])
    _sixteen_bit_line(lines[0], coordinate, boundary)
    _zoomed_line(lines[1], coordinate, boundary)
    lines[0].set_title(
        _wrapped(title, width * (0.6 if wide and margins else 1.0)), loc="left", fontsize=6.5
    )
    if margins:
        _bars(bars, margins)
        bars.set_title(
            _wrapped(margins_title, width * (0.4 if wide else 1.0)), loc="left", fontsize=6.5
        )
    return figure


def _wrapped(text: str, room: float) -> str:
    """Break a title into lines of a width in inches."""
    return "\n".join(textwrap.wrap(drawable(text), max(20, int(room * 19))))


def _sixteen_bit_line(axis: Axes, coordinate: CoordinateDifference, boundary: float) -> None:
    """Draw the rounded values, the boundary in their middle, and an arrow from each FP32 value to where it went."""
    report, colours = coordinate.boundary, palette.EXECUTION_COLOURS["light"]
    values = {
        "reference": (coordinate.reference, report.rounded_reference),
        "candidate": (coordinate.candidate, report.rounded_candidate),
    }
    ends = [place - boundary for pair in values.values() for place in pair if math.isfinite(place)]
    reach = max((abs(end) for end in ends), default=0.0) or 1.0
    _number_line(axis)
    labels = {}
    for name, (value, rounded) in values.items():
        start, end = (value - boundary) / reach, (rounded - boundary) / reach
        height = _HEIGHTS[name]
        axis.plot(start, height, _marker(name), color=colours[name], ms=4.5, zorder=4)
        if math.isfinite(end):
            axis.annotate(
                "",
                (end, height),
                (start, height),
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": colours[name],
                    "lw": 1.1,
                    "linestyle": "-" if name == "reference" else "--",
                    "shrinkA": 2,
                    "shrinkB": 0,
                },
            )
            labels[end] = exact(rounded)
    for end, label in labels.items():
        axis.plot([end, end], [-0.07, 0.07], color="black", lw=0.8)
        side = "right" if end > 0.3 else "left" if end < -0.3 else "center"
        at = end + (0.1 if side == "right" else -0.1 if side == "left" else 0.0)
        axis.text(at, -0.14, label, ha=side, va="top", fontsize=6.0)
    axis.text(
        0,
        1.02,
        f"{coordinate.rounded_dtype} boundary {exact(boundary)}",
        ha="center",
        va="bottom",
        fontsize=6.0,
    )


def _zoomed_line(axis: Axes, coordinate: CoordinateDifference, boundary: float) -> None:
    """Draw both FP32 values at their places around the boundary, in FP32 ULP."""
    colours = palette.EXECUTION_COLOURS["light"]
    unit = float(np.spacing(np.float32(abs(boundary)))) or 1.0
    places = {
        "reference": (coordinate.reference - boundary) / unit,
        "candidate": (coordinate.candidate - boundary) / unit,
    }
    reach = max(2.0, *(abs(place) for place in places.values()))
    _number_line(axis)
    values = {"reference": coordinate.reference, "candidate": coordinate.candidate}
    for name, place in places.items():
        at, height = place / reach, _HEIGHTS[name]
        axis.plot([at, at], [0, height], color=colours[name], lw=1.0)
        axis.plot(at, height, _marker(name), color=colours[name], ms=4.5, zorder=4)
        left = at > 0
        axis.annotate(
            f"{name} {exact(values[name])}",
            (at, height),
            xytext=(-5 if left else 5, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center_baseline",
            fontsize=6.0,
            color=colours[name],
            bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none"},
            zorder=3,
        )
    stride = max(1, int(reach // 2))
    for number in range(-int(reach // stride), int(reach // stride) + 1):
        at = number * stride / reach
        axis.plot([at, at], [-0.07, 0.07], color="black", lw=0.6)
        label = f"{number * stride:+,}" if number else "0"
        axis.text(at, -0.14, label, ha="center", va="top", fontsize=6.0)
    axis.text(0, 1.02, "zoom: FP32 ULP from the boundary", ha="center", va="bottom", fontsize=6.0)


def _marker(name: str) -> str:
    return "o" if name == "reference" else "s"


def _number_line(axis: Axes) -> None:
    axis.set_xlim(-1.15, 1.15)
    axis.set_ylim(-0.55, 1.3)
    axis.set_axis_off()
    axis.plot([-1.12, 1.12], [0, 0], color=palette.INK["light"]["muted"], lw=0.8, zorder=1)
    axis.plot(
        [0, 0], [0, 1.0], color=palette.INK["light"]["text"], lw=0.9, ls=(0, (3, 2)), zorder=1
    )


def _bars(axis: Axes, margins: Sequence[Margin]) -> None:
    """Draw one bar per run from 0, the tie, to its margin; the label says which token was chosen."""
    ink, colours = palette.INK["light"], palette.EXECUTION_COLOURS["light"]
    known = [margin.margin for margin in margins if margin.margin is not None]
    reach = max((abs(value) for value in known), default=0.0) or 1.0
    axis.axvline(0, color=ink["text"], lw=0.9, ls=(0, (3, 2)), zorder=1)
    for place, margin in enumerate(margins):
        colour = colours[margin.value_of]
        if margin.margin is None:
            said = "m not known"
        elif margin.margin == 0.0:
            said = "m = 0, a tie"
            axis.plot(0, place, "D", color=colour, ms=4.5, mec="black", mew=0.4, zorder=3)
        else:
            said = f"m = {brief(margin.margin)}"
            axis.barh(
                place,
                margin.margin,
                height=0.34,
                color=colour,
                hatch=_HATCHES[margin.value_of],
                edgecolor="white",
                linewidth=0.0,
                zorder=2,
            )
        axis.text(
            0.0,
            place - 0.27,
            drawable(f"{margin.name}: {said} → {margin.token}"),
            ha="center",
            va="bottom",
            fontsize=6.0,
            bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.85},
            zorder=4,
        )
    axis.set_ylim(len(margins) - 0.6, -0.85)
    axis.set_xlim(-1.4 * reach, 1.4 * reach)
    axis.set_yticks([])
    axis.set_xlabel("m = z(reference's token) - z(candidate's token)", fontsize=6.5)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.locator_params(axis="x", nbins=5)
