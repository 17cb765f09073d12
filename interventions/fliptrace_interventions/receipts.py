"""Receipts of edits of caches and tokens: what was recorded, what was handed over, and what its reader got."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from fliptrace.judgements import Receipt
from fliptrace.numerics import digest_hex, digest_tensor
from fliptrace_interventions.audit import StepAudit
from fliptrace_interventions.digests import hexes

_Key = TypeVar("_Key", bound=Hashable)

#: How a digest reads that was never taken.
MISSING = ""


@dataclass(frozen=True)
class PatchedCache:
    """Digests of a cache that was edited before a step, per layer; ``written`` on the engine's device.

    Attributes:
        edited: layers whose keys or values were edited.
        before, written: as recorded, and as handed over.
        edited_states: layers whose recurrent state was edited.
        states_before, states_written: likewise, per layer and name.
    """

    edited: Collection[int]
    before: Mapping[int, str]
    written: Mapping[int, Tensor]
    edited_states: Collection[int] = ()
    states_before: Mapping[tuple[int, str], str] = field(default_factory=dict)
    states_written: Mapping[tuple[int, str], Tensor] = field(default_factory=dict)


def cache_receipts(step: int, cached: PatchedCache, arrived: StepAudit) -> list[Receipt]:
    """One receipt per edited layer, and one for all the others; of keys and values, then of recurrent state."""
    sides = (cached.before, hexes(dict(cached.written)), hexes(arrived.caches))
    states = (cached.states_before, hexes(dict(cached.states_written)), hexes(arrived.states))
    names: dict[int, list[tuple[int, str]]] = {}
    for key in cached.states_written:
        names.setdefault(key[0], []).append(key)
    return [
        *_receipts(
            "cache", step, {layer: [layer] for layer in cached.written}, cached.edited, sides
        ),
        *_receipts("recurrent state", step, names, cached.edited_states, states),
    ]


def _receipts(
    what: str,
    step: int,
    places: Mapping[int, Sequence[_Key]],
    changed: Collection[int],
    sides: tuple[Mapping[_Key, str], ...],
) -> list[Receipt]:
    """Receipts of one kind.

    Args:
        what: the kind, for people.
        step: before which it was edited.
        places: per layer the keys of its digests.
        changed: the edited layers.
        sides: the digests before, written and consumed.
    """

    def receipt(place: str, layers: Collection[int]) -> Receipt:
        before, written, consumed = (
            _joined([side.get(key, MISSING) for layer in layers for key in places[layer]])
            for side in sides
        )
        return Receipt(place, before, written, consumed, landed(written, consumed))

    edited = sorted(changed)
    others = [layer for layer in places if layer not in changed]
    receipts = [receipt(f"{what} of layer {layer} before step {step}", [layer]) for layer in edited]
    if others:
        receipts.append(
            receipt(f"{what} of the {len(others)} other layers before step {step}", others)
        )
    return receipts


def _joined(digests: list[str]) -> str:
    """Bind digests of several layers into one; a missing one makes the whole missing."""
    if MISSING in digests:
        return MISSING
    if len(digests) == 1:
        return digests[0]
    lanes = [[int(text[:16], 16), int(text[16:], 16)] for text in digests]
    signed = [[lane - (1 << 64) if lane >> 63 else lane for lane in pair] for pair in lanes]
    return digest_hex(digest_tensor(torch.tensor(signed, dtype=torch.int64)))


def landed(written: str, consumed: str) -> bool:
    """Tell whether what was written is there and is what arrived."""
    return written != MISSING and written == consumed


def token_receipt(step: int, recorded: int, forced: int, consumed: Tensor | None) -> Receipt:
    """Receipt of a forced token.

    Args:
        step: the step whose generated token it replaces.
        recorded: the recipient's token there.
        forced: the token that was fed in its place.
        consumed: digest of the ids that the embedding got, None when it never ran.
    """
    before, written = (
        digest_hex(digest_tensor(torch.tensor([token], dtype=torch.int64)))
        for token in (recorded, forced)
    )
    got = MISSING if consumed is None else digest_hex(consumed)
    return Receipt(f"token of step {step}", before, written, got, landed(written, got))
