from __future__ import annotations

import os
import random
import shutil
import sqlite3
import time
from dataclasses import replace

import pytest

from fliptrace.errors import TraceCorruptError, TraceReadError, TraceVersionError
from fliptrace.store import TraceReader, TraceWriter, open_trace, schema, verify_trace

SAMPLED_POSITIONS = 1000


def read_all(samples, path):
    with TraceReader(path) as reader:
        return samples.content(reader)


def read_all_or_error(samples, path):
    try:
        return read_all(samples, path)
    except TraceReadError as error:
        return error


def flipped(path, data, position, bit):
    damaged = bytearray(data)
    damaged[position] ^= 1 << bit
    path.write_bytes(damaged)


def test_flipped_bytes_are_found_or_change_nothing(record, samples, tmp_path):
    """A flipped bit anywhere in the file is named, or what is read is bit for bit what was written."""
    path = record(tmp_path / "t")
    expected, data = read_all(samples, path), path.read_bytes()
    source = random.Random(11)
    positions = {*range(100), *source.sample(range(len(data)), SAMPLED_POSITIONS)}
    found = 0
    for position in sorted(positions):
        flipped(path, data, position, source.randrange(8))
        outcome = read_all_or_error(samples, path)
        if isinstance(outcome, TraceReadError):
            assert str(path) in str(outcome), position
            assert "\n" not in str(outcome), position
            found += 1
        else:
            assert outcome == expected, position
    assert found > SAMPLED_POSITIONS // 20


def column_positions(path, data):
    """Byte positions of every value of every row, by table, row and column, where the value occurs once in the file."""
    connection = sqlite3.connect(path)
    for table in schema.TABLES:
        cursor = connection.execute(f"SELECT * FROM {table}")
        names = [column[0] for column in cursor.description]
        for row in cursor:
            for name, value in zip(names, row, strict=True):
                stored = value.encode() if isinstance(value, str) else value
                if isinstance(stored, bytes) and len(stored) >= 16 and data.count(stored) == 1:
                    yield table, row[0], name, data.index(stored), len(stored)
    connection.close()


