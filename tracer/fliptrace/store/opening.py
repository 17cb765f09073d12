"""Opening a trace file for reading, whatever state it was left in.

A closed trace is one file that never changes again, so it is opened as immutable: no locks, nothing created beside it.
A trace whose recording was killed has part of its content in a write-ahead log beside it (``-wal``). SQLite reads both
together but needs to create an index file (``-shm``) in the folder; where that is impossible (read-only media, a full
disk) both files are copied to a temporary folder first.
"""

from __future__ import annotations

import shutil
import sqlite3
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from fliptrace.errors import TraceCorruptError, TraceReadError, TraceVersionError
from fliptrace.store import schema

_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100
_WAL_VERSION = 2

#: What SQLite raises on a damaged file. It may ask for memory without bounds, and its messages quote damaged text.
READ_FAILURES = (sqlite3.Error, MemoryError, UnicodeDecodeError)


@dataclass(slots=True)
class OpenedFile:
    """A connection that reads a trace, and the temporary copy behind it where there is one."""

    connection: sqlite3.Connection
    copy: tempfile.TemporaryDirectory[str] | None = None

    def close(self) -> None:
        """Close the connection and remove the copy."""
        self.connection.close()
        if self.copy is not None:
            self.copy.cleanup()


def open_file(path: Path) -> OpenedFile:
    """Open a trace file read-only and check that it is one of this schema version.

    Raises:
        TraceReadError: missing, no permission, a folder, empty, truncated, or not a trace.
        TraceVersionError: written under another schema version.
        TraceCorruptError: the header or the tables are not as they were written.
    """
    header = _read_header(path)
    log = Path(f"{path}-wal")
    logged = log.exists() and log.stat().st_size > 0
    if not logged:
        _check_header(path, header)
    if logged or _WAL_VERSION in header[18:20]:
        opened = _open_with_log(path)
    else:
        opened = _open_closed(path)
    try:
        _check_tables(path, opened.connection)
    except BaseException:
        opened.close()
        raise
    return opened


def corrupt(path: Path | str, row: str, what: str) -> TraceCorruptError:
    """Return the error for a row that is not as it was written."""
    # SQLite quotes what it could not read, which may be long and of several lines.
    short = " ".join(what.split())[:200]
    return TraceCorruptError(
        f"{path}: {row} {short}. The file was damaged or changed after recording: use another copy, or record again"
    )


def _read_header(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise TraceReadError(f"{path} is not a file; give the path of a trace file")
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError as error:
        raise TraceReadError(
            f"{path} cannot be read ({error.strerror or error}); give the path of a trace file"
        ) from error
    if not header and not Path(f"{path}-wal").exists():
        raise TraceReadError(
            f"{path} is empty; it is no trace, or recording ended before it began. Record again"
        )
    if header and header[: len(_MAGIC)] != _MAGIC[: len(header)]:
        raise TraceReadError(f"{path} is not a trace file (not an SQLite database)")
    return header


def _check_header(path: Path, header: bytes) -> None:
    if len(header) < _HEADER_BYTES:
        raise TraceReadError(
            f"{path} is truncated: {len(header)} bytes, less than a header. Use another copy"
        )
    application, version = _number(header, 68), _number(header, 60)
    if application != schema.APPLICATION_ID:
        raise TraceReadError(f"{path} is not a trace file (an SQLite database of something else)")
    if version != schema.USER_VERSION:
        raise _version_error(path, version)
    page_bytes = int.from_bytes(header[16:18], "big")
    expected = _number(header, 28) * (65536 if page_bytes == 1 else page_bytes)
    size = path.stat().st_size
    if size < expected:
        raise TraceReadError(
            f"{path} is truncated: {size} of {expected} bytes are there. Use another copy, or record again"
        )


def _number(header: bytes, offset: int) -> int:
    return int.from_bytes(header[offset : offset + 4], "big")


def _version_error(path: Path, version: int) -> TraceVersionError:
    return TraceVersionError(
        f"{path} is a trace of schema version {version}; this fliptrace reads version {schema.USER_VERSION}. "
        f"Read it with a fliptrace that writes version {version}, or record again"
    )


def _connect(path: Path, options: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?{options}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.text_factory = bytes
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        connection.execute("PRAGMA query_only = ON")
        # Mapping the file was no faster, and a file cut short while it is read would end the process.
        connection.execute("PRAGMA mmap_size = 0")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def _open_closed(path: Path) -> OpenedFile:
    try:
        return OpenedFile(_connect(path, "mode=ro&immutable=1"))
    except READ_FAILURES as error:
        raise corrupt(path, "the header", f"cannot be understood ({error})") from error


def _open_with_log(path: Path) -> OpenedFile:
    try:
        return OpenedFile(_connect(path, "mode=ro"))
    except sqlite3.OperationalError as in_place:
        try:
            return _open_copy(path)
        except (OSError, sqlite3.Error) as error:
            raise TraceReadError(
                f"{path} was not closed and cannot be opened where it is ({in_place}) nor as a copy in "
                f"{tempfile.gettempdir()} ({error}). Copy it with its -wal file to a folder that can be written to"
            ) from error
    except READ_FAILURES as error:
        raise corrupt(path, "the file", f"cannot be opened ({error})") from error


def _open_copy(path: Path) -> OpenedFile:
    copy = tempfile.TemporaryDirectory(prefix="fliptrace-")
    try:
        for suffix in ("", "-wal"):
            source = Path(f"{path}{suffix}")
            if source.exists():
                shutil.copyfile(source, Path(copy.name) / f"trace{suffix}")
        return OpenedFile(_connect(Path(copy.name) / "trace", "mode=ro"), copy)
    except BaseException:
        copy.cleanup()
        raise


def _check_tables(path: Path, connection: sqlite3.Connection) -> None:
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        found = connection.execute("SELECT name, sql FROM sqlite_master").fetchall()
    except READ_FAILURES as error:
        raise corrupt(path, "the list of tables", f"cannot be read ({error})") from error
    if not found and not application:
        raise TraceReadError(f"{path} holds nothing; recording ended before it began. Record again")
    if application != schema.APPLICATION_ID:
        raise TraceReadError(f"{path} is not a trace file (an SQLite database of something else)")
    if version != schema.USER_VERSION:
        raise _version_error(path, version)
    expected = [(name.encode(), table.encode()) for name, table in schema.TABLES.items()]
    if found != expected:
        raise corrupt(path, "the list of tables", "is not that of a trace")
