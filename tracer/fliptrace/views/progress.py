"""Progress: a bar in a terminal, a line that changes in a notebook, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any, TextIO

from fliptrace.views.escaping import visible

#: What is told: (what is going on, how much is done, of how much).
Show = Callable[[str, int, int], None]
#: A log file gets a line at most this often, in seconds; short work leaves none.
LOG_EVERY = 30.0
#: A notebook's line changes at most this often, in seconds.
_NOTEBOOK_EVERY = 0.2


@contextmanager
def progress_bar(quiet: bool = False, name: str = "") -> Iterator[Show]:
    """Show progress while inside; what it gives is the ``progress`` that trace_pair and investigate take.

    Args:
        quiet: show nothing.
        name: begins every line in a log.

    Yields:
        A function to call with what is going on, how much is done, and of how much (0: not known).
    """
    if quiet:
        yield _say_nothing
        return
    notebook = _notebook_line()
    if notebook is not None:
        yield _throttled(notebook, _NOTEBOOK_EVERY, at_once=True)
        return
    if sys.stderr.isatty():
        with _terminal_bar() as show:
            yield show
        return
    yield _log_lines(sys.stderr, name)


def _say_nothing(what: str, done: int, total: int) -> None:
    """Take a report and show nothing."""


@contextmanager
def _terminal_bar() -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("loading the model", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=visible(what), completed=done, total=total or None)

        yield show


def _log_lines(stream: TextIO, name: str) -> Show:
    """Write a line when LOG_EVERY seconds have passed since the last one, or since the start."""
    start = time.monotonic()
    prefix = f"{name}: " if name else ""

    def write(what: str, done: int, total: int) -> None:
        minutes, seconds = divmod(int(time.monotonic() - start), 60)
        stream.write(f"{prefix}{_words(what, done, total)} ({minutes}:{seconds:02d})\n")
        stream.flush()

    return _throttled(write, LOG_EVERY, at_once=False)


def _throttled(show: Show, every: float, *, at_once: bool) -> Show:
    last = -every if at_once else time.monotonic()

    def now_and_then(what: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= every or (at_once and total and done >= total):
            last = now
            show(what, done, total)

    return now_and_then


def _words(what: str, done: int, total: int) -> str:
    return f"{visible(what)}: {done:,} of {total:,}" if total else visible(what)


def _notebook_line() -> Show | None:
    """Return a display that changes in place, in Jupyter or marimo; None anywhere else.

    Both are looked for among what is loaded already: outside of a notebook neither is.
    """
    return _marimo_line() or _jupyter_line()


def _jupyter_line() -> Show | None:
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    display: Any = sys.modules["IPython.display"]
    handle = display.display(display.HTML(""), display_id=True)

    def show(what: str, done: int, total: int) -> None:
        handle.update(display.HTML(_bar_html(what, done, total)))

    return show


def _marimo_line() -> Show | None:
    marimo: Any = sys.modules.get("marimo")
    if marimo is None or not marimo.running_in_notebook():
        return None

    def show(what: str, done: int, total: int) -> None:
        marimo.output.replace(marimo.Html(_bar_html(what, done, total)))

    return show


def _bar_html(what: str, done: int, total: int) -> str:
    """Return a bar as static HTML, every text escaped."""
    bar = f'<progress value="{done}" max="{total}"></progress> ' if total else ""
    return f'<div class="fliptrace-progress">{bar}{escape(_words(what, done, total))}</div>'
