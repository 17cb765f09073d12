"""What an edit left in the cache, beside what the two recordings differ in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fliptrace.judgements import Footprint, FootprintLayer
from fliptrace.numerics import integer_view
from fliptrace_interventions.recorded import RecordedExecution

#: Per step and layer the rows written: [2, T, kv_heads, head_dim].
Rows = Mapping[int, Mapping[int, Tensor]]

_POSITIONS_LISTED = 64


def footprint(
    unedited: Rows, edited: Rows, recipient: RecordedExecution, donor: RecordedExecution
) -> Footprint:
    """Compare the rows that two arms wrote, in the steps that both ran.

    Args:
        unedited: of the unedited arm.
        edited: of the edited arm. Steps that it did not run, because its state was bit-equal again, have no
            differences.
        recipient: for what was observed.
        donor: the other recording.
    """
    totals = torch.zeros(2, dtype=torch.int64)
    first: int | None = None
    for step in sorted(edited.keys() & unedited.keys()):
        counts = torch.stack(
            [
                _differs(unedited[step][layer], rows).sum((1, 2, 3))
                for layer, rows in edited[step].items()
            ]
        ).sum(0)
        totals += counts.cpu()
        if first is None and bool(counts.any()):
            first = step
    keys, values = totals.tolist()
    if first is None:
        return Footprint(0, 0, None, (), None, None, "no key or value element changed")
    step = first
    layers = tuple(
        found
        for layer in edited[step]
        if (
            found := _layer(
                layer, step, unedited[step][layer], edited[step][layer], recipient, donor
            )
        )
    )
    lead = layers[0]
    phase = "the prefill" if step == 0 else f"step {step}"
    where = "exactly" if lead.same_positions else "not exactly"
    bits = "the donor's bits" if lead.same_bits else "other bits than the donor's"
    sentence = (
        f"{keys} key and {values} value elements changed; first in layer {lead.layer} in {phase}, {lead.keys} key and "
        f"{lead.values} value elements of {len(lead.positions)} token rows: {where} those that differ between the "
        f"recordings, with {bits}"
    )
    return Footprint(keys, values, step, layers, lead.same_positions, lead.same_bits, sentence)


def _layer(
    layer: int,
    step: int,
    before: Tensor,
    after: Tensor,
    recipient: RecordedExecution,
    donor: RecordedExecution,
) -> FootprintLayer | None:
    """Compare one layer's rows of one step; None where nothing changed."""
    differs = _differs(before, after)
    touched = differs.flatten(2).any(2).any(0)  # [T]
    if not bool(touched.any()):
        return None
    theirs = donor.cache_rows(step, layer)
    observed = _differs(recipient.cache_rows(step, layer), theirs) & touched.view(1, -1, 1, 1)
    keys, values = differs.sum((1, 2, 3)).tolist()
    observed_keys, observed_values = observed.sum((1, 2, 3)).tolist()
    positions = [recipient.positions(step)[row] for row in torch.nonzero(touched)[:, 0].tolist()]
    return FootprintLayer(
        layer=layer,
        keys=keys,
        values=values,
        observed_keys=observed_keys,
        observed_values=observed_values,
        positions=tuple(positions[:_POSITIONS_LISTED]),
        same_positions=torch.equal(differs, observed),
        same_bits=not bool((differs & _differs(after, theirs)).any()),
    )


def _differs(before: Tensor, after: Tensor) -> Tensor:
    return integer_view(before) != integer_view(after)