def test_flipped_bytes_in_values_are_always_named(record, samples, tmp_path):
    """First, middle and last byte of payloads, digests, ids, seals and texts of every row: named by its row."""
    path = record(tmp_path / "t")
    data = path.read_bytes()
    places = list(column_positions(path, data))
    assert {(table, name) for table, _, name, _, _ in places} >= {
        ("frames", "payload"),
        ("frames", "digests"),
        ("layouts", "json"),
        ("layouts", "seal"),
        ("steps", "frame_seals"),
        ("steps", "seal"),
        ("documents", "json"),
        ("documents", "seal"),
    }
    for table, row, _, start, length in places:
        for position in {start, start + length // 2, start + length - 1}:
            flipped(path, data, position, position % 8)
            named = {
                "documents": f"the {row} record",
                "layouts": f"layout {row}",
                "steps": f"step {row}, step record",
                "frames": f"step {row >> schema.STEP_SHIFT}, " if table == "frames" else "",
            }[table]
            with pytest.raises(TraceCorruptError, match=named):
                read_all(samples, path)
            assert any(named in finding for finding in verify_trace(path))


def test_a_changed_record_is_named(record, samples, tmp_path):
    """verify_trace names the record whose bytes changed, and only that one."""
    path = record(tmp_path / "t")
    data = path.read_bytes()
    payload = samples.make_step(1)[1][0].payload
    flipped(path, data, data.index(payload) + 2 * 64 + 5, 3)
    first, second = verify_trace(path)
    assert "step 1, shrink frame does not match its seal" in first
    assert "step 1, shrink frame, record layers.2.q_proj: its bytes do not match" in second


def test_a_record_that_was_wrong_before_it_was_sealed_is_named(samples, tmp_path):
    """A payload that does not match the digest that came with it is a finding, though its seal is right."""
    step, frames = samples.make_step(0)
    wrong = bytearray(frames[2].payload)
    wrong[-1] ^= 1
    with TraceWriter(tmp_path / "t", samples.MANIFEST) as writer:
        writer.write_step(step, [*frames[:2], replace(frames[2], payload=wrong), frames[3]])
        writer.close(samples.CLOSING)
    (finding,) = verify_trace(tmp_path / "t")
    assert "step 0, cache frame, record cache.1: its bytes do not match its digest" in finding


CHANGES = {
    "UPDATE layouts SET (json, seal) = (SELECT json, seal FROM layouts WHERE id = 1) WHERE id = 0": (
        "step 0, shrink frame does not match"
    ),
    "DELETE FROM frames WHERE id >> 20 = 1 AND kind = 'cache'": "step 1, cache frame is missing",
    "DELETE FROM steps WHERE step = 1": "step 1 is missing; step 2 follows",
    "DELETE FROM steps WHERE step = 3": "step 3 is missing; the closing record counts 4",
    "DELETE FROM layouts WHERE id = 2": "layout 2 is missing",
    "DELETE FROM documents WHERE name = 'manifest'": "the manifest record is missing",
    "UPDATE steps SET chosen = chosen + 1 WHERE step = 2": "step 2, step record",
    "UPDATE steps SET tied = 'x' WHERE step = 2": "step 2, step record",
    "UPDATE steps SET token_ids = 5 WHERE step = 2": "step 2, step record",
    "UPDATE frames SET kind = 'operand' WHERE id = 1 << 20": "step 1, shrink frame does not match",
    "UPDATE frames SET payload = 7 WHERE id = 1 << 20": "step 1, shrink frame does not match",
    "UPDATE frames SET layout = 1 WHERE id = 1 << 20": "step 1, shrink frame does not match",
    "UPDATE frames SET layout = 'x' WHERE id = 1 << 20": "layout x is missing",
    "INSERT INTO frames VALUES ((1 << 20) + 5, 'cache', 0, 1, NULL, x'')": "step 1 has another number",
    "CREATE TABLE more (x)": "the list of tables is not that of a trace",
    "DROP TABLE steps": "the list of tables is not that of a trace",
    "UPDATE steps SET seal = (SELECT seal FROM steps WHERE step = 1) WHERE step = 2": "step 2, step record",
}


@pytest.mark.parametrize("statement", CHANGES)
def test_changed_rows_are_named(record, samples, tmp_path, statement):
    """Rows that were deleted, added or changed with SQL are named on reading."""
    path = record(tmp_path / "t", steps=4)
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()
    with pytest.raises(TraceCorruptError) as caught:
        read_all(samples, path)
    assert CHANGES[statement] in str(caught.value)
    assert any(CHANGES[statement] in finding for finding in verify_trace(path))


def test_rows_of_another_trace_are_named(record, samples, tmp_path):
    """A row with a seal of its own from another trace does not fit, though it is whole."""
    path, other = record(tmp_path / "t"), record(tmp_path / "u", seed=1)
    for table, condition, named in (
        ("frames", "id = 1 << 20", "step 1, shrink frame does not match its seal"),
        ("steps", "step = 0", "step 1, step record does not match its seal"),
        ("steps", "step >= 0", "the closing record does not fit the steps"),
        ("steps", "step = 2", "step 2, step record does not match its seal"),
        ("documents", "name = 'closing'", "the closing record does not fit the steps"),
    ):
        copy = tmp_path / "copy"
        shutil.copy(path, copy)
        connection = sqlite3.connect(copy)
        connection.execute("ATTACH ? AS other", (str(other),))
        connection.execute(f"REPLACE INTO {table} SELECT * FROM other.{table} WHERE {condition}")
        connection.commit()
        connection.close()
        with pytest.raises(TraceCorruptError, match=named):
            read_all(samples, copy)


def test_files_that_are_no_traces(record, tmp_path):
    """Missing, a folder, empty, text, another database, cut short, another version: one line each."""
    whole = record(tmp_path / "whole").read_bytes()
    cases = {}

    def case(name, content, message, error=TraceReadError):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        cases[path] = (message, error)

    case("missing", None, "cannot be read")
    case("empty", b"", "is empty")
    case("text", b"hello, this is no database\n" * 50, "is not a trace file")
    case("short", whole[:60], "is truncated")
    case("cut", whole[: len(whole) * 2 // 3], "is truncated")
    case("zeros", b"\0" * 20000, "is not a trace file")
    case(
        "newer",
        whole[:60] + b"\0\0\0\x63" + whole[64:],
        "schema version 99; .* version 1",
        TraceVersionError,
    )
    sqlite3.connect(tmp_path / "database").execute("CREATE TABLE t (x)").connection.close()
    case("database", None, "an SQLite database of something else")
    (tmp_path / "folder").mkdir()
    case("folder", None, "is not a file")
    for path, (message, error) in cases.items():
        for read in (open_trace, verify_trace):
            with pytest.raises(error, match=message) as caught:
                read(path)
            assert str(path) in str(caught.value)
            assert "\n" not in str(caught.value)


def test_no_permission_is_one_line(record, tmp_path):
    """A trace that may not be read says so."""
    path = record(tmp_path / "t")
    path.chmod(0)
    user = os.geteuid()
    if user == 0:  # may read anything; another user may not
        os.seteuid(65534)
    try:
        with pytest.raises(TraceReadError, match=r"cannot be read \(Permission denied\)"):
            open_trace(path)
    finally:
        os.seteuid(user)


def test_a_damaged_log_only_shortens_a_trace(samples, tmp_path):
    """In a trace that was not closed, a flipped bit in the log beside it is named or ends the trace earlier."""
    path, copy = tmp_path / "t", tmp_path / "copy"
    logs = {"": path, "-wal": tmp_path / "t-wal"}
    with TraceWriter(path, samples.MANIFEST) as writer:
        for step in range(6):
            writer.write_step(*samples.make_step(step))
        while writer.acknowledged < 5:
            time.sleep(0.001)
        data = {suffix: file.read_bytes() for suffix, file in logs.items()}
        writer.abandon("test")
    source, lengths = random.Random(3), set()
    for _ in range(150):
        for leftover in tmp_path.glob("copy*"):
            leftover.unlink()
        (tmp_path / "copy").write_bytes(data[""])
        log = data["-wal"]
        flipped(tmp_path / "copy-wal", log, source.randrange(len(log)), source.randrange(8))
        outcome = read_all_or_error(samples, copy)
        if isinstance(outcome, TraceReadError):
            continue
        with TraceReader(copy) as reader:
            assert not reader.closing.complete
            lengths.add(len(reader.steps))
            for step in reader.steps:
                record, frames = samples.make_step(step.step)
                assert step == record
                found = reader.step_frames(step.step)
                assert [found[frame.kind].payload for frame in frames] == [
                    frame.payload for frame in frames
                ]
    assert len(lengths) > 3
