"""The lane below the heatmap: top-2 margin per step in both executions, ties and the flip.

Margins are on a logarithmic scale because near-ties are what matters; a tie, margin exactly zero, has no place there
and is drawn on a line of its own at the bottom.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from fliptrace.views import palette
from fliptrace.views.wording import brief

if TYPE_CHECKING:
    from fliptrace.verdicts import PairDiff


def margin_figure(diff: PairDiff) -> go.Figure:
    """Draw the margin between the two largest logits, step by step, up to the flip.

    Args:
        diff: what was found.

    Returns:
        A plotly figure: a line per execution, ties as diamonds at the bottom, the flip as a vertical line.
    """
    colours = palette.EXECUTION_COLOURS["light"]
    steps = [step.step for step in diff.steps]
    margins = {
        "reference": [step.reference_margin for step in diff.steps],
        "candidate": [step.candidate_margin for step in diff.steps],
    }
    floor = _tie_line([value for line in margins.values() for value in line])
    figure = go.Figure()
    for name, values in margins.items():
        figure.add_trace(
            go.Scatter(
                x=steps,
                y=[value if value > 0 else None for value in values],
                mode="lines+markers" if len(steps) <= 150 else "lines",
                name=name,
                line={
                    "color": colours[name],
                    "width": 1.5,
                    "dash": "dot" if name == "candidate" else None,
                },
                marker={"size": 5, "symbol": "circle" if name == "reference" else "x"},
                text=[
                    f"{name}, step {s}: margin {brief(v)}"
                    for s, v in zip(steps, values, strict=True)
                ],
                hoverinfo="text",
            )
        )
    ties = [
        (step.step, name, tied)
        for step in diff.steps
        for name, tied in (("reference", step.reference_tied), ("candidate", step.candidate_tied))
        if tied > 1
    ]
    figure.add_trace(
        go.Scatter(
            x=[step for step, _, _ in ties],
            y=[floor] * len(ties),
            mode="markers",
            name="tie",
            marker={"symbol": "diamond", "size": 9, "color": "#cc79a7"},
            text=[f"tie in the {name}, step {step}: {tied} tokens" for step, name, tied in ties],
            hoverinfo="text",
            visible=True if ties else "legendonly",
            showlegend=bool(ties),
        )
    )
    figure.update_layout(
        height=240,
        margin={"l": 130, "r": 24, "t": 30, "b": 50},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="closest",
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        xaxis={
            "title": {"text": "step"},
            "zeroline": False,
            "gridcolor": palette.INK["light"]["grid"],
            "range": [-0.5, max(steps, default=0) + 0.5],
        },
        yaxis={
            "title": {"text": "top-2 margin"},
            "type": "log",
            "tickformat": "~g",
            "dtick": 1,
            "zeroline": False,
            "gridcolor": palette.INK["light"]["grid"],
        },
    )
    if diff.flip is not None:
        figure.add_vline(
            x=diff.flip.step,
            line={"color": "#d55e00", "width": 2},
            annotation={"text": "flip", "font": {"color": "#d55e00"}},
            annotation_position="top left",
        )
    return figure


def _tie_line(margins: list[float]) -> float:
    """Choose where ties are drawn: one decade below the smallest positive margin."""
    positive = [value for value in margins if value > 0 and math.isfinite(value)]
    return min(positive) / 10 if positive else 0.1
