"""The story of a pair in plain sentences, the same for page, terminal, JSON and notebook.

Sentences are plain text with every hostile character made visible; they carry no markup and no colour. They say what
was seen and never more: two executions show a difference or its absence in two executions, and where a difference
entered is not yet why a token flipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fliptrace.verdicts import Fate, Origin, Outcome
from fliptrace.views import wording
from fliptrace.views.escaping import quoted, said, stopped
from fliptrace.views.wording import TokenNames, brief, count, generated_name, listed

if TYPE_CHECKING:
    from fliptrace.trace import Trace
    from fliptrace.verdicts import Flip, ForeignRoot, PairDiff, RowDifference, TokenLogit

#: How many layers of K/V differences the story names before it counts.
NAMED_LAYERS = 3


@dataclass(frozen=True, slots=True)
class Passage:
    """One part of the story.

    Attributes:
        key: flip, root, cache, propagation, statistics, coverage or doubts.
        heading: for people.
        sentences: in order, each complete in itself.
    """

    key: str
    heading: str
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Story:
    """What happened to a pair.

    Attributes:
        verdict: one sentence.
        passages: in the order in which they are told.
    """

    verdict: str
    passages: tuple[Passage, ...]

    def passage(self, key: str) -> Passage | None:
        """Return one passage, None when this pair has nothing to say there."""
        return next((passage for passage in self.passages if passage.key == key), None)


def tell_story(diff: PairDiff, reference: Trace, candidate: Trace) -> Story:
    """Tell what a comparison found.

    Args:
        diff: what was found.
        reference: the trace with the tokens' texts.
        candidate: the same of the candidate.

    Returns:
        The verdict and its passages; passages without a sentence are left out.
    """
    tokens = TokenNames(reference)
    passages = (
        Passage("flip", "The flip", _flip(diff)),
        Passage("root", "Where it started", _root(diff, tokens)),
        Passage("cache", "Keys and values", _cache(diff)),
        Passage("propagation", "Where it went", _propagation(diff)),
        Passage("statistics", "How much differed", _statistics(diff)),
        Passage("coverage", "What was compared, and what was not", _coverage(diff)),
        Passage("doubts", "How far this goes", _doubts(diff, reference, candidate)),
    )
    return Story(
        verdict=_verdict(diff), passages=tuple(passage for passage in passages if passage.sentences)
    )


def _verdict(diff: PairDiff) -> str:
    if diff.outcome is Outcome.TOKEN:
        if diff.flip is None:
            return "Token flipped: the two executions generated different tokens."
        return (
            f"Token flipped: the two executions choose different tokens at "
            f"{generated_name(diff.flip.step)}."
        )
    same = f"both executions chose the same {count(min(diff.generated), 'token')}"
    if diff.outcome is Outcome.SURVIVING:
        return (
            f"Surviving differences, same tokens: {same}, but differences are left after rounding."
        )
    if diff.outcome is Outcome.LATENT:
        return (
            f"Latent differences only: {same}, and every difference in FP32 bits disappears in "
            f"rounding to {diff.rounded_dtype}."
        )
    return (
        f"No difference found in {count(diff.coverage.records_compared, 'compared record')}: {same}. "
        f"This is 2 runs, repeatable in 2 runs, not proof of determinism."
    )


def _flip(diff: PairDiff) -> tuple[str, ...]:
    flip = diff.flip
    if flip is None:
        return ()
    sentences = [
        (
            f"{wording.capitalised(generated_name(flip.step))}: the reference chose "
            f"{token_name(flip.reference_token)}, the candidate {token_name(flip.candidate_token)}."
        ),
        (
            f"Logits in the reference: {_logits(flip, 'reference')}; in the candidate: "
            f"{_logits(flip, 'candidate')}."
        ),
        (
            f"Top-2 margin: {brief(flip.reference_margin)} in the reference, "
            f"{brief(flip.candidate_margin)} in the candidate."
        ),
        _ties(flip),
        (
            f"From the flip on, the reference generated {count(flip.tokens_after[0], 'token')} and the "
            f"candidate {flip.tokens_after[1]:,}."
        ),
    ]
    return tuple(sentences)


def token_name(token: TokenLogit) -> str:
    """Name a token by its text and id: ``“ 7” (id 22)``; by its id alone where the text was not kept."""
    return f"{quoted(token.text)} (id {token.token_id})" if token.text else f"id {token.token_id}"


def _logits(flip: Flip, execution: str) -> str:
    parts = []
    for token in (flip.reference_token, flip.candidate_token):
        logit = token.reference_logit if execution == "reference" else token.candidate_logit
        parts.append(f"{token_name(token)} {brief(logit)}")
    return listed(parts)


def _ties(flip: Flip) -> str:
    ties = []
    for execution, tied in (
        ("reference", flip.reference_tied),
        ("candidate", flip.candidate_tied),
    ):
        if tied > 1:
            decided = (
                f", its token decided by tie-break ({said(flip.tie_rule)})"
                if execution in flip.decided_by_tie_break
                else ""
            )
            ties.append(f"the {execution} has a tie of {tied} tokens{decided}")
    if not ties:
        return "No tie: in both executions one token has the largest logit alone."
    return f"Tie: {listed(ties)}."


def _root(diff: PairDiff, tokens: TokenNames) -> tuple[str, ...]:
    foreign = diff.foreign_root
    if foreign is None:
        return _shrink_root(diff, tokens)
    if foreign.precedes(diff.first_propagating or diff.first_variant):
        return (*_foreign(foreign, "The first difference"), *_shrink_root(diff, tokens))
    return (*_shrink_root(diff, tokens), *_foreign(foreign, "Later another difference"))


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


def _cache(diff: PairDiff) -> tuple[str, ...]:
    differences = diff.cache_differences
    if not differences:
        if diff.outcome is Outcome.IDENTICAL or not any(
            kind in ("key", "value") for grid in diff.grids.values() for kind, _ in grid.rows
        ):
            return ()
        return ("No recorded key or value element differs.",)
    root = diff.first_propagating
    step = root.step if root is not None else differences[0].step
    here = [entry for entry in differences if entry.step == step]
    sentences = []
    for entry in here[:NAMED_LAYERS]:
        places = [str(position) for position in entry.positions[:8]]
        more = f" and {len(entry.positions) - 8:,} more" if len(entry.positions) > 8 else ""
        noun = "position" if len(entry.positions) == 1 else "positions"
        sentences.append(
            f"Layer {entry.layer}, {wording.step_name(step)}: "
            f"{count(entry.keys, 'key element')} and {count(entry.values, 'value element')} differ "
            f"(of {entry.elements:,} compared), at token {noun} "
            f"{', '.join(places)}{more}."
        )
    if len(here) > NAMED_LAYERS:
        rest = here[NAMED_LAYERS:]
        sentences.append(
            f"In that step {count(len(rest), 'more layer')} differ: "
            f"{count(sum(entry.keys for entry in rest), 'key element')} and "
            f"{count(sum(entry.values for entry in rest), 'value element')}."
        )
    if root is not None and not here:
        sentences.append(
            f"No key or value element written in {_the(root.step)} differs; the first ones that do "
            f"were written in {_the(differences[0].step)}, layer {differences[0].layer}."
        )
    steps = len({entry.step for entry in differences})
    layers = len({entry.layer for entry in differences})
    sentences.append(
        f"Over all compared steps, keys or values differ in {count(layers, 'layer')} and "
        f"{count(steps, 'step')}."
    )
    return tuple(sentences)


def _the(step: int) -> str:
    return "the prefill" if step == 0 else f"step {step}"


def _propagation(diff: PairDiff) -> tuple[str, ...]:
    propagation = diff.propagation
    if propagation is None:
        return ()
    sentences = [stopped(sentence) for sentence in propagation.sentences]
    if diff.flip is not None and propagation.reaches_flip is not None:
        sentences.append(
            "A path of differing records leads from the root to the logits of the flip."
            if propagation.reaches_flip
            else "No unbroken path of recorded differences leads from the root to the flip's logits."
        )
    if not propagation.separable:
        sentences.append(
            "Operands were kept as digests only, so what each record adds and what it inherits are "
            "not separable."
        )
    return tuple(sentences)


def _statistics(diff: PairDiff) -> tuple[str, ...]:
    numbers = diff.statistics
    sentences = []
    if numbers.equal_operand_elements:
        share = 100 * numbers.equal_operand_differing / numbers.equal_operand_elements
        sentences.append(
            f"Of {count(numbers.equal_operand_elements, 'shrink coordinate')} with bit-equal operands "
            f"{numbers.equal_operand_differing:,} ({share:.3g} %) differ in FP32 and "
            f"{numbers.equal_operand_surviving:,} survive rounding."
        )
    if numbers.elements:
        sentences.append(
            f"Over all {count(numbers.elements, 'compared shrink coordinate')} {numbers.differing:,} "
            f"differ and {numbers.surviving:,} survive."
        )
    return tuple(sentences)


def _coverage(diff: PairDiff) -> tuple[str, ...]:
    coverage = diff.coverage
    sentences = [
        (
            f"Compared: {count(coverage.steps_compared, 'step')}, "
            f"{count(coverage.records_compared, 'record')}, "
            f"{count(coverage.elements_compared, 'FP32 shrink coordinate')}."
        )
    ]
    sentences += [f"Not observed: {stopped(sentence)}" for sentence in coverage.not_observed]
    if coverage.missing:
        named = ", ".join(said(name) for name in coverage.missing[:5])
        more = f" and {len(coverage.missing) - 5:,} more" if len(coverage.missing) > 5 else ""
        sentences.append(f"Recorded in one trace only: {named}{more}.")
    if coverage.observer_control:
        sentences.append(f"Observer control: {stopped(coverage.observer_control)}")
    return tuple(sentences)


def _doubts(diff: PairDiff, reference: Trace, candidate: Trace) -> tuple[str, ...]:
    sentences = []
    for name, trace in (("reference", reference), ("candidate", candidate)):
        if not trace.closing.complete:
            sentences.append(
                f"The {name} trace is incomplete ({said(trace.closing.stop_reason)}): nothing after "
                f"its last acknowledged step is known."
            )
    if diff.rounded_dtype == "float32":
        sentences.append("The model computes in FP32: every difference survives, none is latent.")
    if diff.outcome is Outcome.IDENTICAL:
        sentences.append(
            "Repeatable in 2 runs is one comparison: at 95 % confidence up to 95 % of further "
            "repeats could still differ."
        )
        return tuple(sentences)
    sentences.append(
        "This is one pair of runs: another pair may differ elsewhere, later or not at all."
    )
    if diff.flip is not None:
        sentences.append(
            "Where the first surviving difference entered is an observation. Whether it is "
            "sufficient to flip the token takes an intervention."
        )
    return tuple(sentences)
