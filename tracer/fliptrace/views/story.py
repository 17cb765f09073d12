"""The story of a pair in plain sentences, the same for page, terminal, JSON and notebook.

Sentences are plain text with every hostile character made visible; they carry no markup and no colour. They say what
was seen and never more: two executions show a difference or its absence in two executions, and where a difference
entered is not yet why a token flipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fliptrace.manifest import ran_in_other_batches
from fliptrace.verdicts import Outcome
from fliptrace.views import wording
from fliptrace.views.escaping import quoted, said, stopped
from fliptrace.views.interventions_words import gaps, gist, leading, story_sentences
from fliptrace.views.keys_values import cache_gist, cache_sentences
from fliptrace.views.origin import leading_count, root_sentences
from fliptrace.views.ran import (
    Search,
    bound_sentence,
    compared_sentence,
    ran_sentences,
    search_of,
    search_sentences,
)
from fliptrace.views.wording import (
    TokenNames,
    brief,
    count,
    generated_name,
    listed,
    model_dtype,
    unrounded,
    verb,
)

if TYPE_CHECKING:
    from fliptrace.trace import Trace
    from fliptrace.verdicts import Flip, PairDiff, TokenLogit
    from fliptrace.views.interventions import InterventionReport


#: How a comparison names the cache of a layer.
_CACHE_KEY = re.compile(r"\bcache\.(\d+)\b")
#: Gaps told one by one; the page lists the others folded, the JSON report holds them all.
GAPS_TOLD = 5


@dataclass(frozen=True, slots=True)
class Passage:
    """One part of the story.

    Attributes:
        key: ran, flip, root, interventions, cache, propagation, statistics, coverage or doubts.
        heading: for people.
        sentences: in order, each complete in itself.
        leading: how many of them, from the first on, belong on a first screen.
        gist: the passage in one short line, "" where it has none.
    """

    key: str
    heading: str
    sentences: tuple[str, ...]
    leading: int = 0
    gist: str = ""


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


def tell_story(
    diff: PairDiff,
    reference: Trace,
    candidate: Trace,
    interventions: InterventionReport | None = None,
) -> Story:
    """Tell what a comparison found, and what substitutions proved.

    Args:
        diff: what was found.
        reference: the trace with the tokens' texts.
        candidate: the same of the candidate.
        interventions: None where none were run.

    Returns:
        The verdict and its passages; passages without a sentence are left out.
    """
    tokens = TokenNames(reference)
    search = search_of(diff, reference, candidate)
    ran = (*ran_sentences(reference, candidate), *search_sentences(diff, search))
    dtype = model_dtype(reference)
    other_batches = ran_in_other_batches(reference.manifest, candidate.manifest)
    root = (*root_sentences(diff, tokens, dtype), *_ranks(diff))
    passages = (
        Passage("ran", "What ran", ran),
        Passage("flip", "The flip", _flip(diff), leading=3),
        Passage("root", "Where it started", root, leading=leading_count(diff)),
        *_interventions(interventions),
        Passage("cache", "Keys and values", cache_sentences(diff), gist=cache_gist(diff)),
        Passage("propagation", "Where it went", _propagation(diff), gist=_path_gist(diff)),
        Passage("statistics", "How much differed", _statistics(diff, dtype)),
        Passage(
            "coverage",
            "What was compared, and what was not",
            _coverage(diff, search, interventions),
        ),
        Passage(
            "doubts",
            "How far this goes",
            _doubts(diff, search, reference, candidate, interventions),
        ),
    )
    return Story(
        verdict=" ".join(
            (
                _verdict(diff, search, dtype, other_batches=other_batches),
                *_cut_short(diff, reference, candidate),
            )
        ),
        passages=tuple(passage for passage in passages if passage.sentences),
    )


def _interventions(report: InterventionReport | None) -> tuple[Passage, ...]:
    if report is None:
        return ()
    sentences = story_sentences(report)
    return (Passage("interventions", "What was enough", sentences, leading(report), gist(report)),)


def _verdict(diff: PairDiff, search: Search | None, dtype: str, *, other_batches: bool) -> str:
    if diff.outcome is Outcome.TOKEN:
        if diff.flip is None:
            return "Token flipped: the two executions generated different tokens."
        return (
            f"Token flipped: the two executions choose different tokens at "
            f"{generated_name(diff.flip.step)}."
        )
    compared = count(diff.coverage.records_compared, "compared record")
    if diff.coverage.of_one_file and diff.outcome is Outcome.IDENTICAL:
        return (
            f"One recording compared with itself: no difference in {compared}. Nothing ran twice, so this says "
            f"nothing about repeatability."
        )
    runs = search.runs if search is not None else 2
    who = "both executions" if runs == 2 else f"all {runs:,} runs"
    steps = min(diff.coverage.steps_compared, *diff.generated)
    within = " in the compared steps" if steps < max(diff.generated) else ""
    same = f"{who} chose the same {count(steps, 'token')}{within}"
    last = "" if runs == 2 else " between the first run and the last"
    of_runs = "" if runs == 2 else " of the first run and the last"
    if diff.outcome is Outcome.SURVIVING and _only_gaps(diff):
        return (
            f"Other records, same tokens: {same}, but the traces{of_runs} do not hold the same records in the same "
            f"order and shape; what both hold shows no surviving difference."
        )
    if diff.outcome is Outcome.SURVIVING and diff.rounded_dtype == "float32":
        return f"Surviving differences, same tokens: {same}, but values{last} differ ({unrounded(dtype)})."
    if diff.outcome is Outcome.SURVIVING:
        return f"Surviving differences, same tokens: {same}, but differences{last} are left after rounding."
    if diff.outcome is Outcome.LATENT:
        return (
            f"Latent differences only: {same}, and every difference in FP32 bits{last} disappears in "
            f"rounding to {diff.rounded_dtype}."
        )
    if runs == 2:
        if other_batches:
            return (
                f"No difference found in {compared}: {same}, although their batches differed. This is 2 runs, "
                f"repeatable in 2 runs in different batches, not proof of determinism or batch invariance."
            )
        return (
            f"No difference found in {compared}: {same}. This is 2 runs, repeatable in 2 runs, not proof of "
            f"determinism."
        )
    if search is not None and search.until == "any":
        return (
            f"No difference found in {compared}{last}, nor in any run: {same}. Repeatable in {runs:,} runs, not "
            f"proof of determinism."
        )
    return (
        f"No difference found in {compared}{last}: {same}. The same tokens in {runs:,} runs are no proof "
        f"of determinism."
    )


def _cut_short(diff: PairDiff, reference: Trace, candidate: Trace) -> tuple[str, ...]:
    """Say up to where is known what an incomplete recording chose; nothing after a flip, which is known."""
    if diff.outcome is Outcome.TOKEN:
        return ()
    traces = (("reference", reference), ("candidate", candidate))
    names = [name for name, trace in traces if not trace.closing.complete]
    if not names:
        return ()
    step = wording.step_name(diff.coverage.steps_compared - 1)
    subject = f"The recording of the {names[0]} is" if len(names) == 1 else "Both recordings are"
    return (f"{subject} incomplete: what came after {step} is not known.",)


def _only_gaps(diff: PairDiff) -> bool:
    """Say whether other records, or another order of them, are all that was found, latent differences aside."""
    return bool(diff.coverage.missing) and not (
        diff.statistics.surviving
        or diff.foreign_root is not None
        or diff.cache_differences
        or diff.state_differences
        or any(step.logits_differ or step.largest_logit_difference for step in diff.steps)
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
        _ties(flip),
        (
            f"Top-2 margin: {brief(flip.reference_margin)} in the reference, "
            f"{brief(flip.candidate_margin)} in the candidate."
        ),
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
    tokens = (flip.reference_token, flip.candidate_token)
    # The sentence before has the ids; here they are needed where the texts alone do not tell the tokens apart.
    by_text = all(token.text for token in tokens) and tokens[0].text != tokens[1].text
    parts = []
    for token in tokens:
        logit = token.reference_logit if execution == "reference" else token.candidate_logit
        parts.append(f"{quoted(token.text) if by_text else token_name(token)} {brief(logit)}")
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


def _propagation(diff: PairDiff) -> tuple[str, ...]:
    propagation = diff.propagation
    if propagation is None:
        return ()
    told = diff.foreign_root.explanation if diff.foreign_root is not None else None
    sentences = [
        stopped(_CACHE_KEY.sub(r"keys or values of layer \1", sentence.replace(" -> ", " → ")))
        for sentence in propagation.sentences
        if sentence != told  # where it started
    ]
    if diff.flip is not None and propagation.reaches_flip:
        sentences.append(
            "A path of differing records leads from the root to the logits of the flip."
        )
    return tuple(sentences)


def _path_gist(diff: PairDiff) -> str:
    propagation = diff.propagation
    if propagation is None:
        return ""
    if diff.flip is None or propagation.reaches_flip is None:
        return f"{count(propagation.nodes, 'record')} {verb(propagation.nodes, 'differ')}"
    if propagation.reaches_flip:
        return "differing records lead from there to the flip's logits"
    return "no unbroken path of records leads to the flip's logits"


def _statistics(diff: PairDiff, dtype: str) -> tuple[str, ...]:
    numbers = diff.statistics
    sentences = []
    unsettled = f" ({unrounded(dtype)})" if diff.rounded_dtype == "float32" else ""
    if numbers.equal_operand_elements:
        share = 100 * numbers.equal_operand_differing / numbers.equal_operand_elements
        sentences.append(
            f"Of {count(numbers.equal_operand_elements, 'shrink coordinate')} with bit-equal operands "
            f"{numbers.equal_operand_differing:,} ({share:.3g}%) "
            f"{verb(numbers.equal_operand_differing, 'differ')} in FP32{unsettled}"
            + (
                f" and {numbers.equal_operand_surviving:,} {verb(numbers.equal_operand_surviving, 'survive')} rounding."
                if not unsettled
                else "."
            )
        )
    if numbers.elements:
        sentences.append(
            f"Over all {count(numbers.elements, 'compared shrink coordinate')} {numbers.differing:,} "
            f"{verb(numbers.differing, 'differ')}"
            + (
                f" and {numbers.surviving:,} {verb(numbers.surviving, 'survive')}."
                if not unsettled
                else "."
            )
        )
    return tuple(sentences)


def _ranks(diff: PairDiff) -> tuple[str, ...]:
    """Say of each execution on several ranks whether they agree with one another."""
    return tuple(
        f"{name}: {stopped(agreement.sentence)}"
        for name, agreement in zip(("Reference", "Candidate"), diff.rank_agreement, strict=True)
        if agreement is not None
    )


def _coverage(
    diff: PairDiff, search: Search | None, interventions: InterventionReport | None
) -> tuple[str, ...]:
    coverage = diff.coverage
    sentences = [
        (
            f"Compared: {count(coverage.steps_compared, 'step')}, "
            f"{count(coverage.records_compared, 'record')}, "
            f"{count(coverage.elements_compared, 'FP32 shrink coordinate')}."
        )
    ]
    compared = compared_sentence(search)
    if compared:
        sentences.append(compared)
    sentences += [f"Not observed: {stopped(sentence)}" for sentence in coverage.not_observed]
    sentences += [f"Gap: {stopped(sentence)}" for sentence in coverage.missing[:GAPS_TOLD]]
    if len(coverage.missing) > GAPS_TOLD:
        sentences.append(f"{count(len(coverage.missing) - GAPS_TOLD, 'more gap')} in the report.")
    if interventions is not None:
        sentences += [f"Interventions: {sentence}" for sentence in gaps(interventions)]
    if coverage.observer_control:
        sentences.append(f"Observer control: {stopped(coverage.observer_control)}")
    return tuple(sentences)


def _doubts(
    diff: PairDiff,
    search: Search | None,
    reference: Trace,
    candidate: Trace,
    interventions: InterventionReport | None,
) -> tuple[str, ...]:
    sentences = []
    for name, trace in (("reference", reference), ("candidate", candidate)):
        if not trace.closing.complete:
            sentences.append(
                f"The {name} trace is incomplete ({said(trace.closing.stop_reason)}): nothing after "
                f"its last acknowledged step is known."
            )
    if diff.rounded_dtype == "float32":
        why = unrounded(model_dtype(reference))
        sentences.append(f"Every difference counts as surviving, none as latent: {why}.")
    other_batches = ran_in_other_batches(reference.manifest, candidate.manifest)
    bound = (
        ""
        if diff.coverage.of_one_file
        else bound_sentence(diff, search, other_batches=other_batches)
    )
    if bound:
        sentences.append(bound)
    if diff.outcome is Outcome.IDENTICAL:
        return tuple(sentences)
    sentences.append(
        "This is one pair of runs: another pair may differ elsewhere, later or not at all."
    )
    if diff.flip is not None and interventions is None:
        sentences.append(
            "Where the first surviving difference entered is an observation. Whether it is "
            "sufficient to flip the token takes an intervention."
        )
    return tuple(sentences)
