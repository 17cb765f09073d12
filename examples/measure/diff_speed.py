"""Measure trace-diff on large traces, against what cmp takes for the same bytes.

    python examples/measure/diff_speed.py PAIR_DIR --gigabytes 1 2 --folder /tmp/traces

Long traces are made from the steps of a recorded pair, repeated under new step numbers until the files have the size:
real layouts, real payloads, real digests. Two cases: ``equal`` (both files from the reference's steps) and
``differing`` (the candidate's own steps, up to where its tokens still agree: every step differs). Both files of a case
are read once first, so that they are in the page cache. One JSON line per case: seconds of the whole process for each
size, their difference, cmp on 1 GB, and the ratio that counts: (2 GB - 1 GB) / cmp.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from fliptrace import load_pair, open_trace
from fliptrace.manifest import Manifest
from fliptrace.store import TraceWriter
from fliptrace.trace import Closing, Trace


def stretch(source: Trace, manifest: Manifest, last_step: int, size: float, path: Path) -> None:
    """Write decode steps 1 .. last_step of a trace again and again until the file has ``size`` bytes."""
    frames = {
        step: [source.frame(step, kind) for kind in source.steps[step].frames]
        for step in range(last_step + 1)
    }
    with TraceWriter(path, manifest) as writer:
        step, written = 0, 0
        while written < size:
            number = step if step == 0 else 1 + (step - 1) % last_step
            record = dataclasses.replace(
                source.steps[number], step=step, chosen=0, token_ids=(0,), first_position=step
            )
            copies = [dataclasses.replace(frame, step=step) for frame in frames[number]]
            writer.write_step(record, copies)
            written += sum(len(frame.payload) + 16 * len(frame.layout.entries) for frame in copies)
            step += 1
        writer.close(Closing(complete=True, stop_reason="max new tokens", steps=step))


def seconds(command: list[str], rounds: int) -> float:
    """Return the median wall time of a command as a whole process."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        times.append(time.perf_counter() - started)
        if finished.returncode not in (0, 1):
            raise SystemExit(finished.stderr)
    return statistics.median(times)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pair", type=Path)
    parser.add_argument("--gigabytes", type=float, nargs=2, default=[1, 2])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=["equal", "differing"])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    pair = load_pair(options.pair)
    agreed = pair.diff.coverage.steps_compared - 2  # the last compared step may be the flip
    manifest = pair.reference.manifest
    diff = [sys.executable, "-m", "fliptrace.command_line.trace_diff", "--quiet"]
    names = [str(options.pair / name) for name in ("reference.trace", "candidate.trace")]
    document: dict[str, object] = {
        "startup_and_small_pair_seconds": seconds([*diff, *names], options.rounds)
    }
    print(json.dumps(document), flush=True)
    for case in options.cases:
        second = {"equal": pair.reference, "differing": pair.candidate}[case]
        times, compared = {}, 0.0
        for size in options.gigabytes:
            paths = [options.folder / f"{case}-{name}.trace" for name in ("reference", "candidate")]
            for path, source in zip(paths, (pair.reference, second), strict=True):
                path.unlink(missing_ok=True)
                stretch(source, manifest, agreed, size * 1e9, path)
                path.read_bytes()
            files = [str(path) for path in paths]
            times[size] = seconds([*diff, *files], options.rounds)
            if size == options.gigabytes[0]:
                twin = options.folder / "twin"
                subprocess.run(["cp", files[0], str(twin)], check=True)
                compared = seconds(["cmp", files[0], str(twin)], options.rounds)
                twin.unlink()
                with open_trace(files[0]) as trace:
                    steps = len(trace.steps)
            for path in paths:
                path.unlink()
        small, large = (times[size] for size in options.gigabytes)
        print(
            json.dumps(
                {
                    "case": case,
                    "seconds": times,
                    "steps_in_the_smaller": steps,
                    "difference_seconds": large - small,
                    "cmp_seconds_for_the_smaller": compared,
                    "ratio": (large - small) / compared,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
