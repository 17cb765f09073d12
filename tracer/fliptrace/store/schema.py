"""The tables of a trace file, and the numbers in its header that say it is one.

A file holds a manifest and a closing record (``documents``), the layouts that its frames refer to, a row per step and a
row per frame. A frame larger than PART_BYTES takes several rows, because SQLite limits a value to 10**9 bytes. Row
numbers of frames are computed, not counted: a frame is found without an index, and a step's frames lie side by side.
"""

from __future__ import annotations

from typing import Final

from fliptrace.trace import SCHEMA_VERSION, Kind

#: "flip" in ASCII, in the header field that SQLite reserves for applications.
APPLICATION_ID: Final = 0x666C6970
USER_VERSION: Final = SCHEMA_VERSION

#: Chosen by measurement; see the decision log.
PAGE_BYTES: Final = 8192
PART_BYTES: Final = 256 * 1024 * 1024

PLACE_BITS: Final = 8
PART_BITS: Final = 12
STEP_SHIFT: Final = PLACE_BITS + PART_BITS

MANIFEST: Final = "manifest"
CLOSING: Final = "closing"

TABLES: Final = {
    "documents": """CREATE TABLE documents (
    name TEXT PRIMARY KEY NOT NULL,
    json TEXT NOT NULL,
    seal BLOB NOT NULL
) WITHOUT ROWID""",
    "layouts": """CREATE TABLE layouts (
    id INTEGER PRIMARY KEY,
    json TEXT NOT NULL,
    seal BLOB NOT NULL
)""",
    "steps": """CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    first_position INTEGER NOT NULL,
    token_ids BLOB NOT NULL,
    chosen INTEGER NOT NULL,
    top_values BLOB NOT NULL,
    top_ids BLOB NOT NULL,
    tied INTEGER NOT NULL,
    cache_digest TEXT NOT NULL,
    cache_digest_full TEXT NOT NULL,
    frames TEXT NOT NULL,
    frame_seals BLOB NOT NULL,
    seal BLOB NOT NULL
)""",
    "frames": """CREATE TABLE frames (
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    layout INTEGER NOT NULL,
    parts INTEGER NOT NULL,
    digests BLOB,
    payload BLOB NOT NULL
)""",
}

# Text travels as UTF-8 bytes on both sides: what is damaged must reach its seal before it is decoded.
INSERT_DOCUMENT: Final = "INSERT INTO documents VALUES (?, CAST(? AS TEXT), ?)"
INSERT_LAYOUT: Final = "INSERT INTO layouts VALUES (?, CAST(? AS TEXT), ?)"
INSERT_STEP: Final = (
    "INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, "
    "CAST(? AS TEXT), CAST(? AS TEXT), CAST(? AS TEXT), ?, ?)"
)
#: With as many of INSERT_FRAME_ROW as there are rows: a statement is compiled once, and each call of one hands Python's
#: lock to the thread that runs the model.
INSERT_FRAMES: Final = "INSERT INTO frames VALUES "
INSERT_FRAME_ROW: Final = "(?, CAST(? AS TEXT), ?, ?, ?, ?)"
#: Rows that one statement takes at most; SQLite allows 999 values in its oldest versions.
INSERTED_TOGETHER: Final = 64
#: Payload after which a statement takes no more rows: SQLite copies all of a statement's values before it writes any.
INSERTED_BYTES: Final = 16 * 1024 * 1024

KINDS: Final = {kind.value.encode(): kind for kind in Kind}


def row_number(step: int, place: int = 0, part: int = 0) -> int:
    """Return the row number of a frame, or of a further part of it.

    Args:
        step: 0 for the prefill.
        place: index of the frame in the step's list of frames.
        part: 0 for the frame's first or only row.
    """
    return (step << STEP_SHIFT) | (place << PART_BITS) | part


def row_place(number: int) -> tuple[int, int, int]:
    """Return step, place and part of a frame's row number."""
    return (
        number >> STEP_SHIFT,
        (number >> PART_BITS) & ((1 << PLACE_BITS) - 1),
        number & ((1 << PART_BITS) - 1),
    )
