"""Decides whether two traces may be compared, and which step and record of one belongs to which of the other.

Nothing here looks at values. Records are paired by key; where a key occurs more than once in a frame, by occurrence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fliptrace.errors import TraceMismatchError
from fliptrace.manifest import IDENTITY_KEYS
from fliptrace.trace import Frame, Kind, Layout, LayoutEntry, StepRecord, Trace

Frames = Mapping[Kind, Frame]


@dataclass(frozen=True, slots=True)
class Span:
    """Which steps are compared.

    Attributes:
        steps: how many steps from 0 on have equal input tokens in both traces and are compared.
        flip: the first step that chose different tokens, always the last compared; None without one.
        notes: sentences on what was left out.
    """

    steps: int
    flip: int | None
    notes: tuple[str, ...]


def check_identity(reference: Trace, candidate: Trace, *, across_engines: bool = False) -> None:
    """Refuse traces that are not two executions of one computation.

    Args:
        reference: a trace.
        candidate: the other.
        across_engines: allow two engines, which fuse and compute differently.

    Raises:
        TraceMismatchError: another model, adapter, prompt or set of sites; the message names the first that differs.
    """
    for key in IDENTITY_KEYS:
        before, after = reference.manifest.get(key), candidate.manifest.get(key)
        if before == after:
            continue
        if "prompt" in key:
            _refuse_redacted(reference, candidate)
        where = _first_differing_prompt_id(reference, candidate) if "prompt" in key else ""
        raise TraceMismatchError(
            f"two traces can be compared only when {key} is equal; {reference.name} has {before!r} and "
            f"{candidate.name} has {after!r}{where}; record both with the same model, adapter and prompt"
        )
    names = engine_names(reference, candidate)
    if names is not None and across_engines:
        return
    if names is not None:
        raise TraceMismatchError(
            f"two traces can be compared only when one engine recorded them; {reference.name} is of {names[0]} and "
            f"{candidate.name} of {names[1]}, which are different computations of one model: no difference between "
            "them has a root. Ask for it with --across-engines (across_engines=True) to see structure and variants only"
        )
    before, after = (trace.manifest.get("engine.sites") for trace in (reference, candidate))
    if before is not None and after is not None and before != after:
        raise TraceMismatchError(
            f"two traces can be compared only when their engines have the same sites; {reference.name} has "
            f"{_described(before)} and {candidate.name} has {_described(after)}; record both with the same engine"
        )
    _check_sites_overlap(reference, candidate)


def engine_names(reference: Trace, candidate: Trace) -> tuple[str, str] | None:
    """Return the names of the engines that recorded two traces, None where they are the same or not told."""
    names = tuple(trace.manifest.get("engine.name") for trace in (reference, candidate))
    if None in names or names[0] == names[1]:
        return None
    return str(names[0]), str(names[1])


def _refuse_redacted(reference: Trace, candidate: Trace) -> None:
    """Say of redacted traces that they cannot be compared, instead of calling their prompts different."""
    names = [
        trace.name
        for trace in (reference, candidate)
        if trace.manifest.get("recording.redacted", False)
    ]
    if names:
        raise TraceMismatchError(
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} redacted, and the prompts' keyed hashes "
            f"differ: token ids can be compared only within one redacted recording, whose traces share a key that is "
            "not stored, so whether the prompts are equal is not known; record both executions in one run, or without "
            "--redact"
        )


def _described(sites: Any) -> str:
    return f"{sites if isinstance(sites, int) else len(sites)} sites ({sites!r:.80})"


def _check_sites_overlap(reference: Trace, candidate: Trace) -> None:
    keys = []
    for trace in (reference, candidate):
        frame = trace.frame(0, Kind.SHRINK) if trace.steps else None
        keys.append([entry.key for entry in frame.layout.entries] if frame else [])
    if keys[0] and keys[1] and not set(keys[0]) & set(keys[1]):
        raise TraceMismatchError(
            f"two traces can be compared only when their engines have the same sites; {reference.name} begins with "
            f"{keys[0][0]!r} and {candidate.name} with {keys[1][0]!r}, and they share none; record both with the "
            "same engine"
        )


def _first_differing_prompt_id(reference: Trace, candidate: Trace) -> str:
    ids = []
    for trace in (reference, candidate):
        stored = trace.manifest.get("prompt.ids")
        if stored is None and trace.steps:
            stored = trace.steps[0].token_ids
        ids.append(stored)
    if ids[0] is None or ids[1] is None:
        return ""
    index = first_differing_index(ids[0], ids[1])
    if index is None:
        return ""
    shown = [repr(one[index]) if index < len(one) else "nothing" for one in ids]
    return f" (prompt ids first differ at index {index}: {shown[0]} and {shown[1]})"


def first_differing_index(reference: Iterable[int], candidate: Iterable[int]) -> int | None:
    """Return the first index at which two sequences of ids differ, the end of the shorter included; None if equal."""
    before, after = list(reference), list(candidate)
    for index, (one, other) in enumerate(zip(before, after, strict=False)):
        if one != other:
            return index
    return min(len(before), len(after)) if len(before) != len(after) else None


def compared_span(reference: Trace, candidate: Trace) -> Span:
    """Find the steps whose input tokens are equal, up to and including the flip.

    Raises:
        TraceMismatchError: the prompts differ, by ids or by position.
    """
    notes: list[str] = []
    steps, flip = 0, None
    for before, after in zip(reference.steps, candidate.steps, strict=False):
        difference = _input_difference(before, after)
        if difference:
            if steps == 0:
                raise TraceMismatchError(
                    f"two traces can be compared only when they were fed the same prompt; {reference.name} and "
                    f"{candidate.name} differ: {difference}; record both with the same prompt and chat template"
                )
            notes.append(f"Step {before.step} and later were not compared: {difference}.")
            break
        steps += 1
        if before.chosen != after.chosen:
            flip = before.step
            break
    else:
        notes.extend(_length_notes(reference, candidate, steps))
    return Span(steps=steps, flip=flip, notes=tuple(notes))


def _input_difference(before: StepRecord, after: StepRecord) -> str:
    if before.token_ids != after.token_ids:
        index = first_differing_index(before.token_ids, after.token_ids)
        ids = [step.token_ids for step in (before, after)]
        shown = [
            repr(one[index]) if index is not None and index < len(one) else "none" for one in ids
        ]
        return f"the token ids fed first differ at index {index} ({shown[0]} and {shown[1]})"
    if before.first_position != after.first_position or before.step != after.step:
        return (
            f"step {before.step} starts at position {before.first_position} in the reference, step {after.step} at "
            f"{after.first_position} in the candidate"
        )
    return ""


def _length_notes(reference: Trace, candidate: Trace, steps: int) -> Iterator[str]:
    for name, trace in (("reference", reference), ("candidate", candidate)):
        if not trace.closing.complete:
            yield (
                f"The {name} is incomplete ({trace.closing.stop_reason}): nothing beyond its {len(trace.steps)} "
                "acknowledged steps is known."
            )
        if len(trace.steps) > steps:
            last = len(trace.steps) - 1
            which = f"Step {last} exists" if last == steps else f"Steps {steps} to {last} exist"
            yield (
                f"{which} in the {name} only, so that nothing is compared there; no token differs before step {steps}."
            )


def read_frames(trace: Trace, step: StepRecord) -> dict[Kind, Frame]:
    """Return all frames of one step, in one call where the source offers it."""
    read_step = getattr(trace.source, "step_frames", None)
    if read_step is not None:
        found = read_step(step.step)
        frames: Iterable[Frame] = found.values() if isinstance(found, Mapping) else found
        return {Kind(frame.kind): frame for frame in frames}
    kinds = [Kind(name) for name in step.frames] or list(Kind)
    found_frames = ((kind, trace.frame(step.step, kind)) for kind in kinds)
    return {kind: frame for kind, frame in found_frames if frame is not None}


def same_bytes(reference: Frame, candidate: Frame) -> bool:
    """Compare two payloads by one comparison of memory (memoryviews compare element by element, so they are copied)."""
    before, after = reference.payload, candidate.payload
    if isinstance(before, bytes) and isinstance(after, bytes):
        return before == after
    return (before if isinstance(before, bytearray) else bytearray(before)) == after


@dataclass(frozen=True)
class Group:
    """Paired records of one dtype and shape.

    Attributes:
        rows: their places in the reference's layout; columns: in the candidate's.
        entry: one of them, for dtype and shape.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    entry: LayoutEntry

    @cached_property
    def places(self) -> Tensor:
        """The places in the reference's layout as int64 [records]."""
        return torch.tensor(self.rows)


