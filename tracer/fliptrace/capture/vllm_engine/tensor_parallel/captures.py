"""Decode steps that ranks keep in slots of their own, joined in the driver into one step's records.

Every rank digests its slots where they lie and sends what a trace keeps: row digests, shrinks, new cache rows, operands
where they are kept whole, the largest logits. Here those go to their places in the buffers of an ArenaCapture over the
sites of all ranks, which makes the frames. Only rows of the cache are digested again: a row has the heads of all ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fliptrace.capture.arena import ArenaSlots, Slot
from fliptrace.capture.finishing import HostBuffers, Roll, TravellingParts, no_cache_digest
from fliptrace.capture.step_capture import ArenaCapture, CapturedStep, CaptureKeys
from fliptrace.numerics.digest import digest_rows
from fliptrace.trace import Frame

_WORD_BYTES = 8


@dataclass(frozen=True)
class _Step:
    """What ranks exported in one step, where it goes, and who keeps the digest of the whole cache."""

    received: list[Tensor]
    host: HostBuffers
    roll: Roll


class RanksCapture(ArenaCapture):
    """Keeps the decode steps of all ranks; see StepCapture and ArenaCapture."""

    def __init__(
        self,
        keys: CaptureKeys,
        slots: ArenaSlots,
        device: torch.device,
        *,
        operands: bool,
        buffers: int,
        ranks: int,
    ) -> None:
        """Allocate for the slots of all ranks.

        Args:
            keys: of all ranks.
            slots: of all ranks; each cache's has the heads of all.
            device: the driver's.
            operands: whether operands are kept whole.
            buffers: see ArenaCapture.
            ranks: how many.
        """
        super().__init__(keys, slots, device, operands=operands, buffers=buffers)
        self.ranks = ranks
        self._received: list[Tensor] = []
        self._rank_sources: tuple[int, ...] = ()
        self._waiting: deque[_Step] = deque()
        self._lock = threading.RLock()
        self._settled = False
        first = self._first
        sites = len(keys.sites) // ranks
        caches = first["operand"] - first["cache"]
        top = self._host[0].parts.top_ids.shape[0]
        if slots.logits is None:
            raise ValueError("the prefill must have finished before its slots are used")
        self._rank_parts = TravellingParts(
            3 * sites + caches + 1, sites, caches // 2, top, slots.logits.dtype
        )
        own = torch.arange(sites)
        self._digest_places = [
            torch.cat(
                [first[group] + own * ranks + rank for group in ("shrink", "operand", "projection")]
            )
            for rank in range(ranks)
        ]
        # A rank's slots in its own order: shrinks, caches, operands, projections, logits.
        self._digest_sources = torch.cat([own, sites + caches + own, 2 * sites + caches + own])
        self._word_places = [self._words_of(slots, keys, rank, operands) for rank in range(ranks)]
        self._cache_groups = _groups_of(self.arena.slots[first["cache"] : first["operand"]])

    def _words_of(self, slots: ArenaSlots, keys: CaptureKeys, rank: int, operands: bool) -> Tensor:
        """Return where each 64-bit word that a rank exports lies among the words exported here."""
        first, starts, places = self._first, self.arena.starts_bytes, []

        def add(slot: int, offset_bytes: int, size_bytes: int) -> None:
            begin = (starts[slot] + offset_bytes) // _WORD_BYTES
            places.append(torch.arange(begin, begin + -(-size_bytes // _WORD_BYTES)))

        sites = range(rank, len(keys.sites), self.ranks)
        for site in sites:
            add(first["shrink"] + site, 0, slots.shrinks[site].size_bytes)
        for number, layer in enumerate(keys.cache_layers):
            size = slots.caches[layer].size_bytes // self.ranks
            for half in range(2):
                add(first["cache"] + 2 * number + half, rank * size, size)
        if operands:
            for site in sites:
                add(first["operand"] + site, 0, slots.operands[site].size_bytes)
        return torch.cat(places)

    @staticmethod
    def fits(slots: ArenaSlots, ranks: int) -> bool:
        """Tell whether each rank's heads fill whole 64-bit words, so that they can be joined word by word."""
        return all(
            slot.shape[0] % ranks == 0 and (slot.size_bytes // ranks) % _WORD_BYTES == 0
            for slot in slots.caches.values()
        )

    @property
    def sources(self) -> tuple[int, ...]:
        """Per site the site whose slot holds its operand, in the step that was received."""
        return self._rank_sources

    def received(self, records: Sequence[bytes], sources: Sequence[Sequence[int]]) -> None:
        """Take what the ranks exported.

        Args:
            records: per rank.
            sources: per rank and own site the own site whose slot holds its operand.
        """
        self._received = [torch.frombuffer(bytearray(data), dtype=torch.int64) for data in records]
        self._rank_sources = tuple(
            own * self.ranks + rank
            for group in zip(*sources, strict=True)
            for rank, own in enumerate(group)
        )

    def finish(self, logits: Tensor, roll: Roll = no_cache_digest) -> CapturedStep:
        """See StepCapture; a step that ranks told record by record is finished as ArenaCapture does."""
        if not self._received:
            return super().finish(logits, roll)
        host, sources = self._next_host(), self._rank_sources
        self._waiting.append(_Step(self._received, host, roll))
        self._received = []
        if self._settled:
            self._settled = False
            self.settle()

        def frames(step: int, launches: Sequence[str]) -> list[Frame]:
            self.settle()
            return self._frames(step, tuple(launches), host, sources)

        def cache_digest() -> Tensor:
            self.settle()
            return host.parts.cache

        first = self._first
        cache_rows = host.parts.digests[first["cache"] : first["operand"]].view(-1, 2, 1, 2)
        return CapturedStep(cache_rows, cache_digest, frames)

    def settle(self, *, now_and_next: bool = False) -> None:
        """Join what was received so far, in order; steps are joined in the store's thread, while ranks run the next.

        Args:
            now_and_next: whoever asks looks at the cache's digest next, so the step that comes is joined at once, too.
        """
        with self._lock:
            while self._waiting:
                self._join(self._waiting.popleft())
            self._settled = self._settled or now_and_next

    def _join(self, step: _Step) -> None:
        host, first = step.host, self._first
        digests = host.parts.digests
        words = host.records.view(torch.int64)
        for rank, data in enumerate(step.received):
            parts = self._rank_parts.parts(data[: self._rank_parts.words])
            digests.index_copy_(
                0, self._digest_places[rank], parts.digests.index_select(0, self._digest_sources)
            )
            words.index_copy_(0, self._word_places[rank], data[self._rank_parts.words :])
            if rank == 0:
                digests[first["logits"]].copy_(parts.digests[-1])
                host.parts.top_values.copy_(parts.top_values)
                host.parts.top_ids.copy_(parts.top_ids)
        self._digest_cache_rows(words, digests)
        cache_rows = digests[first["cache"] : first["operand"]].clone().view(-1, 2, 1, 2)
        host.parts.cache.copy_(step.roll(cache_rows))

    def _digest_cache_rows(self, words: Tensor, digests: Tensor) -> None:
        first = self._first["cache"]
        for numbers, slot in self._cache_groups:
            begins = [self.arena.starts_bytes[first + number] // _WORD_BYTES for number in numbers]
            count = slot.words
            rows = torch.stack([words[begin : begin + count] for begin in begins])
            values = rows.view(torch.uint8)[:, : slot.size_bytes].contiguous().view(slot.dtype)
            digests.index_copy_(0, torch.tensor(numbers) + first, digest_rows(values))


def _groups_of(tensors: Sequence[Tensor]) -> list[tuple[list[int], Slot]]:
    """Group slots by shape and dtype: what is alike is digested at once."""
    groups: dict[Slot, list[int]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault(Slot(tuple(tensor.shape), tensor.dtype), []).append(number)
    return [(numbers, slot) for slot, numbers in groups.items()]
