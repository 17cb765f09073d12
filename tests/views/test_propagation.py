"""The propagation graph: figure, words, table, and the page's picture by mouse and keyboard."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fliptrace.chart import Band, ChartEdge, ChartNode, NodeKind, PropagationChart
from fliptrace.numerics import CoordinateClass
from fliptrace.verdicts import Outcome
from fliptrace.views import propagation_figure, render_report
from fliptrace.views.propagation import (
    CAVEAT,
    added_words,
    propagation_data,
    propagation_section,
    propagation_sentences,
)

SURVIVING = CoordinateClass.SURVIVING


def node(name, kind, band, column, y=0.0, **changes):
    """A node of a chart with five columns."""
    values = {
        "records": 3,
        "coordinate_class": SURVIVING,
        "magnitude": None,
        "cache_magnitude": None,
        "positions": (5, 7),
        "position_count": 2,
        "added_rows": 0,
        "inherited_rows": 0,
        "unlocated_rows": 0,
        "on_path": True,
    } | changes
    return ChartNode(name=name, kind=kind, band=band, column=column, x=column / 4, y=y, **values)


def chart(name="layer 2 mlp.up_proj", **changes):
    """A root, what inherits from it, keys and values, and the flip in a later step."""
    nodes = (
        node(
            name,
            NodeKind.ROOT,
            0,
            0,
            magnitude=2e-9,
            added_rows=1,
            step=0,
            layer=2,
            positions=(5,),
            position_count=1,
        ),
        node(
            "layer 3 self_attn.q_proj",
            NodeKind.SHRINKS,
            0,
            1,
            magnitude=1e-4,
            inherited_rows=4,
            added_rows=2,
            layer=3,
            position_count=9,
            positions=tuple(range(9)),
        ),
        node("layer 3 key", NodeKind.CACHE, 0, 2, cache_magnitude=0.03125, layer=3),
        node("logits", NodeKind.LOGITS, 1, 3, 1.0, position_count=1, positions=(28,)),
        node(
            "flip", NodeKind.FLIP, 1, 4, 1.0, coordinate_class=None, positions=(), position_count=0
        ),
    )
    values = {
        "bands": (Band(0, 0, 1), Band(11, 11, 1)),
        "nodes": nodes,
        "edges": (
            ChartEdge(0, 1, False, True),
            ChartEdge(1, 2, False, True),
            ChartEdge(0, 2, False, False),
            ChartEdge(2, 3, True, True),
            ChartEdge(3, 4, False, True),
        ),
        "columns": 5,
        "rows": 3,
        "merged": "projection",
        "reaches_flip": True,
        "records": 9,
        "left_out": 4,
        "latent": 1,
        "roots_drawn": 1,
        "roots": 3,
        "steps_between": 2,
        "operands_kept": False,
    } | changes
    return PropagationChart(**values)


@pytest.fixture
def opened(load_neighbour):
    """A report opened in Chromium."""
    return load_neighbour(Path(__file__).parent / "test_browser.py").Page


def page(pair, **options):
    return render_report(pair.diff, pair.reference, pair.candidate, title="a pair", **options)


def test_the_figure_draws_every_node_once_and_every_edge(pairs):
    """Nodes at their places by kind, edges as three kinds of lines, layers and steps on the axes."""
    figure = propagation_figure(pairs.make(propagation_chart=chart()).diff)
    markers = [trace for trace in figure.data if trace.mode == "markers"]
    numbers = [number for trace in markers for number in trace.customdata]
    assert sorted(numbers) == list(range(5))
    places = {n: (x, y) for t in markers for n, x, y in zip(t.customdata, t.x, t.y, strict=True)}
    assert places == {0: (0, 0), 1: (1, 0), 2: (2, 0), 3: (3, 2), 4: (4, 2)}
    lines = {trace.name: trace for trace in figure.data if trace.mode == "lines"}
    assert list(lines["within a step"].x) == [0, 2, None]
    assert len(lines["through the cache"].x) == 0
    assert len(lines["a shortest way"].x) == 4 * 3
    assert list(figure.layout.xaxis.ticktext) == ["2", "3"]
    assert list(figure.layout.yaxis.ticktext) == ["prefill", "step 11"]
    root, shrinks = markers[0].marker, markers[1].marker
    assert root.symbol != shrinks.symbol
    assert (root.line.width[0], shrinks.line.width[0]) == (2, 2)
    assert markers[2].marker.line.width[0] < 1


def test_a_pair_without_a_chart_has_an_empty_figure_and_no_section(pairs):
    """It says so; the page has no section."""
    pair = pairs.make(Outcome.IDENTICAL)
    assert "Nothing to follow" in propagation_figure(pair.diff).layout.annotations[0].text
    assert propagation_section(pair.diff) is None
    assert propagation_sentences(pair.diff) == ()
    assert 'id="propagation' not in page(pair)


def test_what_was_pruned_is_said(pairs):
    """Counts of what was left out, merged, passed over, and of roots without a node."""
    text = " ".join(propagation_sentences(pairs.make(propagation_chart=chart()).diff))
    assert "5 nodes for 9 differing records that lead from a root to the flip." in text
    assert "4 differing records that no such way goes through" in text
    assert "1 shrink whose difference ends in rounding" in text
    assert "Of 2 steps between, only what they left in the keys and values is followed." in text
    assert "The first 1 of 3 roots have a node of their own." in text
    lost = chart(reaches_flip=False, left_out=0, latent=0, steps_between=0, roots=1)
    text = " ".join(propagation_sentences(pairs.make(propagation_chart=lost).diff))
    assert text.startswith("No way leads from a root to the flip")
    assert "Left out" not in text
    entered = chart(
        reaches_flip=None, nodes=(node("x", NodeKind.VARIANT, 0, 0), *chart().nodes[1:])
    )
    text = " ".join(propagation_sentences(pairs.make(propagation_chart=entered).diff))
    assert "that what entered can reach" in text
    assert "4 differing records that what entered cannot reach" in text
    assert "root to" not in text


def test_what_a_node_adds_is_never_made_up():
    """All of it at a root; at others the rows with bit-equal operands; for the rest it is not separable."""
    made = chart()
    root, shrinks, key, *_ = made.nodes
    assert added_words(made, root) == "all of it (bit-equal operands)"
    assert added_words(made, shrinks) == (
        "all of 2 of 6 rows (bit-equal operands); the rest not separable (operands kept as digests)"
    )
    assert added_words(made, key) == "not separable"
    kept = chart(operands_kept=True)
    assert "the weights are not in a trace" in added_words(kept, shrinks)
    variant = node("x", NodeKind.VARIANT, 0, 0, unlocated_rows=1)
    assert added_words(made, variant) == "not separable (launched or reduced differently)"


def test_the_table_holds_what_the_picture_shows(pairs):
    """Every node with class, size, positions, what it adds, and where it leads."""
    section = propagation_section(pairs.make(propagation_chart=chart()).diff)
    root, shrinks, key, logits, flip = section["rows"]
    assert (root["where"], root["class"], root["positions"], root["leads"]) == (
        "prefill",
        "surviving",
        "5",
        "2, 3",
    )
    assert root["size"] == "2e-09 (FP32 shrinks)"
    assert key["size"] == "0.03125 (keys and values)"
    assert shrinks["positions"] == "0, 1, 2, 3, 4, 5 and 3 more"
    assert (logits["where"], flip["leads"], flip["added"]) == ("step 11", "", "")


def test_the_page_has_the_section_before_the_interventions(pairs, made):
    """With its caveat, after the heatmap."""
    text = page(pairs.make(propagation_chart=chart()), interventions=made.report())
    places = [
        text.index(mark)
        for mark in ('id="map-heading"', 'id="propagation-heading"', 'id="interventions-heading"')
    ]
    assert places == sorted(places)
    assert CAVEAT[:30] in text


def test_names_from_elsewhere_stay_text(pairs):
    """In labels, hovers, table and the script's data."""
    plain = re.findall("<[a-z]+", page(pairs.make(propagation_chart=chart())))
    for hostile in pairs.corpus:
        pair = pairs.make(propagation_chart=chart(name=hostile))
        text = page(pair)
        text.encode("utf-8")
        assert re.findall("<[a-z]+", text) == plain
        figure = propagation_figure(pair.diff)
        hover = figure.data[3].hovertext[0].replace("<br>", "")
        assert not set("<>$%{}\\") & set(hover)
        json.dumps(propagation_data(pair.diff)).encode("utf-8")


