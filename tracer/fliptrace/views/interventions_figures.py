"""The rounding boundary of a cause and, beside it, the token margin under each of its two values: the paper's figure 5.

The margin is the reference's token against the candidate's, m = z_reference - z_candidate: right of 0 the reference's
token leads, left of it the candidate's, and at 0 both logits are equal and the tie-break decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import plotly.graph_objects as go
import torch

from fliptrace.numerics import (
    CoordinateClass,
    boundary_report,
    float32_from_bits,
    special_difference,
    ulp_distance,
)
from fliptrace.sites import Coordinate, Site
from fliptrace.verdicts import CoordinateDifference
from fliptrace.views import palette
from fliptrace.views.boundary import boundary_figure
from fliptrace.views.escaping import plotly_label, quoted
from fliptrace.views.interventions import token_margin
from fliptrace.views.wording import brief

if TYPE_CHECKING:
    from fliptrace.judgements import Arm, CoordinateResult, Verdict

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
#: Where the number lines end and the bars begin, in the picture that holds both.
_LINES_END, _BARS_START = 0.58, 0.74


@dataclass(frozen=True, slots=True)
class MarginBar:
    """One bar: the margin at the judged step with one value in place.

    Attributes:
        execution: in whose execution.
        value_of: whose value the coordinate had.
        margin: z of the reference's token minus z of the candidate's; None where one of the two was not kept.
        token: the token that was chosen, as text for people.
        tied: it was decided by tie-break.
    """

    execution: str
    value_of: str
    margin: float | None
    token: str
    tied: bool

    @property
    def label(self) -> str:
        """The bar's name."""
        return f"{self.value_of}'s value, {self.execution}'s execution"


def margin_bars(verdict: Verdict) -> tuple[MarginBar, ...]:
    """List the bars of a claim: the recipient's own value and the donor's, in each direction that was run."""
    bars = []
    for result in verdict.directions:
        tokens = {result.recipient: result.recipient_token, result.donor: result.donor_token}
        for arm, value_of in ((result.unedited, result.recipient), (result.edited, result.donor)):
            if arm is not None:
                bars.append(_bar(arm, result.recipient, value_of, tokens))
    return tuple(bars)


def _bar(arm: Arm, execution: str, value_of: str, tokens: dict[str, int]) -> MarginBar:
    token = quoted(arm.token_text, 24) if arm.token_text else f"id {arm.token_id}"
    return MarginBar(
        execution=execution,
        value_of=value_of,
        margin=token_margin(arm, tokens["reference"], tokens["candidate"]),
        token=token,
        tied=arm.decided_by_tie_break,
    )


def difference_of(coordinate: CoordinateResult, dtype: str) -> CoordinateDifference:
    """Describe a coordinate that was tried as the comparison describes its differences.

    Args:
        coordinate: from an investigation.
        dtype: the type to which its consumer rounds.
    """
    bits = (int(coordinate.reference_bits, 16), int(coordinate.candidate_bits, 16))
    reference, candidate = (float32_from_bits(number) for number in bits)
    pair = torch.tensor([reference, candidate])
    survives = coordinate.rounded_reference_bits != coordinate.rounded_candidate_bits
    return CoordinateDifference(
        coordinate=Coordinate(
            Site.from_path(coordinate.site),
            coordinate.step,
            coordinate.position,
            coordinate.rank_index,
        ),
        reference=reference,
        candidate=candidate,
        reference_bits=coordinate.reference_bits,
        candidate_bits=coordinate.candidate_bits,
        coordinate_class=CoordinateClass.SURVIVING if survives else CoordinateClass.LATENT,
        rounded_dtype=dtype,
        rounded_reference_bits=coordinate.rounded_reference_bits,
        rounded_candidate_bits=coordinate.rounded_candidate_bits,
        distance_ulp=int(ulp_distance(pair[:1], pair[1:])[0]),
        boundary=boundary_report(reference, candidate, _DTYPES.get(dtype, torch.float32)),
        special=special_difference(reference, candidate),
    )


