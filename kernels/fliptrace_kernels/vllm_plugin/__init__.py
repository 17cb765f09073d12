"""A vLLM plugin: every dense LoRA shrink of a vLLM engine runs the reduction that you name.

    FLIPTRACE_SHRINK=local vllm serve MODEL --enable-lora ...

vLLM finds `register` through the entry point group `vllm.general_plugins` and calls it in each of
its processes. While FLIPTRACE_SHRINK is unset or empty it returns at once; this module imports
neither torch nor vLLM. kernels/README.md says what is covered and what is refused.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fliptrace_kernels.vllm_plugin.workers import WorkerStatus

__all__ = ["COUNT_VARIABLE", "SHRINK_VARIABLE", "register", "status"]

SHRINK_VARIABLE: Final = "FLIPTRACE_SHRINK"
"""Environment variable that names the reduction."""

COUNT_VARIABLE: Final = "FLIPTRACE_COUNT_LAUNCHES"
"""Environment variable that makes the kernels count their launches on the device, if it is 1."""


def register() -> None:
    """Install the shrink that FLIPTRACE_SHRINK names; do nothing while it is unset or empty.

    Calling it again changes nothing. It does not initialise CUDA.

    Raises:
        PluginError: if the reduction is unknown or not the one that is already installed, if vLLM's
            operator is missing or differs, or if this engine cannot be covered.
    """
    if not os.environ.get(SHRINK_VARIABLE, "").strip():
        return
    from fliptrace_kernels.vllm_plugin import workers

    workers.set_up()


def status(llm: Any) -> list[WorkerStatus]:
    """Ask each worker of an engine which shrink it runs.

    Args:
        llm: a `vllm.LLM`, or anything with its `collective_rpc`.

    Returns:
        One entry per worker.

    Raises:
        PluginError: if the workers run without the plugin.
    """
    from fliptrace_kernels.vllm_plugin import workers

    return workers.ask(llm)
