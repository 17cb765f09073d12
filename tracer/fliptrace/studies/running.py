"""Run a study: the items that have no row yet, here or on workers, within a budget; then write what they say."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fliptrace.errors import InputError
from fliptrace.studies.items import Item, Row
from fliptrace.studies.journal import STUDY_NAME, Journal
from fliptrace.studies.study import Report, Study

#: Called as progress(what, done, total).
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has loaded: its name and what it reads about itself."""

    worker: str
    description: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finished:
    """An item is done: its row, by whom, and in how many seconds."""

    row: Row
    worker: str
    seconds: float


#: Called before an item begins; False ends the sitting.
Continue = Callable[[], bool]
#: Runs items and tells of workers and rows as they come.
Executor = Callable[[Study, Sequence[Item], Continue], Iterator[WorkerReady | Finished]]


@dataclass(frozen=True)
class StudyResult:
    """What a sitting left.

    Attributes:
        folder: the study's folder.
        report: of all rows so far, of earlier sittings too.
        done: how many items have rows; total: how many there are; new: how many rows this sitting made.
    """

    folder: Path
    report: Report
    done: int
    total: int
    new: int

    @property
    def complete(self) -> bool:
        """True when every item has its row."""
        return self.done == self.total

    def to_json(self) -> dict[str, Any]:
        """Return what summary.json holds."""
        return {
            "complete": self.complete,
            "items": self.total,
            "finished": self.done,
            **self.report.summary,
        }


def run_here(
    study: Study, items: Sequence[Item], go_on: Continue
) -> Iterator[WorkerReady | Finished]:
    """Run items one after another in this process."""
    worker = study.open()
    yield WorkerReady("here", dict(worker.describe()))
    for item in items:
        if not go_on():
            return
        begin = time.monotonic()
        values = worker.run(item)
        yield Finished(item.row(values), "here", time.monotonic() - begin)


def run_study(
    study: Study,
    folder: str | Path,
    *,
    budget_minutes: float | None = None,
    executor: Executor = run_here,
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> StudyResult:
    """Run what a study's folder does not have yet, and write its report.

    Args:
        study: what to run.
        folder: a new folder, or one that the same study has begun; finished rows are not run again.
        budget_minutes: begin no item after so many minutes in this sitting; loading counts. None for no limit, 0 to
            write the report of what is there.
        executor: who runs items: run_here, or Ray's workers (fliptrace.studies.ray_workers.ray_executor).
        command: how it was started, for the record.
        progress: told of every row.

    Returns:
        What the folder holds now.

    Raises:
        InputError: the settings, items or folder cannot be used.
        StorageError: something could not be written; the rows before are kept.
    """
    from fliptrace.studies.results import write_results

    if budget_minutes is not None and not (math.isfinite(budget_minutes) and budget_minutes >= 0):
        raise InputError(
            f"a budget is a number of minutes, 0 or more; got {budget_minutes}. Leave it out for no limit"
        )
    if budget_minutes == 0 and not (Path(folder) / STUDY_NAME).exists():
        raise InputError(
            f"with a budget of 0 minutes the report of a begun study is written; {folder} holds none. Name a study's "
            "folder, or give more minutes to begin one"
        )
    begin = time.monotonic()
    items = list(study.items())
    ids = [item.id for item in items]
    if len(set(ids)) != len(ids):
        double = next(name for name in ids if ids.count(name) > 1)
        raise InputError(f"{double!r} was asked for twice; name every prompt and reduction once")
    if not items:
        raise InputError("the study has nothing to do: choose at least one prompt and reduction")

    def go_on() -> bool:
        return budget_minutes is None or time.monotonic() - begin < 60 * budget_minutes

    with Journal(folder, study.identity()) as journal:
        journal.check_items(items)
        pending = [item for item in items if item.id not in journal.rows]
        done, new = len(items) - len(pending), 0
        if progress is not None:
            progress(study.name, done, len(items))
        if pending and go_on():
            for event in executor(study, pending, go_on):
                if isinstance(event, WorkerReady):
                    journal.add_worker(event.worker, event.description, shlex.join(command))
                    continue
                journal.add(event.row, event.worker, event.seconds)
                done, new = done + 1, new + 1
                if progress is not None:
                    progress(event.row["item"], done, len(items))
        journal.put_in_order(items)
        wanted = set(ids)
        report = study.report([row for name, row in journal.rows.items() if name in wanted])
        result = StudyResult(journal.folder, report, done, len(items), new)
        write_results(result, journal.sittings)
        return result
