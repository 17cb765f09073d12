"""The plugin inside vLLM: installed in each process, announced and asked in each worker.

Each worker passes through `WorkerBase.__init__`, with its rank and the engine's whole configuration
at hand. That is where the plugin looks at the configuration and logs, and there it adds one method,
which a library calls through `LLM.collective_rpc` and a server's user through /collective_rpc.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import MutableMapping
from multiprocessing.util import Finalize
from typing import Any, Final, TypedDict

from fliptrace_kernels.vllm_plugin import COUNT_VARIABLE, SHRINK_VARIABLE, coverage, settings
from fliptrace_kernels.vllm_plugin.errors import PluginError
from fliptrace_kernels.vllm_plugin.installation import Installation, install
from fliptrace_kernels.vllm_plugin.shrink_operator import Operator

STATUS_METHOD: Final = "fliptrace_shrink_status"
"""Method that the plugin adds to vLLM's workers."""

RAY_VARIABLE: Final = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
"""Names, after commas, of variables that vLLM copies to workers on other nodes."""

_NEEDED: Final = {"vllm_config", "rank"}  # of WorkerBase.__init__, which keeps them as attributes


class WorkerStatus(TypedDict):
    """What one worker says of its shrink.

    Attributes:
        rank: of the worker in its engine.
        process: its process id.
        reduction: long name, such as 'deterministic:8/32'.
        kernel: name of the kernel, as a profiler shows it.
        installed: whether a call of vLLM's operator reaches the plugin right now.
        layers: LoRA layers whose shrink has run.
        launches: kernels that have run on the device; None unless FLIPTRACE_COUNT_LAUNCHES=1.
    """

    rank: int
    process: int
    reduction: str
    kernel: str
    installed: bool
    layers: int
    launches: int | None


def set_up() -> Installation:
    """Install what the environment asks for in this process, and be there when a worker starts.

    Raises:
        PluginError: if this vLLM, platform or environment cannot be covered.
    """
    wanted = settings.read(os.environ)
    if wanted is None:
        raise PluginError(f"{SHRINK_VARIABLE} must name a reduction; it is unset")
    try:
        import vllm.envs as variables
        from vllm.platforms import current_platform
        from vllm.v1.worker.worker_base import WorkerBase
    except ImportError as error:
        raise PluginError(_not_found("its platform and its workers", error)) from error
    coverage.check_process(
        wanted.reduction,
        platform="cuda" if current_platform.is_cuda() else current_platform.device_name,
        dual_stream=bool(getattr(variables, "VLLM_LORA_ENABLE_DUAL_STREAM", False)),
        batch_invariant=bool(getattr(variables, "VLLM_BATCH_INVARIANT", False)),
    )
    load_operator()
    installation = install(wanted, Operator())
    watch(WorkerBase, installation)
    carry_to_ray(os.environ)
    return installation


def carry_to_ray(environment: MutableMapping[str, str]) -> None:
    """Let vLLM copy the plugin's variables to workers that Ray starts; without, they would run vLLM's shrink."""
    carried = [name.strip() for name in environment.get(RAY_VARIABLE, "").split(",")]
    wanted = [name for name in (SHRINK_VARIABLE, COUNT_VARIABLE) if environment.get(name)]
    names = dict.fromkeys(name for name in (*carried, *wanted) if name)
    environment[RAY_VARIABLE] = ",".join(names)


def load_operator() -> None:
    """Make vLLM register its shrink, so that there is something to replace.

    Raises:
        PluginError: if this vLLM has no such module.
    """
    try:
        import vllm.lora.ops.triton_ops.lora_shrink_op  # noqa: F401  (for its effect)
    except ImportError as error:
        raise PluginError(_not_found("the module of its shrink", error)) from error


