"""Progress: a bar in a terminal, a changing line in a notebook, a line now and then in a log."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from fliptrace.views import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets forward."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def test_a_log_gets_a_line_now_and_then(monkeypatch, clock):
    """One line per LOG_EVERY seconds, none for short work, no control characters whatever the text holds."""
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with progress.progress_bar(name="trace-pair") as show:
        for step in range(200):
            clock.seconds = 0.5 * step
            show("candidate 1\x1b[2J", step, 256)
    lines = log.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == "trace-pair: candidate 1␛[2J: 60 of 256 (0:30)"
    assert all(line.isprintable() for line in lines)


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch):
    """rich draws it on stderr; markup in a text is shown as it is."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with progress.progress_bar() as show:
        show("[red]candidate[/red]", 3, 7)
    drawn = screen.getvalue()
    assert "3/7" in drawn
    assert "[red]candidate[/red]" in drawn
    assert drawn.endswith("\x1b[2K") or "\x1b[1A" in drawn


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_quiet_is_quiet(monkeypatch, stream):
    """Nothing is written anywhere."""
    out = stream()
    monkeypatch.setattr(sys, "stderr", out)
    with progress.progress_bar(quiet=True) as show:
        show("comparing", 1, 2)
    assert out.getvalue() == ""


def test_a_notebook_gets_one_display_that_changes(monkeypatch, clock):
    """Updates go to one handle, at most five a second and the last one always; texts are escaped."""
    shown = []
    display = SimpleNamespace(
        HTML=lambda text: text,
        display=lambda first, display_id: SimpleNamespace(update=shown.append),
    )
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    with progress.progress_bar() as show:
        for step in range(1, 101):
            clock.seconds += 0.01
            show("<b>step</b>", step, 100)
    assert len(shown) <= 7
    assert "100 of 100" in shown[-1]
    assert not [text for text in shown if "<b>" in text]
