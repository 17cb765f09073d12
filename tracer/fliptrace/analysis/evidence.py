"""Reads one step of both traces down to matrices of (record, token row): what differs there, and how.

Everything works on whole frames: a step of a 30-layer model has 210 shrinks, and a trace has hundreds of steps, so that
one torch call per record would cost more than the comparison. Rows of records that have fewer rows than the step has
tokens are the step's last ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fliptrace.analysis.align import (
    Frames,
    Group,
    LayoutPair,
    LayoutPairs,
    group_tensor,
    labels,
    same_bytes,
)
from fliptrace.analysis.cache_rows import CacheEvidence, read_cache
from fliptrace.analysis.frame_rows import largest_per_row, magnitude, row_width, rows_that_differ
from fliptrace.analysis.module_rows import ModuleEvidence, read_modules
from fliptrace.analysis.state_rows import StateEvidence, read_states
from fliptrace.numerics import CoordinateClass, classify, integer_view, ulp_distance
from fliptrace.trace import Frame, Kind, StepRecord

_ROW_KINDS = (Kind.SHRINK, Kind.OPERAND, Kind.OPERAND_VALUES, Kind.PROJECTION, Kind.CACHE)

#: Codes of origins in matrices and grids, in the order of fliptrace.verdicts.Grid.origins.
NO_DIFFERENCE, ROOT, INHERITED, VARIANT, UNLOCATED = range(5)


@dataclass(frozen=True)
class ShrinkValues:
    """Shrink records of one shape, kept while their step is looked at.

    Attributes:
        sites: the record's row in the step's matrices, int64 [G].
        reference: [G, T, R] in the records' dtype; candidate likewise.
        offset: the step's row that is the records' first.
    """

    sites: Tensor
    reference: Tensor
    candidate: Tensor
    offset: int


@dataclass
class RowEvidence:
    """Row digests of one kind, S records by T rows.

    Attributes:
        known: recorded in both, bool [S, T]; differs: their digests differ.
    """

    known: Tensor
    differs: Tensor

    @property
    def equal(self) -> Tensor:
        """Recorded in both and equal, bool [S, T]."""
        return self.known & ~self.differs


@dataclass
class StepEvidence:
    """One step of both traces, S shrink records in the reference's execution order by T token rows.

    Attributes:
        step: the step; first_position: absolute position of row 0; rows: T.
        keys: the records' keys.
        observed: recorded in both with one shape, bool [S, T].
        structural: one-sided, or of another shape or dtype, bool [S].
        reshaped: structural with both partners there, bool [S].
        launch_differs: bool [S].
        elements: coordinates per row, int64 [S].
        classes: int8 [S, T] of CoordinateClass.
        latent, surviving: counts of coordinates, int32 [S, T].
        magnitudes: float32 [S, T]; ulps: int64 [S, T].
        origins: int8 [S, T], codes of this module.
        live: rows whose difference leaves the shrink rounded to the model's own dtype, bool [S, T].
        operand, projection: row digests at the same keys.
        cache: key and value rows, None where neither trace has any.
        states: recurrent state after the step, None where not recorded in both.
        logits_differ: None where not recorded.
        differing_kinds: kinds recorded in both whose frames hold other records or other bits.
        element_count: coordinates compared; equal_operand_count: of these, in rows with equal operands.
        operand_values_known: both traces hold the operands themselves.
        values: shrink values, emptied once the step has been looked at.
        modules: outputs of modules, None where not recorded in both.
    """

    step: int
    first_position: int
    rows: int
    keys: tuple[str, ...]
    observed: Tensor
    structural: Tensor
    reshaped: Tensor
    launch_differs: Tensor
    elements: Tensor
    classes: Tensor
    latent: Tensor
    surviving: Tensor
    magnitudes: Tensor
    ulps: Tensor
    origins: Tensor
    live: Tensor
    operand: RowEvidence
    projection: RowEvidence
    cache: CacheEvidence | None
    logits_differ: bool | None
    differing_kinds: frozenset[Kind]
    element_count: int = 0
    equal_operand_count: int = 0
    operand_values_known: bool = False
    values: list[ShrinkValues] = field(default_factory=list)
    modules: ModuleEvidence | None = None
    states: StateEvidence | None = None

    @property
    def equal(self) -> bool:
        """Nothing recorded in both differs, and nothing lacks its partner."""
        return not (self.differing_kinds or self.logits_differ or self._some_structural)

    @cached_property
    def _some_structural(self) -> bool:
        return bool(self.structural.any())

    def moved_to(self, step: int, first_position: int) -> StepEvidence:
        """Return the same evidence for another step that shares it, tensors included."""
        moved = object.__new__(StepEvidence)
        moved.__dict__.update(self.__dict__)
        moved.step, moved.first_position = step, first_position
        return moved


class StepReader:
    """Turns pairs of frames into evidence; remembers layouts between steps."""

    def __init__(
        self,
        rounded: torch.dtype,
        model: torch.dtype,
        same_computation: bool,
        same_engine: bool = True,
    ) -> None:
        """Remember the dtype that decides survival, the model's own, and whether reductions and batches are equal."""
        self._rounded = rounded
        self._model = model
        self._same_computation = same_computation
        self._same_engine = same_engine
        self._layouts = LayoutPairs()
        self._sites: dict[int, tuple[LayoutPair, tuple[str, ...], tuple[Tensor, ...]]] = {}
        # Keyed by the pairs' identities, so the pairs are kept: an address is used again once its object is gone.
        self._equal: dict[
            tuple[int, tuple[int, ...]], tuple[tuple[LayoutPair, ...], StepEvidence]
        ] = {}

    def pair(self, reference: Frame, candidate: Frame) -> LayoutPair:
        """Return the pairing of two frames' layouts."""
        return self._layouts.pair(reference, candidate)

    def read(self, step: StepRecord, reference: Frames, candidate: Frames) -> StepEvidence:
        """Compare one step.

        Args:
            step: the reference's record of it.
            reference: the reference's frames.
            candidate: the candidate's.
        """
        pairs = {
            kind: self.pair(frame, candidate[kind])
            for kind, frame in reference.items()
            if kind in candidate
        }
        differing = frozenset(
            kind
            for kind, pair in pairs.items()
            if not (pair.same_places and same_bytes(reference[kind], candidate[kind]))
        )
        if differing or len(pairs) != len(reference) or len(pairs) != len(candidate):
            return self._read(step, reference, candidate, differing)
        # Equal steps of equal layouts have equal evidence; nobody writes to it once it was returned.
        shape = (len(step.token_ids), tuple(id(pair) for pair in pairs.values()))
        known = self._equal.get(shape)
        if known is None:
            evidence = self._read(step, reference, candidate, differing)
            known = self._equal[shape] = (tuple(pairs.values()), evidence)
        return replace(
            known[1], step=step.step, first_position=step.first_position, logits_differ=None
        )

    def _read(
        self, step: StepRecord, reference: Frames, candidate: Frames, differing: frozenset[Kind]
    ) -> StepEvidence:
        keys = self._site_keys(reference, candidate)
        rows = self._row_count(step, reference, candidate)
        evidence = _blank(step, keys, rows, differing)
        self._read_shrinks(evidence, reference.get(Kind.SHRINK), candidate.get(Kind.SHRINK))
        evidence.operand = self._read_operands(evidence, reference, candidate)
        evidence.projection = self._read_digests(evidence, Kind.PROJECTION, reference, candidate)
        evidence.live &= evidence.projection.differs | ~evidence.projection.known
        _decide_origins(evidence, self._same_computation, self._same_engine)
        before, after = reference.get(Kind.CACHE), candidate.get(Kind.CACHE)
        if before is not None and after is not None:
            pair = self.pair(before, after)
            evidence.cache = read_cache(pair, before, after, rows, Kind.CACHE in differing)
        for kind in (Kind.STATE, Kind.STATE_DIGEST):
            before, after = reference.get(kind), candidate.get(kind)
            if before is not None and after is not None:
                pair = self.pair(before, after)
                evidence.states = read_states(pair, before, after, kind in differing)
        evidence.modules = read_modules(self._layouts, reference, candidate, rows)
        per_row = evidence.elements.unsqueeze(1) * evidence.observed
        evidence.element_count = int(per_row.sum())
        evidence.equal_operand_count = int((per_row * evidence.operand.equal).sum())
        return evidence

    def _site_keys(self, reference: Frames, candidate: Frames) -> tuple[str, ...]:
        before, after = reference.get(Kind.SHRINK), candidate.get(Kind.SHRINK)
        if before is None or after is None:
            alone = before or after
            return tuple(labels(alone.layout)) if alone else ()
        pair = self.pair(before, after)
        return woven_labels(pair.reference_labels, pair.candidate_labels)

    def _row_count(self, step: StepRecord, reference: Frames, candidate: Frames) -> int:
        counts = [len(step.token_ids), 1]
        for kind in _ROW_KINDS:
            before, after = reference.get(kind), candidate.get(kind)
            if before is not None and after is not None:
                counts.append(self.pair(before, after).rows(1 if kind == Kind.CACHE else 0))
        return max(counts)

    def _read_shrinks(
        self, evidence: StepEvidence, before: Frame | None, after: Frame | None
    ) -> None:
        if before is None or after is None:
            evidence.structural[:] = True
            return
        pair = self.pair(before, after)
        places: dict[str, int] = {}
        if pair.reshaped or pair.only_reference or pair.only_candidate or pair.launches_differ:
            places = {key: row for row, key in enumerate(evidence.keys)}
        for one, _ in pair.reshaped:
            row = places[pair.reference_labels[one]]
            evidence.structural[row] = evidence.reshaped[row] = True
        for one in pair.only_reference:
            evidence.structural[places[pair.reference_labels[one]]] = True
        for other in pair.only_candidate:
            evidence.structural[places[pair.candidate_labels[other]]] = True
        for one in pair.launches_differ:
            evidence.launch_differs[places[pair.reference_labels[one]]] = True
        for group, sites in zip(pair.groups, self._sites_of(pair, evidence.keys), strict=True):
            shape = group.entry.shape
            count = min(shape[0], evidence.rows)
            evidence.observed[sites, evidence.rows - count :] = True
            evidence.elements[sites] = row_width(shape)
            if Kind.SHRINK in evidence.differing_kinds:
                self._classify_group(evidence, group, sites, before, after)

    def _classify_group(
        self, evidence: StepEvidence, group: Group, sites: Tensor, before: Frame, after: Frame
    ) -> None:
        count, width = min(group.entry.shape[0], evidence.rows), row_width(group.entry.shape)
        one, other = (
            group_tensor(frame, places, group.entry).reshape(len(sites), -1, width)[:, -count:]
            for frame, places in ((before, group.rows), (after, group.columns))
        )
        different = (integer_view(one) != integer_view(other)).reshape(-1).nonzero().squeeze(1)
        if different.numel() == 0:
            return
        offset = evidence.rows - count
        evidence.values.append(ShrinkValues(sites, one, other, offset))
        left, right = one.reshape(-1)[different], other.reshape(-1)[different]
        rows = torch.div(different, width, rounding_mode="floor")
        classes = classify(left, right, self._rounded)
        cells = len(sites) * count
        survives = classes == int(CoordinateClass.SURVIVING)
        surviving = torch.bincount(rows[survives], minlength=cells)
        latent = torch.bincount(rows, minlength=cells) - surviving
        own = (
            surviving > 0
            if self._model == self._rounded
            else torch.bincount(rows[classify(left, right, self._model) == 2], minlength=cells) > 0
        )
        window = (sites, slice(offset, evidence.rows))
        shape = (len(sites), count)
        evidence.latent[window] = latent.to(torch.int32).view(shape)
        evidence.surviving[window] = surviving.to(torch.int32).view(shape)
        evidence.classes[window] = (
            (latent > 0).to(torch.int8).maximum((surviving > 0).to(torch.int8) * 2).view(shape)
        )
        evidence.live[window] = own.view(shape)
        evidence.magnitudes[window] = largest_per_row(magnitude(left, right), rows, cells).view(
            shape
        )
        evidence.ulps[window] = largest_per_row(ulp_distance(left, right), rows, cells).view(shape)

    def _read_operands(
        self, evidence: StepEvidence, reference: Frames, candidate: Frames
    ) -> RowEvidence:
        digests = self._read_digests(evidence, Kind.OPERAND, reference, candidate)
        if Kind.OPERAND_VALUES not in reference or Kind.OPERAND_VALUES not in candidate:
            return digests
        evidence.operand_values_known = True
        values = self._read_digests(evidence, Kind.OPERAND_VALUES, reference, candidate)
        return RowEvidence(digests.known | values.known, digests.differs | values.differs)

    def _read_digests(
        self, evidence: StepEvidence, kind: Kind, reference: Frames, candidate: Frames
    ) -> RowEvidence:
        known = torch.zeros_like(evidence.observed)
        differs = torch.zeros_like(evidence.observed)
        before, after = reference.get(kind), candidate.get(kind)
        if before is None or after is None:
            return RowEvidence(known, differs)
        pair = self.pair(before, after)
        for group, sites in zip(pair.groups, self._sites_of(pair, evidence.keys), strict=True):
            count = min(group.entry.shape[0], evidence.rows)
            here = sites >= 0
            known[sites[here], evidence.rows - count :] = True
            if kind in evidence.differing_kinds:
                found = rows_that_differ(group, before, after)[:, -count:]
                differs[sites[here], evidence.rows - count :] = found[here]
        return RowEvidence(known, differs)

    def _sites_of(self, pair: LayoutPair, keys: tuple[str, ...]) -> tuple[Tensor, ...]:
        """Return where the records of every group of a pair have their keys, -1 for none; remembered."""
        known = self._sites.get(id(pair))
        if known is not None and known[0] is pair and known[1] == keys:
            return known[2]
        places = {key: row for row, key in enumerate(keys)}
        rows_of = [places.get(label, -1) for label in pair.reference_labels]
        sites = tuple(torch.tensor([rows_of[one] for one in group.rows]) for group in pair.groups)
        self._sites[id(pair)] = pair, keys, sites
        return sites


