"""Replay a model's real shrink inputs many times under each reduction and count what differs.

    python examples/measure/shrink_replay.py --folder results
    python examples/measure/shrink_replay.py --model MODEL --adapter ADAPTER --prompts gsm8k:PATH --select 0-9

Without a model the bundled one runs. Operands and weights of every shrink are taken from the prefill and the
first decode step of each prompt, run under ``unsplit``; projections that share their input are one call, as
in vLLM. Each call is then executed ``--executions`` times under each reduction, on a GPU as CUDA graphs of a
whole forward's calls, and every execution is compared with the first. On a CPU, orders of arrival of
``atomic`` come from seeds. Writes replay.json; exit code 1 if a repeatable reduction did not repeat.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import fliptrace as ft
from fliptrace.errors import FliptraceError
from fliptrace.pair.prompts import parse_selection, read_dataset
from fliptrace.studies.shrink_replay import (
    PHASES,
    Call,
    Comparison,
    Forward,
    collect,
    line_of,
    replay,
)
from fliptrace_kernels import FliptraceKernelsError, parse_reduction

__all__ = ["PHASES", "Call", "Comparison", "Forward", "collect", "line_of", "main", "replay"]

REDUCTIONS = ("atomic:8", "atomic:vllm", "unsplit", "deterministic:8", "local:32")


def prompts_of(options: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Encode the chosen prompts."""
    select = parse_selection(options.select)
    if options.prompts is None:
        known = ft.bundled_model().prompts
        texts = [known[row % len(known)].text for row in select]
    else:
        texts = [text for _, text in read_dataset(options.prompts, select)]
    return [list(ft.encode_prompt(tokenizer, text).ids) for text in texts]


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="the bundled one if left out")
    parser.add_argument("--adapter")
    parser.add_argument("--prompts", help="gsm8k:PATH or jsonl:PATH; the bundled ones if left out")
    parser.add_argument("--select", nargs="+", default=["0-9"])
    parser.add_argument("--reductions", nargs="+", default=list(REDUCTIONS))
    parser.add_argument("--executions", type=int, default=100, help="of each call; at least 2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, default=Path("shrink-bench"))
    options = parser.parse_args()
    if options.executions < 2:
        parser.error(f"--executions must be at least 2; got {options.executions}")
    started = time.monotonic()
    try:
        bundled = ft.bundled_model()
        model = options.model or bundled.model
        adapter = options.adapter or bundled.adapter
        engine = ft.load_engine(model, adapter, device=options.device)
        forwards = collect(engine, prompts_of(options, engine.tokenizer))
        print(f"captured after {time.monotonic() - started:.0f} s", flush=True)
        tallies = [
            tally
            for reduction in options.reductions
            for tally in replay(forwards, reduction, options.executions)
        ]
    except (FliptraceError, FliptraceKernelsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for tally in tallies:
        print(line_of(tally))
    unrepeatable = [
        tally
        for tally in tallies
        if tally.comparisons_differing and parse_reduction(tally.reduction).is_repeatable
    ]
    document = {
        "machine": torch.cuda.get_device_name() if engine.device.type == "cuda" else "CPU",
        "model": Path(model).name,
        "adapter": Path(adapter).name,
        "prompts": len(forwards) // len(PHASES),
        "executions": options.executions,
        "seconds": round(time.monotonic() - started, 1),
        "rows": [asdict(tally) for tally in tallies],
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "replay.json").write_text(json.dumps(document, indent=1) + "\n")
    print(
        f"{len(forwards)} forwards, {document['seconds']} s; repeatable reductions that did not "
        f"repeat: {len(unrepeatable)}"
    )
    return 1 if unrepeatable else 0


if __name__ == "__main__":
    sys.exit(main())
