"""Measure pairs over a data set: how many diverge, where each began, and what share of shrink outputs differ.

    python examples/measure/pairs.py MODEL ADAPTER gsm8k:PATH --select 0-19 --out pairs.jsonl

For every prompt and every reduction it records a reference and candidates and writes one JSON line: verdict,
flip, first surviving root and its fate, row-wise roots, and counts of FP32 shrink coordinates that differ,
and survive rounding, under bit-equal operands. Lines that are there already are not run again. The last lines
on stdout are the totals.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from engine_options import add_engine_options, load_engine

import fliptrace as ft
from fliptrace.pair.prompts import parse_selection, read_dataset
from fliptrace.verdicts import Outcome


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("adapter")
    parser.add_argument("dataset", help="gsm8k:PATH or jsonl:PATH")
    parser.add_argument("--select", nargs="+", default=["0-19"])
    parser.add_argument(
        "--reductions", nargs="+", default=["atomic:8", "unsplit", "deterministic:8"]
    )
    parser.add_argument(
        "--attempts",
        type=int,
        default=1,
        help="candidates per prompt under atomic reductions and vllm-own",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="candidates per prompt under the others, all compared",
    )
    parser.add_argument(
        "--stop-after", type=int, default=0, help="stop a reduction after so many flipped pairs"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128)
    add_engine_options(parser)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="save the pages of flipped pairs here")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    prompts = read_dataset(options.dataset, parse_selection(options.select))
    known = (
        [json.loads(line) for line in options.out.read_text().splitlines()]
        if options.out.exists()
        else []
    )
    seen = {(row["prompt"], row["asked"]) for row in known}
    engine = load_engine(options.model, options.adapter, options)
    for reduction in options.reductions:
        flipped = sum(row["asked"] == reduction and row["flipped"] for row in known)
        for source, text in prompts:
            if options.stop_after and flipped >= options.stop_after:
                break
            if (source, reduction) in seen:
                continue
            row = measure(engine, source, text, reduction, options)
            flipped += row["flipped"]
            known.append(row)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"{reduction} {source}: {row['outcome']} ({row['seconds']:.1f} s)",
                file=sys.stderr,
                flush=True,
            )
    for reduction in options.reductions:
        print(json.dumps(totals(reduction, [row for row in known if row["asked"] == reduction])))


def measure(
    engine: object, source: str, text: str, reduction: str, options: argparse.Namespace
) -> dict[str, object]:
    """Record one pair and describe it."""
    started = time.perf_counter()
    atomic = reduction.startswith("atomic") or reduction == "vllm-own"
    prompt = ft.encode_prompt(engine.tokenizer, text, source=source)
    with ft.trace_pair(
        engine,
        prompt=prompt,
        reduction=reduction,
        attempts=options.attempts if atomic else options.repeats,
        until="token" if atomic else "any",
        max_new_tokens=options.max_new_tokens,
        observer_control=False,
    ) as pair:
        diff = pair.diff
        if options.keep is not None and pair.diverged:
            folder = options.keep / source.replace(" ", "-")
            folder.mkdir(parents=True, exist_ok=True)
            pair.write_report(folder)
        first = diff.first_surviving
        statistics = diff.statistics
        return {
            "prompt": source,
            "reduction": str(pair.reference.manifest.get("reduction.identity")),
            "asked": reduction,
            "device": pair.reference.manifest.get("environment.gpu.name", "CPU"),
            "outcome": str(diff.outcome),
            "flipped": diff.outcome is Outcome.TOKEN,
            "candidates_run": pair.attempts,
            "flip_step": diff.flip.step if diff.flip else None,
            "flip_margins": [diff.flip.reference_margin, diff.flip.candidate_margin]
            if diff.flip
            else None,
            "decided_by_tie_break": list(diff.flip.decided_by_tie_break) if diff.flip else None,
            "first_surviving_root": first.name if first else None,
            "fate": str(first.fate) if first else None,
            "first_propagating_root": diff.first_propagating.name
            if diff.first_propagating
            else None,
            "root_rows": diff.root_rows,
            "surviving_root_rows": diff.surviving_root_rows,
            "foreign_root": diff.foreign_root.explanation if diff.foreign_root else None,
            "steps_compared": diff.coverage.steps_compared,
            "records_compared": diff.coverage.records_compared,
            "equal_operand_elements": statistics.equal_operand_elements,
            "equal_operand_differing": statistics.equal_operand_differing,
            "equal_operand_surviving": statistics.equal_operand_surviving,
            "seconds": time.perf_counter() - started,
        }


def totals(reduction: str, rows: list[dict[str, object]]) -> dict[str, object]:
    """Add up the rows of one reduction."""
    elements = sum(row["equal_operand_elements"] for row in rows)
    differing = sum(row["equal_operand_differing"] for row in rows)
    surviving = sum(row["equal_operand_surviving"] for row in rows)
    return {
        "reduction": reduction,
        "pairs": len(rows),
        "flipped": sum(bool(row["flipped"]) for row in rows),
        "candidates_run": sum(row["candidates_run"] for row in rows),
        "outcomes": dict(Counter(row["outcome"] for row in rows)),
        "fates_of_first_surviving_root": dict(Counter(row["fate"] for row in rows if row["fate"])),
        "flips_decided_by_tie_break": sum(bool(row["decided_by_tie_break"]) for row in rows),
        "records_compared": sum(row["records_compared"] for row in rows),
        "equal_operand_elements": elements,
        "differing_share": differing / elements if elements else None,
        "surviving_share_of_differing": surviving / differing if differing else None,
    }


if __name__ == "__main__":
    main()
