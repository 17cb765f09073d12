"""What ranks tell while they run a step, delivered to the driver's observer, interceptor and audit in one order.

All ranks run the same program, so they tell the same things in the same order: message by message the driver takes one
of each rank, rank 0 first. That order is the execution order of the engine's sites. What describes the whole model, not
a rank's part, must be the same on all ranks and is delivered once: the tokens that the embedding got, and the residual
stream. Cache rows are joined, and so are the operations of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fliptrace.capture.engine import ConsumptionAudit, Observer, ShrinkInterceptor
from fliptrace.capture.interception import checked_replacement
from fliptrace.capture.vllm_engine.tensor_parallel.joining import (
    joined_operations,
    unpacked_operations,
)
from fliptrace.capture.vllm_engine.tensor_parallel.layout import joined_heads
from fliptrace.capture.vllm_engine.tensor_parallel.messages import (
    Event,
    Packed,
    Question,
    pack,
    unpack,
)
from fliptrace.errors import RecordingError


class Delivery:
    """Delivers the messages of one step."""

    def __init__(
        self,
        ranks: int,
        observer: Observer | None,
        interceptor: ShrinkInterceptor | None,
        audit: ConsumptionAudit | None,
    ) -> None:
        """Know who is to be told; None where nobody is."""
        self.ranks = ranks
        self.observer, self.interceptor, self.audit = observer, interceptor, audit
        self._operands: list[Tensor] = [torch.empty(0)] * ranks

    def answer(self, rank: int, question: Question) -> Packed | None:
        """Ask the interceptor; None where it leaves the shrink alone."""
        operand = self._operand(rank, question.operand)
        if self.interceptor is None:
            return None
        z, site = unpack(question.shrink), question.place * self.ranks + rank
        given = checked_replacement(self.interceptor(site, operand, z), site, z)
        return None if given is z else pack(given)

    def deliver(self, events: Sequence[Event]) -> None:
        """Deliver what all ranks told in one place.

        Raises:
            RecordingError: they told different things.
        """
        first = events[0]
        if any((event.name, event.place) != (first.name, first.place) for event in events):
            told = ", ".join(f"rank {rank} {event.name}" for rank, event in enumerate(events))
            raise RecordingError(
                f"ranks must run the same layers in the same order; they told of {told}"
            )
        if first.name in ("shrink", "projection", "shrink_consumed"):
            for rank, event in enumerate(events):
                self._deliver_own(rank, event)
        elif first.name in ("cache_rows", "cache_consumed"):
            keys, values = (
                joined_heads([unpack(event.arguments[half]) for event in events], 0)
                for half in range(2)
            )
            if first.name == "cache_rows" and self.observer is not None:
                self.observer.cache_rows(_number(first), keys, values)
            elif first.name == "cache_consumed" and self.audit is not None:
                self.audit.cache_consumed(_number(first), keys, values)
        elif first.name == "operations":
            told_of = [unpacked_operations(*event.arguments) for event in events]
            for each in joined_operations(told_of):
                if self.observer is not None:
                    self.observer.operation(each.key, each.is_module, each.inputs, each.outputs)
        else:
            self._deliver_shared(events)

    def _deliver_own(self, rank: int, event: Event) -> None:
        site = _number(event) * self.ranks + rank
        if event.name == "shrink_consumed":
            if self.audit is not None:
                self.audit.shrink_consumed(site, unpack(event.arguments[0]))
            return
        if event.name == "projection":
            if self.observer is not None:
                self.observer.projection(site, unpack(event.arguments[0]))
            return
        operand = self._operand(rank, event.arguments[0])
        if self.observer is not None:
            self.observer.shrink(
                site, operand.unsqueeze(0), unpack(event.arguments[1]), event.arguments[2]
            )

    def _deliver_shared(self, events: Sequence[Event]) -> None:
        given: list[Any] = [event.arguments[0] for event in events]
        odd = next((rank for rank, each in enumerate(given) if each != given[0]), None)
        name = events[0].name
        what = "token ids" if name == "tokens_consumed" else "residual stream"
        if odd is not None:
            raise RecordingError(
                f"the {what} must be the same on all ranks, and rank {odd} has other bits than rank 0: their "
                "collectives do not give every rank the same sum, so no execution could be told from another"
            )
        if self.audit is None:
            return
        if name == "tokens_consumed":
            self.audit.tokens_consumed(unpack(given[0]))
        else:
            self.audit.residual(unpack(given[0]))

    def _operand(self, rank: int, sent: Packed | None) -> Tensor:
        """Return rows [T, K]: those that came, or those that came last."""
        if sent is not None:
            self._operands[rank] = unpack(sent).reshape(-1, sent.shape[-1])
        return self._operands[rank]


def _number(event: Event) -> int:
    if event.place is None:
        raise RecordingError(f"a rank told of {event.name} without a place")
    return event.place
