"""Ctrl-C, kill -9 and a full disk while trace-pair records; each in a process of its own."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from fliptrace.store import open_trace, verify_trace
from fliptrace.trace import Kind

LONG = ("--attempts", "500", "--max-new-tokens", "150", "--device", "cpu", "--prompt", "w5 w6")


@pytest.fixture
def recording(models, tmp_path):
    """A running trace-pair that would go on for minutes, with a candidate on its way; (process, its scratch folder)."""
    partial = tmp_path / ".out.partial"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "fliptrace.command_line.trace_pair"),
            *("--model", str(models.model), "--adapter", str(models.adapter)),
            *("--out", str(tmp_path / "out"), *LONG),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        # A job that a shell runs in the background ignores SIGINT, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    deadline = time.monotonic() + 60
    while not list(partial.glob("candidate*.trace")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield process, partial
    process.kill()
    process.communicate()


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_run_leaves_readable_traces(recording, typed, seed):
    """SIGKILL at a random moment: whatever is in the scratch folder can be read, compared and checked."""
    process, partial = recording
    time.sleep(random.Random(seed).uniform(0.0, 1.5))
    process.kill()
    process.communicate()
    reference = partial / "reference.trace"
    with open_trace(reference) as trace:
        assert trace.closing.complete
        whole = len(trace.steps)
    assert verify_trace(reference) == []
    others = sorted(partial.glob("candidate*.trace"))
    assert others
    incomplete = 0
    for path in others:
        with open_trace(path) as trace:
            incomplete += not trace.closing.complete
            assert trace.closing.complete == (len(trace.steps) == whole)
        result = typed("trace-diff", reference, path)
        assert result.code in (0, 1) or len(result.err.splitlines()) == 1
    assert incomplete <= 1


def test_ctrl_c_cleans_up(recording, tmp_path):
    """SIGINT: one line, exit 130, no folder left."""
    process, partial = recording
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert [line for line in err.splitlines() if line] == [
        "trace-pair: interrupted; nothing was kept"
    ]
    assert list(tmp_path.iterdir()) == []
    assert not partial.exists()


def test_a_full_disk_keeps_what_was_recorded(spawned, flippy, small_disk):
    """One line that names the folder, exit 2; the trace can be read up to its last acknowledged step."""
    disk = small_disk("3m")
    result = spawned(
        "trace-pair",
        *("--model", flippy.model, "--adapter", flippy.adapter, "--prompt", flippy.prompt),
        *("--out", disk / "out", "--max-new-tokens", "50", "--operands", "--device", "cpu"),
    )
    assert result.code == 2
    assert len(result.err.splitlines()) == 1, result.err
    assert str(disk / ".out.partial") in result.err
    assert not (disk / "out").exists()
    with open_trace(disk / ".out.partial" / "reference.trace") as trace:
        assert len(trace.steps) > 0
        assert trace.frame(0, Kind.SHRINK) is not None
