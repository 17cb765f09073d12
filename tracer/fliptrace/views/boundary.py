"""The rounding-boundary picture: why two nearly equal FP32 values became two different 16-bit values.

The two scales of the story differ by four orders of magnitude: neighbouring 16-bit values lie 65,536 FP32 ULP apart
while the two FP32 values may be one ULP apart. So the picture has two number lines, the 16-bit one above and a zoom
around the boundary, in FP32 ULP, below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from fliptrace.views import palette
from fliptrace.views.wording import exact, not_finite, unrounded

if TYPE_CHECKING:
    from fliptrace.verdicts import CoordinateDifference


def boundary_figure(coordinate: CoordinateDifference, dtype: str = "") -> go.Figure:
    """Draw both FP32 values of a coordinate, the rounding boundary, and where each value was rounded to.

    Args:
        coordinate: the difference; without a boundary (FP32 model, NaN, infinity, sign of zero) the figure says so.
        dtype: the type that the model computes in; "" where it is not known.

    Returns:
        A plotly figure.
    """
    figure = go.Figure()
    figure.update_layout(
        height=340,
        margin={"l": 24, "r": 24, "t": 20, "b": 50},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="closest",
        showlegend=True,
        legend={"orientation": "h", "y": -0.08, "yanchor": "top", "x": 0},
        xaxis={"visible": False, "fixedrange": True},
        xaxis2={"visible": False, "fixedrange": True, "anchor": "y2"},
        yaxis={"visible": False, "fixedrange": True, "domain": [0.56, 1.0], "range": [-1.3, 1.6]},
        yaxis2={"visible": False, "fixedrange": True, "domain": [0.0, 0.5], "range": [-1.3, 1.6]},
    )
    report = coordinate.boundary
    if report.boundary is None:
        figure.update_layout(height=120, showlegend=False)
        figure.add_annotation(
            text=f"no rounding boundary: {_reason(coordinate, dtype)}",
            xref="paper",
            yref="paper",
            x=0.5,
            y=0.5,
            showarrow=False,
        )
        return figure
    values = _values(coordinate, report.boundary)
    _sixteen_bit_line(figure, values, coordinate.rounded_dtype, report.boundary)
    _zoomed_line(figure, values, report.boundary)
    return figure


def _reason(coordinate: CoordinateDifference, dtype: str) -> str:
    if coordinate.rounded_dtype == "float32":
        return unrounded(dtype)
    if coordinate.special is not None:
        return f"only the {coordinate.special} differs"
    return not_finite(coordinate)


@dataclass(frozen=True, slots=True)
class _Value:
    """One execution's value on its way through rounding; places are relative to the boundary."""

    name: str
    height: float
    label: str
    place: float
    rounded_place: float
    rounded_label: str


def _values(coordinate: CoordinateDifference, boundary: float) -> tuple[_Value, _Value]:
    report = coordinate.boundary
    return (
        _Value(
            "reference",
            0.75,
            f"{exact(coordinate.reference)} ({coordinate.reference_bits})",
            coordinate.reference - boundary,
            report.rounded_reference - boundary,
            f"{exact(report.rounded_reference)}<br>{coordinate.rounded_reference_bits}",
        ),
        _Value(
            "candidate",
            0.4,
            f"{exact(coordinate.candidate)} ({coordinate.candidate_bits})",
            coordinate.candidate - boundary,
            report.rounded_candidate - boundary,
            f"{exact(report.rounded_candidate)}<br>{coordinate.rounded_candidate_bits}",
        ),
    )