@dataclass(frozen=True)
class LayoutPair:
    """Two layouts of one kind with their records paired.

    Attributes:
        reference: the reference's layout; candidate likewise.
    """

    reference: Layout
    candidate: Layout

    @cached_property
    def equal(self) -> bool:
        """Same records of same shape, dtype and launch in the same order."""
        return self.reference == self.candidate

    @cached_property
    def same_places(self) -> bool:
        """Same records of same shape and dtype in the same order: equal payloads are equal records."""
        return self.equal or [
            (entry.key, entry.dtype, entry.shape) for entry in self.reference.entries
        ] == [(entry.key, entry.dtype, entry.shape) for entry in self.candidate.entries]

    @cached_property
    def _matches(self) -> dict[tuple[str, int], tuple[int | None, int | None]]:
        matches: dict[tuple[str, int], tuple[int | None, int | None]] = {}
        for number, key in enumerate(_occurrences(self.reference)):
            matches[key] = (number, None)
        for number, key in enumerate(_occurrences(self.candidate)):
            matches[key] = (matches.get(key, (None, None))[0], number)
        return matches

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(place in reference, place in candidate) of records with a partner of the same dtype and shape."""
        return tuple(
            (one, other)
            for one, other in self._matches.values()
            if one is not None and other is not None and self._comparable(one, other)
        )

    @cached_property
    def reshaped(self) -> tuple[tuple[int, int], ...]:
        """Records whose partner has another dtype or shape."""
        return tuple(
            (one, other)
            for one, other in self._matches.values()
            if one is not None and other is not None and not self._comparable(one, other)
        )

    @cached_property
    def only_reference(self) -> tuple[int, ...]:
        """Places of records that the candidate lacks."""
        return tuple(
            one for one, other in self._matches.values() if one is not None and other is None
        )

    @cached_property
    def only_candidate(self) -> tuple[int, ...]:
        """Places of records that the reference lacks."""
        return tuple(
            other for one, other in self._matches.values() if other is not None and one is None
        )

    @cached_property
    def reordered(self) -> bool:
        """The paired records ran in another order."""
        places = [other for _, other in self.pairs]
        return places != sorted(places)

    @cached_property
    def launches_differ(self) -> tuple[int, ...]:
        """Places in the reference of records whose launch differs from their partner's."""
        return tuple(
            one
            for one, other in self.pairs
            if self.reference.entries[one].launch != self.candidate.entries[other].launch
        )

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The pairs by dtype and shape, empty records left out."""
        found: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
        for one, other in self.pairs:
            entry = self.reference.entries[one]
            if entry.size_bytes:
                found.setdefault((entry.dtype, entry.shape), []).append((one, other))
        return tuple(
            Group(
                rows=tuple(one for one, _ in members),
                columns=tuple(other for _, other in members),
                entry=self.reference.entries[members[0][0]],
            )
            for members in found.values()
        )

    @cached_property
    def reference_labels(self) -> tuple[str, ...]:
        """Keys made unique: a second record of one key is ``key#1``."""
        return tuple(labels(self.reference))

    @cached_property
    def candidate_labels(self) -> tuple[str, ...]:
        """Likewise for the candidate."""
        return tuple(labels(self.candidate))

    def rows(self, dimension: int) -> int:
        """Return the largest extent of a paired record in one dimension, 0 without any."""
        return self._rows.get(dimension, 0)

    @cached_property
    def _rows(self) -> dict[int, int]:
        shapes = [group.entry.shape for group in self.groups]
        return {
            dimension: max(
                (shape[dimension] for shape in shapes if len(shape) > dimension), default=0
            )
            for dimension in (0, 1)
        }

    def _comparable(self, one: int, other: int) -> bool:
        before, after = self.reference.entries[one], self.candidate.entries[other]
        return before.dtype == after.dtype and before.shape == after.shape


