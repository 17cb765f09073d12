"""Checking a whole trace file, down to the record.

Seals say that a row is as it was written. The digests that travel with a frame say more: they were computed where the
tensors lived, so that a record whose bytes do not match its digest was copied wrongly or changed before it was sealed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from fliptrace.errors import TraceCorruptError
from fliptrace.numerics.digest import digest_tensor
from fliptrace.store.opening import READ_FAILURES
from fliptrace.store.reader import TraceReader
from fliptrace.trace import Frame, Kind


def verify_trace(path: str | Path) -> list[str]:
    """Read everything in a trace file and list what is wrong with it.

    Args:
        path: a trace file.

    Returns:
        One sentence per finding, each naming the file, the row and where possible the record; empty when all is well.

    Raises:
        TraceReadError: the file is no trace at all.
        TraceVersionError: it was written under another schema version.
    """
    try:
        reader = TraceReader(path)
    except TraceCorruptError as error:
        return [str(error)]
    with reader:
        return [*_structure(reader), *_counts(reader), *_contents(reader)]


def _structure(reader: TraceReader) -> Iterator[str]:
    """Let SQLite check its pages."""
    try:
        for (line,) in reader.query("PRAGMA quick_check(20)"):
            if line != b"ok":
                text = " ".join(line.decode(errors="replace").split())
                yield f"{reader.name}: the file's pages are damaged ({text})"
    except READ_FAILURES as error:
        yield f"{reader.name}: the file's pages cannot be checked ({error})"


def _counts(reader: TraceReader) -> Iterator[str]:
    """Look for rows that no step lists."""
    try:
        (stored,) = reader.query("SELECT count(*) FROM frames")[0]
    except READ_FAILURES as error:
        yield f"{reader.name}: the frames cannot be counted ({error})"
        return
    listed = sum(reader.row_count(step) for step in range(len(reader.steps)))
    if stored != listed:
        yield f"{reader.name}: the steps list {listed} rows of frames, the file holds {stored}"


def _contents(reader: TraceReader) -> Iterator[str]:
    for step in range(len(reader.steps)):
        try:
            frames = reader.step_frames(step)
        except TraceCorruptError as error:
            yield from list(_one_by_one(reader, step)) or [str(error)]
        else:
            for frame in frames.values():
                yield from _records(reader, frame)


def _one_by_one(reader: TraceReader, step: int) -> Iterator[str]:
    """Name every bad frame of a step, and its bad records where its layout still fits."""
    for kind in reader.steps[step].frames:
        try:
            frame = reader.frame(step, Kind(kind))
        except TraceCorruptError as error:
            yield str(error)
            try:
                frame = reader.unchecked_frame(step, Kind(kind))
            except TraceCorruptError:
                continue
        if frame is not None:
            yield from _records(reader, frame)


def _records(reader: TraceReader, frame: Frame) -> Iterator[str]:
    if frame.digests is None:
        return
    for number, entry in enumerate(frame.layout.entries):
        if not torch.equal(digest_tensor(frame.tensor(number)), frame.digests[number]):
            yield (
                f"{reader.name}: step {frame.step}, {frame.kind} frame, record {entry.key}: its bytes do not match "
                "its digest"
            )