def woven_labels(reference: Sequence[str], candidate: Sequence[str]) -> tuple[str, ...]:
    """Bring the labels of two traces into one order of execution: what one alone has comes before what it precedes."""
    if reference == candidate:
        return tuple(reference)
    known, order = set(reference), list[str]()
    waiting: dict[str | None, list[str]] = {}
    held: list[str] = []
    for label in candidate:
        if label in known:
            waiting[label], held = held, []
        else:
            held.append(label)
    for label in reference:
        order += [*waiting.get(label, ()), label]
    return (*order, *held)


def _blank(
    step: StepRecord, keys: tuple[str, ...], rows: int, differing: frozenset[Kind]
) -> StepEvidence:
    shape, sites = (len(keys), rows), len(keys)
    nothing = RowEvidence(
        torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    )
    return StepEvidence(
        step=step.step,
        first_position=step.first_position,
        rows=rows,
        keys=keys,
        observed=torch.zeros(shape, dtype=torch.bool),
        structural=torch.zeros(sites, dtype=torch.bool),
        reshaped=torch.zeros(sites, dtype=torch.bool),
        launch_differs=torch.zeros(sites, dtype=torch.bool),
        elements=torch.zeros(sites, dtype=torch.int64),
        classes=torch.zeros(shape, dtype=torch.int8),
        latent=torch.zeros(shape, dtype=torch.int32),
        surviving=torch.zeros(shape, dtype=torch.int32),
        magnitudes=torch.zeros(shape),
        ulps=torch.zeros(shape, dtype=torch.int64),
        origins=torch.zeros(shape, dtype=torch.int8),
        live=torch.zeros(shape, dtype=torch.bool),
        operand=nothing,
        projection=nothing,
        cache=None,
        logits_differ=None,
        differing_kinds=differing,
    )


