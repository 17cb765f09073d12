from __future__ import annotations

from dataclasses import replace

import pytest

from fliptrace.errors import TraceCorruptError
from fliptrace.manifest import Manifest
from fliptrace.store import TraceReader, TraceWriter, paired_steps
from fliptrace.trace import Kind, Layout, LayoutEntry


def write(samples, path, steps):
    with TraceWriter(path, Manifest({"engine": {"name": path.name}})) as writer:
        for step in steps:
            writer.write_step(*step)
        writer.close(samples.CLOSING)
    return TraceReader(path)


def changed_payload(frame):
    data = bytearray(frame.payload)
    data[-1] ^= 0x80
    return replace(frame, payload=data)


def changed_digest(frame):
    return replace(frame, digests=frame.digests + 1)


def changed_launch(frame):
    entries = tuple(replace(entry, launch="split 4") for entry in frame.layout.entries)
    return replace(frame, layout=Layout(entries))


def test_equal_traces_pair_up(samples, tmp_path):
    """Two traces with the same frames have no frames to look at, also where their layouts are numbered differently."""
    steps = [samples.make_step(step) for step in range(4)]
    record, frames = steps[0]
    turned = [(replace(record, frames=record.frames[::-1]), frames[::-1]), *steps[1:]]
    with (
        write(samples, tmp_path / "r", steps) as reference,
        write(samples, tmp_path / "c", steps[:3]) as candidate,
        write(samples, tmp_path / "t", turned) as other,
    ):
        for third, count in ((candidate, 3), (other, 4)):
            pairs = list(paired_steps(reference, third))
            assert [pair.step for pair in pairs] == list(range(count))
            for pair in pairs:
                assert pair.equal == tuple(samples.LAYOUTS)
                assert pair.reference == pair.candidate == {}
        assert [pair.step for pair in paired_steps(reference, other, start=1, stop=3)] == [1, 2]


@pytest.mark.parametrize("change", [changed_payload, changed_digest, changed_launch])
def test_differing_frames_are_given(samples, tmp_path, change):
    """One frame that differs in bytes, digests or layout comes from both traces; the others count as equal."""
    steps = [samples.make_step(step) for step in range(3)]
    record, frames = steps[1]
    steps_changed = [steps[0], (record, [change(frames[0]), *frames[1:]]), steps[2]]
    with (
        write(samples, tmp_path / "r", steps) as reference,
        write(samples, tmp_path / "c", steps_changed) as candidate,
    ):
        pairs = list(paired_steps(reference, candidate))
    assert [len(pair.reference) for pair in pairs] == [0, 1, 0]
    assert pairs[1].equal == tuple(samples.LAYOUTS)[1:]
    mine, theirs = pairs[1].reference[Kind.SHRINK], pairs[1].candidate[Kind.SHRINK]
    assert (mine.payload, mine.layout) == (frames[0].payload, frames[0].layout)
    assert theirs.payload == bytes(change(frames[0]).payload)
    assert theirs.layout == change(frames[0]).layout


def test_frames_without_a_partner_are_given(samples, tmp_path):
    """A kind that only one trace has is listed on its side alone."""
    record, frames = samples.make_step(0)
    less = (replace(record, frames=record.frames[:-1]), frames[:-1])
    layout = Layout((LayoutEntry("logits", "int64", (1, 2)),))
    extra = samples.make_frame(0, Kind.LOGITS_DIGEST, layout, bytes(16), digested=False)
    more = (
        replace(record, frames=(*record.frames[:-1], "logits_digest")),
        [*frames[:-1], extra],
    )
    with (
        write(samples, tmp_path / "r", [(record, frames)]) as reference,
        write(samples, tmp_path / "c", [less]) as candidate,
        write(samples, tmp_path / "m", [more]) as other,
    ):
        (pair,) = paired_steps(reference, candidate)
        assert (list(pair.reference), list(pair.candidate)) == ([Kind.LOGITS_TOP], [])
        (pair,) = paired_steps(reference, other)
        assert (list(pair.reference), list(pair.candidate)) == (
            [Kind.LOGITS_TOP],
            [Kind.LOGITS_DIGEST],
        )


@pytest.mark.parametrize("damaged", ["r", "c", "both"])
def test_damage_is_not_taken_for_a_difference(record, samples, tmp_path, damaged):
    """A flipped byte in one trace, or the same one in both, is corruption and never a difference or an equality."""
    for name in ("r", "c"):
        path = record(tmp_path / name)
        if damaged in (name, "both"):
            data = bytearray(path.read_bytes())
            data[data.index(samples.make_step(2)[1][2].payload)] ^= 1
            path.write_bytes(data)
    with (
        TraceReader(tmp_path / "r") as reference,
        TraceReader(tmp_path / "c") as candidate,
        pytest.raises(TraceCorruptError, match="step 2, cache frame"),
    ):
        list(paired_steps(reference, candidate))
