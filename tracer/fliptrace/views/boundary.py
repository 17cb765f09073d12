"""The rounding-boundary picture: why two nearly equal FP32 values became two different 16-bit values.

The two scales of the story differ by four orders of magnitude: neighbouring 16-bit values lie 65,536 FP32 ULP apart
while the two FP32 values may be one ULP apart. So the picture has two number lines, the 16-bit one above and a zoom
around the boundary, in FP32 ULP, below.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from fliptrace.views import palette
from fliptrace.views.wording import exact

if TYPE_CHECKING:
    from fliptrace.verdicts import CoordinateDifference


def boundary_figure(coordinate: CoordinateDifference) -> go.Figure:
    """Draw both FP32 values of a coordinate, the rounding boundary, and where each value was rounded to.

    Args:
        coordinate: the difference; without a boundary (FP32 model, NaN, infinity, sign of zero) the figure says so.

    Returns:
        A plotly figure.
    """
    figure = go.Figure()
    figure.update_layout(
        height=330,
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
    if (
        report.boundary is None
        or report.reference_distance is None
        or report.candidate_distance is None
    ):
        figure.update_layout(height=120, showlegend=False)
        figure.add_annotation(
            text=f"no rounding boundary: {_reason(coordinate)}",
            xref="paper",
            yref="paper",
            x=0.5,
            y=0.5,
            showarrow=False,
        )
        return figure
    _sixteen_bit_line(figure, coordinate, report.boundary)
    _zoomed_line(figure, report.boundary, report.reference_distance, report.candidate_distance)
    return figure


def _reason(coordinate: CoordinateDifference) -> str:
    if coordinate.rounded_dtype == "float32":
        return "the model computes in FP32"
    if coordinate.special is not None:
        return f"the difference is one of {coordinate.special}"
    return "a value is not finite"


def _sixteen_bit_line(figure: go.Figure, coordinate: CoordinateDifference, boundary: float) -> None:
    """Draw the upper line: the rounded values, the boundary and arrows from the FP32 values."""
    report = coordinate.boundary
    colours = palette.EXECUTION_COLOURS["light"]
    rounded = {
        "reference": report.rounded_reference - boundary,
        "candidate": report.rounded_candidate - boundary,
    }
    values = {"reference": report.reference_distance, "candidate": report.candidate_distance}
    same = coordinate.rounded_reference_bits == coordinate.rounded_candidate_bits
    known = [
        v for v in (*rounded.values(), *values.values(), 0.0) if v is not None and math.isfinite(v)
    ]
    reach = max(abs(value) for value in known) or 1.0
    figure.update_layout(xaxis={"range": [-1.35 * reach, 1.35 * reach]})
    _line(figure, "", -1.3 * reach, 1.3 * reach)
    _boundary_mark(figure, "", f"boundary {exact(boundary)}")
    for name, height in (("reference", 0.75), ("candidate", 0.4)):
        start, end = values[name], rounded[name]
        if start is None or not math.isfinite(end):
            continue
        figure.add_trace(
            go.Scatter(
                x=[start, end],
                y=[height, height],
                mode="lines+markers",
                line={"color": colours[name], "width": 2},
                marker={"symbol": ["circle", "arrow"], "size": [9, 12], "angleref": "previous"},
                name=f"{name}: FP32 value → {coordinate.rounded_dtype}",
                text=[
                    f"{name} {exact(coordinate.reference if name == 'reference' else coordinate.candidate)}",
                    f"{name} rounded",
                ],
                hoverinfo="text",
            )
        )
    bits = {
        "reference": coordinate.rounded_reference_bits,
        "candidate": coordinate.rounded_candidate_bits,
    }
    full = {"reference": report.rounded_reference, "candidate": report.rounded_candidate}
    for name in ("reference",) if same else ("reference", "candidate"):
        if math.isfinite(rounded[name]):
            _tick(figure, "", rounded[name], f"{exact(full[name])}<br>{bits[name]}")


def _zoomed_line(figure: go.Figure, boundary: float, reference: float, candidate: float) -> None:
    """Draw the lower line: both FP32 values around the boundary, in FP32 ULP."""
    colours = palette.EXECUTION_COLOURS["light"]
    unit = float(np.spacing(np.float32(abs(boundary)))) or 1.0
    places = {"reference": reference / unit, "candidate": candidate / unit}
    reach = max(2.0, *(abs(place) for place in places.values()))
    figure.update_layout(xaxis2={"range": [-1.35 * reach, 1.35 * reach]})
    _line(figure, "2", -1.3 * reach, 1.3 * reach)
    _boundary_mark(figure, "2", "zoom: FP32 ULP from the boundary")
    stride = max(1, int(reach // 4))
    for tick in range(-int(reach), int(reach) + 1, stride):
        _tick(figure, "2", float(tick), f"{tick:+d}" if tick else "0")
    for name, height in (("reference", 0.75), ("candidate", 0.4)):
        figure.add_trace(
            go.Scatter(
                x=[places[name], places[name]],
                y=[height, 0.0],
                mode="lines+markers",
                xaxis="x2",
                yaxis="y2",
                line={"color": colours[name], "width": 2},
                marker={"symbol": "circle", "size": [9, 5]},
                text=f"{name}: {places[name]:+.6g} FP32 ULP from the boundary",
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
        y0=-0.45,
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