def margins_figure(verdict: Verdict) -> go.Figure:
    """Draw the margin bars alone."""
    figure = go.Figure()
    figure.update_layout(
        height=300,
        margin={"l": 24, "r": 24, "t": 30, "b": 50},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        showlegend=False,
        hovermode="closest",
    )
    _draw_bars(figure, margin_bars(verdict), "", (0.0, 1.0))
    return figure


def cause_figure(coordinate: CoordinateResult, verdict: Verdict, dtype: str) -> go.Figure:
    """Draw a coordinate as the paper's figure 5 does: its rounding boundary, and the token margin under each value.

    Args:
        coordinate: from an investigation.
        verdict: its proof.
        dtype: the type to which its consumer rounds, ``bfloat16``.

    Returns:
        A plotly figure to show or restyle.
    """
    figure = boundary_figure(difference_of(coordinate, dtype), dtype)
    figure.update_layout(height=380)
    for axis in ("xaxis", "xaxis2"):
        figure.update_layout({axis: {"domain": [0.0, _LINES_END]}})
    _draw_bars(figure, margin_bars(verdict), "3", (_BARS_START, 1.0))
    return figure


def _draw_bars(
    figure: go.Figure, bars: tuple[MarginBar, ...], axis: str, domain: tuple[float, float]
) -> None:
    """Add one horizontal bar per arm, from 0 (a tie) to the margin, with the token that was chosen at its side."""
    colours = palette.EXECUTION_COLOURS["light"]
    ink = palette.INK["light"]
    known = [bar.margin for bar in bars if bar.margin is not None]
    reach = max((abs(margin) for margin in known), default=0.0) or 1.0
    figure.update_layout(
        {
            f"xaxis{axis}": {
                "domain": list(domain),
                "anchor": f"y{axis}",
                "range": [-1.5 * reach, 1.5 * reach],
                "title": {"text": "m = z(reference's token) - z(candidate's token)"},
                "zeroline": False,
                "nticks": 5,
                "gridcolor": ink["grid"],
                "fixedrange": True,
            },
            f"yaxis{axis}": {
                "domain": [0.0, 1.0],
                "anchor": f"x{axis}",
                "range": [len(bars) - 0.35, -0.9],
                "visible": False,
                "fixedrange": True,
            },
        }
    )
    for place, bar in enumerate(bars):
        margin = bar.margin or 0.0
        text = f"{bar.label}: {_margin_text(bar)}, chose {bar.token}"
        figure.add_trace(
            go.Bar(
                x=[margin],
                y=[place],
                orientation="h",
                width=0.34,
                marker={"color": colours[bar.value_of]},
                xaxis=f"x{axis}",
                yaxis=f"y{axis}",
                hovertext=plotly_label(text),
                hoverinfo="text",
                showlegend=False,
            )
        )
        if margin == 0.0:  # a bar without a length would not show
            figure.add_trace(
                go.Scatter(
                    x=[0],
                    y=[place],
                    mode="markers",
                    marker={"symbol": "diamond", "size": 10, "color": colours[bar.value_of]},
                    xaxis=f"x{axis}",
                    yaxis=f"y{axis}",
                    hovertext=plotly_label(text),
                    hoverinfo="text",
                    showlegend=False,
                    visible=bar.margin is not None,
                )
            )
        figure.add_annotation(
            text=plotly_label(f"{bar.label}: {_margin_text(bar)} → {bar.token}"),
            x=0,
            y=place - 0.34,
            xref=f"x{axis}",
            yref=f"y{axis}",
            showarrow=False,
            font={"size": 11},
        )
    figure.add_shape(
        type="line",
        x0=0,
        x1=0,
        y0=-0.6,
        y1=len(bars) - 0.5,
        xref=f"x{axis}",
        yref=f"y{axis}",
        line={"color": ink["muted"], "width": 2, "dash": "dash"},
        layer="below",
    )
    figure.add_annotation(
        text="0 (tie)",
        x=0,
        y=-0.62,
        xref=f"x{axis}",
        yref=f"y{axis}",
        yanchor="bottom",
        showarrow=False,
        font={"size": 11},
    )


def _margin_text(bar: MarginBar) -> str:
    if bar.margin is None:
        return "m not known"
    return "m = 0, a tie" if bar.margin == 0.0 else f"m = {brief(bar.margin)}"
