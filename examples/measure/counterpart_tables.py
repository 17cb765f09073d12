"""The sections of counterparts.py about outputs: the paper's tables 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from counterpart_rows import NOTHING, percent, prose, rows_of, share, table

from fliptrace.studies import batch_comparisons, repeat
from fliptrace.studies.decide import pairs_of
from fliptrace.studies.engines import is_repeatable
from fliptrace.studies.statistics import exact_share

_PAPER_SHARE = 467 / 2_700
_TABLE_1 = table(
    (
        "the paper, GSM8K",
        "outputs changed",
        "selected logits changed",
        "answers changed",
        "correctness changed",
    ),
    [
        ("atomic", "467 of 2,700 (17.30 %)", "14.57 %", "151", "84: 45 lost, 39 won"),
        ("atomic, Llama, rank 16", "105 of 450 (23.3 %)", NOTHING, NOTHING, "18"),
        ("atomic, Nemotron, rank 16", "77 of 450 (17.1 %)", NOTHING, NOTHING, "21"),
        ("unsplit, deterministic:8", "0 of 2,700 each", "0", "0", "0"),
    ],
)


def repetitions(results: Path) -> list[str]:
    """Table 1: greedy generations repeated."""
    found, changed = [], []
    for rank in (16, 32):
        rows = rows_of(results, f"h200-study-repeat-{rank}")
        for reduction in dict.fromkeys(row["reduction"] for row in rows):
            groups = _by_prompt([row for row in rows if row["reduction"] == reduction])
            found.append(_repeated(rank, reduction, rows, groups))
            changed.append((reduction, [each.changed for group in groups for each in group]))
    if not found:
        return _early_repetitions(results)
    header = (
        "rank",
        "reduction",
        "outputs changed",
        "prompts with a change",
        "selected logits changed",
        "answers changed",
        "lost, won",
        "right at repetition 0",
        "steps between equal logits",
    )
    return [
        *_TABLE_1,
        *prose(
            "Here: `trace-study repeat --engine vllm`, GSM8K test prompts drawn with seed 0, at most",
            "150 tokens (the paper: 4,096), CUDA graphs, one request at a time.",
        ),
        "",
        *table(header, found),
        *prose(
            _against_the_paper(changed),
            "Why shares differ between the stacks was not taken apart; one reason is in the last column: in that share",
            "of steps the two best logits are exactly equal in BF16, so that any difference decides.",
        ),
    ]


def _by_prompt(rows: Sequence[dict[str, Any]]) -> list[list[repeat.RepeatComparison]]:
    groups: dict[str, list[repeat.RepeatComparison]] = {}
    for each in repeat.comparisons_of(rows):
        groups.setdefault(each.prompt, []).append(each)
    return list(groups.values())


def _repeated(
    rank: int,
    reduction: str,
    everything: Sequence[dict[str, Any]],
    groups: Sequence[Sequence[repeat.RepeatComparison]],
) -> tuple[str, ...]:
    first = [row for row in everything if row["reduction"] == reduction and row["repetition"] == 0]
    compared = [each for group in groups for each in group]
    lost = sum(bool(each.before and not each.after) for each in compared)
    won = sum(bool(each.after and not each.before) for each in compared)
    steps = sum(len(row["token_ids"]) for row in first)
    return (
        str(rank),
        f"`{reduction}`",
        share(groups, lambda each: (each.changed, 1)),
        str(exact_share(sum(any(e.changed for e in group) for group in groups), len(groups))),
        share(groups, lambda each: (each.logits_differing or 0, each.positions)),
        f"{sum(bool(each.answer_changed) for each in compared):,}",
        f"{lost}, {won}",
        str(exact_share(sum(bool(row["correct"]) for row in first), len(first))),
        percent(sum(row["ties"] or 0 for row in first), steps),
    )


def _against_the_paper(changed: Sequence[tuple[str, Sequence[bool]]]) -> str:
    """Say in what direction the shares differ from the paper's; (reduction, whether each output changed)."""
    said = []
    atomic = [one for name, ones in changed if not is_repeatable(name) for one in ones]
    fixed = [one for name, ones in changed if is_repeatable(name) for one in ones]
    if atomic:
        more = "more" if sum(atomic) / len(atomic) > _PAPER_SHARE else "less"
        said.append(f"Atomics change outputs {more} often than in the paper.")
    if fixed and not any(fixed):
        said.append("Orders that are fixed by construction change none, in either stack.")
    elif fixed:
        said.append(
            f"Orders that are fixed by construction changed {sum(fixed)} of {len(fixed):,} outputs."
        )
    return " ".join(said)


def _early_repetitions(results: Path) -> list[str]:
    """Table 1 from repeats that were counted before the study ran on engines of vLLM's own."""
    rows = rows_of(results, "h200-vllm-repeat")
    lines, everything = [], []
    for reduction in dict.fromkeys(row["reduction"] for row in rows):
        groups: dict[int, list[bool]] = {}
        for row in rows:
            if row["reduction"] == reduction and row["repeat"]:
                groups.setdefault(row["prompt"], []).append(row["first_change"] is not None)
        several = list(groups.values())
        name = {"vllm": "vllm-own"}.get(reduction, reduction)
        prompts = exact_share(sum(map(any, several)), len(several))
        lines.append((f"`{name}`", share(several, lambda one: (one, 1)), str(prompts)))
        everything.append((name, [one for group in several for one in group]))
    if not lines:
        return []
    return [
        *_TABLE_1,
        *prose(
            "Here: `examples/measure/vllm_shrink.py repeat`, 20 GSM8K test prompts, five repetitions,",
            "at most 128 tokens (the paper: 4,096), CUDA graphs, one request at a time, rank 16.",
        ),
        "",
        *table(("reduction", "outputs changed", "prompts with a change"), lines),
        *prose(_against_the_paper(everything)),
    ]


