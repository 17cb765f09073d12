"""Run a study whose items belong to engines: engines side by side, or one item at a time where times are measured.

Items of one lane run one after another, in their order; rows come as they are done. Whatever happens, the engines are
ended.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from fliptrace.studies.items import Item
from fliptrace.studies.running import Continue, Finished, WorkerReady
from fliptrace.studies.study import Study, Worker


class EngineWorker(Worker, Protocol):
    """A worker that holds engines."""

    def begin(self, items: Sequence[Item]) -> None:
        """Start the engines that these items need, and no others."""
        ...

    def lane(self, item: Item) -> str:
        """Return which items wait for each other: those of one name."""
        ...

    def close(self) -> None:
        """End the engines, also while they are asked."""
        ...


def run_lanes(
    study: Study, items: Sequence[Item], go_on: Continue
) -> Iterator[WorkerReady | Finished]:
    """Run the items of a study whose worker is an EngineWorker; an executor for run_study."""
    worker: Any = study.open()
    try:
        worker.begin(items)
        yield WorkerReady("here", dict(worker.describe()))
        yield from _lanes(worker, items, go_on)
    finally:
        worker.close()


def _lanes(worker: EngineWorker, items: Sequence[Item], go_on: Continue) -> Iterator[Finished]:
    lanes: dict[str, list[Item]] = {}
    for item in items:
        lanes.setdefault(worker.lane(item), []).append(item)
    done: queue.Queue[Finished | BaseException | None] = queue.Queue()
    stopped = threading.Event()

    def run(waiting: Sequence[Item]) -> None:
        try:
            for item in waiting:
                if stopped.is_set() or not go_on():
                    break
                begin = time.monotonic()
                row = item.row(worker.run(item))
                done.put(Finished(row, "here", time.monotonic() - begin))
        except BaseException as error:  # noqa: BLE001  (raised again by whoever waits)
            done.put(error)
        finally:
            done.put(None)

    threads = [
        threading.Thread(target=run, args=(waiting,), daemon=True) for waiting in lanes.values()
    ]
    for thread in threads:
        thread.start()
    running = len(threads)
    try:
        while running:
            event = done.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                running -= 1
            else:
                yield event
    finally:
        stopped.set()
