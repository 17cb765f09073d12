"""The propagation graph: how differing records lead from the roots to the flip, as a figure and as a page's section.

The chart comes laid out (fliptrace.chart); this module gives it colours and words. An edge means that data can flow
that way and that both ends differ. It is no proof that one caused the other, and every view of it says so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from fliptrace.chart import NodeKind
from fliptrace.views import palette, wording
from fliptrace.views.escaping import plotly_label, said
from fliptrace.views.wording import brief, capitalised, count, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fliptrace.chart import Band, ChartNode, PropagationChart
    from fliptrace.verdicts import PairDiff

#: Said with every picture of the graph.
CAVEAT = (
    "An edge says that data can flow that way and that both ends differ. It does not say that one caused the other: "
    "that takes an intervention."
)
_SYMBOLS = {
    NodeKind.ROOT: "diamond",
    NodeKind.VARIANT: "diamond-wide",
    NodeKind.ELSEWHERE: "diamond-tall",
    NodeKind.SHRINKS: "square",
    NodeKind.CACHE: "hexagon",
    NodeKind.MIXED: "pentagon",
    NodeKind.LOGITS: "circle",
    NodeKind.FLIP: "star",
}
_MERGED = {
    "projection": "A node is one projection (its input, shrink and output), or the keys or values of a layer",
    "block": "A node is the projections of one block, or the keys and values of a layer",
    "half layer": "A node is half a layer: attention inputs with keys and values, or the rest",
    "layer": "A node is a layer",
    "layers": "A node is several layers",
}
#: Pixels between nodes above one another, and least between columns.
_ROW, _COLUMN = 22, 17
_SMALLEST, _LARGEST = 6.0, 12.0


def propagation_figure(diff: PairDiff) -> go.Figure:
    """Draw the differing records that lead from the roots to the flip.

    Columns are execution order within a step, rows are steps: the first root's, those between, the flip's. Squares are
    projections, hexagons keys and values, pentagons both; an outline marks a node that adds a difference of its own,
    and larger nodes have larger differences. A shortest way from the first root to the flip is bold.

    Args:
        diff: what was found.

    Returns:
        A plotly figure to show or restyle; without a chart an empty one that says so.
    """
    chart = diff.propagation_chart
    figure = go.Figure()
    figure.update_layout(
        margin={"l": 84, "r": 16, "t": 34, "b": 44},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="closest",
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        xaxis={"visible": False, "fixedrange": True},
        yaxis={"visible": False, "fixedrange": True},
        height=140,
    )
    if chart is None:
        figure.add_annotation(
            text="Nothing to follow: no difference left a shrink.", showarrow=False
        )
        return figure
    for edges in (
        ("within a step", False, False, {"width": 1, "color": palette.INK["light"]["hatch"]}),
        (
            "through the cache",
            True,
            False,
            {"width": 1, "color": palette.INK["light"]["hatch"], "dash": "dot"},
        ),
        ("a shortest way", None, True, {"width": 2.5, "color": palette.INK["light"]["text"]}),
    ):
        _draw_edges(figure, chart, *edges)
    for kind in NodeKind:
        _draw_nodes(figure, chart, kind)
    _draw_axes(figure, chart)
    return figure


def _draw_edges(
    figure: go.Figure,
    chart: PropagationChart,
    name: str,
    cached: bool | None,
    on_path: bool,
    line: dict[str, Any],
) -> None:
    x: list[float | None] = []
    y: list[float | None] = []
    for edge in chart.edges:
        if edge.on_path is not on_path or cached not in (None, edge.cached):
            continue
        for number in (edge.source, edge.target):
            x.append(_x(chart, chart.nodes[number]))
            y.append(_y(chart, chart.nodes[number]))
        x.append(None)
        y.append(None)
    figure.add_trace(
        go.Scatter(
            x=x, y=y, mode="lines", name=name, line=line, hoverinfo="skip", showlegend=bool(x)
        )
    )


def _draw_nodes(figure: go.Figure, chart: PropagationChart, kind: NodeKind) -> None:
    numbers = [number for number, node in enumerate(chart.nodes) if node.kind is kind]
    if not numbers:
        return
    nodes = [chart.nodes[number] for number in numbers]
    colours = palette.CLASS_COLOURS["light"]
    ink = palette.INK["light"]
    figure.add_trace(
        go.Scatter(
            x=[_x(chart, node) for node in nodes],
            y=[_y(chart, node) for node in nodes],
            mode="markers",
            name=str(kind),
            customdata=numbers,
            marker={
                "symbol": _SYMBOLS[kind],
                "size": _sizes(chart, nodes),
                "color": [
                    colours[node.coordinate_class]
                    if node.coordinate_class in colours
                    else ink["text"]
                    for node in nodes
                ],
                "opacity": 1,
                "line": {
                    "color": [ink["text"] if node.added_rows else ink["grid"] for node in nodes],
                    "width": [2 if node.added_rows else 0.5 for node in nodes],
                },
            },
            hovertext=["<br>".join(map(plotly_label, node_lines(chart, node))) for node in nodes],
            hoverinfo="text",
        )
    )


def _sizes(chart: PropagationChart, nodes: Sequence[ChartNode]) -> list[float]:
    """Return marker sizes by the logarithm of the magnitude, the same scale for all nodes of a chart."""
    logarithms = [
        math.log10(value)
        for node in chart.nodes
        if (value := _magnitude(node)) and math.isfinite(value)
    ]
    low, high = min(logarithms, default=0.0), max(logarithms, default=0.0)

    def size(node: ChartNode) -> float:
        if node.kind in (NodeKind.ROOT, NodeKind.VARIANT, NodeKind.ELSEWHERE, NodeKind.FLIP):
            return _LARGEST + 2
        value = _magnitude(node)
        if not value or high == low:
            return (_SMALLEST + _LARGEST) / 2
        share = 1.0 if not math.isfinite(value) else (math.log10(value) - low) / (high - low)
        return round(_SMALLEST + share * (_LARGEST - _SMALLEST), 1)

    return [size(node) for node in nodes]


def _magnitude(node: ChartNode) -> float | None:
    return node.magnitude if node.magnitude is not None else node.cache_magnitude


def _x(chart: PropagationChart, node: ChartNode) -> float:
    return round(node.x * (chart.columns - 1), 2)


def _y(chart: PropagationChart, node: ChartNode) -> float:
    return round(node.y * (chart.rows - 1), 2)


def _draw_axes(figure: go.Figure, chart: PropagationChart) -> None:
    """Name the layers below and the steps at the left."""
    layers: dict[int, list[float]] = {}
    for node in chart.nodes:
        if node.layer is not None:
            layers.setdefault(node.layer, []).append(_x(chart, node))
    middles = {layer: (min(xs) + max(xs)) / 2 for layer, xs in sorted(layers.items())}
    stride = max(1, -(-len(middles) // 16))
    shown = list(middles.items())[::stride]
    heights: dict[int, list[float]] = {}
    for node in chart.nodes:
        heights.setdefault(node.band, []).append(_y(chart, node))
    figure.update_layout(
        height=chart.rows * _ROW + 110,
        xaxis={
            "visible": True,
            "title": {"text": "layer, in execution order"},
            "tickvals": [place for _, place in shown],
            "ticktext": [str(layer) for layer, _ in shown],
            "range": [-0.8, chart.columns - 0.2],
            "showgrid": False,
            "zeroline": False,
        },
        yaxis={
            "visible": True,
            "tickvals": [(min(ys) + max(ys)) / 2 for _, ys in sorted(heights.items())],
            "ticktext": [band_name(chart.bands[band]) for band in sorted(heights)],
            "range": [chart.rows - 0.2, -0.8],
            "showgrid": False,
            "zeroline": False,
        },
    )
    for band in range(1, len(chart.bands)):
        above, below = (heights.get(number) for number in (band - 1, band))
        if above and below:
            edge = (max(above) + min(below)) / 2
            figure.add_hline(y=edge, line={"color": palette.INK["light"]["grid"], "width": 1})


def band_name(band: Band) -> str:
    """Name the steps of a band: ``prefill``, ``step 5`` or ``steps 1–34``."""
    if band.first == band.last:
        return wording.step_name(band.first)
    return f"steps {band.first}–{band.last}"


def node_lines(chart: PropagationChart, node: ChartNode) -> list[str]:
    """Describe a node, a line for each thing."""
    where = (
        wording.step_name(node.step) if node.step is not None else band_name(chart.bands[node.band])
    )
    if node.kind is NodeKind.FLIP:
        return [f"The flip, {where}"]
    lines = [f"{capitalised(node.kind)}: {said(node.name)}, {where}"]
    class_name = node.coordinate_class.label if node.coordinate_class is not None else ""
    if class_name and node.kind is not NodeKind.LOGITS:
        lines.append(class_name)
    sizes = magnitude_words(node)
    if sizes:
        lines.append(f"largest |difference| {sizes}")
    if node.position_count:
        lines.append(f"token {position_words(node)}")
    lines.append(f"added here: {added_words(chart, node)}")
    return lines


def magnitude_words(node: ChartNode) -> str:
    """Say how large a node's differences are: ``1.2e-05 (FP32 shrinks), 0.0312 (keys and values)``."""
    sizes = ((node.magnitude, "FP32 shrinks"), (node.cache_magnitude, "keys and values"))
    return ", ".join(f"{brief(size)} ({name})" for size, name in sizes if size is not None)


