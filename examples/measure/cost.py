"""Measure what recording costs: decode time as a ratio, memory from 64 to 1,024 tokens, bytes per token.

    python examples/measure/cost.py time MODEL ADAPTER --tokens 128 --rounds 5
    python examples/measure/cost.py memory MODEL ADAPTER

``time`` runs the same prompt recorded and unrecorded in turn, in one process on one engine, and prints the
ratio of decode times (from the end of the prefill to the last token; for recorded runs also until the last
step is committed) per round and its median. ``memory`` runs each of four cases in a process of its own and
prints what recording adds to the growth of peak memory from 64 to 1,024 tokens. One JSON line each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import fliptrace as ft
from fliptrace.capture.decoding import generate
from fliptrace.capture.recorder import Recorder, RecorderOptions
from fliptrace.manifest import Manifest
from fliptrace.store import TraceWriter
from fliptrace.trace import Closing

QUESTION = (
    "Janet has 16 eggs. She eats three and sells the rest for $2 each. How much does she earn?"
)


def run(
    engine: object, prompt: object, tokens: int, recorded: bool, folder: str
) -> dict[str, float]:
    """Generate ``tokens`` tokens and return seconds of decoding, seconds to commit, and bytes written."""
    marks: list[float] = []

    def synchronise() -> float:
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    writer = recorder = None
    if recorded:
        path = Path(folder) / "cost.trace"
        path.unlink(missing_ok=True)
        writer = TraceWriter(path, Manifest(engine.describe()))
        recorder = Recorder(engine, writer, RecorderOptions())

    def on_choice(step: int, choice: object, logits: object) -> None:
        if recorder is not None:
            recorder.complete_step(step, choice, logits)
        if step == 0:
            marks.append(synchronise())

    arguments = {"max_new_tokens": tokens, "end_ids": set(), "on_choice": on_choice}
    if recorder is None:
        generate(engine, prompt.ids, **arguments)
        marks.append(synchronise())
        return {"decode": marks[1] - marks[0], "committed": marks[1] - marks[0], "bytes": 0}
    with engine.observed(recorder):
        generate(engine, prompt.ids, **arguments)
        marks.append(synchronise())
    writer.close(Closing(complete=True, stop_reason="max new tokens", steps=tokens))
    marks.append(time.perf_counter())
    return {
        "decode": marks[1] - marks[0],
        "committed": marks[2] - marks[0],
        "bytes": path.stat().st_size,
    }


def measure_time(options: argparse.Namespace) -> None:
    """Print the ratio of decode times."""
    engine, prompt = prepare(options)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for recorded in (False, True):
            run(engine, prompt, 16, recorded, folder)
        for number in range(options.rounds):
            order = (False, True) if number % 2 == 0 else (True, False)
            results = {
                recorded: run(engine, prompt, options.tokens, recorded, folder)
                for recorded in order
            }
            rounds.append((results[False], results[True]))
        short = run(engine, prompt, 64, True, folder)["bytes"]
        long = run(engine, prompt, 64 + options.tokens, True, folder)["bytes"]
    ratios = [recorded["decode"] / plain["decode"] for plain, recorded in rounds]
    committed = [recorded["committed"] / plain["decode"] for plain, recorded in rounds]
    document = {
        "device": device_name(engine),
        "reduction": engine.describe()["reduction"]["identity"],
        "tokens": options.tokens,
        "rounds": options.rounds,
        "unrecorded_ms_per_token": 1e3
        * statistics.median(plain["decode"] for plain, _ in rounds)
        / (options.tokens - 1),
        "ratio_median": statistics.median(ratios),
        "ratio_min_max": [min(ratios), max(ratios)],
        "ratio_until_committed_median": statistics.median(committed),
        "bytes_per_token": (long - short) / options.tokens,
    }
    print(json.dumps(document))


def measure_memory(options: argparse.Namespace) -> None:
    """Print what recording adds to the growth of peak memory."""
    peaks = {}
    for recorded in (0, 1):
        for tokens in (64, 1024):
            command = [
                sys.executable,
                __file__,
                "peak",
                options.model,
                options.adapter,
                "--device",
                options.device,
            ]
            command += [
                "--reduction",
                options.reduction,
                "--tokens",
                str(tokens),
                "--recorded",
                str(recorded),
            ]
            finished = subprocess.run(command, check=True, capture_output=True, text=True)
            peaks[recorded, tokens] = json.loads(finished.stdout.splitlines()[-1])
    growth = {
        where: [peaks[recorded, 1024][where] - peaks[recorded, 64][where] for recorded in (0, 1)]
        for where in ("host_bytes", "device_bytes")
    }
    print(
        json.dumps(
            {
                "growth_unrecorded_and_recorded": growth,
                "added_by_recording": {where: pair[1] - pair[0] for where, pair in growth.items()},
                "peaks": {
                    f"{'recorded' if key[0] else 'unrecorded'} {key[1]}": value
                    for key, value in peaks.items()
                },
            }
        )
    )


def measure_peak(options: argparse.Namespace) -> None:
    """Print this process's peak memory after one run."""
    engine, prompt = prepare(options)
    with tempfile.TemporaryDirectory() as folder:
        run(engine, prompt, 8, bool(options.recorded), folder)
        # From here on: loading a model takes more memory for a moment than anything that follows.
        Path("/proc/self/clear_refs").write_text("5")
        run(engine, prompt, options.tokens, bool(options.recorded), folder)
    device = torch.cuda.max_memory_allocated() if engine.device.type == "cuda" else 0
    status = Path("/proc/self/status").read_text()
    host = (
        int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
        * 1024
    )
    print(json.dumps({"host_bytes": host, "device_bytes": device}))


def prepare(options: argparse.Namespace) -> tuple[object, object]:
    """Load the engine and encode the prompt."""
    torch.set_num_threads(options.threads)
    engine = ft.load_engine(options.model, options.adapter, device=options.device)
    simulated = engine.simulates_atomics and options.reduction.startswith("atomic")
    engine.set_reduction(options.reduction, 1 if simulated else None)
    return engine, ft.encode_prompt(engine.tokenizer, QUESTION)


def device_name(engine: object) -> str:
    """Name the hardware."""
    if engine.device.type == "cuda":
        return torch.cuda.get_device_name()
    return f"{engine.describe()['environment']['processor']}, {torch.get_num_threads()} thread"


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["time", "memory", "peak"])
    parser.add_argument("model")
    parser.add_argument("adapter")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--reduction", default="atomic:8")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--recorded", type=int, default=0)
    options = parser.parse_args()
    {"time": measure_time, "memory": measure_memory, "peak": measure_peak}[options.what](options)


if __name__ == "__main__":
    main()
