"""Both generated texts, cut at the flip: what they share, the differing tokens, and what each went on to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fliptrace.views.escaping import visible

if TYPE_CHECKING:
    from fliptrace.trace import Trace
    from fliptrace.verdicts import PairDiff


@dataclass(frozen=True, slots=True)
class Continuation:
    """One execution's text from the flip on.

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
        common: what both executions generated before the flip, or all of it without one.
        continuations: reference, then candidate; empty without a flip.
        kept: False when the traces hold no texts (redacted).
    """

    prompt: str
    common: str
    continuations: tuple[Continuation, ...]
    kept: bool


def pair_texts(diff: PairDiff, reference: Trace, candidate: Trace) -> PairTexts:
    """Cut the generated texts at the flip: by tokens where their texts were kept, else by characters."""
    closings = (reference.closing, candidate.closing)
    prompt = visible("".join(reference.closing.prompt_piece_texts), keep_newlines=True)
    kept = any(closing.text or closing.piece_texts for closing in closings)
    full = [closing.text or "".join(closing.piece_texts) for closing in closings]
    if diff.flip is None and full[0] == full[1]:
        return PairTexts(prompt, visible(full[0], keep_newlines=True), (), kept)
    step = diff.flip.step if diff.flip is not None else None
    parts: list[tuple[str, str, str]] = []
    if step is not None and all(len(closing.piece_texts) > step for closing in closings):
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


def common_length(reference: str, candidate: str) -> int:
    """Count the characters that two texts share at their start."""
    shorter = min(len(reference), len(candidate))
    return next((n for n in range(shorter) if reference[n] != candidate[n]), shorter)
