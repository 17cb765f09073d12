"""Writing a trace file while an execution runs: one transaction per step, in a thread of its own.

The calling thread only hands a step over. The writer thread waits for the step's bytes (an asynchronous copy from a
device, for example), seals them and commits. A step is acknowledged once its transaction is committed; at most
``queue_steps`` steps are handed over and not yet acknowledged, and a kill loses no more than those.
"""

from __future__ import annotations

import json
import os
import queue
import sqlite3
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from fliptrace.errors import FliptraceError, InputError, StorageError
from fliptrace.manifest import Manifest
from fliptrace.store import schema, seals
from fliptrace.store.creation import reserve
from fliptrace.trace import Closing, Frame, Layout, StepRecord

Frames = Sequence[Frame]
Assemble = Callable[[], tuple[StepRecord, Frames]]
Wait = Callable[[], None]
_Job = tuple[StepRecord | None, "Frames | Assemble", "Wait | None"]

#: Layout objects remembered by identity, so that a layout is turned into text once, not once per step.
_REMEMBERED_LAYOUTS = 256
#: Pages in the write-ahead log before they are moved into the file.
_CHECKPOINT_PAGES = 256


class TraceWriter:
    """Writes one trace.

    Use it as a context manager: leaving it by an exception, or without close(), marks the trace as incomplete.
    """

    def __init__(self, path: str | Path, manifest: Manifest, *, queue_steps: int = 2) -> None:
        """Create the file, readable by its owner only, and store the manifest.

        Args:
            path: where; nothing may be there yet.
            manifest: what runs.
            queue_steps: how many steps may be handed over and not yet acknowledged; at least 1.

        Raises:
            InputError: the path exists or its folder does not, or the manifest is not JSON.
            StorageError: the file cannot be created.
        """
        if queue_steps < 1:
            raise InputError(f"queue_steps must be at least 1; got {queue_steps}")
        self.path = Path(path)
        self._acknowledged = -1
        self._next = 0
        self._counts = {"frames": 0, "payload_bytes": 0}
        self._failure: Exception | None = None
        self._closed = False
        self._layout_ids: dict[bytes, int] = {}
        self._layout_cache: dict[int, tuple[Layout, int, bytes]] = {}
        text = _manifest_text(manifest)
        self._chain = seals.seal_document(schema.MANIFEST, text)
        self._connection = _create(self.path)
        try:
            self._start(text)
        except sqlite3.Error as error:
            self._connection.close()
            raise self._storage_error(error) from error
        self._slots: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(queue_steps):
            self._slots.put(None)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._work, name=f"trace writer {self.path.name}", daemon=True
        )
        self._thread.start()

    @property
    def acknowledged(self) -> int:
        """The last step that is committed; -1 before the first. Buffers of steps up to it may be used again."""
        return self._acknowledged

    def write_step(
        self,
        step: StepRecord | None,
        frames: Frames | Assemble,
        wait: Wait | None = None,
    ) -> None:
        """Hand a step over to the writer thread; blocks while ``queue_steps`` steps are not acknowledged.

        Args:
            step: the next step; None when ``frames`` is a callable.
            frames: the step's frames in the order of ``step.frames``, or a callable that returns step and frames; it
                runs in the writer thread. Payloads must not change until the step is acknowledged.
            wait: called in the writer thread before ``frames`` is called and before payloads are read.

        Raises:
            StorageError: an earlier step could not be written. Steps up to ``acknowledged`` are stored.
            InputError: an earlier step did not fit its description, or the writer is closed.
        """
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise InputError(f"{self.path} is closed; steps are written before close()")
        self._slots.get()
        self._jobs.put((step, frames, wait))

    def close(self, closing: Closing) -> None:
        """Write what is queued and the closing record, and leave one file.

        Args:
            closing: how the execution ended; its ``steps`` is replaced by the number of acknowledged steps.

        Raises:
            StorageError: something could not be written; acknowledged steps stay readable.
        """
        if self._closed:
            return
        self._finish_thread()
        try:
            if self._failure is not None:
                raise self._failure
            self._seal_file(closing)
        finally:
            self._connection.close()
        self._synchronise()

    def abandon(self, reason: str) -> None:
        """Close after a failure: what is acknowledged stays, marked as incomplete. Raises nothing about storage.

        Args:
            reason: why recording ended early; becomes the closing record's ``stop_reason``.
        """
        try:
            self.close(Closing(complete=False, stop_reason=reason, steps=0))
        except (FliptraceError, OSError):
            # The caller is handling the failure that matters; the file reads as interrupted without a closing record.
            return

    def __enter__(self) -> TraceWriter:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Abandon the trace unless it was closed."""
        if error is None:
            self.abandon("the recording ended without a closing record")
        else:
            self.abandon(f"{type(error).__name__}: {error}")

    # In the writer thread.

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._failure is None:
                try:
                    self._write(*job)
                except FliptraceError as error:
                    self._failure = error
                except Exception as error:  # noqa: BLE001 - the calling thread must hear of it
                    self._failure = self._storage_error(error)
            del job
            self._slots.put(None)

    def _write(self, step: StepRecord | None, frames: Frames | Assemble, wait: Wait | None) -> None:
        if wait is not None:
            wait()
        if callable(frames):
            step, frames = frames()
        if step is None:
            raise InputError("write_step got no step record; give one, or a callable as frames")
        self._check_step(step, frames)
        execute = self._connection.execute
        known_layouts = len(self._layout_ids)
        execute("BEGIN IMMEDIATE")
        try:
            columns = step_columns(step, self._insert_frames(frames))
            seal = seals.seal_step(columns, self._chain)
            execute(schema.INSERT_STEP, (*columns, seal))
            execute("COMMIT")
        except BaseException:
            self._forget_layouts(known_layouts)
            if self._connection.in_transaction:
                execute("ROLLBACK")
            raise
        self._chain = seal
        self._counts["frames"] += len(frames)
        self._counts["payload_bytes"] += sum(frame.layout.size_bytes for frame in frames)
        self._next = step.step + 1
        self._acknowledged = step.step

    def _check_step(self, step: StepRecord, frames: Frames) -> None:
        if step.step != self._next:
            raise InputError(
                f"{self.path}: step {self._next} must be written next; got step {step.step}"
            )
        if tuple(frame.kind.value for frame in frames) != tuple(map(str, step.frames)):
            raise InputError(
                f"{self.path}: step {step.step} lists frames {', '.join(step.frames) or 'none'}; "
                f"got {', '.join(frame.kind for frame in frames) or 'none'}"
            )
        if len(set(step.frames)) != len(step.frames):
            raise InputError(
                f"{self.path}: step {step.step} has several frames of one kind: {', '.join(step.frames)}"
            )
        for frame in frames:
            size = memoryview(frame.payload).nbytes
            if frame.step != step.step or size != frame.layout.size_bytes:
                raise InputError(
                    f"{self.path}: step {step.step}, {frame.kind} frame: its layout takes {frame.layout.size_bytes} "
                    f"bytes; got {size} bytes of step {frame.step}"
                )
            if frame.digests is not None and frame.digests.shape != (len(frame.layout.entries), 2):
                raise InputError(
                    f"{self.path}: step {step.step}, {frame.kind} frame: digests must have shape "
                    f"[{len(frame.layout.entries)}, 2]; got {list(frame.digests.shape)}"
                )

    def _insert_frames(self, frames: Frames) -> bytes:
        """Insert the rows of all frames; returns their seals, joined."""
        rows: list[tuple[Any, ...]] = []
        row_seals, size = [], 0
        for place, frame in enumerate(frames):
            layout, layout_seal = self._layout(frame.layout)
            kind = frame.kind.value.encode()
            digests = (
                None if frame.digests is None else frame.digests.contiguous().numpy().tobytes()
            )
            payload = memoryview(frame.payload).cast("B")
            parts = max(1, -(-len(payload) // schema.PART_BYTES))
            for part in range(parts):
                number = schema.row_number(frame.step, place, part)
                piece = payload[part * schema.PART_BYTES : (part + 1) * schema.PART_BYTES] or b""
                row_seals.append(seals.seal_frame(number, kind, layout_seal, parts, digests, piece))
                rows.append((number, kind, layout, parts, digests, piece))
                digests = None
                size += len(piece)
                if len(rows) == schema.INSERTED_TOGETHER or size >= schema.INSERTED_BYTES:
                    self._insert_rows(rows)
                    rows, size = [], 0
        if rows:
            self._insert_rows(rows)
        return b"".join(row_seals)

    def _insert_rows(self, rows: Sequence[tuple[Any, ...]]) -> None:
        self._connection.execute(
            schema.INSERT_FRAMES + ", ".join([schema.INSERT_FRAME_ROW] * len(rows)),
            [value for row in rows for value in row],
        )

    def _layout(self, layout: Layout) -> tuple[int, bytes]:
        known = self._layout_cache.get(id(layout))
        if known is not None:
            return known[1], known[2]
        text = json.dumps(layout.to_json(), separators=(",", ":")).encode()
        seal = seals.seal_layout(text)
        number = self._layout_ids.get(seal)
        if number is None:
            number = len(self._layout_ids)
            self._connection.execute(schema.INSERT_LAYOUT, (number, text, seal))
            self._layout_ids[seal] = number
        if len(self._layout_cache) >= _REMEMBERED_LAYOUTS:
            self._layout_cache.clear()
        # The layout itself is kept with its identity, which could be given to another object otherwise.
        self._layout_cache[id(layout)] = (layout, number, seal)
        return number, seal

    def _forget_layouts(self, known: int) -> None:
        self._layout_ids = {
            seal: number for seal, number in self._layout_ids.items() if number < known
        }
        self._layout_cache.clear()

    # In the calling thread, while no writer thread runs.

    def _start(self, manifest: bytes) -> None:
        execute = self._connection.execute
        execute(f"PRAGMA page_size = {schema.PAGE_BYTES}")
        execute("PRAGMA journal_mode = WAL")
        # A killed process loses nothing by this, a power cut may: see the decision log.
        execute("PRAGMA synchronous = OFF")
        execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        execute("PRAGMA cache_size = -4096")
        execute("BEGIN IMMEDIATE")
        execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
        execute(f"PRAGMA user_version = {schema.USER_VERSION}")
        for table in schema.TABLES.values():
            execute(table)
        execute(schema.INSERT_DOCUMENT, (schema.MANIFEST, manifest, self._chain))
        execute("COMMIT")

    def _finish_thread(self) -> None:
        self._closed = True
        self._jobs.put(None)
        self._thread.join()

    def _seal_file(self, closing: Closing) -> None:
        document = {
            **asdict(replace(closing, steps=self._acknowledged + 1)),
            "frames": self._counts["frames"],
            "layouts": len(self._layout_ids),
            "payload_bytes": self._counts["payload_bytes"],
            "chain": self._chain.hex(),
        }
        text = json.dumps(document, sort_keys=True).encode()
        try:
            self._connection.execute(
                schema.INSERT_DOCUMENT,
                (schema.CLOSING, text, seals.seal_document(schema.CLOSING, text)),
            )
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._connection.execute("PRAGMA journal_mode = DELETE").fetchall()
        except sqlite3.Error as error:
            raise self._storage_error(error) from error

    def _synchronise(self) -> None:
        try:
            for path in (self.path, self.path.parent):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except OSError as error:
            raise self._storage_error(error) from error

    def _storage_error(self, error: Exception) -> StorageError:
        cause = str(error) or type(error).__name__
        if not isinstance(error, sqlite3.Error | OSError):
            cause = f"{type(error).__name__}: {cause}"
        kept = (
            "no step is stored"
            if self._acknowledged < 0
            else f"steps 0 to {self._acknowledged} are stored and stay readable"
        )
        return StorageError(
            f"{self.path}: the trace could not be written ({cause}); {kept}. Make room or choose another folder, "
            "then record again"
        )


def step_columns(step: StepRecord, frame_seals: bytes) -> seals.StepColumns:
    """Return a step as it is stored, without its own seal.

    Logits go in as 64-bit floats in a blob: a REAL column would lose the sign of zero and turn NaN into NULL.
    """
    return (
        step.step,
        step.first_position,
        struct.pack(f"<{len(step.token_ids)}q", *step.token_ids),
        step.chosen,
        struct.pack("<2d", *step.top_values),
        struct.pack("<2q", *step.top_ids),
        step.tied,
        step.cache_digest.encode(),
        step.cache_digest_full.encode(),
        ",".join(step.frames).encode(),
        frame_seals,
    )


def _manifest_text(manifest: Manifest) -> bytes:
    try:
        return manifest.to_json().encode()
    except (TypeError, ValueError) as error:
        raise InputError(
            f"a manifest holds JSON values in valid Unicode; this one does not ({error})"
        ) from error


def _create(path: Path) -> sqlite3.Connection:
    for leftover in (Path(f"{path}-wal"), Path(f"{path}-journal")):
        if leftover.exists():
            # SQLite would take it for a part of the new file.
            raise InputError(
                f"{leftover} is left over from another trace. Choose another path or move it away"
            )
    reserve(path)
    try:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise StorageError(
            f"{path} could not be created ({error}). Choose another folder"
        ) from error
