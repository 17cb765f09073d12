"""Turn what a user typed, or a row of a data set, into token ids. The ids are what is compared and stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from fliptrace.errors import InputError

#: What GSM8K prompts ask for after the question (the paper: "concise reasoning followed by a numerical answer").
GSM8K_INSTRUCTION = (
    "Give concise step-by-step reasoning, then end with one line "
    '"Final answer: N", where N is the number.'
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready to run.

    Attributes:
        ids: token ids, chat template and special tokens included.
        text: the text that was encoded (after the chat template).
        chat_template: whether the tokenizer's chat template was applied.
        source: where it came from, for the manifest: ``command line``, a file, or ``gsm8k row 12``.
    """

    ids: tuple[int, ...]
    text: str
    chat_template: bool
    source: str


def encode_prompt(
    tokenizer: Any, text: str, *, chat_template: bool = True, source: str = "given"
) -> Prompt:
    """Encode a user's text.

    Args:
        tokenizer: the model's tokenizer.
        text: what the user asks.
        chat_template: apply the tokenizer's chat template when it has one; without it the text is encoded as it is,
            with the tokenizer's own special tokens.
        source: for the manifest.

    Raises:
        InputError: the text is empty, the chat template refuses it, or it encodes to nothing.
    """
    require_text(text, source)
    applied = chat_template and bool(getattr(tokenizer, "chat_template", None))
    if applied:
        try:
            rendered = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            if not type(error).__module__.startswith("jinja2"):  # a package of the views alone
                raise
            raise InputError(
                f"the tokenizer's chat template cannot hold the prompt ({source}): {error}; leave the template out "
                "(--no-chat-template)"
            ) from error
        ids = tokenizer(rendered, add_special_tokens=False, **_quietly(tokenizer))["input_ids"]
    else:
        rendered = text
        ids = tokenizer(text, **_quietly(tokenizer))["input_ids"]
    if not ids:
        raise InputError(f"the prompt ({source}) encodes to no token at all")
    return Prompt(tuple(ids), rendered, applied, source)


def _quietly(tokenizer: Any) -> dict[str, bool]:
    """Return what keeps a tokenizer from warning of a long text, which callers refuse in words of their own.

    Not every tokenizer of vLLM takes it.
    """
    return {"verbose": False} if "verbose" in signature(tokenizer.__call__).parameters else {}


def require_text(text: str, source: str) -> None:
    """Refuse an empty prompt, and one that is no text.

    Raises:
        InputError: there is nothing but white space, or bytes that are no UTF-8 (as surrogates, which Python makes of
            them on a command line).
    """
    if not text.strip():
        raise InputError(
            f"the prompt ({source}) is empty; give at least one character that is not white space"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the prompt ({source}) is no valid Unicode text: character {error.start} is half of one or a byte that is "
            "no UTF-8"
        ) from error


def read_dataset(specification: str, select: Sequence[int]) -> list[tuple[str, str]]:
    """Read prompts from a data set file.

    Args:
        specification: ``KIND:PATH``; KIND is ``gsm8k`` (JSON lines with ``question``) or ``jsonl`` (with ``prompt``).
        select: row numbers, 0-based.

    Returns:
        (source, text) per row, in the order of ``select``.

    Raises:
        InputError: unknown kind, unreadable file, no such row, a row without the field.
    """
    kind, separator, name = specification.partition(":")
    if not separator or kind not in _KINDS or not name:
        raise InputError(
            f"a data set is given as KIND:PATH with KIND one of {', '.join(_KINDS)}; got {specification!r}"
        )
    path = Path(name).expanduser()
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"data set {path} cannot be read ({error})") from error
    prompts = []
    for row in select:
        if not 0 <= row < len(lines):
            there = f"rows 0 to {len(lines) - 1}" if lines else "no rows"
            raise InputError(f"data set {path} has {there}; row {row} was selected")
        source = f"{kind} row {row}"
        try:
            prompts.append((source, _KINDS[kind](json.loads(lines[row]))))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}, row {row} is no {kind} row: {error!r}") from error
    return prompts


def parse_selection(words: Sequence[str]) -> list[int]:
    """Read row numbers and ranges: ``0 5 10-19`` gives 0, 5, 10 … 19.

    Raises:
        InputError: a word is neither.
    """
    rows: list[int] = []
    for word in (part for group in words for part in group.replace(",", " ").split()):
        first, separator, last = word.partition("-")
        if not first.isdecimal() or (separator and not last.isdecimal()):
            raise InputError(
                f"rows are selected by numbers and ranges such as 0 5 10-19; got {word!r}"
            )
        begin, end = int(first), int(last) if separator else int(first)
        if end < begin or end - begin > 1_000_000:
            raise InputError(f"a range of rows runs from low to high; got {word!r}")
        rows.extend(range(begin, end + 1))
    return rows


def _gsm8k(row: dict[str, Any]) -> str:
    return f"{row['question']}\n\n{GSM8K_INSTRUCTION}"


def _jsonl(row: dict[str, Any]) -> str:
    return str(row["prompt"])


_KINDS: dict[str, Callable[[dict[str, Any]], str]] = {"gsm8k": _gsm8k, "jsonl": _jsonl}
