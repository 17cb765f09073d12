"""Compact HTML for notebooks: self-contained, no script, every text escaped.

Colours are inherited from the notebook's theme except for the classes', so that both themes stay readable.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from fliptrace.numerics import CoordinateClass
from fliptrace.views import palette, wording
from fliptrace.views.escaping import quoted, shorten, shown, visible
from fliptrace.views.folding import fold
from fliptrace.views.story import tell_story
from fliptrace.views.texts import pair_texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fliptrace.trace import Trace
    from fliptrace.verdicts import PairDiff, RowDifference

_TABLE = "border-collapse:collapse;margin:.4em 0;font-variant-numeric:tabular-nums"
_CELL = "text-align:left;padding:.15em .8em .15em 0;vertical-align:top"
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;border-left:3px solid #8888;padding-left:.8em;margin:.4em 0"
#: The map: most columns and rows, and the size of a cell in pixels.
_MAP_COLUMNS, _MAP_ROWS, _CELL_WIDTH, _CELL_HEIGHT = 110, 32, 6, 9
#: Generated characters shown around the flip.
_EXCERPT = 240
#: Gaps of a comparison told one by one.
_GAPS = 3


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
    parts.append(map_svg(diff))
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


def diff_html(diff: PairDiff) -> str:
    """Show a comparison without its traces: verdict, flip, where it started, counts, the map, what was not covered."""
    flip, root = diff.flip, diff.first_propagating or diff.first_surviving
    rows = [("verdict", str(diff.outcome))]
    if flip is not None:
        tokens = (flip.reference_token, flip.candidate_token)
        chosen = " → ".join(quoted(t.text, 24) if t.text else f"id {t.token_id}" for t in tokens)
        rows.append(("flip", f"{wording.generated_name(flip.step)}: {chosen}"))
    root = root or diff.first_surviving_variant
    if root is not None:
        rows.append(("first surviving difference", f"{visible(root.name)} ({root.origin})"))
    elif diff.foreign_root is not None:
        rows.append(("first difference", visible(diff.foreign_root.key)))
    coverage = diff.coverage
    steps = wording.count(coverage.steps_compared, "step")
    elements = wording.count(coverage.elements_compared, "shrink coordinate")
    rows += [
        (
            "surviving roots",
            f"{diff.surviving_root_rows:,} of {wording.count(diff.root_rows, 'root row')}",
        ),
        ("compared", f"{steps}, {elements}"),
    ]
    rows += [("not observed", visible(sentence)) for sentence in coverage.not_observed]
    rows += [("gap", visible(sentence)) for sentence in coverage.missing[:_GAPS]]
    more = len(coverage.missing) - _GAPS
    if more > 0:
        rows.append(("", f"{wording.count(more, 'more gap')}"))
    return f'<div class="fliptrace-diff">{_table(rows, "fliptrace-findings")}{map_svg(diff)}</div>'


def map_svg(diff: PairDiff) -> str:
    """Draw the folded heatmap as static SVG: layers by positions and steps; "" where every cell is equal."""
    folded = fold(diff, width=_MAP_COLUMNS, height=_MAP_ROWS)
    if not folded.phases or not folded.differs:
        return ""
    columns = sum(len(phase.columns) for phase in folded.phases) + len(folded.phases) - 1
    width, height = columns * _CELL_WIDTH, len(folded.rows) * _CELL_HEIGHT
    marks, start = [], 0
    for phase in folded.phases:
        for row, line in enumerate(phase.classes):
            marks += _runs(line.tolist(), start, row)
        if phase.root is not None:
            x, y = (start + phase.root[1] + 0.5) * _CELL_WIDTH, (phase.root[0] + 0.5) * _CELL_HEIGHT
            marks.append(
                f'<circle cx="{x:g}" cy="{y:g}" r="6" fill="none" stroke="currentColor" stroke-width="2"/>'
            )
        start += len(phase.columns) + 1
    said = "; ".join(
        f"{phase.phase} {phase.columns[0][0]} to {phase.columns[-1][-1]}" for phase in folded.phases
    )
    hatch = (
        '<defs><pattern id="fliptrace-hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path d="M0 0V5" stroke="#888888"/></pattern></defs>'
    )
    legend = " ".join(
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:.8em;height:.8em;'
        f'background:{colour}"></span> {label.label}</span>'
        for label, colour in palette.CLASS_COLOURS["light"].items()
    )
    return (
        f'<div class="fliptrace-map"><small>Map: {escape(folded.row_name(0))} to '
        f"{escape(folded.row_name(len(folded.rows) - 1))}, from above; {escape(said)}; the ring is the first "
        f"surviving root; hatched: not observed. {legend}</small><br>"
        f'<svg role="img" aria-label="Map of differences: {escape(said)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" style="max-width:100%;height:auto">{hatch}{"".join(marks)}</svg></div>'
    )


def _runs(line: list[int], start: int, row: int) -> list[str]:
    """Draw one row, equal neighbours as one rectangle."""
    found, first = [], 0
    for place in range(1, len(line) + 1):
        if place == len(line) or line[place] != line[first]:
            label = CoordinateClass(line[first])
            fill = palette.CLASS_COLOURS["light"].get(label, "url(#fliptrace-hatch)")
            found.append(
                f'<rect x="{(start + first) * _CELL_WIDTH}" y="{row * _CELL_HEIGHT}" '
                f'width="{(place - first) * _CELL_WIDTH}" height="{_CELL_HEIGHT - 1}" fill="{fill}"/>'
            )
            first = place
    return found


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
