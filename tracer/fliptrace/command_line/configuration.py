"""Options from a TOML file: each key is an option's name, and what is typed on the command line goes before the file.

A table named like the subcommand holds its options; keys outside of tables are for every subcommand that is run with
the file, and are refused like a typed option where there is none of that name. Tables of other subcommands are passed
over; one of no subcommand's name is refused, as a misspelt one would say nothing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from fliptrace.errors import InputError

_OPTION = "--config"
#: Of trace-check, in a file that studies may share.
CHECK_TABLE = "check"


def with_configuration(
    arguments: Sequence[str], subcommand: str, tables: Collection[str]
) -> list[str]:
    """Replace ``--config FILE`` by the options that the file holds, less those that are typed.

    Args:
        arguments: what was typed.
        subcommand: whose table is read.
        tables: names that a table may have.

    Raises:
        InputError: the file cannot be read, or holds a table that is no subcommand's or a value that is no option's.
    """
    typed: list[str] = []
    files: list[str] = []
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if word == _OPTION and position + 1 < len(arguments):
            files.append(arguments[position + 1])
            position += 1
        elif word.startswith(f"{_OPTION}="):
            files.append(word.partition("=")[2])
        else:
            typed.append(word)
        position += 1
    names = {word.partition("=")[0] for word in typed if word.startswith("--")}
    given: list[str] = []
    for file in files:
        for name, value in _options(file, subcommand, tables).items():
            option = f"--{name.replace('_', '-')}"
            if option not in names:
                given += _words(option, value, file)
    return [*given, *typed]


def with_ray_address(arguments: Sequence[str]) -> list[str]:
    """Let ``--ray`` stand alone: it then means this machine."""
    words: list[str] = []
    for position, word in enumerate(arguments):
        words.append(word)
        following = arguments[position + 1] if position + 1 < len(arguments) else "--"
        if word == "--ray" and following.startswith("-"):
            words.append("local")
    return words


def _options(file: str, subcommand: str, tables: Collection[str]) -> dict[str, Any]:
    path = Path(file).expanduser()
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} cannot be read as TOML ({error})") from error
    general = {name: value for name, value in found.items() if not isinstance(value, dict)}
    for name in found:
        if (name in tables) == (name in general):
            named = ", ".join(f"[{table}]" for table in tables)
            raise InputError(
                f"{path}: {name!r} must be a table of a subcommand's options ({named}) or, outside of tables, an "
                "option's name with a value"
            )
    own: dict[str, Any] = found.get(subcommand, {})
    return {**general, **own}


def _words(option: str, value: Any, file: str) -> list[str]:
    if value is True:
        return [option]
    if value is False:
        return []
    if isinstance(value, list):
        return [word for part in value for word in _words(option, part, file)]
    if isinstance(value, (str, int, float)):
        return [f"{option}={value}"]
    raise InputError(
        f"{file}: {option.removeprefix('--')} must be a text, a number, true, false or a list; "
        f"got {type(value).__name__}"
    )
