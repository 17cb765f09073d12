"""Which machine this is."""

from __future__ import annotations

import subprocess
from importlib import metadata

import torch

from fliptrace_kernels.bench.results import Machine
from fliptrace_kernels.errors import LaunchError


def require_cuda() -> None:
    """Refuse to go on without a CUDA device.

    Raises:
        LaunchError: if there is none.
    """
    if not torch.cuda.is_available():
        raise LaunchError(
            f"this needs a CUDA device; torch {torch.__version__} sees none. "
            "Run it on a machine with one, with a CUDA build of torch"
        )


def this_machine() -> Machine:
    """Return the current CUDA device and the versions that a time depends on."""
    return Machine(
        torch.cuda.get_device_name(), _driver(), torch.__version__, metadata.version("triton")
    )


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return next(iter(answer.stdout.split()), "unknown")
