"""The folder of a study: rows that survive a kill, who made them, and one writer at a time.

    study.json        the settings on which every row depends, and the hashes of model and adapter
    rows.jsonl        one finished item per line, each written whole and synced before the next begins
    sittings.jsonl    one line per worker and sitting: environment, model, adapter, reduction and kernels as read there
    timings.jsonl     which sitting and worker ran which item, and how long it took

A kill can leave half a line at the end of a file; it is cut off when the folder is opened again, and its
item runs again. Anything else that is wrong is refused by line, never skipped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from fliptrace.errors import InputError, StorageError, TraceReadError
from fliptrace.studies.items import Item, Row, row_line

STUDY_NAME, ROWS_NAME, SITTINGS_NAME, TIMINGS_NAME = (
    "study.json",
    "rows.jsonl",
    "sittings.jsonl",
    "timings.jsonl",
)
#: Sections of a worker's description whose hashes must be the same in all sittings.
_ARTIFACTS = ("model.sha256", "model.dtype", "adapter.sha256", "adapter.scaling_sha256")


class Journal:
    """An open study folder; use it as a context.

    Attributes:
        folder: where it is.
        rows: the finished rows by item id, in the order of the file.
        sitting: the number of this sitting, from 1.
        sittings: descriptions of workers, of earlier sittings too.
    """

    def __init__(self, folder: str | Path, identity: Mapping[str, Any]) -> None:
        """Open or create a study's folder.

        Args:
            folder: a new folder, or one that a study with the same identity has begun.
            identity: the settings on which every row depends; JSON values.

        Raises:
            InputError: the folder holds something else, another study, or another process writes to it.
            StorageError: it cannot be written.
            TraceReadError: a line in it is damaged.
        """
        self.folder = Path(folder)
        self._identity = json.loads(json.dumps(dict(identity)))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise StorageError(
                f"study folder {self.folder} cannot be used ({error}); name another"
            ) from error
        try:
            self._take()
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another process is writing to the study in {self.folder}; wait for it, or name another folder"
            ) from error

    def _open(self) -> None:
        study = self.folder / STUDY_NAME
        if not study.exists():
            strangers = sorted(path.name for path in self.folder.iterdir())
            if strangers:
                raise InputError(
                    f"study folder {self.folder} must be new, empty or hold {STUDY_NAME}; it holds {strangers[0]!r}"
                )
            self._write_study({"settings": self._identity, "artifacts": None})
        self.rows = {row["item"]: row for row in self._read(ROWS_NAME)}
        if not self.rows and self._study()["artifacts"] is None:
            # No engine got as far as a first item (no such device, say): nothing here depends on the settings.
            self._write_study({"settings": self._identity, "artifacts": None})
        self._check_identity()
        self.sittings = self._read(SITTINGS_NAME)
        self._read(TIMINGS_NAME)  # cuts a torn line off
        self.sitting = 1 + max((entry["sitting"] for entry in self.sittings), default=0)

    def _check_identity(self) -> None:
        before = self._study()["settings"]
        for name in sorted({*before, *self._identity}):
            if before.get(name) != self._identity.get(name):
                raise InputError(
                    f"the study in {self.folder} was begun with {name} = {before.get(name)!r}; got "
                    f"{self._identity.get(name)!r}. Give the same settings to go on, or a new folder"
                )

    def check_items(self, items: Sequence[Item]) -> None:
        """Refuse items of which the folder holds a row that came of other arguments.

        Raises:
            InputError: which item.
        """
        for item in items:
            row = self.rows.get(item.id)
            if row is not None and row["key"] != item.key:
                raise InputError(
                    f"{self.folder} has a row of {item.id!r} that came of other work (key {row['key']}, now "
                    f"{item.key}): the prompts or options behind it were changed. Name a new folder"
                )

    def add_worker(self, worker: str, description: Mapping[str, Any], command: str) -> None:
        """Keep what a worker reads about itself, before it runs its first item.

        Raises:
            InputError: its model or adapter is not that of the earlier sittings.
            StorageError: it cannot be written.
        """
        study = self._study()
        artifacts = {name: _at(description, name) for name in _ARTIFACTS}
        if study["artifacts"] is None:
            self._write_study({**study, "artifacts": artifacts})
        elif study["artifacts"] != artifacts:
            odd = next(
                name for name in _ARTIFACTS if study["artifacts"].get(name) != artifacts[name]
            )
            raise InputError(
                f"the study in {self.folder} was begun with {odd} = {study['artifacts'].get(odd)}; worker {worker} has "
                f"{artifacts[odd]}. Give the same model and adapter, or a new folder"
            )
        entry = {
            "sitting": self.sitting,
            "worker": worker,
            "command": command,
            "description": dict(description),
        }
        self._append(SITTINGS_NAME, row_line(entry))
        self.sittings.append(entry)

    def add(self, row: Row, worker: str, seconds: float) -> None:
        """Keep a finished row; when this returns, no kill can lose it.

        Raises:
            StorageError: it cannot be written.
        """
        timing = {
            "item": row["item"],
            "sitting": self.sitting,
            "worker": worker,
            "seconds": round(seconds, 3),
        }
        self._append(ROWS_NAME, row_line(row))
        self._append(TIMINGS_NAME, row_line(timing), sync=False)
        self.rows[row["item"]] = row

    def put_in_order(self, items: Sequence[Item]) -> None:
        """Bring the rows of workers into the order of the items; rows of no item follow as they are.

        Raises:
            StorageError: they cannot be written.
        """
        wanted = [item.id for item in items if item.id in self.rows]
        known = set(wanted)
        order = [*wanted, *(name for name in self.rows if name not in known)]
        if order != list(self.rows):
            self.rows = {name: self.rows[name] for name in order}
            text = "".join(map(row_line, self.rows.values()))
            replace_file(self.folder / ROWS_NAME, text)

    def _study(self) -> dict[str, Any]:
        path = self.folder / STUDY_NAME
        try:
            found = json.loads(path.read_text("utf-8"))
            return {"settings": dict(found["settings"]), "artifacts": found["artifacts"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TraceReadError(
                f"{path} cannot be read as a study's settings ({error})"
            ) from error

    def _write_study(self, value: Mapping[str, Any]) -> None:
        replace_file(self.folder / STUDY_NAME, json.dumps(value, indent=1) + "\n")

    def _read(self, name: str) -> list[dict[str, Any]]:
        """Read a file of lines; what follows the last line feed was being written when a kill came, and is cut off."""
        path = self.folder / name
        if not path.exists():
            return []
        try:
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data):
                with path.open("r+b") as file:
                    file.truncate(len(whole))
                    os.fsync(file.fileno())
        except OSError as error:
            raise StorageError(f"{path} cannot be read or mended ({error})") from error
        rows: list[dict[str, Any]] = []
        seen: set[str] = set()
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
                named = name != ROWS_NAME or (row["item"] not in seen and bool(row["key"]))
            except (ValueError, KeyError, TypeError):
                named = False
            if not named or not isinstance(row, dict):
                raise TraceReadError(
                    f"{path}, line {number} is damaged or doubled; restore it, or remove the line so that its item "
                    "runs again"
                )
            seen.add(row.get("item", ""))
            rows.append(row)
        return rows

    def _append(self, name: str, line: str, *, sync: bool = True) -> None:
        path = self.folder / name
        try:
            new = not path.exists()
            with path.open("ab") as file:
                file.write(line.encode())
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            if new:
                os.fsync(self._lock)  # the file's name, too
        except OSError as error:
            raise StorageError(
                f"{path} could not be written ({error}); rows before this one are kept. Make room, then run again"
            ) from error

    def __enter__(self) -> Journal:
        """Close on leaving."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let another process write."""
        os.close(self._lock)


def half_of(path: Path) -> Path:
    """Return where a file is written before it takes its place; a kill may leave it there."""
    return path.with_name(f".{path.name}.new")


@contextlib.contextmanager
def replacing(path: Path, *, make_folder: bool = False) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` when it is whole and synced, or not at all.

    Args:
        path: the file.
        make_folder: make the folder that it lies in, too.

    Raises:
        StorageError: it cannot be written.
    """
    scratch = half_of(path)
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        raise StorageError(
            f"{path} could not be written ({error}); make room, then run again"
        ) from error


def replace_file(path: Path, text: str) -> None:
    """Write a text file whole or not at all.

    Raises:
        StorageError: it cannot be written.
    """
    with replacing(path) as file:
        file.write(text.encode())


def _at(description: Mapping[str, Any], dotted: str) -> Any:
    section, _, name = dotted.partition(".")
    return description.get(section, {}).get(name)
