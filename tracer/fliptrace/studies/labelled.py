"""Labelled texts, of a CSV file or elsewhere, and the yes/no question asked of them: in training as in deciding."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
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
    file_path = Path(path).expanduser()
    try:
        # Spreadsheets begin a file with a byte order mark.
        with file_path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            lines = list(reader)
            there = list(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file_path} cannot be read as CSV ({error})") from error
    if not there:
        raise InputError(
            f"{file_path} is empty; its first line must name its columns, {text_column!r} among them"
        )
    for column in filter(None, (text_column, label_column)):
        if column not in there:
            raise InputError(
                f"{file_path} has no column {column!r}; it has {', '.join(map(str, there))}"
            )
    pairs = [
        (line[text_column] or "", line[label_column] or "" if label_column else "")
        for line in lines
    ]
    return labelled_texts(pairs, str(file_path), label_column, threshold)


def labelled_texts(
    pairs: Iterable[tuple[str, str]], source: str, label_column: str, threshold: float
) -> list[LabelledText]:
    """Return rows of texts and what their label column holds.

    Args:
        pairs: text and label of each row; the label counts only where there is a label column.
        source: for messages.
        label_column: empty for none.
        threshold: from which number on a label is yes.

    Raises:
        InputError: no rows, a label that is none, or a threshold that is no number.
    """
    check_threshold(threshold)
    found = [
        LabelledText(
            number,
            text,
            _label(label, f"{source}, row {number}, column {label_column!r}", threshold)
            if label_column
            else None,
        )
        for number, (text, label) in enumerate(pairs)
    ]
    if not found:
        raise InputError(f"{source} has no rows")
    return found


def distinct(rows: Sequence[LabelledText]) -> list[LabelledText]:
    """Return the rows that have a text which no row before them has, as the paper keeps them."""
    seen: dict[str, LabelledText] = {}
    for row in rows:
        if row.text.strip():
            seen.setdefault(row.text, row)
    return list(seen.values())


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


def _label(text: str, where: str, threshold: float) -> bool:
    word = text.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{where}: a label is yes, no, true, false or a number; got {text!r}")
    return number >= threshold
