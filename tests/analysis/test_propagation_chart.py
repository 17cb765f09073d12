"""The propagation chart: pruned, merged, laid out, and counted."""

from __future__ import annotations

import dataclasses
import time

import networkx as nx
import pytest

from fliptrace.analysis import compare, propagation_graph
from fliptrace.analysis.propagation_chart import MOST_ROOTS
from fliptrace.analysis.propagation_merge import MOST_NODES
from fliptrace.analysis.propagation_places import laid_out
from fliptrace.chart import NodeKind
from fliptrace.numerics import CoordinateClass
from fliptrace.pair import bundled_model, load_pair
from fliptrace.trace import Kind

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
VALUE, OUT = "model.layers.1.self_attn.v_proj", "model.layers.1.self_attn.o_proj"


def changed(kit, trace, step, kind, key, places, bit=0):
    """Flip bits of several elements of one record."""
    for place in places:
        trace = kit.edited(trace, step, kind, key, kit.flipped_bit(place, bit))
    return trace


def flipping_pair(kit, *, cached=True):
    """A root in layer 0's up_proj at position 2; by layer 1's values to the logits and the flip of step 3."""
    one = kit.make_trace()
    other = changed(kit, one, 0, Kind.SHRINK, UP, [(2, 1)], 20)
    for kind, key in (
        (Kind.PROJECTION, UP),
        (Kind.OPERAND, DOWN),
        (Kind.PROJECTION, DOWN),
        (Kind.OPERAND, VALUE),
        (Kind.PROJECTION, VALUE),
    ):
        other = changed(kit, other, 0, kind, key, [(2, 0)])
    if cached:
        other = changed(kit, other, 0, Kind.CACHE, "cache.1", [(1, 2, 0, 0), (1, 2, 1, 2)], 3)
    for kind in (Kind.OPERAND, Kind.PROJECTION):
        other = changed(kit, other, 3, kind, OUT, [(0, 0)])
    other = changed(kit, other, 3, Kind.LOGITS_DIGEST, "logits", [(0, 0)])
    return one, kit.with_step(other, 3, chosen=11)


def names(chart):
    return [(node.name, str(node.kind)) for node in chart.nodes]


def edges(chart):
    return {
        (chart.nodes[edge.source].name, chart.nodes[edge.target].name, edge.cached)
        for edge in chart.edges
    }


def everywhere(kit, *, layers, steps, prompt=3, root_step=0):
    """Everything that is recorded differs from a root in layer 0's o_proj on, as it does in a real pair."""
    one = kit.make_trace(kit.Made(layers=layers, steps=steps, prompt=prompt, rank=2))
    source = dataclasses.replace(one.source, stored=dict(one.source.stored))
    for (step, kind), frame in one.source.stored.items():
        payload = bytearray(frame.payload)
        first = 0
        if step < root_step or kind in (Kind.LOGITS_TOP, Kind.LOGITS_TOP_IDS):
            continue
        if step == root_step:
            starts = {Kind.SHRINK: 3, Kind.PROJECTION: 3, Kind.OPERAND: 4, Kind.CACHE: 1}
            first = starts.get(kind, 0)
        offsets = frame.layout.offsets
        wide = 2 if kind is Kind.CACHE else 4 if kind is Kind.SHRINK else 8
        for number in range(first, len(frame.layout.entries)):
            for at in range(offsets[number] + wide - 2, offsets[number + 1], wide):
                payload[at] ^= 8
        source.stored[step, kind] = dataclasses.replace(frame, payload=bytes(payload))
    other = type(one)(source)
    return one, kit.with_step(other, steps - 1, chosen=11)


def test_the_way_from_the_root_to_the_flip_is_drawn(kit):
    """Each record in its node, the cache as an edge to the later step, the way from end to end."""
    one, other = flipping_pair(kit)
    chart = compare(one, other).propagation_chart
    assert chart.reaches_flip is True
    assert chart.merged == "projection"
    assert [(band.first, band.last) for band in chart.bands] == [(0, 0), (3, 3)]
    assert names(chart) == [
        ("layer 0 mlp.up_proj", "root"),
        ("layer 0 mlp.down_proj", "projections"),
        ("layer 1 self_attn.v_proj", "projections"),
        ("layer 1 value", "keys and values"),
        ("layer 1 self_attn.o_proj", "projections"),
        ("logits", "logits"),
        ("flip", "flip"),
    ]
    assert edges(chart) == {
        ("layer 0 mlp.up_proj", "layer 0 mlp.down_proj", False),
        ("layer 0 mlp.down_proj", "layer 1 self_attn.v_proj", False),
        ("layer 1 self_attn.v_proj", "layer 1 value", False),
        ("layer 1 value", "layer 1 self_attn.o_proj", True),
        ("layer 1 self_attn.o_proj", "logits", False),
        ("logits", "flip", False),
    }
    assert all(edge.on_path for edge in chart.edges)
    assert all(node.on_path for node in chart.nodes)
    assert (chart.left_out, chart.latent, chart.roots, chart.roots_drawn) == (0, 0, 1, 1)


