from __future__ import annotations

import time

import pytest
import torch

from fliptrace.analysis import compare, propagation_graph
from fliptrace.errors import InputError
from fliptrace.trace import Frame, Kind, Trace

LAYER = "model.layers.{}"


def changed(kit, trace, step, kind, key, places, bit=20):
    """Flip bits of several elements of one record."""
    for place in places:
        trace = kit.edited(trace, step, kind, key, kit.flipped_bit(place, bit))
    return trace


def a_flip_from_the_prefill(kit):
    """A root in layer 0's up_proj at position 2 that reaches layer 1's cache and, in step 3, the logits."""
    one = kit.make_trace()
    up, down = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
    value, out = "model.layers.1.self_attn.v_proj", "model.layers.1.self_attn.o_proj"
    other = changed(kit, one, 0, Kind.SHRINK, up, [(2, 1)])
    for kind, key in (
        (Kind.PROJECTION, up),
        (Kind.OPERAND, down),
        (Kind.PROJECTION, down),
        (Kind.OPERAND, value),
        (Kind.PROJECTION, value),
    ):
        other = changed(kit, other, 0, kind, key, [(2, 0)], 0)
    other = changed(kit, other, 0, Kind.CACHE, "cache.1", [(1, 2, 0, 0), (1, 2, 1, 2)], 3)
    for kind, key in ((Kind.OPERAND, out), (Kind.PROJECTION, out)):
        other = changed(kit, other, 3, kind, key, [(0, 0)], 0)
    other = changed(kit, other, 3, Kind.LOGITS_DIGEST, "logits", [(0, 0)], 0)
    return one, kit.with_step(other, 3, chosen=11)


def test_the_way_from_root_to_flip_is_found(kit):
    """Through the MLP into the next layer's values, over the steps in the cache, out to the logits."""
    one, other = a_flip_from_the_prefill(kit)
    diff = compare(one, other)
    summary = diff.propagation
    assert summary.reaches_flip is True
    assert summary.path == (
        "layer-0 mlp.up_proj shrink",
        "layer-0 mlp.up_proj projection",
        "layer-0 mlp.down_proj operand",
        "layer-0 mlp.down_proj projection",
        "layer-1 self_attn.v_proj operand",
        "layer-1 self_attn.v_proj projection",
        "layer-1 value",
        "layer-1 cache of earlier steps",
        "layer-1 self_attn.o_proj operand",
        "layer-1 self_attn.o_proj projection",
        "logits of step 3",
        "flip at step 3",
    )
    assert summary.sentences[1] == (
        "layer-0 mlp.up_proj at token position 2 -> layer-1 key/value: 0 key and 2 value elements at position 2 -> "
        "logits of step 3."
    )
    assert summary.sentences[2] == "The cached differences of layer 1 stayed for 3 steps."
    assert not summary.separable
    assert 2 <= len(summary.sentences) <= 5
    assert diff.foreign_root is None


def test_a_broken_chain_is_not_called_a_way(kit):
    """Without the differing attention output nothing recorded connects the cache with the flip."""
    one, other = a_flip_from_the_prefill(kit)
    for kind in (Kind.OPERAND, Kind.PROJECTION):
        other.source.stored[3, kind] = one.source.stored[3, kind]
    summary = compare(one, other).propagation
    assert summary.reaches_flip is False
    assert summary.path == ()
    assert any("No chain" in sentence for sentence in summary.sentences)


def test_a_later_root_that_reaches_the_flip_is_named(kit):
    """When the first propagating root dies out, the way starts at the first root that leads to the flip."""
    one, other = a_flip_from_the_prefill(kit)
    early = "model.layers.0.self_attn.q_proj"
    other = changed(kit, other, 0, Kind.SHRINK, early, [(4, 0)])
    other = changed(kit, other, 0, Kind.PROJECTION, early, [(4, 0)], 0)
    diff = compare(one, other)
    assert diff.first_propagating.site.path == early
    summary = diff.propagation
    assert summary.reaches_flip is False
    assert summary.path[0] == "layer-0 mlp.up_proj shrink"
    assert any(
        "layer-0 mlp.up_proj at token position 2 in the prefill" in s for s in summary.sentences
    )


