"""A fragility study's Markdown: tables and sentences from the summary's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fliptrace.studies.results import markdown_table
from fliptrace_interventions.fragility.boundaries import DISTANCE_BINS
from fliptrace_interventions.fragility.estimation import PromptEstimate
from fliptrace_interventions.fragility.scoring import Observed

#: How many prompts the table names.
_SHOWN = 15
#: Below this a share is written as 0.
_NOTHING = 1e-6


def reduction_lines(
    name: str,
    entry: Mapping[str, Any],
    estimates: Sequence[PromptEstimate],
    observed: Sequence[Observed],
) -> list[str]:
    """Return what the page says of one reduction."""
    interval = entry["predicted_interval"]
    within = (
        ""
        if interval is None
        else f" (95 %, over prompts: {_percent(interval[0])} to {_percent(interval[1])})"
    )
    lines = [
        f"## {name}",
        "",
        (
            f"Orders of arrival: {', '.join(entry['schedules'])}. {_prompts(entry['prompts'])}, {entry['steps']:,} "
            f"steps, {entry['steps_in_reach']:,} of them in reach; {_prompts(entry['prompts_out_of_reach'])} "
            "without one. A fresh execution is expected to have other tokens in "
            f"{_percent(entry['predicted_share'])} of prompts{within}."
        ),
        "",
    ]
    seen = {each.estimate.prompt: each for each in observed}
    fragile = sorted(estimates, key=lambda each: -each.probability)[:_SHOWN]
    lines += markdown_table(
        (
            "prompt",
            "flips with (95 %)",
            "replays flipped",
            "likeliest step (margin in ULP)",
            "forwards",
            "repetitions that changed",
        ),
        [
            (
                each.prompt,
                f"{_percent(each.probability)} ({_percent(each.low)} to {_percent(each.high)})",
                f"{each.flipped} of {each.replays}",
                _likeliest(each),
                f"{each.forwards} ({each.length} of the reference)",
                _seen(seen.get(each.prompt)),
            )
            for each in fragile
        ],
    )
    if len(estimates) > len(fragile):
        lines += [
            "",
            f"The {len(fragile)} likeliest of {len(estimates)}; all are in prompts.parquet.",
        ]
    lines += _survival_lines(entry["survival"])
    lines += _cost_lines(entry)
    if entry["calibration"] is not None:
        lines += _calibration_lines(entry["calibration"])
    return [*lines, ""]


def _likeliest(estimate: PromptEstimate) -> str:
    if not estimate.steps:
        return "none in reach"
    step = max(estimate.steps, key=lambda each: each.probability)
    return f"{step.step} ({step.margin:g})"


def _seen(observed: Observed | None) -> str:
    return "" if observed is None else f"{observed.changed} of {len(observed.divergences)}"


def _survival_lines(survival: Mapping[str, Any] | None) -> list[str]:
    if survival is None:
        return ["", "Shrinks were not replayed alone, so no coordinate's chance to cross is known."]
    decode = survival["expected_per_decode_step"]
    per_step = "" if decode is None else f" and {decode:.3g} in a decode step"
    return [
        "",
        (
            f"Each shrink was run {survival['executions']} times alone under its recorded operands: of "
            f"{survival['coordinates']:,} coordinates {survival['expected_in_prefill']:.3g} are expected to cross a "
            f"rounding boundary in a prefill{per_step}; {_percent(survival['equal_to_last_step_in_reach'])} of "
            "executions cross none up to the last step in reach, and cannot flip."
        ),
    ]


def _cost_lines(entry: Mapping[str, Any]) -> list[str]:
    spent = entry["cost"]
    if spent is None:
        return []
    interval = spent["interval"]
    within = "" if interval is None else f" (95 %: {interval['low']:.2g} to {interval['high']:.2g})"
    return [
        "",
        (
            f"Cost: {spent['forwards']:,} forwards for {_prompts(spent['prompts'])}; a mean interval of "
            f"{spent['widths']:.2f} takes {spent['repetitions']:.1f} repetitions a prompt by repeating, "
            f"{spent['repeat_forwards']:,} forwards, {spent['ratio']:.2g} times as many{within}. A replay took "
            f"{_percent(entry['replay_share'])} of a free repetition's forwards."
        ),
    ]


def _calibration_lines(found: Mapping[str, Any]) -> list[str]:
    interval = found["observed_interval"]
    within = "" if interval is None else f" (95 %: {interval[0]:.0f} to {interval[1]:.0f})"
    lines = [
        "",
        (
            f"Against {found['comparisons']:,} free repetitions of {_prompts(found['prompts'])}: "
            f"{found['predicted_changes']:.1f} changes predicted, {found['observed_changes']:.0f} observed{within}."
        ),
        "",
    ]
    rows = [(name, *_scores(both)) for name, both in found["scores"].items()]
    rows += [
        (f"{name}, on the second half", *_scores(both))
        for name, both in found.get("second_half", {}).items()
    ]
    lines += markdown_table(("prediction by", "Brier score (95 %)", "log score (95 %)"), rows)
    for what, bins in (("prompts", found["prompt_bins"]), ("steps in reach", found["step_bins"])):
        lines += ["", *_bin_lines(what, bins)]
    return [
        *lines,
        "",
        (
            "Scores are means over comparisons, less is better, with intervals from a bootstrap of whole prompts. "
            "Steps count in repetitions that have not flipped before."
        ),
    ]


def _scores(both: Mapping[str, Any]) -> tuple[str, str]:
    return _score(both["brier"]), _score(both["log"])


def _score(value: Mapping[str, Any]) -> str:
    interval = value["interval"]
    within = "" if interval is None else f" ({interval[0]:.4f} to {interval[1]:.4f})"
    return f"{value['value']:.4f}{within}"


def _bin_lines(what: str, bins: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for each in bins:
        seen = each["observed"]
        interval = seen["interval"]
        within = (
            ""
            if interval is None
            else f" ({_percent(interval['low'])} to {_percent(interval['high'])})"
        )
        rows.append(
            (
                f"{_percent(each['low'])} to {_percent(each['high'])}",
                str(each["count"]),
                _percent(each["predicted"]),
                f"{seen['hits']} of {seen['trials']:,}, {_percent(seen['share'])}{within}",
            )
        )
    return markdown_table((f"predicted, {what}", what, "mean prediction", "observed (95 %)"), rows)


def distance_words(number: int) -> str:
    """Name a bin of distances."""
    if number == 0:
        return "below 1"
    if number == DISTANCE_BINS - 1:
        return f"from {2 ** (number - 1):,}"
    return f"{2 ** (number - 1):,} to {2**number:,}"


def _prompts(count: int) -> str:
    return f"{count:,} prompt" if count == 1 else f"{count:,} prompts"


def _percent(share: float | None) -> str:
    if share is None:
        return ""
    return f"{100 * share:.3g} %" if share > _NOTHING else "0 %"
