"""Merges the records of a pruned propagation graph into the few nodes of a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from fliptrace.analysis.differing_records import Node
from fliptrace.analysis.evidence import INHERITED, ROOT, StepEvidence
from fliptrace.analysis.propagation_places import GRAINS, LAST_LAYER, Column, laid_out
from fliptrace.chart import Band, ChartEdge, ChartNode, NodeKind, PropagationChart
from fliptrace.numerics import CoordinateClass
from fliptrace.verdicts import ForeignRoot, Origin, RowDifference

#: Most nodes of the picture, roots included.
MOST_NODES = 240
_POSITIONS = 16

#: What is drawn as one node: band, column, name.
Group = tuple[int, Column, str]
#: What entered somewhere.
Start = RowDifference | ForeignRoot


@dataclass
class _Members:
    """What one node of the picture stands for."""

    records: list[Node] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)


class Merge:
    """Merges the records of a pruned graph into the nodes of a picture."""

    def __init__(
        self,
        graph: Any,
        bands: Sequence[Band],
        starts: dict[Node, list[Start]],
        evidence: Sequence[StepEvidence],
    ) -> None:
        self._graph = graph
        self._bands = bands
        self._grain = GRAINS[0]
        self._starts = starts
        self._steps = {step.step: step for step in evidence}
        self._orders = {
            step.keys: {key: at for at, key in enumerate(step.keys)} for step in evidence
        }
        self.members: dict[Group, _Members] = {}
        self._edges: dict[tuple[Group, Group], bool] = {}  # -> through the cache
        self._path: set[tuple[Group, Group]] = set()

    def choose_grain(self) -> None:
        """Take the finest grain that stays within the budget of nodes."""
        nodes = [node for node in self._graph if node[1] != "cached"]
        for self._grain in GRAINS:
            if len({self._group(node) for node in nodes}) + len(self._starts) <= MOST_NODES:
                return

    def merge(self, path: Sequence[Node]) -> None:
        """Merge nodes, edges and the path."""
        groups = {node: self._group(node) for node in self._graph if node[1] != "cached"}
        for node, group in groups.items():
            self.members.setdefault(group, _Members()).records.append(node)
        for source, target in self._graph.edges:
            if source in groups and target in groups:
                self._link(groups[source], groups[target], cached=False)
        self._link_through_cache(groups)
        way = [groups[node] for node in path if node in groups]
        for node, starts in self._starts.items():
            root = self._add_start(node, starts, groups[node])
            way = [root, *way] if path and node == path[0] else way
        self._path = {(one, other) for one, other in pairwise(way) if one != other}

    def _group(self, node: Node) -> Group:
        band = next(
            number for number, one in enumerate(self._bands) if one.first <= node[0] <= one.last
        )
        order = 0
        if isinstance(node[2], str) and node[1] not in ("logits", "flip"):
            order = self._order(node)
        column, name = self._grain.place(node, order)
        return band, column, name

    def _order(self, node: Node) -> int:
        """Return a site record's place among the shrinks of its step."""
        return self._orders[self._steps[node[0]].keys][str(node[2])]

    def _link(self, source: Group, target: Group, *, cached: bool) -> None:
        if source != target:
            self._edges[source, target] = self._edges.get((source, target), True) and cached

    def _link_through_cache(self, groups: dict[Node, Group]) -> None:
        """Lead from what wrote a cache straight to what read it in a later band."""
        held: dict[Node, dict[Group, None]] = {}
        cached = sorted(
            (node for node in self._graph if node[1] == "cached"),
            key=lambda node: (node[0], str(node[2])),
        )
        for node in cached:
            writers: dict[Group, None] = {}
            for source in self._graph.predecessors(node):
                writers |= held[source] if source in held else {groups[source]: None}
            held[node] = writers
            for target in self._graph.successors(node):
                if target in groups:
                    for writer in writers:
                        self._link(writer, groups[target], cached=True)

    def _add_start(self, node: Node, starts: list[Start], place: Group) -> Group:
        """Put what entered at a record before the record's node; the node itself where it holds nothing else."""
        members = self.members[place]
        own = all(one[0] == node[0] and one[2] == node[2] for one in members.records)
        entered = any(target == place for _, target in self._edges)
        if own and not entered and not members.starts:
            members.starts = starts
            return place
        layer, stage, _ = place[1]
        root: Group = (place[0], (layer, stage - 1, LAST_LAYER), f"{node}")
        self.members[root] = _Members([], starts)
        self._edges[root, place] = False
        return root

    def chart(self, **counts: Any) -> PropagationChart:
        """Lay out and return the picture."""
        order = sorted(self.members, key=lambda group: (group[0], group[1], group[2]))
        columns = {column: at for at, column in enumerate(sorted({group[1] for group in order}))}
        numbers = {group: number for number, group in enumerate(order)}
        places, rows = laid_out([(group[0], columns[group[1]]) for group in order])
        on_path = {group for pair in self._path for group in pair}
        nodes = tuple(
            self._node(group, columns[group[1]], place, group in on_path)
            for group, place in zip(order, places, strict=True)
        )
        edges = tuple(
            ChartEdge(numbers[one], numbers[other], cached, (one, other) in self._path)
            for (one, other), cached in sorted(
                self._edges.items(), key=lambda item: (numbers[item[0][0]], numbers[item[0][1]])
            )
        )
        records = sum(
            node[1] != "flip" for members in self.members.values() for node in members.records
        )
        return PropagationChart(
            bands=tuple(self._bands),
            nodes=nodes,
            edges=edges,
            columns=len(columns),
            rows=rows,
            merged=self._grain.name,
            records=records,
            **counts,
        )

    def _node(
        self, group: Group, column: int, place: tuple[float, float], on_path: bool
    ) -> ChartNode:
        members = self.members[group]
        attributes = [self._graph.nodes[node] for node in members.records]
        positions = self._positions(members)
        largest = {
            kind: max(
                (
                    one["magnitude"]
                    for one in attributes
                    if one["magnitude"] is not None and (one["record"] == "shrink") is shrink
                ),
                default=None,
            )
            for kind, shrink in (("shrink", True), ("cache", False))
        }
        rows = [row for row in members.starts if isinstance(row, RowDifference)]
        if rows and not members.records:
            largest["shrink"] = max((_largest(row) for row in rows), default=None)
            added, inherited = sum(row.origin is Origin.ROOT for row in rows), 0
            unlocated = len(rows) - added
        else:
            added, inherited, unlocated = self._origins(members.records)
        first = members.starts[0] if members.starts else None
        return ChartNode(
            name=group[2] if first is None else _start_name(first),
            kind=_kind(members),
            band=group[0],
            column=column,
            x=place[0],
            y=place[1],
            records=len(members.records) or len(members.starts),
            coordinate_class=_worst(attributes, members),
            magnitude=largest["shrink"],
            cache_magnitude=largest["cache"],
            positions=tuple(positions[:_POSITIONS]),
            position_count=len(positions),
            added_rows=added,
            inherited_rows=inherited,
            unlocated_rows=unlocated,
            on_path=on_path,
            step=first.step if first is not None else None,
            layer=group[1][0] if group[1][0] < LAST_LAYER else None,
        )

    def _positions(self, members: _Members) -> list[int]:
        """Return the token positions of the rows that differ after rounding, of a root its own."""
        if members.starts:
            return sorted({one.position for one in members.starts if one.position >= 0})
        found: set[int] = set()
        for node in members.records:
            if node[1] != "shrink":
                found.update(self._graph.nodes[node]["positions"])
                continue
            step, number = self._steps[node[0]], self._order(node)
            rows = (step.classes[number] >= int(CoordinateClass.SURVIVING)).nonzero().squeeze(1)
            found.update(step.first_position + row for row in rows.tolist())
        return sorted(found)

    def _origins(self, records: Iterable[Node]) -> tuple[int, int, int]:
        """Count surviving shrink rows by origin: added here, inherited, neither known."""
        counts = [0, 0, 0]
        for node in records:
            if node[1] != "shrink":
                continue
            evidence, number = self._steps[node[0]], self._order(node)
            survives = evidence.classes[number] >= int(CoordinateClass.SURVIVING)
            origins = evidence.origins[number][survives].tolist()
            added, inherited = origins.count(ROOT), origins.count(INHERITED)
            for at, count in enumerate((added, inherited, len(origins) - added - inherited)):
                counts[at] += count
        return counts[0], counts[1], counts[2]


