"""Where the difference started, as sentences: the first root among the shrinks, or what came before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fliptrace.sites import Site
from fliptrace.verdicts import Fate, Origin, Outcome
from fliptrace.views import wording
from fliptrace.views.escaping import said, stopped
from fliptrace.views.wording import TokenNames, count, plain

if TYPE_CHECKING:
    from fliptrace.verdicts import ForeignRoot, PairDiff, RowDifference


def root_sentences(diff: PairDiff, tokens: TokenNames, dtype: str) -> tuple[str, ...]:
    """Tell where the difference started: shrinks and what is no shrink, in the order in which they differ.

    Args:
        diff: what was found.
        tokens: the reference's tokens.
        dtype: the type that the model computes in; "" where it is not known.
    """
    foreign = diff.foreign_root
    if foreign is None:
        return _shrink_root(diff, tokens, dtype)
    if foreign.precedes(_lead(diff)):
        return (*_foreign(foreign, "The first difference"), *_shrink_root(diff, tokens, dtype))
    return (*_shrink_root(diff, tokens, dtype), *_foreign(foreign, "Later another difference"))


def leading_count(diff: PairDiff) -> int:
    """Count the sentences of root_sentences that a first screen needs: place, values, boundary, rounded values."""
    if not diff.same_reduction or started_elsewhere(diff) or diff.first_propagating is None:
        return 5
    return 4


def started_in_shrink(diff: PairDiff) -> RowDifference | None:
    """Return the shrink row to name as the start: propagating, else surviving, else configuration-variant."""
    return diff.first_propagating or diff.first_surviving or _variant(diff)


def _variant(diff: PairDiff) -> RowDifference | None:
    """Return the configuration-variant to name: the first surviving one, else the first."""
    return diff.first_surviving_variant or diff.first_variant


def _lead(diff: PairDiff) -> RowDifference | None:
    """Return the shrink row against which it is told what came first."""
    return diff.first_propagating or _variant(diff)


def started_elsewhere(diff: PairDiff) -> str:
    """Name what came first and is no shrink; "" when a shrink came first or nothing differs."""
    foreign = diff.foreign_root
    if foreign is None or not foreign.precedes(_lead(diff)):
        return ""
    where = f"{_place(foreign)}, {wording.step_name(foreign.step)}"
    if diff.coverage.missing:
        return f"{where}: seen there first; records without a partner in the other trace were not compared"
    return f"{where}: not a shrink"


def _place(foreign: ForeignRoot) -> str:
    """Name what is no shrink: ``keys or values of layer 0``, ``input of layer 1 mlp.up_proj``, ``logits``."""
    if foreign.kind == "cache":
        layer = foreign.key.removeprefix("cache.")
        return f"keys or values of layer {layer}" if layer.isdecimal() else "the cache"
    if foreign.kind == "state":
        _, layer, name = foreign.key.split(".", 2)
        return f"recurrent state {name} of layer {layer}"
    if foreign.kind == "token":
        return "the choice of the token"
    name = said(Site.from_path(foreign.key).name)
    if foreign.kind == "operand":
        return f"input of {name}"
    if foreign.kind == "projection":
        return f"output of {name}"
    return (
        said(foreign.kind)
        if foreign.kind == foreign.key
        else f"{said(foreign.kind)} {said(foreign.key)}"
    )


def _foreign(foreign: ForeignRoot, subject: str) -> tuple[str, str]:
    where = f", token position {foreign.position}" if foreign.position >= 0 else ""
    entered = {
        Origin.ROOT: "did not enter through a shrink",
        Origin.CONFIGURATION_VARIANT: "was seen outside the shrinks, and is a configuration-variant",
    }.get(foreign.origin, "was seen outside the shrinks, its origin is unlocated")
    return (
        (f"{subject} {entered}: {_place(foreign)}, {wording.step_name(foreign.step)}{where}."),
        stopped(foreign.explanation),
    )


def _shrink_root(diff: PairDiff, tokens: TokenNames, dtype: str) -> tuple[str, ...]:
    sentences: list[str] = []
    if not diff.same_reduction:
        sentences.append(_why_no_roots(diff))
        return (*sentences, *_variant_sentences(diff, tokens, dtype))
    if diff.first_propagating is not None:
        sentences += _row_sentences(
            "The first surviving propagating root", diff.first_propagating, tokens, dtype
        )
        if diff.first_surviving is not None and diff.first_surviving != diff.first_propagating:
            sentences.append(
                f"An earlier surviving root was {_fate(diff.first_surviving, dtype)}: "
                f"{wording.row_place(diff.first_surviving, tokens)}."
            )
        sentences += _also_variant(diff, tokens)
    elif diff.first_surviving is not None:
        sentences.append("No surviving root was seen to propagate beyond its own projection.")
        sentences += _row_sentences("The first surviving root", diff.first_surviving, tokens, dtype)
        sentences += _also_variant(diff, tokens)
    elif diff.first_surviving_variant is not None:
        sentences.append(
            "No root survives; shrinks that the two executions launched differently have a surviving "
            "difference, and are configuration-variants."
        )
        sentences += _variant_sentences(diff, tokens, dtype)
    elif diff.first_difference is not None:
        row = diff.first_difference
        sentences.append("No shrink row with bit-equal operands has a surviving difference.")
        sentences += _row_sentences(
            f"The first difference ({row.origin}, {row.row_class.label})", row, tokens, dtype
        )
    elif diff.foreign_root is None and diff.outcome is not Outcome.IDENTICAL:
        sentences.append(
            "No recorded shrink row differs: the difference entered where nothing was recorded."
        )
    if diff.root_rows:
        are = "is a root" if diff.root_rows == 1 else "are roots"
        have = "has" if diff.surviving_root_rows == 1 else "have"
        sentences.append(
            f"{count(diff.root_rows, 'row')} in all {are}; {diff.surviving_root_rows:,} {have} a "
            f"surviving coordinate."
        )
    return tuple(sentences)


def _why_no_roots(diff: PairDiff) -> str:
    """Say what the executions had different: two computations have no common operands to tell a root by."""
    engines = [
        f"{said(plain(before))} and {said(plain(after))}"
        for key, before, after in diff.manifest_differences
        if key == "engine.name"
    ]
    if engines:
        return (
            f"The two executions ran on different engines ({engines[0]}), which compute one model in different "
            "ways, so there are no roots: every difference is structural or a configuration-variant."
        )
    return (
        "The two executions used different reductions, so there are no roots, only a first "
        "configuration-variant."
    )


def _variant_sentences(diff: PairDiff, tokens: TokenNames, dtype: str) -> list[str]:
    """Tell the first surviving configuration-variant, which is the one followed, and say of an earlier one."""
    first, surviving = diff.first_variant, diff.first_surviving_variant
    if surviving is None:
        if first is None:
            return []
        return [
            *_row_sentences("The first configuration-variant row", first, tokens, dtype),
            "No configuration-variant survives.",
        ]
    if first is None or first == surviving:
        subject = "The first configuration-variant row, which survives"
        return _row_sentences(subject, surviving, tokens, dtype)
    return [
        *_row_sentences("The first surviving configuration-variant row", surviving, tokens, dtype),
        f"An earlier configuration-variant is {first.row_class.label}: {wording.row_place(first, tokens)}.",
    ]


def _also_variant(diff: PairDiff, tokens: TokenNames) -> list[str]:
    """Name a surviving row of another launch beside the root."""
    row = diff.first_surviving_variant
    if row is None:
        return []
    place = wording.row_place(row, tokens)
    return [
        f"A row that was launched differently, a configuration-variant, survives, too: {place}."
    ]


def _addition(dtype: str) -> str:
    return "the FP32 add" if dtype == "float32" else "the 16-bit add"


def _fate(row: RowDifference, dtype: str) -> str:
    if row.fate is Fate.ABSORBED:
        return f"absorbed by {_addition(dtype)}"
    if row.fate is Fate.PROPAGATING:
        return "propagating"
    return "of a fate not observed"


def _row_sentences(subject: str, row: RowDifference, tokens: TokenNames, dtype: str) -> list[str]:
    first = row.coordinates[0] if row.coordinates else None
    rank = f", rank index {first.coordinate.rank_index}" if first is not None else ""
    sentences = [f"{subject}: {wording.row_place(row, tokens)}{rank}."]
    if first is not None:
        sentences += [
            wording.values_sentence(first),
            wording.boundary_sentence(first, dtype),
            wording.rounded_sentence(first),
        ]
    if row.origin is Origin.ROOT:
        classes = f"{row.surviving:,} surviving, {row.latent:,} latent"
        if first is not None and first.rounded_dtype == "float32":
            classes = wording.unrounded(dtype)
        end = {
            Fate.PROPAGATING: "; the projection's output row differs too: propagating",
            Fate.ABSORBED: f"; the projection's output row is equal: absorbed by {_addition(dtype)}",
            Fate.NOT_OBSERVED: "; the projection's output row was not observed",
        }[row.fate]
        sentences.append(
            f"The row's operands are bit-equal and its output differs in "
            f"{count(row.surviving + row.latent, 'coordinate')} ({classes}){end if row.surviving else ''}."
        )
    return [sentence for sentence in sentences if sentence]
