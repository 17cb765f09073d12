"""Compares two traces, step by step and bit by bit, and says where they first differ, from where, and how far it went.

Equal frames are dismissed by one comparison of bytes. What differs goes down to records, rows and coordinates on whole
frames at once (fliptrace.analysis.evidence).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fliptrace.analysis.align import (
    Frames,
    Span,
    check_identity,
    compared_span,
    engine_names,
    read_frames,
)
from fliptrace.analysis.coordinates import row_difference
from fliptrace.analysis.coverage import CoverageLedger
from fliptrace.analysis.evidence import ROOT, VARIANT, StepEvidence, StepReader
from fliptrace.analysis.foreign import ForeignSearch
from fliptrace.analysis.grids import GridBuilder
from fliptrace.analysis.propagation_chart import propagation_chart
from fliptrace.analysis.rank_agreement import rank_agreement
from fliptrace.analysis.summary import summarise
from fliptrace.analysis.tokens import StepLogits, compare_step, describe_flip, logits_differ
from fliptrace.errors import InputError
from fliptrace.manifest import differing_keys, ran_in_other_batches
from fliptrace.numerics import CoordinateClass
from fliptrace.store.pairing import PairedReader, StepLayouts
from fliptrace.store.reader import TraceReader
from fliptrace.trace import Kind, StepRecord, Trace, dtype_from_name
from fliptrace.verdicts import (
    ONE_FILE,
    CacheDifference,
    Fate,
    Flip,
    ForeignRoot,
    Origin,
    Outcome,
    PairDiff,
    RowDifference,
    ShrinkStatistics,
    StateDifference,
    StepComparison,
)

_ROOTS_KEPT = 10_000
#: After so many described coordinates each further root shows one only.
_COORDINATES_KEPT = 20_000
_ROUNDED_DTYPES = ("bfloat16", "float16", "float32")
#: Kinds that hold what has been rounded already; modules and operations may differ in an FP32 shrink alone.
_ROUNDED_KINDS = frozenset(Kind) - {
    Kind.SHRINK,
    Kind.MODULE_INPUT,
    Kind.MODULE_OUTPUT,
    Kind.OPERATION_INPUT,
    Kind.OPERATION_OUTPUT,
}
_SURVIVING = int(CoordinateClass.SURVIVING)


def compare(
    reference: Trace,
    candidate: Trace,
    *,
    rounded_dtype: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    across_engines: bool = False,
) -> PairDiff:
    """Compare two traces of one prompt on one model.

    Args:
        reference: the execution to measure against.
        candidate: the execution to explain.
        rounded_dtype: the type at whose boundaries survival is decided, instead of the model's own: ``bfloat16``,
            ``float16`` or ``float32`` (no boundary: every difference survives).
        progress: called with (steps done, steps in all) after every step.
        across_engines: compare traces of two engines, too; they are different computations, so every difference is
            structural or a configuration variant, never a root.

    Returns:
        Everything that was found, up to and including the first step with different tokens.

    Raises:
        TraceMismatchError: the traces are not of one model, adapter and prompt.
        InputError: no such rounded_dtype.
        TraceCorruptError: what is stored does not match its seal.
    """
    check_identity(reference, candidate, across_engines=across_engines)
    span = compared_span(reference, candidate)
    engines = engine_names(reference, candidate)
    if engines is not None:
        note = (
            f"The traces are of two engines ({engines[0]} and {engines[1]}), which compute one model differently: "
            "every difference is structural or a configuration variant, never a root."
        )
        span = replace(span, notes=(*span.notes, note))
    walk = PairWalk(reference, candidate, _rounded_dtype(reference, rounded_dtype))
    for number in range(span.steps):
        walk.take(number, number == span.flip)
        if progress is not None:
            progress(number + 1, span.steps)
    return walk.finish(span)


def _rounded_dtype(reference: Trace, asked: str | None) -> str:
    name = asked if asked is not None else _model_dtype(reference)
    if name not in _ROUNDED_DTYPES:
        source = (
            "rounded_dtype"
            if asked is not None
            else f"model.dtype in the manifest of {reference.name}"
        )
        raise InputError(
            f"{source} must be one of {', '.join(_ROUNDED_DTYPES)}; got {name!r}; give rounded_dtype the type to which "
            "the model rounds a shrink"
        )
    return name


def _model_dtype(reference: Trace) -> str:
    return str(reference.manifest.get("model.dtype")).removeprefix("torch.")


def _same_record(before: StepRecord, after: StepRecord) -> bool:
    """Say whether nothing that a step's record holds besides its frames differs."""
    return (
        before.chosen == after.chosen
        and before.top_values == after.top_values
        and before.top_ids == after.top_ids
        and before.cache_digest == after.cache_digest
        and before.cache_digest_full == after.cache_digest_full
    )


