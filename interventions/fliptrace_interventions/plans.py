"""Plans: edits resolved against a pair, down to which element of which tensor an arm replaces.

Meaning, for an arm that starts at step s, with places ordered by (step, site):

* everything before s is the recipient's recorded state;
* up to and including ``recorded_until`` every shrink is the recipient's recorded one, with the patches applied; for an
  edit at one site that is this site, so that what comes before it keeps its recorded values;
* after it everything is computed under the continuation's reduction, where asked for with the recorded rounding errors
  (see rounding_errors), and patches apply to what was computed;
* a step that is replayed hands over one execution's recorded shrinks at every site.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fliptrace.errors import InputError
from fliptrace.numerics import integer_view
from fliptrace_interventions.edits import CachePart, EditValue, Source
from fliptrace_interventions.recorded import RecordedExecution

#: A shrink in an arm: (step, site index).
Place = tuple[int, int]

_PARTS = {
    CachePart.KEYS: (0,),
    CachePart.VALUES: (1,),
    CachePart.BOTH: (0, 1),
    CachePart.WHOLE: (0, 1),
}


@dataclass(frozen=True, slots=True)
class ShrinkPatch:
    """Replace elements of one shrink [T, R].

    Attributes:
        rows: rows within the step, None for all.
        ranks: rank indices, None for all.
        value: what to put there.
    """

    rows: tuple[int, ...] | None
    ranks: tuple[int, ...] | None
    value: EditValue

    def index(self, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return broadcastable indices of rows and ranks."""
        return _mesh(shape, self.rows, self.ranks)

    def count(self, shape: tuple[int, ...]) -> int:
        """Count the elements in a shrink of that shape."""
        return _count(shape, self.rows, self.ranks)

    def apply(self, base: Tensor, source: Tensor | None) -> None:
        """Write into ``base``; ``source`` is the recorded shrink of whoever the value comes from."""
        index = None
        if self.rows is not None or self.ranks is not None:
            index = self.index(tuple(base.shape))
        _put(base, index, self.value, source)


@dataclass(frozen=True, slots=True)
class CachePatch:
    """Replace elements of one layer's cache [2, T, kv_heads, head_dim] before a step.

    Attributes:
        layer: its number.
        part: keys, values or both.
        positions: absolute token positions, None for all.
        heads, dimensions: None for all.
        value: what to put there.
    """

    layer: int
    part: CachePart
    positions: tuple[int, ...] | None
    heads: tuple[int, ...] | None
    dimensions: tuple[int, ...] | None
    value: EditValue

    def index(self, shape: tuple[int, ...], first_position: int) -> tuple[Tensor, ...]:
        """Return broadcastable indices into a cache whose first row has that position."""
        return _mesh(
            shape,
            _PARTS[self.part],
            self._rows(first_position),
            self.heads,
            self.dimensions,
        )

    def count(self, shape: tuple[int, ...], first_position: int) -> int:
        """Count the elements in a cache of that shape."""
        return _count(
            shape, _PARTS[self.part], self._rows(first_position), self.heads, self.dimensions
        )

    def apply(self, base: Tensor, first_position: int, source: Tensor | None) -> None:
        """Write into ``base``; ``source`` is the same layer's recorded cache of whoever the value comes from."""
        index = None
        parts = (self.positions, self.heads, self.dimensions)
        if len(_PARTS[self.part]) == 1 or any(chosen is not None for chosen in parts):
            index = self.index(tuple(base.shape), first_position)
        _put(base, index, self.value, source)

    def _rows(self, first_position: int) -> tuple[int, ...] | None:
        if self.positions is None:
            return None
        return tuple(position - first_position for position in self.positions)


@dataclass(frozen=True, slots=True)
class StatePatch:
    """Replace one tensor of a layer's recurrent state before a step, whole.

    Attributes:
        layer: its number.
        name: which of the layer's tensors.
        value: what to put there.
    """

    layer: int
    name: str
    value: EditValue

    def apply(self, base: Tensor, source: Tensor | None) -> None:
        """Write into ``base``; ``source`` is the same tensor as whoever the value comes from recorded it."""
        _put(base, None, self.value, source)