def _start_name(start: Start) -> str:
    return start.site.name if isinstance(start, RowDifference) else f"{start.kind} {start.key}"


def _largest(row: RowDifference) -> float:
    return max((abs(one.reference - one.candidate) for one in row.coordinates), default=0.0)


def _kind(members: _Members) -> NodeKind:
    if members.starts:
        origins = {one.origin for one in members.starts if isinstance(one, RowDifference)}
        if Origin.ROOT in origins:
            return NodeKind.ROOT
        variant = Origin.CONFIGURATION_VARIANT in origins
        return NodeKind.VARIANT if variant else NodeKind.ELSEWHERE
    kinds = {node[1] for node in members.records}
    for kind, name in ((NodeKind.FLIP, "flip"), (NodeKind.LOGITS, "logits")):
        if name in kinds:
            return kind
    cached = kinds & {"key", "value", "state"}
    if cached and kinds - cached:
        return NodeKind.MIXED
    return NodeKind.CACHE if cached else NodeKind.SHRINKS


def _worst(attributes: Sequence[dict[str, Any]], members: _Members) -> CoordinateClass | None:
    labels = {one.label: one for one in CoordinateClass}
    found = [labels[one["coordinate_class"]] for one in attributes if one["coordinate_class"]]
    found += [one.row_class for one in members.starts if isinstance(one, RowDifference)]
    if members.starts and not found:
        return CoordinateClass.SURVIVING
    return max(found, key=int, default=None)
