"""Copying a trace, also one whose recording was killed and whose last steps lie in the log beside it."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from fliptrace.errors import StorageError
from fliptrace.store.creation import create_private, reserve
from fliptrace.store.opening import open_file


def copy_trace(path: Path, target: Path) -> None:
    """Copy a trace into one new file, what its log holds included.

    Args:
        path: a trace.
        target: where the copy goes; it must not exist.

    Raises:
        OSError: the trace cannot be read or the copy not be written.
        InputError: the target exists.
        StorageError: the copy cannot be written.
        TraceReadError: the trace was not closed and cannot be opened.
    """
    log = Path(f"{path}-wal")
    if not log.exists() or log.stat().st_size == 0:
        reserve(target)
        shutil.copy2(path, target)
        return
    opened = open_file(path)
    try:
        with create_private(target) as name, closing(sqlite3.connect(name)) as copy:
            opened.connection.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error as error:
        raise StorageError(f"{path} could not be copied to {target} ({error})") from error
    finally:
        opened.close()