def watch(worker_class: type, installation: Installation) -> None:
    """Let each worker that starts check its configuration, log, and answer `STATUS_METHOD`.

    Raises:
        PluginError: if the class's constructor does not take what is needed.
    """
    if STATUS_METHOD in vars(worker_class):
        return
    start = worker_class.__init__  # type: ignore[misc]
    missing = _NEEDED - set(inspect.signature(start).parameters)
    if missing:
        raise PluginError(
            f"vLLM's {worker_class.__qualname__} must be made with {', '.join(sorted(_NEEDED))}; "
            f"this vLLM leaves out {', '.join(sorted(missing))}. Unset {SHRINK_VARIABLE}, or use "
            "a vLLM that kernels/README.md names"
        )

    @functools.wraps(start)
    def started(worker: Any, *arguments: Any, **named: Any) -> None:
        start(worker, *arguments, **named)
        greet(worker, installation)

    def answer(worker: Any) -> WorkerStatus:
        return describe(worker, installation)

    worker_class.__init__ = started  # type: ignore[misc]
    setattr(worker_class, STATUS_METHOD, answer)


def greet(worker: Any, installation: Installation) -> None:
    """Check the configuration of a worker that starts, and say in its log what it runs.

    Raises:
        PluginError: if the environment has changed, or this engine cannot be covered.
    """
    from vllm.logger import init_logger

    # Only loggers below 'vllm' have a handler.
    logger = init_logger("vllm.fliptrace_kernels")
    now = settings.read(os.environ)
    if now != installation.settings:
        raise PluginError(
            f"{SHRINK_VARIABLE} was {installation.settings.reduction} when this process first used "
            f"vLLM and is {os.environ.get(SHRINK_VARIABLE)!r} now, but what is installed stays. "
            "Start another process"
        )
    reduction = installation.settings.reduction
    notes = coverage.check_engine(reduction, worker.vllm_config)
    logger.info(
        "Every LoRA shrink of rank %d runs %s: kernel %s in process %d%s.",
        worker.rank,
        reduction,
        installation.replacement.kernel,
        os.getpid(),
        ", launches counted" if installation.replacement.counts else "",
    )
    for note in notes:
        logger.warning("%s", note)
    if installation.replacement.counts:
        # Kept by multiprocessing until the worker's process ends.
        Finalize(None, _log_launches, args=(logger, worker.rank, installation), exitpriority=100)


def describe(worker: Any, installation: Installation) -> WorkerStatus:
    """Say what a worker's shrink is and what it has done; waits for the device."""
    replacement = installation.replacement
    return WorkerStatus(
        rank=worker.rank,
        process=os.getpid(),
        reduction=str(replacement.reduction),
        kernel=replacement.kernel,
        installed=installation.is_reached(worker.device),
        layers=replacement.layers,
        launches=replacement.launches(),
    )


def ask(llm: Any) -> list[WorkerStatus]:
    """Collect `describe` from each worker of an engine.

    Raises:
        PluginError: if the workers run without the plugin.
    """
    try:
        statuses: list[WorkerStatus] = llm.collective_rpc(STATUS_METHOD)
    except Exception as error:
        if STATUS_METHOD not in str(error):
            raise
        raise PluginError(
            "this engine's workers run without the plugin and use vLLM's own shrink. Set "
            f"{SHRINK_VARIABLE} before the process first uses vLLM, install fliptrace on every node, and "
            "leave VLLM_PLUGINS unset or name 'fliptrace' in it"
        ) from error
    return statuses


def _log_launches(logger: Any, rank: int, installation: Installation) -> None:
    try:
        launches = installation.replacement.launches()
    except RuntimeError as error:  # the device is gone already
        logger.warning("Rank %d ends; its launches could not be read: %s", rank, error)
        return
    logger.info(
        "Rank %d ends: %d launches of %s ran on its device.",
        rank,
        launches,
        installation.replacement.kernel,
    )


def _not_found(what: str, error: ImportError) -> str:
    return (
        f"{SHRINK_VARIABLE} needs vLLM with {what}; importing failed: {error}. Unset "
        f"{SHRINK_VARIABLE}, or use a vLLM that kernels/README.md names"
    )
