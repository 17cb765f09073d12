"""What a repeat study shows, per reduction: the counterpart of the paper's table 1."""

from __future__ import annotations

import statistics as plain_statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fliptrace.studies.engine_process_reductions import mode_lines
from fliptrace.studies.engines import identity_of, is_repeatable
from fliptrace.studies.items import Row
from fliptrace.studies.repeat import RepeatComparison, comparisons_of
from fliptrace.studies.results import markdown_table
from fliptrace.studies.statistics import (
    clustered_share,
    exact_share,
    few_clusters,
    mcnemar_exact,
    repeated_bound,
    shares_to_json,
    sign_flip_test,
)
from fliptrace.studies.study import Column, Report, Table

if TYPE_CHECKING:
    from fliptrace.studies.repeat import RepeatStudy

_PAPER = (
    "The paper (table 1; vLLM 0.29, RTX PRO 6000, 50 prompts × 10, six adapters on GSM8K): atomic 467 of 2,700 outputs "
    "changed (17.30 %), 151 answers, 84 in correctness (45 from right to wrong, 39 back), logits at 14.57 % of "
    "positions; unsplit and deterministic:8 none."
)

_PAPER_MBPP = (
    "The paper (table 1; the same stack, MBPP): atomic 404 of 2,700 outputs changed (14.96 %), 53 in whether the "
    "program passes, logits at 18.30 % of positions; unsplit and deterministic:8 none."
)

_NOT_RECORDED = "not recorded"

ROW_COLUMNS = (
    Column("item", "string", "the item's name"),
    Column("key", "string", "digest of the item's arguments"),
    Column("reduction", "string", "as the engine says it"),
    Column("schedule", "string", "who orders atomics: hardware, a simulated schedule, nobody"),
    Column(
        "mode", "string", "in-process, or the mode of vLLM's own engine: graphs, compiled, eager"
    ),
    Column("batch_size", "int", "requests at once"),
    Column("seed", "int", "schedule seed, where simulated"),
    Column("prompt", "string", "the prompt's name"),
    Column("number", "int", "its row in the data set, from 0"),
    Column("repetition", "int", "from 0"),
    Column("prompt_ids_sha256", "string", "of the prompt's token ids"),
    Column("prompt_tokens", "int", "how many"),
    Column("token_ids", "ints", "generated"),
    Column(
        "selected_logits",
        "floats",
        "raw logit of the selected token, per step; missing: not recorded",
    ),
    Column("margins", "floats", "largest logit less the second, per step"),
    Column("ties", "int", "steps whose two best logits are equal"),
    Column("stop_reason", "string", "why it ended"),
    Column("text", "string", "generated, without special tokens"),
    Column("gold", "string", "the right answer, in lowest terms"),
    Column("answer", "string", "the answer given, in lowest terms; of a program a digest"),
    Column("correct", "bool", "whether it is right"),
    Column("outcome", "string", "what became of a program that was run"),
)
COMPARISON_COLUMNS = (
    Column("reduction", "string", "its identity"),
    Column("prompt", "string", "the prompt's name"),
    Column("repetition", "int", "compared with repetition 0"),
    Column("changed", "bool", "another token sequence"),
    Column("first_divergence", "int", "step of the first other token, from 0"),
    Column("positions", "int", "positions of the matching prefix"),
    Column("logits_differing", "int", "positions whose selected logit has another bit"),
    Column("logits_sum", "float", "sum of |difference| over these positions"),
    Column("logits_largest", "float", "largest |difference|"),
    Column("answer_changed", "bool", "another answer"),
    Column("before", "bool", "repetition 0 is right"),
    Column("after", "bool", "this one is right"),
)


def repeat_report(study: RepeatStudy, rows: Sequence[Row]) -> Report:
    """Say what repetitions changed, per reduction."""
    compared = list(comparisons_of(rows))
    names = [identity_of(name) for name in study.reductions]
    found = {name: _of_reduction(name, rows, compared) for name in names}
    shown = [entry for entry in found.values() if entry["comparisons"]]
    lines = _lines(shown)
    if any(str(row["schedule"]).startswith("simulated") for row in rows):
        lines += [
            "",
            (
                "Arrival orders of atomics were simulated: each repetition took a schedule seed of its own (column "
                "seed). Shares under atomic depend on that simulation, not on a GPU's scheduler."
            ),
        ]
    lines += mode_lines(rows)
    if study.task.startswith("gsm8k:"):
        lines += ["", _PAPER]
    if study.task.startswith("mbpp:"):
        lines += ["", _PAPER_MBPP]
        if study.writes_programs and not study.run_programs:
            lines += ["", "Answers are programs, compared as texts; none was run (--run-programs)."]
    unrepeatable = [name for name, entry in found.items() if is_repeatable(name) and _varied(entry)]
    if unrepeatable:
        lines += [
            "",
            (
                f"**{', '.join(unrepeatable)} sums in one order by construction and did not repeat:** something else "
                "in this stack varies, or the kernel that ran is not the one that was asked for."
            ),
        ]
    return Report(
        title=f"Repeated greedy generation: {study.task.partition(':')[0]}",
        lines=lines,
        summary={
            "study": study.name,
            "reductions": {name: shares_to_json(entry) for name, entry in found.items()},
        },
        tables=(
            Table("rows", ROW_COLUMNS, rows),
            Table("comparisons", COMPARISON_COLUMNS, [each.to_json() for each in compared]),
        ),
        figure=_figure(shown) if shown else None,
        unrepeatable=unrepeatable,
    )


def _varied(entry: dict[str, Any]) -> bool:
    return bool(entry["changed"].hits or (entry["logits"] and entry["logits"].hits))


