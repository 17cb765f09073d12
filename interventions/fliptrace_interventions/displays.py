"""Rich displays of what experiments return, for notebooks: the values know no views, and the views no notebooks."""

from __future__ import annotations

from fliptrace.displays import show_with
from fliptrace.judgements import Investigation, Verdict


def _verdict(verdict: Verdict) -> str:
    from fliptrace.views import verdict_html

    return verdict_html(verdict)


def _investigation(found: Investigation) -> str:
    from fliptrace.views import investigation_html

    return investigation_html(found)


def register() -> None:
    """Let notebooks show verdicts and investigations; views are loaded when one is shown."""
    show_with(Verdict, _verdict)
    show_with(Investigation, _investigation)