def test_nodes_say_class_size_positions_and_what_they_add(kit):
    """The root adds its row; what has a differing operand inherits; keys and values have their own magnitude."""
    one, other = flipping_pair(kit)
    diff = compare(one, other)
    root, down, _, value, *_ = diff.propagation_chart.nodes
    assert root.coordinate_class is CoordinateClass.SURVIVING
    assert root.magnitude == float(diff.grids["prefill"].magnitudes.max())
    assert (root.positions, root.position_count, root.step) == ((2,), 1, 0)
    assert (root.added_rows, root.inherited_rows) == (1, 0)
    assert down.magnitude is None
    assert value.cache_magnitude == diff.cache_differences[0].largest
    assert value.layer == 1


def test_what_does_not_lead_to_the_flip_is_left_out_and_counted(kit):
    """A root behind which nothing differs, an unrelated record, and latent shrinks."""
    one, other = flipping_pair(kit)
    lonely = "model.layers.0.mlp.gate_proj"
    other = changed(kit, other, 0, Kind.PROJECTION, lonely, [(4, 0)])
    other = changed(kit, other, 0, Kind.SHRINK, VALUE, [(2, 0)])
    chart = compare(one, other).propagation_chart
    assert "layer 0 mlp.gate_proj" not in [node.name for node in chart.nodes]
    assert (chart.left_out, chart.latent) == (1, 1)
    assert chart.records == 10


def test_every_edge_is_one_of_the_whole_graph(kit):
    """Nothing is drawn that the graph of records does not hold, and with all steps looked at nothing is missing."""
    one, other = everywhere(kit, layers=3, steps=5)
    diff = compare(one, other)
    chart, graph = diff.propagation_chart, propagation_graph(one, other, diff)
    flip = (4, "flip", 0)
    kept = nx.ancestors(graph, flip) | {flip}
    root = diff.first_propagating
    kept &= nx.descendants(graph, (0, "shrink", root.site.path)) | {(0, "shrink", root.site.path)}
    latent = {n for n in kept if graph.nodes[n]["coordinate_class"] == "latent"}
    assert not latent
    assert chart.records == sum(node[1] not in ("flip", "cached") for node in kept)
    drawn = nx.DiGraph([(edge.source, edge.target) for edge in chart.edges])
    assert nx.is_directed_acyclic_graph(drawn)
    ends = [n for n, node in enumerate(chart.nodes) if node.kind is NodeKind.FLIP]
    assert nx.ancestors(drawn, ends[0]) | set(ends) == set(range(len(chart.nodes)))
    for edge in chart.edges:
        one_end, other_end = chart.nodes[edge.source], chart.nodes[edge.target]
        assert (one_end.band, one_end.column) < (other_end.band, other_end.column)
        assert one_end.column < other_end.column
        assert edge.cached is (one_end.band < other_end.band)


@pytest.mark.parametrize(
    ("layers", "steps", "merged"),
    [
        (3, 4, "projection"),
        (12, 4, "block"),
        (24, 4, "half layer"),
        (48, 3, "layer"),
        (130, 3, "layers"),
    ],
)
def test_large_graphs_are_merged_within_the_budget(kit, layers, steps, merged):
    """The finest that fits; all of it still leads from root to flip."""
    one, other = everywhere(kit, layers=layers, steps=steps, prompt=1)
    chart = compare(one, other).propagation_chart
    assert chart.merged == merged
    assert len(chart.nodes) <= MOST_NODES
    assert chart.reaches_flip is True
    assert chart.nodes[0].kind is NodeKind.ROOT


def test_many_steps_are_looked_at_in_part_and_said(kit):
    """A long decode costs no more than a short one; steps that are passed over are counted."""
    one, other = everywhere(kit, layers=3, steps=200, prompt=2)
    start = time.perf_counter()
    chart = compare(one, other).propagation_chart
    assert time.perf_counter() - start < 10
    assert chart.steps_between == 200 - 16
    assert [(band.first, band.last) for band in chart.bands] == [(0, 0), (1, 198), (199, 199)]
    assert chart.bands[1].drawn == 14


