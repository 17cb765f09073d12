"""Tasks: where prompts come from, which of them are asked, and how an output is scored.

``gsm8k:PATH`` reads JSON lines with ``question`` and ``answer`` and prepares them as the paper does; ``mbpp:PATH`` the
test split of MBPP's full configuration; ``jsonl:PATH`` any JSON lines with ``prompt`` and, if they are to be scored,
``answer``; ``lm-eval:PATH`` and ``inspect:PATH`` what those harnesses asked, from their logs; ``bundled`` the problems
that ship with the package. A scorer ``module:function`` takes the place of the
answer's comparison.
"""

from __future__ import annotations

import hashlib
import importlib
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fliptrace.errors import InputError
from fliptrace.pair.bundled import bundled_model
from fliptrace.pair.prompts import GSM8K_INSTRUCTION, parse_selection, require_text
from fliptrace.studies.amounts import check_at_least
from fliptrace.studies.answers import final_answer, number_of, prepared_solution
from fliptrace.studies.importers import gold_of, read_inspect, read_lm_eval
from fliptrace.studies.json_lines import lines_of, value_of
from fliptrace.studies.programs import TEST_TASKS, mbpp_prompt

#: Called with the generated text and the data set's row; returns whether it is right (None: cannot be told), or an
#: answer and that.
Scorer = Callable[[str, Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt of a task.

    Attributes:
        source: its name, such as ``gsm8k row 12``.
        number: its row, 0-based.
        text: what the user asks, instruction included.
        gold: the right answer as number_of gives it, None where it is not known.
        row: the data set's row, for scorers.
    """

    source: str
    number: int
    text: str
    gold: str | None
    row: Mapping[str, Any]

    def arguments(self) -> dict[str, Any]:
        """Return JSON values for an item."""
        return {
            "source": self.source,
            "number": self.number,
            "text": self.text,
            "gold": self.gold,
            "row": dict(self.row),
        }


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of a task.

    Attributes:
        rows: words such as ``0-9 12``; empty to draw.
        count: how many to draw, or take from the front of ``rows``; None for all that ``rows`` name.
        seed: of the draw.
    """

    rows: tuple[str, ...] = ()
    count: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers that select nothing, or draw what another seed draws."""
        if self.count is not None:
            check_at_least("the number of prompts", self.count)
        check_at_least("the prompt seed", self.seed, 0)

    def of(self, total: int) -> list[int]:
        """Return row numbers.

        Raises:
            InputError: there are not so many rows.
        """
        if not total:
            raise InputError("the data set is empty; it must hold at least one row")
        if self.rows:
            rows = parse_selection(self.rows)
            if len(set(rows)) != len(rows):
                raise InputError(f"a row was selected twice: {' '.join(self.rows)}")
            if rows and max(rows) >= total:
                raise InputError(
                    f"the data set has {total} rows, from 0; row {max(rows)} was selected"
                )
            return rows[: self.count]
        count = total if self.count is None else self.count
        if count > total:
            raise InputError(
                f"the data set has {total} rows, fewer than {count}; --prompts {total} takes all of them"
            )
        # The first n of a seeded shuffle: a larger count later adds to what was drawn before.
        order = list(range(total))
        random.Random(self.seed).shuffle(order)
        return order[:count]


def read_questions(task: str, selection: Selection) -> list[Question]:
    """Read the chosen prompts of a task.

    Args:
        task: ``bundled``, ``gsm8k:PATH``, ``jsonl:PATH``, ``mbpp:PATH``, ``lm-eval:PATH`` or ``inspect:PATH``.
        selection: which rows; of MBPP rows of its test split, from 0.

    Raises:
        InputError: unknown task, unreadable file, no such row, a row without its fields.
    """
    if task == "bundled":
        prompts = bundled_model().prompts
        return [
            Question(
                f"bundled prompt {row}",
                row,
                prompts[row].text,
                str(prompts[row].answer),
                {"prompt": prompts[row].text, "answer": prompts[row].answer},
            )
            for row in selection.of(len(prompts))
        ]
    kind, separator, name = task.partition(":")
    if not separator or kind not in (*_READERS, *_IMPORTERS) or not name:
        kinds = ", ".join(f"{each}:PATH" for each in (*_READERS, *_IMPORTERS))
        raise InputError(f"a task is bundled or one of {kinds}; got {task!r}")
    path = Path(name).expanduser()
    if kind in _IMPORTERS:
        return _imported(kind, path, selection)
    try:
        lines = lines_of(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"data set {path} cannot be read ({error})") from error
    if kind == "mbpp":
        lines = _test_split(path, lines)
    questions = []
    for number in selection.of(len(lines)):
        try:
            row = _object_of(lines[number])
            text, gold = _READERS[kind](row)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}, row {number} is no {kind} row: {error!r}") from error
        source = f"{kind} row {number}"
        require_text(text, source)
        questions.append(Question(source, number, text, gold, row))
    return questions


def _gsm8k(row: Mapping[str, Any]) -> tuple[str, str | None]:
    return f"{_text_of(row, 'question')}\n\n{GSM8K_INSTRUCTION}", final_answer(
        prepared_solution(row["answer"])
    )


def _jsonl(row: Mapping[str, Any]) -> tuple[str, str | None]:
    answer = row.get("answer")
    return _text_of(row, "prompt"), None if answer is None else number_of(str(answer))


def _object_of(line: str) -> dict[str, Any]:
    row = value_of(line)
    if not isinstance(row, dict):
        raise TypeError(f"an object is required, not {type(row).__name__}")
    return row


def _text_of(row: Mapping[str, Any], field: str) -> str:
    text = row[field]
    if not isinstance(text, str):
        raise TypeError(f"{field!r} must be a text, not {text!r}")
    return text


def _mbpp(row: Mapping[str, Any]) -> tuple[str, str | None]:
    return mbpp_prompt(row), None


def _test_split(path: Path, lines: Sequence[str]) -> list[str]:
    """Return MBPP's test rows; a file without task numbers, or of test rows alone, is taken as it is."""
    try:
        numbers = [value_of(line).get("task_id") for line in lines]
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path} is no file of MBPP rows ({error!r})") from error
    if None in numbers:
        return list(lines)
    return [
        line for line, number in zip(lines, numbers, strict=True) if number in TEST_TASKS
    ] or list(lines)


def _imported(kind: str, path: Path, selection: Selection) -> list[Question]:
    rows = _IMPORTERS[kind](path)
    questions = []
    for number in selection.of(len(rows)):
        row = rows[number]
        source = f"{kind} {row['name']}"
        require_text(row["prompt"], source)
        questions.append(Question(source, number, row["prompt"], gold_of(row["target"]), row))
    return questions


_IMPORTERS = {"lm-eval": read_lm_eval, "inspect": read_inspect}
_READERS: dict[str, Callable[[Mapping[str, Any]], tuple[str, str | None]]] = {
    "gsm8k": _gsm8k,
    "jsonl": _jsonl,
    "mbpp": _mbpp,
}


def load_scorer(name: str | None) -> Scorer | None:
    """Import a scorer ``module:function``; the working directory is searched, too.

    Raises:
        InputError: it cannot be imported, or is no function.
    """
    if name is None:
        return None
    module_name, separator, function_name = name.partition(":")
    if not separator or not module_name or not function_name:
        raise InputError(f"a scorer is given as module:function; got {name!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:
        # Its module is the user's own code, which may raise anything.
        raise InputError(
            f"scorer {name!r} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    if not callable(found):
        raise InputError(f"scorer {name!r} must be a function; it is a {type(found).__name__}")
    scorer: Scorer = found
    return scorer


def scorer_sha256(name: str) -> str | None:
    """Return the hash of the file that a scorer comes from, so that an edited one is another; None without a file.

    Raises:
        InputError: see load_scorer.
    """
    file = getattr(sys.modules.get(getattr(load_scorer(name), "__module__", "")), "__file__", None)
    return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def score(
    text: str, gold: str | None, row: Mapping[str, Any], scorer: Scorer | None
) -> tuple[str | None, bool | None]:
    """Return the answer that a text gives, and whether it is right; None where that cannot be told.

    Raises:
        InputError: a scorer raised, or returned neither a truth value nor an answer and one.
    """
    if scorer is None:
        answer = final_answer(text)
        return answer, None if gold is None else answer == gold
    try:
        given = scorer(text, row)
    except Exception as error:
        raise InputError(
            f"the scorer raised {type(error).__name__}: {error}; it must score any text"
        ) from error
    answer, right = given if isinstance(given, Sequence) and len(given) == 2 else (None, given)
    if right is not None and not isinstance(right, bool):
        raise InputError(
            f"a scorer returns True, False, None, or an answer and one of these; got {given!r}"
        )
    return None if answer is None else str(answer), right
