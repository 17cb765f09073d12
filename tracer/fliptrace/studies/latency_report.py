"""What a latency study shows: the counterparts of the paper's table 4 and figure 6."""

from __future__ import annotations

import statistics as plain_statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fliptrace.errors import InputError
from fliptrace.pair.engines import VLLM_OWN
from fliptrace.studies.batch import Arm
from fliptrace.studies.engine_process import NO_ADAPTER
from fliptrace.studies.engines import identity_of
from fliptrace.studies.items import Row
from fliptrace.studies.results import markdown_table
from fliptrace.studies.statistics import Ratio, paired_ratio
from fliptrace.studies.study import Column, Report, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture
    from plotly.graph_objects import Figure

    from fliptrace.studies.latency import LatencyStudy

_PAPER = (
    "The paper (table 4, figure 6; vLLM 0.29, RTX PRO 6000, batch 1, 50 requests × 5 starts): deterministic:8 has a "
    "latency-based speedup of 16.8 to 21.1 % over unsplit (19.2 % on average) and takes 1.02 to 2.62 % more time than "
    "atomic:8 (1.69 %); with Llama 21.0 and 19.5 %, 1.62 and 1.50 % at ranks 16 and 32. At batch 64 it makes 6,079 and "
    "6,060 tokens/s, unsplit 5,274 and 5,257."
)
_TIMES = (
    ("request, ms", "mean_e2el_ms"),
    ("first token, ms", "mean_ttft_ms"),
    ("per output token, ms", "mean_tpot_ms"),
    ("output tokens/s", "output_throughput"),
)
#: Others that reductions are held against, where they ran: vLLM's own, the paper's two, vLLM's batch-invariant mode.
_AGAINST = (
    Arm(VLLM_OWN, invariant=False),
    Arm(identity_of("atomic:8"), invariant=False),
    Arm(identity_of("unsplit"), invariant=False),
    Arm(VLLM_OWN, invariant=True),
)

_STATISTICS = tuple(
    Column(f"{statistic}_{name}_ms", "float", f"{statistic} of {meaning}, ms")
    for name, meaning in (
        ("ttft", "time to first token"),
        ("tpot", "time per output token after the first, per request"),
        ("itl", "time between tokens"),
        ("e2el", "time of a request"),
    )
    for statistic in ("mean", "median", "std", "p99")
)
ROW_COLUMNS = (
    Column("item", "string", "the item's name"),
    Column("key", "string", "digest of the item's arguments"),
    Column("arm", "string", "reduction and switch"),
    Column("reduction", "string", "long name, vllm-own, or none (no adapter)"),
    Column("batch_invariant", "bool", "VLLM_BATCH_INVARIANT was on"),
    Column("rank", "int", "of the adapter, 0 without"),
    Column("batch", "int", "requests at once"),
    Column("trial", "int", "start of the engines, from 0"),
    Column("round", "int", "of the trial, from 0"),
    Column("seconds", "float", "one batch, mean"),
    Column("output", "string", "digest of all token ids"),
    Column("duration", "float", "all batches, seconds"),
    Column("completed", "int", "requests"),
    Column("total_input_tokens", "int", "of all prompts"),
    Column("total_output_tokens", "int", "generated"),
    Column("request_throughput", "float", "requests per second"),
    Column("output_throughput", "float", "generated tokens per second"),
    Column("total_token_throughput", "float", "tokens of prompts and outputs per second"),
    *_STATISTICS,
    Column("avg_latency", "float", "one batch, mean, seconds"),
    Column("latencies", "floats", "each batch, seconds"),
    Column("percentiles", "numbers", "of latencies, by percentage"),
    Column("elapsed_time", "float", "as duration"),
    Column("num_requests", "int", "as completed"),
    Column("total_num_tokens", "int", "of prompts and outputs"),
    Column("requests_per_second", "float", "as request_throughput"),
    Column("tokens_per_second", "float", "as total_token_throughput"),
)

#: (arm, rank, batch) -> rows.
_Groups = dict[tuple[str, int, int], list[Row]]


