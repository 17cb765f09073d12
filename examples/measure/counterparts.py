"""Write docs/counterparts.md: the paper's tables and figures beside those of the rows in examples/measure/results.

    python examples/measure/counterparts.py                      writes the page from the rows that are there
    python examples/measure/counterparts.py pack FOLDER NAME     keeps a study's rows as results/NAME.jsonl.gz

A section whose rows are not there is left out. Rows that a study wrote (`pack`) go before those of earlier scripts.
Their names: h200-study-repeat-16, -repeat-32, -decide, -replay, -batch, -batch-vary, -latency-16, -latency-32 and
-invariant-cost. Rows of cpu-fragility, h200-fragility and h200-fragility-vllm are what `fragility.py export` writes.
The paper's numbers are those of arXiv:2611.10334v1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from counterpart_beyond import arrangements, first_modules, invariance_costs
from counterpart_fragility import PICTURE, draw, predictions
from counterpart_rows import NOTHING, pack, prose, rows_of, share, table
from counterpart_tables import batches, decisions, repetitions

from fliptrace.studies.statistics import Ratio, paired_ratio

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "examples/measure/results", ROOT / "docs/counterparts.md"
_HEAD = [
    "# The paper's tables and figures, beside ours",
    *prose(
        "Beside the figures of *Reproducible LoRA Inference Through Deterministic Split-K Reduction*",
        "(arXiv:2611.10334) stand those that this project's commands gave on one machine. Our shares have",
        "95 % intervals: over comparisons and elements a bootstrap of whole prompts (too narrow below about",
        "ten), over prompts exact. The paper gives counts without intervals. Where counts of one table",
        "differ between rows, the time on the machine was used up: prompts ran in the order drawn.",
    ),
    "",
    *table(
        ("", "the paper", "here"),
        [
            ("GPU", "NVIDIA RTX PRO 6000 Blackwell", "NVIDIA H200"),
            ("vLLM", "0.29.0", "0.26.0 with torch 2.11.0, Triton attention"),
            (
                "models",
                "Llama-3.2-3B-Instruct, Gemma-4-E4B-it, Nemotron-3-Nano-4B; for decisions Qwen3-0.6B",
                "SmolLM2-135M-Instruct; for times the shape of Llama-3.2-3B with dummy weights",
            ),
            (
                "adapters",
                "ranks 16 and 32, alpha twice that",
                "the same; rank 16 alone in figure 3 and tables 2 and 3; random ones for times",
            ),
            ("numbers", "BF16, FP32 shrinks, greedy, no prefix cache", "the same"),
            (
                "reductions",
                "atomics with 8 splits, unsplit, deterministic with 8 splits",
                "the same, and `vllm-own`: vLLM's shrink as it comes, atomics with 64 splits below 128 rows, else 8",
            ),
        ],
    ),
    *prose(
        "Model, GPU and vLLM's version differ all at once; what each of them does to a share was not",
        "taken apart. `examples/measure/counterparts.py` writes this page from the rows in",
        "`examples/measure/results`.",
    ),
]


def main() -> None:
    """Write the page, or keep a study's rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    keep = parser.add_subparsers(dest="mode").add_parser("pack")
    keep.add_argument("folder", type=Path, help="a study's folder")
    keep.add_argument("name", help="such as h200-study-repeat-16")
    options = parser.parse_args()
    if options.mode == "pack":
        pack(options.folder / "rows.jsonl", RESULTS / f"{options.name}.jsonl.gz")
    else:
        PAGE.write_text(page(RESULTS), "utf-8")
        draw(RESULTS, PAGE.parent / PICTURE)
        print(f"written: {PAGE}")


def page(results: Path) -> str:
    """Return the page that the rows of a folder give."""
    lines = list(_HEAD)
    for title, section in SECTIONS.items():
        found = section(results)
        if found:
            lines += ["", f"## {title}", "", *found]
    return "\n".join(lines) + "\n"


