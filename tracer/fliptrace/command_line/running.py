"""What all commands share: exit codes, one line per error, progress on stderr.

Exit codes: 0 identical or passed, 1 diverged, 2 trouble (one line on stderr), 3 void.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import typer

from fliptrace.errors import FliptraceError, ObserverEffectError
from fliptrace.verdicts import LEVELS, Outcome
from fliptrace.views import progress

#: Progress on stderr, as in notebooks and log files.
progress_bar = progress.progress_bar

IDENTICAL, DIVERGED, TROUBLE, VOID, INTERRUPTED = 0, 1, 2, 3, 130

# typer has errors of its own (0.27 and later) or click's (before): either way its usage errors share this ancestor.
_UsageError: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


class InterruptedWithResultsError(Exception):
    """Raised by a command that was interrupted; the message says what was kept and how to go on."""


def exit_code(outcome: Outcome, fail_on: str) -> int:
    """Return 1 when the outcome is one that ``--fail-on`` names, else 0."""
    return DIVERGED if outcome in LEVELS[fail_on] else IDENTICAL


def trouble_code(error: FliptraceError) -> int:
    """Return 3 for an error that voids the experiment, else 2."""
    return VOID if isinstance(error, ObserverEffectError) else TROUBLE


def run(command: Callable[..., Any], name: str, arguments: Sequence[str] | None = None) -> None:
    """Run a command as a program: one line on stderr for everything that goes wrong, and the exit code.

    Args:
        command: a function with typer's annotations that returns the exit code.
        name: what the user typed to run it.
        arguments: the command line after the name; ``sys.argv`` when None.
    """
    typed = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in typed
    # The loading libraries' bars; progress is ours to show.
    os.environ.setdefault("TQDM_DISABLE", "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a prompt may hold what the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    with warnings.catch_warnings():
        if not debug:  # stderr is for the one line that a user can act on
            warnings.simplefilter("ignore")
        sys.exit(_code_of(command, name, typed, debug))


def _code_of(command: Callable[..., Any], name: str, typed: list[str], debug: bool) -> int:
    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    application.command(help=_reflowed(command.__doc__ or ""))(command)
    program: Any = typer.main.get_command(application)
    try:
        code = program.main(args=typed, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except InterruptedWithResultsError as error:
        fail(name, one_line(str(error)))
        return INTERRUPTED
    except (typer.Abort, KeyboardInterrupt):
        fail(name, "interrupted; nothing was kept")
        return INTERRUPTED
    except _UsageError as error:
        message = one_line(error.format_message()).rstrip(".")
        fail(name, f"{message}{_what_came(error, typed)} (see {name} --help)")
        return TROUBLE
    except FliptraceError as error:
        if debug:
            raise
        fail(name, one_line(str(error)))
        return trouble_code(error)
    except (BrokenPipeError, SystemExit):
        # typer turns the first into the second, with the code of a divergence; and Python would complain once more
        # when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        fail(name, "whoever read the output closed it before all was printed")
        return TROUBLE
    except Exception as error:
        # The last line of defence: a person gets one line, --debug the traceback.
        if debug:
            raise
        what = f"unexpected {type(error).__name__}: {one_line(str(error))}"
        fail(name, f"{what}; run again with --debug and report it")
        return TROUBLE
    if code == INTERRUPTED:  # typer turns Ctrl-C into this code
        fail(name, "interrupted; nothing was kept")
    return code if isinstance(code, int) else IDENTICAL


def _reflowed(docstring: str) -> str:
    """Give each paragraph one line, which the terminal's width then wraps."""
    return "\n\n".join(one_line(paragraph) for paragraph in docstring.split("\n\n"))


def _what_came(error: Any, typed: list[str]) -> str:
    """Name the value of the option that a usage error is about, where the message leaves it out."""
    names = getattr(getattr(error, "param", None), "opts", ())
    came = ""
    for number, argument in enumerate(typed, start=1):
        option, separator, value = argument.partition("=")
        if option in names:  # a repeated option's last value is the one that counts
            came = value if separator else " ".join(typed[number : number + 1])
    return "" if came in error.format_message() else f"; got {came!r}"


def fail(name: str, message: str) -> None:
    """Print one line on stderr; what a file or a person wrote may hold characters that steer a terminal."""
    from fliptrace.views.escaping import visible

    print(f"{name}: {visible(message)}", file=sys.stderr)  # noqa: T201 (one line for a person is this function's purpose)


def one_line(text: str) -> str:
    """Join the lines of a message."""
    return " ".join(part.strip() for part in text.splitlines() if part.strip())


def show_version(wanted: bool) -> None:
    """Print the version and stop, as an eager option's callback."""
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"fliptrace {version('fliptrace')}")
        except PackageNotFoundError:
            typer.echo("fliptrace, not installed (run from its sources)")
        raise typer.Exit
