"""Which rows of which differing records a difference can have got to, row by row along the edges of the graph.

Two records may differ in many rows for many reasons. That one feeds the other says nothing of a row's way unless the
same row, or with attention an earlier one, was reached before; so what is followed is rows, not records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fliptrace.analysis.differing_records import Node

_FAR = torch.iinfo(torch.int32).max // 2


@dataclass(frozen=True, slots=True)
class Flow:
    """How rows go along an edge.

    Attributes:
        rows: source rows that go on, bool [T].
        mixes: attention: a row goes on to itself and to every later row; else only to itself.
    """

    rows: Tensor  # bool [T]
    mixes: bool

    def forward(self, distances: Tensor, rows: int) -> Tensor:
        """Return the distance of each target row, by the source's distances, int32 [T]."""
        open_rows = torch.where(self.rows, distances, _FAR)
        if open_rows.numel() == 1 or open_rows.numel() != rows:
            return open_rows.min().expand(rows)
        return open_rows.cummin(0).values if self.mixes else open_rows

    def backward(self, useful: Tensor) -> Tensor:
        """Return which source rows lead to a useful target row, bool [T]."""
        if self.rows.numel() == 1 or self.rows.numel() != useful.numel():
            return self.rows & useful.any()
        if self.mixes:
            useful = useful.flip(0).cummax(0).values.flip(0)
        return self.rows & useful

    def source_row(self, distances: Tensor, row: int, rows: int) -> int:
        """Return the nearest source row that goes on to a target row."""
        open_rows = torch.where(self.rows, distances, _FAR)
        if open_rows.numel() == 1 or open_rows.numel() != rows:
            return int(open_rows.argmin())
        return int(open_rows[: row + 1].argmin()) if self.mixes else row


class Reach:
    """What can be reached from some rows of some records."""

    def __init__(self, graph: Any, starts: Mapping[Node, Tensor]) -> None:
        """Follow the edges.

        Args:
            graph: of build_graph: nodes have ``rows``, edges have a ``flow``.
            starts: record -> its rows to start from, bool [T]; records that are not in the graph are passed over.
        """
        import networkx as nx

        self._graph = graph
        self._distances: dict[Node, Tensor] = {}
        for node in nx.topological_sort(graph):
            rows: Tensor = graph.nodes[node]["rows"]
            found = torch.full((rows.numel(),), _FAR, dtype=torch.int32)
            for source, _, flow in graph.in_edges(node, data="flow"):
                if source in self._distances:
                    found = torch.minimum(
                        found, flow.forward(self._distances[source], rows.numel()) + 1
                    )
            if node in starts:
                start = starts[node]
                if start.numel() != rows.numel():  # a record without token rows
                    start = start.any().expand(rows.numel())
                found = torch.where(start, 0, found)
            found = torch.where(rows & (found < _FAR), found, _FAR)
            if bool((found < _FAR).any()):
                self._distances[node] = found

    def __contains__(self, node: Node) -> bool:
        return node in self._distances

    @property
    def nodes(self) -> set[Node]:
        """Records with a row that is reached."""
        return set(self._distances)

    def rows(self, node: Node) -> Tensor:
        """Return which rows of a record are reached, bool [T]."""
        if node not in self._distances:
            return torch.zeros_like(self._graph.nodes[node]["rows"])
        return self._distances[node] < _FAR

    def edges(self) -> list[tuple[Node, Node]]:
        """Return the edges along which a reached row goes on."""
        found = []
        for source, target, flow in self._graph.edges(data="flow"):
            if source in self and target in self:
                rows: Tensor = self._graph.nodes[target]["rows"]
                arrived = flow.forward(self._distances[source], rows.numel()) < _FAR
                if bool((rows & arrived).any()):
                    found.append((source, target))
        return found

    def way_to(self, target: Node) -> list[Node]:
        """Return the records of a shortest way to a record; empty where it is not reached."""
        if target not in self:
            return []
        node, row = target, int(self._distances[target].argmin())
        way = [node]
        while (left := int(self._distances[node][row])) > 0:
            rows = self._distances[node].numel()
            for source, _, flow in self._graph.in_edges(node, data="flow"):
                if source not in self._distances:
                    continue
                distances = self._distances[source]
                if int(flow.forward(distances, rows)[row]) == left - 1:
                    node, row = source, flow.source_row(distances, row, rows)
                    break
            way.append(node)
        return way[::-1]


def rows_leading_to(
    graph: Any, target: Node, within: Mapping[Node, Tensor] | None = None
) -> dict[Node, Tensor]:
    """Return, record by record, the rows from which a way leads to a record.

    Args:
        graph: of build_graph.
        target: a record of it.
        within: record -> rows that a way may go through; every differing row when left out.
    """
    import networkx as nx

    found: dict[Node, Tensor] = {}
    for node in reversed(list(nx.topological_sort(graph))):
        if within is not None and node not in within:
            continue
        rows: Tensor = graph.nodes[node]["rows"] if within is None else within[node]
        if node == target:
            found[node] = rows
            continue
        useful = torch.zeros_like(rows)
        for _, following, flow in graph.out_edges(node, data="flow"):
            if following in found:
                useful |= flow.backward(found[following])
        useful &= rows
        if bool(useful.any()):
            found[node] = useful
    return found
