"""Watch an engine in production: CUDA graphs, compilation, many requests.

``prepare_watch`` is called before the ``LLM`` is made, so that recording is part of the graphs that vLLM captures;
``watch`` then puts a recorder beside the engine that says, forward by forward, whose rows these were.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fliptrace.capture.vllm_engine.hosting import find_host
from fliptrace.capture.vllm_engine.live.recorder import LiveRecorder
from fliptrace.capture.vllm_engine.live.writing import ShrinkWriter
from fliptrace.capture.vllm_engine.loading import require_vllm
from fliptrace.errors import InputError


@dataclass
class _Prepared:
    """The tap of this process, once it is set."""

    writer: ShrinkWriter | None = None
    tap: Any = None


_prepared = _Prepared()


def prepare_watch(*, rows: int = 8192, operand_bytes: int = 2**30, at_end: bool = True) -> None:
    """Have the shrinks of the next ``LLM`` of this process recorded on its device; call it before the LLM is made.

    It takes ``rows`` x 15 kB for a model like SmolLM2-135M, and the operands' memory, on the device.

    Args:
        rows: of the ring, at least as many as a forward may have (max_num_batched_tokens); the rows of larger forwards
            are reported as missing.
        operand_bytes: memory for operand rows, of which the latest are kept; a reproducer needs them.
        at_end: record captured forwards at their end where that is safe, which is cheaper than layer by layer.

    Raises:
        InputError: no vLLM here, an engine that would run in another process, or rows below 1.
    """
    if rows < 1:
        raise InputError(f"the ring needs at least one row; got rows={rows}")
    require_vllm()
    if os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0") not in ("0", ""):
        raise InputError(
            f"VLLM_ENABLE_V1_MULTIPROCESSING is set to {os.environ['VLLM_ENABLE_V1_MULTIPROCESSING']!r}, which puts "
            "the engine in another process, where its forwards cannot be told apart; unset it or set it to 0"
        )
    from vllm.platforms import current_platform

    from fliptrace_kernels.vllm_plugin.tap import tap_shrinks

    forget_watch()
    writer = ShrinkWriter(rows, operand_bytes, at_end=at_end and current_platform.is_cuda())
    _prepared.tap = tap_shrinks(writer.show)
    _prepared.writer = writer


def forget_watch() -> None:
    """Take the tap off this process. Graphs that were captured with it go on recording, unseen."""
    if _prepared.tap is not None:
        _prepared.tap.remove()
    _prepared.tap = _prepared.writer = None


def prepared_writer() -> ShrinkWriter | None:
    """Return what records in this process; None before ``prepare_watch``."""
    return _prepared.writer


@contextlib.contextmanager
def watch(llm: Any) -> Iterator[LiveRecorder]:
    """Record every LoRA request that an ``LLM`` runs while inside, in its production configuration.

    >>> ft.prepare_watch()
    >>> llm = vllm.LLM(..., enable_lora=True)
    >>> with ft.watch(llm) as recorder:
    ...     llm.generate(prompts, parameters, lora_request=adapter)
    >>> reference = recorder.executions()

    Args:
        llm: made in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0) after ``prepare_watch``.

    Yields:
        The recorder; its executions stay after the end.

    Raises:
        InputError: prepare_watch was not called before, or for another LLM.
        UnsupportedModelError: an engine that cannot be watched, with the reason.
        RecordingError: the LLM has unfinished requests.
    """
    require_vllm()
    if _prepared.writer is None:
        raise InputError(
            "fliptrace.prepare_watch() must be called before the LLM is made, so that recording is part of the graphs "
            "that it captures; make the LLM anew after it"
        )
    recorder = LiveRecorder(find_host(llm), _prepared.writer)
    recorder.begin()
    try:
        yield recorder
    finally:
        recorder.end()