class PairWalk:
    """One pass over two traces, and what it has found so far."""

    def __init__(self, reference: Trace, candidate: Trace, rounded_dtype: str) -> None:
        """Prepare to walk.

        Args:
            reference: a trace.
            candidate: the other.
            rounded_dtype: the type that decides survival.
        """
        self._traces = (reference, candidate)
        self._rounded_name = rounded_dtype
        self._rounded = dtype_from_name(rounded_dtype)
        own = _model_dtype(reference)
        identities = [trace.manifest.get("reduction.identity") for trace in self._traces]
        same_engine = engine_names(reference, candidate) is None
        self._same_reduction = identities[0] == identities[1] and same_engine
        self._other_batches = ran_in_other_batches(reference.manifest, candidate.manifest)
        self._reader = StepReader(
            self._rounded,
            dtype_from_name(own) if own in _ROUNDED_DTYPES else self._rounded,
            self._same_reduction and not self._other_batches,
            same_engine,
        )
        self._ledger = CoverageLedger()
        self._grids = GridBuilder(self._rounded)
        self._foreign = ForeignSearch(self._reader)
        self._first: dict[str, RowDifference] = {}
        self._roots: list[RowDifference] = []
        self._root_rows = self._surviving_root_rows = self._described = 0
        self._counts = dict.fromkeys(
            ("equal_operand_elements", "equal_operand_differing", "equal_operand_surviving"), 0
        )
        self._cache: list[CacheDifference] = []
        self._states: list[StateDifference] = []
        self._steps: list[StepComparison] = []
        self._flip: Flip | None = None
        self._structural = self._other_kinds = False
        self.evidence: list[StepEvidence] = []
        mine, theirs = reference.source, candidate.source
        self._paired: PairedReader | None = None
        if isinstance(mine, TraceReader) and isinstance(theirs, TraceReader):
            self._paired = PairedReader(mine, theirs)
        # What the first of equal steps that share their layouts and rows showed, and how many records that was.
        self._equal: dict[tuple[StepLayouts, int], tuple[StepEvidence, int]] = {}

    def take(self, number: int, is_flip: bool) -> None:
        """Compare one step."""
        before, after = self._traces[0].steps[number], self._traces[1].steps[number]
        found = self._paired.step(number) if self._paired is not None else None
        key = None
        if isinstance(found, StepLayouts):
            if not is_flip and _same_record(before, after):
                key = (found, len(before.token_ids))
                if key in self._equal:
                    self._take_equal(*self._equal[key], before, after)
                    return
            found = None
        reference, candidate = found or (
            read_frames(self._traces[0], before),
            read_frames(self._traces[1], after),
        )
        evidence = self._take_frames(before, after, reference, candidate, is_flip)
        if key is not None and number > 0 and evidence.equal and evidence.logits_differ is False:
            self._equal[key] = (
                evidence,
                sum(len(frame.layout.entries) for frame in reference.values()),
            )

    def _take_equal(
        self, known: StepEvidence, records: int, before: StepRecord, after: StepRecord
    ) -> None:
        """Take a step that has nothing to show but what an earlier one showed: see _take_frames."""
        evidence = known.moved_to(before.step, before.first_position)
        self._ledger.add_equal(records, int(evidence.launch_differs.sum()))
        self._ledger.count_elements(evidence.element_count)
        self._counts["equal_operand_elements"] += evidence.equal_operand_count
        self._steps.append(compare_step(evidence, before, after, None))
        self._grids.add(evidence)
        self.evidence.append(evidence)

    def _take_frames(
        self,
        before: StepRecord,
        after: StepRecord,
        reference: Frames,
        candidate: Frames,
        is_flip: bool,
    ) -> StepEvidence:
        evidence = self._reader.read(before, reference, candidate)
        evidence.logits_differ = logits_differ(before, after, reference, candidate)
        self._ledger.add(before.step, self._reader, reference, candidate)
        self._take_rows(evidence)
        self._take_cache(evidence)
        if evidence.states is not None:
            self._states += evidence.states.differences(evidence.step)
        self._foreign.take(evidence, before, after, reference, candidate)
        self._take_tokens(evidence, before, after, (reference, candidate), is_flip)
        self._grids.add(evidence)
        self._other_kinds |= bool(evidence.differing_kinds & _ROUNDED_KINDS)
        evidence.values = []
        self.evidence.append(evidence)
        return evidence

    def _take_rows(self, evidence: StepEvidence) -> None:
        self._ledger.count_elements(evidence.element_count)
        self._counts["equal_operand_elements"] += evidence.equal_operand_count
        classes = evidence.classes
        if evidence.equal or not bool((classes > 0).any()):
            return
        equal_operand = evidence.operand.equal
        self._structural |= bool((classes == int(CoordinateClass.STRUCTURAL)).any())
        surviving = evidence.surviving * equal_operand
        self._counts["equal_operand_surviving"] += int(surviving.sum())
        self._counts["equal_operand_differing"] += int(
            (surviving + evidence.latent * equal_operand).sum()
        )
        self._note_first("difference", evidence, classes > 0)
        self._note_first("variant", evidence, evidence.origins == VARIANT)
        self._note_first(
            "surviving_variant", evidence, (evidence.origins == VARIANT) & (classes == _SURVIVING)
        )
        self._note_first("structural", evidence, classes == int(CoordinateClass.STRUCTURAL))
        roots = evidence.origins == ROOT
        self._root_rows += int(roots.sum())
        for order, row in (roots & (classes == _SURVIVING)).nonzero().tolist():
            self._surviving_root_rows += 1
            if len(self._roots) < _ROOTS_KEPT:
                self._take_root(evidence, order, row)
            elif "propagating" not in self._first:
                self._note_propagating(row_difference(evidence, order, row, self._rounded, 1))

    def _note_first(self, name: str, evidence: StepEvidence, where: torch.Tensor) -> None:
        if name not in self._first and bool(where.any()):
            order, row = where.nonzero()[0].tolist()
            self._first[name] = row_difference(evidence, order, row, self._rounded)

    def _take_root(self, evidence: StepEvidence, order: int, row: int) -> None:
        full = self._described < _COORDINATES_KEPT
        found = (
            row_difference(evidence, order, row, self._rounded)
            if full
            else row_difference(evidence, order, row, self._rounded, 1)
        )
        self._described += len(found.coordinates)
        self._roots.append(found)
        self._first.setdefault("surviving", found)
        self._note_propagating(found)

    def _note_propagating(self, found: RowDifference) -> None:
        if found.fate is Fate.PROPAGATING:
            self._first.setdefault("propagating", found)

    def _take_cache(self, evidence: StepEvidence) -> None:
        cache = evidence.cache
        if cache is None or Kind.CACHE not in evidence.differing_kinds:
            return
        per_layer = cache.counts.sum(dim=2).tolist()
        differing = (cache.counts.sum(dim=1) > 0).tolist() if evidence.rows > 1 else None
        largest = cache.magnitudes.amax(dim=(1, 2)).tolist()
        for place, (keys, values) in enumerate(per_layer):
            if not keys + values:
                continue
            positions: tuple[int, ...] = (evidence.first_position,)
            if differing is not None:
                rows = [row for row, differs in enumerate(differing[place]) if differs]
                positions = tuple(evidence.first_position + row for row in rows)
            self._cache.append(
                CacheDifference(
                    layer=cache.layers[place],
                    step=evidence.step,
                    keys=keys,
                    values=values,
                    elements=cache.elements[place],
                    positions=positions,
                    largest=largest[place],
                )
            )

    def _take_tokens(
        self,
        evidence: StepEvidence,
        before: StepRecord,
        after: StepRecord,
        frames: tuple[Frames, Frames],
        is_flip: bool,
    ) -> None:
        logits: tuple[StepLogits, StepLogits] | None = None
        if evidence.logits_differ is not False or is_flip:
            logits = StepLogits.read(before, frames[0]), StepLogits.read(after, frames[1])
        self._steps.append(compare_step(evidence, before, after, None if is_flip else logits))
        if is_flip and logits is not None:
            self._flip = describe_flip(self._traces, before.step, logits)

    def finish(self, span: Span) -> PairDiff:
        """Put together what was found."""
        reference, candidate = self._traces
        latent = sum(step.shrink_latent for step in self._steps)
        surviving = sum(step.shrink_surviving for step in self._steps)
        grids = self._grids.finish(reference.steps[: span.steps])
        foreign = self._elsewhere()
        return PairDiff(
            outcome=self._outcome(latent, surviving),
            same_reduction=self._same_reduction,
            rounded_dtype=self._rounded_name,
            flip=self._flip,
            first_difference=self._first.get("difference"),
            first_surviving=self._first.get("surviving"),
            first_propagating=self._first.get("propagating"),
            first_variant=self._first.get("variant"),
            foreign_root=foreign,
            roots=tuple(self._roots),
            root_rows=self._root_rows,
            surviving_root_rows=self._surviving_root_rows,
            statistics=ShrinkStatistics(
                **self._counts,
                elements=sum(step.shrink_elements for step in self._steps),
                differing=latent + surviving,
                surviving=surviving,
            ),
            cache_differences=tuple(self._cache),
            state_differences=tuple(self._states),
            steps=tuple(self._steps),
            grids=grids,
            module_grids=self._grids.finish_modules(grids),
            propagation=summarise(
                self.evidence, self._start(), self._flip, self._roots, _model_dtype(reference)
            ),
            coverage=self._ledger.finish(reference, candidate, span, self._remarks()),
            manifest_differences=tuple(differing_keys(reference.manifest, candidate.manifest)),
            generated=(len(reference.steps), len(candidate.steps)),
            first_surviving_variant=self._first.get("surviving_variant"),
            propagation_chart=propagation_chart(
                self.evidence, self._start(), self._roots, self._flip
            ),
            rank_agreement=(
                rank_agreement(reference, span.steps),
                rank_agreement(candidate, span.steps),
            ),
        )

    def _start(self) -> RowDifference | ForeignRoot | None:
        """Choose what to follow: what entered first of what is known to leave, else the best there is."""
        root, foreign = self._first.get("propagating"), self._elsewhere()
        variant = self._first.get("surviving_variant")
        if variant is not None and variant.fate is Fate.ABSORBED:
            variant = None
        if foreign is not None and foreign.precedes(root or variant):
            return foreign
        names = ("surviving_variant", "surviving", "structural", "difference")
        return root or next((self._first[name] for name in names if name in self._first), None)

    def _elsewhere(self) -> ForeignRoot | None:
        """Return what entered elsewhere than at a shrink; in another batch nothing that does is a root."""
        found = self._foreign.found
        if found is None or found.kind == "token" or not self._other_batches:
            return found
        told = (
            f"{found.explanation} The executions ran in other batches, whose products, attention and scans are "
            "launched over other rows, so it is a configuration-variant, no root."
        )
        return replace(found, origin=Origin.CONFIGURATION_VARIANT, explanation=told)

    def _outcome(self, latent: int, surviving: int) -> Outcome:
        if self._flip is not None:
            return Outcome.TOKEN
        if surviving or self._structural or self._other_kinds or self._foreign.found:
            return Outcome.SURVIVING
        return Outcome.LATENT if latent else Outcome.IDENTICAL

    def _remarks(self) -> list[str]:
        remarks = []
        if _is_one_file(*self._traces):
            remarks.append(ONE_FILE)
        if self._rounded_name == "float32":
            own = _model_dtype(self._traces[0])
            why = (
                "Shrinks are not rounded"
                if own == self._rounded_name
                else f"Shrinks were compared as if not rounded to {own}"
            )
            remarks.append(
                f"{why} (float32), so that there is no boundary: every difference counts as surviving."
            )
        return remarks


def _is_one_file(reference: Trace, candidate: Trace) -> bool:
    mine, theirs = reference.source, candidate.source
    if not (isinstance(mine, TraceReader) and isinstance(theirs, TraceReader)):
        return False
    try:
        return mine.path.samefile(theirs.path)
    except OSError:  # removed since it was opened
        return False
