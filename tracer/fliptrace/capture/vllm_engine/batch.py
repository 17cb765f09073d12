"""Neighbours while they run: queued with the traced request, scheduled with it in every forward, and ended with it.

vLLM samples them itself. Nothing here reads or writes what they compute; what matters is which rows of a forward are
the traced request's, and that a batch keeps its size. A neighbour that fills the model is over and begins again with
its prompt, in a forward that then has as many rows more.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fliptrace.capture.vllm_engine.hosting import Host
from fliptrace.capture.vllm_engine.neighbours import Neighbourhood, QueuedNeighbour
from fliptrace.errors import InputError, RecordingError, UnsupportedModelError

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Where the traced request lies in a forward.

    Attributes:
        first: its first row among the forward's rows.
        total: rows of the forward.
        place: its number among the forward's requests.
        requests: how many these are.
    """

    first: int
    total: int
    place: int
    requests: int


@dataclass(slots=True)
class _Running:
    """A neighbour on the engine.

    Attributes:
        queued: who it is.
        name: vLLM's internal name of its request.
        is_computed: its prompt ran, so that a forward computes one more token of it.
    """

    queued: QueuedNeighbour
    name: str
    is_computed: bool = False


def queue_request(
    host: Host, name: str, ids: tuple[int, ...], limit: int, lora_request: Any
) -> str:
    """Queue a greedy request that ends when it has ``limit`` tokens, and not before; returns its internal name."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0.0, max_tokens=limit - len(ids), ignore_eos=True, detokenize=False
    )
    found: str = host.llm.llm_engine.add_request(
        name, {"prompt_token_ids": list(ids)}, parameters, lora_request=lora_request
    )
    return found


class RunningNeighbours:
    """The neighbours of one engine's requests, one after another."""

    def __init__(self, host: Host, neighbourhood: Neighbourhood | None, limit: int) -> None:
        """Know who they are; ``queue`` begins them.

        Args:
            host: where they run.
            neighbourhood: who; None for nobody.
            limit: how many tokens a request may have.
        """
        self.host = host
        self.neighbourhood = neighbourhood
        self.limit = limit
        self._running: list[_Running] = []

    @property
    def are_running(self) -> bool:
        """Whether they were queued and not ended."""
        return bool(self._running)

    def queue(self, *, before: bool) -> None:
        """Queue those that come before the traced request, or those after it."""
        hood = self.neighbourhood
        if hood is None:
            return
        chosen = hood.requests[: hood.place] if before else hood.requests[hood.place :]
        self._running.extend(_Running(one, self._begin(one)) for one in chosen)

    def _begin(self, one: QueuedNeighbour) -> str:
        name = f"fliptrace-neighbour-{next(_numbers)}"
        return queue_request(self.host, name, one.prompt_ids, self.limit, one.lora_request)

    def top_up(self) -> None:
        """Begin those again that have filled the model."""
        requests = self.host.scheduler.requests
        for one in self._running:
            if one.name not in requests:
                self._forget(one)
                one.name, one.is_computed = self._begin(one.queued), False

    def due(self) -> dict[str, int]:
        """Return how many tokens of each the next forward must compute."""
        return {
            one.name: 1 if one.is_computed else len(one.queued.prompt_ids) for one in self._running
        }

    def check_preempted(self, step: int) -> None:
        """Refuse a batch from which vLLM took somebody.

        Raises:
            RecordingError: it did.
        """
        requests = self.host.scheduler.requests
        for number, one in enumerate(self._running):
            request = requests.get(one.name)
            if request is None or request.num_preemptions:
                what = "preempted" if request is not None else "ended"
                raise RecordingError(
                    f"vLLM {what} neighbour {number} before step {step}, so the batch is no longer the one that was "
                    "asked for and this recording is void. Give the engine more cache blocks (gpu_memory_utilization, "
                    "kv_cache_memory_bytes), or fewer neighbours"
                )

    def computed(self) -> None:
        """A forward over what was due ran."""
        for one in self._running:
            one.is_computed = True

    def token_ids(self) -> tuple[tuple[int, ...], ...]:
        """Return what each has generated since it began last."""
        requests = self.host.scheduler.requests
        return tuple(
            tuple(requests[one.name].output_token_ids) if one.name in requests else ()
            for one in self._running
        )

    def end(self) -> None:
        """Take them off the engine."""
        running, self._running = self._running, []
        for one in running:
            self._forget(one)

    def _forget(self, one: _Running) -> None:
        self.host.llm.llm_engine.abort_request([one.name], internal=True)