def _by_prompt(compared: Iterable[RepeatComparison]) -> list[list[RepeatComparison]]:
    groups: dict[str, list[RepeatComparison]] = {}
    for each in compared:
        groups.setdefault(each.prompt, []).append(each)
    return list(groups.values())


def _of_reduction(
    name: str, rows: Sequence[Row], everything: Sequence[RepeatComparison]
) -> dict[str, Any]:
    groups = _by_prompt(each for each in everything if each.reduction == name)
    compared = [each for group in groups for each in group]
    sizes = [len(group) for group in groups]
    # Engines that give no logits leave none to compare.
    scored_groups = [
        [each for each in group if each.logits_differing is not None] for group in groups
    ]
    positions = [sum(each.positions for each in group) for group in scored_groups]
    first = [row for row in rows if row["reduction"] == name and row["repetition"] == 0]
    scored = [row["correct"] for row in first if row["correct"] is not None]
    judged = [
        [each for each in group if each.before is not None and each.after is not None]
        for group in groups
    ]
    lost = [sum(bool(e.before and not e.after) for e in group) for group in judged]
    won = [sum(bool(e.after and not e.before) for e in group) for group in judged]
    answered = [[each for each in group if each.answer_changed is not None] for group in groups]
    return {
        "reduction": name,
        "repeatable_by_construction": is_repeatable(name),
        "prompts": len(groups),
        "comparisons": len(compared),
        "changed": clustered_share([sum(e.changed for e in group) for group in groups], sizes),
        "prompts_changed": exact_share(
            sum(any(e.changed for e in group) for group in groups), len(groups)
        ),
        "prompts_any_bit": exact_share(
            sum(any(e.changed or e.logits_differing for e in group) for group in groups),
            len(groups),
        ),
        "first_divergences": sorted(
            e.first_divergence for e in compared if e.first_divergence is not None
        ),
        "logits": clustered_share(
            [sum(e.logits_differing or 0 for e in group) for group in scored_groups], positions
        )
        if any(scored_groups)
        else None,
        "logits_mean": sum(e.logits_sum or 0.0 for e in compared) / max(1, sum(positions)),
        "logits_largest": max((e.logits_largest or 0.0 for e in compared), default=0.0),
        "answers": clustered_share(
            [sum(bool(e.answer_changed) for e in group) for group in answered],
            [len(group) for group in answered],
        ),
        "right_to_wrong": sum(lost),
        "wrong_to_right": sum(won),
        "judged": sum(map(len, judged)),
        "transitions_p": sign_flip_test([up - down for up, down in zip(won, lost, strict=True)]),
        "transitions_mcnemar": mcnemar_exact(sum(lost), sum(won)),
        "right": exact_share(sum(scored), len(scored)),
    }


def _lines(shown: Sequence[dict[str, Any]]) -> list[str]:
    if not shown:
        return ["No repetition has been compared yet."]
    header = (
        "reduction",
        "outputs changed",
        "prompts with a change",
        "first change at step (quartiles)",
        "selected logits changed",
        "mean, largest change",
        "answers changed",
        "right → wrong",
        "wrong → right",
        "right at repetition 0",
    )
    rows = [
        (
            entry["reduction"],
            str(entry["changed"]),
            str(entry["prompts_changed"]),
            _quartiles(entry["first_divergences"]),
            str(entry["logits"] or _NOT_RECORDED),
            f"{entry['logits_mean']:.3g}, {entry['logits_largest']:.3g}"
            if entry["logits"]
            else _NOT_RECORDED,
            str(entry["answers"]),
            str(entry["right_to_wrong"]) if entry["judged"] else "not scored",
            str(entry["wrong_to_right"]) if entry["judged"] else "not scored",
            str(entry["right"]) if entry["right"].trials else "not scored",
        )
        for entry in shown
    ]
    lines = markdown_table(header, rows)
    lines += [
        "",
        (
            "Intervals (95 %): over comparisons by a bootstrap of whole prompts, over prompts exact (Clopper-Pearson; "
            f"one-sided at 0 and at all).{few_clusters(max(entry['prompts_any_bit'].trials for entry in shown))} "
            "Logits: positions of the matching prefix, the first divergent one excluded."
        ),
    ]
    for entry in shown:
        name, prompts = entry["reduction"], entry["prompts_any_bit"]
        if not _varied(entry):
            lines.append(
                f"- {name}: no token{' and no selected logit' if entry['logits'] else ''} changed in "
                f"{entry['comparisons']:,} comparisons, "
                f"{prompts.trials:,} prompts; repeatable in these runs: {repeated_bound(prompts)}."
            )
        if entry["right_to_wrong"] or entry["wrong_to_right"]:
            lines.append(
                f"- {name}: {entry['right_to_wrong']} from right to wrong against {entry['wrong_to_right']} back: "
                f"p = {entry['transitions_p']:.3g} with prompts as units (sign flips), "
                f"{entry['transitions_mcnemar']:.3g} by McNemar's exact test, which takes all comparisons for "
                "independent."
            )
    return lines


def _quartiles(steps: Sequence[int]) -> str:
    if not steps:
        return "none"
    if len(steps) == 1:
        return str(steps[0])
    return ", ".join(
        f"{value:g}" for value in plain_statistics.quantiles(steps, n=4, method="inclusive")
    )


def _figure(shown: Sequence[dict[str, Any]]) -> Any:
    from fliptrace.studies.figures import shares_figure

    return shares_figure(
        {
            "outputs changed": {entry["reduction"]: entry["changed"] for entry in shown},
            "prompts with a change": {
                entry["reduction"]: entry["prompts_changed"] for entry in shown
            },
            "selected logits changed": {
                entry["reduction"]: entry["logits"] for entry in shown if entry["logits"]
            },
        },
        title="Changed between repetitions of the same greedy request",
    )
