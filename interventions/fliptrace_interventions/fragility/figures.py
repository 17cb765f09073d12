"""The study's figure: predicted against observed, and how often coordinates cross by their distance; imports plotly."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fliptrace.views.escaping import plotly_label
from fliptrace_interventions.fragility.scoring import ReliabilityBin, plain_bins

#: From Okabe and Ito's colour-blind-safe set, as all of fliptrace's figures.
_BLUE, _VERMILION, _GREEN = "#0072b2", "#d55e00", "#009e73"


def fragility_figure(
    prompts: Sequence[ReliabilityBin],
    steps: Sequence[ReliabilityBin],
    crossing: Sequence[tuple[str, float, float]],
    *,
    title: str,
) -> go.Figure:
    """Draw reliability beside crossings.

    Args:
        prompts: bins of prompts.
        steps: bins of steps.
        crossing: (distance, share of coordinates that cross, how many coordinates) per bin.
        title: of the figure.

    Returns:
        Left, points on the diagonal are right on average, with 95 % intervals of what was observed. Right, bars.
    """
    figure = make_subplots(
        cols=2,
        subplot_titles=("Predicted and observed", "Coordinates that cross, by distance"),
    )
    figure.add_trace(
        go.Scatter(
            x=[0, 1],
            y=[0, 1],
            mode="lines",
            name="predicted = observed",
            line={"color": "#888888", "dash": "dot"},
            hoverinfo="skip",
        ),
        row=1,
        col=1,
    )
    for name, bins, colour, symbol in (
        ("prompts", prompts, _BLUE, "circle"),
        ("steps in reach", steps, _VERMILION, "diamond"),
    ):
        figure.add_trace(_points(name, bins, colour, symbol), row=1, col=1)
    figure.add_trace(
        go.Bar(
            x=[plotly_label(label) for label, _, _ in crossing],
            y=[100 * share for _, share, _ in crossing],
            name="coordinates",
            marker={"color": _GREEN},
            hovertext=[f"of {count:,.0f}" for _, _, count in crossing],
            showlegend=False,
        ),
        row=1,
        col=2,
    )
    figure.update_xaxes(
        title_text="predicted probability of a flip", range=[-0.02, 1.02], row=1, col=1
    )
    figure.update_yaxes(title_text="observed share (95 %)", range=[-0.02, 1.02], row=1, col=1)
    figure.update_xaxes(
        title_text="distance to the boundary (FP32 ULP of the summands)", row=1, col=2
    )
    figure.update_yaxes(title_text="% of executions in which it crosses", row=1, col=2)
    figure.update_layout(
        title={"text": plotly_label(title)},
        legend={"orientation": "h", "y": -0.2},
        template="plotly_white",
    )
    return figure


def _points(name: str, bins: Sequence[ReliabilityBin], colour: str, symbol: str) -> go.Scatter:
    plain = plain_bins(bins)
    return go.Scatter(
        x=[each["predicted"] for each in plain],
        y=[each["observed"] for each in plain],
        mode="markers",
        name=name,
        marker={"color": colour, "symbol": symbol, "size": 9},
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [max(0.0, each["high"] - each["observed"]) for each in plain],
            "arrayminus": [max(0.0, each["observed"] - each["low"]) for each in plain],
        },
        hovertext=[f"{each.count} {name}: {each.observed}" for each in bins],
    )