_SUMMED = (
    "comparisons",
    "comparisons_differing",
    "elements",
    "elements_differing",
    "elements_surviving",
)
_BOTH = "22.31 % over both phases"
#: The paper's figure 3 and section 6.1: comparisons, elements, mean difference.
_FIGURE_3 = {
    ("atomic:8/32", "prefill"): ("99.996 %", _BOTH, "1.08e-08 over both"),
    ("atomic:8/32", "first decode step"): ("95.22 %", _BOTH, "1.08e-08 over both"),
    **{
        (reduction, phase): ("0", "0", "0")
        for reduction in ("unsplit/64", "deterministic:8/32")
        for phase in ("prefill", "first decode step")
    },
}


def replays(results: Path) -> list[str]:
    """Figure 3: shrinks executed again on identical inputs."""
    rows = rows_of(results, "h200-study-replay")
    source = "`trace-study replay`, captured in vLLM, each call five times"
    early = results / "h200-replay.json"
    if not rows and early.exists():
        rows = json.loads(early.read_text("utf-8"))["rows"]
        source = (
            "`examples/measure/shrink_replay.py`, captured in transformers, each call 100 times"
        )
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["reduction"], row["phase"]), []).append(row)
    if not found:
        return []
    lines = []
    for (reduction, phase), several in found.items():
        entry = {name: sum(row[name] for row in several) for name in _SUMMED}
        differing, survived = entry["elements_differing"], entry["elements_surviving"]
        total = sum(row["mean_difference"] * row["elements"] for row in several)
        ours = [
            *(
                share([[(row[f"{name}_differing"], row[name])] for row in several], tuple)
                for name in ("comparisons", "elements")
            ),
            f"{total / entry['elements']:.2e}" if differing else "0",
            f"{survived:,} ({survived / differing:.1e})" if differing else NOTHING,
        ]
        paper = _FIGURE_3.get((reduction, phase), (NOTHING,) * 3)
        cells = [cell for pair in zip(paper, ours[:3], strict=True) for cell in pair]
        lines.append((f"`{reduction}`", phase, *cells, ours[3]))
    header = (
        "reduction",
        "phase",
        "comparisons that differ: paper",
        "here",
        "elements that differ: paper",
        "here",
        "mean difference: paper",
        "here",
        "of these survive BF16, here",
    )
    return [
        *table(header, lines),
        *prose(
            "The paper: 27,440 captured operations of three models, two tasks and two ranks, each five times:",
            "107,136 of 109,760 comparisons (97.61 %) differ. Here:",
            f"{source}, ten GSM8K prompts, rank 16. `atomic:vllm` sums as `vllm-own` does. Means are over all compared",
            "elements; the paper does not say over which.",
        ),
        *prose(
            "Under atomics nearly every shrink of a prefill differs somewhere. In a decode step fewer do: it has one",
            "row instead of a hundred, and a smaller share of its elements differs. A fixed order changed none. The",
            "last column is not in the paper: only elements that still differ after rounding to BF16 reach the next",
            "operation; in the decode step they are too few for a rate.",
        ),
    ]


def ratios(results: Path) -> dict[tuple[str, str, int, int], Ratio | None]:
    """Return ratios of times by (over, under, rank, batch), each pair of one round."""
    rows: list[dict[str, Any]] = []
    for rank in (16, 32):
        rows += rows_of(results, f"h200-study-latency-{rank}")
    times: dict[tuple[str, int, int], dict[tuple[int, int], float]] = {}
    for row in rows or rows_of(results, "h200-vllm-latency"):
        if row.get("batch_invariant"):
            continue
        name = {"vllm": "vllm-own"}.get(row["reduction"], row["reduction"].partition("/")[0])
        found = times.setdefault(
            (name.partition(":")[0] if "local" in name else name, row["rank"], row["batch"]), {}
        )
        found[row.get("trial", 0), row["round"]] = row["seconds"]
    return {
        (over, under, rank, batch): paired_ratio(
            [(turn[0], one[turn], two[turn]) for turn in one if turn in two]
        )
        for (over, rank, batch), one in times.items()
        for (under, other_rank, other_batch), two in times.items()
        if over != under and (rank, batch) == (other_rank, other_batch)
    }


def _timed_by(results: Path) -> str:
    """Say what timed the rows of table 4."""
    study = any(rows_of(results, f"h200-study-latency-{rank}") for rank in (16, 32))
    return "`trace-study latency`" if study else "`examples/measure/vllm_shrink.py latency`"


