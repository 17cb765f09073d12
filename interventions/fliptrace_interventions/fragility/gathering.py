"""Spread a study over processes without a cluster: each fills a folder of its own, and one folder gathers them.

Collecting writes rows only, so that a machine that measures needs neither scipy, pyarrow nor plotly.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fliptrace.errors import InputError, TraceReadError
from fliptrace.studies.items import Item, Row
from fliptrace.studies.journal import (
    ROWS_NAME,
    TIMINGS_NAME,
    Journal,
)
from fliptrace.studies.running import Continue, Executor, Finished, WorkerReady, run_here
from fliptrace.studies.study import Study


def collect(
    study: Study,
    folder: str | Path,
    *,
    budget_minutes: float | None = None,
    command: Sequence[str] = (),
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[int, int]:
    """Run what a folder does not have yet, and write no report.

    Args:
        study: what to run.
        folder: as run_study takes it.
        budget_minutes: begin no item after so many minutes; None for no limit.
        command: how it was started, for the record.
        progress: told of every row.

    Returns:
        How many items have rows, and how many there are.
    """
    begin = time.monotonic()
    items = study.items()

    def go_on() -> bool:
        return budget_minutes is None or time.monotonic() - begin < 60 * budget_minutes

    with Journal(folder, study.identity()) as journal:
        journal.check_items(items)
        pending = [item for item in items if item.id not in journal.rows]
        done = len(items) - len(pending)
        for event in run_here(study, pending, go_on) if pending and go_on() else ():
            if isinstance(event, WorkerReady):
                journal.add_worker(event.worker, event.description, shlex.join(command))
                continue
            journal.add(event.row, event.worker, event.seconds)
            done += 1
            if progress is not None:
                progress(event.row["item"], done, len(items))
    return done, len(items)


def gathered(folders: Sequence[str | Path]) -> Executor:
    """Return an executor for run_study that takes rows from folders in which the study was collected.

    Args:
        folders: each begun with the same settings, whatever its shard.

    Raises:
        InputError: a folder holds no rows; or, before the first row is taken, one was begun with other settings.
        TraceReadError: before the first row is taken: a folder cannot be read.
    """
    paths = [Path(folder) for folder in folders]
    for folder in paths:
        if not (folder / ROWS_NAME).is_file():
            raise InputError(f"{folder} holds no {ROWS_NAME}: name folders that were collected")

    def execute(
        study: Study, items: Sequence[Item], go_on: Continue
    ) -> Iterator[WorkerReady | Finished]:
        wanted = {item.id: item.key for item in items}
        parts = [_part(folder, study) for folder in paths]
        for number, (sittings, rows, seconds) in enumerate(parts, start=1):
            for sitting in sittings:
                yield WorkerReady(f"part {number}", sitting["description"])
            for name, row in rows.items():
                if wanted.get(name) == row["key"] and go_on():
                    del wanted[name]
                    yield Finished(row, f"part {number}", seconds.get(name, 0.0))

    return execute


def _part(
    folder: Path, study: Study
) -> tuple[list[dict[str, Any]], dict[str, Row], dict[str, float]]:
    """Return a folder's sittings, rows and seconds."""
    with Journal(folder, study.identity()) as journal:
        return journal.sittings, journal.rows, seconds_of(folder)


def seconds_of(folder: str | Path) -> dict[str, float]:
    """Return how long each item of a study's folder took, by item id."""
    path = Path(folder) / TIMINGS_NAME
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        return {line["item"]: float(line["seconds"]) for line in lines}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceReadError(f"{path} cannot be read as timings ({error})") from error
