"""The records of a step as one axis, in execution order, and what the cache rows among them are made from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fliptrace.analysis.coordinates import site_of
from fliptrace.analysis.grids import cache_place
from fliptrace.analysis.roles import Role, role_of
from fliptrace.sites import Site

#: What a slot holds.
OPERAND, SHRINK, PROJECTION, CACHE = range(4)

_BEYOND = 2**62


@dataclass(frozen=True)
class Makers:
    """Which records the keys, or the values, of each of C cache layers are made from.

    Attributes:
        projections: 1 where a layer's rows are made from a site's projection, else 0, float32 [C, S].
        operands: likewise from its operand, where the layer has no projection of its own for them.
        has_any: some such record exists, bool [C, 1].
    """

    projections: Tensor
    operands: Tensor
    has_any: Tensor

    def of(self, projection: Tensor, operand: Tensor) -> Tensor:
        """Say for every layer and row whether any of its makers is marked: bool [S, T] twice to bool [C, T]."""
        marks = self.projections @ projection.to(torch.float32)
        return (marks + self.operands @ operand.to(torch.float32)) > 0


@dataclass(frozen=True)
class Slots:
    """The records of a step as one axis in execution order, cache rows where they are written.

    Attributes:
        sites: one per shrink record.
        kinds: what each slot holds; numbers: its row in the matrices of its kind.
        order: from the stacked matrices (operands, shrinks, projections, caches) to slots, int64.
        layers: of every slot, int64; beyond all where a slot has none, and for caches.
        makers: of the keys and of the values of every cache layer.
    """

    sites: tuple[Site, ...]
    kinds: tuple[int, ...]
    numbers: tuple[int, ...]
    order: Tensor
    layers: Tensor
    makers: tuple[Makers, Makers]


def arrange(keys: tuple[str, ...], layers: tuple[int, ...]) -> Slots:
    """Arrange the records of shrinks with these keys and cache layers."""
    sites = tuple(site_of(key) for key in keys)
    count = len(sites)
    placed = [
        (4 * number + kind, kind, number, kind * count + number)
        for number in range(count)
        for kind in (OPERAND, SHRINK, PROJECTION)
    ]
    placed += [
        (4 * cache_place(sites, layer) - 1, CACHE, number, 3 * count + number)
        for number, layer in enumerate(layers)
    ]
    placed.sort(key=lambda one: one[0])
    slot_layers = [None if kind == CACHE else sites[number].layer for _, kind, number, _ in placed]
    return Slots(
        sites=sites,
        kinds=tuple(kind for _, kind, _, _ in placed),
        numbers=tuple(number for _, _, number, _ in placed),
        order=torch.tensor([row for *_, row in placed], dtype=torch.int64),
        layers=torch.tensor([_BEYOND if layer is None else layer for layer in slot_layers]),
        makers=(_makers(sites, layers, Role.KEY), _makers(sites, layers, Role.VALUE)),
    )


def _makers(sites: tuple[Site, ...], layers: tuple[int, ...], own: Role) -> Makers:
    """Find what the keys or the values of every layer are made from."""
    projections, operands = (torch.zeros((len(layers), len(sites))) for _ in range(2))
    for place, layer in enumerate(layers):
        here = [(number, role_of(site)) for number, site in enumerate(sites) if site.layer == layer]
        writers = [number for number, role in here if role in (own, Role.ATTENTION_IN)]
        if writers:
            projections[place, writers] = 1
        else:
            inputs = (Role.QUERY, Role.KEY, Role.VALUE)
            operands[place, [number for number, role in here if role in inputs]] = 1
    has_any = ((projections + operands).sum(dim=1) > 0).unsqueeze(1)
    return Makers(projections, operands, has_any)
