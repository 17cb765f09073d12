"""What trace-pair and trace-diff print: the story and a small map in one screen, with rich or as plain text."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fliptrace.verdicts import Outcome
from fliptrace.views.story import Story, tell_story
from fliptrace.views.terminal_map import map_lines

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from fliptrace.trace import Trace
    from fliptrace.verdicts import PairDiff

WIDTH = 80
#: Narrower terminals get lines of this width, which they wrap.
NARROWEST = 24
#: Passages told after the first screen; the page tells the rest, too.
_PASSAGES = ("ran", "flip", "root", "cache", "propagation", "coverage", "doubts")
#: Most sentences of a passage after the first screen, before the rest is left to the report.
_LONGEST = {
    "ran": 6,
    "flip": 2,
    "root": 4,
    "cache": 2,
    "propagation": 3,
    "coverage": 5,
    "doubts": 3,
}
#: A token's leading space must not be where a line ends; no sentence holds characters for private use.
_OPENING, _KEPT_OPENING = "“ ", "“\ue000"
_STYLES = {
    Outcome.IDENTICAL: "bold green",
    Outcome.LATENT: "bold cyan",
    Outcome.SURVIVING: "bold yellow",
    Outcome.TOKEN: "bold red",
}


@dataclass(frozen=True, slots=True)
class _Line:
    """One line; a heading ends with the line or, where a gist follows on it, after ``heading`` characters."""

    text: str
    heading: int = 0
    verdict: bool = False
    spans: tuple[tuple[int, int, str], ...] = ()


def _lines(story: Story, diff: PairDiff, width: int) -> list[_Line]:
    """Lay the story out: a first screen of verdict, flip, root, one line each for the rest, the map; then details."""
    lines = [_Line(line, verdict=True) for line in textwrap.wrap(story.verdict, width)]
    for passage in story.passages:
        if passage.leading:
            lines += [_Line(""), _Line(passage.heading, len(passage.heading))]
            lines += _wrapped(passage.sentences[: passage.leading], width)
    gists = [passage for passage in story.passages if passage.gist]
    if gists:
        lines.append(_Line(""))
    for passage in gists:
        start = f"{passage.heading}:"
        wrapped = textwrap.wrap(f"{start} {passage.gist}.", width, subsequent_indent="  ")
        lines.append(_Line(wrapped[0], len(start)))
        lines += [_Line(line) for line in wrapped[1:]]
    drawn = map_lines(diff, width)
    if drawn:
        lines += [_Line(""), _Line(drawn[0].text, len("Map"))]
        lines += [_Line(line.text, spans=line.spans) for line in drawn[1:]]
    for key in _PASSAGES:
        told = story.passage(key)
        rest = told.sentences[told.leading :] if told is not None else ()
        if told is None or not rest:
            continue
        heading = f"{told.heading}, more" if told.leading or told.gist else told.heading
        lines += [_Line(""), _Line(heading, len(heading))]
        shown = list(rest[: _LONGEST[key]])
        if len(rest) > len(shown):
            shown.append(f"({len(rest) - len(shown)} more in the report.)")
        lines += _wrapped(shown, width)
    return lines


def _wrapped(sentences: Iterable[str], width: int) -> list[_Line]:
    return [
        _Line(line.replace(_KEPT_OPENING, _OPENING))
        for sentence in sentences
        for line in textwrap.wrap(
            sentence.replace(_OPENING, _KEPT_OPENING),
            width,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
    ]


def plain_summary(diff: PairDiff, reference: Trace, candidate: Trace, *, width: int = WIDTH) -> str:
    """Return the story as plain text, without any terminal control.

    Args:
        diff: what was found.
        reference: the reference's trace.
        candidate: the same of the candidate.
        width: most columns of a line, at least NARROWEST.

    Returns:
        Lines joined by line feeds, the verdict first, ending with a line feed.
    """
    lines = _lines(tell_story(diff, reference, candidate), diff, max(NARROWEST, width))
    return "\n".join(line.text for line in lines) + "\n"


def terminal_summary(diff: PairDiff, reference: Trace, candidate: Trace) -> RenderableType:
    """Return the story as something that rich prints: the lines of plain_summary, styled, at most 80 columns wide.

    No markup is parsed: tokens and names that look like rich's tags are shown as they are.

    Args:
        diff: what was found.
        reference: the reference's trace.
        candidate: the same of the candidate.
    """
    return _Styled(tell_story(diff, reference, candidate), diff, _STYLES[diff.outcome])


@dataclass(frozen=True, slots=True)
class _Styled:
    """A story for rich, laid out when the terminal's width is known."""

    story: Story
    diff: PairDiff
    verdict_style: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        width = max(NARROWEST, min(WIDTH, options.max_width))
        for line in _lines(self.story, self.diff, width):
            text = Text(line.text, style=self.verdict_style if line.verdict else "")
            if line.heading:
                text.stylize("bold", 0, line.heading)
            for start, end, style in line.spans:
                text.stylize(style, start, end)
            yield text
