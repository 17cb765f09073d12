"""Start the ranks of a tensor-parallel engine, and refuse what could not be recorded before any of them loads."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fliptrace.capture.sources import adapter_folder
from fliptrace.capture.vllm_engine.tensor_parallel.messages import Done
from fliptrace.capture.vllm_engine.tensor_parallel.processes import RankGroup
from fliptrace.capture.vllm_engine.tensor_parallel.troubles import error_of
from fliptrace.errors import FliptraceError, InputError, UnsupportedModelError

#: Loading a large model from a cold disk takes minutes.
LOAD_SECONDS = 1800.0
_REFUSED = {
    "pipeline_parallel_size": "layers would run in processes that do not meet in one step",
    "data_parallel_size": "several requests would run at once",
    "prefill_context_parallel_size": "ranks would hold other tokens",
    "decode_context_parallel_size": "ranks would hold other tokens",
}


@dataclass(frozen=True)
class LoadedRanks:
    """A group of ranks that is ready.

    Attributes:
        group: their processes.
        facts: what each said of itself; see RankServer.facts.
        tokenizer: the model's.
        arguments: of the engine, as given.
    """

    group: RankGroup
    facts: tuple[Mapping[str, Any], ...]
    tokenizer: Any
    arguments: Mapping[str, Any]


def wanted_ranks(arguments: Mapping[str, Any]) -> int:
    """Return how many ranks the arguments of ``vllm.LLM`` ask for.

    Raises:
        InputError: no whole number above 0.
        UnsupportedModelError: another kind of parallelism.
    """
    for name, reason in _REFUSED.items():
        if arguments.get(name, 1) not in (1, None):
            raise UnsupportedModelError(
                f"{name} must be 1 in a recording ({reason}); got {arguments[name]!r}. tensor_parallel_size can be "
                "larger"
            )
    ranks = arguments.get("tensor_parallel_size", 1)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise InputError(f"tensor_parallel_size must be a whole number, 1 or more; got {ranks!r}")
    return ranks


def load_ranks(
    model: str, adapter: str, *, device: str, dtype: str, arguments: Mapping[str, Any]
) -> LoadedRanks:
    """Start a process per rank and wait until each has loaded its part.

    Args:
        model: a folder in Hugging Face format or a hub name.
        adapter: a folder with a PEFT LoRA adapter, or a hub name.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: see load_llm.
        arguments: of ``vllm.LLM``, with tensor_parallel_size.

    Raises:
        InputError: something given cannot be used, or there are fewer GPUs than ranks.
        UnsupportedModelError: what cannot be recorded with several ranks.
        RecordingError: a rank's process ended while it loaded.
    """
    ranks = wanted_ranks(arguments)
    passed = {name: value for name, value in arguments.items() if name != "tensor_parallel_size"}
    _check(passed, ranks, device)
    folder = adapter_folder(adapter)
    group = RankGroup(
        ranks,
        {
            "model": model,
            "adapter": str(folder),
            "device": device,
            "dtype": dtype,
            "arguments": passed,
        },
    )
    try:
        facts = _facts(group)
        tokenizer = pickle.loads(facts[0]["tokenizer"])  # noqa: S301  (rank 0 is ours)
    except FliptraceError as error:
        if not group.trouble:
            group.fail("loading failed")
        group.close()
        where = str(group.log(0).parent)
        if where in str(error):
            raise
        raise type(error)(f"{error}; what ranks printed is in {where}") from error
    except BaseException:
        group.kill()
        group.close()
        raise
    return LoadedRanks(group, facts, tokenizer, dict(arguments))


def _facts(group: RankGroup) -> tuple[Mapping[str, Any], ...]:
    facts = []
    for rank in range(group.count):
        answer = group.receive(rank, LOAD_SECONDS)
        if not isinstance(answer, Done):
            raise error_of(answer, rank, group.count)
        facts.append(answer.value)
    first = facts[0]
    for rank, own in enumerate(facts):
        for what in ("sites", "cache_layers", "windows", "row_shapes"):
            if own[what] != first[what]:
                raise UnsupportedModelError(
                    f"all ranks must have the same {what.replace('_', ' ')}; rank {rank} has {own[what]} and rank 0 "
                    f"{first[what]}"
                )
    return tuple(facts)


def _check(passed: Mapping[str, Any], ranks: int, device: str) -> None:
    backend = passed.get("distributed_executor_backend")
    if backend not in (None, "external_launcher"):
        raise InputError(
            f"with tensor_parallel_size={ranks} every rank is a process of fliptrace's; leave "
            f"distributed_executor_backend={backend!r} out"
        )
    if passed.get("fully_sharded_loras"):
        raise UnsupportedModelError(
            "fully_sharded_loras=True cannot be recorded: ranks would hold parts of a shrink and add them to one "
            "another before expand, so no rank would have a shrink of its own. Leave it out"
        )
    if passed.get("enable_expert_parallel"):
        raise UnsupportedModelError(
            "enable_expert_parallel=True cannot be recorded: ranks would run other experts, and so other sites. Leave "
            "it out"
        )
    try:
        json.dumps(dict(passed))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"with tensor_parallel_size={ranks} the arguments of vLLM must be plain values, which travel to the ranks "
            f"({error})"
        ) from error
    if device in ("auto", "cuda") and torch.version.cuda and torch.cuda.is_available():
        found = torch.cuda.device_count()
        if found < ranks:
            raise InputError(
                f"tensor_parallel_size={ranks} needs as many GPUs; {found} can be seen (CUDA_VISIBLE_DEVICES)"
            )