def latency_report(study: LatencyStudy, rows: Sequence[Row]) -> Report:
    """Say what each reduction costs, against the baseline and others, round by round."""
    groups: _Groups = {}
    for row in rows:
        groups.setdefault((row["arm"], row["rank"], row["batch"]), []).append(row)
    arms = [str(arm) for arm in study.arms() if any(key[0] == str(arm) for key in groups)]
    ranks = sorted({rank for _, rank, _ in groups} - {0}) or [0]
    batches = sorted({batch for _, _, batch in groups})
    baseline = study.baseline_arm()
    lines = _lines(groups, arms, ranks, batches, baseline)
    lines += [
        "",
        (
            "Medians over the rounds; ratios pair timings of the same round and are geometric means with 95 % "
            "intervals (t on log ratios; units are rounds, from three engine starts on the starts). A request is timed "
            "from being handed in to its last token, in the engine's process."
        ),
        "",
        _PAPER,
    ]
    found = [
        {
            "engine": arm,
            "rank": rank,
            "batch": batch,
            "timings": len(these),
            "outputs": len({row["output"] for row in these}),
            **{name: plain_statistics.median(row[name] for row in these) for _, name in _TIMES},
            "against": {
                other: ratio.to_json()
                for other in arms
                if other != arm
                and (ratio := _ratio(groups, arm, other, rank, batch, "mean_e2el_ms"))
            },
        }
        for (arm, rank, batch), these in groups.items()
    ]
    return Report(
        title=f"Latency: {study.shape or study.model or 'bundled model'}",
        lines=lines,
        summary={"study": study.name, "baseline": baseline, "engines": found},
        tables=(Table("rows", ROW_COLUMNS, rows),),
        figure=_figure(groups, arms, ranks, batches, baseline) if rows else None,
        picture=_picture(rows, baseline),
    )


def _of(groups: _Groups, arm: str, rank: int, batch: int) -> list[Row]:
    """Return an arm's rows; without an adapter it stands beside every rank."""
    return groups.get((arm, rank, batch)) or groups.get((arm, 0, batch)) or []


def _ratio(
    groups: _Groups, arm: str, other: str, rank: int, batch: int, measure: str
) -> Ratio | None:
    """Pair two arms' timings of the same trial and round."""
    below = {(row["trial"], row["round"]): row[measure] for row in _of(groups, other, rank, batch)}
    return paired_ratio(
        [
            (row["trial"], row[measure], below[row["trial"], row["round"]])
            for row in _of(groups, arm, rank, batch)
            if (row["trial"], row["round"]) in below
        ]
    )


def _lines(
    groups: _Groups,
    arms: Sequence[str],
    ranks: Sequence[int],
    batches: Sequence[int],
    baseline: str,
) -> list[str]:
    if not groups:
        return ["Nothing has been timed yet."]
    against = [name for name in dict.fromkeys([baseline, *map(str, _AGAINST)]) if name in arms]
    lines: list[str] = []
    for rank in ranks:
        for batch in batches:
            if not any(_of(groups, arm, rank, batch) for arm in arms):
                continue
            lines += [f"## Rank {rank}, batch {batch}", ""]
            cells = []
            for arm in arms:
                these = _of(groups, arm, rank, batch)
                if not these:
                    continue
                medians = [
                    f"{plain_statistics.median(row[name] for row in these):,.4g}"
                    for _, name in _TIMES
                ]
                ratios = [
                    "–"
                    if other == arm
                    else str(_ratio(groups, arm, other, rank, batch, "mean_e2el_ms") or "–")
                    for other in against
                ]
                outputs = str(len({row["output"] for row in these}))
                cells.append((arm, *medians, *ratios, f"{len(these)}", outputs))
            lines += markdown_table(
                (
                    "engine",
                    *(title for title, _ in _TIMES),
                    *(f"request against {other}" for other in against),
                    "timings",
                    "distinct outputs",
                ),
                cells,
            )
            lines.append("")
    return lines


def _figure(
    groups: _Groups,
    arms: Sequence[str],
    ranks: Sequence[int],
    batches: Sequence[int],
    baseline: str,
) -> Figure | None:
    from fliptrace.studies.figures import ratios_figure

    series: dict[str, Mapping[str, Ratio]] = {}
    # What no adapter at all costs would hide the differences between reductions, where there are any.
    others = [arm for arm in arms if arm not in (baseline, NO_ADAPTER)] or [NO_ADAPTER]
    for arm in others:
        for rank in ranks:
            ratios = {
                str(batch): ratio
                for batch in batches
                if arm != baseline
                and (ratio := _ratio(groups, arm, baseline, rank, batch, "output_throughput"))
            }
            if ratios:
                series[f"{arm}, rank {rank}"] = ratios
    if not series:
        return None
    return ratios_figure(
        series,
        title=f"Output throughput against {baseline}",
        x_title="requests at once",
        y_title="% more tokens per second (95 % interval)",
    )


def _picture(rows: Sequence[Row], baseline: str) -> Picture | None:
    """Draw the latencies for print; None while there is nothing to pair."""
    from fliptrace.views.static import latency_picture

    rounds = {key: number for number, key in enumerate(_rounds(rows))}
    drawn = [
        {
            "reduction": row["arm"],
            "rank": row["rank"],
            "batch": row["batch"],
            "round": rounds[row["trial"], row["round"]],
            "seconds": row["seconds"],
        }
        for row in rows
        if row["reduction"] != NO_ADAPTER
    ]
    try:
        return latency_picture(drawn, baseline=baseline)
    except InputError:
        return None


def _rounds(rows: Sequence[Row]) -> list[tuple[int, int]]:
    return sorted({(row["trial"], row["round"]) for row in rows})
