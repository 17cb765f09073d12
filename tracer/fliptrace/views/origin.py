"""Where the difference started, as sentences: the first root among the shrinks, or what came before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fliptrace.verdicts import Fate, Origin, Outcome
from fliptrace.views import wording
from fliptrace.views.escaping import said, stopped
from fliptrace.views.wording import TokenNames, count

if TYPE_CHECKING:
    from fliptrace.verdicts import ForeignRoot, PairDiff, RowDifference


def root_sentences(diff: PairDiff, tokens: TokenNames) -> tuple[str, ...]:
    """Tell where the difference started: shrinks and what is no shrink, in the order in which they differ."""
    foreign = diff.foreign_root
    if foreign is None:
        return _shrink_root(diff, tokens)
    if foreign.precedes(diff.first_propagating or diff.first_variant):
        return (*_foreign(foreign, "The first difference"), *_shrink_root(diff, tokens))
    return (*_shrink_root(diff, tokens), *_foreign(foreign, "Later another difference"))


def leading_count(diff: PairDiff) -> int:
    """Count the sentences of root_sentences that a first screen needs: place, values, boundary, rounded values."""
    if not diff.same_reduction or started_elsewhere(diff) or diff.first_propagating is None:
        return 5
    return 4


def started_in_shrink(diff: PairDiff) -> RowDifference | None:
    """Return the shrink row to name as the start: propagating, else surviving, else configuration-variant."""
    return diff.first_propagating or diff.first_surviving or diff.first_variant


def started_elsewhere(diff: PairDiff) -> str:
    """Name what came first and is no shrink; "" when a shrink came first or nothing differs."""
    foreign = diff.foreign_root
    if foreign is None or not foreign.precedes(diff.first_propagating or diff.first_variant):
        return ""
    return (
        f"{said(foreign.kind)} {said(foreign.key)}, {wording.step_name(foreign.step)}: not a shrink"
    )


def _foreign(foreign: ForeignRoot, subject: str) -> tuple[str, str]:
    where = f", token position {foreign.position}" if foreign.position >= 0 else ""
    entered = (
        "did not enter through a shrink"
        if foreign.origin is Origin.ROOT
        else "was seen outside the shrinks, its origin is unlocated"
    )
    return (
        (
            f"{subject} {entered}: {said(foreign.kind)} {said(foreign.key)}, "
            f"{wording.step_name(foreign.step)}{where}."
        ),
        stopped(foreign.explanation),
    )


def _shrink_root(diff: PairDiff, tokens: TokenNames) -> tuple[str, ...]:
    sentences: list[str] = []
    if not diff.same_reduction:
        sentences.append(
            "The two executions used different reductions, so there are no roots, only a first "
            "configuration-variant."
        )
        if diff.first_variant is not None:
            sentences += _row_sentences(
                "The first configuration-variant row", diff.first_variant, tokens
            )
        return tuple(sentences)
    if diff.first_propagating is not None:
        sentences += _row_sentences(
            "The first surviving propagating root", diff.first_propagating, tokens
        )
        if diff.first_surviving is not None and diff.first_surviving != diff.first_propagating:
            sentences.append(
                f"An earlier surviving root was {_fate(diff.first_surviving)}: "
                f"{wording.row_place(diff.first_surviving, tokens)}."
            )
    elif diff.first_surviving is not None:
        sentences.append("No surviving root was seen to propagate beyond its own projection.")
        sentences += _row_sentences("The first surviving root", diff.first_surviving, tokens)
    elif diff.first_difference is not None:
        row = diff.first_difference
        sentences.append("No shrink row with bit-equal operands has a surviving difference.")
        sentences += _row_sentences(f"The first difference ({row.origin})", row, tokens)
    elif diff.foreign_root is None and diff.outcome is not Outcome.IDENTICAL:
        sentences.append(
            "No recorded shrink row differs: the difference entered where nothing was recorded."
        )
    if diff.root_rows:
        verb = "has" if diff.surviving_root_rows == 1 else "have"
        sentences.append(
            f"{count(diff.root_rows, 'row')} in all are roots; {diff.surviving_root_rows:,} {verb} a "
            f"surviving coordinate."
        )
    return tuple(sentences)


def _fate(row: RowDifference) -> str:
    if row.fate is Fate.ABSORBED:
        return "absorbed by the 16-bit add"
    if row.fate is Fate.PROPAGATING:
        return "propagating"
    return "of a fate not observed"


def _row_sentences(subject: str, row: RowDifference, tokens: TokenNames) -> list[str]:
    first = row.coordinates[0] if row.coordinates else None
    rank = f", rank index {first.coordinate.rank_index}" if first is not None else ""
    sentences = [f"{subject}: {wording.row_place(row, tokens)}{rank}."]
    if first is not None:
        sentences += [
            wording.values_sentence(first),
            wording.boundary_sentence(first),
            wording.rounded_sentence(first),
        ]
    if row.origin is Origin.ROOT:
        end = {
            Fate.PROPAGATING: "; the projection's output row differs too: propagating",
            Fate.ABSORBED: "; the projection's output row is equal: absorbed by the 16-bit add",
            Fate.NOT_OBSERVED: "; the projection's output row was not observed",
        }[row.fate]
        sentences.append(
            f"The row's operands are bit-equal and its output differs in "
            f"{count(row.surviving + row.latent, 'coordinate')} ({row.surviving:,} surviving, "
            f"{row.latent:,} latent){end if row.surviving else ''}."
        )
    return [sentence for sentence in sentences if sentence]
