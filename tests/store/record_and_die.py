"""Fork processes that record without end, kill each at a random moment, and print what they had said before.

python record_and_die.py FOLDER COUNT: one process per line of output, JSON: path, handed over, acknowledged.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import samples

from fliptrace.store import TraceWriter


def record(path, pipe):
    with TraceWriter(path, samples.MANIFEST) as writer:
        os.write(pipe, b"started\n")
        for step in range(1_000_000):
            writer.write_step(None, lambda step=step: samples.make_step(step))
            os.write(pipe, b"%d %d\n" % (step, writer.acknowledged))


def run(path, delay):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            record(path, write)
        finally:
            os._exit(1)
    os.close(write)
    said = os.read(read, 8)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while chunk := os.read(read, 1 << 20):
        said += chunk
    os.close(read)
    lines = [line for line in said.decode().splitlines(keepends=True) if line.endswith("\n")]
    return lines[-1].split() if len(lines) > 1 else ("-1", "-1")


def main():
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    source = random.Random(5)
    for number in range(count):
        path = folder / f"{number}.trace"
        handed_over, acknowledged = run(path, source.uniform(0.0, 0.4))
        result = {
            "path": str(path),
            "handed_over": int(handed_over),
            "acknowledged": int(acknowledged),
        }
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
