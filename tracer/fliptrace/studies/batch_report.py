"""What a batch study shows, per reduction and switch: the counterpart of the paper's table 3, and beyond it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fliptrace.pair.engines import VLLM_OWN
from fliptrace.studies.batch_comparisons import (
    AGAINST_ALONE,
    AGAINST_SMALLER,
    KINDS,
    LOCATE,
    PREFIXES,
    REPETITION,
    BatchComparison,
    Counted,
    comparisons_of,
    counted,
)
from fliptrace.studies.engines import is_repeatable
from fliptrace.studies.items import Row
from fliptrace.studies.results import markdown_table
from fliptrace.studies.statistics import repeated_bound
from fliptrace.studies.study import Column, Report, Table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from fliptrace.studies.batch import BatchStudy

_PAPER = (
    "The paper (table 3; vLLM 0.29, RTX PRO 6000, Llama-3.2-3B, 64 prompts × 10, batch 1, 16, 32, 64, ranks 16 and 32, "
    "switch off): within a batch size atomic 1,748 of 4,608 outputs changed (37.93 %), unsplit, deterministic:8 none; "
    "against batch 1 atomic 168 of 384 (43.75 %), unsplit 152 (39.58 %), deterministic:8 150 (39.06 %)."
)
#: Kinds of comparisons between passes that a batch-invariant stack could not tell apart.
_ACROSS = tuple(kind for kind in KINDS if kind != REPETITION)

ROW_COLUMNS = (
    Column("item", "string", "the item's name"),
    Column("key", "string", "digest of the item's arguments"),
    Column("arm", "string", "reduction and switch"),
    Column("reduction", "string", "long name, or vllm-own"),
    Column("batch_invariant", "bool", "VLLM_BATCH_INVARIANT was on"),
    Column("batch", "int", "requests at once"),
    Column("arrangement", "string", "fixed, what was varied, or locate"),
    Column("repetition", "int", "from 0"),
    Column("order", "ints", "prompts as they were handed in, every batch of them together"),
    Column("prompts", "strings", "the prompts' names; what follows is in their order"),
    Column("prompt_ids_sha256", "strings", "of each prompt's token ids"),
    Column("prompt_tokens", "ints", "of each prompt"),
    Column("cached_tokens", "ints", "of each prompt, read from the prefix cache"),
    Column("token_ids", "int_lists", "generated for each prompt"),
    Column("requests", "objects", "locate: what each request alone has that the batch has not"),
)
OUTPUT_COLUMNS = (
    Column("item", "string", "the item's name"),
    Column("arm", "string", "reduction and switch"),
    Column("reduction", "string", "long name, or vllm-own"),
    Column("batch_invariant", "bool", "VLLM_BATCH_INVARIANT was on"),
    Column("batch", "int", "requests at once"),
    Column("arrangement", "string", "fixed, or what was varied"),
    Column("repetition", "int", "from 0"),
    Column("prompt", "string", "the prompt's name"),
    Column("prompt_ids_sha256", "string", "of the prompt's token ids"),
    Column("prompt_tokens", "int", "how many"),
    Column("cached_tokens", "int", "of the prompt, read from the prefix cache"),
    Column("token_ids", "ints", "generated"),
)
COMPARISON_COLUMNS = (
    Column("arm", "string", "reduction and switch"),
    Column("kind", "string", "what is compared"),
    Column("prompt", "string", "the prompt's name"),
    Column("reference_batch", "int", "requests at once in the reference"),
    Column("candidate_batch", "int", "requests at once in the candidate"),
    Column("repetition", "int", "of the candidate"),
    Column("changed", "bool", "another token sequence"),
    Column("first_divergence", "int", "step of the first other token, from 0"),
)
LOCATED_COLUMNS = (
    Column("arm", "string", "reduction and switch"),
    Column("prompt", "string", "the prompt's name"),
    Column("same_tokens", "bool", "the tokens alone are those in the batch"),
    Column("calls", "int", "outputs of modules that were compared"),
    Column("module", "string", "the first whose rows differ, None without one"),
    Column("kind", "string", "its class, or shrink"),
    Column("step", "int", "of the forward, 0 is the prefill"),
    Column("operations", "string", "operators that ran in it"),
)


def batch_report(study: BatchStudy, rows: Sequence[Row]) -> Report:
    """Say what repetitions, batch sizes and neighbours changed, per arm."""
    compared = list(comparisons_of(rows))
    located = [
        {"arm": row["arm"], **request}
        for row in rows
        if row["arrangement"] == LOCATE
        for request in row["requests"]
    ]
    found = {}
    for arm in study.arms():
        own = [each for each in compared if each.arm == str(arm)]
        if own:
            found[str(arm)] = {
                kind: counted(own, lambda each, kind=kind: each.kind == kind)  # type: ignore[misc]
                for kind in KINDS
            }
    unrepeatable = [
        str(arm)
        for arm in study.arms()
        if arm.reduction != VLLM_OWN
        and is_repeatable(arm.reduction)
        and str(arm) in found
        and found[str(arm)][REPETITION].changed.hits
    ]
    lines = _lines(found, compared, unrepeatable)
    lines += _prefix_lines(rows)
    lines += _located_lines(located)
    if study.task.startswith("gsm8k:"):
        lines += ["", _PAPER]
    outputs = [
        {
            **row,
            "prompt": prompt,
            "prompt_ids_sha256": ids_hash,
            "prompt_tokens": size,
            "cached_tokens": cached,
            "token_ids": ids,
        }
        for row in rows
        if row["arrangement"] != LOCATE
        for prompt, ids_hash, size, cached, ids in zip(
            row["prompts"],
            row.get("prompt_ids_sha256") or [None] * len(row["prompts"]),
            row["prompt_tokens"],
            row["cached_tokens"],
            row["token_ids"],
            strict=True,
        )
    ]
    return Report(
        title=f"Batches of several sizes: {study.task.partition(':')[0]}",
        lines=lines,
        summary={
            "study": study.name,
            "arms": {name: _to_json(entry) for name, entry in found.items()},
            "located": located,
        },
        tables=(
            Table("outputs", OUTPUT_COLUMNS, outputs),
            Table("comparisons", COMPARISON_COLUMNS, [each.to_json() for each in compared]),
            Table(
                "located",
                LOCATED_COLUMNS,
                [
                    {**each, "operations": ", ".join(each["operations"] or ()) or None}
                    for each in located
                ],
            ),
        ),
        figure=_figure(found) if found else None,
        unrepeatable=unrepeatable,
        row_columns=ROW_COLUMNS,
    )


def _to_json(entry: Mapping[str, Counted]) -> dict[str, Any]:
    return {
        kind: {
            "outputs": each.changed.to_json(),
            "prompts": each.prompts.to_json(),
            "first_divergences": list(each.divergences),
        }
        for kind, each in entry.items()
        if each.changed.trials
    }


def _lines(
    found: Mapping[str, Mapping[str, Counted]],
    compared: Sequence[BatchComparison],
    unrepeatable: Sequence[str],
) -> list[str]:
    if not found:
        return ["No two passes of one engine have run yet."]
    kinds = [kind for kind in KINDS if any(e[kind].changed.trials for e in found.values())]
    lines = ["Outputs whose token sequence changed:", ""]
    lines += markdown_table(
        ("engine", *(_heading(kind) for kind in kinds)),
        [(name, *(str(entry[kind].changed) for kind in kinds)) for name, entry in found.items()],
    )
    lines += ["", "Prompts with any change:", ""]
    lines += markdown_table(
        ("engine", *(_heading(kind) for kind in kinds)),
        [(name, *(str(entry[kind].prompts) for kind in kinds)) for name, entry in found.items()],
    )
    lines += ["", "By batch size, outputs changed (repetitions / against batch 1):", ""]
    sizes = sorted({each.candidate_batch for each in compared})
    lines += markdown_table(
        ("engine", *(f"batch {size}" for size in sizes)),
        [(name, *(_by_size(name, compared, size) for size in sizes)) for name in found],
    )
    lines += [
        "",
        (
            "Intervals (95 %): over outputs by a bootstrap of whole prompts, over prompts exact (Clopper-Pearson; "
            "one-sided at 0 and at all). Prompts of one batch ran together, so they share what that run did."
        ),
        "",
    ]
    for name, entry in found.items():
        lines += _sentences(name, entry, [each for each in compared if each.arm == name])
    if unrepeatable:
        lines += [
            "",
            (
                f"**{', '.join(unrepeatable)} sums in one order by construction and did not repeat at a fixed batch "
                "size:** something else in this stack varies, or the kernel that ran is not the one that was asked for."
            ),
        ]
    return lines


def _heading(kind: str) -> str:
    if kind == REPETITION:
        return "fixed batch, repeated"
    if kind in (AGAINST_ALONE, AGAINST_SMALLER):
        return f"cross-batch, {kind}"
    return f"{kind}, same batch size" if kind in PREFIXES else f"{kind} changed, same batch size"


def _by_size(name: str, compared: Sequence[BatchComparison], size: int) -> str:
    cells = []
    for kind in (REPETITION, AGAINST_ALONE):
        these = [
            each
            for each in compared
            if each.arm == name and each.kind == kind and each.candidate_batch == size
        ]
        cells.append(f"{sum(e.changed for e in these):,} of {len(these):,}" if these else "–")
    return " / ".join(cells)


def _sentences(
    name: str, entry: Mapping[str, Counted], compared: Sequence[BatchComparison]
) -> list[str]:
    lines = []
    across = counted(compared, lambda each: each.kind in _ACROSS)
    fixed = entry[REPETITION]
    if fixed.changed.trials and not fixed.changed.hits:
        lines.append(
            f"- {name}: no output changed in {fixed.changed.trials:,} repetitions at a fixed batch size, "
            f"{fixed.prompts.trials:,} prompts; repeatable in these runs. {_bound(fixed)}"
        )
    if across.changed.trials and not across.changed.hits:
        lines.append(
            f"- {name}: no output changed with batch size, order, neighbours or prefix, as far as they were varied, in "
            f"{across.changed.trials:,} comparisons, {across.prompts.trials:,} prompts. {_bound(across)}"
        )
    elif across.changed.hits:
        steps = across.divergences
        lines.append(
            f"- {name}: outputs depend on the batch in {across.prompts.hits:,} of {across.prompts.trials:,} prompts; "
            f"the first token that differs is at step {steps[0]} to {steps[-1]} (from 0)."
            + (
                " What changes between repetitions anyway is among it."
                if fixed.changed.hits
                else ""
            )
        )
    return lines


def _bound(found: Counted) -> str:
    if found.prompts.interval is None:
        return ""
    return repeated_bound(found.prompts).capitalize() + "."


def _prefix_lines(rows: Sequence[Row]) -> list[str]:
    """Say what was read from prefix caches, so that a warm pass that read nothing is not taken for one that did."""
    lines = []
    for kind in PREFIXES:
        passes = [row for row in rows if row["arrangement"] == kind]
        if passes:
            read = sum(sum(row["cached_tokens"]) for row in passes)
            of = sum(sum(row["prompt_tokens"]) for row in passes)
            nothing = "; nothing was warm, as these prompts fill no block" if not read else ""
            lines.append(
                f"- {kind}: {read:,} of {of:,} prompt tokens were read from the cache{nothing}."
            )
    return lines


def _located_lines(located: Sequence[Mapping[str, Any]]) -> list[str]:
    if not located:
        return []
    lines = ["", "## What first depends on the neighbours", ""]
    for arm in dict.fromkeys(each["arm"] for each in located):
        these = [each for each in located if each["arm"] == arm]
        hit = [each for each in these if each["module"] is not None]
        if not hit:
            lines.append(
                f"- {arm}: nothing, in {len(these)} prompts and {sum(each['calls'] for each in these):,} compared "
                "outputs of modules and shrinks (64-bit digests of rows, eager)."
            )
            continue
        kinds = Counter(
            (each["kind"], ", ".join(each["operations"] or ()) or "operators not seen")
            for each in hit
        )
        shrinks = sum(each["kind"] == "shrink" for each in hit)
        lines.append(
            f"- {arm}: in {len(hit)} of {len(these)} prompts. "
            + "; ".join(
                f"{count} × {kind} ({operations})"
                for (kind, operations), count in kinds.most_common()
            )
            + f". A LoRA shrink was the first in {shrinks}."
        )
    rows = [
        (
            each["arm"],
            each["prompt"],
            each["module"] or "none",
            "" if each["step"] is None else str(each["step"]),
            "same" if each["same_tokens"] else "changed",
        )
        for each in located
    ]
    return [*lines, "", *markdown_table(("engine", "prompt", "module", "step", "tokens"), rows)]


def _figure(found: Mapping[str, Mapping[str, Counted]]) -> Figure:
    from fliptrace.studies.figures import shares_figure

    return shares_figure(
        {
            _heading(kind): {name: entry[kind].changed for name, entry in found.items()}
            for kind in KINDS
            if any(entry[kind].changed.trials for entry in found.values())
        },
        title="Outputs that changed within and across batch sizes",
    )
