"""Compact HTML for notebooks: self-contained, no script, every text escaped.

Colours are inherited from the notebook's theme except for the classes', so that both themes stay readable.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from fliptrace.numerics import CoordinateClass
from fliptrace.views import palette, wording
from fliptrace.views.escaping import shorten, shown, visible
from fliptrace.views.story import tell_story
from fliptrace.views.texts import pair_texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fliptrace.trace import Trace
    from fliptrace.verdicts import PairDiff, RowDifference

_TABLE = "border-collapse:collapse;margin:.4em 0;font-variant-numeric:tabular-nums"
_CELL = "text-align:left;padding:.15em .8em .15em 0;vertical-align:top"
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;border-left:3px solid #8888;padding-left:.8em;margin:.4em 0"
#: Generated characters shown around the flip.
_EXCERPT = 240


def pair_html(diff: PairDiff, reference: Trace, candidate: Trace) -> str:
    """Show a pair: verdict, flip, where it started, both texts, and the rest folded away."""
    story = tell_story(diff, reference, candidate)
    parts = [f"<p><strong>{escape(story.verdict)}</strong></p>"]
    for passage in story.passages:
        sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in passage.sentences)
        opened = " open" if passage.key in ("flip", "root") else ""
        parts.append(
            f"<details{opened}><summary>{escape(passage.heading)}</summary>"
            f'<ul style="margin:.2em 0 .6em">{sentences}</ul></details>'
        )
    texts = pair_texts(diff, reference, candidate)
    common = texts.common
    if len(common) > _EXCERPT:
        common = f"… {common[-_EXCERPT:]}"
    parts += [
        f'<div style="{_TEXT}"><small>{escape(part.execution)}</small><br>'
        f'<span style="opacity:.7">{escape(common)}</span>'
        f'<mark style="font-weight:bold">{escape(part.token)}</mark>'
        f"{escape(shorten(part.rest, _EXCERPT))}</div>"
        for part in texts.continuations
    ]
    return f'<div class="fliptrace-pair">{"".join(parts)}</div>'


def trace_html(trace: Trace) -> str:
    """Show a trace: what ran, how long, and how it ended."""
    closing = trace.closing
    state = closing.stop_reason if closing.complete else f"INCOMPLETE: {closing.stop_reason}"
    rows = [
        ("trace", visible(trace.name)),
        ("model", shown(trace.manifest.get("model.name"))),
        ("adapter", shown(trace.manifest.get("adapter.name"))),
        ("reduction", shown(trace.manifest.get("reduction.identity"))),
        ("steps", f"{len(trace.steps):,}"),
        ("ended", visible(state)),
        ("text", visible(shorten(closing.text or "".join(closing.piece_texts), _EXCERPT))),
    ]
    rows += [("not observed", visible(sentence)) for sentence in closing.not_observed]
    return _table(rows, "fliptrace-trace")


def row_html(row: RowDifference) -> str:
    """Show a differing record row with its first coordinate's values, bits and boundary."""
    colour = palette.CLASS_COLOURS["light"].get(CoordinateClass(row.row_class), "#888888")
    rows = [
        ("row", visible(row.name)),
        ("class", row.row_class.label),
        ("origin", str(row.origin)),
        ("fate", str(row.fate)),
        ("coordinates", f"{row.surviving:,} surviving, {row.latent:,} latent"),
    ]
    if row.coordinates:
        first = row.coordinates[0]
        rows.append(("rank index", f"{first.coordinate.rank_index}"))
        sentences = (
            wording.values_sentence(first),
            wording.boundary_sentence(first),
            wording.rounded_sentence(first),
        )
        rows += [("", sentence) for sentence in sentences if sentence]
    return (
        f'<div style="border-left:6px solid {colour};padding-left:.8em">'
        f"{_table(rows, 'fliptrace-row')}</div>"
    )


def _table(rows: Sequence[tuple[str, str]], name: str) -> str:
    body = "".join(
        f'<tr><th scope="row" style="{_CELL}">{escape(key)}</th>'
        f'<td style="{_CELL};overflow-wrap:anywhere">{escape(value)}</td></tr>'
        for key, value in rows
    )
    return f'<table class="{name}" style="{_TABLE}"><tbody>{body}</tbody></table>'
