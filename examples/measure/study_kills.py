"""Kill a real study at random moments until it is done, and compare its rows with those of an unbroken run.

    python examples/measure/study_kills.py --kills 10 --out kills.jsonl
    python examples/measure/study_kills.py --kills 10 --ray-workers 2 --out kills.jsonl

Runs `trace-study repeat` as a user types it, on the bundled model: unbroken; killed (SIGKILL to its process group)
at drawn moments and begun again until it is done, in as many folders as it takes for ``--kills`` kills; and, with
--ray-workers, unbroken over so many Ray workers. Rows must be the same lines; Ray may finish them in another order. One
JSON line says what was found; exit code 1 if rows differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STUDY = ("repeat", "--prompts", "6", "--repetitions", "4", "--max-new-tokens", "24", "--quiet")
STUDY += ("--reduction", "atomic:8", "--reduction", "deterministic:8")


def main() -> None:
    """Run the three and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ray-workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are added to it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(Path(scratch), options)
    with options.out.open("a") as file:
        file.write(json.dumps(found) + "\n")
    print(json.dumps(found))
    sys.exit(0 if found["equal"] else 1)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return what was found."""
    seconds = run(folder / "unbroken")
    expected = rows_of(folder / "unbroken")
    kills: list[dict[str, Any]] = []
    draw = random.Random(options.seed)
    studies = []
    while len(kills) < options.kills:
        studies.append(folder / f"killed-{len(studies)}")
        kills += run_killed(studies[-1], seconds, options.kills - len(kills), draw)
    equal = all(rows_of(study) == expected for study in studies)
    found: dict[str, Any] = {
        "command": ["trace-study", *STUDY],
        "rows": len(expected),
        "seconds": round(seconds, 1),
        "kills": kills,
        "studies_killed": len(studies),
        "killed_equal": equal,
        "equal": equal,
    }
    if options.ray_workers:
        run(folder / "ray", "--ray", "local", "--ray-workers", str(options.ray_workers))
        spread = rows_of(folder / "ray")
        found["ray_workers"] = options.ray_workers
        found["ray_equal"] = sorted(spread) == sorted(expected)
        found["equal"] &= found["ray_equal"]
    return found


def command(out: Path, *more: str) -> list[str]:
    """Return the study's command line."""
    return [
        sys.executable,
        "-m",
        "fliptrace.command_line.trace_study",
        *STUDY,
        *more,
        "--out",
        str(out),
    ]


def run(out: Path, *more: str) -> float:
    """Run the study to its end; returns the seconds it took."""
    begin = time.monotonic()
    subprocess.run(command(out, *more), check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - begin


def rows_of(out: Path) -> list[str]:
    """Return the study's rows as written."""
    return (out / "rows.jsonl").read_text("utf-8").splitlines()


def run_killed(
    out: Path, seconds: float, kills_left: int, draw: random.Random
) -> list[dict[str, Any]]:
    """Kill the study again and again, at most ``kills_left`` times, and let it end."""
    kills: list[dict[str, Any]] = []
    while len(kills) < kills_left:
        after = seconds * draw.uniform(0.2, 0.8)
        process = subprocess.Popen(
            command(out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            if process.wait(after):
                raise SystemExit(f"the study in {out} ended with exit code {process.returncode}")
            return kills
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            path = out / "rows.jsonl"
            kept = path.read_bytes().count(b"\n") if path.exists() else 0
            kills.append({"after_seconds": round(after, 2), "rows_then": kept})
    run(out)
    return kills


if __name__ == "__main__":
    main()
