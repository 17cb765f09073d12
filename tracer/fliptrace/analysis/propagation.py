"""Follows differences through the network: a directed graph of differing records, and sentences for people.

A node is a record of one step that differs in some row: (step, layer, record). Edges are data flow, taken from what the
sites' names say they do (fliptrace.analysis.roles); sites with other names follow one another in execution order. Cache
rows stay readable in every later step; instead of an edge to each, which would be quadratic in the steps, a node
``cached`` stands for what a layer's cache holds of earlier steps' differences when a step begins.

This is the only module that imports networkx, and only when a graph is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fliptrace.analysis.coordinates import site_of
from fliptrace.analysis.differing_records import (
    ONE_ROW,
    SURVIVING,
    DifferingRecord,
    Node,
    differing_cache_records,
    differing_records,
)
from fliptrace.analysis.evidence import StepEvidence
from fliptrace.analysis.reach import Flow, Reach, rows_leading_to
from fliptrace.analysis.roles import Role, role_of
from fliptrace.analysis.state_rows import makers_of
from fliptrace.errors import InputError
from fliptrace.numerics import CoordinateClass
from fliptrace.sites import Site
from fliptrace.trace import Trace
from fliptrace.verdicts import (
    Fate,
    Flip,
    ForeignRoot,
    PairDiff,
    RowDifference,
)

#: Records on a way from a root to the flip, with their names; None where there is no way.
Path = tuple[tuple[Node, str], ...] | None
ATTENTION_INPUTS = frozenset({Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_IN})


def propagation_graph(reference: Trace, candidate: Trace, diff: PairDiff) -> Any:
    """Build the graph of every differing record of two traces.

    Args:
        reference: a trace.
        candidate: the other.
        diff: what compare found between them.

    Returns:
        A networkx.DiGraph. Nodes are (step, record, site key or layer) with the attributes ``name``, ``step``,
        ``layer``, ``record`` (operand, shrink, projection, key, value, state, cached, logits or flip),
        ``coordinate_class`` (its label), ``magnitude`` (largest |difference|, None for digests), ``positions``
        (absolute positions) and ``rows`` (which rows of the step differ, bool [T]); edges have a ``flow``: see
        fliptrace.analysis.reach.

    Raises:
        TraceMismatchError: the traces cannot be compared.
        InputError: the comparison is not one of these traces.
    """
    from fliptrace.analysis.align import check_identity, compared_span
    from fliptrace.analysis.diff import PairWalk

    check_identity(reference, candidate, across_engines=True)  # the comparison was asked for
    span = compared_span(reference, candidate)
    if span.steps != diff.coverage.steps_compared:
        raise InputError(
            f"the comparison covers {diff.coverage.steps_compared} steps, but {reference.name} and {candidate.name} "
            f"have {span.steps} in common; pass what compare returned for these two traces"
        )
    walk = PairWalk(reference, candidate, diff.rounded_dtype)
    for number in range(span.steps):
        walk.take(number, number == span.flip)
    return build_graph(walk.evidence, diff.flip)


def build_graph(
    evidence: Sequence[StepEvidence], flip: Flip | None, steps: Iterable[int] | None = None
) -> Any:
    """Build the graph of differing records.

    Args:
        evidence: every compared step.
        flip: the flip, a node of its own, None without one.
        steps: keep only the records of these steps and, between them, the cache; all when left out.
    """
    import networkx as nx

    graph = nx.DiGraph()
    wanted = None if steps is None else set(steps)
    cached: dict[int, DifferingRecord] = {}
    for step in evidence:
        records = differing_records(step) if wanted is None or step.step in wanted else {}
        flow = _StepFlow(graph, step, records, cached)
        if wanted is None or step.step in wanted:
            flow.connect()
        cached = flow.cached_after(records or differing_cache_records(step))
    if flip is not None:
        node: Node = (flip.step, "flip", 0)
        graph.add_node(
            node,
            name=f"flip at step {flip.step}",
            step=flip.step,
            layer=None,
            record="flip",
            coordinate_class="",
            magnitude=None,
            positions=(),
            rows=ONE_ROW,
        )
        logits: Node = (flip.step, "logits", 0)
        if logits in graph:
            graph.add_edge(logits, node, flow=Flow(graph.nodes[logits]["rows"], mixes=False))
    return graph


class _StepFlow:
    """Connects the differing records of one step."""

    def __init__(
        self,
        graph: Any,
        step: StepEvidence,
        records: dict[Node, DifferingRecord],
        cached: dict[int, DifferingRecord],
    ) -> None:
        self._graph = graph
        self._step = step
        self._records = records
        self._cached = cached
        # The last writers of the residual stream that differ, each with the rows that it wrote last.
        self._stream: list[tuple[DifferingRecord, Tensor]] = []
        self._places = {key: number for number, key in enumerate(step.keys)}
        self._operand_known = step.operand.known.any(dim=1).tolist()
        self._projection_known = step.projection.known.any(dim=1).tolist()
        for record in records.values():
            graph.add_node(record.node, **record.attributes, rows=record.rows)

    def connect(self) -> None:
        """Add the edges, layer by layer."""
        sites = [site_of(key) for key in self._step.keys]
        layers = [site.layer for site in sites]
        cache_layers = self._step.cache.layers if self._step.cache is not None else ()
        order = list(dict.fromkeys(layers))
        states = self._step.states.differing_layers if self._step.states is not None else ()
        kept = sorted({*cache_layers, *states, *self._cached})
        order += [layer for layer in kept if layer not in order]
        for layer in sorted(order, key=lambda one: (one is None, one if one is not None else 0)):
            self._connect_layer(layer, [site for site in sites if site.layer == layer])
        logits = self._records.get((self._step.step, "logits", 0))
        if logits is not None:
            self._link_stream(logits)

    def _connect_layer(self, layer: int | None, sites: list[Site]) -> None:
        roles = {site: role_of(site) for site in sites}
        inputs = [site for site in sites if roles[site] in ATTENTION_INPUTS]
        outputs = [site for site in sites if roles[site] is Role.ATTENTION_OUT]
        attention = [self._connect_site(site, None) for site in inputs]
        if layer is not None:
            sources = self._connect_cache(layer, inputs)
            self._connect_state(layer, inputs, attention)
            sources += [
                record
                for site, record in zip(inputs, attention, strict=True)
                if record is not None and roles[site] in (Role.QUERY, Role.ATTENTION_IN)
            ]
            self._close_block(outputs, sources, mixes=True)
        expanded = [
            record
            for site in sites
            if roles[site] is Role.MLP_IN and (record := self._connect_site(site, None)) is not None
        ]
        self._close_block(
            [site for site in sites if roles[site] is Role.MLP_OUT], expanded, mixes=False
        )
        for site in sites:
            if roles[site] is Role.OTHER:
                record = self._connect_site(site, None)
                self._write([] if record is None else [record], inherited=True)

    def _connect_cache(self, layer: int, inputs: list[Site]) -> list[DifferingRecord]:
        """Connect what a layer caches; return what its attention reads from the cache."""
        step = self._step.step
        found: list[DifferingRecord] = []
        for name, own in (("key", Role.KEY), ("value", Role.VALUE)):
            record = self._records.get((step, name, layer))
            if record is None:
                continue
            makers = [site for site in inputs if role_of(site) in (own, Role.ATTENTION_IN)]
            sources = [self._records.get((step, "projection", site.path)) for site in makers]
            if not makers:
                sources = [self._records.get((step, "operand", site.path)) for site in inputs]
            known = [source for source in sources if source is not None]
            if not known and not inputs:
                self._link_stream(record)
            self._link(known, record, mixes=False)
            found.append(record)
        if layer in self._cached:
            found.append(self._cached[layer])
        return found

    def _connect_state(
        self, layer: int, inputs: list[Site], made: list[DifferingRecord | None]
    ) -> None:
        """Lead to a layer's state what it is made from, of the inputs' last records: its projection; and itself."""
        state = self._records.get((self._step.step, "state", layer))
        if state is None:
            return
        makers = set(makers_of(inputs, layer))
        found = [one for number, one in enumerate(made) if number in makers and one is not None]
        if not makers:
            self._link_stream(state)
        self._link(found, state, mixes=False)
        if layer in self._cached:
            self._link([self._cached[layer]], state, mixes=False)

    def _close_block(
        self, outputs: list[Site], sources: list[DifferingRecord], *, mixes: bool
    ) -> None:
        """Lead what a block made to its output projection and that into the residual stream."""
        if not outputs:
            self._write(sources, inherited=True)
            return
        for site in outputs:
            record = self._connect_site(site, sources, mixes=mixes)
            if record is not None:
                operand = self._records.get((self._step.step, "operand", site.path))
                self._write([record], inherited=operand is not None)

    def _write(self, records: list[DifferingRecord], *, inherited: bool) -> None:
        """Note new writers of the stream; rows that inherit the stream's difference stand for it from then on."""
        if not records:
            return
        if inherited:
            taken = torch.stack([record.rows for record in records]).any(dim=0)
            self._stream = [
                (record, rows & ~taken)
                for record, rows in self._stream
                if bool((rows & ~taken).any())
            ]
        self._stream += [(record, record.rows) for record in records]

    def _connect_site(
        self, site: Site, sources: list[DifferingRecord] | None, *, mixes: bool = False
    ) -> DifferingRecord | None:
        """Lead into a site and through it; return the last of its records that differs and leaves it.

        Args:
            site: the site.
            sources: what it reads; None for the residual stream.
            mixes: it reads through attention.
        """
        step = self._step.step
        operand, shrink, projection = (
            self._records.get((step, name, site.path))
            for name in ("operand", "shrink", "projection")
        )
        number = self._places[site.path]
        recorded = self._operand_known[number]
        entries = [operand] if operand else [] if recorded else [shrink, projection]
        for entry in entries:
            if entry is None:
                continue
            if sources is None:
                self._link_stream(entry)
            else:
                self._link(sources, entry, mixes=mixes)
        if operand is not None:
            for target in (shrink, projection):
                if target is not None:
                    self._link([operand], target, mixes=False)
        if shrink is not None and projection is not None:
            self._link([shrink], projection, mixes=False)
        if projection is not None:
            return projection
        return None if self._projection_known[number] else shrink or operand

    def _link(
        self, sources: Iterable[DifferingRecord], target: DifferingRecord, *, mixes: bool
    ) -> None:
        for source in sources:
            self._lead(source, source.rows, target, mixes=mixes)

    def _link_stream(self, target: DifferingRecord) -> None:
        for source, rows in self._stream:
            self._lead(source, rows, target, mixes=False)

    def _lead(
        self, source: DifferingRecord, rows: Tensor, target: DifferingRecord, *, mixes: bool
    ) -> None:
        flow = Flow(rows, mixes)
        if bool(flow.backward(target.rows).any()):
            self._graph.add_edge(source.node, target.node, flow=flow)

    def cached_after(self, records: dict[Node, DifferingRecord]) -> dict[int, DifferingRecord]:
        """Return, and add to the graph, what the caches hold when the next step begins."""
        following = self._step.step + 1
        written: dict[int, list[DifferingRecord]] = {}
        for node, record in records.items():
            if node[1] in ("key", "value", "state") and isinstance(node[2], int):
                written.setdefault(node[2], []).append(record)
            elif self._step.cache is None and node[1] == "projection":
                site = site_of(str(node[2]))
                if site.layer is not None and role_of(site) in ATTENTION_INPUTS - {Role.QUERY}:
                    written.setdefault(site.layer, []).append(record)
        after: dict[int, DifferingRecord] = {}
        for layer in {*written, *self._cached}:
            node = (following, "cached", layer)
            attributes = {
                "name": f"layer-{layer} cache of earlier steps",
                "step": following,
                "layer": layer,
                "record": "cached",
                "coordinate_class": SURVIVING,
                "magnitude": None,
                "positions": (),
            }
            after[layer] = DifferingRecord(node, ONE_ROW, attributes)
            self._graph.add_node(node, **attributes, rows=ONE_ROW)
            sources = [
                *written.get(layer, ()),
                *([self._cached[layer]] if layer in self._cached else []),
            ]
            self._graph.add_edges_from(
                (source.node, node, {"flow": Flow(source.rows, mixes=False)})
                for source in sources
                if source.node in self._graph
            )
        return after


