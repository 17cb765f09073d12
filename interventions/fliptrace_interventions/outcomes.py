"""What came of a continuation beside its token: the extracted answer and whether it is right."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

_MARKED = re.compile(
    r"(?:final answer\s*(?:is)?\s*:?|####)\s*[^\d\n+-]*([+-]?[\d,]*\.?\d+)", re.IGNORECASE
)
_NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?|[+-]?\.\d+")


def gsm8k_answer(text: str) -> str | None:
    """Return the final number of a GSM8K answer: after the last ``Final answer:`` or ``####``, else the last number.

    Returns:
        The number without thousands separators and trailing zeros (``1,200.50`` gives ``1200.5``), None without one.
    """
    marked = _MARKED.findall(text)
    found = marked[-1] if marked else next(reversed(_NUMBER.findall(text)), None)
    if found is None:
        return None
    try:
        number = Decimal(found.replace(",", ""))
    except InvalidOperation:
        return None
    plain = f"{number.normalize():f}"
    return "0" if plain in ("-0", "0") else plain


def same_answer(found: object, expected: object) -> bool:
    """Tell whether an extracted answer is the expected one; numbers are compared as numbers, all else as text."""
    if found is None or expected is None:
        return False
    first, second = str(found).strip(), str(expected).strip()
    try:
        return Decimal(first.replace(",", "")) == Decimal(second.replace(",", ""))
    except InvalidOperation:
        return first == second
