"""Compact HTML for notebooks of edits, verdicts and investigations: self-contained, no script, every text escaped."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, Any

from fliptrace.views import interventions_words as words
from fliptrace.views.escaping import said, stopped, visible
from fliptrace.views.interventions import (
    ClaimResult,
    InterventionReport,
    arm_rows,
    direction_name,
    judged,
    margin_words,
    proved_claims,
    root_rows,
    token_name,
    two_by_two_cells,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fliptrace.judgements import Investigation, TwoByTwo, Verdict

_TABLE = "border-collapse:collapse;margin:.4em 0;font-variant-numeric:tabular-nums"
_CELL = "text-align:left;padding:.15em .8em .15em 0;vertical-align:top"
_FRAME = "border-left:6px solid #d55e00;padding-left:.8em;margin:.4em 0"
_QUIET = "border-left:6px solid #8888;padding-left:.8em;margin:.4em 0"
#: Roots listed before the rest is counted.
_ROOTS_SHOWN = 20


def edit_html(name: str, document: Mapping[str, Any]) -> str:
    """Show an edit: what it does in words, and the JSON that trace-intervene --edit reads."""
    text = visible(json.dumps(document, ensure_ascii=True), keep_newlines=True)
    return (
        f'<div class="fliptrace-edit"><strong>{escape(visible(name))}</strong><br>'
        f'<code style="overflow-wrap:anywhere">{escape(text)}</code></div>'
    )


def verdict_html(verdict: Verdict) -> str:
    """Show a verdict: the judgement, every arm, and the evidence folded away."""
    report = InterventionReport(None, (ClaimResult(verdict),))
    return f'<div class="fliptrace-verdict" style="{_frame(report)}">{_verdict(verdict)}</div>'


def investigation_html(found: Investigation) -> str:
    """Show the whole story: the verdict, the 2 × 2, the roots, and every proof folded away."""
    report = InterventionReport(found)
    parts = [
        f"<p><strong>{escape(words.headline(report))}</strong></p>",
        _listed((words.judged_sentence(found), words.effort_sentence(found))),
        _folded("What was found", _listed(words.found_sentences(found)), opened=True),
    ]
    if found.two_by_two is not None:
        parts.append(_folded("Past or present", _square(found.two_by_two)))
    if found.roots:
        parts.append(_folded("Roots that were tried", _roots(found)))
    parts += [
        _folded(f"{entry.heading}: {entry.claim}", _verdict(entry.verdict))
        for entry in proved_claims(report)
    ]
    gaps = words.gaps(report)
    if gaps:
        parts.append(_folded("What was not covered", _listed(gaps), opened=True))
    body = "".join(parts)
    return f'<div class="fliptrace-investigation" style="{_frame(report)}">{body}</div>'


def _frame(report: InterventionReport) -> str:
    return _FRAME if report.judgement.name == "SUFFICIENT" else _QUIET


def _verdict(verdict: Verdict) -> str:
    parts = [
        f"<p><strong>{escape(judged(verdict.judgement))}</strong>: {escape(said(verdict.claim))}</p>"
    ]
    rows = [
        (
            row.direction,
            row.arm,
            row.token,
            row.gives,
            row.margin,
            row.receipts,
            row.repeats,
            row.ended,
        )
        for result in verdict.directions
        for row in arm_rows(result)
    ]
    heads = (
        "recipient ← donor",
        "arm",
        "token",
        "whose",
        "margin",
        "receipts",
        "repeats",
        "",
    )
    parts.append(_table(heads, rows) if rows else "")
    evidence = [stopped(reason) for reason in verdict.reasons]
    for result in verdict.directions:
        name = direction_name(result.recipient, result.donor)
        evidence.append(f"{name}: {judged(result.judgement)}.")
        if result.specificity is not None:
            evidence.append(f"{name}, specificity: {stopped(result.specificity.sentence)}")
        if result.footprint is not None:
            evidence.append(f"{name}, footprint: {stopped(result.footprint.sentence)}")
        evidence += [
            f"{name}, control {visible(control.name)}: {stopped(control.sentence)}"
            for control in result.controls
        ]
    parts.append(_folded("Evidence", _listed(evidence)))
    parts.append(f"<p><small>{escape(said(verdict.caveat))}</small></p>")
    return "".join(parts)


def _square(square: TwoByTwo) -> str:
    rows = [
        (
            f"cache: {cache}",
            *(
                f"{token_name(arm.token_id, arm.token_text)}, margin {margin_words(arm)}"
                for _, arm in cells
            ),
        )
        for cache, cells in two_by_two_cells(square)
    ]
    heads = ("", "shrinks: reference", "shrinks: candidate")
    return _table(heads, rows)


def _roots(found: Investigation) -> str:
    shown = root_rows(found.roots[:_ROOTS_SHOWN])
    rows = [
        (row.name, "; ".join(f"{where}: {word}" for where, word, _ in row.outcomes), row.proved)
        for row in shown
    ]
    more = len(found.roots) - len(shown)
    return _table(("root row", "alone", "proved"), rows) + (
        _listed((f"{more:,} more in the report.",)) if more else ""
    )


def _folded(heading: str, body: str, *, opened: bool = False) -> str:
    state = " open" if opened else ""
    return f"<details{state}><summary>{escape(heading)}</summary>{body}</details>"


def _listed(sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul style="margin:.2em 0 .6em">{items}</ul>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col" style="{_CELL}">{escape(text)}</th>' for text in heads)
    body = "".join(
        "<tr>"
        + "".join(f'<td style="{_CELL};overflow-wrap:anywhere">{escape(cell)}</td>' for cell in row)
        + "</tr>"
        for row in rows
    )
    return f'<table style="{_TABLE}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
