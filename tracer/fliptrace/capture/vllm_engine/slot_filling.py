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

from collections.abc import Callable, Mapping, Sequence
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

#: Per dtype the slots' views, and of each the number of what goes there and its piece.
_Groups = list[tuple[list[Tensor], list[tuple[int, Cut]]]]


class _Item:
    """Where something goes that is seen once in a forward."""

    __slots__ = ("_address", "_bytes", "_dtype", "_raw", "pieces", "slots")

    def __init__(
        self,
        slots: Sequence[int],
        pieces: Sequence[tuple[Tensor, Cut]],
        raw: DeviceCopy | None = None,
    ) -> None:
        self.slots = frozenset(slots)
        self.pieces = tuple(pieces)
        slot, cut = self.pieces[0]
        self._raw = raw if cut is None and len(self.pieces) == 1 else None
        self._address, self._bytes, self._dtype = slot.data_ptr(), slot.nbytes, slot.dtype

    def copy(self, seen: Any) -> None:
        """Copy what was seen into the slots."""
        raw = self._raw
        if (
            raw is not None
            and seen.nbytes == self._bytes
            and seen.dtype is self._dtype
            and seen.is_contiguous()
        ):
            raw(self._address, seen)
            return
        for slot, cut in self.pieces:
            slot.copy_(seen if cut is None else cut(seen))