def decisions(results: Path) -> list[str]:
    """Table 2: yes/no decisions repeated."""
    rows = rows_of(results, "h200-study-decide")
    lines = []
    for reduction in dict.fromkeys(row["reduction"] for row in rows):
        own = [row for row in rows if row["reduction"] == reduction]
        groups: dict[str, list[tuple[Any, Any]]] = {}
        for before, after in pairs_of(own):
            groups.setdefault(before["prompt"], []).append((before, after))
        several = list(groups.values())
        drifts = [abs(one["yes"] - two["yes"]) for group in several for one, two in group]
        first = [row for row in own if row["repetition"] == 0]
        flipped = [any(one["decision"] != two["decision"] for one, two in g) for g in several]
        lines.append(
            (
                f"`{reduction}`",
                share(several, lambda pair: (pair[0]["yes"] != pair[1]["yes"], 1)),
                f"{sum(drifts) / max(1, len(drifts)):.3g}, {max(drifts, default=0.0):.3g}",
                share(several, lambda pair: (pair[0]["decision"] != pair[1]["decision"], 1)),
                str(exact_share(sum(flipped), len(flipped))),
                str(exact_share(sum(bool(row["correct"]) for row in first), len(first))),
            )
        )
    if not lines:
        return []
    header = (
        "",
        "probabilities changed",
        "mean, largest drift",
        "decisions flipped",
        "affected texts",
        "accuracy",
    )
    atomic = ("7,332 of 9,000 (81.47 %)", "0.00143, 0.05672", "7 of 9,000", "2 of 1,000")
    paper = [
        ("the paper, atomic", *atomic, "94.25 %"),
        ("the paper, unsplit", "0 of 9,000", "0, 0", "0", "0", "94.20 %"),
        ("the paper, deterministic:8", "0 of 9,000", "0, 0", "0", "0", "94.30 %"),
    ]
    return [
        *table(header, [*paper, *lines]),
        *prose(
            "The paper: Qwen3-0.6B on Civil Comments, through vLLM's structured decisions, ten times",
            "each. Here: SmolLM2 with a rank-16 adapter that `trace-study train` made, on claims",
            "about word problems (*Is the claimed answer right?*), `trace-study decide --engine",
            "vllm`.",
        ),
        *prose(
            "The tasks and models differ, and with them how near to one half probabilities lie: accuracy",
            "says how hard the task is for its model. A probability counts as changed at its last bit, also",
            "where only the logits of other tokens moved.",
        ),
    ]


def changed_by_arm(rows: Sequence[Any], kinds: Sequence[str]) -> list[tuple[str, ...]]:
    """Return a line per engine: outputs of a batch study that changed, by kind of comparison."""
    compared = list(batch_comparisons.comparisons_of(rows))
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        cells = []
        for kind in kinds:

            def wanted(
                each: batch_comparisons.BatchComparison, arm: str = arm, kind: str = kind
            ) -> bool:
                return (each.arm, each.kind) == (arm, kind)

            cells.append(str(batch_comparisons.counted(compared, wanted).changed))
        lines.append((f"`{arm}`", *cells))
    return lines


def batches(results: Path) -> list[str]:
    """Table 3: batch sizes."""
    lines = changed_by_arm(
        rows_of(results, "h200-study-batch"),
        (
            batch_comparisons.REPETITION,
            batch_comparisons.AGAINST_ALONE,
            batch_comparisons.AGAINST_SMALLER,
        ),
    )
    if not lines:
        return []
    header = ("", "fixed batch, repeated", "across, against batch 1", "between larger batches")
    paper = [
        ("the paper, atomic", "1,748 of 4,608 (37.93 %)", "168 of 384 (43.75 %)", NOTHING),
        ("the paper, unsplit", "0 of 4,608", "152 of 384 (39.58 %)", NOTHING),
        ("the paper, deterministic:8", "0 of 4,608", "150 of 384 (39.06 %)", NOTHING),
    ]
    return [
        *table(header, [*paper, *lines]),
        *prose(
            "The paper: Llama-3.2-3B, 64 prompts, ten repetitions, ranks 16 and 32,",
            "`VLLM_BATCH_INVARIANT` off. Here: `trace-study batch`, SmolLM2, rank 16, 64 prompts of",
            "which 16 also run alone, 150 tokens each; `VLLM_BATCH_INVARIANT` is on where the arm",
            "says so.",
        ),
        *prose(
            "In the paper a fixed order makes one batch size repeat, and no more: across sizes other kernels",
            "change. Which module is the first to depend on the neighbours is what",
            "[`--locate`](how-to/trace-study-batch.md#what-first-depends-on-the-neighbours) answers.",
        ),
    ]
