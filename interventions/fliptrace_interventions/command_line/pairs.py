"""The folder that a user names: a pair in it, a copy of it elsewhere, and the claims that edit files make."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fliptrace.errors import InputError, StorageError
from fliptrace.pair import Pair, load_pair
from fliptrace.pair.pair import (
    CANDIDATE_NAME,
    REFERENCE_NAME,
    move_into_place,
    require_new,
)
from fliptrace.store import copy_trace
from fliptrace_interventions.edits import Edit, edits_from_json

#: Finished runs of a search, beside the pair.
JOURNAL_NAME = "interventions.jsonl"
#: A file of edits is read whole; one for every element of a large cache stays below this.
_LARGEST_EDITS = 64 * 2**20
#: A range of more layers than any model has is a slip.
_MOST_LAYERS = 10_000


def open_pair(folder: Path) -> Pair:
    """Open a folder that trace-pair wrote.

    Raises:
        InputError: there is no such folder, or it holds no pair.
        TraceReadError: a trace cannot be read.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise InputError(f"a folder that trace-pair wrote was expected; {folder} {what}")
    missing = [name for name in (REFERENCE_NAME, CANDIDATE_NAME) if not (folder / name).is_file()]
    if missing:
        several = sorted(path.parent for path in folder.glob(f"*/{REFERENCE_NAME}"))
        hint = (
            f"it holds several pairs, name one of them, such as {several[0]}"
            if several
            else "name a folder that trace-pair wrote"
        )
        raise InputError(f"{folder} is no pair: it has no {' and no '.join(missing)}; {hint}")
    return load_pair(folder)


def copy_pair(source: Path, target: Path) -> None:
    """Copy a pair's two traces into a new folder, in one step.

    Raises:
        InputError: the target is not new.
        StorageError: it cannot be written.
    """
    require_new(target)
    target = target.resolve()
    scratch: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        for name in (REFERENCE_NAME, CANDIDATE_NAME):
            copy_trace(source / name, scratch / name)
        scratch.chmod(0o755)
        move_into_place(scratch, target)
    except OSError as error:
        raise StorageError(f"the pair could not be copied to {target} ({error})") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)  # gone already when all went well


def require_writable(folder: Path) -> None:
    """Find out before minutes of work whether the report can be written.

    Raises:
        StorageError: it cannot.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StorageError(
            f"the report in {folder} could not be rewritten ({error}); name a new folder with --out, which gets a "
            "copy of the pair"
        ) from error


def claims_from_files(paths: Sequence[Path]) -> list[tuple[Edit, ...]]:
    """Read files of edits; each file is one claim.

    Raises:
        InputError: a file cannot be read, or holds no edits; the message names file and entry.
    """
    return [_claim(path) for path in paths]


def _claim(path: Path) -> tuple[Edit, ...]:
    try:
        if path.stat().st_size > _LARGEST_EDITS:
            raise InputError(f"edits {path}: {path.stat().st_size:,} bytes are too many")
        document = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"edits {path} cannot be read ({error})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"edits {path} are no JSON ({error})") from error
    try:
        return edits_from_json(document)
    except InputError as error:
        raise InputError(f"edits {path}: {error}") from error


def layer_numbers(text: str | None) -> tuple[int, ...] | None:
    """Read layers: numbers and ranges such as ``0,3-5``; None for all layers.

    Raises:
        InputError: they are written in another way.
    """
    if text is None:
        return None
    numbers: list[int] = []
    for word in text.replace(",", " ").split():
        first, separator, last = word.partition("-")
        if not first.isdecimal() or (separator and not last.isdecimal()):
            raise InputError(f"layers are numbers and ranges such as 0,3-5; got {text!r}")
        begin, end = int(first), int(last) if separator else int(first)
        if not 0 <= end - begin < _MOST_LAYERS:
            raise InputError(f"a range of layers runs from low to high; got {word!r}")
        numbers.extend(range(begin, end + 1))
    if not numbers:
        raise InputError(f"layers are numbers and ranges such as 0,3-5; got {text!r}")
    return tuple(dict.fromkeys(numbers))
