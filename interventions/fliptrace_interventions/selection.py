"""What edits select in a recorded pair, decided and counted before anything runs."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fliptrace.capture.engine import Engine
from fliptrace.errors import InputError
from fliptrace.numerics import integer_view
from fliptrace_interventions.cache_places import (
    check_cache_places,
    check_representable,
    chosen_layers,
    refuse_state_twice,
)
from fliptrace_interventions.edits import (
    CacheEdit,
    Edit,
    ForcedTokens,
    GivenValue,
    ReplayShrinks,
    ShrinkEdit,
    Source,
)
from fliptrace_interventions.plans import CachePatch, Place, Plan, ShrinkPatch, StatePatch
from fliptrace_interventions.recorded import RecordedExecution, recorded_parts

#: What the shrinks between several edited sites may be.
BETWEEN = ("recorded", "recomputed")


@dataclass(frozen=True, slots=True)
class SelectedEdit:
    """What one edit selects.

    Attributes:
        edit: the edit.
        elements: how many elements; differing: how many of them the edit would change, bit by bit.
        places: for people, in execution order: ``layer 2 mlp.up_proj, prefill, 1 row of 16``.
    """

    edit: Edit
    elements: int
    differing: int
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """What edits select together.

    Attributes:
        edits: one entry per edit.
        first_step: the step with which an arm begins.
        not_applicable: why nothing can be learned by running them; none when something can.
    """

    edits: tuple[SelectedEdit, ...]
    first_step: int
    not_applicable: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        """How many elements are selected."""
        return sum(selected.elements for selected in self.edits)

    @property
    def differing(self) -> int:
        """How many elements an arm with these edits would get other bits of."""
        return sum(selected.differing for selected in self.edits)

    def describe(self) -> str:
        """Say what is selected, one line per edit."""
        return "\n".join(
            f"{selected.edit.name}: {selected.elements} elements, {selected.differing} of them differ ("
            f"{'; '.join(selected.places)})"
            for selected in self.edits
        )


def resolve(
    edits: Sequence[Edit],
    recipient: RecordedExecution,
    donor: RecordedExecution,
    engine: Engine,
    target: int,
    between: str = "recorded",
) -> tuple[Selection, Plan]:
    """Decide what edits select, and what an arm with them does.

    Args:
        edits: at least one.
        recipient: whose execution is edited; donor: whose values are put in.
        donor: the other.
        engine: with the recordings' model.
        target: the step whose token is judged.
        between: what the shrinks between several edited sites are.

    Returns:
        The selection and the plan.

    Raises:
        InputError: an edit selects nothing, another number of elements than it expects, an evicted or unknown place,
            a step that no arm reaches, or an element that another edit selects, too.
    """
    if not edits:
        raise InputError("at least one edit is needed")
    if between not in BETWEEN:
        raise InputError(f"between must be one of {', '.join(BETWEEN)}; got {between!r}")
    resolver = _Resolver(recipient, donor, engine, target)
    selected = tuple(resolver.select(edit) for edit in edits)
    for entry in selected:
        expected = getattr(entry.edit, "expect", None)
        if entry.elements == 0 or (expected is not None and expected != entry.elements):
            raise InputError(
                f"{entry.edit.name} was to select {expected or 'at least 1'} elements and selects {entry.elements} ("
                f"{'; '.join(entry.places) or 'nothing'}); narrow the edit, or correct its 'expect'"
            )
    resolver.refuse_overlaps()
    start = 0 if resolver.before_prefill else min(edit.first_step for edit in edits)
    selection = Selection(selected, start, _not_applicable(resolver, selected, target))
    return selection, resolver.plan(start, between)


def _not_applicable(
    resolver: _Resolver, selected: tuple[SelectedEdit, ...], target: int
) -> tuple[str, ...]:
    if resolver.before_prefill:
        flipped = " and the tokens differ at step 0 already" if target == 0 else ""
        return (f"before step 0 there is no cache to edit{flipped}",)
    if any(entry.differing for entry in selected):
        return ()
    if all(isinstance(entry.edit, CacheEdit) for entry in selected):
        return ("the selected part of the incoming cache is bit-equal in both executions",)
    return ("what the edits put in is bit-equal to what is there",)


class _Resolver:
    """Turns edits into patches, one after another, and checks them together."""

    def __init__(
        self, recipient: RecordedExecution, donor: RecordedExecution, engine: Engine, target: int
    ) -> None:
        self.recipient, self.donor, self.engine, self.target = recipient, donor, engine, target
        self.sites = {(site.path, site.slice): number for number, site in enumerate(engine.sites)}
        self.patches: dict[Place, list[ShrinkPatch]] = defaultdict(list)
        self.cache_patches: dict[int, list[CachePatch | StatePatch]] = defaultdict(list)
        self.replays: dict[int, Source] = {}
        self.tokens: dict[int, int] = {}
        self.before_prefill = False

    def select(self, edit: Edit) -> SelectedEdit:
        """Resolve one edit."""
        if isinstance(edit, ShrinkEdit):
            return self._shrink(edit)
        if isinstance(edit, CacheEdit):
            return self._cache(edit)
        if isinstance(edit, ReplayShrinks):
            return self._replay(edit)
        return self._forced(edit)

    def plan(self, start: int, between: str) -> Plan:
        """Put the patches together."""
        places = sorted(self.patches)
        first = places[0] if places else None
        recorded_until = None
        if first is not None and (between == "recorded" or first[0] == start):
            recorded_until = places[-1] if between == "recorded" else first
        if self.cache_patches and between == "recomputed":
            recorded_until = None
        return Plan(
            recipient=self.recipient,
            donor=self.donor,
            start=start,
            target=self.target,
            recorded_until=recorded_until,
            watched_from=first,
            patches={place: tuple(self.patches[place]) for place in places},
            cache_patches={step: tuple(group) for step, group in self.cache_patches.items()},
            replays=dict(self.replays),
            tokens=dict(self.tokens),
        )

    def refuse_overlaps(self) -> None:
        """Refuse an element that two edits select.

        Raises:
            InputError: where.
        """
        for (step, site), group in self.patches.items():
            if step in self.replays:
                raise InputError(
                    f"{self.engine.sites[site].name} in step {step} is edited and its step's shrinks are replayed; "
                    "edits must not overlap"
                )
            shape = tuple(self.recipient.shrink(step, site).shape)
            _refuse_double(
                [(shape, patch.index(shape)) for patch in group],
                f"{self.engine.sites[site].name} in step {step}",
            )
        for step, group_of_step in self.cache_patches.items():
            content = self._shapes(step)
            patches = [patch for patch in group_of_step if isinstance(patch, CachePatch)]
            refuse_state_twice(step, [p for p in group_of_step if isinstance(p, StatePatch)])
            for layer in sorted({patch.layer for patch in patches}):
                shape, first = content[layer]
                _refuse_double(
                    [(shape, p.index(shape, first)) for p in patches if p.layer == layer],
                    f"the cache of layer {layer} before step {step}",
                )

    def _reach(self, step: int, edit: Edit) -> None:
        if step > self.target:
            raise InputError(
                f"{edit.name} acts in step {step}, but the judged token is that of step {self.target}; edits act in "
                f"steps 0 to {self.target}"
            )

    def _shrink(self, edit: ShrinkEdit) -> SelectedEdit:
        self._reach(edit.step, edit)
        site = self.sites.get((edit.site, edit.slice))
        if site is None and edit.slice is None:  # a path alone names its slice, too
            site = next((one for (path, _), one in self.sites.items() if path == edit.site), None)
        if site is None:
            near = difflib.get_close_matches(edit.site, [path for path, _ in self.sites], n=3)
            example = f"; did you mean {', '.join(near)}" if near else ""
            named = f"{edit.site}[{edit.slice}]" if edit.slice else edit.site
            raise InputError(
                f"no site is called {named}; the engine has {len(self.sites)}, for example "
                f"{self.engine.sites[0].path}{example}"
            )
        positions = self.recipient.positions(edit.step)
        rows = None
        if edit.positions is not None:
            rows = tuple(position - positions.start for position in edit.positions)
            odd = [position for position in edit.positions if position not in positions]
            if odd:
                raise InputError(
                    f"{edit.name}: step {edit.step} has token positions {positions.start} to {positions.stop - 1}; got "
                    f"{odd[0]}"
                )
        own = self.recipient.shrink(edit.step, site)
        shape = tuple(own.shape)
        if edit.rank_indices is not None and edit.rank_indices[-1] >= shape[1]:
            raise InputError(
                f"{edit.name}: this record has rank indices 0 to {shape[1] - 1}; got {edit.rank_indices[-1]}"
            )
        patch = ShrinkPatch(rows, edit.rank_indices, edit.value)
        self.patches[edit.step, site].append(patch)
        after = own.clone()
        patch.apply(after, self._shrink_source(edit.value, edit.step, site))
        count = len(edit.positions) if edit.positions is not None else shape[0]
        phase = "prefill" if edit.step == 0 else f"step {edit.step}"
        place = f"{self.engine.sites[site].name}, {phase}, {count} of {shape[0]} rows of {shape[1]}"
        return SelectedEdit(edit, patch.count(shape), _differing(own, after), (place,))

    def _shrink_source(self, value: Source | GivenValue, step: int, site: int) -> Tensor | None:
        if not isinstance(value, Source):
            return None
        execution = self.donor if value is Source.DONOR else self.recipient
        return execution.shrink(step, site)

    def _cache(self, edit: CacheEdit) -> SelectedEdit:
        self._reach(edit.step, edit)
        layers, states = chosen_layers(edit, self.engine)
        if edit.step == 0:
            self.before_prefill = True
            return SelectedEdit(edit, edit.expect or 1, 0, ("nothing is cached before step 0",))
        content = self._shapes(edit.step)
        elements = differing = 0
        places = []
        own = recorded_parts(self.recipient, edit.step)
        source = own
        if edit.value is Source.DONOR:
            source = recorded_parts(self.donor, edit.step)
        for layer in layers:
            shape, first = content[layer]
            check_cache_places(edit, layer, shape, first)
            check_representable(edit, own[layer].dtype)
            patch = CachePatch(
                layer, edit.part, edit.positions, edit.heads, edit.dimensions, edit.value
            )
            self.cache_patches[edit.step].append(patch)
            after = own[layer].clone()
            patch.apply(after, first, source[layer])
            count, changed = patch.count(shape, first), _differing(own[layer], after)
            elements, differing = elements + count, differing + changed
            places.append(f"layer {layer}: {count} elements from position {first} on")
        for layer, name in states:
            before = own[layer, name]
            check_representable(edit, before.dtype)
            whole = StatePatch(layer, name, edit.value)
            self.cache_patches[edit.step].append(whole)
            after = before.clone()
            whole.apply(after, source[layer, name])
            elements, differing = elements + before.numel(), differing + _differing(before, after)
            places.append(f"layer {layer}: {before.numel()} elements of the state {name}")
        return SelectedEdit(edit, elements, differing, tuple(places))

    def _shapes(self, step: int) -> dict[int, tuple[tuple[int, ...], int]]:
        """Return shape and first position of every layer's cache before a step."""
        recipient = self.recipient
        return {
            layer: (
                recipient.cache_shape(step, layer),
                recipient.first_kept_position(step, layer),
            )
            for layer in self.engine.cache_layers
        }

    def _replay(self, edit: ReplayShrinks) -> SelectedEdit:
        first, last = edit.steps or (0, self.target)
        self._reach(last, edit)
        elements = differing = 0
        for step in range(first, last + 1):
            if step in self.replays:
                raise InputError(
                    f"{edit.name}: step {step} is replayed already; edits must not overlap"
                )
            self.replays[step] = edit.trace
            for site in range(len(self.engine.sites)):
                own = self.recipient.shrink(step, site)
                elements += own.numel()
                if edit.trace is Source.DONOR:
                    differing += _differing(own, self.donor.shrink(step, site))
        return SelectedEdit(edit, elements, differing, (f"{len(self.engine.sites)} sites a step",))

    def _forced(self, edit: ForcedTokens) -> SelectedEdit:
        last = edit.from_step + len(edit.token_ids) - 1
        self._reach(last + 1, edit)
        recorded = self.recipient.token_ids
        for step, token in enumerate(edit.token_ids, start=edit.from_step):
            if step in self.tokens:
                raise InputError(
                    f"{edit.name}: the token of step {step} is forced already; edits must not overlap"
                )
            self.tokens[step] = token
        differing = sum(
            token != recorded[step] for step, token in enumerate(edit.token_ids, edit.from_step)
        )
        place = f"generated tokens {edit.from_step} to {last}"
        return SelectedEdit(edit, len(edit.token_ids), differing, (place,))


def _differing(before: Tensor, after: Tensor) -> int:
    return int((integer_view(before) != integer_view(after)).sum())


def _refuse_double(groups: list[tuple[tuple[int, ...], tuple[Tensor, ...]]], where: str) -> None:
    if len(groups) < 2:
        return
    taken = torch.zeros(groups[0][0], dtype=torch.int32)
    for _, index in groups:
        taken[index] += 1
    if int(taken.max()) > 1:
        raise InputError(
            f"{int((taken > 1).sum())} elements of {where} are selected by more than one edit; edits must not overlap"
        )