def test_the_chain_counts_only_rows_that_the_root_can_reach(kit):
    """Cache rows at earlier positions are not laid at the root's door."""
    one, other = a_flip_from_the_prefill(kit)
    key = "model.layers.1.self_attn.k_proj"
    other = changed(kit, other, 0, Kind.SHRINK, key, [(1, 1)])
    other = changed(kit, other, 0, Kind.PROJECTION, key, [(1, 0)], 0)
    other = changed(kit, other, 0, Kind.CACHE, "cache.1", [(0, 1, 0, 0)], 3)
    diff = compare(one, other)
    assert diff.cache_differences[0].positions == (1, 2)
    assert "0 key and 2 value elements at position 2 ->" in diff.propagation.sentences[1]


def test_a_way_through_intermediate_steps_is_found(kit):
    """When the flip's step reads only what a later step cached, the way goes through that step."""
    one, other = a_flip_from_the_prefill(kit)
    # Step 2 reads layer 1's cache and writes its own value; step 3 differs in layer 1 from there.
    out = "model.layers.1.self_attn.o_proj"
    other = changed(kit, other, 2, Kind.OPERAND, out, [(0, 0)], 0)
    other = changed(kit, other, 2, Kind.PROJECTION, out, [(0, 0)], 0)
    graph = propagation_graph(one, other, compare(one, other))
    assert graph.has_edge((2, "cached", 1), (2, "operand", out))
    assert graph.has_edge((2, "cached", 1), (3, "cached", 1))


def test_an_absorbed_root_goes_nowhere(kit):
    """No chain is told of a difference that was swallowed."""
    one = kit.make_trace()
    other = changed(kit, one, 0, Kind.SHRINK, "model.layers.0.mlp.up_proj", [(2, 1)])
    summary = compare(one, other).propagation
    assert len(summary.sentences) == 1
    assert "swallowed" in summary.sentences[0]
    assert summary.reaches_flip is None
    assert summary.nodes == 1


def test_latent_differences_are_said_to_end(kit):
    """A latent difference has no way."""
    one = kit.make_trace()
    other = changed(kit, one, 0, Kind.SHRINK, "model.layers.0.mlp.up_proj", [(2, 1)], 0)
    summary = compare(one, other).propagation
    assert "rounded away" in summary.sentences[0]
    assert summary.path == ()


def test_what_entered_elsewhere_is_followed_when_it_came_first(kit):
    """A foreign root before any propagating shrink root is the start of the way."""
    one = kit.make_trace()
    out = "model.layers.1.self_attn.o_proj"
    other = changed(kit, one, 0, Kind.OPERAND, out, [(4, 0)], 0)
    other = changed(kit, other, 0, Kind.PROJECTION, out, [(4, 0)], 0)
    other = changed(kit, other, 0, Kind.LOGITS_DIGEST, "logits", [(0, 0)], 0)
    summary = compare(one, kit.with_step(other, 0, chosen=11)).propagation
    assert summary.reaches_flip is True
    assert summary.path[0] == "layer-1 self_attn.o_proj operand"
    assert summary.sentences[1].startswith(f"{out} at token position 4 -> ")


def test_rows_that_do_not_meet_are_not_connected(kit):
    """Outside attention a position feeds itself only; attention feeds later positions, never earlier ones."""
    one = kit.make_trace()
    up, down = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
    query, out = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"
    other = changed(kit, one, 0, Kind.PROJECTION, up, [(2, 0)], 0)
    other = changed(kit, other, 0, Kind.OPERAND, down, [(3, 0)], 0)
    other = changed(kit, other, 0, Kind.PROJECTION, query, [(3, 0)], 0)
    for row, connected in ((2, False), (4, True)):
        third = changed(kit, other, 0, Kind.OPERAND, out, [(row, 0)], 0)
        graph = propagation_graph(one, third, compare(one, third))
        assert not graph.has_edge((0, "projection", up), (0, "operand", down))
        assert graph.has_edge((0, "projection", query), (0, "operand", out)) is connected


def test_graph_nodes_say_what_they_are(kit):
    """Class, magnitude and positions of every differing record."""
    one, other = a_flip_from_the_prefill(kit)
    diff = compare(one, other)
    graph = propagation_graph(one, other, diff)
    node = graph.nodes[0, "shrink", "model.layers.0.mlp.up_proj"]
    assert node["coordinate_class"] == "surviving"
    assert node["magnitude"] == float(diff.grids["prefill"].magnitudes.max())
    assert node["positions"] == (2,)
    assert graph.nodes[0, "value", 1]["layer"] == 1
    records = [node for node in graph if node[1] not in ("cached", "flip")]
    assert len(records) == diff.propagation.nodes
    import networkx as nx

    assert nx.is_directed_acyclic_graph(graph)


