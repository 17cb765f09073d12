"""JSON lines that somebody else wrote, read with what JSON allows and no more."""

from __future__ import annotations

import json
from typing import Any


def lines_of(text: str) -> list[str]:
    """Return the lines that hold something.

    Only a line feed ends a line: JSON may hold other separators, such as U+2028, inside its texts.
    """
    return [line for line in text.removeprefix("\ufeff").split("\n") if line.strip()]


def value_of(line: str) -> Any:
    """Return a line's value.

    Raises:
        ValueError: it is no JSON; NaN and infinities are none.
    """
    return json.loads(line, parse_constant=_refused)


def _refused(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
