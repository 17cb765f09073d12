"""Fill an observer's slots in forwards over one token, with as few operations on the forward's path as can be.

A decode step hands some 120 LoRA layers and 30 caches to the recorder. Copying each of their tensors when it is seen
would launch some 900 operations a step. Most of those tensors are never written again after they were seen, so it is
enough to hold on to them and to copy all of them together when the forward is over: one call per dtype. A few are
(rotary embedding turns queries and keys around in place, fused norms overwrite a projection's output): those are copied
when they are seen. Which are which is not assumed: in the first step, and in every 64th after it, everything is copied
when it is seen and compared with what the held tensors contain at the end. A tensor that changed is copied at once from
then on; one that begins to change later ends the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fliptrace.capture.device_copy import DeviceCopy, find_device_copy
from fliptrace.capture.engine import RowSlots
from fliptrace.capture.vllm_engine.cache import PagedLayer
from fliptrace.capture.vllm_engine.shrinks import AdaptedLayer, ShrinkPath, ShrinkRuntime
from fliptrace.errors import RecordingError

#: Every how many filled steps held tensors are compared with copies made when they were seen.
CHECK_STEPS = 64

#: Takes a piece of what was held; None for all of it.
Cut = Callable[[Any], Tensor] | None


class _Item:
    """Something that is seen once in a forward, and the slots that it goes to."""

    __slots__ = ("_raw", "held", "pieces", "slots")

    def __init__(
        self,
        slots: Sequence[int],
        pieces: Sequence[tuple[Tensor, Cut]],
        raw: DeviceCopy | None = None,
    ) -> None:
        self.slots = frozenset(slots)
        self.pieces = tuple(pieces)
        self.held: Any = None
        self._raw = raw

    def copy(self) -> None:
        """Copy what is held into the slots."""
        raw = self._raw
        for slot, cut in self.pieces:
            held = self.held if cut is None else cut(self.held)
            alike = held.dtype is slot.dtype and held.nbytes == slot.nbytes
            if raw is not None and alike and held.is_contiguous():
                raw(slot.data_ptr(), held)
            else:
                slot.copy_(held)


class SlotFiller:
    """Sees the LoRA layers and caches of an engine and fills one observer's slots."""

    def __init__(
        self,
        path: ShrinkPath,
        layers: Sequence[AdaptedLayer],
        paged: Sequence[PagedLayer],
        slots: RowSlots,
    ) -> None:
        """Know where everything goes; which tensors may be held is learned in the first forward."""
        self.path = path
        self.slots = slots
        self._raw_copy = find_device_copy(slots.arena.buffer.device)
        self._layers = tuple(layers)
        self._paged = tuple(paged)
        # The tuples are kept, so that their addresses stay theirs.
        self._stacks: list[Any] = [layer.module.lora_a_stacked for layer in layers]
        self._number = {id(stack): number for number, stack in enumerate(self._stacks)}
        self._by_key = {layer.key: number for number, layer in enumerate(layers)}
        count = len(self._layers)
        self._operands: list[_Item] = []
        self._shrinks: list[_Item] = []
        self._projections: list[_Item] = []
        self._keys: list[_Item] = []
        self._values: list[_Item] = []
        self._everything = (
            self._operands,
            self._shrinks,
            self._projections,
            self._keys,
            self._values,
        )
        self._at_once: list[tuple[bool, bool]] = [(True, True)] * count
        self._caches_at_once: list[bool] = [True] * len(self._paged)
        self._late: list[_Item] = []
        self._groups: list[tuple[list[Tensor], list[tuple[_Item, Cut]]]] = []
        self._next = 0
        self._buffer: Any = None
        self._filled = 0
        self._learned = False
        self._watching = True
        self._launched: tuple[Any, Any, list[tuple[int, ...]]] | None = None
        self._launches: list[str] = []
        self._sources = self._find_sources()

    def _find_sources(self) -> list[int]:
        sources: list[int] = []
        for layer in self._layers:
            sites = range(layer.first, layer.first + len(layer.slices))
            sources += sites if self.slots.every_operand else [layer.first] * len(sites)
        return sources

    # During the forward ---------------------------------------------------------------------------

    def begin(self, _rows: int = 1) -> None:
        """A forward over one token is about to run."""
        self._next = 0
        self._watching = self._filled % CHECK_STEPS == 0
        if not self._learned:
            for items in self._everything:
                items.clear()

    def add_shrink(self, y: Any, x: Tensor, stacked: Any, scale: float, **keywords: Any) -> None:
        """Stand for the punica wrapper's add_shrink; see ShrinkPath.add_shrink."""
        path = self.path
        number = self._number.get(id(stacked))
        if number is None:
            number = self._by_key.get(path.key_of(stacked))
            if number is None:
                path.own_shrink(y, x, stacked, scale, **keywords)
                return
        if number != self._next:
            raise self._out_of_order(number)
        if number == 0:
            path.require_adapter()
        runtime = path.runtime
        if runtime.reduction is None or runtime.batch is not None:
            path.own_shrink(y, x, stacked, scale, **keywords)
        if runtime.reduction is not None:
            path.reduce(self._layers[number], y, self._row(x), stacked, scale)
        self._buffer = y
        if x.shape[0] != 1:  # neighbours, or rows that vLLM pads
            x = self._row(x)
            if isinstance(y, Tensor):
                y = y[:, runtime.first : runtime.first + 1]
        if not self._learned:
            self._add_items(self._layers[number], x, y)
        self._operands[number].held = x
        item = self._shrinks[number]
        item.held = y
        if self._watching or self._at_once[number][0]:
            self._operands[number].copy()
            item.copy()
        self._next = number + 1

    def add_expand(self, y: Tensor, x: Any, *arguments: Any, **keywords: Any) -> None:
        """Stand for the punica wrapper's add_expand."""
        self.path.own_expand(y, x, *arguments, **keywords)
        number = self._next - 1
        if number < 0 or x is not self._buffer:
            return
        if y.shape[0] != 1:
            y = self._row(y)
        if not self._learned:
            self._projections.append(self._projection_item(self._layers[number], y))
        item = self._projections[number]
        item.held = y
        if self._watching or self._at_once[number][1]:
            item.copy()

    def cache_rows(self, number: int, key: Tensor, value: Tensor) -> None:
        """Layer ``number`` of the paged ones is about to cache these."""
        if key.shape[0] != 1:
            key, value = self._row(key), self._row(value)
        if not self._learned:
            self._add_cache(number, key, value)
        keys, values = self._keys[number], self._values[number]
        keys.held, values.held = key, value
        if self._watching or self._caches_at_once[number]:
            keys.copy()
            values.copy()

    def _row(self, rows: Tensor) -> Tensor:
        """Return the request's row [1, …] of a forward's rows; a batch may be laid out anew in every step."""
        first = self.path.runtime.first
        return rows[first : first + 1]

    def _out_of_order(self, number: int) -> RecordingError:
        layer = self._layers[number]
        expected = self._layers[self._next].name if self._next < len(self._layers) else "none"
        return RecordingError(
            f"every shrink must run exactly once in a forward, in order; {layer.name} ran where {expected} was due"
        )

    # After the forward ----------------------------------------------------------------------------

    @torch.inference_mode()
    def finish(self) -> tuple[list[str], list[int]]:
        """Copy what was held; returns launches and sources per site, for SlotObserver.slots_filled.

        Raises:
            RecordingError: a layer did not run, or changed a tensor after it was seen that it had never changed before.
        """
        if self._next != len(self._layers):
            raise RecordingError(
                "every shrink must run exactly once in a forward, in order; "
                f"{self._layers[self._next].name} did not run"
            )
        if len(self._keys) != len(self._paged):
            layer = self._paged[len(self._keys)]
            raise RecordingError(
                f"layer {layer.number} cached no rows, so the cache cannot be recorded"
            )
        if self._watching:
            self._compare()
        else:
            self._copy(self._groups)
        launches, self._buffer = self._launches_now(), None
        for items in self._everything:
            for item in items:
                item.held = None
        self._filled += 1
        return launches, self._sources

    def _copy(self, groups: list[tuple[list[Tensor], list[tuple[_Item, Cut]]]]) -> None:
        for destinations, sources in groups:
            held = [item.held if cut is None else cut(item.held) for item, cut in sources]
            torch._foreach_copy_(destinations, held)

    def _compare(self) -> None:
        """Compare what was copied when it was seen with what the tensors hold now."""
        arena = self.slots.arena
        everything = [item for items in self._everything for item in items]
        seen, saved = arena.digests(), arena.buffer.clone()
        self._copy(_grouped(everything))
        differing = frozenset((arena.digests() != seen).any(1).nonzero().flatten().tolist())
        arena.buffer.copy_(saved)
        changed = {id(item) for item in everything if item.slots & differing}
        if not self._learned:
            self._learn(changed)
            return
        odd = next((item for item in self._late if id(item) in changed), None)
        if odd is not None:
            raise RecordingError(
                f"a tensor of {self._name_of(odd)} was changed after it was seen, in filled step {self._filled}, and "
                "was not in the first one: earlier records of it cannot be trusted, so this recording is void"
            )

    def _learn(self, changed: set[int]) -> None:
        self._at_once = [
            (id(operand) in changed or id(shrink) in changed, id(projection) in changed)
            for operand, shrink, projection in zip(
                self._operands, self._shrinks, self._projections, strict=True
            )
        ]
        self._caches_at_once = [
            id(keys) in changed or id(values) in changed
            for keys, values in zip(self._keys, self._values, strict=True)
        ]
        self._late = []
        for number, (both, projection) in enumerate(self._at_once):
            if not both:
                self._late += [self._operands[number], self._shrinks[number]]
            if not projection:
                self._late.append(self._projections[number])
        for number, at_once in enumerate(self._caches_at_once):
            if not at_once:
                self._late += [self._keys[number], self._values[number]]
        self._groups = _grouped(self._late)
        self._learned = True

    def _name_of(self, item: _Item) -> str:
        for number, layer in enumerate(self._layers):
            if item in (self._operands[number], self._shrinks[number], self._projections[number]):
                return layer.name
        numbers = [
            n for n, pair in enumerate(zip(self._keys, self._values, strict=True)) if item in pair
        ]
        return self._paged[numbers[0]].name

    def _launches_now(self) -> list[str]:
        runtime = self.path.runtime
        strides = [item.held.stride() for item in self._operands]
        shaped = (runtime.reduction, runtime.batch, strides)
        if self._launched != shaped:
            self._launches = [
                self.path.launch_of(item.held, stack, part)
                for layer, item, stack in zip(
                    self._layers, self._operands, self._stacks, strict=True
                )
                for part in layer.slices
            ]
            self._launched = shaped
        return self._launches

    # Where things go ------------------------------------------------------------------------------

    def _item(self, places: Sequence[int], pieces: Sequence[tuple[Tensor, Cut]]) -> _Item:
        return _Item(places, pieces, self._raw_copy)

    def _add_items(self, layer: AdaptedLayer, x: Tensor, y: Any) -> None:
        sites = range(layer.first, layer.first + len(layer.slices))
        wanted = sites if self.slots.every_operand else sites[:1]
        places = [self.slots.operands[site] for site in wanted]
        arena = self.slots.arena
        self._operands.append(
            self._item(places, [(arena.slots[place].view(x.shape), None) for place in places])
        )
        places = [self.slots.shrinks[site] for site in sites]
        joined = self._joined(places)
        pieces: list[tuple[Tensor, Cut]]
        if joined is not None and isinstance(y, Tensor) and y.numel() == joined.numel():
            pieces = [(joined.view(y.shape), None)]
        else:
            pieces = [
                (arena.slots[place], _shrink_cut(part.part, self.path.runtime))
                for place, part in zip(places, layer.slices, strict=True)
            ]
        self._shrinks.append(self._item(places, pieces))

    def _projection_item(self, layer: AdaptedLayer, y: Tensor) -> _Item:
        places = [self.slots.projections[layer.first + n] for n in range(len(layer.slices))]
        joined = self._joined(places)
        if joined is not None and joined.numel() == y.numel():
            return self._item(places, [(joined.view(y.shape), None)])
        return self._item(
            places,
            [
                (self.slots.arena.slots[place].flatten(), _column_cut(part.columns))
                for place, part in zip(places, layer.slices, strict=True)
            ],
        )

    def _add_cache(self, number: int, key: Tensor, value: Tensor) -> None:
        if number != len(self._keys):
            raise RecordingError(
                f"layers must cache their rows once in a forward, in order; {self._paged[number].name} did not"
            )
        place = self.slots.caches[self._paged[number].number]
        slots = self.slots.arena.slots
        for items, offset, rows in ((self._keys, 0, key), (self._values, 1, value)):
            if rows.numel() == slots[place + offset].numel():
                pieces: list[tuple[Tensor, Cut]] = [(slots[place + offset].view(rows.shape), None)]
            else:
                raise RecordingError(
                    f"{self._paged[number].name} caches {list(rows.shape)} in a forward over 1 token"
                )
            items.append(self._item([place + offset], pieces))

    def _joined(self, places: Sequence[int]) -> Tensor | None:
        """View slots that follow one another without padding as one; None where they do not."""
        arena, first = self.slots.arena, places[0]
        follow = list(places) == list(range(first, first + len(places)))
        if not follow or not arena.contiguous(first, len(places)):
            return None
        begin = arena.starts_bytes[first]
        size = sum(arena.sizes_bytes[place] for place in places)
        return arena.buffer.view(torch.uint8)[begin : begin + size].view(arena.slots[first].dtype)


def _grouped(items: Sequence[_Item]) -> list[tuple[list[Tensor], list[tuple[_Item, Cut]]]]:
    """Split pieces by dtype: torch copies lists of one dtype in a few launches."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[tuple[_Item, Cut]]]] = {}
    for item in items:
        for slot, cut in item.pieces:
            destinations, sources = groups.setdefault(slot.dtype, ([], []))
            destinations.append(slot)
            sources.append((item, cut))
    return list(groups.values())


def _shrink_cut(part: int, runtime: ShrinkRuntime) -> Cut:
    def cut(y: Any) -> Tensor:
        # A tensor was cut to one row when it was seen; a tuple of slices was not.
        first = 0 if isinstance(y, Tensor) else runtime.first
        row: Tensor = y[part][first : first + 1, : runtime.rank]
        return row

    return cut


def _column_cut(columns: slice) -> Cut:
    def cut(y: Tensor) -> Tensor:
        return y.view(-1)[columns]

    return cut