class SlotFiller:
    """Sees the LoRA layers and caches of an engine and fills one observer's slots.

    While a forward runs, what is seen goes into lists and little else is done; whether every layer was seen once, in
    order, is checked when it is over. Everything seen has a number: operands of all layers first, then their shrinks,
    their outputs, the keys of all caches, and the values.
    """

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
        self._every_layer = list(range(len(self._layers)))
        self._every_cache = list(range(len(self._paged)))
        self._first_output = 2 * len(self._layers)
        self._first_key = 3 * len(self._layers)
        self._first_value = self._first_key + len(self._paged)
        self._items: dict[int, _Item] = {}
        # Per layer whether operand and shrink, and whether the output, are copied when they are seen.
        self._at_once: list[tuple[bool, bool]] = [(True, True)] * len(self._layers)
        self._caches_at_once: list[bool] = [True] * len(self._paged)
        self._late: list[int] = []
        self._groups: _Groups = []
        self._filled = 0
        self._learned = False
        self._launched: tuple[Any, Any, list[tuple[int, ...]]] | None = None
        self._launches: list[str] = []
        self._sources = self._find_sources()
        self.begin()

    def _find_sources(self) -> list[int]:
        sources: list[int] = []
        for layer in self._layers:
            sites = range(layer.first, layer.first + len(layer.slices))
            sources += sites if self.slots.every_operand else [layer.first] * len(sites)
        return sources

    # During the forward ---------------------------------------------------------------------------

    def begin(self, _rows: int = 1) -> None:
        """A forward over one token is about to run."""
        self._watching = self._filled % CHECK_STEPS == 0
        everything = self._watching
        self._shrinks_now = [everything or both for both, _ in self._at_once]
        self._outputs_now = [everything or output for _, output in self._at_once]
        self._caches_now = [everything or cache for cache in self._caches_at_once]
        self._forget()

    def _forget(self) -> None:
        self._ran: list[int] = []
        self._operands: list[Tensor] = []
        self._shrinks: list[Any] = []
        self._buffer: Any = None
        self._expanded: list[int] = []
        self._outputs: list[Tensor] = []
        self._cached: list[int] = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def add_shrink(self, y: Any, x: Tensor, stacked: Any, scale: float, **keywords: Any) -> None:
        """Stand for the punica wrapper's add_shrink; see ShrinkPath.add_shrink."""
        path = self.path
        number = self._number.get(id(stacked))
        if number is None:
            number = self._by_key.get(path.key_of(stacked))
            if number is None:
                path.own_shrink(y, x, stacked, scale, **keywords)
                return
        if number == 0:
            path.require_adapter()
        runtime = path.runtime
        reduction = runtime.reduction
        if reduction is None or runtime.batch is not None:
            path.own_shrink(y, x, stacked, scale, **keywords)
        if reduction is not None:
            path.reduce(self._layers[number], y, self._row(x), stacked, scale)
        self._ran.append(number)
        self._operands.append(x)
        self._shrinks.append(y)
        self._buffer = y
        if self._shrinks_now[number]:
            self._copy_shrink(number, self._row(x), self._shrink_row(y))

    def add_expand(self, y: Tensor, x: Any, *arguments: Any, **keywords: Any) -> None:
        """Stand for the punica wrapper's add_expand."""
        self.path.own_expand(y, x, *arguments, **keywords)
        if x is not self._buffer:
            return
        number = self._ran[-1]
        self._expanded.append(number)
        self._outputs.append(y)
        if self._outputs_now[number]:
            self._copy_output(number, self._row(y))

    def cache_rows(self, number: int, key: Tensor, value: Tensor) -> None:
        """Layer ``number`` of the paged ones is about to cache these."""
        self._cached.append(number)
        self._keys.append(key)
        self._values.append(value)
        if self._caches_now[number]:
            self._copy_cache(number, self._row(key), self._row(value))

    def _row(self, rows: Tensor) -> Tensor:
        """Return the request's row [1, …]; the others are padding or neighbours', in an order that may change."""
        if rows.shape[0] == 1:
            return rows
        first = self.path.runtime.first
        return rows[first : first + 1]

    def _shrink_row(self, y: Any) -> Any:
        """Return the request's row of a tensor of all slices, [slices, 1, R]; a tuple of slices as it is."""
        if not isinstance(y, Tensor) or y.shape[1] == 1:
            return y
        first = self.path.runtime.first
        return y[:, first : first + 1]

    def _copy_shrink(self, number: int, x: Tensor, y: Any) -> None:
        if not self._learned:
            self._add_shrink_items(number, x, y)
        self._items[number].copy(x)
        self._items[len(self._layers) + number].copy(y)

    def _copy_output(self, number: int, y: Tensor) -> None:
        place = self._first_output + number
        if not self._learned:
            self._items[place] = self._output_item(self._layers[number], y)
        self._items[place].copy(y)

    def _copy_cache(self, number: int, key: Tensor, value: Tensor) -> None:
        if not self._learned:
            self._add_cache_items(number, key, value)
        self._items[self._first_key + number].copy(key)
        self._items[self._first_value + number].copy(value)

    # After the forward ----------------------------------------------------------------------------

    @torch.inference_mode()
    def finish(self) -> tuple[list[str], list[int]]:
        """Copy what was held; returns launches and sources per site, for SlotObserver.slots_filled.

        Raises:
            RecordingError: a layer did not run once, in order, or changed a tensor after it was seen that it had never
                changed before.
        """
        self._check_order()
        operands = self._rows(self._operands)
        held = [*operands, *self._shrink_rows(), *self._rows(self._outputs)]
        held += self._rows(self._keys)
        held += self._rows(self._values)
        if self._watching:
            self._compare(held)
        else:
            _copy(self._groups, held)
        launches = self._launches_now(operands)
        self._forget()
        self._filled += 1
        return launches, self._sources

    def _check_order(self) -> None:
        if self._ran != self._every_layer:
            raise self._out_of_order("shrink", self._ran)
        if self._expanded != self._every_layer:
            raise self._out_of_order("expand", self._expanded)
        if self._cached == self._every_cache:
            return
        missing = sorted(set(self._every_cache) - set(self._cached))
        if missing:
            raise RecordingError(
                f"layer {self._paged[missing[0]].number} cached no rows, so the cache cannot be recorded"
            )
        odd = self._cached[_first_odd(self._cached)]
        raise RecordingError(
            f"layers must cache their rows once in a forward, in order; {self._paged[odd].name} did not"
        )

    def _out_of_order(self, what: str, ran: Sequence[int]) -> RecordingError:
        place = _first_odd(ran)
        due = self._layers[place].name if place < len(self._layers) else "none"
        found = "did not run"
        if place < len(ran):
            due, found = self._layers[ran[place]].name, f"ran where {due} was due"
        return RecordingError(
            f"every {what} must run exactly once in a forward, in order; {due} {found}"
        )

    def _rows(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the request's rows. Tensors of one kind have equally many; copying another's would fail."""
        alone = not tensors or tensors[0].shape[0] == 1
        return tensors if alone else [self._row(rows) for rows in tensors]

    def _shrink_rows(self) -> list[Any]:
        alone = self._operands[0].shape[0] == 1
        return self._shrinks if alone else [self._shrink_row(y) for y in self._shrinks]

    def _compare(self, held: Sequence[Any]) -> None:
        """Compare what was copied when it was seen with what the tensors hold now."""
        arena = self.slots.arena
        seen, saved = arena.digests(), arena.buffer.clone()
        _copy(_grouped(self._items), held)
        differing = frozenset((arena.digests() != seen).any(1).nonzero().flatten().tolist())
        arena.buffer.copy_(saved)
        changed = {number for number, item in self._items.items() if item.slots & differing}
        if not self._learned:
            self._learn(changed)
            return
        odd = next((number for number in self._late if number in changed), None)
        if odd is not None:
            raise RecordingError(
                f"a tensor of {self._name_of(odd)} was changed after it was seen, in filled step {self._filled}, and "
                "was not in the first one: earlier records of it cannot be trusted, so this recording is void"
            )

    def _learn(self, changed: set[int]) -> None:
        count, late = len(self._layers), []
        for number in range(count):
            both = number in changed or count + number in changed
            output = self._first_output + number in changed
            self._at_once[number] = both, output
            late += [] if both else [number, count + number]
            late += [] if output else [self._first_output + number]
        for number in range(len(self._paged)):
            places = [self._first_key + number, self._first_value + number]
            self._caches_at_once[number] = any(place in changed for place in places)
            late += [] if self._caches_at_once[number] else places
        self._late = late
        self._groups = _grouped({number: self._items[number] for number in late})
        self._learned = True

    def _name_of(self, number: int) -> str:
        if number < self._first_key:
            return self._layers[number % len(self._layers)].name
        return self._paged[(number - self._first_key) % len(self._paged)].name

    def _launches_now(self, operands: Sequence[Tensor]) -> list[str]:
        runtime = self.path.runtime
        strides = [operand.stride() for operand in operands]
        shaped = (runtime.reduction, runtime.batch, strides)
        if self._launched != shaped:
            self._launches = [
                self.path.launch_of(operand, stack, part)
                for layer, operand, stack in zip(self._layers, operands, self._stacks, strict=True)
                for part in layer.slices
            ]
            self._launched = shaped
        return self._launches

    # Where things go ------------------------------------------------------------------------------

    def _item(self, places: Sequence[int], pieces: Sequence[tuple[Tensor, Cut]]) -> _Item:
        return _Item(places, pieces, self._raw_copy)

    def _add_shrink_items(self, number: int, x: Tensor, y: Any) -> None:
        layer = self._layers[number]
        sites = range(layer.first, layer.first + len(layer.slices))
        wanted = sites if self.slots.every_operand else sites[:1]
        places = [self.slots.operands[site] for site in wanted]
        arena = self.slots.arena
        self._items[number] = self._item(
            places, [(arena.slots[place].view(x.shape), None) for place in places]
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
        self._items[len(self._layers) + number] = self._item(places, pieces)

    def _output_item(self, layer: AdaptedLayer, y: Tensor) -> _Item:
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

    def _add_cache_items(self, number: int, key: Tensor, value: Tensor) -> None:
        place = self.slots.caches[self._paged[number].number]
        slots = self.slots.arena.slots[place : place + 2]
        firsts = (self._first_key, self._first_value)
        for offset, (first, rows, slot) in enumerate(zip(firsts, (key, value), slots, strict=True)):
            if rows.numel() != slot.numel():
                raise RecordingError(
                    f"{self._paged[number].name} caches {list(rows.shape)} in a forward over 1 token"
                )
            self._items[first + number] = self._item(
                [place + offset], [(slot.view(rows.shape), None)]
            )

    def _joined(self, places: Sequence[int]) -> Tensor | None:
        """View slots that follow one another without padding as one; None where they do not."""
        arena, first = self.slots.arena, places[0]
        follow = list(places) == list(range(first, first + len(places)))
        if not follow or not arena.contiguous(first, len(places)):
            return None
        begin = arena.starts_bytes[first]
        size = sum(arena.sizes_bytes[place] for place in places)
        return arena.buffer.view(torch.uint8)[begin : begin + size].view(arena.slots[first].dtype)


def _first_odd(ran: Sequence[int]) -> int:
    """Return the first place that has another number than its own, or the first one that is missing."""
    return next((place for place, number in enumerate(ran) if number != place), len(ran))


def _grouped(items: Mapping[int, _Item]) -> _Groups:
    """Split pieces by dtype: torch copies lists of one dtype in a few launches."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[tuple[int, Cut]]]] = {}
    for number, item in items.items():
        for slot, cut in item.pieces:
            destinations, sources = groups.setdefault(slot.dtype, ([], []))
            destinations.append(slot)
            sources.append((number, cut))
    return list(groups.values())


def _copy(groups: _Groups, held: Sequence[Any]) -> None:
    for destinations, sources in groups:
        pieces = [held[number] if cut is None else cut(held[number]) for number, cut in sources]
        torch._foreach_copy_(destinations, pieces)


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
