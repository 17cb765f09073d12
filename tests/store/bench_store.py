"""Measure the store on traces like SmolLM2's: writer time per step, reading and comparing against ``cmp``.

python tests/store/bench_store.py [--gigabytes 1] [--folder DIR]     (not collected as a test)
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from fliptrace import store
from fliptrace.manifest import Manifest
from fliptrace.trace import Closing, Frame, Kind, Layout, LayoutEntry, StepRecord

SITES = [f"model.layers.{layer}.{module}" for layer in range(30) for module in "qkvogud"]


def say(line):
    sys.stdout.write(line + "\n")


def make_layout(keys, dtype, shape):
    return Layout(tuple(LayoutEntry(key, dtype, shape) for key in keys))


CACHES = [f"cache.{layer}" for layer in range(30)]
LAYOUTS = {
    Kind.SHRINK: make_layout(SITES, "float32", (1, 16)),
    Kind.OPERAND: make_layout(SITES, "int64", (1, 2)),
    Kind.PROJECTION: make_layout(SITES, "int64", (1, 2)),
    Kind.CACHE: make_layout(CACHES, "bfloat16", (2, 1, 3, 64)),
    Kind.LOGITS_TOP: make_layout(["logits"], "bfloat16", (64,)),
    Kind.LOGITS_TOP_IDS: make_layout(["logits"], "int64", (64,)),
    Kind.LOGITS_DIGEST: make_layout(["logits"], "int64", (1, 2)),
}
DIGESTED = {Kind.SHRINK, Kind.CACHE, Kind.LOGITS_TOP}
KINDS = tuple(LAYOUTS)
STEP_BYTES = sum(layout.size_bytes for layout in LAYOUTS.values())
FILE_BYTES_PER_STEP = 49_490


def make_step(step, noise):
    """A step whose payloads are slices of random bytes at an offset of its own."""
    frames = []
    for kind, layout in LAYOUTS.items():
        start = step * 8 % 50_000
        payload = noise[start : start + layout.size_bytes]
        digests = torch.zeros((len(layout.entries), 2), dtype=torch.int64)
        frames.append(Frame(step, kind, layout, payload, digests if kind in DIGESTED else None))
    record = StepRecord(step, step, (step % 512,), 5, (3.5, 1.25), (5, 7), 1, "ab" * 16, "", KINDS)
    return record, frames


def write(path, steps):
    noise = memoryview(torch.randint(0, 256, (100_000,), dtype=torch.uint8).numpy().tobytes())
    calling = 0.0
    start = time.perf_counter()
    with store.TraceWriter(path, Manifest({"model": {"name": "synthetic"}})) as writer:
        for step in range(steps):
            record, frames = make_step(step, noise)
            before = time.perf_counter()
            writer.write_step(record, frames)
            calling += time.perf_counter() - before
        writer.close(Closing(True, "max new tokens", 0))
    total = time.perf_counter() - start
    size = path.stat().st_size
    say(
        f"  wrote {steps} steps, {size / 1e9:.2f} GB ({size / steps:.0f} B a step, payload {STEP_BYTES}): "
        f"{total / steps * 1e6:.0f} us a step"
    )


def idle_hand_over():
    """Microseconds that write_step takes when the writer keeps up."""
    noise = memoryview(bytes(100_000))
    with (
        tempfile.TemporaryDirectory() as folder,
        store.TraceWriter(Path(folder) / "t", Manifest({})) as writer,
    ):
        taken = []
        for step in range(200):
            job = make_step(step, noise)
            before = time.perf_counter()
            writer.write_step(*job)
            taken.append(time.perf_counter() - before)
            time.sleep(0.005)
        writer.close(Closing(True, "", 0))
    say(f"  write_step with an idle writer: median {sorted(taken)[100] * 1e6:.1f} us")


def read(path):
    with store.TraceReader(path) as reader:
        for step in range(len(reader.steps)):
            reader.step_frames(step)


def compare(reference, candidate):
    differing = 0
    with store.TraceReader(reference) as left, store.TraceReader(candidate) as right:
        for step in range(len(left.steps)):
            mine, other = left.step_frames(step), right.step_frames(step)
            for kind, frame in mine.items():
                differing += frame.payload != other[kind].payload
    return differing


def timed(label, action, repeats=3):
    best = min(_once(action) for _ in range(repeats))
    say(f"  {label}: {best:.3f} s")
    return best


def _once(action):
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    idle_hand_over()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        sizes = {}
        for scale in (1, 2):
            steps = int(options.gigabytes * scale * 1e9 / FILE_BYTES_PER_STEP)
            paths = [Path(folder) / f"{name}{scale}" for name in "ab"]
            for path in paths:
                torch.manual_seed(0)
                write(path, steps)
            sizes[scale] = paths
        plain = [Path(folder) / "plain.a", Path(folder) / "plain.b"]
        for path in plain:
            torch.manual_seed(0)
            with path.open("wb") as file:
                for _ in range(int(options.gigabytes * 1000)):
                    block = torch.randint(0, 256, (1_000_000,), dtype=torch.uint8)
                    file.write(block.numpy().tobytes())
        base = timed("cmp of 1 x", lambda: subprocess.run(["cmp", *plain], check=True))
        timed("read 1 x", lambda: read(sizes[1][0]))
        for label, action in (("step_frames", compare), ("paired_steps", compare_paired)):
            one, two = (
                timed(f"{label}: compare {scale} x", lambda s=scale, a=action: a(*sizes[s]))
                for scale in (1, 2)
            )
            say(f"  {label}: slope {two - one:.3f} s = {(two - one) / base:.2f} x cmp")


def compare_paired(reference, candidate):
    with store.TraceReader(reference) as left, store.TraceReader(candidate) as right:
        return sum(len(pair.reference) for pair in store.paired_steps(left, right))


if __name__ == "__main__":
    main()