def position_words(node: ChartNode) -> str:
    """Name the positions of a node's differing rows, and count the rest."""
    named = [str(position) for position in node.positions[:6]]
    more = node.position_count - len(named)
    noun = "position" if node.position_count == 1 else "positions"
    return f"{noun} {', '.join(named)}{f' and {more:,} more' if more > 0 else ''}"


def added_words(chart: PropagationChart, node: ChartNode) -> str:
    """Say what a node adds beyond what it inherits, as far as the records allow."""
    if node.kind is NodeKind.ROOT and not node.inherited_rows:
        return "all of it (bit-equal operands)"
    if node.kind is NodeKind.VARIANT:
        return "not separable (launched or reduced differently)"
    if node.kind is NodeKind.ELSEWHERE:
        return "see “Where it started”"
    rest = "the weights are not in a trace" if chart.operands_kept else "operands kept as digests"
    if chart.separated:
        rest = "of records taken together; each cell of the map tells"
    parts = []
    if node.added_rows:
        rows = f"{node.added_rows:,} of {node.added_rows + node.inherited_rows + node.unlocated_rows:,} rows"
        parts.append(f"all of {rows} (bit-equal operands)")
    if node.inherited_rows or node.unlocated_rows or not parts:
        known = node.inherited_rows or node.unlocated_rows or node.added_rows
        reason = f" ({rest})" if known else ""
        parts.append(f"{'the rest ' if parts else ''}not separable{reason}")
    return "; ".join(parts)


