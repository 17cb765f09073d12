"""Seals: 128-bit hashes over whole rows of a trace file, every column with its length.

A seal binds a row's values to their columns and to the rows that it depends on: a frame's seal covers the seal of its
layout; a step's seal covers the seals of its frames and the seal of the step before (of the manifest, for step 0).
Whoever deletes a row, swaps two, or moves one over from another trace breaks the chain at a step that can be named.
Seals find accidents; they are no signature. Why not SHA-256: it would be the slowest part of a comparison; XXH3 is
some thirty times faster on one core.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

SEAL_BYTES = 16

#: What can lie in a payload column.
Payload = bytes | bytearray | memoryview

_FRAME_HEAD = struct.Struct("<6s16sqqqqq")
_STEP_HEAD = struct.Struct("<6s16sqqqqqqqqqq")


def seal_document(name: str, text: str) -> bytes:
    """Seal the manifest or the closing record."""
    return _seal_texts(b"document", (name, text))


def seal_layout(text: str) -> bytes:
    """Seal a layout by its content alone: layouts with equal seals are equal, in any trace."""
    return _seal_texts(b"layout", (text,))


def seal_frame(
    number: int,
    kind: str,
    layout_seal: bytes,
    parts: int,
    digests: bytes | None,
    payload: Payload,
) -> bytes:
    """Seal a row of the frames table; the layout by its seal, so that equal rows of two traces have equal seals."""
    name = kind.encode()
    head = _FRAME_HEAD.pack(
        b"frame:",
        layout_seal,
        number,
        parts,
        len(name),
        -1 if digests is None else len(digests),
        payload.nbytes if isinstance(payload, memoryview) else len(payload),
    )
    hashed = xxhash.xxh3_128_digest(payload)
    return xxhash.xxh3_128_digest(b"".join((head, name, digests or b"", hashed)))


def seal_step(columns: Sequence[int | str | bytes], previous: bytes) -> bytes:
    """Seal a row of the steps table.

    Args:
        columns: step, first_position, token_ids, chosen, top_values, top_ids, tied, cache_digest, cache_digest_full,
            frames, frame_seals: as they are stored.
        previous: the seal of the step before; of the manifest, for step 0.

    Raises:
        TypeError, ValueError, struct.error, AttributeError: a column is of another type than the writer stores.
    """
    step, first_position, ids, chosen, top, top_ids, tied, digest, full, frames, seals = columns
    texts = (digest.encode(), full.encode(), frames.encode())  # type: ignore[union-attr]
    blobs = (ids, top, top_ids, *texts, seals)
    lengths = [len(blob) for blob in blobs[:-1]]  # type: ignore[arg-type]
    head = _STEP_HEAD.pack(b"step::", previous, step, first_position, chosen, tied, *lengths)
    return xxhash.xxh3_128_digest(b"".join((head, *blobs)))  # type: ignore[arg-type]


def _seal_texts(tag: bytes, texts: Sequence[str]) -> bytes:
    state = xxhash.xxh3_128(tag)
    for text in texts:
        data = text.encode()
        state.update(struct.pack("<q", len(data)))
        state.update(data)
    return state.digest()
