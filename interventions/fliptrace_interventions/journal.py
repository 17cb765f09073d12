"""What a search has already found, one line per finished run, so that a killed search goes on where it was.

A line is keyed by the content of what was asked: the fingerprints of both traces, the reduction, the machine, the
edits, the direction. A changed trace, reduction or edit is another question, so an old line never answers it. Lines
are appended whole and each carries a checksum: a line torn by a kill, or damaged later, is no answer, and its run is
done again.
Results are stored, not decisions: a search that goes on makes every decision anew from the same answers.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fliptrace.errors import InputError, StorageError
from fliptrace.judgements import SCHEMA_VERSION

#: The version of the lines' meaning. It is part of every key, as is that of the values in them: lines of another
#: version answer nothing.
JOURNAL_VERSION = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished piece of work.

    Attributes:
        what: ``screen``, ``prove``, ``reconstruct`` …, for people who read the file.
        value: the result, as JSON.
        runs: how many runs it took.
        forwards: how many forward passes, those of unedited arms that ran for it included.
        seconds: how long it took when it ran.
    """

    what: str
    value: Any
    runs: int
    forwards: int
    seconds: float


_FIELDS = len(dataclasses.fields(Entry))


def content_key(question: Mapping[str, Any]) -> str:
    """Return the key of a question: 32 hexadecimal digits over its canonical JSON."""
    text = json.dumps([JOURNAL_VERSION, SCHEMA_VERSION, question], sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Journal:
    """Finished runs by key, in memory or also in a file.

    Attributes:
        path: the file, None in memory.
        unreadable_lines: lines of the file that were torn or damaged when it was opened; their runs are done again.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        """Open a journal and read what it holds.

        Args:
            path: a JSON lines file, made when it is not there; None keeps the journal in memory.

        Raises:
            InputError: another process has it open, or it is a folder.
            StorageError: it cannot be read or written.
        """
        self.path = None if path is None else Path(path)
        self.unreadable_lines = 0
        self._entries: dict[str, Entry] = {}
        self._file: int | None = None
        if self.path is not None:
            self._open(self.path)

    def _open(self, path: Path) -> None:
        if path.is_dir():
            raise InputError(f"a journal is a file; {path} is a folder, name a file in it")
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise StorageError(f"journal {path} cannot be opened ({error})") from error
        try:
            # Two searches would both do what neither has written yet. The lock ends with the process.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            data = path.read_bytes()
            if data and not data.endswith(b"\n"):
                os.write(file, b"\n")  # a torn line ends here, so that the next one is whole
        except BlockingIOError as error:
            os.close(file)
            raise InputError(
                f"journal {path} is in use by another search; wait for it, or name another journal"
            ) from error
        except OSError as error:
            os.close(file)
            raise StorageError(f"journal {path} cannot be read ({error})") from error
        self._file = file
        for line in data.split(b"\n"):
            self._read(line)

    def _read(self, line: bytes) -> None:
        if not line.strip():
            return
        read = _parsed(line)
        if read is None:
            self.unreadable_lines += 1
        else:
            self._entries[read[0]] = read[1]

    def get(self, key: str) -> Entry | None:
        """Return what is known under a key, None when the run is still to be done."""
        return self._entries.get(key)

    def put(self, key: str, entry: Entry) -> Entry:
        """Keep a finished run; return it as it will be read back.

        Raises:
            StorageError: it cannot be written.
        """
        line = _line(key, entry)
        if self._file is not None:
            try:
                _write_whole(self._file, line + b"\n")
            except OSError as error:
                raise StorageError(
                    f"journal {self.path} cannot be written ({error}); what it held before is kept"
                ) from error
        self._read(line)
        return self._entries[key]

    def forget(self) -> None:
        """Drop every finished run, in the file, too. Nobody else has it open: an open journal is locked.

        Raises:
            StorageError: it cannot be written.
        """
        if self._file is not None:
            try:
                os.ftruncate(self._file, 0)
            except OSError as error:
                raise StorageError(f"journal {self.path} cannot be emptied ({error})") from error
        self._entries.clear()
        self.unreadable_lines = 0

    def __len__(self) -> int:
        """How many finished runs it holds."""
        return len(self._entries)

    def close(self) -> None:
        """Close the file and let another search have it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Journal:
        """Close on leaving."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()


def _line(key: str, entry: Entry) -> bytes:
    fields = [key, entry.what, entry.value, entry.runs, entry.forwards, entry.seconds]
    content = json.dumps(fields, allow_nan=False, sort_keys=True)
    return f"{_checksum(content.encode())} {content}".encode()


def _parsed(line: bytes) -> tuple[str, Entry] | None:
    checksum, _, content = line.partition(b" ")
    if checksum.decode("latin-1") != _checksum(content):
        return None
    key, *fields = json.loads(content)
    return (key, Entry(*fields)) if len(fields) == _FIELDS else None


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _write_whole(file: int, line: bytes) -> None:
    written = os.write(file, line)
    while written < len(line):
        written += os.write(file, line[written:])