def leaves_projection(start: RowDifference) -> bool:
    """Say whether a row's difference is known, or may be held, to leave its projection."""
    return start.row_class is not CoordinateClass.LATENT and start.fate is not Fate.ABSORBED


def first_record(
    evidence: Sequence[StepEvidence], start: RowDifference | ForeignRoot
) -> Node | None:
    """Return the first record that shows a difference; None when no differing record does."""
    if isinstance(start, RowDifference):
        return (start.step, "shrink", start.site.path)
    if start.kind in ("operand", "projection"):
        return (start.step, start.kind, start.key)
    step = next(one for one in evidence if one.step == start.step)
    after = [
        record
        for record in differing_records(step).values()
        if record.node[1] == "logits"
        or (record.node[1] in ("key", "value") and start.kind == "cache")
        or (record.node[1] == "state" and start.kind == "state")
        or (
            record.node[1] in ("operand", "projection")
            and step.keys.index(str(record.node[2])) >= start.before_order
        )
    ]
    order = {"state": 0, "key": 0, "value": 0, "operand": 1, "projection": 1, "logits": 2}
    after.sort(key=lambda one: order[one.node[1]])
    return after[0].node if after else None


def rows_of_start(evidence: Sequence[StepEvidence], start: RowDifference | ForeignRoot) -> Tensor:
    """Return the row at which a difference entered, bool [T]; every row where it is not known."""
    step = next(one for one in evidence if one.step == start.step)
    rows = torch.full((step.rows,), start.position < 0)
    if start.position >= 0:
        rows[start.position - step.first_position] = True
    return rows


