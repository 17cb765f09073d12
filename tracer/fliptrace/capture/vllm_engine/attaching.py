"""Attach to an ``LLM`` that a user already has, and leave it as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

from fliptrace.capture.sources import adapter_folder
from fliptrace.capture.vllm_engine.engine import VllmEngine
from fliptrace.capture.vllm_engine.hosting import check_settings, find_host
from fliptrace.capture.vllm_engine.loading import describe_llm, require_vllm
from fliptrace.capture.vllm_engine.neighbours import Neighbour, gather
from fliptrace.capture.vllm_engine.reductions import OWN_REDUCTION
from fliptrace.errors import InputError

#: vLLM's number of an adapter that is given by its folder; high, so that it is nobody else's.
_OUR_ADAPTER = 2**20


@contextlib.contextmanager
def attach(
    llm: Any,
    adapter: Any,
    *,
    reduction: str = OWN_REDUCTION,
    seed: int | None = None,
    neighbours: Sequence[Neighbour | None] = (),
) -> Iterator[VllmEngine]:
    """Trace on a vLLM engine that exists, while inside.

    Inside, ``trace_pair(tracer, prompt=...)`` and everything else that takes an engine runs on it, one request at a
    time, with its neighbours if it has any; the user's own requests wait until the end. After it, the engine has no
    trace of it: no hook, no request, and vLLM's own shrink.

    Args:
        llm: vllm.LLM, made in this process with the settings that a recording needs.
        adapter: the LoRA adapter to trace: vLLM's LoRARequest, or its folder.
        reduction: how shrinks sum at first: ``vllm-own`` leaves them to vLLM's kernel.
        seed: arrival schedule of simulated atomics.
        neighbours: who runs in one batch with the traced request; see neighbours.gather.

    Yields:
        The engine.

    Raises:
        InputError: no such LLM or adapter, or the engine runs in another process.
        UnsupportedModelError: settings of the LLM that would make a recording wrong, each with its reason.
        RecordingError: the LLM has unfinished requests.
    """
    require_vllm()
    check_settings(find_host(llm))  # before the model's files are hashed
    request = _lora_request(adapter)
    loaded = dataclasses.replace(
        describe_llm(llm, request), neighbours=gather(neighbours, request, _OUR_ADAPTER + 1)
    )
    engine = VllmEngine(loaded, reduction=reduction, seed=seed)
    try:
        yield engine
    finally:
        engine.close()


def _lora_request(adapter: Any) -> Any:
    from vllm.lora.request import LoRARequest

    if isinstance(adapter, LoRARequest):
        return adapter
    if isinstance(adapter, (str, os.PathLike)):
        folder = adapter_folder(str(adapter))
        return LoRARequest("fliptrace", _OUR_ADAPTER, str(folder))
    raise InputError(
        "adapter must be the LoRARequest that your own requests use, or the adapter's folder; got "
        f"{type(adapter).__name__}"
    )
