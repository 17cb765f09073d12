"""Measure what the vLLM plugin does to whole generations: latency, repeatability, and that it runs at all.

    python examples/measure/vllm_shrink.py latency --out OUT
    python examples/measure/vllm_shrink.py repeat --out OUT --model SMOLLM2 --adapter ADAPTER --prompts FILE.jsonl
    python examples/measure/vllm_shrink.py check --out OUT --model SMOLLM2 --adapter ADAPTER

Needs vLLM and a CUDA GPU, no network. Each reduction has an engine of its own in a process of its own. They
start together and share the GPU's memory; in ``latency`` and ``check`` only one of them works at a time.

``latency``: Llama-3.2-3B's shape with dummy weights, random adapters, 100-token random prompts, 150 tokens,
CUDA graphs as vLLM has them; batches of 1, 16 and 64. Every round times every engine once at every batch, in
a new order; each timing is a line of OUT/latency.jsonl. Medians, quartiles and goals go to OUT/latency.md.

``repeat``: a real model and adapter, batch 1, greedy, each prompt five times; how many outputs differ from the
first time. All engines work at once. Decoding is captured in one CUDA graph of batch 1 and nothing is compiled, as
five engines at once took 110 to 120 s to start with vLLM's defaults. OUT/repeat.jsonl and OUT/repeat.md.

``check``: the plugin under eager mode, CUDA graphs, torch.compile, VLLM_BATCH_INVARIANT=1, several adapters, a
server, two GPUs where there are two; and what it refuses. OUT/check.jsonl.

Logs are in OUT/logs; caches, model and random adapters in the scratch folder. Exit code 0 if everything that
was asked for ran (and, for check, passed).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import vllm_checks
from vllm_processes import (
    GRAPHS_ONLY,
    LABELS_WITHOUT_PLUGIN,
    SHAPES,
    Engine,
    close_all,
    engine_options,
    environment,
    wait_for_all,
    write_adapter,
    write_model,
)

REDUCTIONS = ["none", "vllm", "atomic:8", "unsplit", "deterministic:8", "local"]
BATCHES = [1, 16, 64]
PROMPT_TOKENS = 100
GIB = 1 << 30


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_subparsers(dest="mode", required=True)
    for name in ("latency", "repeat", "check"):
        mode = modes.add_parser(name)
        mode.add_argument("--out", type=Path, required=True)
        mode.add_argument(
            "--scratch", type=Path, default=Path(tempfile.gettempdir()) / "fliptrace-vllm"
        )
        mode.add_argument("--seconds", type=float, default=540.0, help="stop after so long")
        mode.add_argument("--attention-backend", default="TRITON_ATTN", help="'' is vLLM's choice")
        if name == "latency":
            mode.add_argument("--shape", choices=SHAPES, default="llama-3.2-3b")
            mode.add_argument("--ranks", type=int, nargs="+", default=[16, 32])
            mode.add_argument("--rounds", type=int, default=7)
            mode.add_argument("--batches", type=int, nargs="+", default=BATCHES)
            mode.add_argument("--tokens", type=int, default=150)
        else:
            mode.add_argument("--model", required=True)
            mode.add_argument("--adapter", required=True)
        if name == "repeat":
            mode.add_argument("--prompts", type=Path, required=True, help="JSON lines: question")
            mode.add_argument("--count", type=int, default=20)
            mode.add_argument("--repeats", type=int, default=5)
            mode.add_argument("--tokens", type=int, default=128)
        if name == "check":
            mode.add_argument("--skip-server", action="store_true")
            mode.add_argument("--only", nargs="+", help="names of engines, as in the log files")
        else:
            mode.add_argument("--reductions", nargs="+", default=REDUCTIONS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.scratch = options.scratch.resolve()
    for folder in (options.out, options.scratch):
        folder.mkdir(parents=True, exist_ok=True)
    options.deadline = time.monotonic() + options.seconds
    run = {"latency": latency, "repeat": repeat, "check": vllm_checks.check}[options.mode]
    sys.exit(0 if run(options) else 1)


def digest(tokens: list[list[int]]) -> str:
    """Name an output."""
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def versions(facts: dict[str, Any]) -> str:
    """Say what an engine ran on."""
    return f"{facts.get('gpu', 'no GPU')}, vLLM {facts['vllm']}, torch {facts['torch']}"


def show_what_runs(engine: Engine) -> None:
    """Print what an engine's workers say of their shrink."""
    for line in engine.ask("status")["status"]:
        print(f"{engine.name}: {json.dumps(line)}", flush=True)


