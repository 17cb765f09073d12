from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch

from fliptrace.analysis import compare
from fliptrace.analysis.diff import PairWalk
from fliptrace.errors import TraceCorruptError
from fliptrace.store import TraceWriter, open_trace
from fliptrace.trace import Closing, Kind, Trace
from fliptrace.verdicts import Outcome


class OtherSource:
    """A source that reads from a file but is none, so that nothing but its frames is known of it."""

    def __init__(self, reader):
        self._reader = reader
        self.name, self.manifest, self.closing = reader.name, reader.manifest, reader.closing
        self.steps = reader.steps

    def frame(self, step, kind):
        return self._reader.frame(step, kind)

    def frames(self, kind):
        return self._reader.frames(kind)


def stored(path, trace):
    """Write a made trace to a file and open it."""
    with TraceWriter(path, trace.manifest) as writer:
        for record in trace.steps:
            frames = [trace.frame(record.step, kind) for kind in record.frames]
            writer.write_step(record, frames)
        writer.close(trace.closing)
    return open_trace(path)


def without(trace, kind, steps=None):
    """Return a trace that lacks a kind in some steps."""
    source = copy.copy(trace.source)
    source.stored, source.steps = dict(source.stored), list(source.steps)
    for number in range(len(source.steps)) if steps is None else steps:
        source.stored.pop((number, kind))
        kept = tuple(one for one in source.steps[number].frames if one != kind)
        source.steps[number] = replace(source.steps[number], frames=kept)
    return Trace(source)


def shortened(trace, steps):
    """Return a trace that ends early."""
    source = copy.copy(trace.source)
    source.steps = list(source.steps[:steps])
    source.closing = Closing(False, "interrupted", steps)
    return Trace(source)


def as_values(diff):
    """Everything in a comparison, grids by their bits."""
    grids = {
        name: (
            grid.rows,
            grid.columns,
            *(
                (str(values.dtype), values.tolist())
                for values in (
                    grid.classes,
                    grid.magnitudes.view(torch.int32),
                    grid.ulps,
                    grid.origins,
                    grid.surviving,
                )
            ),
        )
        for name, grid in diff.grids.items()
    }
    return json.dumps(diff.to_json(), sort_keys=True), grids


KEY = "model.layers.1.mlp.up_proj"
MADE = {"steps": 10}

CASES = {
    "equal": lambda kit, trace: (trace, trace),
    "latent in one step": lambda kit, trace: (
        trace,
        kit.edited(trace, 4, Kind.SHRINK, KEY, kit.flipped_bit((0, 1))),
    ),
    "surviving in one step": lambda kit, trace: (
        trace,
        kit.edited(trace, 4, Kind.SHRINK, KEY, kit.flipped_bit((0, 1), 25)),
    ),
    "surviving in the prefill": lambda kit, trace: (
        trace,
        kit.edited(trace, 0, Kind.SHRINK, KEY, kit.flipped_bit((2, 1), 25)),
    ),
    "cache": lambda kit, trace: (
        trace,
        kit.edited(trace, 5, Kind.CACHE, "cache.1", kit.flipped_bit((1, 0, 0, 0))),
    ),
    "logits digest": lambda kit, trace: (
        trace,
        kit.edited(trace, 6, Kind.LOGITS_DIGEST, "logits", kit.flipped_bit((0, 0))),
    ),
    "every step": lambda kit, trace: (trace, kit.make_trace(kit.Made(seed=1, **MADE))),
    "top values of a record": lambda kit, trace: (
        trace,
        kit.with_step(trace, 6, top_values=(8.0, 6.5)),
    ),
    "top values that are no numbers": lambda kit, trace: (
        (kit.with_step(trace, 6, top_values=(8.0, float("nan"))),) * 2
    ),
    "cache digest": lambda kit, trace: (
        kit.with_step(trace, 6, cache_digest="0" * 32),
        kit.with_step(trace, 6, cache_digest="1" * 32),
    ),
    "cache digest of one": lambda kit, trace: (
        trace,
        kit.with_step(trace, 6, cache_digest="1" * 32),
    ),
    "token": lambda kit, trace: (trace, kit.with_step(trace, 7, chosen=12)),
    "token after a difference": lambda kit, trace: (
        trace,
        kit.with_step(
            kit.edited(trace, 4, Kind.SHRINK, KEY, kit.flipped_bit((0, 1), 25)), 7, chosen=12
        ),
    ),
    "no shrinks in both": lambda kit, trace: (without(trace, Kind.SHRINK),) * 2,
    "no shrinks in one": lambda kit, trace: (trace, without(trace, Kind.SHRINK)),
    "no projections in some steps of one": lambda kit, trace: (
        trace,
        without(trace, Kind.PROJECTION, (2, 3, 8)),
    ),
    "no cache in some steps of both": lambda kit, trace: (without(trace, Kind.CACHE, (2, 8)),) * 2,
    "no logits digest in both": lambda kit, trace: (without(trace, Kind.LOGITS_DIGEST),) * 2,
    "shorter": lambda kit, trace: (trace, shortened(trace, 6)),
    "another launch": lambda kit, trace: (
        trace,
        kit.make_trace(kit.Made(launch="grid 4", **MADE)),
    ),
    "more sites in one": lambda kit, trace: (trace, kit.make_trace(kit.Made(layers=3, **MADE))),
}


@pytest.mark.parametrize("case", CASES)
def test_files_compare_as_any_source_does(kit, tmp_path, case):
    """What is found in files, equal steps dismissed while they are read, is what is found frame by frame."""
    reference, candidate = CASES[case](kit, kit.make_trace(kit.Made(**MADE)))
    with stored(tmp_path / "r", reference) as one, stored(tmp_path / "c", candidate) as other:
        found = compare(one, other)
        wanted = compare(Trace(OtherSource(one.source)), Trace(OtherSource(other.source)))
    assert as_values(found) == as_values(wanted)
    if case in ("equal", "no logits digest in both"):
        assert found.outcome is Outcome.IDENTICAL


def test_equal_steps_are_dismissed(kit, tmp_path, monkeypatch):
    """In files, only the prefill and the first decode step of equal ones come as frames."""
    taken = []
    take_frames = PairWalk._take_frames

    def counted(walk, before, *rest):
        taken.append(before.step)
        return take_frames(walk, before, *rest)

    monkeypatch.setattr(PairWalk, "_take_frames", counted)
    trace = kit.make_trace(kit.Made(**MADE))
    changed = kit.edited(trace, 4, Kind.SHRINK, KEY, kit.flipped_bit((0, 1)))
    with stored(tmp_path / "r", trace) as one, stored(tmp_path / "c", changed) as other:
        compare(one, other)
    assert taken == [0, 1, 4]


@pytest.mark.parametrize("damaged", [("r",), ("c",), ("r", "c")])
def test_damage_in_a_dismissed_step_is_corruption(kit, tmp_path, damaged):
    """A flipped byte in one file, or the same in both, is named though every other step was equal."""
    trace = kit.make_trace(kit.Made(**MADE))
    for name in ("r", "c"):
        stored(tmp_path / name, trace).close()
        if name in damaged:
            data = bytearray((tmp_path / name).read_bytes())
            data[data.index(trace.frame(6, Kind.OPERAND).payload) + 3] ^= 1
            (tmp_path / name).write_bytes(data)
    with (
        open_trace(tmp_path / "r") as one,
        open_trace(tmp_path / "c") as other,
        pytest.raises(TraceCorruptError, match="step 6, operand frame"),
    ):
        compare(one, other)
