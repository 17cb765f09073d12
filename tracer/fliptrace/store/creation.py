"""Creating files that only their owner may read and that never replace another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fliptrace.errors import FliptraceError, InputError, StorageError


def reserve(path: Path) -> None:
    """Create an empty file, mode 0600.

    Raises:
        InputError: the path exists, or its folder does not.
        StorageError: the file cannot be created.
    """
    if not path.parent.is_dir():
        raise InputError(
            f"{path} needs a folder that exists; {path.parent} is none. Create it first"
        )
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError as error:
        raise InputError(
            f"{path} exists and is not replaced. Choose another path or move it away"
        ) from error
    except OSError as error:
        raise StorageError(
            f"{path} could not be created ({error.strerror or error}). Choose another folder"
        ) from error


@contextmanager
def create_private(path: Path) -> Iterator[str]:
    """Reserve a path, yield it for a library to write to, and remove it again when that fails."""
    reserve(path)
    try:
        yield str(path)
        # Libraries that write beside the path and rename bring their own permissions.
        path.chmod(0o600)
    except FliptraceError:
        path.unlink(missing_ok=True)
        raise
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StorageError(
            f"{path} could not be written ({error}). Make room, then repeat"
        ) from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise
