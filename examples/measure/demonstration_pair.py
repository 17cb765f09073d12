"""Look for a pair whose single coordinate is enough to flip its token, and with it the final answer.

    python examples/measure/demonstration_pair.py MODEL ADAPTER --prompt TEXT [--references 60] [--out FILE]

References run under schedule seeds 0, 1, 2 ...; the candidate of each is the first of the next seeds that chooses
another token, as `trace-pair --seed S` searches it. Every surviving coordinate of every root is then substituted alone
in both executions; where one gives the other's token, both arms go on to the end of the answer. One row of JSON per
pair. CPU only: on a GPU the hardware orders, and there is no seed to go through.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fliptrace.pair import Pair, encode_prompt, load_engine, trace_pair
from fliptrace_interventions import ShrinkEdit, Workbench

#: A free continuation ends here at the latest.
LONGEST_ANSWER = 256


def main() -> None:
    """Read the command line and search."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("adapter")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--references", type=int, default=60, help="how many reference seeds")
    parser.add_argument("--attempts", type=int, default=11, help="candidates per reference")
    parser.add_argument("--tokens", type=int, default=19, help="tokens per execution")
    parser.add_argument("--out", type=Path, help="append rows here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine = load_engine(options.model, options.adapter, device="cpu")
    prompt = encode_prompt(engine.tokenizer, options.prompt, source="command line")
    for seed in range(options.references):
        with trace_pair(
            engine,
            prompt=prompt,
            seed=seed,
            attempts=options.attempts,
            max_new_tokens=options.tokens,
            observer_control=False,
        ) as pair:
            row = {"seed": seed, "attempts": pair.attempts, **describe(pair, engine)}
        line = json.dumps(row, ensure_ascii=False)
        print(line, flush=True)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def describe(pair: Pair, engine: Any) -> dict[str, Any]:
    """Say what flipped and which coordinates are enough alone."""
    flip = pair.diff.flip
    if flip is None:
        return {"flip": None}
    workbench = Workbench(pair, engine, max_new_tokens=LONGEST_ANSWER)
    equal = all(found.equal for found in workbench.reconstruct())
    tried = list(screenings(workbench, pair)) if equal else []
    return {
        "flip": flip.step,
        "tokens": [flip.reference_token.text, flip.candidate_token.text],
        "reconstructed": equal,
        "roots": len(pair.diff.roots),
        "screenings": len(tried),
        "sufficient": [row for row in tried if row is not None],
    }


def screenings(workbench: Workbench, pair: Pair) -> Iterator[dict[str, Any] | None]:
    """Screen every surviving coordinate in both directions; yield a row where it is enough, else None."""
    for root in pair.diff.roots:
        for coordinate in root.coordinates:
            edit = ShrinkEdit.of_coordinate(coordinate)
            for recipient in ("reference", "candidate"):
                if not workbench.screen([edit], recipient).gives_donor_token:
                    yield None
                    continue
                answers = [
                    workbench.continue_freely([edit], recipient, unedited=unedited).answer
                    for unedited in (True, False)
                ]
                yield {
                    "coordinate": coordinate.coordinate.name,
                    "recipient": recipient,
                    "answers": answers,
                }


if __name__ == "__main__":
    sys.exit(main())
