"""The Docker and Podman backends: one container per program, from an image that is there already."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from fliptrace.errors import InputError
from fliptrace.studies.sandbox.supervision import PYTHON_ARGUMENTS, SCRATCH, supervise
from fliptrace.studies.sandbox.values import Limits, Outcome

#: The image's name, where it is another.
IMAGE_VARIABLE = "FLIPTRACE_SANDBOX_IMAGE"
DEFAULT_IMAGE = "python:3.11-slim"
#: How long the client may take to answer, seconds.
_PATIENCE = 20.0


class Containers:
    """Runs programs with docker or podman."""

    def __init__(self, client: str) -> None:
        """See that the client answers and has the image; nothing is downloaded.

        Args:
            client: ``docker`` or ``podman``.

        Raises:
            InputError: it does not.
        """
        found = shutil.which(client)
        if found is None:
            raise InputError(f"{client} is not installed")
        self.name = client
        self._client = found
        self._image = os.environ.get(IMAGE_VARIABLE, DEFAULT_IMAGE)
        field = "{{.Server.Version}}" if client == "docker" else "{{.Version.Version}}"
        command = "version" if client == "docker" else "info"
        self._version = self._ask([command, "--format", field]).strip()
        try:
            self._ask(["image", "inspect", "--format", "{{.Id}}", self._image])
        except InputError as error:
            raise InputError(
                f"{client} has no image {self._image} ({client} pull {self._image}, or name one with Python in "
                f"{IMAGE_VARIABLE})"
            ) from error

    def describe(self) -> dict[str, Any]:
        """Return version and image."""
        return {"backend": self.name, "version": self._version, "image": self._image}

    def run(self, program: str, limits: Limits) -> Outcome:
        """Run a program in a container of its own."""
        name = f"fliptrace-{os.getpid()}-{secrets.token_hex(6)}"
        memory = str(limits.memory_bytes)
        command = [
            *(self._client, "run", "--rm", "--interactive", "--name", name, "--pull", "never"),
            *("--network", "none", "--read-only", "--user", "65534:65534", "--init"),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--memory", memory, "--memory-swap", memory, "--shm-size", "1m"),
            *("--pids-limit", str(limits.processes), "--cpus", str(limits.cpus)),
            *("--ulimit", f"fsize={limits.file_bytes}:{limits.file_bytes}"),
            *(
                "--ulimit",
                f"nofile={limits.open_files}:{limits.open_files}",
                "--ulimit",
                "core=0:0",
            ),
            *("--tmpfs", f"{SCRATCH}:rw,nosuid,nodev,mode=1777,size={limits.disk_bytes}"),
            *("--log-driver", "none", "--entrypoint", "python3", self._image, *PYTHON_ARGUMENTS),
        ]

        def end() -> None:
            with contextlib.suppress(
                InputError
            ):  # with --rm it is gone already where it ended by itself
                self._ask(["rm", "--force", name])

        return supervise(command, program, limits, end)

    def _ask(self, arguments: Sequence[str]) -> str:
        try:
            said = subprocess.run(
                [self._client, *arguments],
                capture_output=True,
                text=True,
                check=True,
                timeout=_PATIENCE,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as error:
            raise InputError(f"{self.name} does not answer within {_PATIENCE:.0f} s") from error
        except (OSError, subprocess.CalledProcessError) as error:
            lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
            raise InputError(
                f"{self.name} does not work: {lines[0] if lines else error}"
            ) from error
        return said.stdout
