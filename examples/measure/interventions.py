"""Measure what searches over pairs find, and what interventions cost.

    python examples/measure/interventions.py planted --count 50 --out planted.jsonl
    python examples/measure/interventions.py record MODEL ADAPTER gsm8k:PATH --select 0-39 --count 10 --folder PAIRS
    python examples/measure/interventions.py pairs MODEL ADAPTER PAIRS/* --gold gsm8k:PATH --out rows.jsonl
    python examples/measure/interventions.py both MODEL ADAPTER gsm8k:PATH --minutes 5 --folder PAIRS --out rows.jsonl
    python examples/measure/interventions.py speed MODEL ADAPTER PAIR_DIR... --out speed.jsonl
    python examples/measure/interventions.py memory MODEL ADAPTER PAIR_DIR --count 1000
    python examples/measure/interventions.py summary planted planted-0.jsonl planted-1.jsonl

planted: on the bundled model, pairs in which one coordinate flips the token among at least ten decoys that do not; the
investigation must name it as the only sufficient one. record: divergent pairs, saved as folders. pairs: the whole
investigation of each, one row a pair. both: record, then pairs, on one engine. speed: all roots of a pair beside the
same experiments from scratch. memory: many interventions, resident memory.

Whatever writes rows leaves out what its file holds already, and an investigation that was interrupted goes on from the
journal in its pair's folder. --shard K/N takes every Nth piece of work, for N processes side by side, each with an
--out of its own; ``summary KIND FILE...`` adds their rows up. The last line on stdout is a JSON summary over all rows
of --out; planted exits with 1 when a row is not as it must be, or when all prompts gave too few.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from engine_options import add_engine_options, load_engine
from intervention_cost import memory, speed
from intervention_rows import row_of, totals
from planted_causes import Planted, Planter, describe

import fliptrace as ft
from fliptrace.capture.transformers_engine import TransformersEngine
from fliptrace.judgements import Investigation
from fliptrace.pair import Pair
from fliptrace.pair.prompts import parse_selection, read_dataset
from fliptrace_interventions import Workbench, gsm8k_answer
from fliptrace_interventions.budget import Budget
from fliptrace_interventions.journal import Journal
from fliptrace_interventions.reconstruction import reconstruct
from fliptrace_interventions.recorded import RecordedExecution
from fliptrace_interventions.searches.investigation import investigate
from fliptrace_interventions.workbench import CONTINUATIONS

#: The shard that is everything.
WHOLE = "0/1"


def main() -> int:
    """Run what the command line asks for."""
    options = _parser().parse_args()
    torch.set_num_threads(options.threads)
    return int(options.run(options))


def run_planted(options: argparse.Namespace) -> int:
    """Plant pairs until there are enough, and check what the investigation names."""
    bundled = ft.bundled_model()
    engine = load_engine(bundled.model, bundled.adapter, options)
    rows = _known(options.out)
    tried = {row["prompt"] for row in rows}
    for number in _share(range(len(bundled.prompts)), options.shard):
        if sum(row["planted"] for row in rows) >= options.count:
            break
        if number in tried:
            continue
        text = bundled.prompts[number].text
        row = plant_and_search(engine, text, number, options.shams, options.seed)
        rows.append(row)
        _append(options.out, row)
        _say(f"prompt {number}: {'as planted' if row.get('as_planted') else row}")
    summary = planted_totals(rows)
    print(json.dumps(summary))
    enough = options.shard != WHOLE or summary["planted"] >= options.count
    return int(not enough or summary["as_planted"] < summary["planted"])


def planted_totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up rows of planted pairs."""
    planted = [row for row in rows if row["planted"]]
    return {
        "planted": len(planted),
        "as_planted": sum(row["as_planted"] for row in planted),
        "prompts_tried": len(rows),
        "push_ulp": sorted(row["plant"]["push_ulp"] for row in planted),
        "decoys": sum(len(row["plant"]["decoys"]) for row in planted),
        "decoys_named": sum(row["decoys_named"] for row in planted),
        "failed_checks": [
            [row["prompt"], name]
            for row in planted
            for name, passed in row["checks"].items()
            if not passed
        ],
        "seconds": sum(row["seconds"] for row in rows),
    }


