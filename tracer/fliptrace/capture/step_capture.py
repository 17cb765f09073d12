"""Two ways to keep what one step reports: tensor by tensor for many rows, through an Arena for one row.

Both copy at capture time and give the same frames; RowsCapture is the plain way, and the specification of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fliptrace.capture.arena import Arena, ArenaSlots, Slot
from fliptrace.capture.cache_digest import cache_row_digests
from fliptrace.capture.engine import RowSlots
from fliptrace.capture.finishing import (
    HostBuffers,
    Parts,
    RecordDigests,
    Replay,
    Roll,
    TravellingParts,
    no_cache_digest,
)
from fliptrace.capture.frames import (
    TOP_LOGITS,
    decode_layouts,
    host_array,
    logits_frames,
    tensor_bytes,
    top_logits,
)
from fliptrace.numerics.digest import digest_rows, digest_tensor
from fliptrace.trace import Frame, Kind, Layout, LayoutEntry, dtype_name


@dataclass(frozen=True, slots=True)
class CaptureKeys:
    """Names of the records, in execution order."""

    sites: tuple[str, ...]
    cache_layers: tuple[int, ...]


@dataclass
class CapturedStep:
    """One step's records, on their way to the host.

    Attributes:
        cache_row_digests: int64 [cache layers, 2, T, 2], on the engine's device, until the next step.
        cache_digest: returns what ``roll`` gave; called in the store's thread, after ``frames``.
        frames: builds the frames; called once in the store's thread, waits for copies.
    """

    cache_row_digests: Tensor
    cache_digest: Callable[[], Tensor] = field(repr=False)
    frames: Callable[[int, Sequence[str]], list[Frame]] = field(repr=False)


class StepCapture(Protocol):
    """Keeps the reports of one step."""

    def shrink(self, site: int, operand: Tensor, output: Tensor) -> None:
        """Keep output [T, R] and the digests (or values) of operand [1, T, K]."""

    def projection(self, site: int, output: Tensor) -> None:
        """Keep the digests of output [1, T, N]."""

    def cache_rows(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values, each [kv_heads, T, head_dim]."""

    def finish(self, logits: Tensor, roll: Roll = no_cache_digest) -> CapturedStep:
        """End the step.

        Args:
            logits: [vocabulary].
            roll: gets the digests of the cache rows and returns the whole cache's.
        """
        ...