def check_batch(host: Host, hood: Neighbourhood, vocabulary: int, rank: int) -> None:
    """Refuse neighbours that an engine has no room for, or would compute wrongly.

    Args:
        host: the engine.
        hood: who is to run.
        vocabulary: number of token ids.
        rank: of the traced adapter.

    Raises:
        InputError: a prompt that cannot be run.
        UnsupportedModelError: too many requests or adapters for the engine, or a mixture that it computes wrongly.
    """
    config, lora = host.config, host.config.lora_config
    length = int(config.model_config.max_model_len)
    for number, one in enumerate(hood.requests):
        odd = [token for token in one.prompt_ids if not 0 <= token < vocabulary]
        if odd or not 0 < len(one.prompt_ids) < length - 1:
            raise InputError(
                f"neighbour {number}'s prompt must have 1 to {length - 2} token ids in 0 .. {vocabulary - 1}; it has "
                f"{len(one.prompt_ids)}{f', {odd[0]} among them' if odd else ''}"
            )
    needs = (
        ("max_num_seqs", int(config.scheduler_config.max_num_seqs), len(hood.requests) + 1),
        ("max_loras", int(lora.max_loras), hood.adapters + 1),
        ("max_lora_rank", int(lora.max_lora_rank), max(hood.rank, rank)),
    )
    short = [
        f"{name} must be at least {need}, and is {has}" for name, has, need in needs if has < need
    ]
    if short:
        raise UnsupportedModelError(
            f"this vLLM engine has no room for {len(hood.requests)} neighbours: {'; '.join(short)}. Make the LLM with "
            "these settings, or let load_engine(..., engine='vllm', neighbours=...) make it"
        )
    if any(one.adapter is None for one in hood.requests) and host.worker.device.type == "cpu":
        raise UnsupportedModelError(
            "on the CPU vLLM applies an adapter to the rows of a batch that should have none (vLLM PR 48421), so "
            "a neighbour without adapter would be another computation than it says. Give every neighbour an adapter"
        )
    if int(config.parallel_config.world_size) != 1:
        raise UnsupportedModelError(
            f"neighbours run on one worker; this engine has {config.parallel_config.world_size}. Leave the neighbours "
            "out, or use tensor_parallel_size=1"
        )
    name = _preparation(host)
    if not callable(getattr(host.runner, name, None)):
        raise UnsupportedModelError(
            f"the rows of a batch are told apart where vLLM's runner lays them out ({name}, as in 0.26 and 0.32); "
            f"{type(host.runner).__name__} has no such method. Leave the neighbours out"
        )


def _preparation(host: Host) -> str:
    return "prepare_inputs" if host.is_v2 else "_prepare_inputs"


@contextlib.contextmanager
def rows_told(host: Host, request: str, tell: Callable[[BatchRows], None]) -> Iterator[None]:
    """Say where a request's rows lie as soon as vLLM has laid a forward out, before any layer runs, while inside."""
    runner, name = host.runner, _preparation(host)
    own = getattr(runner, name)

    def prepare(*arguments: Any, **keywords: Any) -> Any:
        result = own(*arguments, **keywords)
        if host.is_v2:
            names, starts = list(result.req_ids), result.query_start_loc_np
        else:
            names, starts = list(runner.input_batch.req_ids), runner.query_start_loc.np
        place = names.index(request)
        tell(BatchRows(int(starts[place]), int(starts[len(names)]), place, len(names)))
        return result

    setattr(runner, name, prepare)
    try:
        yield
    finally:
        vars(runner).pop(name, None)


def require_mapping(manager: Any, adapter: int, rows: BatchRows, count: int, step: int) -> int:
    """Check that vLLM mapped the traced rows to the traced adapter.

    Args:
        manager: vLLM's LoRAModelManager.
        adapter: vLLM's number of the adapter.
        rows: where they lie.
        count: how many they are.
        step: for the message.

    Returns:
        The adapter's slot.

    Raises:
        RecordingError: it did not.
    """
    mapped = manager._last_mapping
    found = () if mapped is None else mapped.index_mapping[rows.first : rows.first + count]
    slots = manager.lora_index_to_id
    if tuple(found) != (adapter,) * count or adapter not in slots:
        raise RecordingError(
            f"the {count} rows of the traced request in step {step} must all be mapped to its adapter {adapter}; "
            f"vLLM mapped them to {sorted(set(found))}, so this recording is void"
        )
    slot: int = slots.index(adapter)
    return slot


def check_schedule(
    found: Mapping[str, int], due: Mapping[str, int], traced: str, step: int
) -> None:
    """Compare what vLLM scheduled with what a batch must compute.

    Raises:
        RecordingError: the traced request, a neighbour or a stranger has other rows.
    """
    if found == due:
        return
    others = sum(number for name, number in found.items() if name != traced)
    wanted = sum(number for name, number in due.items() if name != traced)
    raise RecordingError(
        f"vLLM scheduled {found.get(traced, 0)} tokens of this request and {others} of others in step {step}, where "
        f"{due[traced]} and {wanted or 'none'} were required; this recording is void"
    )
