"""The sections of counterparts.py about outputs: the paper's tables 1, 2 and 3."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from counterpart_rows import NOTHING, percent, prose, rows_of, share, table

from fliptrace.studies import batch_comparisons, repeat
from fliptrace.studies.decide import pairs_of
from fliptrace.studies.engines import is_repeatable
from fliptrace.studies.statistics import clustered_share, exact_share

_PAPER_SHARE = 467 / 2_700
#: A probability that moved by less, moved by the rounding of the logarithm.
_LAST_BITS = 1e-6
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
        ("unsplit, deterministic:8", "0 of 2,700 each", NOTHING, "0", "0"),
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
            counts = [[(each.changed, 1) for each in group] for group in groups]
            changed.append((f"rank {rank} `{reduction}`", reduction, counts))
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
        "first change at a tie",
        "steps with a tie",
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
            "Why shares differ between the stacks was not taken apart. A tie: the two best logits are exactly equal in",
            "BF16, in one of the two executions; nearly all first changes are at one. The paper says nothing of ties.",
        ),
        *prose(
            "This model is almost never right, so hardly a right answer could be lost: *lost, won* is no counterpart",
            "of the paper's 84. An answer that only one of the two texts has counts as changed; where neither has one,",
            "none is compared. Answers are shares of comparisons, ties of the steps of each prompt's first repetition;",
            "the intervals of both draw whole prompts.",
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
    answered = [[each for each in group if each.answer_changed is not None] for group in groups]
    return (
        str(rank),
        f"`{reduction}`",
        share(groups, lambda each: (each.changed, 1)),
        str(exact_share(sum(any(e.changed for e in group) for group in groups), len(groups))),
        share(groups, lambda each: (each.logits_differing or 0, each.positions)),
        share(answered, lambda each: (bool(each.answer_changed), 1)),
        f"{lost}, {won}",
        str(exact_share(sum(bool(row["correct"]) for row in first), len(first))),
        _at_ties([row for row in everything if row["reduction"] == reduction]),
        share([[row] for row in first], lambda row: (row["ties"] or 0, len(row["token_ids"]))),
    )


def _at_ties(rows: Sequence[dict[str, Any]]) -> str:
    """Count the first changed tokens where one of the two executions had a tie."""
    first = {row["prompt"]: row for row in rows if not row["repetition"]}
    found: dict[str, list[bool]] = {}
    for row in rows:
        before = first.get(row["prompt"])
        if before is None or not row["repetition"] or "margins" not in row:
            continue
        step = repeat.first_divergence(before["token_ids"], row["token_ids"])
        if step is not None and step < min(len(before["margins"]), len(row["margins"])):
            tie = 0 in (before["margins"][step], row["margins"][step])
            found.setdefault(row["prompt"], []).append(tie)
    return share(list(found.values()), lambda tie: (tie, 1)) if found else NOTHING


def _against_the_paper(
    changed: Sequence[tuple[str, str, Sequence[Sequence[tuple[bool, int]]]]],
) -> str:
    """Say on what side of the paper's share the intervals lie.

    Args:
        changed: name, reduction and, per prompt, whether each output changed (of one).
    """
    sides: dict[str, list[str]] = {"above": [], "around": [], "below": []}
    fixed = []
    for name, reduction, groups in changed:
        hits = [sum(hit for hit, _ in group) for group in groups]
        if is_repeatable(reduction):
            fixed += [hit for group in groups for hit, _ in group]
            continue
        interval = clustered_share(hits, [len(group) for group in groups]).interval
        if interval is not None:
            above, below = interval.low > _PAPER_SHARE, interval.high < _PAPER_SHARE
            sides["above" if above else "below" if below else "around"].append(name)
    said = [
        f"Intervals {where} the paper's 17.30 %: {', '.join(names)}."
        for where, names in sides.items()
        if names
    ]
    if fixed and not any(fixed):
        said.append("Orders that are fixed by construction changed none, in either stack.")
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
        everything.append((f"`{name}`", name, [[(one, 1) for one in group] for group in several]))
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
    lines: list[tuple[str, ...]] = []
    flips: list[tuple[Any, Any]] = []
    last_bits = moved = 0
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
                str(exact_share(sum(row["yes"] == 0.5 for row in first), len(first))),
            )
        )
        both = [pair for group in several for pair in group]
        flips += [pair for pair in both if pair[0]["decision"] != pair[1]["decision"]]
        last_bits += sum(0 < drift < _LAST_BITS for drift in drifts)
        moved += sum(drift > 0 for drift in drifts)
    if not lines:
        return []
    at_half = sum(0.5 in (before["yes"], after["yes"]) for before, after in flips)
    header = (
        "",
        "probabilities changed",
        "mean, largest drift",
        "decisions flipped",
        "affected texts",
        "accuracy",
        "first probability exactly 0.5",
    )
    atomic = ("7,332 of 9,000 (81.47 %)", "0.00143, 0.05672", "7 of 9,000", "2 of 1,000")
    paper = [
        ("the paper, atomic", *atomic, "94.25 %", NOTHING),
        ("the paper, unsplit", "0 of 9,000", "0, 0", "0", "0", "94.20 %", NOTHING),
        ("the paper, deterministic:8", "0 of 9,000", "0, 0", "0", "0", "94.30 %", NOTHING),
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
            "Tasks and models differ, and with them how near to one half probabilities lie. In the paper all 7 flips",
            f"begin at exactly 0.5, in 2 comments; here {at_half} of {len(flips)} flips have 0.5, two equal BF16",
            "logits, at one end, and the last column says how many texts begin there. Reductions had other counts of",
            "texts, so their accuracies are not to be compared; saying the commoner label every time is right in",
            f"{_commoner(rows)}.",
        ),
        *prose(
            "The mean drift is over all comparisons, unchanged ones too. A probability counts as changed at its last",
            f"bit, also where only the logits of other tokens moved: {last_bits} of the {moved:,} changes here are",
            f"below {_LAST_BITS:g}. The paper does not say how many of its changes are.",
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


def _commoner(rows: Sequence[dict[str, Any]]) -> str:
    """Return how often the commoner label is right among all texts."""
    labels = {row["prompt"]: row.get("label") for row in rows}
    count = Counter(labels.values()).most_common(1)[0][1]
    return f"{count} of {len(labels)} ({percent(count, len(labels))})"


def batches(results: Path) -> list[str]:
    """Table 3: batch sizes."""
    rows = rows_of(results, "h200-study-batch")
    compared = list(batch_comparisons.comparisons_of(rows))
    kinds = (
        batch_comparisons.REPETITION,
        batch_comparisons.AGAINST_ALONE,
        batch_comparisons.AGAINST_SMALLER,
    )
    lines = [
        (arm, fixed, across, _by_size(compared, arm.strip("`")), between)
        for arm, fixed, across, between in changed_by_arm(rows, kinds)
    ]
    if not lines:
        return []
    header = (
        "",
        "fixed batch, repeated",
        "across, against batch 1",
        "of these by size",
        "between larger batches",
    )
    paper = [
        ("the paper, atomic", "1,748 of 4,608 (37.93 %)", "168 of 384 (43.75 %)", NOTHING, NOTHING),
        ("the paper, unsplit", "0 of 4,608", "152 of 384 (39.58 %)", NOTHING, NOTHING),
        ("the paper, deterministic:8", "0 of 4,608", "150 of 384 (39.06 %)", NOTHING, NOTHING),
    ]
    return [
        *table(header, [*paper, *lines]),
        *prose(
            "The paper: Llama-3.2-3B, 64 prompts, ten repetitions, ranks 16 and 32,",
            "`VLLM_BATCH_INVARIANT` off. Here: `trace-study batch`, SmolLM2, rank 16, 64 prompts of",
            "which 16 also run alone, 150 tokens each, three repetitions (batch 1 repeated where a row counts 416);",
            "`VLLM_BATCH_INVARIANT` is on where the arm says so. `vllm-own` stands beside the paper's atomic: it",
            "sums 64 splits wherever a forward has fewer than 128 rows. `atomic:8` was not run.",
        ),
        *prose(
            "In the paper a fixed order makes one batch size repeat, and no more; so it does here. Intervals are over",
            "prompts, for these three sizes: another size could give any share, as the counts by size show. Across",
            "sizes, `vllm-own` changes by its own repetitions, too.",
            "Which module is the first to depend on the neighbours is what",
            "[`--locate`](how-to/trace-study-batch.md#what-first-depends-on-the-neighbours) answers.",
        ),
    ]


def _by_size(compared: Sequence[batch_comparisons.BatchComparison], arm: str) -> str:
    """Say how many outputs of each batch size differ from those alone."""
    sizes: dict[int, list[bool]] = {}
    for each in compared:
        if (each.arm, each.kind) == (arm, batch_comparisons.AGAINST_ALONE):
            sizes.setdefault(each.candidate_batch, []).append(each.changed)
    return ", ".join(f"{size}: {sum(sizes[size])} of {len(sizes[size])}" for size in sorted(sizes))