def path_to_flip(
    evidence: Sequence[StepEvidence], start: RowDifference | ForeignRoot, flip: Flip
) -> Path:
    """Find a shortest path from the row at which a difference entered to the flip; None without one.

    The steps of source and flip with the cache between them nearly always hold one. Only when they do not, although the
    source did reach the cache, are all steps searched.
    """
    source = first_record(evidence, start)
    if source is None:
        return None
    for steps in ((source[0], flip.step), None):
        graph = build_graph(evidence, flip, steps)
        if source not in graph:
            return None
        reach = Reach(graph, {source: rows_of_start(evidence, start)})
        nodes = reach.way_to((flip.step, "flip", 0))
        if nodes:
            return tuple((node, graph.nodes[node]["name"]) for node in nodes)
        if not any(node[1] == "cached" for node in reach.nodes):
            return None
    return None


def first_that_reaches(
    evidence: Sequence[StepEvidence], roots: Sequence[RowDifference], flip: Flip
) -> tuple[RowDifference | None, Path]:
    """Return the first root from which differing rows lead to the flip, with a shortest path; None twice without."""
    graph = build_graph(evidence, flip)
    target: Node = (flip.step, "flip", 0)
    leading = rows_leading_to(graph, target)
    for root in roots:
        source = first_record(evidence, root)
        if source is None or source not in leading or not leaves_projection(root):
            continue
        rows = rows_of_start(evidence, root)
        if bool((leading[source] & rows).any()):
            nodes = Reach(graph, {source: rows}).way_to(target)
            return root, tuple((node, graph.nodes[node]["name"]) for node in nodes)
    return None, None


def rows_reached(
    graph: Any, evidence: Sequence[StepEvidence], start: RowDifference | ForeignRoot
) -> dict[Node, Tensor]:
    """Return the differing rows of the start's own step that its difference can have got to, by record.

    Args:
        graph: of that step.
        evidence: every compared step.
        start: the difference.
    """
    source = first_record(evidence, start)
    if source is None or source not in graph:
        return {}
    reach = Reach(graph, {source: rows_of_start(evidence, start)})
    return {node: reach.rows(node) for node in reach.nodes if node[0] == start.step}


def first_that_spreads(
    graph: Any,
    evidence: Sequence[StepEvidence],
    start: RowDifference | ForeignRoot,
    roots: Sequence[RowDifference],
) -> RowDifference | None:
    """Return the first other root of the start's step from which rows lead to keys or values of that step."""
    for root in roots:
        if root.step != start.step or root == start or not leaves_projection(root):
            continue
        if any(node[1] in ("key", "value") for node in rows_reached(graph, evidence, root)):
            return root
    return None
