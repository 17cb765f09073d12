"""Compares the recurrent state that a step left, and finds where a difference of it entered.

A state has no token rows: every step replaces all of it. It may be kept in FP32, in which no consumer rounds it, or in
16 bit, in which it has been rounded already; either way a differing element is a real difference and has no boundary of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fliptrace.analysis.align import LayoutPair, group_tensor
from fliptrace.analysis.frame_rows import element_count, magnitude
from fliptrace.numerics import integer_view
from fliptrace.sites import Site
from fliptrace.trace import Frame, Kind
from fliptrace.verdicts import StateDifference

#: Last names of the projections from which a layer makes its state.
_MAKERS = ("in_proj",)


@dataclass
class StateEvidence:
    """The recurrent state that one step left, N tensors.

    Attributes:
        places: (layer, name) of every tensor of the reference.
        differs: bool [N]; counts: differing elements, int64 [N]; magnitudes: largest |difference|, float32 [N].
        whole: the tensors were kept; else their digests alone, which count and measure nothing.
        elements: of every tensor; dtypes likewise.
        unpaired: places of tensors that the candidate lacks or has in another shape.
    """

    places: tuple[tuple[int, str], ...]
    differs: Tensor
    counts: Tensor
    magnitudes: Tensor
    whole: bool
    elements: tuple[int, ...]
    dtypes: tuple[str, ...]
    unpaired: tuple[int, ...] = ()
    differing_layers: tuple[int, ...] = field(default=())

    def differences(self, step: int) -> tuple[StateDifference, ...]:
        """Return what differs, in order."""
        return tuple(
            StateDifference(
                layer=layer,
                step=step,
                name=name,
                differing=int(self.counts[number]) if self.whole else None,
                elements=self.elements[number] if self.whole else None,
                dtype=self.dtypes[number] if self.whole else None,
                largest=float(self.magnitudes[number]) if self.whole else None,
            )
            for number, (layer, name) in enumerate(self.places)
            if self.differs[number]
        )


def read_states(pair: LayoutPair, before: Frame, after: Frame, differs: bool) -> StateEvidence:
    """Compare the state frames of one step, whole or digests.

    Args:
        pair: their layouts, paired.
        before: the reference's frame.
        after: the candidate's.
        differs: the frames are not equal.
    """
    entries = before.layout.entries
    states = StateEvidence(
        places=tuple(state_place(entry.key) for entry in entries),
        differs=torch.zeros(len(entries), dtype=torch.bool),
        counts=torch.zeros(len(entries), dtype=torch.int64),
        magnitudes=torch.zeros(len(entries)),
        whole=before.kind is Kind.STATE,
        elements=tuple(element_count(entry.shape) for entry in entries),
        dtypes=tuple(entry.dtype for entry in entries),
        unpaired=(*pair.only_reference, *(one for one, _ in pair.reshaped)),
    )
    if not differs:
        return states
    for group in pair.groups:
        one, other = (
            group_tensor(frame, places, group.entry).flatten(1)
            for frame, places in ((before, group.rows), (after, group.columns))
        )
        different = integer_view(one) != integer_view(other)
        states.differs[group.places] = different.any(1)
        if not states.whole:
            continue
        states.counts[group.places] = different.sum(1)
        distances = torch.where(different, magnitude(one, other), 0.0)
        states.magnitudes[group.places] = distances.amax(1)
    unequal = [number for number, differs in enumerate(states.differs.tolist()) if differs]
    layers = [states.places[number][0] for number in (*unequal, *states.unpaired)]
    states.differing_layers = tuple(sorted(set(layers)))
    return states


def state_place(key: str) -> tuple[int, str]:
    """Return layer and name in ``state.<layer>.<name>``; layer -1 when the key has another form."""
    _, _, rest = key.partition(".")
    number, _, name = rest.partition(".")
    return (int(number), name) if number.isdigit() else (-1, key)


def makers_of(sites: Sequence[Site], layer: int) -> list[int]:
    """Return the numbers of the sites from whose projections a layer makes its state."""
    return [
        number
        for number, site in enumerate(sites)
        if site.layer == layer and site.module.partition("[")[0].rpartition(".")[2] in _MAKERS
    ]