@dataclass(frozen=True)
class Plan:
    """What one arm does.

    Attributes:
        recipient: whose recorded state it starts from; donor: the other.
        start: the arm's first step; target: the step whose token is its answer.
        recorded_until: up to where shrinks are the recorded ones, None when all are computed.
        watched_from: the first edited shrink; from here on operands are compared with the record. None without one.
        patches: per place, in order.
        cache_patches: per step, before it.
        replays: per step, whose shrinks are handed over.
        tokens: per step, what is fed instead of the recorded token that was generated there.
    """

    recipient: RecordedExecution
    donor: RecordedExecution
    start: int
    target: int
    recorded_until: Place | None = None
    watched_from: Place | None = None
    patches: Mapping[Place, tuple[ShrinkPatch, ...]] = field(default_factory=dict)
    cache_patches: Mapping[int, tuple[CachePatch | StatePatch, ...]] = field(default_factory=dict)
    replays: Mapping[int, Source] = field(default_factory=dict)
    tokens: Mapping[int, int] = field(default_factory=dict)

    def execution(self, source: Source) -> RecordedExecution:
        """Return whose values a source means."""
        return self.donor if source is Source.DONOR else self.recipient

    def is_recorded(self, place: Place) -> bool:
        """Tell whether the recipient's recorded shrink is handed over at a place."""
        return self.recorded_until is not None and place <= self.recorded_until

    @property
    def strict_operand(self) -> Place | None:
        """The first edited shrink, where nothing edited comes before it: its operand must be the recorded one."""
        place = self.watched_from
        if place is None:
            return None
        before = (
            any(step <= place[0] for step in self.cache_patches)
            or any(step < place[0] for step in self.replays)
            or any(step < place[0] for step in self.tokens)
        )
        return None if before else place

    @property
    def changes_cache(self) -> bool:
        """Tell whether cached rows may differ from the recipient's by the edits themselves."""
        return any(
            step != self.start or patch.value is not Source.RECIPIENT
            for step, group in self.cache_patches.items()
            for patch in group
        )

    @property
    def last_planned_step(self) -> int:
        """The last step that is not simply computed: after it, equal states have equal continuations."""
        fed = [step + 1 for step in self.tokens]
        recorded = [] if self.recorded_until is None else [self.recorded_until[0]]
        edited = [step for step, _ in self.patches]
        return max([self.start, *recorded, *edited, *self.cache_patches, *self.replays, *fed])

    def with_patches(self, patches: Mapping[Place, tuple[ShrinkPatch, ...]]) -> Plan:
        """Return the plan with other patches in the place of its own: a sham."""
        return dataclasses.replace(self, patches=patches)

    def with_own_values(self) -> Plan:
        """Return the plan in which everything is put where it already is: self-substitution."""
        return dataclasses.replace(
            self,
            patches={
                place: tuple(dataclasses.replace(patch, value=Source.RECIPIENT) for patch in group)
                for place, group in self.patches.items()
            },
            cache_patches={
                step: tuple(dataclasses.replace(patch, value=Source.RECIPIENT) for patch in group)
                for step, group in self.cache_patches.items()
            },
            replays=dict.fromkeys(self.replays, Source.RECIPIENT),
            tokens={},
        )

    def unedited(self) -> Plan:
        """Return the plan of the unedited arm: the recipient's own values.

        Where the recorded value is handed over anyway no edit is left; an edit of what was computed becomes one with
        the recipient's recorded value.
        """
        own = self.with_own_values()
        return dataclasses.replace(
            own,
            patches={
                place: group for place, group in own.patches.items() if not self.is_recorded(place)
            },
            cache_patches={
                step: group for step, group in own.cache_patches.items() if step != self.start
            },
        )

    def key(self) -> tuple[Any, ...]:
        """Return what identifies the arm within a workbench."""
        return (
            self.recipient.which,
            self.start,
            self.target,
            self.recorded_until,
            tuple(sorted(self.patches.items())),
            tuple(sorted(self.cache_patches.items())),
            tuple(sorted(self.replays.items())),
            tuple(sorted(self.tokens.items())),
        )


def _mesh(shape: tuple[int, ...], *chosen: tuple[int, ...] | None) -> tuple[Tensor, ...]:
    """Return one index tensor per dimension, each broadcasting along its own."""
    index = []
    for dimension, numbers in enumerate(chosen):
        values = torch.arange(shape[dimension]) if numbers is None else torch.tensor(numbers)
        sizes = [1] * len(chosen)
        sizes[dimension] = -1
        index.append(values.view(sizes))
    return tuple(index)


def _count(shape: tuple[int, ...], *chosen: tuple[int, ...] | None) -> int:
    count = 1
    for dimension, numbers in enumerate(chosen):
        count *= shape[dimension] if numbers is None else len(numbers)
    return count


def _put(
    base: Tensor, index: tuple[Tensor, ...] | None, value: EditValue, source: Tensor | None
) -> None:
    """Write bits, not numbers: an assignment of floats may change the payload of a NaN. No index means everything."""
    place = ... if index is None else tuple(part.to(base.device) for part in index)
    target = integer_view(base)
    if isinstance(value, Source):
        if source is None or source.shape != base.shape or source.dtype != base.dtype:
            raise InputError(
                f"the {value}'s recorded value must be {base.dtype} {list(base.shape)}; got "
                f"{'none' if source is None else f'{source.dtype} {list(source.shape)}'}"
            )
        target[place] = integer_view(source)[place]
        return
    given = torch.tensor([value.bits], dtype=torch.int64).to(torch.int32).view(torch.float32)
    target[place] = integer_view(given.to(base.dtype)).to(base.device)
