"""Labelled texts from a CSV file, and the yes/no question that is asked of them: in training as in deciding."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fliptrace.errors import InputError

#: Words that a label column may hold; numbers are compared with the threshold.
_WORDS = {"yes": True, "true": True, "no": False, "false": False}


@dataclass(frozen=True, slots=True)
class LabelledText:
    """A row.

    Attributes:
        number: its row, from 0.
        text: what is judged.
        label: whether yes is right; None without a label column.
    """

    number: int
    text: str
    label: bool | None

    @property
    def source(self) -> str:
        """Its name."""
        return f"row {self.number}"


def check_threshold(threshold: float) -> None:
    """Refuse a threshold with which every label would be no.

    Raises:
        InputError: it is infinite or not a number.
    """
    if not math.isfinite(threshold):
        raise InputError(f"the threshold must be a finite number; got {threshold}")


def read_labelled(
    path: str | Path, text_column: str, label_column: str, threshold: float
) -> list[LabelledText]:
    """Read a CSV file with a header line.

    Args:
        path: the file.
        text_column: what is judged.
        label_column: what is right; empty for none.
        threshold: from which number on a label is yes.

    Raises:
        InputError: unreadable, a column that is not there, a label or threshold that is none.
    """
    check_threshold(threshold)
    file_path = Path(path).expanduser()
    try:
        with file_path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file_path} cannot be read as CSV ({error})") from error
    for column in filter(None, (text_column, label_column)):
        if not lines or column not in lines[0]:
            there = ", ".join(lines[0]) if lines else "no rows"
            raise InputError(f"{file_path} has no column {column!r}; it has {there}")
    return [
        LabelledText(
            number,
            line[text_column] or "",
            _label(line[label_column] or "", number, threshold) if label_column else None,
        )
        for number, line in enumerate(lines)
    ]


def decision_prompt(text: str, question: str, yes: str, no: str) -> str:
    """Return what is asked of a text."""
    return f"{text}\n\n{question} Answer {yes} or {no}."


def label_tokens(tokenizer: Any, yes: str, no: str) -> tuple[int, int]:
    """Return the tokens with which the two answers begin.

    Raises:
        InputError: an answer encodes to no token, or both begin with the same one.
    """
    found = []
    for word in (yes, no):
        ids = tokenizer(word, add_special_tokens=False)["input_ids"]
        if not ids:
            raise InputError(f"the label {word!r} encodes to no token")
        found.append(int(ids[0]))
    if found[0] == found[1]:
        raise InputError(
            f"{yes!r} and {no!r} begin with the same token ({found[0]}) in this tokenizer; choose other words"
        )
    return found[0], found[1]


def _label(text: str, number: int, threshold: float) -> bool:
    word = text.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    try:
        return float(word) >= threshold
    except ValueError as error:
        raise InputError(
            f"row {number}: a label is yes, no, true, false or a number; got {text!r}"
        ) from error