def propagation_sentences(diff: PairDiff) -> tuple[str, ...]:
    """Say what the picture shows and what was left out of it."""
    chart = diff.propagation_chart
    if chart is None:
        return ()
    nodes = count(len(chart.nodes), "node")
    roots = any(node.kind is NodeKind.ROOT for node in chart.nodes)
    start, starts = ("a root", "the roots") if roots else ("where it entered", "what entered")
    shown = {
        True: f"{nodes} for {count(chart.records, 'differing record')} that lead from {start} to the flip.",
        False: f"No way leads from {start} to the flip; {nodes} show the {count(chart.records, 'record')} that "
        f"{starts} can reach.",
        None: f"{nodes} for the {count(chart.records, 'differing record')} that {starts} can reach.",
    }[chart.reaches_flip]
    sentences = [shown, f"{_MERGED[chart.merged]}; token positions are not told apart."]
    left = []
    if chart.left_out:
        lost = (
            "that no such way goes through" if chart.reaches_flip else f"that {starts} cannot reach"
        )
        left.append(f"{count(chart.left_out, 'differing record')} {lost}")
    if chart.latent:
        left.append(f"{count(chart.latent, 'shrink')} whose difference ends in rounding")
    if left:
        sentences.append(f"Left out: {listed(left)}.")
    if chart.steps_between:
        sentences.append(
            f"Of {count(chart.steps_between, 'step')} between, only what they left in the keys and values is followed."
        )
    if chart.roots > chart.roots_drawn:
        sentences.append(
            f"The first {chart.roots_drawn:,} of {chart.roots:,} roots have a node of their own."
        )
    return tuple(sentences)


def propagation_section(diff: PairDiff) -> dict[str, Any] | None:
    """Return what the page's section shows; None where nothing can be followed."""
    chart = diff.propagation_chart
    if chart is None:
        return None
    leads: dict[int, list[str]] = {}
    for edge in chart.edges:
        leads.setdefault(edge.source, []).append(f"{edge.target + 1}")
    return {
        "caveat": CAVEAT,
        "sentences": propagation_sentences(diff),
        "width": _COLUMN * chart.columns + 100,
        "flip": chart.reaches_flip,
        "rows": [
            {
                "number": number + 1,
                "name": said(node.name),
                "kind": str(node.kind),
                "where": wording.step_name(node.step)
                if node.step is not None
                else band_name(chart.bands[node.band]),
                "class": node.coordinate_class.label if node.coordinate_class is not None else "",
                "records": f"{node.records:,}" if node.kind is not NodeKind.FLIP else "",
                "positions": position_words(node).partition(" ")[2] if node.position_count else "",
                "size": magnitude_words(node),
                "added": "" if node.kind is NodeKind.FLIP else added_words(chart, node),
                "leads": ", ".join(leads.get(number, ())),
                "on_path": node.on_path,
            }
            for number, node in enumerate(chart.nodes)
        ],
    }


def propagation_data(diff: PairDiff) -> dict[str, Any] | None:
    """Return what the page's script needs beside the figure: every node's lines and neighbours."""
    chart = diff.propagation_chart
    if chart is None:
        return None
    return {
        "lines": [node_lines(chart, node) for node in chart.nodes],
        "places": [[_x(chart, node), _y(chart, node)] for node in chart.nodes],
        "edges": [[edge.source, edge.target] for edge in chart.edges],
        "path": [number for number, node in enumerate(chart.nodes) if node.on_path],
    }
