"""Numbers, coordinates and tokens as words: the small pieces from which every view builds its sentences."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from fliptrace.views.escaping import quoted, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fliptrace.sites import Site
    from fliptrace.trace import Trace
    from fliptrace.verdicts import CoordinateDifference, RowDifference


#: What a line break would make hard to read: numbers with a sign, exponents, short tokens in quotation marks.
_UNBROKEN = re.compile(
    r"“[^”]{1,28}”|layer-\d+|--\w[\w-]*|(?<!\w)-?\d[\d.,]*\d(?:e[-+]\d+)?|(?<!\w)\(?0x[0-9a-f]+\)?"
)


def count(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 step``, ``2 steps``, ``12,345 steps``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def verb(number: int, plural: str) -> str:
    """Return ``differs`` for one, ``differ`` for more."""
    return f"{plural}s" if number == 1 else plural


def exact(value: float) -> str:
    """Return a 32-bit or 16-bit value so that it reads back to the same bits, signs of zero and NaN included."""
    return repr(float(value))


def brief(value: float | None) -> str:
    """Return a difference, margin or logit with up to six digits; what was not recorded as such."""
    if value is None:
        return "not recorded"
    return f"{value:.6g}"


def listed(words: Sequence[str]) -> str:
    """Return ``a``, ``a and b``, ``a, b and c``."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def capitalised(text: str) -> str:
    """Start a sentence without touching the rest of it."""
    return text[:1].upper() + text[1:]


def step_name(step: int) -> str:
    """Return ``prefill`` or ``step 12``."""
    return "prefill" if step == 0 else f"step {step}"


def generated_name(step: int) -> str:
    """Name the token that a step yields, as people count (from 1) and as records count (from 0)."""
    return f"generated token {step + 1} (step {step})"


def row_label(kind: str, place: Site | int) -> str:
    """Name one row of a grid."""
    if isinstance(place, int):
        return f"layer {place} {'K' if kind == 'key' else 'V'}"
    return visible(place.name)


class TokenNames:
    """Texts of the tokens at absolute positions, from a trace that may be redacted."""

    def __init__(self, trace: Trace) -> None:
        """Read the tokens of one execution."""
        self._pieces = trace.closing.prompt_piece_texts
        self._generated = trace.closing.piece_texts
        self._ids = trace.steps[0].token_ids if len(trace.steps) else ()
        self._first = trace.steps[0].first_position if len(trace.steps) else 0
        self._generated_ids = trace.generated_ids

    @property
    def prompt_length(self) -> int:
        """How many tokens the prefill was fed."""
        return len(self._ids)

    def text(self, position: int) -> str | None:
        """Return the raw text of the token at an absolute position, None where it is not kept."""
        index = position - self._first
        if 0 <= index < len(self._ids):
            return self._pieces[index] if index < len(self._pieces) else None
        index -= len(self._ids)
        return self._generated[index] if 0 <= index < len(self._generated) else None

    def generated(self, step: int) -> str | None:
        """Return the raw text of the token that a step yielded, None where it is not kept."""
        return self._generated[step] if 0 <= step < len(self._generated) else None

    def at(self, position: int) -> str:
        """Describe the token at an absolute position for a sentence."""
        text = self.text(position)
        if text is not None:
            return quoted(text)
        index = position - self._first
        if 0 <= index < len(self._ids):
            return f"token id {self._ids[index]}, text not kept"
        index -= len(self._ids)
        if 0 <= index < len(self._generated_ids):
            return f"token id {self._generated_ids[index]}, text not kept"
        return "token not known"


def row_place(row: RowDifference, tokens: TokenNames) -> str:
    """Name a record row with its token: ``layer 2 mlp.up_proj, prefill, token position 47 (“ apples”)``."""
    return (
        f"{visible(row.site.name)}, {step_name(row.step)}, token position {row.position} "
        f"({tokens.at(row.position)})"
    )


def model_dtype(trace: Trace) -> str:
    """Return the type that the model computes in, ``bfloat16``; "" where the manifest does not say."""
    return str(trace.manifest.get("model.dtype") or "").removeprefix("torch.")


def unrounded(dtype: str) -> str:
    """Say why nothing was rounded where survival was decided in float32, by the model's own type."""
    if dtype == "float32":
        return "an FP32 model has no rounding boundary"
    return f"compared without rounding{f' to {visible(dtype)}' if dtype else ''}"


