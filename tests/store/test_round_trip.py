from __future__ import annotations

import gc
import math
import os
import stat
import struct
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fliptrace.errors import (
    InputError,
    RecordingError,
    SiteNotFoundError,
    StorageError,
)
from fliptrace.manifest import Manifest
from fliptrace.store import TraceReader, TraceWriter, open_trace, schema, verify_trace
from fliptrace.trace import Kind, Layout, LayoutEntry

ENTRIES = st.builds(
    LayoutEntry,
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.sampled_from(["float32", "bfloat16", "float16", "int64", "int32"]),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.text(st.characters(codec="utf-8"), max_size=5),
)
LAYOUTS = st.lists(ENTRIES, max_size=6).map(lambda entries: Layout(tuple(entries)))
NUMBERS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(width=32)


@st.composite
def steps(draw, samples, step):
    kinds = draw(st.lists(st.sampled_from(list(Kind)), unique=True, max_size=5))
    frames = []
    for kind in kinds:
        layout = draw(LAYOUTS)
        payload = draw(st.binary(min_size=layout.size_bytes, max_size=layout.size_bytes))
        wrapped = draw(st.sampled_from([bytes, bytearray, memoryview]))(payload)
        digested = all(0 not in entry.shape for entry in layout.entries) and draw(st.booleans())
        frames.append(samples.make_frame(step, kind, layout, wrapped, digested))
    record = replace(
        samples.make_record(step, kinds, draw(st.lists(NUMBERS, min_size=1, max_size=5))),
        chosen=draw(NUMBERS),
        first_position=draw(NUMBERS),
        top_values=(draw(FLOATS), draw(FLOATS)),
        top_ids=(draw(NUMBERS), draw(NUMBERS)),
    )
    return record, frames


def float_bits(values):
    return struct.pack("<2d", *values)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    count=st.integers(0, 3),
    part_bytes=st.sampled_from([16, 1 << 28]),
    inserted_bytes=st.sampled_from([1, 40, 1 << 24]),
)
def test_what_is_written_is_read_back(samples, data, count, part_bytes, inserted_bytes):
    """Any layouts, payloads, ids and logits (NaN, signed zero, infinities) come back bit by bit, split or not."""
    written = [data.draw(steps(samples, step)) for step in range(count)]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "PART_BYTES", part_bytes)
        patch.setattr(schema, "INSERTED_BYTES", inserted_bytes)
        path = Path(folder) / "t.trace"
        with TraceWriter(path, samples.MANIFEST) as writer:
            for record, frames in written:
                writer.write_step(record, frames)
            writer.close(samples.CLOSING)
        assert verify_trace(path) == []
        with TraceReader(path) as reader:
            assert reader.manifest == samples.MANIFEST
            assert reader.closing == replace(samples.CLOSING, steps=count)
            assert len(reader.steps) == count
            for (record, frames), step in zip(written, reader.steps, strict=True):
                assert float_bits(step.top_values) == float_bits(record.top_values)
                assert replace(step, top_values=(0, 0)) == replace(record, top_values=(0, 0))
                found = reader.step_frames(step.step)
                assert list(found) == [frame.kind for frame in frames]
                for frame in frames:
                    for same in (found[frame.kind], reader.frame(step.step, frame.kind)):
                        assert same.payload == bytes(frame.payload)
                        assert same.layout == frame.layout
                        if frame.digests is None:
                            assert same.digests is None
                        else:
                            assert torch.equal(same.digests, frame.digests)


