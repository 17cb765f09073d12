"""Both generated texts, cut where they part: what they share, the differing tokens, and what each went on to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fliptrace.views.escaping import visible

if TYPE_CHECKING:
    from fliptrace.trace import Trace
    from fliptrace.verdicts import PairDiff


@dataclass(frozen=True, slots=True)
class Continuation:
    """One execution's text from where they part.

    Attributes:
        execution: ``reference`` or ``candidate``.
        token: the first differing token's text, "" when the texts do not differ.
        rest: what followed.
        stop_reason: why it ended.
    """

    execution: str
    token: str
    rest: str
    stop_reason: str


@dataclass(frozen=True, slots=True)
class PairTexts:
    """The texts of a pair, visible characters only.

    Attributes:
        prompt: the prompt's text.
        common: what both executions generated before they part, or all of it.
        continuations: reference, then candidate; empty where both said the same to the end.
        kept: False when the traces hold no texts (redacted).
        parts: from where the continuations run, ``from the flip on``.
    """

    prompt: str
    common: str
    continuations: tuple[Continuation, ...]
    kept: bool
    parts: str = "from the flip on"


def pair_texts(diff: PairDiff, reference: Trace, candidate: Trace) -> PairTexts:
    """Cut the generated texts at the flip: by tokens where their texts were kept, else by characters."""
    closings = (reference.closing, candidate.closing)
    prompt = visible("".join(reference.closing.prompt_piece_texts), keep_newlines=True)
    kept = any(closing.text or closing.piece_texts for closing in closings)
    full = [closing.text or "".join(closing.piece_texts) for closing in closings]
    if diff.flip is None and full[0] == full[1]:
        return PairTexts(prompt, visible(full[0], keep_newlines=True), (), kept)
    if diff.flip is None:
        return _without_flip(diff, reference, candidate, prompt, kept)
    step = diff.flip.step
    parts: list[tuple[str, str, str]] = []
    if all(len(closing.piece_texts) > step for closing in closings):
        for closing in closings:
            pieces = closing.piece_texts
            parts.append(("".join(pieces[:step]), pieces[step], "".join(pieces[step + 1 :])))
    else:
        length = common_length(*full)
        parts = [(text[:length], text[length : length + 1], text[length + 1 :]) for text in full]
    continuations = tuple(
        Continuation(
            execution,
            # A token that is nothing but a line break must still show.
            visible(token),
            visible(rest, keep_newlines=True),
            visible(closing.stop_reason),
        )
        for execution, (_, token, rest), closing in zip(
            ("reference", "candidate"), parts, closings, strict=True
        )
    )
    return PairTexts(prompt, visible(parts[0][0], keep_newlines=True), continuations, kept)


def _without_flip(
    diff: PairDiff, reference: Trace, candidate: Trace, prompt: str, kept: bool
) -> PairTexts:
    """Cut after the compared steps: one execution has no more, and what it would have said is not known."""
    steps = diff.coverage.steps_compared
    closings = (reference.closing, candidate.closing)
    longest = max(closings, key=lambda closing: len(closing.piece_texts))
    pieces = longest.piece_texts
    rests = [
        "".join(closing.piece_texts[steps:]) if len(closing.piece_texts) > steps else ""
        for closing in closings
    ]
    if len(pieces) < steps:  # texts without their tokens: what they share
        full = [closing.text or "".join(closing.piece_texts) for closing in closings]
        length = common_length(*full)
        common, rests = full[0][:length], [text[length:] for text in full]
    else:
        common = "".join(pieces[:steps])
    continuations = tuple(
        Continuation(
            execution,
            "",
            visible(rest, keep_newlines=True),
            visible(closing.stop_reason),
        )
        for execution, rest, closing in zip(
            ("reference", "candidate"), rests, closings, strict=True
        )
    )
    where = f"after the {steps} compared steps"
    return PairTexts(prompt, visible(common, keep_newlines=True), continuations, kept, where)


def common_length(reference: str, candidate: str) -> int:
    """Count the characters that two texts share at their start."""
    shorter = min(len(reference), len(candidate))
    return next((n for n in range(shorter) if reference[n] != candidate[n]), shorter)
