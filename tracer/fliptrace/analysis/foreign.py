"""Looks for differences that entered somewhere other than a shrink.

Most of a network is not recorded by default: norms, attention, the residual additions. A difference that enters there
is first seen in the next record, and calling that record's site the culprit would be wrong. The rule here is
conservative data flow. A row of a record at token position p may depend on

* everything recorded earlier in the same step at positions <= p (attention mixes earlier positions in),
* the cache rows and recurrent states of earlier steps in its own or a lower layer (where the cache was not recorded: on
  any difference of an earlier step that left its shrink).

A recurrent state depends on its layer's input projection, at any row of the step, and on itself before the step.

A differing operand, cache or logits row that none of these can explain entered between the last record and this one.
A projection row that differs although its operand row and its rounded shrink row are equal is a root of its own: the
base projection or the expand differed. Differences that this rule could explain are never reported, so it may miss some
and does not invent any. With operations recorded, the first operation with equal inputs and different outputs is named
(fliptrace.analysis.operations).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fliptrace.analysis.align import Frames
from fliptrace.analysis.coordinates import site_of
from fliptrace.analysis.evidence import StepEvidence, StepReader
from fliptrace.analysis.grids import cache_place
from fliptrace.analysis.operations import find_operation, find_unexplained_module
from fliptrace.analysis.roles import Role, role_of
from fliptrace.analysis.slots import CACHE, PROJECTION, Slots, arrange
from fliptrace.analysis.state_rows import makers_of
from fliptrace.trace import StepRecord
from fliptrace.verdicts import ForeignRoot, Origin

_RUN_AGAIN = "Run again with --modules to see which operation it is."


class ForeignSearch:
    """Walks steps in order until it has found the first difference that did not enter through a shrink."""

    def __init__(self, reader: StepReader) -> None:
        """Start with equal pasts."""
        self.found: ForeignRoot | None = None
        self._reader = reader
        # Lowest layer whose cache or state differs; 0 when unknown.
        self._cached_from: int | None = None
        self._states: set[int] = set()  # layers whose recurrent state differs
        self._slots: dict[tuple[tuple[str, ...], tuple[int, ...]], Slots] = {}

    def take(
        self,
        evidence: StepEvidence,
        before: StepRecord,
        after: StepRecord,
        reference: Frames,
        candidate: Frames,
    ) -> None:
        """Look at one step."""
        if self.found is not None:
            return
        if evidence.equal and before.chosen == after.chosen and not _digests_differ(before, after):
            return
        self.found = (
            find_operation(evidence, self._reader, reference, candidate)
            or self._earlier(self._find_in_states(evidence), self._find_in_records(evidence))
            or self._find_in_cache_digest(evidence, before, after)
            or self._find_in_logits(evidence)
            or self._find_in_modules(evidence, reference, candidate)
            or self._find_in_token(evidence, before, after)
        )
        self._remember(evidence, before, after)

    def _find_in_records(self, evidence: StepEvidence) -> ForeignRoot | None:
        if not _rows_differ(evidence):
            return None
        slots = self._slots_of(evidence)
        live = _stack(
            evidence, evidence.operand.differs, evidence.live, evidence.projection.differs
        )
        live = live[slots.order]
        reachable = _reachable(live) | self._past(slots).unsqueeze(1)
        stacked = torch.empty_like(reachable)
        stacked[slots.order] = reachable
        count = len(slots.sites)
        unexplained = torch.cat(
            [
                evidence.operand.differs & ~stacked[:count],
                torch.zeros_like(evidence.live),  # shrinks are roots of their own, never foreign
                _unexplained_projections(evidence, stacked[2 * count : 3 * count]),
                _unexplained_caches(evidence, slots, stacked[3 * count :]),
            ]
        )[slots.order]
        places = unexplained.nonzero()
        if places.numel() == 0:
            return None
        slot, row = places[0].tolist()
        return self._describe(evidence, slots, slot, row)

    @staticmethod
    def _earlier(one: ForeignRoot | None, other: ForeignRoot | None) -> ForeignRoot | None:
        """Return what entered first in the step; a state, where both entered before the same site."""
        if one is None or other is None:
            return one or other
        return one if one.before_order <= other.before_order else other

    def _find_in_states(self, evidence: StepEvidence) -> ForeignRoot | None:
        """Find a recurrent state that differs although nothing that it is made from does."""
        states = evidence.states
        if states is None:
            return None
        sites = [site_of(key) for key in evidence.keys]
        for layer in states.differing_layers:
            makers = makers_of(sites, layer)
            place = makers[-1] + 1 if makers else cache_place(sites, layer)
            known = bool(makers) and bool(evidence.projection.known[makers].all())
            if known:
                differing = bool(evidence.projection.differs[makers].any())
                explained = differing or layer in self._states
            else:
                explained = (
                    self._cached_from is not None and self._cached_from <= layer
                ) or _live_before(evidence, place, layer)
            if explained:
                continue
            name = next(
                name
                for number, (of, name) in enumerate(states.places)
                if of == layer and (bool(states.differs[number]) or number in states.unpaired)
            )
            feeding = (
                "its input projection and the state before it are equal: the convolution or the scan gave another "
                "result, or the state was changed elsewhere"
                if known
                else f"no record before it differs, and its input projection was not recorded. {_RUN_AGAIN}"
            )
            return ForeignRoot(
                key=f"state.{layer}.{name}",
                kind="state",
                step=evidence.step,
                position=-1,
                origin=Origin.ROOT if known else Origin.UNLOCATED,
                explanation=(
                    f"The recurrent state of layer {layer} ({name}) that {_phase(evidence.step)} left differs, "
                    f"although {feeding}"
                ).rstrip(".")
                + ".",
                before_order=place,
            )
        return None

    def _past(self, slots: Slots) -> Tensor:
        """Say which slots differing cache rows of earlier steps may explain, bool [slots]."""
        if self._cached_from is None:
            return torch.zeros(len(slots.kinds), dtype=torch.bool)
        return slots.layers >= self._cached_from

    def _describe(self, evidence: StepEvidence, slots: Slots, slot: int, row: int) -> ForeignRoot:
        kind, number = slots.kinds[slot], slots.numbers[slot]
        position = evidence.first_position + row
        where = f"{_phase(evidence.step)}, token position {position}"
        if kind == PROJECTION:
            site = slots.sites[number]
            located = bool(
                evidence.operand.known[number, row] and not evidence.operand.differs[number, row]
            )
            what = (
                "its operand and its rounded shrink are bit-equal: the base projection or the expand of the adapter "
                "gave another result"
                if located
                else f"no record before it differs, and its operand was not recorded. {_RUN_AGAIN}"
            )
            return ForeignRoot(
                key=evidence.keys[number],
                kind="projection",
                step=evidence.step,
                position=position,
                origin=Origin.ROOT if located else Origin.UNLOCATED,
                explanation=f"The output of {site.name} differs in {where}, although {what}".rstrip(
                    "."
                )
                + ".",
                before_order=number + 1,
            )
        if kind == CACHE:
            layer = evidence.cache.layers[number] if evidence.cache is not None else -1
            complete = _has_writers(evidence, slots, number)
            feeding = (
                "every record that feeds it is equal"
                if complete
                else "no record that feeds it and that both traces hold differs"
            )
            return ForeignRoot(
                key=f"cache.{layer}",
                kind="cache",
                step=evidence.step,
                position=position,
                origin=Origin.ROOT if complete else Origin.UNLOCATED,
                explanation=(
                    f"A key or value that layer {layer} wrote in {where}, differs although {feeding}; what lies "
                    f"between (key and value biases, normalisation, rotary embedding) was not recorded. {_RUN_AGAIN}"
                ),
                before_order=cache_place(slots.sites, layer),
            )
        site = slots.sites[number]
        last, between = _between(slots, slot)
        return ForeignRoot(
            key=evidence.keys[number],
            kind="operand",
            step=evidence.step,
            position=position,
            origin=Origin.UNLOCATED,
            explanation=(
                f"The input of {site.name} differs in {where}, although everything recorded before it that could "
                f"reach it is equal up to {last}; what lies between ({between}) was not recorded. {_RUN_AGAIN}"
            ),
            before_order=number,
        )

    def _find_in_cache_digest(
        self, evidence: StepEvidence, before: StepRecord, after: StepRecord
    ) -> ForeignRoot | None:
        if not _digests_differ(before, after) or self._cached_from is not None:
            return None
        if _cache_rows_differ(evidence) or (evidence.cache is None and _live(evidence)):
            return None
        return ForeignRoot(
            key="cache",
            kind="cache",
            step=evidence.step,
            position=-1,
            origin=Origin.UNLOCATED,
            explanation=(
                f"The digest of the whole cache differs in {_phase(evidence.step)}, although every recorded row that "
                f"was written to it is equal: the cache was changed elsewhere, or holds rows that were not recorded. "
                f"{_RUN_AGAIN}"
            ),
            before_order=len(evidence.keys),
        )

    def _find_in_logits(self, evidence: StepEvidence) -> ForeignRoot | None:
        if not evidence.logits_differ:
            return None
        last = evidence.rows - 1
        live = [evidence.operand.differs, evidence.live, evidence.projection.differs]
        if any(bool(rows[:, last].any()) for rows in live):
            return None
        complete = _residual_writers_known(evidence)
        elsewhere = _rows_differ(evidence) or self._cached_from is not None
        if elsewhere and not complete:
            return None
        known = (
            "everything that its row added to the residual stream is equal: the final normalisation or the language "
            "model's head gave another result"
            if complete
            else f"no record before them differs. {_RUN_AGAIN}"
        )
        return ForeignRoot(
            key="logits",
            kind="logits",
            step=evidence.step,
            position=evidence.first_position + last,
            origin=Origin.ROOT if complete else Origin.UNLOCATED,
            explanation=f"The logits of {_phase(evidence.step)} differ, although {known}".rstrip(
                "."
            )
            + ".",
            before_order=len(evidence.keys),
        )

    def _find_in_modules(
        self, evidence: StepEvidence, reference: Frames, candidate: Frames
    ) -> ForeignRoot | None:
        if _live(evidence) or _cache_rows_differ(evidence) or self._cached_from is not None:
            return None
        if evidence.logits_differ:
            return None
        return find_unexplained_module(evidence, self._reader, reference, candidate)

    def _find_in_token(
        self, evidence: StepEvidence, before: StepRecord, after: StepRecord
    ) -> ForeignRoot | None:
        if before.chosen == after.chosen or evidence.logits_differ is not False:
            return None
        return ForeignRoot(
            key="logits",
            kind="token",
            step=evidence.step,
            position=evidence.first_position + evidence.rows - 1,
            origin=Origin.ROOT,
            explanation=(
                f"The logits of {_phase(evidence.step)} are bit-equal, but other tokens were chosen from them: the "
                "difference lies in the sampler or in tokens that were forced."
            ),
            before_order=len(evidence.keys),
        )

    def _remember(self, evidence: StepEvidence, before: StepRecord, after: StepRecord) -> None:
        cache = evidence.cache
        layers: list[int] = []
        if evidence.states is not None:
            self._states |= set(evidence.states.differing_layers)
            layers += [max(layer, 0) for layer in evidence.states.differing_layers]
        if cache is not None:
            places = (cache.counts.sum(dim=(1, 2)) > 0).nonzero().squeeze(1).tolist()
            layers += [max(cache.layers[place], 0) for place in places]
            if cache.unpaired:
                layers.append(0)
        digests_known = bool(before.cache_digest and after.cache_digest)
        if _digests_differ(before, after) and not layers:
            layers.append(0)
        if cache is None and not digests_known and _live(evidence):
            layers.append(0)
        if layers:
            lowest = min(layers)
            self._cached_from = (
                lowest if self._cached_from is None else min(self._cached_from, lowest)
            )

    def _slots_of(self, evidence: StepEvidence) -> Slots:
        layers = evidence.cache.layers if evidence.cache is not None else ()
        key = (evidence.keys, layers)
        if key not in self._slots:
            self._slots[key] = arrange(evidence.keys, layers)
        return self._slots[key]


def _stack(evidence: StepEvidence, *matrices: Tensor) -> Tensor:
    cache = evidence.cache
    rows = (cache.counts > 0).any(dim=1) if cache is not None else matrices[0][:0]
    return torch.cat([*matrices, rows])


def _reachable(live: Tensor) -> Tensor:
    """Say which rows an earlier record at the same or an earlier position may explain, bool [slots, T]."""
    earlier = live.to(torch.int32).cumsum(0) - live.to(torch.int32)
    return (earlier > 0).to(torch.int32).cumsum(1) > 0


def _rows_differ(evidence: StepEvidence) -> bool:
    return _live(evidence) or _cache_rows_differ(evidence)


def _live(evidence: StepEvidence) -> bool:
    """Some record's difference, an operand's included, goes on into the network."""
    return bool(
        evidence.operand.differs.any() | evidence.live.any() | evidence.projection.differs.any()
    )


def _live_before(evidence: StepEvidence, order: int, layer: int) -> bool:
    """Some record before a place, or a cache row of a lower layer, differs."""
    matrices = (evidence.operand.differs, evidence.live, evidence.projection.differs)
    if any(bool(matrix[:order].any()) for matrix in matrices):
        return True
    cache = evidence.cache
    return cache is not None and any(
        of <= layer and bool(cache.counts[number].any()) for number, of in enumerate(cache.layers)
    )


def _cache_rows_differ(evidence: StepEvidence) -> bool:
    return evidence.cache is not None and bool((evidence.cache.counts > 0).any())


def _digests_differ(before: StepRecord, after: StepRecord) -> bool:
    return any(
        one and other and one != other
        for one, other in (
            (before.cache_digest, after.cache_digest),
            (before.cache_digest_full, after.cache_digest_full),
        )
    )


def _unexplained_projections(evidence: StepEvidence, reachable: Tensor) -> Tensor:
    """Find differing projection rows whose inputs are equal, or that nothing explains: bool [S, T]."""
    differs = evidence.projection.differs & ~evidence.live
    differs = differs & ~evidence.operand.differs & ~evidence.structural.unsqueeze(1)
    inputs_equal = evidence.operand.known & evidence.observed
    return differs & (inputs_equal | ~reachable)


def _unexplained_caches(evidence: StepEvidence, slots: Slots, reachable: Tensor) -> Tensor:
    """Find differing key or value rows whose inputs at the same position are equal, or that nothing explains.

    Returns:
        bool [C, T], reachable's shape.
    """
    cache = evidence.cache
    unexplained = torch.zeros_like(reachable)
    if cache is None:
        return unexplained
    for which, makers in enumerate(slots.makers):
        known = makers.has_any & ~(makers.of(~evidence.projection.known, ~evidence.operand.known))
        differing = makers.of(evidence.projection.differs, evidence.operand.differs)
        unexplained |= (cache.counts[:, which] > 0) & ~differing & (known | ~reachable)
    return unexplained


def _has_writers(evidence: StepEvidence, slots: Slots, number: int) -> bool:
    """Everything that a layer's keys and values are made from was recorded, for all rows."""
    missing = [
        makers.of(~evidence.projection.known, ~evidence.operand.known)[number]
        for makers in slots.makers
    ]
    return all(bool(makers.has_any[number]) for makers in slots.makers) and not bool(
        torch.stack(missing).any()
    )


