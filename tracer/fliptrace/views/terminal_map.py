"""The heatmap as characters: layers by token positions and steps, the lane of margins, ties and the flip below.

Every class has a character of its own, so that nothing is lost without colour, in a pipe or in a log; all are ASCII, so
that any terminal shows them.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fliptrace.numerics import CoordinateClass
from fliptrace.views.folding import FoldedMap, FoldedPhase, fold

if TYPE_CHECKING:
    from fliptrace.verdicts import PairDiff, StepComparison

CHARACTERS = {
    CoordinateClass.EQUAL: ".",
    CoordinateClass.LATENT: "-",
    CoordinateClass.SURVIVING: "#",
    CoordinateClass.STRUCTURAL: "!",
    CoordinateClass.NOT_OBSERVED: "?",
}
ROOT = "@"
#: Rich's styles; the terminal's own colours, as nobody knows its background.
_STYLES = {
    ".": "dim",
    "-": "cyan",
    "#": "bold red",
    "!": "bold magenta",
    "?": "dim",
    ROOT: "bold reverse red",
    "=": "bold magenta",
    "^": "bold",
}
#: Layers beyond this share rows.
_HEIGHT = 24
_TIE, _FLIP, _SEPARATOR = "=", "^", "|"
#: Characters of a margin: below the number.
_MARGINS = (("1", 0.1), ("2", 1.0), ("3", 10.0), ("4", math.inf))
_MARGIN_WORDS = {
    "1": "below 0.1",
    "2": "below 1",
    "3": "below 10",
    "4": "more",
    _TIE: "tie",
    "?": "not recorded",
    " ": "no token was chosen here",
}


@dataclass(frozen=True, slots=True)
class MapLine:
    """One line of the map, with (start, end, style) of its styled parts."""

    text: str
    spans: tuple[tuple[int, int, str], ...] = ()


def map_lines(diff: PairDiff, width: int) -> list[MapLine]:
    """Draw the map in at most ``width`` columns; nothing where every cell is equal, or nothing was compared.

    Args:
        diff: what was found.
        width: at least 24.
    """
    folded, label = _folded(diff, width)
    if folded is None:
        return []
    lines = [MapLine(line) for line in textwrap.wrap(_heading(folded), width)]
    for number in range(len(folded.rows)):
        name = f"  {folded.row_name(number)}"
        cells = _SEPARATOR.join(_cells(phase, number) for phase in folded.phases)
        lines.append(_styled(f"{name:<{label}}", cells))
    steps = {step.step: step for step in diff.steps}
    lane = _SEPARATOR.join(_margins(phase, steps) for phase in folded.phases)
    lines.append(_styled(f"{'  margin':<{label}}", lane))
    if diff.flip is not None:
        mark = " ".join(_flip(phase, diff.flip.step) for phase in folded.phases)
        lines.append(_styled(f"{'  flip':<{label}}", mark.rstrip()))
    for sentence in _legend(folded):
        wrapped = textwrap.wrap(
            sentence,
            width,
            initial_indent="  ",
            subsequent_indent="  ",
            break_on_hyphens=False,
        )
        lines += [MapLine(line.replace("\xa0", " ")) for line in wrapped]
    return lines


def map_json(diff: PairDiff, width: int) -> dict[str, Any] | None:
    """Return what map_lines draws as plain JSON values; None where it draws nothing.

    Args:
        diff: what was found.
        width: that of the terminal whose map it is.

    Returns:
        ``rows`` by name; per phase its ``columns`` as [first, last] position or step, a string of one character per
        column for every row in ``cells``, the ``margins`` likewise, where the ``root`` is as [row, column], and the
        column of the ``flip``; what the ``characters`` of both mean.
    """
    folded, _ = _folded(diff, width)
    if folded is None:
        return None
    steps = {step.step: step for step in diff.steps}
    phases = []
    for phase in folded.phases:
        mark = _flip(phase, diff.flip.step) if diff.flip is not None else ""
        phases.append(
            {
                "phase": phase.phase,
                "columns": [[group[0], group[-1]] for group in phase.columns],
                "cells": [_cells(phase, row) for row in range(len(folded.rows))],
                "margins": _margins(phase, steps),
                "root": list(phase.root) if phase.root is not None else None,
                "flip": mark.index(_FLIP) if _FLIP in mark else None,
            }
        )
    return {
        "rows": [folded.row_name(row) for row in range(len(folded.rows))],
        "phases": phases,
        "merged": {"layers": folded.merged_rows, "columns": folded.merged_columns},
        "characters": {
            "cells": {sign: label.label for label, sign in CHARACTERS.items()}
            | {ROOT: "first surviving root"},
            "margins": _MARGIN_WORDS,
        },
    }


def _folded(diff: PairDiff, width: int) -> tuple[FoldedMap | None, int]:
    """Fold to a terminal's width beside the rows' names: (None where there is nothing to draw, width of the names)."""
    rows = fold(diff, width=2, height=_HEIGHT)
    label = max((len(rows.row_name(n)) for n in range(len(rows.rows))), default=0) + 3
    label = max(label, len("  margin "))
    folded = fold(diff, width=max(4, width - label - 1), height=_HEIGHT)
    return (folded if folded.phases and folded.differs else None), label


def _heading(folded: FoldedMap) -> str:
    names = {"prefill": "token positions", "decode": "steps"}
    parts = [
        f"{names[phase.phase]} {phase.columns[0][0]} to {phase.columns[-1][-1]}"
        for phase in folded.phases
    ]
    return f"Map: layers by {' | '.join(parts)}"


def _cells(phase: FoldedPhase, row: int) -> str:
    line = [CHARACTERS[CoordinateClass(int(value))] for value in phase.classes[row]]
    if phase.root is not None and phase.root[0] == row:
        line[phase.root[1]] = ROOT
    return "".join(line)


def _margins(phase: FoldedPhase, steps: dict[int, StepComparison]) -> str:
    """Return the smallest margin of every column; the prefill's is that of its last position."""
    if phase.phase == "prefill":
        return " " * (len(phase.columns) - 1) + _margin([steps[0]] if 0 in steps else [])
    return "".join(
        _margin([steps[step] for step in group if step in steps]) for group in phase.columns
    )


