"""What a fragility study shows, per reduction: how fragile, which prompts, and how right the estimates were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fliptrace.studies.engines import identity_of
from fliptrace.studies.items import Row
from fliptrace.studies.statistics import ratio_interval
from fliptrace.studies.study import Column, Report, Table
from fliptrace_interventions.fragility.estimation import (
    Prior,
    PromptEstimate,
    estimate_rows,
)
from fliptrace_interventions.fragility.scoring import (
    Observed,
    Reliability,
    ReliabilityBin,
    cost,
    halves,
    observe,
    plain_bins,
    rate_of_others,
    reliability_of,
    repetitions_for,
    score,
)
from fliptrace_interventions.fragility.wording import distance_words, reduction_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

    from fliptrace_interventions.fragility.study import FragilityStudy

ROW_COLUMNS = (
    Column("item", "string", "the item's name"),
    Column("key", "string", "digest of the item's arguments"),
    Column("part", "string", "estimate, or a free repetition"),
    Column("reduction", "string", "as the engine says it"),
    Column("schedule", "string", "who orders atomics: hardware, or a simulated schedule"),
    Column("seed", "int", "schedule seed, where simulated; of an estimate, its reference's"),
    Column("prompt", "string", "the prompt's name"),
    Column("number", "int", "its row in the data set, from 0"),
    Column("repetition", "int", "from 1; missing for an estimate"),
    Column("prompt_ids_sha256", "string", "of the prompt's token ids"),
    Column("prompt_tokens", "int", "how many"),
    Column("token_ids", "ints", "generated"),
    Column("stop_reason", "string", "why it ended"),
    Column("margins", "floats", "largest logit less the second, in ULP, per step; of estimates"),
    Column("near", "ints", "steps whose margin is in reach"),
    Column("top_values", "float_lists", "the largest logits of each step in reach"),
    Column("top_ids", "int_lists", "their token ids, the lowest first among equals"),
    Column("ulps", "floats", "one unit in the last place of the largest logit, per step in reach"),
    Column("weight", "float", "the share of executions that leave the reference's bits"),
    Column("forwards", "int", "of the reference and its replays"),
)
#: Nested, so in JSON lines alone.
DETAIL_COLUMNS = (
    Column(
        "survival",
        "object",
        "of single shrinks that ran again: coordinates that cross, by step, by distance, and the likeliest; missing "
        "where none did",
    ),
    Column(
        "replays",
        "objects",
        "forced replays: where each began, the steps at which it chose another token, its logits of top_ids",
    ),
)
PROMPT_COLUMNS = (
    Column("prompt", "string", "the prompt's name"),
    Column("reduction", "string", "its identity"),
    Column("probability", "float", "that a fresh execution has other tokens"),
    Column("low", "float", "lower end of the 95 % interval"),
    Column("high", "float", "upper end"),
    Column("replays", "int", "forced replays"),
    Column("flipped", "int", "replays with some other choice"),
    Column("weight", "float", "the share of executions that leave the reference's bits"),
    Column(
        "expectation", "float", "from margins and pooled differences alone, given that one does"
    ),
    Column("forwards", "int", "of the reference and its replays"),
    Column("length", "int", "steps of the reference"),
    Column("repetitions_needed", "int", "for an exact interval as narrow; missing without a width"),
    Column("observed_changed", "int", "free repetitions with other tokens"),
    Column("observed", "int", "free repetitions"),
)
STEP_COLUMNS = (
    Column("prompt", "string", "the prompt's name"),
    Column("reduction", "string", "its identity"),
    Column("step", "int", "from 0"),
    Column("margin", "float", "in ULP of the best logit"),
    Column("expectation", "float", "from margins and pooled differences alone"),
    Column("flips", "int", "replays with another choice here"),
    Column("probability", "float", "that a fresh execution chooses another token here"),
    Column("low", "float", "lower end of the 95 % interval"),
    Column("high", "float", "upper end"),
)


def fragility_report(study: FragilityStudy, rows: Sequence[Row]) -> Report:
    """Estimate per reduction and hold the estimates against repetitions."""
    lines: list[str] = []
    summary: dict[str, Any] = {}
    prompt_rows: list[dict[str, Any]] = []
    step_rows: list[dict[str, Any]] = []
    figure = picture = None
    wanted = [] if study.traces else list(map(identity_of, study.reductions))
    for name in dict.fromkeys([*wanted, *(row["reduction"] for row in rows)]):
        own = [row for row in rows if row["reduction"] == name]
        measured = [row for row in own if row["repetition"] is None]
        if not measured:
            continue
        estimates, prior, step_prior = estimate_rows(measured)
        observed = observe(estimates, own)
        prompt_rows += _prompt_rows(estimates, observed)
        step_rows += [
            {"prompt": each.prompt, "reduction": name, **asdict(step)}
            for each in estimates
            for step in each.steps
        ]
        reliability = reliability_of(observed)
        entry = _entry(measured, estimates, observed, reliability, prior, step_prior)
        summary[name] = entry
        lines += reduction_lines(name, entry, estimates, observed)
        if figure is None:
            figure = _figure(name, measured, reliability)
            picture = _picture(reliability)
    return Report(
        title=f"Fragility: {'recorded executions' if study.traces else study.task.partition(':')[0]}",
        lines=lines or ["No prompt has been estimated yet."],
        summary={"study": study.name, "reductions": summary},
        tables=(
            Table("rows", ROW_COLUMNS, rows),
            Table("prompts", PROMPT_COLUMNS, prompt_rows),
            Table("steps", STEP_COLUMNS, step_rows),
        ),
        figure=figure,
        picture=picture,
        row_columns=(*ROW_COLUMNS, *DETAIL_COLUMNS),
    )


def _entry(
    measured: Sequence[Mapping[str, Any]],
    estimates: Sequence[PromptEstimate],
    observed: Sequence[Observed],
    reliability: Reliability,
    prior: Prior,
    step_prior: Prior,
) -> dict[str, Any]:
    probabilities = [each.probability for each in estimates]
    ones = [1.0] * len(estimates)
    spread = ratio_interval(probabilities, ones) if len(estimates) > 1 else None
    spent = cost(estimates)
    replayed = sum(each.replays * each.length for each in estimates)
    in_replays = sum(each.forwards - each.length for each in estimates if each.replays)
    return {
        "prompts": len(estimates),
        "schedules": sorted({_kind(str(row["schedule"])) for row in measured}),
        "steps": sum(each.length for each in estimates),
        "steps_in_reach": sum(len(each.steps) for each in estimates),
        "prompts_out_of_reach": sum(not each.steps for each in estimates),
        "predicted_share": float(np.mean(probabilities)),
        "predicted_interval": None if spread is None else [spread.low, spread.high],
        "prior": asdict(prior),
        "step_prior": asdict(step_prior),
        "survival": _survival(measured),
        "cost": None if spent is None else asdict(spent),
        "replay_share": in_replays / replayed if replayed else None,
        "calibration": calibration_of(observed, reliability) if observed else None,
    }


def _kind(schedule: str) -> str:
    return schedule.partition(",")[0]


def _survival(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    with_it = [row["survival"] for row in measured if row["survival"] is not None]
    if not with_it:
        return None
    decode = [value for each in with_it for value in each["expected"][1:]]
    return {
        "prompts": len(with_it),
        "executions": with_it[0]["executions"],
        "coordinates": sum(each["coordinates"] for each in with_it),
        "expected_in_prefill": float(np.mean([each["expected"][0] for each in with_it])),
        "expected_per_decode_step": float(np.mean(decode)) if decode else None,
        "equal_to_last_step_in_reach": float(np.mean([each["equal"][-1] for each in with_it])),
        "bins": np.sum([each["bins"] for each in with_it], axis=0).tolist(),
        "bins_crossing": np.sum([each["bins_crossing"] for each in with_it], axis=0).tolist(),
    }


def calibration_of(observed: Sequence[Observed], reliability: Reliability) -> dict[str, Any]:
    """Score the estimates, what they would be from margins or counts alone, and two ways without replays."""
    predictions = [each.estimate.probability for each in observed]
    counted = [
        each.estimate.weight * (each.estimate.flipped + 0.5) / (each.estimate.replays + 1)
        for each in observed
    ]
    total = sum(len(each.divergences) for each in observed)
    changes = [float(each.changed) for each in observed]
    sizes = [float(len(each.divergences)) for each in observed]
    spread = ratio_interval(changes, sizes) if len(observed) > 1 else None
    found: dict[str, Any] = {
        "prompts": len(observed),
        "comparisons": total,
        "predicted_changes": sum(p * n for p, n in zip(predictions, sizes, strict=True)),
        "observed_changes": sum(changes),
        "observed_interval": None if spread is None else [spread.low * total, spread.high * total],
        "scores": {
            "estimate": _both(observed, predictions),
            "replays counted, no margins": _both(observed, counted),
        },
        "prompt_bins": [_bin(each) for each in reliability.prompts],
        "step_bins": [_bin(each) for each in reliability.steps],
    }
    if len(observed) > 1:
        found["scores"]["share of all other prompts"] = _both(observed, rate_of_others(observed))
    if min(len(each.divergences) for each in observed) > 1:
        frequencies, rest = halves(observed)
        found["second_half"] = {
            "estimate": _both(rest, predictions),
            "first half of the repetitions": _both(rest, frequencies),
        }
    return found


def _both(observed: Sequence[Observed], predictions: Sequence[float]) -> dict[str, Any]:
    return {
        "brier": score(observed, predictions).to_json(),
        "log": score(observed, predictions, logarithmic=True).to_json(),
    }


def _bin(each: ReliabilityBin) -> dict[str, Any]:
    return {
        "low": each.low,
        "high": each.high,
        "count": each.count,
        "predicted": each.predicted,
        "observed": each.observed.to_json(),
    }


def _prompt_rows(
    estimates: Sequence[PromptEstimate], observed: Sequence[Observed]
) -> list[dict[str, Any]]:
    seen = {each.estimate.prompt: each for each in observed}
    rows = []
    for each in estimates:
        row = {name: value for name, value in asdict(each).items() if name != "steps"}
        known = seen.get(each.prompt)
        rows.append(
            {
                **row,
                "repetitions_needed": repetitions_for(each),
                "observed_changed": None if known is None else known.changed,
                "observed": None if known is None else len(known.divergences),
            }
        )
    return rows


def _figure(name: str, measured: Sequence[Mapping[str, Any]], reliability: Reliability) -> Any:
    from fliptrace_interventions.fragility.figures import fragility_figure

    survival = _survival(measured)
    crossing = []
    if survival is not None:
        for number, (count, hits) in enumerate(
            zip(survival["bins"], survival["bins_crossing"], strict=True)
        ):
            if count:
                crossing.append((distance_words(number), hits / count, count))
    return fragility_figure(
        reliability.prompts,
        reliability.steps,
        crossing,
        title=f"Fragility under {name}",
    )


def _picture(reliability: Reliability) -> Picture | None:
    from fliptrace.views.static import reliability_picture

    series = {
        name: plain_bins(bins)
        for name, bins in (
            ("prompts", reliability.prompts),
            ("steps in reach", reliability.steps),
        )
        if bins
    }
    return reliability_picture(series) if series else None


def cost_lines(folder: str | Path) -> list[str]:
    """Say what estimates and repetitions took in seconds, by the timings of a study's folder.

    Args:
        folder: of a study with repetitions.

    Returns:
        One line per reduction.
    """
    import json

    from fliptrace_interventions.fragility.gathering import seconds_of

    rows = [
        json.loads(line) for line in (Path(folder) / "rows.jsonl").read_text("utf-8").splitlines()
    ]
    seconds = seconds_of(folder)
    lines = []
    for name in dict.fromkeys(row["reduction"] for row in rows):
        own = [row for row in rows if row["reduction"] == name]
        estimates, _, _ = estimate_rows([row for row in own if row["repetition"] is None])
        took: dict[str, list[float]] = {}
        for row in own:
            if row["repetition"] is not None:
                took.setdefault(row["prompt"], []).append(seconds[row["item"]])
        item = {row["prompt"]: row["item"] for row in own if row["repetition"] is None}
        spent, repeat = [], []
        for each in estimates:
            needed = repetitions_for(each)
            if each.replays and needed is not None and each.prompt in took:
                spent.append(seconds[item[each.prompt]])
                repeat.append((needed + 1) * float(np.median(took[each.prompt])))
        if spent:
            lines.append(
                f"{name}: {sum(spent):.0f} s for the estimates of {len(spent)} prompts, shrinks alone included; "
                f"{sum(repeat):.0f} s by repeating to intervals as narrow, {sum(repeat) / sum(spent):.2g} times "
                "as long."
            )
    return lines