def test_a_trace_is_one_private_file(record, tmp_path):
    """While it is written and afterwards, only the owner may read; when closed, nothing lies beside the file."""
    old = os.umask(0)
    try:
        with TraceWriter(tmp_path / "open", Manifest({})) as writer:
            assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
            assert len(list(tmp_path.iterdir())) > 1
            writer.abandon("test")
    finally:
        os.umask(old)
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_reading_changes_nothing(record, samples, tmp_path):
    """Reading a closed trace leaves its bytes and its folder as they were."""
    path = record(tmp_path / "t")
    before = path.read_bytes()
    with TraceReader(path) as reader:
        samples.content(reader)
        assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_existing_paths_are_refused(record, tmp_path):
    """Nothing is replaced, and a log left over from another trace is not taken in."""
    path = record(tmp_path / "t")
    with pytest.raises(InputError, match="exists and is not replaced"):
        TraceWriter(path, Manifest({}))
    (tmp_path / "u-wal").write_bytes(b"")
    with pytest.raises(InputError, match="left over from another trace"):
        TraceWriter(tmp_path / "u", Manifest({}))
    with pytest.raises(InputError, match="needs a folder that exists"):
        TraceWriter(tmp_path / "none" / "t", Manifest({}))
    with pytest.raises(InputError, match="JSON values"):
        TraceWriter(tmp_path / "v", Manifest({"a": {"b": math.nan}}))
    with pytest.raises(InputError, match="JSON values"):
        TraceWriter(tmp_path / "v", Manifest({"a": {"b": "\ud800"}}))
    with pytest.raises(InputError, match="queue_steps"):
        TraceWriter(tmp_path / "v", Manifest({}), queue_steps=0)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["t", "u-wal"]


def test_write_step_waits_while_two_steps_are_not_acknowledged(samples, tmp_path):
    """With a writer that is held up, the third step blocks until the first is acknowledged."""
    release, handed_over = threading.Event(), []
    with TraceWriter(tmp_path / "t", Manifest({})) as writer:

        def hand_over():
            for step in range(4):
                writer.write_step(*samples.make_step(step), wait=release.wait)
                handed_over.append(step)

        thread = threading.Thread(target=hand_over)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert handed_over == [0, 1]
        assert writer.acknowledged == -1
        release.set()
        thread.join(10)
        writer.close(samples.CLOSING)
        assert writer.acknowledged == 3
    assert len(open_trace(tmp_path / "t").steps) == 4


def test_wait_runs_before_payloads_are_read(samples, tmp_path):
    """What an asynchronous copy fills in before wait returns is what is stored."""
    record, frames = samples.make_step(0)
    late = bytearray(len(frames[0].payload))

    def arrive():
        assert threading.current_thread() is not threading.main_thread()
        late[:] = frames[0].payload

    with TraceWriter(tmp_path / "t", Manifest({})) as writer:
        writer.write_step(record, [replace(frames[0], payload=late), *frames[1:]], arrive)
        writer.write_step(None, lambda: samples.make_step(1), lambda: None)
        writer.close(samples.CLOSING)
    trace = open_trace(tmp_path / "t")
    assert trace.frame(0, Kind.SHRINK).payload == frames[0].payload
    assert trace.frame(1, Kind.SHRINK).payload == samples.make_step(1)[1][0].payload
    assert verify_trace(tmp_path / "t") == []


BAD_STEPS = {
    "must be written next": lambda record, frames: (replace(record, step=3), frames),
    "lists frames": lambda record, frames: (record, frames[1:]),
    "its layout takes": lambda record, frames: (
        record,
        [replace(frames[0], payload=frames[0].payload[1:]), *frames[1:]],
    ),
    "of step 5": lambda record, frames: (record, [replace(frames[0], step=5), *frames[1:]]),
    "digests must have shape": lambda record, frames: (
        record,
        [replace(frames[0], digests=frames[0].digests[1:]), *frames[1:]],
    ),
    "several frames of one kind": lambda record, frames: (
        replace(record, frames=("shrink", "shrink")),
        [frames[0], frames[0]],
    ),
    "no step record": lambda record, frames: (None, frames),
}


@pytest.mark.parametrize("message", BAD_STEPS)
def test_steps_that_do_not_fit_are_refused(samples, tmp_path, message):
    """A step that contradicts itself is refused on close at the latest, and nothing of it is stored."""
    path = tmp_path / "t"
    with TraceWriter(path, Manifest({})) as writer:
        writer.write_step(*samples.make_step(0))
        writer.write_step(*BAD_STEPS[message](*samples.make_step(1)))
        with pytest.raises(InputError, match=message):
            writer.close(samples.CLOSING)
    trace = open_trace(path)
    assert len(trace.steps) == 1
    assert trace.closing.stop_reason == "recording was interrupted after step 0"


