from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fliptrace.errors import InputError
from fliptrace.store import TraceReader, TraceWriter, copy_trace, open_trace, verify_trace

FOLDER = Path(__file__).parent


def run_script(name, *arguments):
    done = subprocess.run(
        [sys.executable, str(FOLDER / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def steps_as_written(samples, path):
    """How many steps a trace holds; each must be exactly what was written."""
    with TraceReader(path) as reader:
        for step in reader.steps:
            expected, frames = samples.make_step(step.step)
            assert step == expected
            found = reader.step_frames(step.step)
            assert list(found) == [frame.kind for frame in frames]
            for frame in frames:
                assert found[frame.kind].payload == frame.payload
        return len(reader.steps)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a file system needs root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_killed_recordings_keep_every_acknowledged_step(samples, tmp_path):
    """SIGKILL at 20 random moments: acknowledged steps are read back, at most two others are lost, and it says so."""
    results = run_script("record_and_die.py", tmp_path, 20)
    assert len(results) == 20
    assert len({result["acknowledged"] for result in results}) > 5
    for result in results:
        kept = steps_as_written(samples, result["path"])
        assert kept >= result["acknowledged"] + 1
        assert kept >= result["handed_over"] + 1 - 2
        trace = open_trace(result["path"])
        assert not trace.closing.complete
        assert trace.closing.steps == kept
        when = f"after step {kept - 1}" if kept else "before step 0"
        assert trace.closing.stop_reason == f"recording was interrupted {when}"
        assert "INCOMPLETE" in repr(trace)


def test_killed_recording_on_read_only_media(samples, tmp_path):
    """A trace with its log beside it is read where nothing can be created, and nothing is left behind."""
    (result,) = run_script("record_and_die.py", tmp_path, 1)
    source = Path(result["path"])
    place = tmp_path / "media"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "tmpfs", str(place)], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        for file in (source, Path(f"{source}-wal")):
            shutil.copy(file, place)
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        kept = steps_as_written(samples, place / source.name)
        assert kept >= result["acknowledged"] + 1
        assert kept == steps_as_written(samples, source)
        assert len(list(place.iterdir())) == 2
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_copy_of_a_killed_recording_has_its_steps(samples, tmp_path):
    """They lie in the log beside it; the copy is one private file, checked and as incomplete as the recording."""
    (result,) = run_script("record_and_die.py", tmp_path, 1)
    source, target = Path(result["path"]), tmp_path / "copies" / "one.trace"
    target.parent.mkdir()
    copy_trace(source, target)
    kept = steps_as_written(samples, target)
    assert kept == steps_as_written(samples, source) >= result["acknowledged"] + 1
    assert verify_trace(target) == []
    assert not open_trace(target).closing.complete
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert target.stat().st_mode & 0o777 == 0o600
    with pytest.raises(InputError, match="exists"):
        copy_trace(source, target)


def check_full(samples, path, result):
    (report,) = result
    assert len(report["errors"]) == 2
    for error in report["errors"]:
        assert error.startswith(f"{path}: the trace could not be written (")
        assert f"steps 0 to {report['acknowledged']} are stored" in error
        assert "\n" not in error
    assert report["acknowledged"] > 10
    assert steps_as_written(samples, path) == report["acknowledged"] + 1
    assert not open_trace(path).closing.complete


def test_full_disk_keeps_acknowledged_steps(samples, small_disk):
    """A full disk ends the recording with one clear error, and what was acknowledged is intact on the full disk."""
    path = small_disk / "full.trace"
    check_full(samples, path, run_script("record_until_full.py", path, 0))


def test_file_size_limit_keeps_acknowledged_steps(samples, tmp_path):
    """The same for a limit on the size of files."""
    path = tmp_path / "full.trace"
    check_full(samples, path, run_script("record_until_full.py", path, 1_000_000))


def test_trace_is_readable_while_it_is_written(samples, tmp_path):
    """A reader of a running recording sees what is acknowledged."""
    path = tmp_path / "live.trace"
    with TraceWriter(path, samples.MANIFEST) as writer:
        for step in range(5):
            writer.write_step(*samples.make_step(step))
        while writer.acknowledged < 4:
            os.sched_yield()
        assert steps_as_written(samples, path) == 5
        writer.write_step(*samples.make_step(5))
        writer.close(samples.CLOSING)
    assert steps_as_written(samples, path) == 6