def plant_and_search(
    engine: TransformersEngine, text: str, number: int, shams: int, seed: int = 0
) -> dict[str, Any]:
    """Plant a pair on one prompt, search it, and compare."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fliptrace-planted-") as folder:
        prompt = ft.encode_prompt(engine.tokenizer, text, source=f"bundled row {number}")
        planter = Planter(engine, prompt, Path(folder), seed=1000 * seed + number)
        found = planter.plant()
        if found is None:
            return {
                "prompt": number,
                "planted": False,
                "seconds": time.perf_counter() - started,
            }
        planted, pair = found
        planting = time.perf_counter() - started
        with pair:
            story = investigate(Workbench(pair, engine, shams=shams))
            row = {
                "prompt": number,
                "planted": True,
                "plant": describe(planted, engine, pair.reference),
                "planting_seconds": planting,
                **check(planted, pair, story),
                "runs": story.runs,
                "forwards": story.forwards,
                "seconds": time.perf_counter() - started,
            }
    return row


def check(planted: Planted, pair: Pair, story: Investigation) -> dict[str, Any]:
    """Compare an investigation with what was planted and tried out beside it."""
    first = pair.reference.steps[planted.step].first_position

    def places(nudges: Sequence[Any]) -> set[tuple[int, int]]:
        return {(first + nudge.row, nudge.rank_index) for nudge in nudges}

    def named(recipient: str) -> set[tuple[int, int]]:
        return {
            (c.position, c.rank_index)
            for c in story.coordinates
            for s in c.screenings
            if s.recipient == recipient and s.gives_donor_token
        }

    cause, decoys = places([planted.cause]), places(planted.decoys)
    best = story.best_coordinate
    proved = best is not None and best.verdict is not None
    checks = {
        "flip_as_planted": pair.diff.flip is not None
        and pair.diff.flip.step == planted.flip_step
        and tuple(pair.reference.generated_ids[planted.flip_step : planted.flip_step + 1])
        + tuple(pair.candidate.generated_ids[planted.flip_step : planted.flip_step + 1])
        == planted.tokens,
        "all_tried": {(c.position, c.rank_index) for c in story.coordinates} == cause | decoys,
        "cause_is_best": best is not None and {(best.position, best.rank_index)} == cause,
        "proved": proved and "reference <- candidate" in best.verdict.sufficient_directions,
        "only_cause_in_reference": named("reference") == cause,
        "candidate_as_tried": named("candidate") == places(planted.undone_by),
    }
    return {
        "as_planted": all(checks.values()),
        "checks": checks,
        "decoys_named": len(named("reference") & decoys),
        "specificity": [
            [r.recipient, r.specificity.shams, r.specificity.other_token]
            for r in best.verdict.directions
            if r.specificity is not None
        ]
        if proved
        else None,
        "two_by_two": story.two_by_two.decided_by if story.two_by_two else None,
    }


def run_record(options: argparse.Namespace) -> int:
    """Record divergent pairs into folders of their own."""
    return record(load_engine(options.model, options.adapter, options), options)


def run_both(options: argparse.Namespace) -> int:
    """Record divergent pairs and investigate them, until the time is over."""
    end = time.perf_counter() + 60 * options.minutes
    engine = load_engine(options.model, options.adapter, options)
    record(engine, options)
    options.pairs = sorted(options.folder.iterdir()) if options.folder.exists() else []
    left = (end - time.perf_counter()) / 60
    if left <= 0 or not options.pairs:
        _say(f"{len(options.pairs)} pairs were recorded, and {max(left, 0):.1f} minutes are left")
        return 1
    options.budget_minutes = left / len(options.pairs)
    return investigate_all(engine, options)


def record(engine: Any, options: argparse.Namespace) -> int:
    """Do what run_record says."""
    prompts = read_dataset(options.dataset, parse_selection(options.select))
    kept = 0
    for source, text in _share(prompts, options.shard):
        folder = options.folder / source.replace(" ", "-")
        if kept >= options.count:
            break
        if folder.exists():
            kept += 1
            continue
        prompt = ft.encode_prompt(engine.tokenizer, text, source=source)
        with ft.trace_pair(
            engine,
            prompt=prompt,
            reduction=options.reduction,
            attempts=options.attempts,
            max_new_tokens=options.max_new_tokens,
            seed=options.seed,
            observer_control=False,
        ) as pair:
            _say(f"{source}: {pair}")
            if pair.diverged:
                pair.save(folder)
                kept += 1
    print(json.dumps({"kept": kept}))
    return int(kept < options.count)


def run_pairs(options: argparse.Namespace) -> int:
    """Investigate pairs, one row each."""
    return investigate_all(load_engine(options.model, options.adapter, options), options)


def investigate_all(engine: Any, options: argparse.Namespace) -> int:
    """Do what run_pairs says."""
    rows = _known(options.out)
    seen = {row["pair"] for row in rows}
    for folder in _share(options.pairs, options.shard):
        if str(folder) in seen:
            continue
        started = time.perf_counter()
        with ft.load_pair(folder) as pair:
            gold = _gold(options.gold, pair)
            workbench = Workbench(
                pair,
                engine,
                shams=options.shams,
                expected_answer=gold,
                max_new_tokens=options.max_new_tokens,
                continuation=options.continuation,
            )
            breaks = one_flipped_bit_breaks(engine, workbench)
            with Journal(folder / "interventions.jsonl") as journal:
                story = investigate(
                    workbench,
                    budget=Budget(minutes=options.budget_minutes),
                    journal=journal,
                    progress=_Shown(str(folder)),
                )
            row = {
                "pair": str(folder),
                **row_of(pair, story, gold),
                "one_flipped_bit_breaks_reconstruction": breaks,
                "wall_seconds": time.perf_counter() - started,
            }
        rows.append(row)
        _append(options.out, row)
        _say(f"{folder}: {story.sentence} ({row['wall_seconds']:.0f} s)")
    print(json.dumps(totals(rows)))
    return 0


def one_flipped_bit_breaks(engine: TransformersEngine, workbench: Workbench) -> bool:
    """Flip the sign of one replayed element and say whether reconstruction notices: it must."""
    recorded = _OneBitOff(workbench.reference.trace, engine, "reference")
    with engine.reducing("unsplit", None):
        found, _ = reconstruct(engine, recorded, 0)
    return not found.equal


class _OneBitOff(RecordedExecution):
    """A recording whose prefill has one bit flipped, in the largest element of the first value projection."""

    def shrink(self, step: int, site: int) -> torch.Tensor:
        """Return a recorded shrink, once with a flipped sign."""
        values = super().shrink(step, site)
        if step == 0 and site == self._value_site:
            largest = int(values.abs().argmax())
            values.view(-1)[largest] *= -1
        return values

    @property
    def _value_site(self) -> int:
        frame = self.trace.frame(0, ft.Kind.SHRINK)
        keys = [entry.key for entry in frame.layout.entries]
        return next((n for n, key in enumerate(keys) if key.endswith("v_proj")), 0)


def run_speed(options: argparse.Namespace) -> int:
    """Time searches beside the same experiments from scratch."""
    engine = load_engine(options.model, options.adapter, options)
    rows = _known(options.out)
    seen = {row["pair"] for row in rows}
    for folder in _share(options.pairs, options.shard):
        if str(folder) in seen:
            continue
        with ft.load_pair(folder) as pair:
            workbench = Workbench(pair, engine)
            row = {"pair": str(folder), "device": str(engine.device), **speed(workbench)}
        rows.append(row)
        _append(options.out, row)
        _say(f"{folder}: {json.dumps(row['whole_search'])}")
    print(json.dumps(speed_totals(rows)))
    return 0


def speed_totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """List the ratios of all pairs."""
    return {
        "whole_search_ratios": [
            row["whole_search"]["ratio"] for row in rows if row["whole_search"]
        ],
        "by_kind": {
            kind: [row["by_kind"][kind]["ratio"] for row in rows if kind in row["by_kind"]]
            for kind in dict.fromkeys(kind for row in rows for kind in row["by_kind"])
        },
        "same_tokens": all(e["same_tokens"] for row in rows for e in row["experiments"]),
    }


def run_summary(options: argparse.Namespace) -> int:
    """Add up the rows of several files."""
    rows = [row for path in options.files for row in _known(path)]
    add_up = {"planted": planted_totals, "pairs": totals, "speed": speed_totals}[options.kind]
    print(json.dumps(add_up(rows)))
    return 0


def run_memory(options: argparse.Namespace) -> int:
    """Watch memory over many interventions."""
    engine = load_engine(options.model, options.adapter, options)
    with ft.load_pair(options.pairs[0]) as pair:
        print(json.dumps(memory(Workbench(pair, engine), options.count, options.every)))
    return 0


class _Shown:
    """Progress on stderr, a line per phase."""

    def __init__(self, name: str) -> None:
        self._name, self._last, self._started = name, "", time.perf_counter()

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._last:
            self._last = what
            _say(f"{self._name} {time.perf_counter() - self._started:7.1f} s: {what} ({total})")


def _gold(specification: str | None, pair: Pair) -> str | None:
    """Look up the right answer of a pair's prompt in its data set."""
    source = str(pair.reference.manifest.get("prompt.source"))
    kind, _, row = source.partition(" row ")
    if specification is None or not row:
        return None
    expected, _, path = specification.partition(":")
    if kind != expected:
        return None
    lines = [line for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
    return gsm8k_answer(str(json.loads(lines[int(row)])["answer"]))


def _share(work: Sequence[Any] | range, shard: str) -> Iterator[Any]:
    number, _, count = shard.partition("/")
    yield from list(work)[int(number) :: int(count)]


def _known(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Any, *, out: bool = True) -> argparse.ArgumentParser:
        one = commands.add_parser(name)
        one.set_defaults(run=run)
        add_engine_options(one)
        one.add_argument("--threads", type=int, default=1)
        one.add_argument("--shard", default=WHOLE, metavar="K/N")
        if out:
            one.add_argument("--out", type=Path, required=True)
        return one

    planted = command("planted", run_planted)
    planted.add_argument("--count", type=int, default=50)
    planted.add_argument("--shams", type=int, default=20)
    planted.add_argument("--seed", type=int, default=0, help="what is drawn on each prompt")
    added = commands.add_parser("summary")
    added.set_defaults(run=run_summary, threads=1)
    added.add_argument("kind", choices=("planted", "pairs", "speed"))
    added.add_argument("files", type=Path, nargs="+")
    recorded = command("record", run_record, out=False)
    investigated = command("pairs", run_pairs)
    both = command("both", run_both)
    timed = command("speed", run_speed)
    watched = command("memory", run_memory, out=False)
    for one in (recorded, investigated, both, timed, watched):
        one.add_argument("model")
        one.add_argument("adapter")
    for one in (recorded, both):
        one.add_argument("dataset", help="gsm8k:PATH or jsonl:PATH")
        one.add_argument("--select", nargs="+", default=["0-39"])
        one.add_argument("--count", type=int, default=10, help="stop after so many pairs")
        one.add_argument("--folder", type=Path, required=True)
        one.add_argument("--reduction", default="atomic:8")
        one.add_argument("--attempts", type=int, default=6)
        one.add_argument("--seed", type=int, default=0, help="of simulated schedules")
        one.add_argument("--max-new-tokens", type=int, default=256)
    for one in (investigated, timed, watched):
        one.add_argument("pairs", type=Path, nargs="+", metavar="PAIR_DIR")
    for one in (investigated, both):
        one.add_argument("--gold", help="the data set with the right answers, gsm8k:PATH")
        one.add_argument("--shams", type=int, default=20)
        one.add_argument("--continuation", choices=CONTINUATIONS, default="computed")
    investigated.add_argument("--budget-minutes", type=float, default=None, help="of each pair")
    investigated.add_argument("--max-new-tokens", type=int, default=None)
    both.add_argument("--minutes", type=float, required=True, help="of everything")
    watched.add_argument("--count", type=int, default=1000)
    watched.add_argument("--every", type=int, default=50)
    return parser


if __name__ == "__main__":
    sys.exit(main())
