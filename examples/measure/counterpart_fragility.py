"""The section of counterparts.py on flips predicted from a few replays, and its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from counterpart_rows import prose, rows_of, table

from fliptrace_interventions.fragility.estimation import estimate_rows
from fliptrace_interventions.fragility.report import calibration_of
from fliptrace_interventions.fragility.scoring import (
    PROMPT_BINS,
    Cost,
    Observed,
    Reliability,
    ReliabilityBin,
    cost,
    observe,
    plain_bins,
    reliability_of,
)

#: What ran, by the file of its rows.
RUNS = {
    "h200-fragility": "H200, `atomic:8`, transformers",
    "h200-fragility-vllm": "H200, `vllm-own`, vLLM",
    "cpu-fragility": "CPU, simulated `atomic:8`, bundled model",
}
PICTURE = "calibration.svg"


@cache
def observed_of(results: Path) -> dict[str, tuple[list[Observed], Reliability, Cost | None]]:
    """Return what was predicted and what came, by prompt and in bins, and the cost, by what ran."""
    found = {}
    for name, label in RUNS.items():
        rows = rows_of(results, name)
        if rows:
            estimates, _, _ = estimate_rows([row for row in rows if row["repetition"] is None])
            observed = observe(estimates, rows)
            found[label] = observed, reliability_of(observed), cost(estimates)
    return found


def predictions(results: Path) -> list[str]:
    """Predicted and observed flips of whole prompts."""
    found = observed_of(results)
    if not found:
        return []
    whole, bins = [], []
    for label, (observed, reliability, spent) in found.items():
        whole.append((label, *_whole(calibration_of(observed, reliability), spent)))
        by_edge = {each.low: each for each in reliability.prompts}
        bins.append(
            (
                label,
                *(
                    f"{100 * by_edge[low].predicted:.3g} %: {by_edge[low].observed}"
                    if low in by_edge
                    else "–"
                    for low in PROMPT_BINS[:-1]
                ),
            )
        )
    edges = pairwise(PROMPT_BINS)
    return [
        *table(
            (
                "",
                "prompts",
                "changes predicted",
                "observed",
                "Brier score (95 %)",
                "replays only counted",
                "share of the other prompts",
                "forwards by repeating over ours",
            ),
            whole,
        ),
        "",
        *table(
            ("predicted", *(f"{100 * low:.3g} % to {100 * high:.3g} %" for low, high in edges)),
            bins,
        ),
        "",
        f"![Predicted against observed shares of changed outputs, by prompts]({PICTURE})",
        *prose(
            "`trace-study fragility`: from one execution and six forced replays, how probably a fresh execution of a",
            "prompt has other tokens, held against free repetitions that no estimate has seen (up to 8 a prompt on the",
            "H200, GSM8K, 64 tokens; 12 on the CPU, bundled prompts, 48 tokens). Second table: mean prediction, then",
            "outputs that changed of those compared. Intervals are from a bootstrap of whole prompts.",
        ),
        *prose(
            "The last column of the first table: forwards that repetitions take until exact intervals are as narrow,",
            "over those of the estimates. *Replays only counted* leaves the margins out; it scores about as well,",
            "within the intervals. Inside vLLM shrinks are not replayed alone.",
            _outside({label: reliability.prompts for label, (_, reliability, _) in found.items()}),
            "Six replays are few, and estimates are drawn toward the mean.",
        ),
    ]


def _outside(runs: Mapping[str, Sequence[ReliabilityBin]]) -> str:
    """Say which bins' mean predictions lie outside the interval of what came."""
    odd = []
    for label, prompts in runs.items():
        for each in prompts:
            interval = each.observed.interval
            if interval is None or interval.low <= each.predicted <= interval.high:
                continue
            way = "too high" if each.predicted > interval.high else "too low"
            odd.append(f"{label}, {100 * each.low:.3g} % to {100 * each.high:.3g} %: {way}")
    if not odd:
        return "No mean prediction lies outside the interval of what came."
    return f"Mean predictions outside the interval of what came: {'; '.join(odd)}."


def _whole(calibration: dict[str, Any], spent: Cost | None) -> tuple[str, ...]:
    low, high = calibration["observed_interval"]
    scores = calibration["scores"]
    ratio = "–"
    if spent is not None and spent.interval is not None:
        ratio = f"{spent.ratio:.2g} ({spent.interval.low:.2g} to {spent.interval.high:.2g})"
    return (
        str(calibration["prompts"]),
        f"{calibration['predicted_changes']:.1f}",
        f"{calibration['observed_changes']:.0f} of {calibration['comparisons']:,} (95 %: {low:.0f} to {high:.0f})",
        *(
            _score(scores[name]["brier"])
            for name in ("estimate", "replays counted, no margins", "share of all other prompts")
        ),
        ratio,
    )


def _score(score: dict[str, Any]) -> str:
    low, high = score["interval"]
    return f"{score['value']:.3f} ({low:.3f} to {high:.3f})"


def draw(results: Path, place: Path) -> None:
    """Write the picture, if there are rows."""
    from fliptrace.views.static import reliability_picture, write_picture

    series = {
        label.replace("`", ""): plain_bins(reliability.prompts)
        for label, (_, reliability, _) in observed_of(results).items()
    }
    if series:
        write_picture(reliability_picture(series), place)
