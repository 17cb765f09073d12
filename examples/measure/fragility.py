"""Estimate flip probabilities from few forced replays and hold them against free repetitions, over many processes.

    python examples/measure/fragility.py collect --shard 1/12 --out parts/1 [options]   one process's prompts, rows only
    python examples/measure/fragility.py all --processes 12 --out parts [options]       12 such processes side by side
    python examples/measure/fragility.py report parts/1 parts/2 … --out study [options] one folder, table and figures
    python examples/measure/fragility.py export study --out FILE.jsonl                  its rows, without texts

``collect`` and ``all`` need torch, transformers and peft (or vLLM) alone; ``report`` also scipy, pyarrow and plotly. It
takes the same options, by which it checks that every part was begun with them. A run that was killed, or stopped by
--budget-minutes, goes on with the same command. Without --model the bundled model runs.

What was run (PYTHONPATH holds tracer, interventions and kernels), the last two on a host with two NVIDIA H200:

    … all --processes 14 --device cpu --prompts 200 --observed 12 --out cpu
    … all --processes 22 --gpus 0 1 --device cuda --model SMOLLM2 --adapter ADAPTER --task gsm8k:test.jsonl \
        --prompts 140 --observed 8 --max-new-tokens 64 --budget-minutes 8.5 --out transformers
    … all --processes 18 --gpus 0 1 --engine vllm --attention TRITON_ATTN --reduction vllm-own --model SMOLLM2 \
        --adapter ADAPTER --vllm-arguments '{"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1073741824}' \
        --task gsm8k:test.jsonl --prompts 140 --observed 8 --max-new-tokens 64 --budget-minutes 7 --out vllm
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from fliptrace.studies import ModelSettings, Selection
from fliptrace_interventions.fragility import FragilityOptions, FragilityStudy, collect, gathered


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("collect")
    one.add_argument("--shard", default="1/1", metavar="K/N")
    several = commands.add_parser("all")
    several.add_argument("--processes", type=int, default=12)
    several.add_argument(
        "--gpus", nargs="+", default=[], metavar="N", help="dealt to the processes in turn"
    )
    gather = commands.add_parser("report")
    gather.add_argument("parts", nargs="+", type=Path)
    for command in (one, several, gather):
        command.add_argument("--out", type=Path, required=True)
        add_study_options(command)
    export = commands.add_parser("export")
    export.add_argument("study", type=Path)
    export.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    {"collect": run_part, "all": run_all, "report": report, "export": export_rows}[options.command](
        options
    )


def add_study_options(parser: argparse.ArgumentParser) -> None:
    """Add what decides the rows."""
    parser.add_argument("--model")
    parser.add_argument("--adapter")
    parser.add_argument("--engine", default="auto", choices=("auto", "transformers", "vllm"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--vllm-arguments", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--task", default="bundled")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--select", nargs="+", default=[])
    parser.add_argument("--reduction", action="append")
    parser.add_argument("--replays", type=int, default=6)
    parser.add_argument("--executions", type=int, default=32)
    parser.add_argument("--reach", type=float, default=4.0)
    parser.add_argument("--observed", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--budget-minutes", type=float, default=None)


def study_of(options: argparse.Namespace, shard: str = "1/1") -> FragilityStudy:
    """Put the options together."""
    part, _, parts = shard.partition("/")
    selection = (
        Selection(tuple(options.select)) if options.select else Selection((), options.prompts)
    )
    return FragilityStudy(
        model=ModelSettings(
            model=options.model,
            adapter=options.adapter,
            engine=options.engine,
            device=options.device,
            attention=options.attention,
            vllm_arguments=options.vllm_arguments,
        ),
        task=options.task,
        selection=selection,
        reductions=tuple(options.reduction or ["atomic:8"]),
        options=FragilityOptions(options.replays, options.executions, options.reach),
        observed=options.observed,
        max_new_tokens=options.max_new_tokens,
        shard=(int(part), int(parts)),
    )


def run_part(options: argparse.Namespace) -> None:
    """Collect one shard's rows."""
    begin = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        print(f"{time.monotonic() - begin:7.1f} s  {done:5} of {total}  {what}", flush=True)

    study = study_of(options, options.shard)
    done, total = collect(
        study, options.out, budget_minutes=options.budget_minutes, command=sys.argv, progress=show
    )
    print(f"{options.out}: {done} of {total} rows", flush=True)


def run_all(options: argparse.Namespace) -> None:
    """Start one process per shard, wait for all, and say what each has."""
    options.out.mkdir(parents=True, exist_ok=True)
    words = sys.argv[sys.argv.index("all") + 1 :]
    for name in ("--processes", "--out", "--gpus"):
        words = without(words, name)
    running = []
    for number in range(1, options.processes + 1):
        place = options.out / str(number)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "VLLM_CACHE_ROOT": str(options.out / f"{number}.cache"),
        }
        if options.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = options.gpus[number % len(options.gpus)]
        log = (options.out / f"{number}.log").open("w", encoding="utf-8")
        command = [sys.executable, __file__, "collect", *words]
        command += ["--shard", f"{number}/{options.processes}", "--out", str(place)]
        running.append(
            (place, log, subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        )
    failed = 0
    for place, log, process in running:
        code = process.wait()
        log.close()
        last = (Path(log.name).read_text("utf-8").splitlines() or ["(no output)"])[-1]
        print(f"{place}: exit {code}: {last}", flush=True)
        failed += code != 0
    sys.exit(1 if failed else 0)


def without(words: list[str], option: str) -> list[str]:
    """Leave out an option and its values, up to the next option, typed as one word or as several."""
    kept: list[str] = []
    skip = False
    for word in words:
        if word.startswith("--"):
            skip = word.split("=")[0] == option
        if not skip:
            kept.append(word)
    return kept


def report(options: argparse.Namespace) -> None:
    """Gather parts into one study, print its table and what it cost."""
    from fliptrace.studies import run_study
    from fliptrace_interventions.fragility.report import cost_lines

    result = run_study(
        study_of(options), options.out, executor=gathered(options.parts), command=sys.argv
    )
    print((options.out / "table.md").read_text("utf-8"))
    print("\n".join(cost_lines(options.out)))
    print(f"\n{result.done} of {result.total} rows are in {options.out}")


def export_rows(options: argparse.Namespace) -> None:
    """Write a study's rows with their seconds, one JSON value per line."""
    from fliptrace_interventions.fragility.gathering import seconds_of

    seconds = seconds_of(options.study)
    with options.out.open("w", encoding="utf-8") as file:
        for line in (options.study / "rows.jsonl").read_text("utf-8").splitlines():
            row = json.loads(line)
            file.write(json.dumps({**row, "seconds": seconds.get(row["item"])}) + "\n")
    print(options.out)


if __name__ == "__main__":
    main()