@pytest.mark.browser
def test_people_walk_through_the_graph(pairs, chromium, tmp_path, opened):
    """Drawn; by keyboard along the data and to neighbours, by mouse; in both themes, narrow, and in print."""
    open_page = opened(chromium, tmp_path, page(pairs.make(propagation_chart=chart())))
    told = "#propagation-node"
    picture = chromium.find_element("css selector", "#propagation-scroll")
    picture.send_keys("\ue014")
    assert open_page.text(told).startswith("Root: layer 2 mlp.up_proj, prefill\nsurviving")
    assert "added here: all of it" in open_page.text(told)
    for key, expected in (
        ("\ue014", "Projections: layer 3"),  # right
        ("\ue014", "Keys and values: layer 3"),
        ("\ue012", "Projections: layer 3"),  # left
        ("\ue010", "The flip, step 11"),  # end
        ("\ue013", "Keys and values"),  # up: the nearest one that is higher
        ("\ue011", "Root"),  # home
    ):
        picture.send_keys(key)
        assert open_page.text(told).startswith(expected), expected
    ring = open_page.run(
        "const r = document.querySelector('.node-ring').getBoundingClientRect(),"
        " m = document.querySelectorAll('#propagation .scatterlayer .points path')[0].getBoundingClientRect();"
        "return [r.left + r.width / 2 - m.left - m.width / 2, r.top + r.height / 2 - m.top - m.height / 2]"
    )
    assert max(map(abs, ring)) < 2
    for scheme, orange in (("light", "#d55e00"), ("dark", "#f0791a")):
        for width in (1280, 375):
            open_page.emulate(scheme, width)
            open_page.wait(
                "document.getElementById('propagation').data.find((t) => t.name === 'root')"
                f".marker.color[0] === '{orange}'"
            )
            open_page.wait(f"window.innerWidth === {width}")
            open_page.wait("document.documentElement.scrollWidth <= window.innerWidth")
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    assert (
        open_page.run("return getComputedStyle(document.querySelector('.node')).display") == "none"
    )
    open_page.assert_quiet()
