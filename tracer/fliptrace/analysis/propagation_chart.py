"""Prunes the graph of differing records to what leads from the roots to the flip, merges it, and lays it out.

Three things keep the picture small enough to read, and all are counted so that a view can say them: records from which
no way leads to the flip are left out; of the steps between root and flip only some are looked at record by record, the
others only by what they left in the cache; and records of one place are merged, as coarsely as the budget of nodes asks
for (fliptrace.analysis.propagation_merge).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fliptrace.analysis.differing_records import Node
from fliptrace.analysis.evidence import StepEvidence
from fliptrace.analysis.propagation import (
    build_graph,
    first_record,
    leaves_projection,
    rows_of_start,
)
from fliptrace.analysis.propagation_merge import Merge, Start
from fliptrace.analysis.reach import Reach, rows_leading_to
from fliptrace.chart import Band, PropagationChart
from fliptrace.numerics import CoordinateClass
from fliptrace.verdicts import Flip, RowDifference

#: Roots with a node of their own; later ones are counted in the node of their place.
MOST_ROOTS = 24
#: Steps that are looked at record by record, beside the flip's.
MOST_STEPS = 16


def propagation_chart(
    evidence: Sequence[StepEvidence],
    start: Start | None,
    roots: Sequence[RowDifference],
    flip: Flip | None,
) -> PropagationChart | None:
    """Draw up what leads from the roots to the flip.

    Args:
        evidence: every compared step.
        start: what is followed in the story: a root, a configuration-variant or what entered elsewhere.
        roots: the surviving roots in execution order.
        flip: the flip, if any; without one the picture ends where the differences do.

    Returns:
        The chart; None where no difference is known to have left a shrink, so that there is nothing to follow.
    """
    starts = _starts(evidence, start, roots)
    if not starts:
        return None
    steps = _looked_at([node[0] for node in starts], flip, evidence)
    graph = build_graph(evidence, flip, steps)
    every = [node for node in graph if node[1] not in ("cached", "flip")]
    ended = [
        node
        for node in every
        if graph.nodes[node]["coordinate_class"] == CoordinateClass.LATENT.label
    ]
    graph.remove_nodes_from(ended)
    kept, leading, reaches = _pruned(graph, evidence, starts, flip)
    if not leading:
        return None
    path = _path(kept, evidence, leading, flip)
    bands = _bands(kept, leading, flip, steps, evidence)
    drawn = dict(list(leading.items())[:MOST_ROOTS])
    merge = Merge(kept, bands, drawn, evidence)
    merge.choose_grain()
    merge.merge(path)
    left_out = len(every) - len(ended) - sum(node[1] not in ("cached", "flip") for node in kept)
    passed = [step.step for step in evidence if step.step not in steps]
    between = sum(bands[0].first <= step <= bands[-1].last for step in passed)
    return merge.chart(
        reaches_flip=reaches,
        left_out=left_out,
        latent=len(ended),
        roots_drawn=sum(map(len, drawn.values())),
        roots=sum(map(len, leading.values())),
        steps_between=between,
        operands_kept=all(step.operand_values_known for step in evidence),
    )


def _starts(
    evidence: Sequence[StepEvidence], start: Start | None, roots: Sequence[RowDifference]
) -> dict[Node, list[Start]]:
    """Return the records at which differences entered, in execution order, each with what entered there."""
    found: dict[Node, list[Start]] = {}
    followed = [one for one in (start, *roots) if one is not None]
    for one in followed:
        if isinstance(one, RowDifference) and not leaves_projection(one):
            continue
        node = first_record(evidence, one)
        if node is not None and one not in found.setdefault(node, []):
            found[node].append(one)
    return dict(sorted(found.items(), key=lambda item: _when(item[1][0])))


def _when(one: Start) -> tuple[int, int]:
    order = one.order if isinstance(one, RowDifference) else one.before_order
    return one.step, order


def _looked_at(
    starts: Sequence[int], flip: Flip | None, evidence: Sequence[StepEvidence]
) -> list[int]:
    """Choose the steps whose records are looked at: the first start's, the flip's, starts', and evenly between."""
    last = flip.step if flip is not None else evidence[-1].step
    possible = [step.step for step in evidence if starts[0] <= step.step <= last]
    wanted = list(dict.fromkeys([starts[0], last, *starts]))[:MOST_STEPS]
    between = [step for step in possible if step not in wanted]
    room = max(0, MOST_STEPS - len(wanted))
    stride = max(1, -(-len(between) // room)) if room else 0
    return sorted({*wanted, *(between[::stride] if stride else ())})


def _pruned(
    graph: Any,
    evidence: Sequence[StepEvidence],
    starts: Mapping[Node, list[Start]],
    flip: Flip | None,
) -> tuple[Any, dict[Node, list[Start]], bool | None]:
    """Keep what the starts' rows can have got to and, where that reaches the flip, what leads on to it.

    Returns:
        The kept graph, with the edges along which such rows go; the starts whose rows lead there; and whether the flip
        is reached, None without one.
    """
    rows = {
        node: torch.stack([rows_of_start(evidence, one) for one in entered]).any(dim=0)
        for node, entered in starts.items()
        if node in graph
    }
    reach = Reach(graph, rows)
    useful = {node: reach.rows(node) for node in reach.nodes}
    target: Node | None = None if flip is None else (flip.step, "flip", 0)
    reaches = None if target is None else target in reach
    if target is not None and reaches:
        useful = rows_leading_to(graph, target, useful)
    kept = graph.edge_subgraph(
        edge for edge in reach.edges() if edge[0] in useful and edge[1] in useful
    ).copy()
    kept.add_nodes_from((node, graph.nodes[node]) for node in useful)
    leading = {
        node: those
        for node, entered in starts.items()
        if node in useful
        and (
            those := [
                one for one in entered if bool((useful[node] & rows_of_start(evidence, one)).any())
            ]
        )
    }
    return kept, leading, reaches


def _path(
    graph: Any,
    evidence: Sequence[StepEvidence],
    starts: Mapping[Node, list[Start]],
    flip: Flip | None,
) -> list[Node]:
    """Return a shortest way from the first start to the flip; empty without one."""
    if flip is None or not starts:
        return []
    node, entered = next(iter(starts.items()))
    return Reach(graph, {node: rows_of_start(evidence, entered[0])}).way_to((flip.step, "flip", 0))


def _bands(
    kept: set[Node],
    starts: Iterable[Node],
    flip: Flip | None,
    steps: Sequence[int],
    evidence: Sequence[StepEvidence],
) -> tuple[Band, ...]:
    """Give the first start's step and the flip's a band each, and one to the steps between and after them."""
    last = flip.step if flip is not None else evidence[-1].step
    own = sorted({next(iter(starts))[0], last})
    present = {node[0] for node in kept if node[1] != "cached"}
    bands = []
    for number, step in enumerate(own):
        if step in present:
            bands.append(Band(step, step, 1))
        following = own[number + 1] if number + 1 < len(own) else last + 1
        if any(step < one < following for one in present):
            looked = sum(step < one < following for one in steps)
            bands.append(Band(step + 1, following - 1, looked))
    return tuple(bands)