class RowsCapture:
    """Keeps a step of any number of rows, digesting each tensor as it comes."""

    def __init__(self, keys: CaptureKeys, *, operands: bool) -> None:
        """Expect one report per site and cache layer."""
        self.keys = keys
        self.keep_operands = operands
        count = len(keys.sites)
        self._shrinks: list[Tensor] = [torch.empty(0)] * count
        self._operand_digests: list[Tensor] = [torch.empty(0)] * count
        self._operand_values: list[Tensor] = [torch.empty(0)] * count
        self._projections: list[Tensor] = [torch.empty(0)] * count
        self._caches: dict[int, Tensor] = {}
        self._last: tuple[Tensor, int, Tensor, Tensor] | None = None
        self.slots = ArenaSlots()

    def shrink(self, site: int, operand: Tensor, output: Tensor) -> None:
        """See StepCapture."""
        self._shrinks[site] = output.detach().clone()
        self.slots.shrinks[site] = Slot((1, output.shape[-1]), output.dtype)
        self.slots.operands[site] = Slot((1, 1, operand.shape[-1]), operand.dtype)
        if (
            self._last is not None
            and self._last[0] is operand
            and self._last[1] == operand._version
        ):
            digests, values = self._last[2:]  # q, k and v read one tensor
        else:
            rows = operand.reshape(-1, operand.shape[-1])
            digests = digest_rows(rows)
            values = rows.detach().clone() if self.keep_operands else digests
            self._last = (operand, operand._version, digests, values)
        self._operand_digests[site] = digests
        self._operand_values[site] = values

    def projection(self, site: int, output: Tensor) -> None:
        """See StepCapture."""
        self.slots.projections[site] = Slot((1, 1, output.shape[-1]), output.dtype)
        self._projections[site] = digest_rows(output.reshape(-1, output.shape[-1]))

    def cache_rows(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See StepCapture."""
        self.slots.caches[layer] = Slot((keys.shape[0], 1, keys.shape[2]), keys.dtype)
        self._caches[layer] = torch.stack((keys, values)).transpose(1, 2).contiguous()

    def finish(self, logits: Tensor, roll: Roll = no_cache_digest) -> CapturedStep:
        """See StepCapture. Copies to the host at once: a prefill is one step among many."""
        self._last = None
        self.slots.logits = Slot(tuple(logits.shape), logits.dtype)
        caches = [self._caches[layer] for layer in self.keys.cache_layers]
        rows = [cache_row_digests(values) for values in caches]
        shrink_digests = [digest_tensor(z) for z in self._shrinks]
        cache_digests = [digest_tensor(values) for values in caches]
        kept = {
            Kind.SHRINK: self._shrinks,
            Kind.OPERAND: self._operand_digests,
            Kind.PROJECTION: self._projections,
            Kind.CACHE: caches,
        }
        if self.keep_operands:
            kept[Kind.OPERAND_VALUES] = self._operand_values
        host = {kind: [tensor.cpu() for tensor in tensors] for kind, tensors in kept.items()}
        digests = {
            Kind.SHRINK: torch.stack(shrink_digests).cpu(),
            Kind.CACHE: torch.stack(cache_digests).cpu() if cache_digests else None,
        }
        top_values, top_ids = top_logits(logits)
        logits_digest = digest_rows(logits.unsqueeze(0)).cpu()
        values, ids = top_values.cpu(), top_ids.cpu()
        keys = self.keys

        def frames(step: int, launches: Sequence[str]) -> list[Frame]:
            names = {Kind.CACHE: [f"cache.{layer}" for layer in keys.cache_layers]}
            built = []
            for kind, tensors in host.items():
                entries = [
                    LayoutEntry(key, dtype_name(t.dtype), tuple(t.shape), launch)
                    for key, t, launch in zip(
                        names.get(kind, keys.sites),
                        tensors,
                        launches if kind is Kind.SHRINK else [""] * len(tensors),
                        strict=True,
                    )
                ]
                payload = b"".join(tensor_bytes(tensor) for tensor in tensors)
                built.append(Frame(step, kind, Layout(tuple(entries)), payload, digests.get(kind)))
            return [*built, *logits_frames(step, values, ids, logits_digest)]

        row_digests = torch.stack(rows) if rows else torch.empty((0, 2, 0, 2), dtype=torch.int64)
        cache_digest = roll(row_digests)
        return CapturedStep(row_digests, cache_digest.cpu, frames)


class ArenaCapture:
    """Keeps decode steps, one after another, in buffers of fixed size.

    The device buffer is reused every step: its copies to the host are ordered before the next step's writes on the
    same stream. Host buffers are ``buffers`` in number and used in turn, so that a step's bytes stay while the store's
    thread has up to ``buffers - 2`` steps to write.
    """

    def __init__(
        self,
        keys: CaptureKeys,
        slots: ArenaSlots,
        device: torch.device,
        *,
        operands: bool,
        buffers: int,
    ) -> None:
        """Allocate for these slots."""
        self.keys = keys
        self.keep_operands = operands
        self.device = device
        sites = range(len(keys.sites))
        shrinks = [slots.shrinks[site] for site in sites]
        caches = [slots.caches[layer] for layer in keys.cache_layers for _ in range(2)]
        operand_slots = [slots.operands[site] for site in sites]
        projections = [slots.projections[site] for site in sites]
        if slots.logits is None:
            raise ValueError("the prefill must have finished before its slots are used")
        groups = [shrinks, caches, operand_slots, projections, [slots.logits]]
        starts = [0]
        for group in groups:
            starts.append(starts[-1] + len(group))
        top = min(TOP_LOGITS, slots.logits.shape[0])
        # The digests of whole records are computed where their launches are free: on CUDA within the captured graph, on
        # the CPU in the store's thread.
        self._early = device.type == "cuda"
        self._records = RecordDigests(shrinks, caches, device)
        self._travelling = TravellingParts(
            starts[-1], len(shrinks), len(caches) // 2, top, slots.logits.dtype
        )
        self.arena = Arena(
            [slot for group in groups for slot in group],
            device,
            head_words=self._travelling.words,
        )
        self._device_parts = self._travelling.parts(self.arena.head)
        self._first = dict(
            zip(("shrink", "cache", "operand", "projection", "logits", "end"), starts, strict=True)
        )
        slot_views = self.arena.slots
        self._shrink_slots = slot_views[: starts[1]]
        self._operand_slots = slot_views[starts[2] : starts[3]]
        self._projection_slots = slot_views[starts[3] : starts[4]]
        self._cache_place = {
            layer: starts[1] + 2 * number for number, layer in enumerate(keys.cache_layers)
        }
        self.row_slots = RowSlots(
            self.arena,
            range(starts[0], starts[1]),
            range(starts[2], starts[3]),
            range(starts[3], starts[4]),
            self._cache_place,
            operands,
        )
        exported = starts[3] if operands else starts[2]
        self._exported_bytes = self.arena.starts_bytes[exported] if exported < starts[-1] else 0
        self._unpadded = {
            name: self.arena.contiguous(start, stop - start)
            for name, start, stop in zip(self._first, starts[:-1], starts[1:], strict=False)
        }
        self._layouts = decode_layouts(
            keys.sites, keys.cache_layers, (shrinks, caches, operand_slots)
        )
        self._shrink_layouts: dict[tuple[str, ...], Layout] = {}
        self._sources = list(sites)
        self._operand_places: dict[tuple[int, ...], list[int]] = {}
        self._last: tuple[Tensor, int, int] | None = None
        pinned = device.type == "cuda"
        exported_words = self._travelling.words + self._exported_bytes // 8
        self._outgoing = self.arena.storage[:exported_words]
        self._host = [
            HostBuffers(
                torch.empty(exported_words, dtype=torch.int64, pin_memory=pinned), self._travelling
            )
            for _ in range(buffers)
        ]
        self._finishing = Replay(self._digest, self.arena.head[:-2])
        self._turn = 0

    def shrink(self, site: int, operand: Tensor, output: Tensor) -> None:
        """See StepCapture."""
        self._shrink_slots[site].copy_(output)
        last = self._last
        if last is not None and last[0] is operand and last[1] == operand._version:
            self._sources[site] = last[2]  # q, k and v read one tensor: its digest serves all three
            if not self.keep_operands:
                return
        else:
            self._sources[site] = site
            self._last = (operand, operand._version, site)
        self._operand_slots[site].copy_(operand)

    def projection(self, site: int, output: Tensor) -> None:
        """See StepCapture."""
        self._projection_slots[site].copy_(output)

    def cache_rows(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See StepCapture."""
        place = self._cache_place[layer]
        self.arena.slots[place].copy_(keys)
        self.arena.slots[place + 1].copy_(values)

    def filled(self, sources: Sequence[int]) -> None:
        """An engine filled the slots itself; ``sources`` names per site the site whose slot holds its operand."""
        self._sources = list(sources)

    def finish(self, logits: Tensor, roll: Roll = no_cache_digest) -> CapturedStep:
        """See StepCapture. Nothing here waits for the device."""
        host, event, cache_rows = self._send(logits, roll)
        sources = tuple(self._sources)

        def frames(step: int, launches: Sequence[str]) -> list[Frame]:
            if event is not None:
                event.synchronize()
            return self._frames(step, tuple(launches), host, sources)

        return CapturedStep(cache_rows, lambda: host.parts.cache, frames)

    def transfer(self, logits: Tensor) -> HostBuffers:
        """End the step like ``finish``, wait for the copies and return what arrived; the next step overwrites it."""
        host, event, _ = self._send(logits, no_cache_digest)
        if event is not None:
            event.synchronize()
        return host

    def _send(
        self, logits: Tensor, roll: Roll
    ) -> tuple[HostBuffers, torch.cuda.Event | None, Tensor]:
        """Digest the slots and start the copies to the host; the digests of cache rows are on the device."""
        self._last = None
        first = self._first
        self.arena.slots[first["logits"]].copy_(logits)
        self._finishing.run()
        # Digests stay in the arena until the next step's replace them; whoever keeps them longer copies.
        cache_rows = self._device_parts.digests[first["cache"] : first["operand"]].view(-1, 2, 1, 2)
        self._device_parts.cache.copy_(roll(cache_rows))
        host = self._next_host()
        host.whole.copy_(self._outgoing, non_blocking=True)
        event = torch.cuda.Event() if self.device.type == "cuda" else None
        if event is not None:
            event.record()
        return host, event, cache_rows

    def _next_host(self) -> HostBuffers:
        host = self._host[self._turn % len(self._host)]
        self._turn += 1
        return host

    def _digest(self) -> None:
        """Digest every slot and find the largest logits; all of it lies at fixed addresses."""
        parts = self._device_parts
        parts.digests.copy_(self.arena.digests())
        if self._early:
            self._digest_records(parts)
        values, ids = top_logits(self.arena.slots[self._first["logits"]])
        parts.top_values.copy_(values)
        parts.top_ids.copy_(ids)

    def _digest_records(self, parts: Parts) -> None:
        first = self._first
        parts.shrinks.copy_(self._records.of_shrinks(parts.digests[: first["cache"]]))
        if self._cache_place:
            rows = parts.digests[first["cache"] : first["operand"]]
            parts.caches.copy_(self._records.of_caches(rows))

    def _frames(
        self, step: int, launches: tuple[str, ...], host: HostBuffers, sources: tuple[int, ...]
    ) -> list[Frame]:
        first = self._first
        digests = host_array(host.parts.digests)
        if not self._early:
            self._digest_records(host.parts)
        places = self._operand_places.get(sources)
        if places is None:
            places = [first["operand"] + source for source in sources]
            self._operand_places = {sources: places}
        layout = self._shrink_layouts.get(launches)
        if layout is None:
            entries = self._layouts[Kind.SHRINK].entries
            layout = Layout(
                tuple(
                    LayoutEntry(entry.key, entry.dtype, entry.shape, launch)
                    for entry, launch in zip(entries, launches, strict=True)
                )
            )
            self._shrink_layouts[launches] = layout
        built = [
            Frame(
                step,
                Kind.SHRINK,
                layout,
                self._payload(host, "shrink", "cache"),
                host.parts.shrinks.clone(),
            ),
            Frame(
                step,
                Kind.OPERAND,
                self._layouts[Kind.OPERAND],
                digests[places].tobytes(),
            ),
            Frame(
                step,
                Kind.PROJECTION,
                self._layouts[Kind.PROJECTION],
                digests[first["projection"] : first["logits"]].tobytes(),
            ),
        ]
        if self._cache_place:
            built.append(
                Frame(
                    step,
                    Kind.CACHE,
                    self._layouts[Kind.CACHE],
                    self._payload(host, "cache", "operand"),
                    host.parts.caches.clone(),
                )
            )
        if self.keep_operands:
            built.append(
                Frame(
                    step,
                    Kind.OPERAND_VALUES,
                    self._layouts[Kind.OPERAND_VALUES],
                    self._payload(host, "operand", "projection"),
                )
            )
        logits_digest = host.parts.digests[first["logits"] : first["end"]]
        return [
            *built,
            *logits_frames(step, host.parts.top_values, host.parts.top_ids, logits_digest),
        ]

    def _payload(self, host: HostBuffers, begin: str, end: str) -> bytes:
        """Join the rows of a group of slots, without the padding between them."""
        arena, start, stop = self.arena, self._first[begin], self._first[end]
        data = host_array(host.records)
        if self._unpadded[begin]:
            return bytes(data[arena.starts_bytes[start] : arena.starts_bytes[stop]])
        return b"".join(
            data[
                arena.starts_bytes[slot] : arena.starts_bytes[slot] + arena.sizes_bytes[slot]
            ].tobytes()
            for slot in range(start, stop)
        )
