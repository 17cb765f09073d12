"""What trace-pair and trace-diff print: the story in one screen, with rich or as plain text."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from fliptrace.verdicts import Outcome
from fliptrace.views.story import Story, tell_story

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fliptrace.trace import Trace
    from fliptrace.verdicts import PairDiff

WIDTH = 80
#: Passages of the terminal's story; the page tells the rest, too.
_PASSAGES = ("flip", "root", "cache", "propagation", "coverage", "doubts")
#: Longest passage, in sentences, before the rest is left to the report.
_LONGEST = {"flip": 4, "root": 8, "cache": 3, "propagation": 3, "coverage": 4, "doubts": 2}
_STYLES = {
    Outcome.IDENTICAL: "bold green",
    Outcome.LATENT: "bold cyan",
    Outcome.SURVIVING: "bold yellow",
    Outcome.TOKEN: "bold red",
}


def _shortened(story: Story) -> list[tuple[str, list[str]]]:
    parts = []
    for key in _PASSAGES:
        passage = story.passage(key)
        if passage is None:
            continue
        sentences = list(passage.sentences[: _LONGEST[key]])
        left = len(passage.sentences) - len(sentences)
        if left:
            sentences.append(f"({left} more in the report.)")
        parts.append((passage.heading, sentences))
    return parts


def plain_summary(diff: PairDiff, reference: Trace, candidate: Trace) -> str:
    """Return the story as plain text of at most 80 columns, without any terminal control.

    Args:
        diff: what was found.
        reference: the reference's trace.
        candidate: the same of the candidate.

    Returns:
        Lines joined by line feeds, the verdict first, ending with a line feed.
    """
    story = tell_story(diff, reference, candidate)
    lines = textwrap.wrap(story.verdict, WIDTH)
    for heading, sentences in _shortened(story):
        lines += ["", heading]
        for sentence in sentences:
            lines += textwrap.wrap(
                sentence,
                WIDTH,
                initial_indent="  ",
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
    return "\n".join(lines) + "\n"


def terminal_summary(diff: PairDiff, reference: Trace, candidate: Trace) -> RenderableType:
    """Return the story as something that rich prints.

    No markup is parsed: tokens and names that look like rich's tags are shown as they are.

    Args:
        diff: what was found.
        reference: the reference's trace.
        candidate: the same of the candidate.
    """
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    story = tell_story(diff, reference, candidate)
    parts: list[RenderableType] = [Text(story.verdict, style=_STYLES[diff.outcome])]
    for heading, sentences in _shortened(story):
        parts.append(Text(f"\n{heading}", style="bold"))
        parts += [Padding(Text(sentence), (0, 0, 0, 2), expand=False) for sentence in sentences]
    return Group(*parts)
