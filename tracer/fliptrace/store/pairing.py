"""Walking through two trace files side by side, fast where they are equal.

A comparison of two long traces spends its time on frames that are equal. Here a pair of equal rows costs two reads, one
seal and one comparison of all bytes, and no objects: when the bytes are equal and both steps list the same seal for
them, checking one row against that seal has checked both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from fliptrace.store.reader import FrameRow, TraceReader
from fliptrace.trace import Frame, Kind, Layout

#: What a row of an equal step must be: its kind as stored, and the size of its payload.
_Expected = tuple[tuple[bytes, int], ...]

#: All frames of one step of one trace, in storage order.
StepFrames = dict[Kind, Frame]


@dataclass(frozen=True, eq=False)
class StepLayouts:
    """The layouts of a step that is equal in both traces; one object for all steps that share them.

    Attributes:
        layouts: kind -> layout, in storage order.
    """

    layouts: Mapping[Kind, Layout]


@dataclass(frozen=True, slots=True)
class StepPair:
    """The frames of one step in two traces.

    Attributes:
        step: 0 for the prefill.
        equal: kinds whose frames are equal in both: same layout, same bytes, same digests.
        reference: the reference's frames that are not, in storage order.
        candidate: the candidate's.
    """

    step: int
    equal: tuple[Kind, ...]
    reference: dict[Kind, Frame] = field(default_factory=dict)
    candidate: dict[Kind, Frame] = field(default_factory=dict)


class PairedReader:
    """Two trace files read step by step, every byte checked against its seal and compared."""

    def __init__(self, reference: TraceReader, candidate: TraceReader) -> None:
        """Remember two open traces."""
        self._reference = reference
        self._candidate = candidate
        self._known: dict[tuple[object, ...], tuple[StepLayouts, _Expected] | None] = {}

    def step(self, step: int) -> StepLayouts | tuple[StepFrames, StepFrames]:
        """Read one step of both.

        Returns:
            The layouts of a step that is equal in both; else all frames of the reference and of the candidate, in
            storage order.

        Raises:
            SiteNotFoundError: no such step.
            TraceCorruptError: a frame of either does not match its seal, or is missing.
        """
        reference, candidate = self._reference, self._candidate
        mine, theirs = reference.step_rows(step), candidate.step_rows(step)
        if reference.frame_seals(step) == candidate.frame_seals(step):
            layouts = self._equal_rows(step, mine, theirs)
            if layouts is not None:
                reference.check_rows(step, mine)
                return layouts
        reference.check_rows(step, mine)
        candidate.check_rows(step, theirs)
        return reference.frames_of(step, mine), candidate.frames_of(step, theirs)

    def _equal_rows(
        self, step: int, mine: list[FrameRow], theirs: list[FrameRow]
    ) -> StepLayouts | None:
        """Compare all rows; None where they differ, or where a frame takes several."""
        # Rows are compared without their layout's number, which is each trace's own.
        kinds = self._reference.steps[step].frames
        numbers = (kinds, *[row[2] for row in mine], *[row[2] for row in theirs])
        if numbers not in self._known:
            self._known[numbers] = self._expect(step, mine, theirs)
        known = self._known[numbers]
        if known is None or self._candidate.steps[step].frames != kinds:
            return None
        for row, other, (kind, size) in zip(mine, theirs, known[1], strict=True):
            if row[5] != other[5] or row[4] != other[4] or row[0] != other[0]:
                return None
            if row[1] != kind or other[1] != kind or row[3] != 1 or other[3] != 1:
                return None
            if len(row[5]) != size:
                return None
        return known[0]

    def _expect(
        self, step: int, mine: list[FrameRow], theirs: list[FrameRow]
    ) -> tuple[StepLayouts, _Expected] | None:
        """Return what rows of equal layouts must be, None for layouts that differ."""
        kinds = [Kind(kind) for kind in self._reference.steps[step].frames]
        if not len(kinds) == len(mine) == len(theirs):
            return None
        layouts: dict[Kind, Layout] = {}
        for kind, row, other in zip(kinds, mine, theirs, strict=True):
            layout, seal = self._reference.layout(row[2])
            if seal != self._candidate.layout(other[2])[1]:
                return None
            layouts[kind] = layout
        expected = tuple(
            (kind.value.encode(), layout.size_bytes) for kind, layout in layouts.items()
        )
        return StepLayouts(layouts), expected


def paired_steps(
    reference: TraceReader, candidate: TraceReader, *, start: int = 0, stop: int | None = None
) -> Iterator[StepPair]:
    """Yield the steps that two traces have in common, every byte checked against its seal and compared.

    Args:
        reference: an open trace.
        candidate: another.
        start: first step.
        stop: step to end before; by default, and at most, the shorter trace's number of steps.

    Raises:
        TraceCorruptError: a frame of either does not match its seal, or is missing.
    """
    common = min(len(reference.steps), len(candidate.steps))
    pair = PairedReader(reference, candidate)
    for step in range(start, common if stop is None else min(stop, common)):
        found = pair.step(step)
        if isinstance(found, StepLayouts):
            yield StepPair(step, tuple(found.layouts))
        else:
            yield _pair_frames(step, *found)


def _pair_frames(step: int, mine: StepFrames, theirs: StepFrames) -> StepPair:
    equal = tuple(
        kind for kind, frame in mine.items() if kind in theirs and _equal(frame, theirs[kind])
    )
    return StepPair(
        step,
        equal,
        {kind: frame for kind, frame in mine.items() if kind not in equal},
        {kind: frame for kind, frame in theirs.items() if kind not in equal},
    )


def _equal(frame: Frame, other: Frame) -> bool:
    if frame.layout != other.layout or frame.payload != other.payload:
        return False
    if frame.digests is None or other.digests is None:
        return frame.digests is other.digests
    return torch.equal(frame.digests, other.digests)