def test_a_graph_of_another_comparison_is_refused(kit):
    """The comparison must be that of the traces."""
    one, other = a_flip_from_the_prefill(kit)
    diff = compare(one, other)
    short = kit.make_trace(kit.Made(steps=2))
    with pytest.raises(InputError, match="steps"):
        propagation_graph(short, short, diff)


def test_unknown_module_names_follow_execution_order(kit):
    """Sites of unknown roles are linked one after another."""

    def renamed(trace):
        for place, frame in list(trace.source.stored.items()):
            if place[1] in (Kind.SHRINK, Kind.OPERAND, Kind.PROJECTION):
                tensors = {
                    f"model.layers.{number // 7}.mixer.part{number % 7}": frame.tensor(number)
                    for number in range(len(frame.layout.entries))
                }
                trace.source.stored[place] = kit.frame_of(*place, tensors)
        return trace

    one, other = renamed(kit.make_trace()), renamed(kit.make_trace())
    first, second = "model.layers.0.mixer.part0", "model.layers.0.mixer.part1"
    other = changed(kit, other, 0, Kind.PROJECTION, first, [(1, 0)], 0)
    other = changed(kit, other, 0, Kind.OPERAND, second, [(1, 0)], 0)
    graph = propagation_graph(one, other, compare(one, other))
    assert graph.has_edge((0, "projection", first), (0, "operand", second))


def test_a_large_pair_is_compared_quickly(kit):
    """30 layers, 128 steps, 60 % of all coordinates latent: well below the generous bound, on one thread."""
    one = kit.make_trace(kit.Made(layers=30, prompt=100, steps=128, rank=16))
    source = kit.MemorySource(one.manifest, one.closing, one.steps, dict(one.source.stored))
    generator = torch.Generator().manual_seed(1)
    for (step, kind), frame in one.source.stored.items():
        if kind is Kind.SHRINK:
            bits = torch.frombuffer(bytearray(frame.payload), dtype=torch.int32)
            bits[torch.rand(bits.shape, generator=generator) < 0.6] ^= 1
            payload = bytes(bits.view(torch.uint8).numpy())
            source.stored[step, kind] = Frame(step, kind, frame.layout, payload)
    start = time.perf_counter()
    diff = compare(one, Trace(source))
    assert time.perf_counter() - start < 10
    share = diff.statistics.equal_operand_differing / diff.statistics.equal_operand_elements
    assert share == pytest.approx(0.6, abs=0.01)


def test_a_row_that_the_root_cannot_have_reached_is_not_laid_at_its_door(kit):
    """Records that feed one another differ in other rows: the way breaks, and the root of those rows is named."""
    one = kit.make_trace()
    up, down = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
    value = "model.layers.1.self_attn.v_proj"
    # Two roots in one record; only row 3 goes on, row 1 ends in the projection.
    other = changed(kit, one, 0, Kind.SHRINK, up, [(1, 1), (3, 1)])
    other = changed(kit, other, 0, Kind.PROJECTION, up, [(1, 0), (3, 0)], 0)
    for kind, key in (
        (Kind.OPERAND, down),
        (Kind.PROJECTION, down),
        (Kind.OPERAND, value),
        (Kind.PROJECTION, value),
    ):
        other = changed(kit, other, 0, kind, key, [(3, 0)], 0)
    other = changed(kit, other, 0, Kind.CACHE, "cache.1", [(1, 3, 0, 0)], 3)
    diff = compare(one, other)
    assert diff.first_propagating.position == 1
    _, chain, others, *_ = diff.propagation.sentences
    assert chain == (
        "layer-0 mlp.up_proj at token position 1 -> no recorded key or value of this step."
    )
    assert others == (
        "No recorded way leads from there to 0 key and 1 value elements that differ in the prefill as well, from "
        "layer 1 on (at position 3 of it): the first root from which one leads to keys or values is layer-0 "
        "mlp.up_proj at token position 3."
    )