def latency(options: argparse.Namespace) -> bool:
    """Time generations of every engine in turn."""
    shape = SHAPES[options.shape]
    model = write_model(options.scratch / options.shape, shape)
    wanted = [
        (label, rank)
        for label in options.reductions
        for rank in ([0] if label == "none" else options.ranks)
    ]
    engines = {}
    for label, rank in wanted:
        name = label if rank == 0 else f"{label}-r{rank}"
        lora = {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1} if rank else {}
        adapters = []
        if rank:
            folder = options.scratch / f"{options.shape}-adapter-r{rank}"
            adapters = [str(write_adapter(folder, shape, rank, seed=rank))]
        llm = engine_options(options.attention_backend) | {
            "model": str(model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 512,
            "max_num_seqs": max(options.batches),
            "max_num_batched_tokens": 8192,
            "kv_cache_memory_bytes": 2 * GIB,
            **lora,
        }
        settings = {"options": llm, "adapters": adapters}
        variables = environment(options.scratch, name, label)
        engines[label, rank] = Engine(options.out, name, settings, variables)
    try:
        ready = set(wait_for_all(list(engines.values()), options.deadline))
        running = {key: engine for key, engine in engines.items() if engine in ready}
        if not running:
            return False
        for (label, _), engine in running.items():
            if label not in LABELS_WITHOUT_PLUGIN:
                show_what_runs(engine)
        complete = time_rounds(options, running, shape["vocab_size"])
        summarise_latency(options, [engine.facts for engine in running.values()])
        return complete and len(running) == len(engines)
    finally:
        close_all(engines.values())


def time_rounds(
    options: argparse.Namespace, engines: dict[tuple[str, int], Engine], vocabulary: int
) -> bool:
    """Warm every engine up, then time all of them, round by round, until time runs out."""
    draw = random.Random(0)
    prompts = {
        batch: [[draw.randrange(3, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
        for batch in options.batches
    }

    def timed(engine: Engine, rank: int, batch: int, tokens: int) -> dict[str, Any]:
        return engine.ask(
            "generate",
            prompts=prompts[batch],
            adapters=[0 if rank else None] * batch,
            tokens=tokens,
            ignore_eos=True,
        )

    for (_, rank), engine in engines.items():
        for batch in options.batches:
            timed(engine, rank, batch, 8)
    print(f"warm; {options.deadline - time.monotonic():.0f} s are left", flush=True)
    with (options.out / "latency.jsonl").open("a") as file:
        longest = 0.0
        for turn in range(options.rounds):
            begin = time.monotonic()
            if begin + longest > options.deadline:
                print(f"stopped before round {turn}: time is up", flush=True)
                return False
            for batch in options.batches:
                order = list(engines)
                draw.shuffle(order)
                for label, rank in order:
                    answer = timed(engines[label, rank], rank, batch, options.tokens)
                    row = {
                        "reduction": label,
                        "rank": rank,
                        "batch": batch,
                        "round": turn,
                        "seconds": answer["seconds"],
                        "tokens": sum(map(len, answer["tokens"])),
                        "output": digest(answer["tokens"]),
                    }
                    file.write(json.dumps(row) + "\n")
                    file.flush()
            longest = max(longest, time.monotonic() - begin)
    return True


def summarise_latency(options: argparse.Namespace, facts: list[dict[str, Any]]) -> None:
    """Write medians, quartiles and goals over everything that latency.jsonl holds."""
    rows = [json.loads(line) for line in (options.out / "latency.jsonl").read_text().splitlines()]
    lines = [
        f"{options.shape}, {PROMPT_TOKENS} prompt tokens, {options.tokens} generated; "
        + "; ".join(sorted({versions(engine_facts) for engine_facts in facts})),
        "",
        "Milliseconds of one `generate`: median (first to third quartile), n, ratio to vLLM's own.",
        "Outputs: distinct outputs over the repeats.",
    ]
    times: dict[tuple[str, int, int], list[float]] = {}
    outputs: dict[tuple[str, int, int], set[str]] = {}
    labels = list(dict.fromkeys(row["reduction"] for row in rows))
    ranks = sorted({row["rank"] for row in rows} - {0})
    batches = sorted({row["batch"] for row in rows})
    for row in rows:
        # What has no LoRA has no rank; it stands beside every rank.
        for rank in [row["rank"]] if row["rank"] else ranks:
            key = row["reduction"], rank, row["batch"]
            times.setdefault(key, []).append(1000 * row["seconds"])
            outputs.setdefault(key, set()).add(row["output"])
    medians = {key: statistics.median(found) for key, found in times.items()}
    for rank in ranks:
        lines += ["", f"| rank {rank} | {' | '.join(f'batch {b} | outputs' for b in batches)} |"]
        lines.append("|---|" + "---|---|" * len(batches))
        for label in labels:
            cells = []
            for batch in batches:
                key = label, rank, batch
                if key not in times:
                    cells += ["", ""]
                    continue
                found = times[key]
                low, _, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
                own = medians.get(("vllm", rank, batch))
                ratio = f", {medians[key] / own:.3f}" if own else ""
                cells.append(f"{medians[key]:.1f} ({low:.1f}–{high:.1f}), {len(found)}{ratio}")
                cells.append(str(len(outputs[key])))
            lines.append(f"| {label} | {' | '.join(cells)} |")
    lines += ["", *goals(medians, options.tokens)]
    text = "\n".join(lines) + "\n"
    (options.out / "latency.md").write_text(text)
    print(text, flush=True)


def goals(medians: dict[tuple[str, int, int], float], tokens: int) -> list[str]:
    """Say how each reduction stands against vLLM's own, unsplit and no LoRA at all."""
    lines = []
    for (label, rank, batch), median in medians.items():
        if label in ("none", "vllm", "atomic:8", "unsplit"):
            continue
        own, unsplit = (medians.get((other, rank, batch)) for other in ("vllm", "unsplit"))
        base = medians.get(("none", rank, batch))
        said = []
        if own:
            said.append(f"{100 * (median / own - 1):+.1f} % against vLLM's own")
        if unsplit:
            said.append(f"{100 * (median / unsplit - 1):+.1f} % against unsplit")
        if base and own:
            said.append(
                f"LoRA costs {(median - base) / tokens:.3f} ms a token, "
                f"vLLM's own {(own - base) / tokens:.3f}"
            )
        lines.append(f"- {label}, rank {rank}, batch {batch}: {'; '.join(said)}")
    return lines


def repeat(options: argparse.Namespace) -> bool:
    """Count outputs that differ from the first time, one prompt at a time."""
    questions = [json.loads(line) for line in options.prompts.read_text().splitlines()][
        : options.count
    ]
    texts = [row.get("question") or row["prompt"] for row in questions]
    llm = engine_options(options.attention_backend) | {
        "model": options.model,
        "enable_lora": True,
        "max_lora_rank": 16,
        "max_loras": 1,
        "max_model_len": 1024,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1024,
        "kv_cache_memory_bytes": GIB,
        "compilation_config": GRAPHS_ONLY | {"cudagraph_capture_sizes": [1]},
    }
    settings = {"options": llm, "adapters": [options.adapter]}
    engines = [
        Engine(options.out, label, settings, environment(options.scratch, label, label))
        for label in options.reductions
        if label != "none"
    ]
    try:
        ready = wait_for_all(engines, options.deadline)
        told = "; ".join(sorted({versions(engine.facts) for engine in ready}))
        lines = [
            f"{told}; batch 1, at most {options.tokens} new tokens, greedy",
            "Decoding in one CUDA graph (FULL_DECODE_ONLY, capture size 1); no torch.compile (mode 0).",
            "",
            "| reduction | outputs changed | prompts changed | first change at token |",
            "|---|---|---|---|",
        ]
        complete = len(ready) == len(engines)
        with (options.out / "repeat.jsonl").open("a") as file, ThreadPoolExecutor() as pool:

            def attempt(engine: Engine) -> tuple[bool, list[str]]:
                try:
                    return repeat_one(options, engine, texts, file)
                except RuntimeError as error:  # the others go on
                    return False, [f"| {engine.name} | FAILED: {error} | | |"]

            # Nothing is timed, so all work at once, each in a process of its own.
            for finished, rows in pool.map(attempt, ready):
                complete &= finished
                lines += rows
        text = "\n".join(lines) + "\n"
        (options.out / "repeat.md").write_text(text)
        print(text, flush=True)
        return complete
    finally:
        close_all(engines)


def repeat_one(
    options: argparse.Namespace, engine: Engine, texts: list[str], file: TextIO
) -> tuple[bool, list[str]]:
    """Run every prompt of one engine `repeats` times; all prompts once, then again.

    Returns:
        Whether all ran, and lines of repeat.md.
    """
    if engine.name not in LABELS_WITHOUT_PLUGIN:
        show_what_runs(engine)
    prompts = engine.ask("chat", texts=texts)["prompts"]
    first: dict[int, list[int]] = {}
    changed: list[tuple[int, int]] = []
    compared = 0
    for turn in range(options.repeats):
        for number, prompt in enumerate(prompts):
            if time.monotonic() > options.deadline:
                return False, [
                    counted(engine.name, changed, compared, len(prompts)),
                    f"| | stopped in repeat {turn}: time is up | | |",
                ]
            answer = engine.ask("generate", prompts=[prompt], adapters=[0], tokens=options.tokens)
            (tokens,) = answer["tokens"]
            reference = first.setdefault(number, tokens)
            at = None
            if turn:
                compared += 1
                at = first_difference(reference, tokens)
                if at is not None:
                    changed.append((number, at))
            row = {
                "reduction": engine.name,
                "prompt": number,
                "repeat": turn,
                "tokens": len(tokens),
                "output": digest([tokens]),
                "first_change": at,
            }
            # One call per line: the other engines write here, too.
            file.write(json.dumps(row) + "\n")
            file.flush()
    return True, [counted(engine.name, changed, compared, len(prompts))]


def counted(name: str, changed: list[tuple[int, int]], compared: int, prompts: int) -> str:
    """Write one row of repeat.md; `changed` holds a prompt's number and the first changed token."""
    where = sorted(at for _, at in changed)
    return (
        f"| {name} | {len(changed)} of {compared} | "
        f"{len({number for number, _ in changed})} of {prompts} | "
        f"{f'{where[0]} to {where[-1]}' if where else 'none'} |"
    )


def first_difference(reference: list[int], candidate: list[int]) -> int | None:
    """Return the first index at which two outputs differ, a missing token included."""
    for index in range(max(len(reference), len(candidate))):
        if reference[index : index + 1] != candidate[index : index + 1]:
            return index
    return None


if __name__ == "__main__":
    main()
