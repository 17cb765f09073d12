"""Rows for training: question and answer of each, and which are for training, validation and test."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fliptrace.errors import InputError
from fliptrace.pair.prompts import GSM8K_INSTRUCTION, encode_prompt
from fliptrace.studies.answers import prepared_solution
from fliptrace.studies.json_lines import lines_of, value_of
from fliptrace.studies.labelled import LabelledText, decision_prompt, distinct, read_labelled
from fliptrace.studies.programs import mbpp_prompt
from fliptrace.studies.training.settings import LABELLED, TrainSettings

#: MBPP's own splits, by task_id.
_MBPP_TRAINING, _MBPP_VALIDATION = range(601, 975), range(511, 601)
_GSM8K_VALIDATION = 0.05


@dataclass(frozen=True, slots=True)
class Example:
    """A question and the answer that is learnt."""

    question: str
    answer: str


@dataclass(frozen=True)
class Splits:
    """All examples.

    Attributes:
        training: in the file's order.
        validation: never trained on; the weights that do best on it are kept.
        test: rows of a labelled file for trace-study decide; empty for others.
        data_sha256: of the file; of a data set of the datasets library, of its texts and labels.
        duplicates: rows of labelled data whose text was empty or had come before.
    """

    training: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[LabelledText]
    data_sha256: str
    duplicates: int = 0


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a question and its answer.

    Attributes:
        ids: of both, what ends a turn included.
        prompt: how many belong to the question.
    """

    ids: tuple[int, ...]
    prompt: int


def read_splits(settings: TrainSettings) -> Splits:
    """Read a task's file and split it with the seed.

    Raises:
        InputError: unreadable, not of its kind, or too few rows.
    """
    if settings.kind in LABELLED:
        return _labelled(settings)
    try:
        data = settings.data.read_bytes()
    except OSError as error:
        raise InputError(f"data set {settings.data} cannot be read ({error})") from error
    digest = hashlib.sha256(data).hexdigest()
    make = {"gsm8k": _gsm8k, "mbpp": _mbpp}[settings.kind]
    rows = _json_lines(settings.data, data)
    if settings.kind == "gsm8k":
        order = list(range(len(rows)))
        random.Random(settings.seed).shuffle(order)
        kept_back = set(order[: round(_GSM8K_VALIDATION * len(rows))])
        training = [row for number, row in enumerate(rows) if number not in kept_back]
        validation = [row for number, row in enumerate(rows) if number in kept_back]
    else:
        training = [row for row in rows if row.get("task_id") in _MBPP_TRAINING]
        validation = [row for row in rows if row.get("task_id") in _MBPP_VALIDATION]
    if not training or not validation:
        raise InputError(
            f"{settings.data} leaves {len(training)} rows for training and {len(validation)} for validation; both need "
            "some (MBPP's are known by task_id: 601 to 974 and 511 to 600)"
        )
    try:
        return Splits(
            [make(row) for row in training], [make(row) for row in validation], (), digest
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{settings.data} has a row that is no {settings.kind} row: {error!r}"
        ) from error


def _json_lines(path: Path, data: bytes) -> list[dict[str, Any]]:
    try:
        rows = [value_of(line) for line in lines_of(data.decode("utf-8"))]
    except ValueError as error:
        raise InputError(f"data set {path} is no file of JSON lines ({error})") from error
    if not all(isinstance(row, dict) for row in rows):
        raise InputError(f"data set {path} has a line that is no JSON object")
    return rows


def _gsm8k(row: Mapping[str, Any]) -> Example:
    return Example(f"{row['question']}\n\n{GSM8K_INSTRUCTION}", prepared_solution(row["answer"]))


def _mbpp(row: Mapping[str, Any]) -> Example:
    program = str(row["code"]).replace("\r\n", "\n").strip()
    return Example(mbpp_prompt(row), f"```python\n{program}\n```")


def _labelled(settings: TrainSettings) -> Splits:
    if not settings.label_column:
        raise InputError("training takes labels: name the label column")
    columns = settings.text_column, settings.label_column, settings.threshold
    if settings.kind == "csv":
        rows = read_labelled(settings.data, *columns)
        digest = hashlib.sha256(settings.data.read_bytes()).hexdigest()
    else:
        from fliptrace.studies.dataset_library import read_labelled_dataset

        rows = read_labelled_dataset(settings.place, settings.split, *columns)
        said = json.dumps([[row.text, row.label] for row in rows])
        digest = hashlib.sha256(said.encode()).hexdigest()
    kept = distinct(rows)
    test, rest = draw_in_proportion(kept, settings.test_rows, settings.seed)
    validation, training = draw_in_proportion(rest, settings.validation_rows, settings.seed + 1)
    wanted = 1 if settings.training_rows is None else settings.training_rows
    if len(training) < wanted:
        raise InputError(
            f"{settings.place} has {len(kept)} different texts; {settings.validation_rows} for validation and "
            f"{settings.test_rows} for a test leave {len(training)} for training, fewer than {wanted}"
        )
    if settings.training_rows is not None:
        training, _ = draw_in_proportion(training, settings.training_rows, settings.seed + 2)

    def example(row: LabelledText) -> Example:
        question = decision_prompt(row.text, settings.question, settings.yes, settings.no)
        return Example(question, settings.yes if row.label else settings.no)

    return Splits(
        [example(row) for row in training],
        [example(row) for row in validation],
        test,
        digest,
        len(rows) - len(kept),
    )


def draw_in_proportion(
    rows: Sequence[LabelledText], count: int, seed: int
) -> tuple[list[LabelledText], list[LabelledText]]:
    """Draw rows so that both classes have the share that they have in all; return the drawn and the others."""
    positive = [row for row in rows if row.label]
    negative = [row for row in rows if not row.label]
    generator = random.Random(seed)
    of_positive = round(count * len(positive) / max(1, len(rows)))
    drawn: set[int] = set()
    for group, wanted in ((positive, of_positive), (negative, count - of_positive)):
        drawn |= {row.number for row in generator.sample(group, min(wanted, len(group)))}
    return (
        [row for row in rows if row.number in drawn],
        [row for row in rows if row.number not in drawn],
    )


def test_csv(rows: Sequence[LabelledText], settings: TrainSettings) -> str:
    """Return the test rows as a CSV file, for trace-study decide."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((settings.text_column, settings.label_column))
    writer.writerows((row.text, "yes" if row.label else "no") for row in rows)
    return out.getvalue()


def encoder(tokenizer: Any, *, chat_template: bool) -> Callable[[Example], Encoded]:
    """Return what encodes an example as it will be asked: template, question, answer, and what ends the turn."""
    end = tokenizer.eos_token or ""

    def encode(example: Example) -> Encoded:
        prompt = encode_prompt(tokenizer, example.question, chat_template=chat_template)
        answer = example.answer + end
        if prompt.chat_template:
            whole = tokenizer.apply_chat_template(
                [
                    {"role": "user", "content": example.question},
                    {"role": "assistant", "content": example.answer},
                ],
                tokenize=False,
            )
            if whole.startswith(prompt.text):  # the template knows what ends a turn
                answer = whole[len(prompt.text) :].rstrip()
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        return Encoded((*prompt.ids, *ids), len(prompt.ids))

    return encode
