"""What a decide study shows, per reduction: the counterpart of the paper's table 2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fliptrace.studies.decide import pairs_of
from fliptrace.studies.engine_process_reductions import IN_PROCESS, mode_lines
from fliptrace.studies.engines import identity_of, is_repeatable
from fliptrace.studies.items import Row
from fliptrace.studies.results import markdown_table
from fliptrace.studies.statistics import (
    clustered_share,
    exact_share,
    few_clusters,
    shares_to_json,
    sign_flip_test,
)
from fliptrace.studies.study import Column, Report, Table, unrepeatable_lines

if TYPE_CHECKING:
    from fliptrace.studies.decide import DecideStudy

_PAPER = (
    "The paper (table 2; Qwen3-0.6B, 1,000 comments × 10): atomic changes 81.47 % of probabilities, mean drift "
    "0.00143, largest 0.05672, 7 flips in 2 comments, accuracy 94.25 %; unsplit and "
    "deterministic:8 change none, 94.20 and 94.30 %."
)
_READ = (
    "Probabilities are read from the next token's logits by fliptrace, on either engine alike, not through vLLM's "
    "structured-decision interface (--server)."
)
_OF_VLLM = (
    "Probabilities are normalised from vLLM's own log-probabilities of the two labels (logprob_token_ids), the read of "
    "its structured-decision interface."
)
_SERVED = (
    "Probabilities came through the server's own structured-decision interface (/v1/systemone, noul); which reduction "
    "ran cannot be known from outside."
)
#: Below this share of the probability, most of it is on other words than the labels.
_ENOUGH_MASS = 0.5
_COLUMNS = (
    Column("item", "string", "the item's name"),
    Column("key", "string", "digest of the item's arguments"),
    Column("reduction", "string", "as the engine says it"),
    Column("schedule", "string", "who orders atomics: hardware, a simulated schedule, nobody"),
    Column(
        "mode", "string", "in-process, or the mode of vLLM's own engine: graphs, compiled, eager"
    ),
    Column("batch_size", "int", "requests at once"),
    Column("seed", "int", "schedule seed, where simulated"),
    Column("prompt", "string", "the row's name"),
    Column("number", "int", "the row, from 0"),
    Column("repetition", "int", "from 0"),
    Column("prompt_ids_sha256", "string", "of the prompt's token ids"),
    Column("prompt_tokens", "int", "how many"),
    Column("yes", "float", "probability of yes, normalised over yes and no"),
    Column("no", "float", "the same of no"),
    Column("label_mass", "float", "probability of both among all tokens"),
    Column("decision", "bool", "yes is at least 0.5"),
    Column("label", "bool", "what is right"),
    Column("correct", "bool", "whether the decision is"),
)


def decide_report(study: DecideStudy, rows: Sequence[Row], left_out: int = 0) -> Report:
    """Say what repetitions changed, per reduction.

    Args:
        study: its settings.
        rows: so far.
        left_out: of the data's rows, how many were not drawn from as their text is empty or doubled.
    """
    pairs = pairs_of(rows)
    names = [identity_of(name) for name in study.chosen_reductions]
    found = [
        _of(name, rows, [pair for pair in pairs if pair[0]["reduction"] == name]) for name in names
    ]
    shown = [entry for entry in found if entry["comparisons"]]
    header = (
        "reduction",
        "probabilities changed",
        "mean, largest drift",
        "decisions flipped",
        "affected texts",
        "right → wrong, wrong → right",
        "accuracy at repetition 0",
        "label mass (mean, least)",
    )
    table = [
        (
            entry["reduction"],
            str(entry["changed"]),
            f"{entry['drift_mean']:.3g}, {entry['drift_largest']:.3g}",
            str(entry["flips"]),
            str(entry["affected"]),
            f"{entry['right_to_wrong']}, {entry['wrong_to_right']}"
            + (f" (p = {entry['transitions_p']:.3g})" if entry["transitions_p"] < 1 else ""),
            str(entry["right"]) if entry["right"].trials else "no labels",
            f"{entry['mass_mean']:.3g}, {entry['mass_least']:.3g}",
        )
        for entry in shown
    ]
    lines = [
        f"Asked of every text: {study.question} ({study.yes} or {study.no})",
        "",
        f"Texts: {study.data_name}{_labelled_by(study)}."
        + (
            f" {left_out:,} rows without a text of their own were not drawn from."
            if left_out
            else ""
        ),
        "",
        *(markdown_table(header, table) if shown else ["No repetition has been compared yet."]),
        "",
        (
            f"{_read(study, rows)} Intervals (95 %): over comparisons by a bootstrap of whole "
            "texts, over texts exact; p by sign flips with texts as units."
            f"{few_clusters(len({row['prompt'] for row in rows}))}"
        ),
        *_unlikely(rows),
        "",
        _PAPER,
        *mode_lines(rows),
    ]
    if any(row["seed"] is not None for row in rows):
        lines += [
            "",
            "Arrival orders of atomics were simulated, a new schedule seed in each repetition.",
        ]
    unrepeatable = [
        entry["reduction"]
        for entry in shown
        if is_repeatable(entry["reduction"]) and entry["changed"].hits
    ]
    lines += unrepeatable_lines(unrepeatable)
    return Report(
        title="Repeated yes/no decisions",
        lines=lines,
        summary={"study": study.name, "reductions": [shares_to_json(entry) for entry in found]},
        tables=(Table("rows", _COLUMNS, rows),),
        figure=_figure(pairs) if pairs else None,
        unrepeatable=unrepeatable,
    )


def _labelled_by(study: DecideStudy) -> str:
    if not study.label_column:
        return ", without labels"
    return f", column {study.text_column}; {study.label_column} is right (a number from {study.threshold:g} on is yes)"


def _read(study: DecideStudy, rows: Sequence[Row]) -> str:
    if study.server is not None:
        return _SERVED
    by_vllm = any((row.get("mode") or IN_PROCESS) != IN_PROCESS for row in rows)
    return _OF_VLLM if by_vllm else _READ


def _unlikely(rows: Sequence[Row]) -> list[str]:
    """Warn where the model would rather have said something else than one of the labels."""
    masses = [row["label_mass"] for row in rows]
    mean = math.fsum(masses) / max(1, len(masses))
    if not masses or mean >= _ENOUGH_MASS:
        return []
    return [
        "",
        (
            f"**The labels are unlikely answers:** together they had {100 * mean:.3g} % of the probability on average. "
            "This model would rather say something else, so its decisions say little about the question."
        ),
    ]


def _of(
    name: str,
    rows: Sequence[Row],
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> dict[str, Any]:
    groups: dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for pair in pairs:
        groups.setdefault(pair[0]["prompt"], []).append(pair)
    sizes = [len(group) for group in groups.values()]
    drifts = [abs(before["yes"] - after["yes"]) for before, after in pairs]
    changed = [sum(one["yes"] != two["yes"] for one, two in group) for group in groups.values()]
    flips = [
        sum(one["decision"] != two["decision"] for one, two in group) for group in groups.values()
    ]
    lost = [
        sum(one["correct"] is True and two["correct"] is False for one, two in g)
        for g in groups.values()
    ]
    won = [
        sum(one["correct"] is False and two["correct"] is True for one, two in g)
        for g in groups.values()
    ]
    own = [row for row in rows if row["reduction"] == name]
    scored = [
        row["correct"] for row in own if row["repetition"] == 0 and row["correct"] is not None
    ]
    masses = [row["label_mass"] for row in own]
    return {
        "reduction": name,
        "comparisons": len(pairs),
        "changed": clustered_share(changed, sizes),
        "drift_mean": math.fsum(drifts) / max(1, len(drifts)),
        "drift_largest": max(drifts, default=0.0),
        "flips": clustered_share(flips, sizes),
        "affected": exact_share(sum(count > 0 for count in flips), len(flips)),
        "right_to_wrong": sum(lost),
        "wrong_to_right": sum(won),
        "transitions_p": sign_flip_test([up - down for up, down in zip(won, lost, strict=True)]),
        "right": exact_share(sum(scored), len(scored)),
        "mass_mean": math.fsum(masses) / max(1, len(masses)),
        "mass_least": min(masses, default=0.0),
    }


def _figure(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Any:
    from fliptrace.studies.figures import scatter_figure

    series: dict[str, tuple[list[float], list[float]]] = {}
    for before, after in pairs:
        x, y = series.setdefault(before["reduction"], ([], []))
        x.append(before["yes"])
        y.append(after["yes"] - before["yes"])
    return scatter_figure(
        series,
        title="Drift of p(yes) between repetitions",
        x_title="p(yes) at repetition 0",
        y_title="change at repetition r",
    )
