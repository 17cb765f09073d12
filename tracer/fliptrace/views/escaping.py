"""Hostile text made safe to look at: prompts, tokens, names and paths are data, in every view.

HTML escaping is jinja2's work. What it leaves are characters that lie about the text around them: bidirectional
controls that reorder it, zero-width characters that hide in it, terminal escapes, lone surrogates that no encoder
accepts. They are replaced by a visible name, so that what a reader sees is what is there.
"""

from __future__ import annotations

import unicodedata
from typing import Any

_HIDDEN_CATEGORIES = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}
_PICTURES = {"\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡"}

_PLOTLY_SYNTAX = frozenset("&<>$%{}\\")

#: Longest token or name shown in full inside a sentence or a label.
LABEL_LENGTH = 48
#: Longest sentence from elsewhere (an explanation, a trace's gap) shown in full.
SENTENCE_LENGTH = 600
#: Longest text of any other kind that is no running text: names, paths and values that nobody reads to their end.
LINE_LENGTH = 1000


def visible(text: str, *, keep_newlines: bool = False) -> str:
    """Replace characters that cannot be seen, or that change how others are seen, by visible ones.

    Args:
        text: any string, lone surrogates included. One that is no running text is cut where it is longer than
            LINE_LENGTH, and says so.
        keep_newlines: leave line feeds and tabs as they are, and the length, for running text.

    Returns:
        A string without control, format, private, unassigned and surrogate characters: encodable in UTF-8, and safe to
        print in a terminal.
    """
    if not keep_newlines:
        text = shorten(text, LINE_LENGTH)
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible_character(character, keep_newlines) for character in text)


def _visible_character(character: str, keep_newlines: bool) -> str:
    if keep_newlines and character in "\n\t":
        return character
    if unicodedata.category(character) not in _HIDDEN_CATEGORIES:
        return character
    if character in _PICTURES:
        return _PICTURES[character]
    if character < " ":
        return chr(0x2400 + ord(character))
    return f"⟨U+{ord(character):04X}⟩"


def shorten(text: str, limit: int = LABEL_LENGTH) -> str:
    """Cut a long text and say how long it was; the cut is never silent."""
    if len(text) <= limit:
        return text
    return f"{text[: limit - 8]}… ({len(text)} characters)"


def clipped(text: str, limit: int) -> str:
    """Return a text visible and cut to a label's width, with an ellipsis where it was cut."""
    seen = visible(text)
    return seen if len(seen) <= limit else f"{seen[: limit - 1]}…"


def quoted(text: str, limit: int = LABEL_LENGTH) -> str:
    """Return a token or name in quotation marks, visible and short enough for a sentence."""
    return f"“{visible(shorten(text, limit))}”"


def said(sentence: str) -> str:
    """Return words that came from elsewhere, visible and of a length that people read."""
    return visible(shorten(sentence, SENTENCE_LENGTH))


def stopped(sentence: str) -> str:
    """Return a sentence that came from elsewhere with a full stop, if it brought none."""
    text = said(sentence)
    return text if text.endswith((".", "!", "?")) else f"{text}."


def shown(value: Any, limit: int = 400) -> str:
    """Return any manifest value as visible text; an absent one (None) as a dash."""
    return "–" if value is None else visible(shorten(str(value), limit))


def plotly_label(text: str) -> str:
    """Escape a text for plotly, which reads markup, links and ``$`` formulas in labels.

    Args:
        text: any string.

    Returns:
        The text with the characters that plotly interprets as character references, which it shows as they are.
    """
    return "".join(
        f"&#{ord(character)};" if character in _PLOTLY_SYNTAX else character
        for character in visible(text)
    )
