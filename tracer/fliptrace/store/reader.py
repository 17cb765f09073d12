"""Reading a trace file: every row is checked against its seal before anything of it is returned.

Steps, the manifest and the closing record are read and checked when the file is opened, so that a missing step is
reported at once; frames are read and checked one step at a time, on demand.
"""

from __future__ import annotations

import json
import struct
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fliptrace.errors import SiteNotFoundError, TraceReadError
from fliptrace.manifest import Manifest
from fliptrace.store import schema, seals
from fliptrace.store.opening import READ_FAILURES, corrupt, open_file
from fliptrace.trace import Closing, Frame, Kind, Layout, StepRecord, Trace

#: id, kind, layout, parts, digests, payload.
FrameRow = tuple[int, bytes, int, int, bytes | None, bytes]

_SELECT_STEPS = "SELECT * FROM steps ORDER BY step"
_SELECT_FRAMES = "SELECT * FROM frames WHERE id BETWEEN ? AND ? ORDER BY id"
_SEAL_BYTES = seals.SEAL_BYTES
#: What reading values of the wrong type or length raises.
_MALFORMED = (TypeError, ValueError, KeyError, IndexError, AttributeError, struct.error)


class TraceReader:
    """A trace file as a source of a Trace. Also a context manager that closes the file.

    Attributes:
        name: the path as it was given.
        manifest: what ran.
        closing: how it ended; for a recording that was killed, ``complete`` is False.
        steps: every acknowledged step in order.
    """

    name: str
    manifest: Manifest
    closing: Closing
    steps: Sequence[StepRecord]

    def __init__(self, path: str | Path) -> None:
        """Open a file and check everything but the frames.

        Raises:
            TraceReadError: not a readable trace.
            TraceVersionError: written under another schema version.
            TraceCorruptError: a row does not match its seal, or is missing.
        """
        self.path = Path(path)
        self.name = str(path)
        self._layouts: dict[int, tuple[Layout, bytes]] = {}
        self._kinds: dict[bytes, tuple[Kind, ...]] = {}
        self._frame_seals: list[bytes] = []
        self._opened = open_file(self.path)
        self._connection = self._opened.connection
        # A trace from open_trace is closed when nobody uses it any more.
        self._release = weakref.finalize(self, self._opened.close)
        try:
            documents = self._read_documents()
            self.manifest = Manifest.from_json(documents[schema.MANIFEST][0].decode())
            self.steps, chain = self._read_steps(documents[schema.MANIFEST][1])
            self.closing = self._read_closing(documents.get(schema.CLOSING), chain)
        except READ_FAILURES as error:
            self.close()
            raise corrupt(self.path, "a table", f"cannot be read ({error})") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. Frames that were read stay usable."""
        self._release()

    def __enter__(self) -> TraceReader:
        """Return the reader."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()

    def frame(self, step: int, kind: Kind) -> Frame | None:
        """Return one frame, None when the step has none of that kind.

        Raises:
            SiteNotFoundError: no such step.
            TraceCorruptError: the frame does not match its seal, or is missing.
        """
        kinds = self._step(step).frames
        if kind.value not in kinds:
            return None
        if len(self._frame_seals[step]) != len(kinds) * _SEAL_BYTES:
            return self.step_frames(step)[kind]
        place = kinds.index(kind.value)
        number = schema.row_number(step, place)
        rows = self._select(number, number)
        if not rows:
            raise corrupt(self.path, f"step {step}, {kind} frame", "is missing")
        seal = self._frame_seals[step][place * _SEAL_BYTES : (place + 1) * _SEAL_BYTES]
        self._check(rows[0], seal, step)
        return self.to_frame(step, rows)

    def frames(self, kind: Kind) -> Iterator[Frame]:
        """Yield the frames of one kind in step order.

        Raises:
            TraceCorruptError: a frame does not match its seal, or is missing.
        """
        for number in range(len(self.steps)):
            frame = self.frame(number, kind)
            if frame is not None:
                yield frame

    def step_frames(self, step: int) -> dict[Kind, Frame]:
        """Return all frames of one step, in storage order, by one query.

        Raises:
            SiteNotFoundError: no such step.
            TraceCorruptError: a frame does not match its seal, or is missing.
        """
        rows = self.step_rows(step)
        self.check_rows(step, rows)
        return self.frames_of(step, rows)

    # For the modules of this package: rows before they are frames.

    def step_rows(self, step: int) -> list[FrameRow]:
        """Return the rows of one step, complete but not yet checked against their seals."""
        self._step(step)
        rows = self._select(step << schema.STEP_SHIFT, ((step + 1) << schema.STEP_SHIFT) - 1)
        if len(rows) * _SEAL_BYTES != len(self._frame_seals[step]):
            raise self._missing(step, rows)
        return rows

    def frame_seals(self, step: int) -> bytes:
        """Return the seals of a step's rows, one after another; the step's own seal covers them."""
        return self._frame_seals[step]

    def row_count(self, step: int) -> int:
        """Return how many rows the frames of a step take, as the step lists them."""
        return len(self._frame_seals[step]) // _SEAL_BYTES

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement that reads."""
        return self._connection.execute(statement).fetchall()

    def unchecked_frame(self, step: int, kind: Kind) -> Frame | None:
        """Return a frame that may not match its seal, to say what is wrong with it; None when it takes several rows."""
        kinds = self.steps[step].frames
        number = schema.row_number(step, kinds.index(kind.value))
        rows = self._select(number, number)
        if self.row_count(step) != len(kinds) or not rows:
            return None
        try:
            return self.to_frame(step, rows)
        except _MALFORMED as error:
            raise corrupt(self.path, f"step {step}, {kind} frame", "has other columns") from error

    def check_rows(self, step: int, rows: list[FrameRow]) -> None:
        """Check all rows of a step against the seals that the step lists."""
        listed = self._frame_seals[step]
        start = 0
        for row in rows:
            self._check(row, listed[start : start + _SEAL_BYTES], step)
            start += _SEAL_BYTES

    def frames_of(self, step: int, rows: list[FrameRow]) -> dict[Kind, Frame]:
        """Return checked rows of a whole step as frames."""
        if len(rows) == len(self.steps[step].frames):
            found = [self.to_frame(step, [row]) for row in rows]
        else:
            parts: dict[int, list[FrameRow]] = {}
            for row in rows:
                parts.setdefault(schema.row_place(row[0])[1], []).append(row)
            found = [self.to_frame(step, group) for group in parts.values()]
        frames = {frame.kind: frame for frame in found}
        if tuple(frames) != self.steps[step].frames:
            raise corrupt(self.path, f"step {step}", "lists other frames than it has")
        return frames

    def to_frame(self, step: int, rows: list[FrameRow]) -> Frame:
        """Return the checked rows of one frame as that frame."""
        _, kind, layout_number, parts, digests, payload = rows[0]
        layout, _ = self.layout(layout_number)
        if len(rows) > 1:
            payload = b"".join(row[5] for row in rows)
        if len(rows) != parts or len(payload) != layout.size_bytes or kind not in schema.KINDS:
            raise corrupt(
                self.path, f"step {step}, {_shown(kind)} frame", "does not fit its layout"
            )
        return Frame(step, schema.KINDS[kind], layout, payload, _digest_tensor(digests))

    def layout(self, number: int) -> tuple[Layout, bytes]:
        """Return a layout and its seal, by number; parsed once."""
        known = self._layouts.get(number)
        if known is None:
            known = self._layouts[number] = self._read_layout(number)
        return known

    # Reading and checking.

    def _step(self, step: int) -> StepRecord:
        if not 0 <= step < len(self.steps):
            raise SiteNotFoundError(
                f"{self.name} has steps 0 to {len(self.steps) - 1}; got step {step}"
            )
        return self.steps[step]

    def _select(self, first: int, last: int) -> list[FrameRow]:
        try:
            return self._connection.execute(_SELECT_FRAMES, (first, last)).fetchall()
        except READ_FAILURES as error:
            step = schema.row_place(first)[0]
            raise corrupt(
                self.path, f"step {step}", f"has frames that cannot be read ({error})"
            ) from error

    def _check(self, row: FrameRow, seal: bytes, step: int) -> None:
        number, kind, layout, parts, digests, payload = row
        try:
            computed = seals.seal_frame(
                number, kind, self.layout(layout)[1], parts, digests, payload
            )
        except _MALFORMED as error:
            if isinstance(error, TraceReadError):
                raise
            computed = b""
        if computed != seal:
            kinds, place = self.steps[step].frames, schema.row_place(number)[1]
            name = kinds[place] if place < len(kinds) else _shown(kind)
            raise corrupt(self.path, f"step {step}, {name} frame", "does not match its seal")

    def _missing(self, step: int, rows: list[FrameRow]) -> TraceReadError:
        there = {schema.row_place(row[0])[1] for row in rows}
        kinds = self.steps[step].frames
        gone = [kind for place, kind in enumerate(kinds) if place not in there]
        if gone:
            return corrupt(self.path, f"step {step}, {' and '.join(gone)} frame", "is missing")
        return corrupt(self.path, f"step {step}", "has another number of rows than it lists")

    def _read_documents(self) -> dict[str, tuple[bytes, bytes]]:
        documents = {}
        for raw_name, text, seal in self._connection.execute("SELECT * FROM documents"):
            name = _shown(raw_name)
            try:
                matches = seals.seal_document(name, text) == seal
            except _MALFORMED:
                matches = False
            if not matches:
                raise corrupt(self.path, f"the {name} record", "does not match its seal")
            documents[name] = (text, seal)
        if schema.MANIFEST not in documents:
            raise corrupt(self.path, "the manifest record", "is missing")
        return documents

    def _read_steps(self, chain: bytes) -> tuple[list[StepRecord], bytes]:
        steps: list[StepRecord] = []
        for row in self._connection.execute(_SELECT_STEPS):
            number = len(steps)
            if row[0] != number:
                raise corrupt(self.path, f"step {number}", f"is missing; step {row[0]} follows")
            try:
                matches = seals.seal_step(row[:-1], chain) == row[-1]
                step = self._to_step(row) if matches else None
            except _MALFORMED:
                step = None
            if step is None:
                raise corrupt(self.path, f"step {number}, step record", "does not match its seal")
            chain = row[-1]
            steps.append(step)
            self._frame_seals.append(row[-2])
        return steps, chain

    def _to_step(self, row: tuple[Any, ...]) -> StepRecord:
        names = row[9]
        kinds = self._kinds.get(names)
        if kinds is None:
            kinds = self._kinds[names] = tuple(
                schema.KINDS[name] for name in names.split(b",") if name
            )
        ids = row[2]
        return StepRecord(
            row[0],
            row[1],
            struct.unpack(f"<{len(ids) // 8}q", ids),
            row[3],
            struct.unpack("<2d", row[4]),
            struct.unpack("<2q", row[5]),
            row[6],
            row[7].decode(),
            row[8].decode(),
            kinds,
        )

    def _read_closing(self, document: tuple[bytes, bytes] | None, chain: bytes) -> Closing:
        count = len(self.steps)
        if document is None:
            reason = (
                f"recording was interrupted after step {count - 1}"
                if count
                else "recording was interrupted before step 0"
            )
            return Closing(complete=False, stop_reason=reason, steps=count)
        stored = json.loads(document[0])
        if stored["steps"] > count:
            raise corrupt(
                self.path,
                f"step {count}",
                f"is missing; the closing record counts {stored['steps']}",
            )
        if stored["steps"] < count or stored["chain"] != chain.hex():
            raise corrupt(self.path, "the closing record", "does not fit the steps")
        return Closing(
            complete=stored["complete"],
            stop_reason=stored["stop_reason"],
            steps=stored["steps"],
            text=stored["text"],
            piece_texts=tuple(stored["piece_texts"]),
            prompt_piece_texts=tuple(stored["prompt_piece_texts"]),
            not_observed=tuple(stored["not_observed"]),
        )

    def _read_layout(self, number: int) -> tuple[Layout, bytes]:
        row = f"layout {_shown(number)}"
        try:
            found = self._connection.execute(
                "SELECT json, seal FROM layouts WHERE id = ?", (number,)
            ).fetchone()
            if found is None:
                raise corrupt(self.path, row, "is missing")
            text, seal = found
            if seals.seal_layout(text) == seal:
                return Layout.from_json(json.loads(text)), seal
        except READ_FAILURES as error:
            raise corrupt(self.path, row, f"cannot be read ({error})") from error
        except _MALFORMED as error:
            if isinstance(error, TraceReadError):
                raise
        raise corrupt(self.path, row, "does not match its seal")


def open_trace(path: str | Path) -> Trace:
    """Open a trace file.

    Raises:
        TraceReadError: not a readable trace.
        TraceVersionError: written under another schema version.
        TraceCorruptError: a row does not match its seal, or is missing.
    """
    return Trace(TraceReader(path))


def _digest_tensor(digests: bytes | None) -> Tensor | None:
    if digests is None:
        return None
    if not digests:
        return torch.empty((0, 2), dtype=torch.int64)
    return torch.frombuffer(bytearray(digests), dtype=torch.int64).view(-1, 2)


def _shown(text: object) -> str:
    """Return a text column, damaged or not, for a message."""
    return text.decode(errors="replace") if isinstance(text, bytes) else str(text)