def _occurrences(layout: Layout) -> Iterator[tuple[str, int]]:
    seen: Counter[str] = Counter()
    for entry in layout.entries:
        yield entry.key, seen[entry.key]
        seen[entry.key] += 1


def labels(layout: Layout) -> Iterator[str]:
    """Yield the keys of a layout made unique by their occurrence."""
    for key, occurrence in _occurrences(layout):
        yield f"{key}#{occurrence}" if occurrence else key


class LayoutPairs:
    """Remembers paired layouts: decode steps repeat theirs, and pairing costs more than comparing an equal frame."""

    def __init__(self) -> None:
        """Start with none."""
        self._by_identity: dict[tuple[int, int], LayoutPair] = {}
        self._latest: dict[Kind, LayoutPair] = {}

    def pair(self, reference: Frame, candidate: Frame) -> LayoutPair:
        """Return the pairing of two frames' layouts."""
        before, after = reference.layout, candidate.layout
        key = (id(before), id(after))
        known = self._by_identity.get(key)
        if known is not None and known.reference is before and known.candidate is after:
            return known
        latest = self._latest.get(reference.kind)
        if latest is not None and latest.reference == before and latest.candidate == after:
            return latest
        pair = LayoutPair(before, after)
        self._by_identity[key] = pair
        self._latest[reference.kind] = pair
        return pair


def group_tensor(frame: Frame, places: tuple[int, ...], entry: LayoutEntry) -> Tensor:
    """Return records of one dtype and shape as one tensor [records, *shape], bits untouched.

    A frame whose records are all in the group is taken whole, without a copy per record.
    """
    payload = frame.payload if isinstance(frame.payload, bytearray) else bytearray(frame.payload)
    flat = torch.frombuffer(payload, dtype=torch.uint8)
    if places != tuple(range(len(frame.layout.entries))):
        offsets, size = frame.layout.offsets, entry.size_bytes
        flat = torch.cat([flat[offsets[place] : offsets[place] + size] for place in places])
    return flat.view(entry.torch_dtype).view(len(places), *entry.shape)
