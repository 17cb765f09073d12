"""The differing records of a step, as the nodes that the propagation graph is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fliptrace.analysis.coordinates import site_of
from fliptrace.analysis.evidence import StepEvidence
from fliptrace.numerics import CoordinateClass
from fliptrace.sites import Site

#: (step, what, where): where is a site's key (``shrink``), a layer (``key``), or 0 (``logits``).
Node = tuple[int, str, str | int]
SURVIVING = CoordinateClass.SURVIVING.label
ONE_ROW = torch.ones(1, dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class DifferingRecord:
    """A record of one step that differs in some row.

    Attributes:
        node: its name in the graph.
        rows: which token rows differ, bool [T].
        attributes: what the graph says of it.
    """

    node: Node
    rows: Tensor  # bool [T]
    attributes: dict[str, Any]


def count_records(evidence: Sequence[StepEvidence]) -> int:
    """Count the differing records without building their graph."""
    total = 0
    for step in evidence:
        if step.equal:
            continue
        matrices = (step.operand.differs, step.classes > 0, step.projection.differs)
        total += sum(int(matrix.any(dim=1).sum()) for matrix in matrices)
        if step.cache is not None:
            total += int((step.cache.counts.sum(dim=2) > 0).sum())
        if step.states is not None:
            total += len(step.states.differing_layers)
        total += bool(step.logits_differ)
    return total


def differing_records(step: StepEvidence) -> dict[Node, DifferingRecord]:
    """Return the differing records of a step."""
    found: dict[Node, DifferingRecord] = {}
    for name, matrix in (
        ("operand", step.operand.differs),
        ("shrink", step.classes > 0),
        ("projection", step.projection.differs),
    ):
        worst = step.classes.amax(dim=1).tolist() if name == "shrink" else None
        largest = step.magnitudes.amax(dim=1).tolist() if name == "shrink" else None
        for number in matrix.any(dim=1).nonzero().squeeze(1).tolist():
            key = step.keys[number]
            site = site_of(key)
            label, magnitude = SURVIVING, None
            if worst is not None and largest is not None:
                label, magnitude = CoordinateClass(worst[number]).label, largest[number]
            node: Node = (step.step, name, key)
            found[node] = _record(
                step,
                node,
                matrix[number],
                f"{short_name(site)} {name}",
                site.layer,
                label,
                magnitude,
            )
    found |= differing_cache_records(step)
    if step.logits_differ:
        node = (step.step, "logits", 0)
        rows = torch.zeros(step.rows, dtype=torch.bool)
        rows[-1] = True
        found[node] = _record(
            step,
            node,
            rows,
            f"logits of step {step.step}",
            None,
            SURVIVING,
            None,
        )
    return found


def differing_cache_records(step: StepEvidence) -> dict[Node, DifferingRecord]:
    """Return the differing key and value records of a step, and the differing states that it left."""
    found = _differing_states(step)
    cache = step.cache
    if cache is None:
        return found
    for place, which in (cache.counts.sum(dim=2) > 0).nonzero().tolist():
        name, layer = ("key", "value")[which], cache.layers[place]
        node: Node = (step.step, name, layer)
        found[node] = _record(
            step,
            node,
            cache.counts[place, which] > 0,
            f"layer-{layer} {name}",
            layer,
            SURVIVING,
            float(cache.magnitudes[place, which].max()),
        )
    return found


def _differing_states(step: StepEvidence) -> dict[Node, DifferingRecord]:
    """Return one record per layer whose recurrent state differs after a step; it has no token rows."""
    states = step.states
    found: dict[Node, DifferingRecord] = {}
    for layer in states.differing_layers if states is not None else ():
        numbers = [at for at, (of, _) in enumerate(states.places) if of == layer] if states else []
        node: Node = (step.step, "state", layer)
        attributes = {
            "name": f"layer-{layer} recurrent state",
            "step": step.step,
            "layer": layer,
            "record": "state",
            "coordinate_class": SURVIVING,
            "magnitude": float(states.magnitudes[numbers].max())
            if states and states.whole
            else None,
            "positions": (),
        }
        found[node] = DifferingRecord(node, ONE_ROW, attributes)
    return found


def _record(
    step: StepEvidence,
    node: Node,
    rows: Tensor,
    name: str,
    layer: int | None,
    label: str,
    magnitude: float | None,
) -> DifferingRecord:
    if step.rows == 1:
        rows, positions = ONE_ROW, (step.first_position,)
    else:
        positions = tuple(step.first_position + row for row in rows.nonzero().squeeze(1).tolist())
    attributes = {
        "name": name,
        "step": step.step,
        "layer": layer,
        "record": node[1],
        "coordinate_class": label,
        "magnitude": magnitude,
        "positions": positions,
    }
    return DifferingRecord(node, rows, attributes)


def short_name(site: Site) -> str:
    """Return the paper's way to name a site: ``layer-2 mlp.up_proj``."""
    return f"layer-{site.layer} {site.part}" if site.layer is not None else site.part