def _starts(results: Path) -> str:
    """Say what a ratio's interval holds: rounds of one start, or starts."""
    trials = {
        (rank, row["trial"])
        for rank in (16, 32)
        for row in rows_of(results, f"h200-study-latency-{rank}")
    }
    fewest = min((sum(own == rank for own, _ in trials) for rank, _ in trials), default=1)
    every = "every round times one request on every engine, ratios of a round, geometric mean"
    if fewest < 3:
        return (
            f"one start of each engine; {every}, interval of t on logs. What another start changes is in none of these "
            "intervals."
        )
    return (
        f"{fewest} starts of all engines, the ranks side by side on a GPU each; {every} of a start, interval of t on "
        "logs over the starts."
    )


_SLOWER = (
    "On the H200 atomics with eight splits are slower than the fixed order with the same splits, the other way round "
    "from the paper; why was not taken apart."
)


def latencies(results: Path) -> list[str]:
    """Table 4: what the deterministic reduction costs whole requests."""
    found = ratios(results)
    paper = {16: ("+21.0 %", "+1.62 %"), 32: ("+19.5 %", "+1.50 %")}
    lines = []
    for rank, (speedup, overhead) in paper.items():
        unsplit, atomic, own, local = (
            str(found.get((over, under, rank, 1)) or NOTHING)
            for over, under in (
                ("unsplit", "deterministic:8"),
                ("deterministic:8", "atomic:8"),
                ("deterministic:8", "vllm-own"),
                ("local", "vllm-own"),
            )
        )
        lines.append((str(rank), speedup, unsplit, overhead, atomic, own, local))
    header = (
        "rank",
        "unsplit over deterministic:8: paper, Llama",
        "here",
        "deterministic:8 over atomic:8: paper, Llama",
        "here",
        "deterministic:8 over vllm-own, here",
        "local over vllm-own, here",
    )
    if not found:
        return []
    behind = [found.get(("deterministic:8", "atomic:8", rank, 1)) for rank in paper]
    return [
        *table(header, lines),
        *prose(
            "Differences in time, batch 1, 150 tokens. The paper: five fresh engines, 50 requests",
            "each, averaged over GSM8K and MBPP. Here:",
            f"{_timed_by(results)}, {_starts(results)}",
        ),
        *prose(
            _SLOWER if all(ratio is not None and ratio.value < 1 for ratio in behind) else "",
            "vLLM's shrink as it comes sums 64 splits in a decode step; that is what a fixed order",
            "replaces. `local` sums every row alike in every batch; whole outputs still depend on the batch",
            "(table 3).",
        ),
    ]


def throughputs(results: Path) -> list[str]:
    """Figure 6: throughput over unsplit by batch size."""
    found = ratios(results)
    paper = {1: "about +20 to +21 %", 64: "+15.3 %"}
    lines = []
    for rank in (16, 32):
        for batch in sorted({batch for _, _, _, batch in found}):
            cells = [
                str(found.get(("unsplit", under, rank, batch)) or NOTHING)
                for under in ("deterministic:8", "atomic:8", "local")
            ]
            lines.append((str(rank), str(batch), paper.get(batch, NOTHING), *cells))
    header = (
        "rank",
        "batch",
        "deterministic:8: paper",
        "here",
        "atomic:8, here",
        "local, here",
    )
    if not lines:
        return []
    return [
        *table(header, lines),
        *prose(
            "More tokens a second than under unsplit, from the rows of table 4. The paper: 64 GSM8K prompts,",
            "three fresh engines; at batches of 16 and 32 it has a picture only. Its atomics are 1.5 to 1.7 %",
            "ahead of its fixed order at batch 64.",
        ),
    ]


SECTIONS: dict[str, Callable[[Path], list[str]]] = {
    "Figure 3: shrinks on identical inputs": replays,
    "Table 1: repeated generations": repetitions,
    "Table 2: repeated decisions": decisions,
    "Table 3: batch sizes": batches,
    "Table 4: latency": latencies,
    "Figure 6: throughput": throughputs,
    "Beyond the paper: order, neighbours, prefixes": arrangements,
    "Beyond the paper: what first depends on the batch": first_modules,
    "Beyond the paper: what batch invariance costs": invariance_costs,
    "Beyond the paper: flips predicted from a few replays": predictions,
}

if __name__ == "__main__":
    main()
