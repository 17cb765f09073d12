"""vLLM engines in processes of their own: started together, told what to do one line at a time, ended together.

A reduction is chosen per process (FLIPTRACE_SHRINK), and so is VLLM_BATCH_INVARIANT; an engine that has just started
has no history. What runs inside is engine_process_vllm; nothing here imports vLLM, so the processes may run on another
Python, which has it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fliptrace
import fliptrace_kernels
from fliptrace.errors import FliptraceError, StorageError
from fliptrace.pair.engines import VLLM_OWN

#: What runs inside.
INSIDE = "fliptrace.studies.engine_process_vllm"
#: No adapter at all.
NO_ADAPTER = "none"
#: Labels under which the kernels' plugin stays out.
WITHOUT_PLUGIN = (VLLM_OWN, NO_ADAPTER)
#: Decoding is replayed from CUDA graphs and nothing is compiled: an engine starts in a fraction of the time.
GRAPHS_ONLY: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
_GIB = 2**30
#: A process that was told to end and does not is killed after so many seconds.
_PATIENCE = 20.0


class EngineProcessError(FliptraceError, RuntimeError):
    """Raised when an engine's process does not start, fails at a command, takes too long, or has ended."""


class EngineProcess:
    """One engine. It answers one command at a time and costs nothing in between.

    Attributes:
        name: as in messages.
        log: where what vLLM prints is kept.
        facts: what it said when it was ready; ``error`` if it could not start.
    """

    def __init__(
        self, name: str, log: Path, command: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        """Start the process; ``wait`` says whether it got ready.

        Args:
            name: of the engine.
            log: a file for its standard error, written anew.
            command: what to run; see ``inside``.
            variables: its whole environment; see ``environment``.

        Raises:
            StorageError: the log cannot be written.
            EngineProcessError: there is no such program.
        """
        self.name, self.log = name, log
        self.facts: dict[str, Any] = {}
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            file = log.open("w")
        except OSError as error:
            raise StorageError(
                f"the log of engine {name} cannot be written ({error}); name another folder"
            ) from error
        try:
            with file:
                self._process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                    env=dict(variables),
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineProcessError(
                f"engine {name}: {command[0]} cannot be run ({error}); name a Python that has vLLM"
            ) from error
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101  (it was asked for)
        with self._process.stdout as lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put(None)

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=max(seconds, 0.1))
        except queue.Empty:
            return {"error": f"no answer within {seconds:.0f} s"}
        if line is None:
            self._answers.put(None)
            return {"error": f"the process ended with exit code {self._process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def wait(self, seconds: float) -> bool:
        """Wait until the engine is ready; False, with ``facts['error']``, if it is not."""
        self.facts = self._answer(seconds)
        return "error" not in self.facts

    def ask(self, do: str, seconds: float = 120.0, **arguments: Any) -> dict[str, Any]:
        """Give a command and return the answer.

        Args:
            do: the command's name.
            seconds: how long to wait.
            arguments: JSON values.

        Raises:
            EngineProcessError: the engine fails at it or takes too long.
        """
        try:
            assert self._process.stdin is not None  # noqa: S101  (it was asked for)
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            answer = self._answer(seconds)
        except (BrokenPipeError, ValueError):  # ValueError: closed on our side
            answer = {"error": f"the process ended with exit code {self._process.poll()}"}
        if "error" in answer:
            raise EngineProcessError(f"{self.name}: {answer['error']} (see {self.log})")
        return answer

    def stop(self) -> None:
        """Tell the process that no commands follow; it ends by itself."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def close(self) -> None:
        """End the process and what it started."""
        self.stop()
        if self._process.poll() is None:
            try:
                self._process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join(10)

    def kill(self) -> None:
        """End the process and what it started at once."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)


def close_all(engines: Iterable[EngineProcess]) -> None:
    """End all at once; one after the other, each takes seconds."""
    engines = list(engines)
    for engine in engines:
        engine.stop()
    for engine in engines:
        engine.close()


def wait_for_all(engines: Sequence[EngineProcess], seconds: float) -> None:
    """Wait for engines that are starting.

    Raises:
        EngineProcessError: one did not get ready; all of them are ended.
    """
    deadline = time.monotonic() + seconds
    for engine in engines:
        if not engine.wait(deadline - time.monotonic()):
            for each in engines:
                each.kill()
            error = str(engine.facts["error"])
            if "No module named 'vllm'" in error:
                error += (
                    "; install vLLM on a machine with an NVIDIA GPU: pip install 'fliptrace[vllm]'"
                )
            raise EngineProcessError(
                f"engine {engine.name} did not start: {error} (see {engine.log})"
            )


def inside(python: str | None, settings: Mapping[str, Any]) -> list[str]:
    """Return the command that starts an engine.

    Args:
        python: the Python that has vLLM; None for this one.
        settings: see engine_process_vllm.
    """
    return [python or sys.executable, "-m", INSIDE, json.dumps(dict(settings))]


def environment(
    scratch: Path, name: str, label: str, *, python: str | None = None, **more: str
) -> dict[str, str]:
    """Return the environment of one engine.

    Args:
        scratch: where caches go.
        name: of the engine; engines that start at once must not write one cache.
        label: a reduction, VLLM_OWN or NO_ADAPTER.
        python: the Python that will run, None for this one.
        more: further variables.
    """
    variables = {k: v for k, v in os.environ.items() if not k.startswith("FLIPTRACE_")}
    roots = [Path(package.__path__[0]).parent for package in (fliptrace, fliptrace_kernels)]
    # A source tree is shown to the process; packages of another Python would break it.
    shown = [
        str(root)
        for root in roots
        if not {"site-packages", "dist-packages"} & set(root.parts) or python is None
    ]
    there = [*shown, *variables.get("PYTHONPATH", "").split(os.pathsep)]
    variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, there)))
    # A folder here that is named like a package (a study's, say) must not take the package's place.
    variables["PYTHONSAFEPATH"] = "1"
    variables["VLLM_CACHE_ROOT"] = str(scratch / "cache" / file_name(name))
    variables.setdefault("OMP_NUM_THREADS", "1")
    variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    variables["VLLM_NO_USAGE_STATS"] = "1"
    if label not in WITHOUT_PLUGIN:
        variables["FLIPTRACE_SHRINK"] = label
    return variables | more


def engine_options(
    *,
    cache_gib: float,
    attention_backend: str = "",
    dtype: str = "bfloat16",
    **more: Any,
) -> dict[str, Any]:
    """Return arguments of ``vllm.LLM`` for engines that share a machine.

    Args:
        cache_gib: cache of each engine, in GiB.
        attention_backend: ``TRITON_ATTN`` and so on; empty for vLLM's choice.
        dtype: of weights and activations.
        more: further arguments.
    """
    found: dict[str, Any] = {
        "dtype": dtype,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "seed": 0,
        "disable_log_stats": True,
        # Small enough never to fail on memory that a neighbour holds; the cache is given in bytes.
        "gpu_memory_utilization": 0.02,
        "kv_cache_memory_bytes": int(cache_gib * _GIB),
    }
    return found | ({"attention_backend": attention_backend} if attention_backend else {}) | more


def file_name(name: str) -> str:
    """Return an engine's name as a file's."""
    return "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in name)
