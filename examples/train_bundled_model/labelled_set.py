"""Write a labelled set: word problems with a claimed answer, which is right or wrong.

    python examples/train_bundled_model/labelled_set.py --rows 6000 --out claims

`train.csv` holds problems that the bundled model may have been trained on, `test.csv` held-out ones. Half of the
claims are right. A wrong claim is what a slip gives: one step with another operation, a forgotten last step, two digits
swapped, or the answer off by one or ten. All is made by the generator of the bundled model's problems; no text is
anybody else's.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from word_problems import Problem, make_problem


def wrong_answer(problem: Problem, rng: Random) -> int:
    """Return what a slip would give; never the answer."""
    last = problem.steps[-1]
    slips = {
        last.left + last.right,
        abs(last.left - last.right),
        last.left * last.right,
        problem.answer + 1,
        problem.answer - 1,
        problem.answer + 10,
        int(str(abs(problem.answer))[::-1]),
    }
    if len(problem.steps) > 1:
        slips.add(problem.steps[-2].result)
    return rng.choice(sorted(slip for slip in slips if slip >= 0 and slip != problem.answer))


def claims(rng: Random, *, held_out: bool) -> Iterator[tuple[str, str]]:
    """Yield (text, label) for ever: different questions, held-out ones or the others."""
    seen: set[str] = set()
    while True:
        problem = make_problem(rng)
        if problem.held_out != held_out or problem.question in seen:
            continue
        seen.add(problem.question)
        right = rng.random() < 0.5
        claim = problem.answer if right else wrong_answer(problem, rng)
        yield f"{problem.question}\nClaimed answer: {claim}", "yes" if right else "no"


def write(path: Path, rows: Iterator[tuple[str, str]]) -> None:
    """Write rows as CSV."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("text", "label"))
        writer.writerows(rows)


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=6000, help="for training and validation")
    parser.add_argument("--test-rows", type=int, default=500)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", options.rows), ("test", options.test_rows)):
        rng = Random(f"claims/{name}/{options.seed}")
        write(options.out / f"{name}.csv", islice(claims(rng, held_out=name == "test"), count))
        print(f"{options.out / name}.csv: {count} rows")


if __name__ == "__main__":
    main()
