"""Requests that are to run in one batch with the traced one: who they are, and what an engine must have room for.

Values only; batch.py runs them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fliptrace.capture.sources import adapter_folder, check_adapter, sha256_of, shown_name
from fliptrace.capture.vllm_engine.adapters import check_for_vllm
from fliptrace.errors import InputError

#: The adapter of a neighbour that has the traced request's.
TRACED = "traced"


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A request that runs in one batch with the traced one.

    Attributes:
        prompt: its text, encoded as prompts are, or its token ids.
        adapter: ``traced`` for the adapter of the traced request, None for the base model alone, else a folder or hub
            name of another.
    """

    prompt: str | tuple[int, ...]
    adapter: str | None = TRACED


@dataclass(frozen=True, slots=True)
class QueuedNeighbour:
    """A neighbour ready to be queued.

    Attributes:
        prompt_ids: its token ids.
        adapter: as the user named it, see Neighbour.
        adapter_sha256: of the adapter's files; "" for the traced one's and for none.
        rank: of another adapter; 0 for the traced one's and for none.
        lora_request: vLLM's LoRARequest; None for the base model alone.
    """

    prompt_ids: tuple[int, ...]
    adapter: str | None
    adapter_sha256: str
    rank: int
    lora_request: Any


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """The requests of a batch beside the traced one.

    Attributes:
        requests: in the order in which they are queued; at least one.
        place: how many of them are queued before the traced request.
    """

    requests: tuple[QueuedNeighbour, ...]
    place: int

    @property
    def adapters(self) -> int:
        """How many adapters the batch has besides the traced one."""
        return len({one.adapter_sha256 for one in self.requests if one.adapter_sha256})

    @property
    def rank(self) -> int:
        """The largest rank among them."""
        return max(one.rank for one in self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Rows of their prompts together."""
        return sum(len(one.prompt_ids) for one in self.requests)

    def describe(self) -> dict[str, Any]:
        """Return the manifest's section on the neighbours."""
        requests: list[dict[str, Any]] = [
            {
                "prompt_ids": list(one.prompt_ids),
                "prompt_tokens": len(one.prompt_ids),
                "prompt_sha256": hashlib.sha256(
                    ",".join(map(str, one.prompt_ids)).encode()
                ).hexdigest(),
                "adapter": one.adapter
                if one.adapter in (None, TRACED)
                else shown_name(one.adapter),
                "adapter_sha256": one.adapter_sha256,
            }
            for one in self.requests
        ]
        told = [
            [one["prompt_sha256"], one["adapter"] is None, one["adapter_sha256"]]
            for one in requests
        ]
        return {
            "count": len(requests),
            "queued_before_the_traced": self.place,
            "sha256": hashlib.sha256(json.dumps([self.place, told]).encode()).hexdigest(),
            "shrinks": "vLLM's own",
            "tokens": "chosen by vLLM, greedily, past end tokens; one that fills the model begins again",
            "requests": requests,
        }


def gather(
    neighbours: Sequence[Neighbour | None], lora_request: Any, number: int
) -> Neighbourhood | None:
    """Look the neighbours' adapters up.

    Args:
        neighbours: with token ids; None among them is the traced request itself, which is first without it.
        lora_request: the traced request's.
        number: vLLM's number of the first other adapter.

    Returns:
        None when there are no neighbours.

    Raises:
        InputError: the traced request stands at two places, or an adapter cannot be read.
        UnsupportedModelError: vLLM computes an adapter as another function than PEFT.
    """
    if neighbours.count(None) > 1:
        raise InputError(
            f"the traced request must have one place among its neighbours; got {neighbours.count(None)}"
        )
    others = [one for one in neighbours if one is not None]
    if not others:
        return None
    place = neighbours.index(None) if None in neighbours else 0
    known: dict[str, QueuedNeighbour] = {}
    queued = []
    for one in others:
        if isinstance(one.prompt, str):
            raise InputError(
                f"a neighbour's prompt must be encoded by now; got {one.prompt[:40]!r}"
            )
        ids = tuple(one.prompt)
        if one.adapter is None or one.adapter == TRACED:
            request = lora_request if one.adapter else None
            queued.append(QueuedNeighbour(ids, one.adapter, "", 0, request))
            continue
        folder = adapter_folder(one.adapter)
        sha = sha256_of([folder / "adapter_model.safetensors", folder / "adapter_config.json"])
        first = known.get(sha)
        if first is None:
            from vllm.lora.request import LoRARequest

            rank = check_for_vllm(folder, check_adapter(folder))
            name = f"fliptrace-neighbour-{len(known)}"
            request = LoRARequest(name, number + len(known), str(folder))
            first = known[sha] = QueuedNeighbour(ids, one.adapter, sha, rank, request)
        queued.append(QueuedNeighbour(ids, one.adapter, sha, first.rank, first.lora_request))
    return Neighbourhood(tuple(queued), place)
