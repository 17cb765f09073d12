"""Walking through two trace files side by side, fast where they are equal.

A comparison of two long traces spends its time on frames that are equal. Here a pair of equal rows costs two reads, one
seal and one comparison of all bytes, and no objects: when the bytes are equal and both steps list the same seal for
them, checking one row against that seal has checked both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch

from fliptrace.store.reader import FrameRow, TraceReader
from fliptrace.trace import Frame, Kind


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
    same_layouts: set[tuple[int, int]] = set()
    for step in range(start, common if stop is None else min(stop, common)):
        mine, theirs = reference.step_rows(step), candidate.step_rows(step)
        kinds = reference.steps[step].frames
        if len(mine) == len(theirs) == len(kinds) and candidate.steps[step].frames == kinds:
            yield _pair_rows(reference, candidate, step, mine, theirs, same_layouts)
        else:
            yield _pair_frames(step, reference.step_frames(step), candidate.step_frames(step))


def _pair_rows(
    reference: TraceReader,
    candidate: TraceReader,
    step: int,
    mine: list[FrameRow],
    theirs: list[FrameRow],
    same_layouts: set[tuple[int, int]],
) -> StepPair:
    if reference.frame_seals(step) == candidate.frame_seals(step):
        # Rows are compared without their layout's number, which is each trace's own.
        for row, other in zip(mine, theirs, strict=True):
            if (row[2], other[2]) not in same_layouts:
                if reference.layout(row[2])[1] != candidate.layout(other[2])[1]:
                    break
                same_layouts.add((row[2], other[2]))
            if row[5] != other[5] or row[4] != other[4] or row[1] != other[1] or row[3] != other[3]:
                break
        else:
            reference.check_rows(step, mine)
            return StepPair(step, _kinds(reference, step))
    reference.check_rows(step, mine)
    candidate.check_rows(step, theirs)
    return _pair_frames(step, reference.frames_of(step, mine), candidate.frames_of(step, theirs))


def _pair_frames(step: int, mine: dict[Kind, Frame], theirs: dict[Kind, Frame]) -> StepPair:
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


def _kinds(reader: TraceReader, step: int) -> tuple[Kind, ...]:
    # A reader's steps name their frames by Kind, which is a str.
    return cast("tuple[Kind, ...]", reader.steps[step].frames)
