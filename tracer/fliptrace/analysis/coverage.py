"""Keeps account of what was compared, and of what was not."""

from __future__ import annotations

from collections.abc import Iterable

from fliptrace.analysis.align import Frames, Span
from fliptrace.analysis.coordinates import site_of
from fliptrace.analysis.evidence import StepReader
from fliptrace.trace import Kind, Trace
from fliptrace.verdicts import Coverage

_SENTENCES = 100
_CONTROL_NOT_RUN = "Observer control was not run."


class CoverageLedger:
    """Counts compared records and collects, per kind of gap, the steps that have it."""

    def __init__(self) -> None:
        """Start with nothing compared."""
        self._records = 0
        self._elements = 0
        self._kinds: set[Kind] = set()
        self._gaps: dict[str, list[int]] = {}
        self._launches = 0
        self._first_launch = ""

    def add(self, step: int, reader: StepReader, reference: Frames, candidate: Frames) -> None:
        """Account for one step's frames."""
        for kind in dict.fromkeys((*reference, *candidate)):
            before, after = reference.get(kind), candidate.get(kind)
            if before is None or after is None:
                if (
                    kind is Kind.LOGITS_FULL
                ):  # kept near ties, so in one trace more than in the other
                    continue
                who = "candidate" if before is None else "reference"
                self._gap(f"{kind} records are in the {who} only", step)
                continue
            self._kinds.add(kind)
            pair = reader.pair(before, after)
            if pair.equal:
                self._records += len(pair.reference.entries)
                continue
            self._records += len(pair.pairs)
            entries = (before.layout.entries, after.layout.entries)
            if kind is Kind.SHRINK and pair.launches_differ:
                self._launches += len(pair.launches_differ)
                first = site_of(entries[0][pair.launches_differ[0]].key).name
                self._first_launch = self._first_launch or f"{first} ({_steps([step])})"
            for one in pair.only_reference:
                self._gap(f"{kind} record {entries[0][one].key} is in the reference only", step)
            for other in pair.only_candidate:
                self._gap(f"{kind} record {entries[1][other].key} is in the candidate only", step)
            for one, other in pair.reshaped:
                before_entry, after_entry = entries[0][one], entries[1][other]
                self._gap(
                    f"{kind} record {before_entry.key} is {before_entry.dtype} {list(before_entry.shape)} in the "
                    f"reference and {after_entry.dtype} {list(after_entry.shape)} in the candidate",
                    step,
                )
            if pair.reordered:
                self._gap(f"{kind} records ran in another order in the candidate", step)

    def add_equal(self, records: int, launches: int = 0) -> None:
        """Account for a step that is equal in both, and has the layouts of a step that was added.

        Args:
            records: how many records both have.
            launches: of these, how many shrinks were launched differently.
        """
        self._records += records
        self._launches += launches

    def count_elements(self, elements: int) -> None:
        """Add FP32 shrink coordinates that were compared."""
        self._elements += elements

    def _gap(self, sentence: str, step: int) -> None:
        self._gaps.setdefault(sentence, []).append(step)

    def finish(
        self, reference: Trace, candidate: Trace, span: Span, extra: Iterable[str]
    ) -> Coverage:
        """Write the account.

        Args:
            reference: a trace.
            candidate: the other.
            span: the steps that were compared.
            extra: further sentences on what was not observed.
        """
        missing = [*span.notes]
        # Two reductions are two launches anyway, and are told as such.
        reductions = [trace.manifest.get("reduction.identity") for trace in (reference, candidate)]
        if self._launches and reductions[0] == reductions[1]:
            missing.append(self._launch_sentence())
        missing += [f"{text} ({_steps(at)})." for text, at in self._gaps.items()]
        more = len(missing) - _SENTENCES
        if more > 0:
            missing[_SENTENCES:] = [f"{more} more gap{'s' if more > 1 else ''} of this sort."]
        stated = [*_stated(reference), *_stated(candidate)]
        keeps_state = any(
            trace.manifest.get("engine.state_layers") for trace in (reference, candidate)
        )
        absent = self._kinds_not_recorded(stated, keeps_state)
        return Coverage(
            steps_compared=span.steps,
            records_compared=self._records,
            elements_compared=self._elements,
            not_observed=tuple(dict.fromkeys((*stated, *absent, *extra))),
            missing=tuple(missing),
            observer_control=_observer_control(reference, candidate),
        )

    def _launch_sentence(self) -> str:
        one = self._launches == 1
        return (
            f"{self._launches:,} shrink{' was' if one else 's were'} launched differently in the candidate (another "
            f"grid, type, operand stride or batch), {'in' if one else 'first'} {self._first_launch}; what differs "
            "there is a configuration-variant, no root."
        )

    def _kinds_not_recorded(self, stated: Iterable[str], keeps_state: bool) -> Iterable[str]:
        if not self._records:
            return
        if not {Kind.OPERAND, Kind.OPERAND_VALUES} & self._kinds:
            yield "Operands were not recorded in both traces, so no difference can be called a root."
        if Kind.PROJECTION not in self._kinds:
            yield (
                "Projection outputs were not recorded in both traces, so propagating and absorbed roots cannot be "
                "told apart."
            )
        if Kind.CACHE not in self._kinds:
            yield "Key and value rows were not recorded in both traces."
        if not {Kind.STATE, Kind.STATE_DIGEST} & self._kinds and keeps_state:
            yield "The recurrent state of this model's layers was not recorded in both traces."
        if not {Kind.LOGITS_DIGEST, Kind.LOGITS_FULL} & self._kinds:
            yield "Logits beyond the largest were not recorded in both traces."
        if Kind.OPERATION_OUTPUT not in self._kinds and not any(
            "--modules" in one for one in stated
        ):
            yield (
                "Operations between the LoRA projections were not recorded; a difference that enters there is seen "
                "only at the next record (--modules records them)."
            )


def _stated(trace: Trace) -> Iterable[str]:
    stated = trace.manifest.get("recording.not_observed", ())
    yield from (stated,) if isinstance(stated, str) else stated
    yield from trace.closing.not_observed


def _observer_control(reference: Trace, candidate: Trace) -> str:
    found = [trace.manifest.get("recording.observer_control") for trace in (reference, candidate)]
    sentences = list(dict.fromkeys(str(one) for one in found if one))
    return " ".join(sentences) or _CONTROL_NOT_RUN


def _steps(steps: list[int]) -> str:
    """Write step numbers as ranges."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    shown = [f"{first}" if first == last else f"{first} to {last}" for first, last in ranges[:8]]
    more = ", …" if len(ranges) > 8 else ""
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(shown)}{more}"
