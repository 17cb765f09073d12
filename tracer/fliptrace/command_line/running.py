"""What all commands share: exit codes, one line per error, progress on stderr.

Exit codes: 0 identical or passed, 1 diverged, 2 trouble (one line on stderr), 3 void.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from fliptrace.errors import FliptraceError, ObserverEffectError
from fliptrace.verdicts import Outcome

IDENTICAL, DIVERGED, TROUBLE, VOID = 0, 1, 2, 3

#: Worst outcome that still exits with 0, per --fail-on level.
_FAILS_ON = {
    "token": {Outcome.TOKEN},
    "surviving": {Outcome.TOKEN, Outcome.SURVIVING},
    "any": {Outcome.TOKEN, Outcome.SURVIVING, Outcome.LATENT},
}


def exit_code(outcome: Outcome, fail_on: str) -> int:
    """Return 1 when the outcome is one that ``--fail-on`` names, else 0."""
    return DIVERGED if outcome in _FAILS_ON[fail_on] else IDENTICAL


def run(command: Callable[..., Any], name: str) -> None:
    """Run a command as a program: one line on stderr for everything that goes wrong, and the exit code."""
    os.environ.setdefault(
        "TQDM_DISABLE", "1"
    )  # the loading libraries' bars; progress is ours to show
    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    application.command()(command)
    program = typer.main.get_command(application)
    debug = "--debug" in sys.argv[1:]
    try:
        code = program.main(prog_name=name, standalone_mode=False)
    except click.exceptions.Abort:
        fail(name, "interrupted; nothing was kept")
        sys.exit(130)
    except click.ClickException as error:
        fail(name, one_line(error.format_message()) + f" (see {name} --help)")
        sys.exit(TROUBLE)
    except FliptraceError as error:
        if debug:
            raise
        fail(name, one_line(str(error)))
        sys.exit(VOID if isinstance(error, ObserverEffectError) else TROUBLE)
    except KeyboardInterrupt:
        fail(name, "interrupted; nothing was kept")
        sys.exit(130)
    except (
        Exception
    ) as error:  # the last line of defence: a person gets one line, --debug the traceback
        if debug:
            raise
        fail(
            name,
            f"unexpected {type(error).__name__}: {one_line(str(error))}; run again with --debug and report it",
        )
        sys.exit(TROUBLE)
    sys.exit(code if isinstance(code, int) else IDENTICAL)


def fail(name: str, message: str) -> None:
    """Print one line on stderr."""
    print(f"{name}: {message}", file=sys.stderr)  # noqa: T201 (one line for a person is this function's purpose)


def one_line(text: str) -> str:
    """Join the lines of a message."""
    return " ".join(part.strip() for part in text.splitlines() if part.strip())


def _say_nothing(what: str, done: int, total: int) -> None:
    """Take a report and show nothing."""


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show progress on stderr while inside; nothing when quiet or when stderr is no terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield _say_nothing
        return
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("loading the model", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show
