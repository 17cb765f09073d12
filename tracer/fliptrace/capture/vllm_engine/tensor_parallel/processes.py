"""The processes of a tensor-parallel group: started together, watched while they work, ended together.

Each holds one rank: a vLLM engine core with its worker, as under torchrun. A rank that waits in a collective for one
that has died would wait for ever, so whoever waits for a rank looks after all of them, and when one is gone the others
are ended, too. A process ends by itself when its driver is gone, however that ended: it reads a pipe that only the
driver holds open.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import fliptrace_kernels
from fliptrace.capture.vllm_engine.tensor_parallel.messages import Failed, receive, send
from fliptrace.capture.vllm_engine.tensor_parallel.troubles import error_of
from fliptrace.errors import RecordingError

#: What runs in each.
INSIDE = "fliptrace.capture.vllm_engine.tensor_parallel.rank_process"
#: How often a waiting driver looks whether all processes live, seconds.
_LOOK_SECONDS = 0.2
#: Processes that were told to end and do not are killed after so many seconds.
_PATIENCE_SECONDS = 10.0
#: A rank that waits for one that failed may take so long to fail, too; then all are ended, seconds.
_GRACE_SECONDS = 15.0


class RankGroup:
    """Processes of all ranks.

    Attributes:
        count: how many.
        trouble: why they can be used no more; "" while they can.
    """

    def __init__(self, count: int, settings: Mapping[str, Any]) -> None:
        """Start them; each says Done or Failed when it has loaded its part of the model.

        Args:
            count: how many ranks.
            settings: see rank_process; each gets its own rank, and the descriptors of its pipes.
        """
        self.count = count
        self.trouble = ""
        self._folder = Path(tempfile.mkdtemp(prefix="fliptrace-ranks-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._inboxes: list[deque[Any]] = [deque() for _ in range(count)]
        self._lifelines: list[int] = []
        self._kept: list[Path] = []
        self._end = weakref.finalize(
            self,
            _end_all,
            (self._processes, self._connections, self._lifelines),
            self._folder,
            self._kept,
        )
        port = _free_port()
        for rank in range(count):
            self._start(rank, dict(settings), port)

    def _start(self, rank: int, settings: dict[str, Any], port: int) -> None:
        ours, theirs = socket.socketpair()
        life_read, life_write = os.pipe()
        settings |= {
            "rank": rank,
            "ranks": self.count,
            "connection": theirs.fileno(),
            "lifeline": life_read,
        }
        try:
            with self.log(rank).open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", INSIDE, json.dumps(settings)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=_environment(rank, self.count, port),
                    pass_fds=(theirs.fileno(), life_read),
                    # An interrupt at the terminal is the driver's: it ends the ranks.
                    start_new_session=True,
                )
        finally:
            theirs.close()
            os.close(life_read)
        self._processes.append(process)
        self._lifelines.append(life_write)
        self._connections.append(Connection(ours.detach()))

    def log(self, rank: int) -> Path:
        """Return the file with what a rank printed."""
        return self._folder / f"rank{rank}.log"

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of all ranks."""
        return tuple(process.pid for process in self._processes)

    def send(self, rank: int, message: object) -> None:
        """Send a message to a rank.

        Raises:
            RecordingError: the group can be used no more.
        """
        self._require()
        try:
            send(self._connections[rank], message)
        except OSError as error:
            raise self._died(rank) from error

    def receive(self, rank: int, seconds: float) -> Any:
        """Wait for a message of a rank.

        Raises:
            RecordingError: a rank has died, or says nothing for so long; all are ended.
            FliptraceError: another rank failed, for which this one waits; all are ended.
        """
        self._require()
        deadline, grace = time.monotonic() + seconds, None
        inbox = self._inboxes[rank]
        while not inbox:
            waiting = [each for each in self._connections if not each.closed]
            ready = wait(waiting, _LOOK_SECONDS) if waiting else []
            for connection in ready:
                self._take(self._connections.index(connection))  # type: ignore[arg-type]
            if inbox:
                break
            now = time.monotonic()
            gone = [each for each, connection in enumerate(self._connections) if connection.closed]
            failed = self._failed()
            if failed is not None and grace is None:
                grace = now + _GRACE_SECONDS
            if failed is not None and (gone or now > (grace or now)):
                error = error_of(failed[1], failed[0], self.count)
                self.fail(str(error))
                raise error
            if gone:
                raise self._died(gone[0])
            if now > deadline:
                raise self.fail(f"rank {rank} of {self.count} gave no answer in {seconds:.0f} s")
        return inbox.popleft()

    def _take(self, rank: int) -> None:
        """Read what a rank said; a closed connection is closed here, too."""
        connection = self._connections[rank]
        try:
            self._inboxes[rank].append(receive(connection))
        except (EOFError, OSError):
            connection.close()

    def _failed(self) -> tuple[int, Failed] | None:
        for rank, inbox in enumerate(self._inboxes):
            for message in inbox:
                if isinstance(message, Failed):
                    return rank, message
        return None

    def _require(self) -> None:
        if self.trouble:
            raise RecordingError(f"{self.trouble}. Load the engine again")

    def _died(self, rank: int) -> RecordingError:
        process = self._processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_SECONDS)
        code = process.poll()
        how = "closed its connection"
        if code is not None:
            how = f"ended with exit code {code}"
            if code < 0:
                with contextlib.suppress(ValueError):
                    how = f"was ended by {signal.Signals(-code).name}"
        return self.fail(
            f"the process of rank {rank} of {self.count} {how}{self._last_words(rank)}"
        )

    def fail(self, why: str) -> RecordingError:
        """End all processes and return the error that says why."""
        self.trouble = why
        self.kill()
        self._kept.append(self._folder)
        return RecordingError(
            f"{why}. The other ranks were ended with it; a trace that was being written ends with the last step that "
            f"was acknowledged. Load the engine again; what ranks printed is in {self._folder}"
        )

    def _last_words(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            lines = self.log(rank).read_text(errors="replace").strip().splitlines()
            if lines:
                return f" ({lines[-1].strip()[:300]})"
        return ""

    def kill(self) -> None:
        """End all at once."""
        for process in self._processes:
            _kill(process)

    def close(self) -> None:
        """End all processes; harmless when they have ended."""
        self.trouble = self.trouble or "the engine was closed"
        self._end()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_SECONDS)


def _end_all(
    parts: tuple[Sequence[subprocess.Popen[bytes]], Sequence[Connection], list[int]],
    folder: Path,
    kept: Sequence[Path],
) -> None:
    """Close what ranks read, which ends them, and kill those that stay; logs of a group that failed are kept."""
    processes, connections, lifelines = parts
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.close()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for descriptor in lifelines:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    lifelines.clear()
    for process in processes:
        _kill(process)
    if folder not in kept:
        shutil.rmtree(folder, ignore_errors=True)


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    """Return a rank's environment: ours, so that settings of NCCL, CUDA and vLLM hold, and its place in the group."""
    variables = dict(os.environ)
    # Where this package lies, which is not to be imported whole here, and the kernels.
    ours = Path(__file__).resolve().parents[4]
    roots = [str(ours), str(Path(fliptrace_kernels.__path__[0]).parent)]
    there = [*roots, *variables.get("PYTHONPATH", "").split(os.pathsep)]
    variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, there)))
    # vLLM binds each worker to cores of its own by default, which an engine in one process does not do either.
    variables.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return variables | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
