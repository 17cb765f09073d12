"""The folder in which a run writes before its results are complete; it becomes the output folder in one step."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fliptrace.errors import InputError, ObserverEffectError, RecordingError, StorageError
from fliptrace.pair.pair import move_into_place


@contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """Make ``.NAME.partial`` beside the output folder; on leaving without an error it takes that folder's place.

    An error removes it and every parent that was made for it. Where the disk was full, the results could not be
    moved, or an execution ended before its time, it stays with what was recorded, and the error says where.

    Raises:
        InputError: it is left from an interrupted run.
        RecordingError: an execution could not be recorded to its end.
        StorageError: it cannot be made, or something in it not be written.
    """
    out = out.resolve()
    partial = out.parent / f".{out.name}.partial"
    if partial.exists():
        raise InputError(
            f"{partial} is left from an interrupted run; trace-diff can read its traces. Move or remove it first"
        )
    made = [folder for folder in (out.parent, *out.parent.parents) if not folder.exists()]
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        _remove_empty(made)
        raise StorageError(
            f"output folder {out} cannot be made ({error}); name one that can be written"
        ) from error
    try:
        yield partial
        move_into_place(partial, out)
    except OSError as error:
        if any(partial.rglob("*.trace")):
            raise StorageError(f"{error}; what was recorded is in {partial}") from error
        _remove(partial, made)
        raise StorageError(str(error)) from error
    except RecordingError as error:
        if isinstance(error, ObserverEffectError) or not any(partial.rglob("*.trace")):
            _remove(partial, made)
            raise
        raise RecordingError(f"{error}. What was recorded is in {partial}") from error
    except BaseException:
        _remove(partial, made)
        raise


def _remove(partial: Path, made: list[Path]) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    _remove_empty(made)


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, the deepest first, as long as they are empty."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
