"""Measured times on file: JSON lines that survive a kill at any byte and say what they belong to.

A row's key is everything that could change its time: GPU, driver, torch, triton, the kernel's
identity, a digest of its source, the shape. A sitting measures the keys that are missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fliptrace_kernels.bench.cells import Cell
from fliptrace_kernels.errors import FliptraceKernelsError

SCHEMA: Final = 1
_LINE_START: Final = b'{"schema": '


class ResultsError(FliptraceKernelsError, ValueError):
    """Raised when a file of results cannot be read or written."""


@dataclass(frozen=True, slots=True, order=True)
class Machine:
    """Where a time was measured.

    Attributes:
        gpu: the device's name.
        driver: version of the driver.
        torch: version of torch.
        triton: version of Triton.
    """

    gpu: str
    driver: str
    torch: str
    triton: str

    def __str__(self) -> str:
        """Return one line for headings."""
        return f"{self.gpu}, driver {self.driver}, torch {self.torch}, triton {self.triton}"


@dataclass(frozen=True, slots=True)
class Key:
    """What one time belongs to.

    Attributes:
        machine: where.
        kernel: identity of the kernel, such as `deterministic:8/32`.
        source: digest of the code that runs, see `sources`.
        cell: the shape.
    """

    machine: Machine
    kernel: str
    source: str
    cell: Cell


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel in one cell.

    Attributes:
        key: what was measured.
        microseconds: the same version timed several times: one median per time. Empty if it did
            not run.
        failure: why it did not run, else empty.
        details: JSON values: calls per graph, replays, configuration and the like.
    """

    key: Key
    microseconds: tuple[float, ...]
    failure: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def time(self) -> float:
        """The mean of the medians, in microseconds per call."""
        return sum(self.microseconds) / len(self.microseconds)

    @property
    def noise(self) -> float:
        """How far the medians are apart, as a part of the smallest."""
        return max(self.microseconds) / min(self.microseconds) - 1.0

    def to_json(self) -> dict[str, Any]:
        """Return the row as one JSON object."""
        machine, cell = self.key.machine, self.key.cell
        return {
            "schema": SCHEMA,
            "what": "time",
            "gpu": machine.gpu,
            "driver": machine.driver,
            "torch": machine.torch,
            "triton": machine.triton,
            "kernel": self.key.kernel,
            "source": self.key.source,
            "rows": cell.rows,
            "k": cell.k,
            "slices": cell.slices,
            "rank": cell.rank,
            "microseconds": list(self.microseconds),
            "failure": self.failure,
            "details": dict(self.details),
        }


@dataclass(frozen=True, slots=True)
class Copy:
    """Bandwidth of a large copy on the device, measured once per sitting.

    Attributes:
        machine: where.
        bytes_per_second: bytes read plus bytes written, over time.
    """

    machine: Machine
    bytes_per_second: float

    def to_json(self) -> dict[str, Any]:
        """Return the bandwidth as one JSON object."""
        machine = self.machine
        return {
            "schema": SCHEMA,
            "what": "copy",
            "gpu": machine.gpu,
            "driver": machine.driver,
            "torch": machine.torch,
            "triton": machine.triton,
            "bytes_per_second": self.bytes_per_second,
        }


@dataclass(frozen=True, slots=True)
class Results:
    """What a file holds.

    Attributes:
        rows: in the order of the file.
        copies: in the order of the file.
    """

    rows: tuple[Row, ...]
    copies: tuple[Copy, ...]

    @property
    def measured(self) -> set[Key]:
        """Keys that have a time; failures are tried again."""
        return {row.key for row in self.rows if row.microseconds}

    def latest(self, machine: Machine) -> dict[tuple[str, Cell], Row]:
        """Return the last row of every kernel and cell on a machine, whatever its source."""
        return {
            (row.key.kernel, row.key.cell): row for row in self.rows if row.key.machine == machine
        }

    def copy_bandwidth(self, machine: Machine) -> float | None:
        """Return the largest bandwidth measured on a machine, in bytes per second."""
        found = [copy.bytes_per_second for copy in self.copies if copy.machine == machine]
        return max(found, default=None)

    def machines(self) -> list[Machine]:
        """List the machines in the order of their first row."""
        return list(dict.fromkeys(row.key.machine for row in self.rows))


def read_results(path: Path) -> Results:
    """Read a file of results; a missing file is an empty one.

    A last line without its end is what a killed sitting leaves behind: it is left out.

    Raises:
        ResultsError: if the file cannot be read, or a complete line is not a row.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Results((), ())
    except OSError as error:
        raise ResultsError(f"results {path} cannot be read: {error}") from error
    rows: list[Row] = []
    copies: list[Copy] = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if value["schema"] != SCHEMA:
                raise ResultsError(f"its schema is {value['schema']}, this version reads {SCHEMA}")
            if value["what"] == "copy":
                copies.append(Copy(_machine(value), float(value["bytes_per_second"])))
            else:
                rows.append(_row(value))
        except (ValueError, KeyError, TypeError) as error:
            raise ResultsError(
                f"{path}, line {number} is no row of this bench ({error}); "
                "remove the line, or name another file"
            ) from error
    return Results(tuple(rows), tuple(copies))


def append_results(path: Path, entries: Iterable[Row | Copy]) -> None:
    """Add rows to a file; when this returns they are on the disk.

    Raises:
        ResultsError: if the file cannot be written.
    """
    text = "".join(json.dumps(entry.to_json()) + "\n" for entry in entries)
    if not text:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            _cut_torn_line(file)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ResultsError(f"results {path} cannot be written: {error}") from error


def _cut_torn_line(file: Any) -> None:
    """Remove what follows the last line end, so that the next row starts on a line of its own."""
    size = file.seek(0, os.SEEK_END)
    keep, tail = size, b""
    while keep and b"\n" not in tail:
        start = max(0, keep - 4096)
        file.seek(start)
        tail = file.read(keep - start)
        keep = start
    kept = keep + tail.rfind(b"\n") + 1
    if kept == size:
        return
    torn = tail[kept - keep :][: len(_LINE_START)]
    if torn != _LINE_START[: len(torn)]:
        raise ResultsError(
            f"{file.name} ends in a line that is not of this bench; name another file"
        )
    file.truncate(kept)


def _machine(value: Mapping[str, Any]) -> Machine:
    return Machine(
        *(str(value[name]) for name in ("gpu", "driver", "torch", "triton")),
    )


def _row(value: Mapping[str, Any]) -> Row:
    cell = Cell(*(int(value[name]) for name in ("rows", "k", "slices", "rank")))
    times = tuple(float(time) for time in value["microseconds"])
    if any(not 0.0 < time < float("inf") for time in times):
        raise ResultsError(f"times must be positive numbers; got {list(times)}")
    return Row(
        Key(_machine(value), str(value["kernel"]), str(value["source"]), cell),
        times,
        str(value["failure"]),
        dict(value["details"]),
    )