def _sixteen_bit_line(
    figure: go.Figure, values: tuple[_Value, _Value], dtype: str, boundary: float
) -> None:
    """Draw the upper line: the rounded values, the boundary and arrows from the FP32 values."""
    colours = palette.EXECUTION_COLOURS["light"]
    places = [place for value in values for place in (value.place, value.rounded_place)]
    reach = max((abs(place) for place in places if math.isfinite(place)), default=0.0) or 1.0
    figure.update_layout(xaxis={"range": [-1.35 * reach, 1.35 * reach]})
    _line(figure, "", -1.3 * reach, 1.3 * reach)
    _boundary_mark(figure, "", f"{dtype} boundary {exact(boundary)}")
    for value in values:
        end = value.rounded_place if math.isfinite(value.rounded_place) else value.place
        figure.add_trace(
            go.Scatter(
                x=[value.place, end],
                y=[value.height, value.height],
                mode="lines+markers",
                line={"color": colours[value.name], "width": 2},
                marker={"symbol": ["circle", "arrow"], "size": [9, 12], "angleref": "previous"},
                name=f"{value.name} {value.label}",
                text=[
                    f"{value.name} {value.label}",
                    f"{value.name}, rounded: {value.rounded_label}",
                ],
                hoverinfo="text",
            )
        )
    for label, place in {value.rounded_label: value.rounded_place for value in values}.items():
        if math.isfinite(place):
            _tick(figure, "", place, label)


def _zoomed_line(figure: go.Figure, values: tuple[_Value, _Value], boundary: float) -> None:
    """Draw the lower line: both FP32 values around the boundary, in FP32 ULP."""
    colours = palette.EXECUTION_COLOURS["light"]
    unit = float(np.spacing(np.float32(abs(boundary)))) or 1.0
    places = [value.place / unit for value in values]
    reach = max(2.0, *(abs(place) for place in places))
    figure.update_layout(xaxis2={"range": [-1.35 * reach, 1.35 * reach]})
    _line(figure, "2", -1.3 * reach, 1.3 * reach)
    _boundary_mark(figure, "2", "zoom: FP32 ULP from the boundary")
    stride = max(1, int(reach // 2))
    for number in range(-int(reach // stride), int(reach // stride) + 1):
        _tick(figure, "2", float(number * stride), f"{number * stride:+,}" if number else "0")
    for value, place in zip(values, places, strict=True):
        figure.add_trace(
            go.Scatter(
                x=[place, place],
                y=[value.height, 0.0],
                mode="lines+markers",
                xaxis="x2",
                yaxis="y2",
                line={"color": colours[value.name], "width": 2},
                marker={"symbol": "circle", "size": [9, 5]},
                text=f"{value.name}: {place:+.6g} FP32 ULP from the boundary",
                hoverinfo="text",
                showlegend=False,
            )
        )


def _line(figure: go.Figure, axis: str, start: float, end: float) -> None:
    figure.add_shape(
        type="line",
        x0=start,
        x1=end,
        y0=0,
        y1=0,
        xref=f"x{axis}",
        yref=f"y{axis}",
        line={"color": palette.INK["light"]["muted"], "width": 1.5},
    )


def _boundary_mark(figure: go.Figure, axis: str, label: str) -> None:
    figure.add_shape(
        type="line",
        x0=0,
        x1=0,
        y0=0,
        y1=1.1,
        xref=f"x{axis}",
        yref=f"y{axis}",
        line={"color": palette.INK["light"]["muted"], "width": 2, "dash": "dash"},
    )
    figure.add_annotation(
        text=label, x=0, y=1.15, xref=f"x{axis}", yref=f"y{axis}", yanchor="bottom", showarrow=False
    )


def _tick(figure: go.Figure, axis: str, place: float, label: str) -> None:
    figure.add_shape(
        type="line",
        x0=place,
        x1=place,
        y0=-0.15,
        y1=0.15,
        xref=f"x{axis}",
        yref=f"y{axis}",
        line={"color": palette.INK["light"]["muted"], "width": 1.5},
    )
    figure.add_annotation(
        text=label,
        x=place,
        y=-0.25,
        xref=f"x{axis}",
        yref=f"y{axis}",
        yanchor="top",
        showarrow=False,
        font={"size": 11},
    )