def values_sentence(difference: CoordinateDifference) -> str:
    """Both FP32 values of a coordinate with their bits."""
    special = f" Only the {difference.special} differs." if difference.special else ""
    apart = f", {count(difference.distance_ulp, 'FP32 ULP', 'FP32 ULP')} apart"
    if not_finite(difference):
        apart = ""
    return (
        f"FP32 values: reference {exact(difference.reference)} ({difference.reference_bits}), candidate "
        f"{exact(difference.candidate)} ({difference.candidate_bits}){apart}.{special}"
    )


def not_finite(difference: CoordinateDifference) -> str:
    """Name the values that are infinite or NaN, and so have no distance; "" where both are finite."""
    values = {"reference": difference.reference, "candidate": difference.candidate}
    names = [name for name, value in values.items() if not math.isfinite(value)]
    if len(names) == 2:
        return "neither value is finite"
    return f"the {names[0]} is not finite" if names else ""


def boundary_sentence(difference: CoordinateDifference, dtype: str = "") -> str:
    """How the two values lie to the rounding boundary.

    Args:
        difference: a coordinate.
        dtype: the type that the model computes in; "" where it is not known.
    """
    report = difference.boundary
    if report.boundary is None:
        if difference.rounded_dtype == "float32":
            return f"No rounding boundary: {unrounded(dtype)}."
        if not_finite(difference):
            return f"No rounding boundary to measure from: {not_finite(difference)}."
        return f"There is no {difference.rounded_dtype} rounding boundary between these two values."
    places = [
        _to_boundary("reference", report.reference_on_boundary, report.reference_distance),
        _to_boundary("candidate", report.candidate_on_boundary, report.candidate_distance),
    ]
    which = "boundary between them" if report.boundaries_crossed else "boundary nearest to them"
    return (
        f"The {difference.rounded_dtype} rounding {which} is {exact(report.boundary)}: "
        f"{listed(places)}."
    )


def _to_boundary(execution: str, on_boundary: bool, distance: float | None) -> str:
    if on_boundary and distance == 0:
        return f"the {execution} lies exactly on it (ties to even)"
    if distance is None or not math.isfinite(distance):
        return f"the {execution}'s distance has no number"
    elsewhere = " and exactly on another boundary (ties to even)" if on_boundary else ""
    side = "above" if distance > 0 else "below"
    return f"the {execution} {abs(distance):.3g} {side} it{elsewhere}"


def rounded_sentence(difference: CoordinateDifference) -> str:
    """Both values after rounding."""
    if difference.rounded_dtype == "float32":
        return ""
    report = difference.boundary
    values = (
        f"{exact(report.rounded_reference)} ({difference.rounded_reference_bits})",
        f"{exact(report.rounded_candidate)} ({difference.rounded_candidate_bits})",
    )
    if difference.rounded_reference_bits == difference.rounded_candidate_bits:
        return f"Both round to {values[0]}: rounding removes the difference."
    crossed = report.boundaries_crossed
    apart = abs(report.rounded_reference - report.rounded_candidate)
    gap = f", {apart:.3g} apart" if math.isfinite(apart) else ""
    many = (
        f"; {crossed:,} boundaries lie between them"
        if crossed > 1 and report.boundary is not None
        else ""
    )
    return f"Rounded to {difference.rounded_dtype}: {values[0]} against {values[1]}{gap}{many}."


def unbroken_parts(sentence: str) -> list[tuple[str, bool]]:
    """Cut a sentence into parts, each with whether a view should keep it on one line where it can."""
    parts = []
    end = 0
    for match in _UNBROKEN.finditer(sentence):
        parts += [(sentence[end : match.start()], False), (match[0], True)]
        end = match.end()
    return [part for part in [*parts, (sentence[end:], False)] if part[0]]


def trace_name(trace: Trace) -> str:
    """Name a trace by its file: the folder may be a temporary one, and is nobody's business but its owner's."""
    return re.split(r"[/\\]", trace.name.rstrip("/\\"))[-1] or trace.name


def plain(value: Any) -> str:
    """Return a JSON value of a manifest as one line."""
    if isinstance(value, (list, tuple)):
        return ", ".join(str(inner) for inner in value)
    return str(value)
