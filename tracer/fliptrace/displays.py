"""How notebooks show values that know no views: whoever has both says so, and is asked by name if nobody has yet."""

from __future__ import annotations

import html
import importlib
from collections.abc import Callable
from typing import Any

#: Says on import how traces and comparisons are shown. Named, not imported: the floor knows nothing above it.
_SHOWS = "fliptrace.pair"
_DISPLAYS: dict[type, Callable[[Any], str]] = {}


def show_with(kind: type, display: Callable[[Any], str]) -> None:
    """Let notebooks show values of a type by a function that returns HTML."""
    _DISPLAYS[kind] = display


def html_of(value: object) -> str:
    """Return what a notebook shows; the value's repr where nobody says how."""
    if type(value) not in _DISPLAYS:
        importlib.import_module(_SHOWS)
    display = _DISPLAYS.get(type(value))
    return f"<pre>{html.escape(repr(value))}</pre>" if display is None else display(value)
