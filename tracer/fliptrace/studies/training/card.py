"""The card of a trained adapter: what it is, of what it was made, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_LABELLED = (
    "Empty and double texts are taken out; test and validation rows are drawn with the seed, each with the classes' "
    "shares of all; test rows (`test.csv`) are never trained on."
)
_SPLITS = {
    "gsm8k": "5 % of the file's rows, drawn with the seed, are for validation; the rest is trained on. Calculator "
    "annotations are taken out, and `Final answer: N` stands in the place of `#### N`.",
    "mbpp": "MBPP's own: task_id 601 to 974 for training, 511 to 600 for validation.",
    "csv": _OF_LABELLED,
    "dataset": _OF_LABELLED,
}


def card(record: Mapping[str, Any]) -> str:
    """Return the card as Markdown.

    Args:
        record: what training.json holds.
    """
    settings, rows, base = record["settings"], record["rows"], record["base"]
    environment = record["environment"]
    place = environment.get("gpu", {}).get("name") or environment.get("processor")
    versions = environment.get("versions", {})
    losses = [
        f"| {epoch} | {'' if learnt is None else f'{learnt:.4f}'} | {judged:.4f} |"
        for epoch, (learnt, judged) in enumerate(record["losses"])
    ]
    kind = settings["task"].partition(":")[0]
    lines = [
        "---",
        f"base_model: {base['name']}",
        "library_name: peft",
        "---",
        "",
        f"# LoRA adapter, rank {settings['rank']}, {kind}",
        "",
        "Made by `trace-study train` to measure how repeatable LoRA inference is, not to be good at its task.",
        "",
        f"- base model: {base['name']} ({base['architecture']}, sha256 {base['sha256']}), {record['dtype']}",
        f"- data: {settings['task']}, sha256 {record['data_sha256']}",
        (
            f"- rows: {rows['training']:,} for training, {rows['validation']:,} for validation, {rows['test']:,} for a "
            f"test; left out: {rows['too_long']:,} of more than {settings['max_length']} tokens, "
            f"{rows['empty_or_double']:,} empty or double"
        ),
        f"- splits: {_SPLITS[kind]} Seed {settings['seed']}.",
        f"- LoRA: r = {settings['rank']}, alpha = {record['alpha']}, no dropout, on {_listed(record['adapted'])}",
        (
            f"- optimiser: AdamW without weight decay, learning rate {settings['learning_rate']:g} (3 % warm-up, then "
            f"linear to zero), batch {settings['batch']}, at most {settings['epochs']} epochs, gradients clipped at 1; "
            "LoRA weights in FP32 while training, loss of answers alone"
        ),
        f"- {record['steps']:,} steps in {record['seconds']:g} s on {place}, torch {versions.get('torch')}",
        f"- kept: epoch {record['best_epoch']}, the lowest validation loss",
        "",
        "| epoch | training loss | validation loss |",
        "|---|---|---|",
        *losses,
        "",
        (
            "The licences of the base model and of the data apply. The same command repeats this bit by bit on a CPU; "
            "on a GPU it need not."
        ),
        "",
    ]
    return "\n".join(lines)


def _listed(targets: str | list[str]) -> str:
    return targets if isinstance(targets, str) else ", ".join(targets)
