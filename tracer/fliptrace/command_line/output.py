"""Where a command's results go: the folder, the terminal, or JSON on stdout."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fliptrace.verdicts import Outcome

if TYPE_CHECKING:
    from fliptrace.pair import Pair
    from fliptrace.trace import Trace


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
        """Tell a person something; nothing when stdout carries JSON."""
        if not self.as_json:
            print(sentence)  # noqa: T201 (talking is this method's purpose)


def show_document(document: object) -> None:
    """Print JSON on stdout."""
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


def show_summary(pair: Pair, at_most: int | None = None) -> None:
    """Print the story and what ran: styled on a terminal, plain text of 80 columns anywhere else.

    Args:
        pair: what was found.
        at_most: how many candidates were allowed, when they were searched now.
    """
    console = Console()
    width = console.width if console.is_terminal else 80
    if console.is_terminal:
        from fliptrace.views import terminal_summary

        console.print(terminal_summary(pair.diff, pair.reference, pair.candidate))
    else:
        sys.stdout.write(pair.summary())
    lines = [f"{name}: {_how(trace)}" for name, trace in _executions(pair)]
    if pair.attempts is not None and at_most is not None:
        lines.append(_search(pair, pair.attempts, at_most))
    sys.stdout.write("\nWhat ran\n")
    for line in lines:
        sys.stdout.write(textwrap.fill(line, width, initial_indent="  ", subsequent_indent="    "))
        sys.stdout.write("\n")


def _executions(pair: Pair) -> tuple[tuple[str, Trace], tuple[str, Trace]]:
    return ("Reference", pair.reference), ("Candidate", pair.candidate)


def _how(trace: Trace) -> str:
    """Name the model, where it ran and how its shrinks summed."""
    said = trace.manifest.get
    return (
        f"{said('model.name')} + {said('adapter.name')} in {said('model.dtype')} on {said('environment.device')}, "
        f"{said('reduction.identity')} ({said('reduction.schedule')})"
    )


def _search(pair: Pair, attempts: int, at_most: int) -> str:
    """Say how long the search was: one pair in twenty tells something else than the first."""
    if pair.diff.outcome is Outcome.TOKEN:
        return f"Search: candidate {attempts} of at most {at_most} is the first that chose another token."
    candidates = (
        f"{attempts} of at most {at_most} candidates ran" if at_most > 1 else "1 candidate ran"
    )
    if attempts < at_most:
        return (
            f"Search: {candidates}; the last, compared here, is the first that differed as --fail-on asked, though it "
            "chose the same tokens."
        )
    return f"Search: {candidates} and chose the same tokens; the last is compared here."
