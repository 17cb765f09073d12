"""The studies' figures, drawn from shares with intervals; the one module of studies that imports plotly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import plotly.graph_objects as go

from fliptrace.studies.statistics import Ratio, Share
from fliptrace.views.escaping import plotly_label, visible

#: From Okabe and Ito's colour-blind-safe set, as all of fliptrace's figures.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")


def shares_figure(groups: Mapping[str, Mapping[str, Share]], *, title: str) -> go.Figure:
    """Draw shares as bars with their intervals.

    Args:
        groups: what was counted -> reduction (or another label) -> share.
        title: of the figure.

    Returns:
        Grouped bars in percent; a bar of nothing shows its bound as an error bar.
    """
    figure = go.Figure()
    for (name, shares), colour in zip(groups.items(), _colours(len(groups)), strict=True):
        kept = {label: share for label, share in shares.items() if share.value is not None}
        values = [100 * (share.value or 0.0) for share in kept.values()]
        figure.add_trace(
            go.Bar(
                name=plotly_label(name),
                x=[plotly_label(label) for label in kept],
                y=values,
                marker={"color": colour},
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [_above(share) for share in kept.values()],
                    "arrayminus": [_below(share) for share in kept.values()],
                },
                hovertext=[plotly_label(str(share)) for share in kept.values()],
                hoverinfo="text+name",
            )
        )
    figure.update_layout(
        title={"text": plotly_label(title)},
        barmode="group",
        yaxis={"title": {"text": "% (95 % interval)"}, "rangemode": "tozero"},
        legend={"orientation": "h", "y": -0.15},
        template="plotly_white",
    )
    return figure


def scatter_figure(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x_title: str,
    y_title: str,
) -> go.Figure:
    """Draw points, one colour per series.

    Args:
        series: name -> (x, y).
        title: of the figure.
        x_title: of the x axis.
        y_title: of the y axis.
    """
    figure = go.Figure()
    for (name, (x, y)), colour in zip(series.items(), _colours(len(series)), strict=True):
        figure.add_trace(
            go.Scatter(
                x=list(x),
                y=list(y),
                mode="markers",
                name=plotly_label(name),
                marker={"color": colour, "size": 6, "opacity": 0.7},
            )
        )
    figure.update_layout(
        title={"text": plotly_label(title)},
        xaxis={"title": {"text": plotly_label(x_title)}},
        yaxis={"title": {"text": plotly_label(y_title)}},
        template="plotly_white",
    )
    return figure


def ratios_figure(
    series: Mapping[str, Mapping[str, Ratio]], *, title: str, x_title: str, y_title: str
) -> go.Figure:
    """Draw ratios as changes in percent, with their intervals.

    Args:
        series: name -> place on the x axis -> ratio.
        title: of the figure.
        x_title: of the x axis.
        y_title: of the y axis, which is in percent.
    """
    figure = go.Figure()
    for (name, ratios), colour in zip(series.items(), _colours(len(series)), strict=True):
        ends = [ratio.interval for ratio in ratios.values()]
        figure.add_trace(
            go.Scatter(
                name=plotly_label(name),
                x=[plotly_label(place) for place in ratios],
                y=[100 * (ratio.value - 1) for ratio in ratios.values()],
                mode="lines+markers",
                marker={"color": colour},
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [
                        0.0 if end is None else 100 * (end.high - ratio.value)
                        for end, ratio in zip(ends, ratios.values(), strict=True)
                    ],
                    "arrayminus": [
                        0.0 if end is None else 100 * (ratio.value - end.low)
                        for end, ratio in zip(ends, ratios.values(), strict=True)
                    ],
                },
                hovertext=[plotly_label(str(ratio)) for ratio in ratios.values()],
                hoverinfo="text+name",
            )
        )
    figure.update_layout(
        title={"text": plotly_label(title)},
        xaxis={"title": {"text": plotly_label(x_title)}, "type": "category"},
        yaxis={"title": {"text": plotly_label(y_title)}, "zeroline": True},
        legend={"orientation": "h", "y": -0.2},
        template="plotly_white",
    )
    return figure


def page_of(figure: go.Figure, title: str) -> str:
    """Return a figure as one HTML file that asks no other host for anything."""
    body: str = figure.to_html(full_html=False, include_plotlyjs=True)
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f"<title>{escape(visible(title))}</title></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _above(share: Share) -> float:
    if share.interval is None or share.value is None:
        return 0.0
    return max(0.0, 100 * (share.interval.high - share.value))


def _below(share: Share) -> float:
    if share.interval is None or share.value is None:
        return 0.0
    return max(0.0, 100 * (share.value - share.interval.low))


def _colours(count: int) -> list[str]:
    return [_COLOURS[number % len(_COLOURS)] for number in range(count)]
