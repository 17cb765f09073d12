"""Where a command's results go: the folder, the terminal, or JSON on stdout."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from fliptrace.pair import Pair


@dataclass(frozen=True, slots=True)
class Output:
    """How a command answers.

    Attributes:
        folder: the new folder for reports and traces.
        command: the command as it was typed, for the report.
        as_json: print JSON on stdout and nothing else.
        quiet: no progress.
        figures: formats of the pictures beside the report; none by default.
    """

    folder: Path
    command: str
    as_json: bool
    quiet: bool
    figures: tuple[str, ...] = ()

    def say(self, sentence: str) -> None:
        """Tell a person something; nothing when stdout carries JSON."""
        if not self.as_json:
            print(sentence)  # noqa: T201 (talking is this method's purpose)


def figure_formats(text: str | None) -> tuple[str, ...]:
    """Read what --figures was given, before anything runs.

    Raises:
        InputError: it names another format.
    """
    from fliptrace.views.static import parse_formats

    return () if text is None else parse_formats(text)


def write_pictures(pair: Pair, folder: Path, formats: tuple[str, ...]) -> None:
    """Write a pair's pictures beside its report; nothing when no format was asked for."""
    if formats:
        from fliptrace.views.static import write_figures

        write_figures(folder / "figures", formats, pair.diff, pair.reference)


def show_document(document: object) -> None:
    """Print JSON on stdout."""
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


def show_summary(pair: Pair) -> None:
    """Print the story: styled on a terminal, else plain text of 80 columns, or of the fewer that COLUMNS says."""
    console = Console()
    if console.is_terminal:
        from fliptrace.views import terminal_summary

        console.print(terminal_summary(pair.diff, pair.reference, pair.candidate))
    else:
        from fliptrace.views.terminal import WIDTH, plain_summary

        columns = os.environ.get("COLUMNS", "")
        width = min(WIDTH, int(columns)) if columns.isdecimal() else WIDTH
        sys.stdout.write(plain_summary(pair.diff, pair.reference, pair.candidate, width=width))
