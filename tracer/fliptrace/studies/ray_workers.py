"""Spread a study's items over workers with Ray; the only module that imports it.

Each worker is an actor that loads the model once. Items go to whoever is free, so rows arrive in any order; the frame
puts them into the order of the items at the end. A row does not depend on its worker: seeds and threads come with item
and study.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from fliptrace.errors import FliptraceError, InputError
from fliptrace.studies.amounts import check_at_least
from fliptrace.studies.items import Item
from fliptrace.studies.running import Continue, Executor, Finished, WorkerReady
from fliptrace.studies.study import Study

#: Seconds that a cluster may take to open a connection.
_PATIENCE = 10.0


def ray_executor(address: str = "local", workers: int | None = None) -> Executor:
    """Return an executor on a Ray cluster.

    Args:
        address: ``local`` for this machine, ``auto`` for the cluster that it belongs to, or ``host:port``.
        workers: how many; None takes one per GPU, or two without GPUs.

    Raises:
        InputError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise InputError(
            "--ray needs Ray, which is not installed: pip install 'fliptrace[studies]', or leave --ray out"
        ) from error
    if workers is not None:
        check_at_least("--ray-workers", workers)

    def execute(
        study: Study, items: Sequence[Item], go_on: Continue
    ) -> Iterator[WorkerReady | Finished]:
        _connect(ray, address, workers)
        try:
            yield from _spread(ray, study, items, go_on, workers)
        finally:
            ray.shutdown()

    return execute


def _connect(ray: Any, address: str, workers: int | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    _check_address(address)
    if address == "local":
        # On a small machine workers may share a core; they would wait for one forever otherwise.
        options |= {"num_cpus": max(workers or 2, os.cpu_count() or 1), "include_dashboard": False}
    try:
        ray.init(address=address, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(f"Ray at {address!r} cannot be reached ({error})") from error


def _check_address(address: str) -> None:
    """Knock at a cluster's door; Ray itself would wait for minutes where there is none.

    Raises:
        InputError: nobody answers there.
    """
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdecimal():
        return  # Ray says what is wrong with it
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"Ray at {address!r} cannot be reached ({error}); is the cluster running, and is that its address?"
        ) from error


def _spread(
    ray: Any, study: Study, items: Sequence[Item], go_on: Continue, workers: int | None
) -> Iterator[WorkerReady | Finished]:
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus and workers is not None and workers > gpus:
        raise InputError(
            f"each worker takes a GPU; got --ray-workers {workers} and a cluster with {gpus}: name {gpus} or fewer"
        )
    count = min(workers or gpus or 2, len(items))
    actor = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0)(_Remote)
    actors = {f"ray {number}": actor.remote(study) for number in range(count)}
    loading = {handle.describe.remote(): name for name, handle in actors.items()}
    for reference, name in loading.items():
        yield WorkerReady(name, _get(ray, reference))
    waiting = list(reversed(items))
    running: dict[Any, str] = {}
    idle = list(actors)
    while waiting or running:
        while idle and waiting and go_on():
            name = idle.pop()
            running[actors[name].run.remote(waiting.pop())] = name
        if not running:
            return
        (reference,), _ = ray.wait(list(running), num_returns=1)
        name = running.pop(reference)
        idle.append(name)
        row, seconds = _get(ray, reference)
        yield Finished(row, name, seconds)
        if not go_on():
            waiting.clear()


def _get(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, FliptraceError):
            raise error.cause from error
        raise
    except ray.exceptions.RayActorError as error:
        said = (str(error).splitlines() or ["no reason given"])[0]
        raise InputError(
            f"a Ray worker died ({said}); finished rows are kept, run the same command again"
        ) from error


class _Remote:
    """The actor: one worker of a study. It opens when it is first asked, so that a refusal arrives as what it is."""

    def __init__(self, study: Study) -> None:
        self._study = study

    def describe(self) -> dict[str, Any]:
        self._worker = self._study.open()
        return dict(self._worker.describe())

    def run(self, item: Item) -> tuple[dict[str, Any], float]:
        begin = time.monotonic()
        return item.row(self._worker.run(item)), time.monotonic() - begin