def test_errors_in_the_writer_thread_reach_the_caller(samples, tmp_path):
    """Our own errors arrive as they are, others as a StorageError with their cause; writing on is refused."""
    for raised, expected, message in (
        (RecordingError("a hook never fired"), RecordingError, "a hook never fired"),
        (ValueError("wrong"), StorageError, "ValueError: wrong"),
    ):
        path = tmp_path / type(raised).__name__

        def fail(raised=raised):
            raise raised

        with TraceWriter(path, Manifest({})) as writer:
            writer.write_step(*samples.make_step(0))
            writer.write_step(None, fail)
            while writer._failure is None:
                time.sleep(0.001)
            with pytest.raises(expected, match=message):
                writer.write_step(*samples.make_step(1))
            with pytest.raises(expected, match=message):
                writer.close(samples.CLOSING)
        assert len(open_trace(path).steps) == 1


def test_leaving_by_an_exception_marks_the_trace(samples, tmp_path):
    """What was handed over is kept, and the closing record says why recording ended."""

    def record():
        with TraceWriter(tmp_path / "t", Manifest({})) as writer:
            writer.write_step(*samples.make_step(0))
            raise RecordingError("NaN logits in step 1")

    with pytest.raises(RecordingError):
        record()
    trace = open_trace(tmp_path / "t")
    assert trace.closing.stop_reason == "RecordingError: NaN logits in step 1"
    assert not trace.closing.complete
    assert len(trace.steps) == trace.closing.steps == 1
    with TraceWriter(tmp_path / "u", Manifest({})) as writer:
        writer.write_step(*samples.make_step(0))
    assert open_trace(tmp_path / "u").closing.stop_reason.endswith("without a closing record")
    with pytest.raises(InputError, match="is closed"):
        writer.write_step(*samples.make_step(1))


def test_a_trace_that_nobody_uses_is_closed(record, tmp_path):
    """open_trace leaves no open file behind once its trace is gone; closing twice is harmless."""
    path = record(tmp_path / "t")
    trace = open_trace(path)
    files = [file.path for file in psutil.Process().open_files()]
    assert str(path) in files
    del trace
    gc.collect()
    assert str(path) not in [file.path for file in psutil.Process().open_files()]
    reader = TraceReader(path)
    reader.close()
    reader.close()


def test_what_is_not_there_is_said(record, tmp_path):
    """A kind that a step lacks is None; a step that is not there is an error."""
    with TraceReader(record(tmp_path / "t")) as reader:
        assert reader.frame(1, Kind.LOGITS_FULL) is None
        assert [frame.step for frame in reader.frames(Kind.CACHE)] == [0, 1, 2]
        assert list(reader.frames(Kind.LOGITS_FULL)) == []
        for step in (-1, 3):
            with pytest.raises(SiteNotFoundError, match="has steps 0 to 2"):
                reader.frame(step, Kind.CACHE)


def test_layouts_are_stored_once(samples, tmp_path):
    """Layouts that are equal but not the same object take one row, and a reader parses them once."""
    with TraceWriter(tmp_path / "t", Manifest({})) as writer:
        for step in range(5):
            record, frames = samples.make_step(step)
            copies = [
                replace(frame, layout=Layout(tuple(frame.layout.entries))) for frame in frames
            ]
            writer.write_step(record, copies)
        writer.close(samples.CLOSING)
    with TraceReader(tmp_path / "t") as reader:
        assert reader.query("SELECT count(*) FROM layouts") == [(len(samples.LAYOUTS),)]
        frames = list(reader.frames(Kind.SHRINK))
        assert all(frame.layout is frames[0].layout for frame in frames)


def test_memory_stays_flat_while_a_trace_grows(samples, tmp_path):
    """Writing 6,000 steps, each with new layout objects, needs no more memory than writing 600."""
    resident = psutil.Process().memory_info
    _, made = samples.make_step(0)
    with TraceWriter(tmp_path / "t", Manifest({})) as writer:
        for step in range(6000):
            frames = [
                replace(frame, step=step, layout=Layout(frame.layout.entries)) for frame in made
            ]
            writer.write_step(samples.make_record(step, samples.LAYOUTS), frames)
            if step == 600:
                before = resident().rss
        grown = resident().rss - before
        writer.close(samples.CLOSING)
    assert grown < 6_000_000, grown
