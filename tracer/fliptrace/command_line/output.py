"""Where a command's results go: the folder, the terminal, or JSON on stdout."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Output:
    """How a command answers.

    Attributes:
        folder: the new folder for reports and traces.
        command: the command as it was typed, for the report.
        as_json: print JSON on stdout and nothing else.
        quiet: no progress.
    """

    folder: Path
    command: str
    as_json: bool
    quiet: bool

    def say(self, sentence: str) -> None:
        """Tell a person something: on stdout, or on stderr when stdout carries JSON."""
        print(sentence, file=sys.stderr if self.as_json else sys.stdout)
