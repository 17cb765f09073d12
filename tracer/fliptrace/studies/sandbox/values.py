"""Values of the sandbox: limits, what became of a program, and what a backend must do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Protocol


class Status(StrEnum):
    """What became of a program."""

    PASSED = "passed"
    FAILED = "failed"
    KILLED = "killed"
    TIME = "time limit"
    OUTPUT = "output limit"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: from the start of its container to the end.
        memory_bytes: of all its processes, files in memory included; no swap.
        processes: and threads, the container's own two included.
        cpus: how many processors' time.
        file_bytes: of one file.
        disk_bytes: of all files; they lie in memory.
        open_files: of one process.
        output_bytes: that are read of stdout and stderr together.
    """

    seconds: float = 10.0
    memory_bytes: int = 256 * 2**20
    processes: int = 32
    cpus: float = 1.0
    file_bytes: int = 8 * 2**20
    disk_bytes: int = 16 * 2**20
    open_files: int = 64
    output_bytes: int = 64 * 2**10

    def resource_limits(self) -> dict[str, int]:
        """Return the limits of each process, by the names of Python's module resource."""
        return {
            "RLIMIT_CPU": int(self.seconds) + 2,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
        }

    def describe(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a program.

    Attributes:
        status: ``passed`` only if its last line was reached within all limits.
        exit_code: of the container, None where it was stopped from outside.
        output: stdout and stderr, as far as they were read.
        seconds: how long it ran.
    """

    status: Status
    exit_code: int | None
    output: str
    seconds: float


class Sandbox(Protocol):
    """A way to run programs under limits."""

    @property
    def name(self) -> str:
        """The backend's name."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Return the backend, its version and where it differs from others."""
        ...

    def run(self, program: str, limits: Limits) -> Outcome:
        """Run a Python program to its end or a limit, and leave nothing of it behind.

        Raises:
            InputError: the sandbox itself does not work.
        """
        ...
