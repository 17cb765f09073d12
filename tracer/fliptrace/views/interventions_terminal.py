"""What trace-intervene prints: the verdict first, a compact table of arms, what was not covered, and the caveat."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fliptrace.judgements import CAVEAT, Judgement
from fliptrace.views import interventions_words as words
from fliptrace.views.escaping import clipped
from fliptrace.views.interventions import (
    InterventionReport,
    arm_rows,
    direction_name,
    judged,
    proved_claims,
)
from fliptrace.views.terminal import WIDTH

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from fliptrace.judgements import DirectionResult, Investigation

_STYLES = {
    Judgement.SUFFICIENT: "bold red",
    Judgement.CHANGES: "bold yellow",
    Judgement.NOT_SUFFICIENT: "bold green",
    Judgement.NOT_APPLICABLE: "bold",
    Judgement.VOID: "bold magenta",
}
#: Arms: name, token, margin, receipts, repeats.
_COLUMNS = (15, 22, 9, 8, 12)
#: Reasons and gaps told one by one, before the rest is left to the report.
_TOLD = 5
#: Sentences of an investigation told before the rest is left to the report.
_FOUND_TOLD = 7


@dataclass(frozen=True, slots=True)
class _Line:
    """One line with the style that a terminal gives it."""

    text: str
    style: str = ""


def plain_interventions(report: InterventionReport) -> str:
    """Return what was found as plain text of at most 80 columns, without any terminal control."""
    return "\n".join(line.text for line in _lines(report)) + "\n"


def terminal_interventions(report: InterventionReport) -> RenderableType:
    """Return the same as something that rich prints; no markup in it is parsed."""
    return _Styled(report)


@dataclass(frozen=True, slots=True)
class _Styled:
    """A report for rich."""

    report: InterventionReport

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        for line in _lines(self.report):
            yield Text(line.text, style=line.style, no_wrap=True, overflow="ellipsis")


def _lines(report: InterventionReport) -> list[_Line]:
    style = _STYLES[report.judgement]
    lines = [_Line(line, style) for line in textwrap.wrap(words.headline(report), WIDTH)]
    found = report.investigation
    if found is not None:
        told = [words.judged_sentence(found), words.effort_sentence(found)]
        lines += _passage("What was judged", told)
        lines += _passage("What was found", _found(found))
    lines += _arms(report)
    gaps = words.gaps(report)
    if gaps:
        lines += _passage("What was not covered", _some(gaps))
    return [*lines, *_passage("How far this goes", [CAVEAT])]


def _found(found: Investigation) -> list[str]:
    """The most informative sentences, and whatever came of the answers."""
    answers = words.answer_sentence(found.continuations)
    told = words.found_sentences(found)
    kept = [*told[:_FOUND_TOLD], *([answers] if answers else [])]
    more = len(told) - _FOUND_TOLD
    return [*kept, f"({more} more in the report.)"] if more > 0 else kept


def _arms(report: InterventionReport) -> list[_Line]:
    """One block per proved claim: its judgement, then its arms in columns."""
    entries = proved_claims(report)
    if not entries:
        return []
    header = _row(("arm", "token", "margin", "receipts", "repeats"))
    lines = [_Line(""), _Line("Arms", "bold"), _Line(header, "dim")]
    for entry in entries:
        text = f"{entry.heading}: {entry.claim}"
        lines += [
            _Line(line, "bold")
            for line in textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
        ]
        if not entry.verdict.directions:
            lines += _wrapped(_some(entry.verdict.reasons), "    ")
        for result in entry.verdict.directions:
            lines += _direction(result)
        answers = words.answer_sentence(entry.continuations)
        lines += _wrapped([answers], "    ") if answers else []
    return lines


def _direction(result: DirectionResult) -> list[_Line]:
    shams = ""
    if result.specificity is not None:
        special = result.specificity
        shams = f"; {special.other_token} of {special.shams} shams flip too"
    text = f"{direction_name(result.recipient, result.donor)}: {judged(result.judgement)}{shams}"
    lines = [
        _Line(line, _STYLES[result.judgement])
        for line in textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="      ")
    ]
    for row in arm_rows(result):
        lines.append(
            _Line(
                _row(
                    (
                        row.arm,
                        row.token,
                        row.margin,
                        row.receipts.removesuffix(" landed"),
                        row.repeats,
                    )
                )
            )
        )
        if row.ended:
            lines += _wrapped([row.ended], "        ")
    if result.judgement not in (Judgement.SUFFICIENT, Judgement.NOT_SUFFICIENT):
        lines += _wrapped(_some(result.reasons), "      ")
    return lines


def _row(cells: tuple[str, ...]) -> str:
    """Lay cells out in columns; a long one is cut with an ellipsis, and is whole in the report."""
    columns = zip(cells, _COLUMNS, strict=True)
    return ("      " + " ".join(f"{clipped(cell, width):<{width}}" for cell, width in columns))[
        :WIDTH
    ].rstrip()


def _some(sentences: Iterable[str]) -> list[str]:
    every = list(sentences)
    more = [f"({len(every) - _TOLD} more in the report.)"] if len(every) > _TOLD else []
    return every[:_TOLD] + more


def _passage(heading: str, sentences: Iterable[str]) -> list[_Line]:
    return [_Line(""), _Line(heading, "bold"), *_wrapped(sentences, "  ")]


def _wrapped(sentences: Iterable[str], indent: str) -> list[_Line]:
    return [
        _Line(line)
        for sentence in sentences
        for line in textwrap.wrap(
            sentence,
            WIDTH,
            initial_indent=indent,
            subsequent_indent=f"{indent}  ",
            break_on_hyphens=False,
        )
    ]
