"""``--vllm-argument NAME=VALUE``: what is passed through to ``vllm.LLM``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from fliptrace.command_line.options import MODEL
from fliptrace.errors import InputError

VllmArgumentOption = Annotated[
    list[str] | None,
    typer.Option(
        "--vllm-argument",
        help="With --engine vllm: an argument of vllm.LLM, its value in JSON, such as max_model_len=2048 or "
        "gpu_memory_utilization=0.3. Repeat the option for several.",
        metavar="NAME=VALUE",
        rich_help_panel=MODEL,
    ),
]

NeighboursOption = Annotated[
    str | None,
    typer.Option(
        help="With --engine vllm: requests that run in one batch with the traced one: how many of the bundled word "
        "problems, or a file of JSON lines.",
        metavar="N|FILE",
        rich_help_panel=MODEL,
    ),
]

_NAME = re.compile(r"[a-z][a-z0-9_]*")
#: Text that may stand without quotes: names of backends, dtypes, paths.
_WORD = re.compile(r"[A-Za-z_/~.][\w./:~-]*")
#: Python's spellings, which are no JSON and would be taken as texts.
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def read_vllm_arguments(words: Sequence[str] | None, engine: str) -> dict[str, Any]:
    """Read what was typed.

    Args:
        words: each NAME=VALUE; None for none.
        engine: --engine, or the engine that will run.

    Returns:
        Values by name.

    Raises:
        InputError: another engine, a word of another form, a value that is no JSON, or a name given twice.
    """
    if not words:
        return {}
    if engine != "vllm":
        raise InputError(
            f"--vllm-argument goes with --engine vllm; got --engine {engine} and {words[0]!r}"
        )
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals or not _NAME.fullmatch(name):
            raise InputError(
                f"--vllm-argument must be NAME=VALUE, such as max_model_len=2048; got {word!r}"
            )
        if name in found:
            raise InputError(f"--vllm-argument {name} is given twice; give it once")
        found[name] = _value(name, text.strip())
    return found


def _value(name: str, text: str) -> Any:
    if text in _PYTHON:
        raise InputError(
            f"--vllm-argument {name} must be JSON, where {text} is written {_PYTHON[text]}; got {text}"
        )
    try:
        return json.loads(text)
    except ValueError:
        if _WORD.fullmatch(text):
            return text
    raise InputError(
        f"--vllm-argument {name} must be JSON (a number, true, false, a text, a list or an object; quote it for the "
        f"shell); got {text!r}"
    )
