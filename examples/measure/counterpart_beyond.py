"""The sections of counterparts.py on what the paper leaves open: what a batch changes, what batch invariance costs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from counterpart_rows import NOTHING, prose, rows_of, table
from counterpart_tables import changed_by_arm

from fliptrace.studies import batch_comparisons
from fliptrace.studies.statistics import exact_share, paired_ratio


def arrangements(results: Path) -> list[str]:
    """One batch size, arranged otherwise."""
    rows = rows_of(results, "h200-study-batch-vary")
    if not rows:
        return []
    kinds = (batch_comparisons.REPETITION, *batch_comparisons.VARIATIONS[:2])
    kinds += batch_comparisons.PREFIXES
    return [
        *table(("", *kinds), changed_by_arm(rows, kinds)),
        *prose(
            "`trace-study batch`, SmolLM2, rank 16, 64 GSM8K prompts in batches of 32, 150 tokens each: outputs that",
            "changed against the first pass, when the same batches run again, when their order or their neighbours",
            "change, and with vLLM's prefix cache, cold (16 shared tokens) and warm (nearly the whole prompt).",
        ),
        *prose(
            "Each arrangement ran once. Under a fixed order none changed an output while `VLLM_BATCH_INVARIANT` was",
            "off; with it on a warm prefix cache, which leaves fewer rows to a prefill, did. `vllm-own` changes as",
            "often when nothing is varied, so its other columns say nothing of what was.",
        ),
    ]


def first_modules(results: Path) -> list[str]:
    """What first depends on the neighbours under vLLM's own batch invariance."""
    located: dict[str, list[dict[str, Any]]] = {}
    for row in rows_of(results, "h200-study-batch"):
        if row["arrangement"] == batch_comparisons.LOCATE:
            located.setdefault(row["arm"], []).extend(row["requests"])
    lines = []
    for arm, requests in located.items():
        first = Counter(
            f"{each['kind']} (`{each['operations'][-1]}`)"
            for each in requests
            if each["module"] is not None
        )
        shrinks = sum(each["kind"] == "shrink" for each in requests)
        named = ", ".join(f"{count} × {kind}" for kind, count in first.most_common()) or "none"
        differ = exact_share(sum(first.values()), len(requests))
        lines.append((f"`{arm}`", str(differ), named, str(shrinks)))
    if not lines:
        return []
    return [
        *table(
            ("", "requests that differ", "first module that differs", "of these a LoRA shrink"),
            lines,
        ),
        *prose(
            "`trace-study batch --locate`: each request alone and in a batch of 16, eager, every module's rows by",
            "digest. In vLLM 0.26 `fused_add_rms_norm` chooses its block size by the number of rows (at 256), and",
            "in these requests that came before any shrink gave another row. No reduction of shrinks can mend that.",
            "Table 3 agrees: with `VLLM_BATCH_INVARIANT` on, outputs differ from those of a request alone, and not",
            "between larger batches. That the norm alone is the reason was not tested.",
        ),
    ]


def invariance_costs(results: Path) -> list[str]:
    """What VLLM_BATCH_INVARIANT costs, and with our shrink in it."""
    rows = rows_of(results, "h200-study-invariant-cost")
    times: dict[tuple[int, str], dict[tuple[int, int], float]] = {}
    for row in rows:
        found = times.setdefault((row["batch"], row["arm"]), {})
        found[row["trial"], row["round"]] = row["seconds"]
    lines = []
    for batch, arm in sorted(times):
        one = times[batch, arm]
        cells = []
        for under in ("vllm-own", "vllm-own + VLLM_BATCH_INVARIANT"):
            two = times[batch, under]
            pairs = [(turn[0], one[turn], two[turn]) for turn in one if turn in two]
            cells.append(NOTHING if arm == under else str(paired_ratio(pairs) or NOTHING))
        median = sorted(one.values())[len(one) // 2]
        lines.append((str(batch), f"`{arm}`", f"{1e3 * median:,.0f} ms", *cells))
    if not lines:
        return []
    header = (
        "batch",
        "engine",
        "a batch, median",
        "over vllm-own",
        "over vLLM's own batch invariance",
    )
    return [
        *table(header, lines),
        *prose(
            "`trace-study latency`, the shape of Llama-3.2-3B with dummy weights, rank 16, CUDA graphs, 100 prompt",
            "tokens and 150 generated; one start of each engine, all in every round; what another start changes is in",
            "none of these intervals. vLLM's own batch invariance sums shrinks unsplit; `local` in its place gives",
            "back a part of what it costs.",
        ),
    ]
