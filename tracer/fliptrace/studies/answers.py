"""Final answers of generated texts, and whether they are right; GSM8K as the paper prepares it.

Exact numerical equality; what is missing or cannot be read as a number is no answer and is not right.
"""

from __future__ import annotations

import re
from fractions import Fraction

_MARK = re.compile(r"final answer\s*:", re.IGNORECASE)
_NUMBER = re.compile(
    r"^[^\w.+-]*(?P<top>[+-]?\s*\$?\s*(?:\d[\d,]*(?:\.\d+)?|\.\d+))(?:\s*/\s*(?P<bottom>\d+))?"
)
_ANNOTATION = re.compile(r"<<[^<>]*>>")
_DELIMITER = re.compile(r"^####\s*", re.MULTILINE)


def final_answer(text: str) -> str | None:
    """Return the number after the last ``Final answer:``, None where there is none.

    Returns:
        The number in lowest terms, without separators: ``1,200.50`` gives ``2401/2``, ``$18.`` gives ``18``.
    """
    marks = list(_MARK.finditer(text))
    if not marks:
        return None
    return number_of(text[marks[-1].end() :].lstrip().partition("\n")[0])


def number_of(text: str) -> str | None:
    """Read the number with which a text begins, signs of currency and emphasis aside; None where there is none."""
    found = _NUMBER.match(text)
    if found is None:
        return None
    top = re.sub(r"[,$\s]", "", found["top"])
    bottom = int(found["bottom"] or 1)
    return str(Fraction(top) / bottom) if bottom else None


def prepared_solution(solution: str) -> str:
    """Prepare a GSM8K solution: calculator annotations out, ``Final answer: N`` in the place of ``#### N``."""
    return _DELIMITER.sub("Final answer: ", _ANNOTATION.sub("", solution))
