"""Spread a study over processes without a cluster: each fills a folder of its own, and one folder gathers them.

Collecting writes rows only, so that a machine that measures needs neither scipy, pyarrow nor plotly.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fliptrace.errors import InputError, TraceReadError
from fliptrace.studies.items import Item
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
        InputError: while it runs: a folder was begun with other settings.
        TraceReadError: while it runs: a folder cannot be read.
    """

    def execute(
        study: Study, items: Sequence[Item], go_on: Continue
    ) -> Iterator[WorkerReady | Finished]:
        wanted = {item.id: item.key for item in items}
        for number, folder in enumerate(map(Path, folders), start=1):
            if not (folder / ROWS_NAME).is_file():
                raise InputError(f"{folder} holds no {ROWS_NAME}: name folders that were collected")
            with Journal(folder, study.identity()) as journal:
                for sitting in journal.sittings:
                    yield WorkerReady(f"part {number}", sitting["description"])
                seconds = _seconds(folder / TIMINGS_NAME)
                for name, row in journal.rows.items():
                    if wanted.get(name) == row["key"] and go_on():
                        del wanted[name]
                        yield Finished(row, f"part {number}", seconds.get(name, 0.0))

    return execute


def seconds_of(folder: str | Path) -> dict[str, float]:
    """Return how long each item of a study's folder took, by item id."""
    return _seconds(Path(folder) / TIMINGS_NAME)


def _seconds(path: Path) -> dict[str, float]:
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        return {line["item"]: float(line["seconds"]) for line in lines}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceReadError(f"{path} cannot be read as timings ({error})") from error