def _residual_writers_known(evidence: StepEvidence) -> bool:
    """All that is added to the last row's residual stream was recorded: every layer's attention and MLP output."""
    sites = [site_of(key) for key in evidence.keys]
    last = evidence.rows - 1
    written: dict[int, set[Role]] = {}
    for number, site in enumerate(sites):
        if site.layer is not None and bool(evidence.projection.known[number, last]):
            written.setdefault(site.layer, set()).add(role_of(site))
    layers = {site.layer for site in sites if site.layer is not None}
    layers |= set(evidence.cache.layers) if evidence.cache is not None else set()
    needed = {Role.ATTENTION_OUT, Role.MLP_OUT}
    return bool(layers) and all(needed <= written.get(layer, set()) for layer in layers)


def _between(slots: Slots, slot: int) -> tuple[str, str]:
    """Name the last record before an operand, and what is not recorded between the two."""
    site = slots.sites[slots.numbers[slot]]
    before = [
        number
        for kind, number in zip(slots.kinds[:slot], slots.numbers[:slot], strict=True)
        if kind == PROJECTION
    ]
    if not before:
        return "the token ids", "the embedding and the first normalisation"
    last = slots.sites[before[-1]]
    role = role_of(site)
    if role is Role.ATTENTION_OUT:
        between = f"the attention of layer {site.layer}"
    elif role is Role.MLP_OUT:
        between = "the activation and the product within the MLP"
    elif role in (Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_IN, Role.MLP_IN):
        between = "the residual addition and the normalisation"
    else:
        between = "the operations between them"
    return f"the output of {last.name}", between


def _phase(step: int) -> str:
    return "the prefill" if step == 0 else f"step {step}"
