"""The bubblewrap backend: namespaces by bwrap, memory, processes and processor time by a control group.

As root the program runs as nobody (65534) without capabilities; as another user it keeps the user's number in a user
namespace. It sees /usr, the interpreter and a small /tmp in memory; no /proc, no /etc but the linker's cache, no home.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fliptrace.errors import InputError
from fliptrace.studies.sandbox.cgroup import Group, find_hierarchies
from fliptrace.studies.sandbox.supervision import PYTHON_ARGUMENTS, SCRATCH, supervise
from fliptrace.studies.sandbox.values import Limits, Outcome

#: Enters the control group, then becomes bwrap: all that comes after is inside.
_ENTER = 'for file in $1; do echo $$ > "$file" || exit 97; done; shift; ulimit -c 0; exec "$@"'
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class Bubblewrap:
    """Runs programs under bwrap."""

    name = "bubblewrap"

    def __init__(self) -> None:
        """Find bwrap and a place for control groups.

        Raises:
            InputError: one of them is missing.
        """
        found = shutil.which("bwrap")
        if found is None:
            raise InputError("bwrap is not installed (apt install bubblewrap)")
        self._bwrap = found
        self._hierarchies = find_hierarchies()
        self._python = Path(getattr(sys, "_base_executable", sys.executable)).resolve()

    def describe(self) -> dict[str, Any]:
        """Return version and control groups."""
        said = subprocess.run(
            [self._bwrap, "--version"], capture_output=True, text=True, check=False
        )
        return {
            "backend": self.name,
            "version": said.stdout.strip(),
            "control_groups": f"version {self._hierarchies.version}",
            "python": str(self._python),
        }

    def run(self, program: str, limits: Limits) -> Outcome:
        """Run a program in a group of its own."""
        group = Group(self._hierarchies, limits)
        command = [
            "/bin/sh",
            "-c",
            _ENTER,
            "sandbox",
            " ".join(group.entrances),
            *self._command(limits),
        ]
        try:
            return supervise(command, program, limits, group.kill)
        finally:
            group.remove()

    def _command(self, limits: Limits) -> Iterator[str]:
        yield from (self._bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts")
        yield from ("--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv")
        yield from ("--hostname", "sandbox", "--cap-drop", "ALL")
        if os.getuid() == 0:  # to become nobody; gone with it
            yield from ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
        else:
            yield from ("--unshare-user", "--disable-userns")
        yield from ("--ro-bind", "/usr", "/usr")
        for name in ("/bin", "/lib", "/lib32", "/lib64"):
            path = Path(name)
            if path.is_symlink():
                yield from ("--symlink", str(path.readlink()), name)
            elif path.is_dir():
                yield from ("--ro-bind", name, name)
        yield from ("--dir", "/etc", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
        for path in dict.fromkeys((Path(sys.base_prefix).resolve(), self._python)):
            if Path("/usr") not in (path, *path.parents):
                # Left to itself bwrap makes folders that nobody may enter.
                for folder in reversed(path.parents[:-1]):
                    yield from ("--dir", str(folder))
                yield from ("--ro-bind", str(path), str(path))
        yield from ("--dir", "/dev")
        for device in _DEVICES:
            yield from ("--dev-bind", device, device)
        yield from ("--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", SCRATCH)
        # The root itself is a file system in memory without a limit of its own.
        yield from ("--remount-ro", "/", "--chdir", SCRATCH, "--setenv", "PATH", "/usr/bin")
        yield from ("--", str(self._python), *PYTHON_ARGUMENTS)
