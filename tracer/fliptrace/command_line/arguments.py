"""What is done to a command line as typed: rows gathered before it is parsed, prompts blotted out before it is kept."""

from __future__ import annotations

from collections.abc import Sequence


def without_prompts(arguments: list[str]) -> list[str]:
    """Return a command's arguments with the prompts blotted out, for a redacted report."""
    shown: list[str] = []
    for argument in arguments:
        if shown and shown[-1] == "--prompt":
            shown.append("(redacted)")
        elif argument.startswith("--prompt="):
            shown.append("--prompt=(redacted)")
        else:
            shown.append(argument)
    return shown


def with_rows_joined(arguments: Sequence[str]) -> list[str]:
    """Make ``--select 0 5 10-19`` one value, as a person writes it; this command has no other positional words."""
    joined: list[str] = []
    rows: list[str] | None = None
    for argument in arguments:
        if rows is not None and not argument.startswith("-"):
            rows.append(argument)
            joined[-1] = " ".join(rows)
        elif argument == "--select":
            joined += [argument, ""]
            rows = []
        else:
            joined.append(argument)
            rows = None
    if joined[-1:] == [""] and rows == []:
        joined.pop()  # nothing came after --select, which typer refuses by name
    return joined
