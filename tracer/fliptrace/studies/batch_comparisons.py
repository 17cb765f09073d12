"""Which outputs of a batch study are compared with which, and what that gives per arm.

Repetitions of one batch size are compared with the first; the first of a larger batch with the first of a smaller one,
for the prompts that both have; what was varied with the first of the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fliptrace.studies.items import Row
from fliptrace.studies.repeat import first_divergence
from fliptrace.studies.statistics import Share, clustered_share, exact_share

#: What a pass did: prompts in their order; a look for the first module that differs.
FIXED, LOCATE = "fixed", "locate"
VARIATIONS = ("order", "neighbours", "prefix")
PREFIXES = ("cold prefix", "warm prefix")
#: Kinds of comparisons, in the order of the table.
REPETITION, AGAINST_ALONE, AGAINST_SMALLER = (
    "repetition",
    "against batch 1",
    "between larger batches",
)
KINDS = (REPETITION, AGAINST_ALONE, AGAINST_SMALLER, *VARIATIONS[:2], *PREFIXES)


@dataclass(frozen=True, slots=True)
class BatchComparison:
    """One prompt's output in two passes of one arm.

    Attributes:
        arm: reduction and switch.
        kind: one of KINDS.
        prompt: its name.
        reference_batch: size of the batch in the reference; candidate_batch: in the candidate.
        repetition: of the candidate.
        changed: the token sequences differ.
        first_divergence: step (0-based) of the first token that differs, None without one.
    """

    arm: str
    kind: str
    prompt: str
    reference_batch: int
    candidate_batch: int
    repetition: int
    changed: bool
    first_divergence: int | None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def comparisons_of(rows: Sequence[Row]) -> Iterator[BatchComparison]:
    """Yield the comparisons that the rows allow."""
    passes = [row for row in rows if row["arrangement"] != LOCATE]
    first = {
        (row["arm"], row["batch"]): row
        for row in passes
        if row["arrangement"] == FIXED and not row["repetition"]
    }
    for row in passes:
        reference = first.get((row["arm"], row["batch"]))
        if reference is None:
            continue
        if row["arrangement"] != FIXED:
            yield from compare_rows(reference, row, row["arrangement"])
        elif row["repetition"]:
            yield from compare_rows(reference, row, REPETITION)
    for (arm, batch), reference in first.items():
        for (other, larger), row in first.items():
            if other == arm and larger > batch:
                kind = AGAINST_ALONE if batch == 1 else AGAINST_SMALLER
                yield from compare_rows(reference, row, kind)


def compare_rows(
    reference: Mapping[str, Any], candidate: Mapping[str, Any], kind: str
) -> Iterator[BatchComparison]:
    """Compare two passes prompt by prompt, where both have a prompt."""
    outputs = dict(zip(candidate["prompts"], candidate["token_ids"], strict=True))
    for prompt, before in zip(reference["prompts"], reference["token_ids"], strict=True):
        if prompt in outputs:
            divergence = first_divergence(before, outputs[prompt])
            yield BatchComparison(
                arm=reference["arm"],
                kind=kind,
                prompt=prompt,
                reference_batch=reference["batch"],
                candidate_batch=candidate["batch"],
                repetition=candidate["repetition"],
                changed=divergence is not None,
                first_divergence=divergence,
            )


@dataclass(frozen=True, slots=True)
class Counted:
    """What comparisons of one kind gave.

    Attributes:
        changed: outputs, with an interval over prompts as clusters.
        prompts: prompts with any change, exact.
        divergences: steps of first changed tokens, sorted.
    """

    changed: Share
    prompts: Share
    divergences: tuple[int, ...]


def counted(
    compared: Iterable[BatchComparison], wanted: Callable[[BatchComparison], bool]
) -> Counted:
    """Count what changed among the comparisons that are wanted, by prompt."""
    groups: dict[str, list[BatchComparison]] = {}
    for each in compared:
        if wanted(each):
            groups.setdefault(each.prompt, []).append(each)
    hits = [sum(each.changed for each in group) for group in groups.values()]
    return Counted(
        clustered_share(hits, [len(group) for group in groups.values()]),
        exact_share(sum(count > 0 for count in hits), len(groups)),
        tuple(
            sorted(
                each.first_divergence
                for group in groups.values()
                for each in group
                if each.first_divergence is not None
            )
        ),
    )