def _decide_origins(evidence: StepEvidence, same_computation: bool, same_engine: bool) -> None:
    """Fill classes of structural rows, and origins by the rule of the design, for all rows at once."""
    evidence.classes[~evidence.observed] = int(CoordinateClass.NOT_OBSERVED)
    evidence.classes[evidence.structural] = int(CoordinateClass.STRUCTURAL)
    different = evidence.classes > 0
    if not bool(different.any()):
        return
    if not same_engine:
        # Two engines' operands are never those of one computation: nothing is a root, and nothing inherits from one.
        evidence.origins = torch.where(different, VARIANT, 0).to(torch.int8)
        return
    variant = evidence.launch_differs | evidence.structural
    if not same_computation:
        variant = torch.ones_like(variant)
    own = torch.where(variant, VARIANT, ROOT).to(torch.int8).unsqueeze(1).expand_as(different)
    origins = torch.where(evidence.operand.differs, torch.tensor(INHERITED, dtype=torch.int8), own)
    lone = (evidence.structural & ~evidence.reshaped).unsqueeze(1)
    unlocated = ~evidence.operand.known | lone
    origins = torch.where(unlocated, torch.tensor(UNLOCATED, dtype=torch.int8), origins)
    evidence.origins = torch.where(different, origins, torch.tensor(0, dtype=torch.int8))
