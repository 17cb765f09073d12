"""A control group for one container: made, limited, emptied and removed. Both versions of Linux's interface."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fliptrace.errors import InputError
from fliptrace.studies.sandbox.values import Limits

_CPU_PERIOD = 100_000
#: How long killed processes may take to be gone, seconds.
_PATIENCE = 10.0


@dataclass(frozen=True)
class Hierarchies:
    """Where groups can be made.

    Attributes:
        version: of the interface, 1 or 2.
        parents: version 2: one folder; version 1: one per controller.
    """

    version: int
    parents: dict[str, Path]


class Group:
    """One control group; a context that kills what is left in it and removes it."""

    def __init__(self, hierarchies: Hierarchies, limits: Limits) -> None:
        """Make the group.

        Raises:
            InputError: it cannot be made, or a limit cannot be set.
        """
        name = f"fliptrace-{os.getpid()}-{secrets.token_hex(4)}"
        self.folders = [parent / name for parent in dict.fromkeys(hierarchies.parents.values())]
        self._version = hierarchies.version
        try:
            for folder in self.folders:
                folder.mkdir()
            for path, text in self._settings(hierarchies, name, limits):
                path.write_text(text)
        except OSError as error:
            self.remove()
            raise InputError(f"a control group cannot be made ({error})") from error

    def _settings(
        self, hierarchies: Hierarchies, name: str, limits: Limits
    ) -> Iterator[tuple[Path, str]]:
        quota = int(limits.cpus * _CPU_PERIOD)
        if self._version == 2:
            (folder,) = self.folders
            yield folder / "memory.max", str(limits.memory_bytes)
            yield folder / "pids.max", str(limits.processes)
            for optional, text in (
                ("memory.swap.max", "0"),
                ("memory.oom.group", "1"),
                ("cpu.max", f"{quota} {_CPU_PERIOD}"),
            ):
                if (folder / optional).exists():
                    yield folder / optional, text
            return
        memory = hierarchies.parents["memory"] / name
        yield memory / "memory.limit_in_bytes", str(limits.memory_bytes)
        if (memory / "memory.memsw.limit_in_bytes").exists():
            yield memory / "memory.memsw.limit_in_bytes", str(limits.memory_bytes)
        yield hierarchies.parents["pids"] / name / "pids.max", str(limits.processes)
        if "cpu" in hierarchies.parents:
            cpu = hierarchies.parents["cpu"] / name
            yield cpu / "cpu.cfs_period_us", str(_CPU_PERIOD)
            yield cpu / "cpu.cfs_quota_us", str(quota)

    @property
    def entrances(self) -> list[str]:
        """Files into which a process writes its number to be inside."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    def kill(self) -> None:
        """Kill all processes inside, until none is left.

        Raises:
            InputError: some do not die.
        """
        deadline = time.monotonic() + _PATIENCE
        while members := self._members():
            if time.monotonic() > deadline:
                raise InputError(
                    f"processes of a sandboxed program do not die: {sorted(members)}; end them by hand"
                )
            switch = self.folders[0] / "cgroup.kill"
            if self._version == 2 and switch.exists():
                switch.write_text("1")
            else:
                for member in members:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(member, signal.SIGKILL)
            time.sleep(0.005)

    def _members(self) -> set[int]:
        found: set[int] = set()
        for folder in self.folders:
            with contextlib.suppress(FileNotFoundError):
                found |= {int(line) for line in (folder / "cgroup.procs").read_text().split()}
        return found - {0}

    def remove(self) -> None:
        """Remove the empty group; a process that is just dying keeps it for a moment."""
        deadline = time.monotonic() + _PATIENCE
        for folder in self.folders:
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError as error:
                    if time.monotonic() > deadline:
                        raise InputError(f"{folder} cannot be removed ({error})") from error
                    time.sleep(0.005)


def find_hierarchies() -> Hierarchies:
    """Find where this process may make groups with limits of memory and of processes.

    Raises:
        InputError: nowhere, with the reason.
    """
    mounts, own = _mounts(), _own_groups()
    reasons = []
    if "" in mounts:
        try:
            return Hierarchies(2, {"": _parent_of_version_2(mounts[""], own.get("", "/"))})
        except InputError as error:
            reasons.append(str(error))
    if {"memory", "pids"} <= set(mounts):
        parents: dict[str, Path] = {
            controller: _existing(mounts[controller], own.get(controller, "/"))
            for controller in ("memory", "pids", "cpu")
            if controller in mounts
        }
        odd = [str(path) for path in parents.values() if not os.access(path, os.W_OK)]
        if not odd:
            return Hierarchies(1, parents)
        reasons.append(f"{odd[0]} is not writable for this user")
    raise InputError("; ".join(reasons) or "no control groups are mounted at /sys/fs/cgroup")


def _parent_of_version_2(mount: Path, own: str) -> Path:
    start = _existing(mount, own)
    for folder in (start, *start.parents):
        try:
            given = set((folder / "cgroup.subtree_control").read_text().split())
        except OSError:
            break
        if {"memory", "pids"} <= given and os.access(folder, os.W_OK):
            return folder
        if folder == mount:
            break
    raise InputError(
        f"no control group from {start} upwards passes memory and pids on and is writable for this user (systemd-run "
        "--user --scope gives such a place)"
    )


def _existing(mount: Path, own: str) -> Path:
    """Return a group's folder; in a container its name may be one that only the host knows."""
    folder = mount / own.lstrip("/")
    return folder if folder.is_dir() else mount


def _mounts() -> dict[str, Path]:
    """Return the mounted hierarchies by controller; "" is version 2."""
    found: dict[str, Path] = {}
    for line in _lines("/proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        words, kind = before.split(), after.split()
        if kind[0] == "cgroup2":
            found.setdefault("", Path(words[4]))
        elif kind[0] == "cgroup":
            for option in kind[2].split(","):
                if option in ("memory", "pids", "cpu"):
                    found.setdefault(option, Path(words[4]))
    return found


def _own_groups() -> dict[str, str]:
    found: dict[str, str] = {}
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = path
    return found


def _lines(path: str) -> Sequence[str]:
    try:
        return Path(path).read_text("utf-8").splitlines()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error})") from error