def _margin(steps: list[StepComparison]) -> str:
    if any(max(step.reference_tied, step.candidate_tied) > 1 for step in steps):
        return _TIE
    values = [value for step in steps for value in (step.reference_margin, step.candidate_margin)]
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "?"
    smallest = min(known)
    return next((sign for sign, limit in _MARGINS if smallest < limit), _MARGINS[-1][0])


def _flip(phase: FoldedPhase, step: int) -> str:
    """Mark the flip's column; a flip in the prefill is at its last position."""
    if phase.phase == "prefill":
        return " " * (len(phase.columns) - 1) + (_FLIP if step == 0 else " ")
    return "".join(_FLIP if step in group else " " for group in phase.columns)


def _legend(folded: FoldedMap) -> list[str]:
    classes = {int(value) for phase in folded.phases for value in phase.classes.ravel()}
    shown = [
        f"{CHARACTERS[label]}\xa0{label.label.replace(' ', chr(0xA0))}"
        for label in CoordinateClass
        if int(label) in classes
    ]
    if any(phase.root is not None for phase in folded.phases):
        shown.append(f"{ROOT}\xa0first\xa0surviving\xa0root")
    merged = ""
    if folded.merged_columns > 1 or folded.merged_rows > 1:
        merged = (
            f"; a character is the worst of up to {folded.merged_rows} × {folded.merged_columns} "
            "(layers × columns)"
        )
    margins = ", ".join(
        f"{sign} {word}".replace(" ", "\xa0")
        for sign, word in _MARGIN_WORDS.items()
        if sign in "1234" + _TIE
    )
    return [
        f"{', '.join(shown)}{merged}.",
        f"Margin of the two best tokens: {margins}.",
    ]


def _styled(label: str, cells: str) -> MapLine:
    """Style runs of equal characters."""
    spans = []
    start = 0
    for place in range(1, len(cells) + 1):
        if place == len(cells) or cells[place] != cells[start]:
            style = _STYLES.get(cells[start])
            if style is not None:
                spans.append((len(label) + start, len(label) + place, style))
            start = place
    return MapLine(f"{label}{cells}".rstrip(), tuple(spans))