def test_only_steps_between_the_bands_count_as_passed_over():
    """Steps looked at before the first band, as in the pair that ships, are none of those between."""
    with load_pair(bundled_model().recorded_pair) as pair:
        chart = pair.diff.propagation_chart
    assert [(band.first, band.last) for band in chart.bands] == [(17, 17), (18, 18)]
    assert chart.steps_between == 0


def test_roots_beyond_the_budget_are_counted(kit):
    """Of many roots the first have nodes of their own; the others are rows of the nodes of their places."""
    one = kit.make_trace(kit.Made(layers=8))
    other = one
    for key in kit.Made(layers=8).keys:
        other = changed(kit, other, 0, Kind.SHRINK, key, [(2, 1)], 20)
        other = changed(kit, other, 0, Kind.PROJECTION, key, [(2, 0)])
    chart = compare(one, other).propagation_chart
    assert (chart.roots, chart.roots_drawn) == (56, MOST_ROOTS)
    assert sum(node.kind is NodeKind.ROOT for node in chart.nodes) == MOST_ROOTS
    assert chart.reaches_flip is None


def test_a_root_in_a_later_step_has_its_own_band(kit):
    """Nothing before it is drawn."""
    one, other = everywhere(kit, layers=3, steps=6, root_step=2)
    chart = compare(one, other).propagation_chart
    assert [(band.first, band.last) for band in chart.bands] == [(2, 2), (3, 4), (5, 5)]
    assert chart.nodes[0].name == "layer 0 self_attn.o_proj"


def test_without_a_way_the_flip_is_not_drawn(kit):
    """What the root reaches is shown, and that it does not reach the flip is a value, not a silence."""
    one, other = flipping_pair(kit, cached=False)
    chart = compare(one, other).propagation_chart
    assert chart.reaches_flip is False
    assert not [node for node in chart.nodes if node.kind is NodeKind.FLIP]
    assert not [node for node in chart.nodes if node.on_path]


def test_without_anything_to_follow_there_is_no_chart(kit):
    """Identical, latent and absorbed pairs have none."""
    one = kit.make_trace()
    latent = changed(kit, one, 0, Kind.SHRINK, UP, [(2, 1)], 0)
    absorbed = changed(kit, one, 0, Kind.SHRINK, UP, [(2, 1)], 20)
    for other in (one, latent, absorbed):
        assert compare(one, other).propagation_chart is None


def test_other_reductions_have_no_root(kit):
    """What is followed is a configuration-variant, and is called one."""
    one, other = flipping_pair(kit)
    renamed = kit.make_trace(kit.Made(reduction="unsplit/64"))
    other.source.manifest = renamed.manifest
    chart = compare(one, other).propagation_chart
    assert chart.nodes[0].kind is NodeKind.VARIANT
    assert chart.nodes[0].added_rows == 0


def test_what_entered_elsewhere_is_no_root(kit):
    """A difference that was first seen in an operand."""
    one = kit.make_trace()
    other = changed(kit, one, 0, Kind.OPERAND, OUT, [(4, 0)])
    other = changed(kit, other, 0, Kind.PROJECTION, OUT, [(4, 0)])
    other = changed(kit, other, 0, Kind.LOGITS_DIGEST, "logits", [(0, 0)])
    chart = compare(one, kit.with_step(other, 0, chosen=11)).propagation_chart
    assert chart.nodes[0].kind is NodeKind.ELSEWHERE
    assert chart.reaches_flip is True


def test_the_chart_is_the_same_every_time(kit):
    """Equal pairs give equal charts, whatever the order in which sets are walked."""
    charts = [compare(*everywhere(kit, layers=3, steps=4)).propagation_chart for _ in range(2)]
    assert charts[0] == charts[1]


def test_places_do_not_overlap_and_bands_are_apart():
    """Columns from left to right, bands from top to bottom, fewer nodes centred among more."""
    places = [(0, 0), (0, 1), (0, 1), (0, 1), (1, 1), (1, 1), (1, 2)]
    found, rows = laid_out(places)
    assert len(set(found)) == len(places)
    assert rows == 3 + 1 + 2
    assert found[0] == (0.0, found[2][1])
    assert [x for x, _ in found] == [0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 1.0]
    assert max(y for _, y in found[:4]) < min(y for _, y in found[4:])
    assert found[6][1] == pytest.approx((found[4][1] + found[5][1]) / 2)
