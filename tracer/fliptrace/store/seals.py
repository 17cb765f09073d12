"""Seals: 128-bit hashes over whole rows of a trace file, every column with its length.

A seal binds a row's values to their columns and to the rows that it depends on: a frame's seal covers the seal of its
layout; a step's seal covers the seals of its frames and the seal of the step before (of the manifest, for step 0).
Whoever deletes a row, swaps two, or moves one over from another trace breaks the chain at a step that can be named.
Seals find accidents; they are no signature. Why not SHA-256: it would be the slowest part of a comparison; XXH3 is
some thirty times faster on one core.
"""

from __future__ import annotations

import struct

import xxhash

SEAL_BYTES = 16

#: What can lie in a payload column.
Payload = bytes | bytearray | memoryview

#: A row of the steps table without its seal.
StepColumns = tuple[int, int, bytes, int, bytes, bytes, int, bytes, bytes, bytes, bytes]

_FRAME_HEAD = struct.Struct("<6s16s5q")
_STEP_HEAD = struct.Struct("<6s16s11q")


def seal_document(name: str, text: bytes) -> bytes:
    """Seal the manifest or the closing record."""
    return _seal_text(b"document:" + name.encode(), text)


def seal_layout(text: bytes) -> bytes:
    """Seal a layout by its content alone: layouts with equal seals are equal, in any trace."""
    return _seal_text(b"layout", text)


def seal_frame(
    number: int,
    kind: bytes,
    layout_seal: bytes,
    parts: int,
    digests: bytes | None,
    payload: Payload,
) -> bytes:
    """Seal a row of the frames table; the layout by its seal, so that equal rows of two traces have equal seals."""
    head = _FRAME_HEAD.pack(
        b"frame:",
        layout_seal,
        number,
        parts,
        len(kind),
        -1 if digests is None else len(digests),
        len(payload),
    )
    hashed = xxhash.xxh3_128_digest(payload)
    return xxhash.xxh3_128_digest(b"".join((head, kind, digests or b"", hashed)))


def seal_step(columns: StepColumns, previous: bytes) -> bytes:
    """Seal a row of the steps table.

    Args:
        columns: step, first_position, token_ids, chosen, top_values, top_ids, tied, cache_digest, cache_digest_full,
            frames, frame_seals: as they are stored, text as UTF-8.
        previous: the seal of the step before; of the manifest, for step 0.

    Raises:
        TypeError, ValueError, struct.error: a column is of another type than the writer stores.
    """
    step, first_position, ids, chosen, top, top_ids, tied, digest, full, frames, listed = columns
    blobs = (ids, top, top_ids, digest, full, frames, listed)
    head = _STEP_HEAD.pack(
        b"step::", previous, step, first_position, chosen, tied, *map(len, blobs)
    )
    return xxhash.xxh3_128_digest(b"".join((head, *blobs)))


def _seal_text(tag: bytes, text: bytes) -> bytes:
    head = struct.pack("<qq", len(tag), len(text))
    return xxhash.xxh3_128_digest(b"".join((head, tag, text)))
