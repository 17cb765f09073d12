"""The report page's section on interventions: everything that its template shows, as plain values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fliptrace.judgements import CAVEAT, Arm, DirectionResult, Investigation, Verdict
from fliptrace.views import interventions_words as words
from fliptrace.views.boundary import boundary_figure
from fliptrace.views.escaping import said, shown, stopped, visible
from fliptrace.views.interventions import (
    ClaimEntry,
    InterventionReport,
    arm_rows,
    coordinate_rows,
    direction_name,
    judged,
    margin_phrase,
    proved_claims,
    root_rows,
    token_name,
    two_by_two_cells,
)
from fliptrace.views.interventions_cache import cache_pictures
from fliptrace.views.interventions_checks import checks
from fliptrace.views.interventions_figures import (
    difference_of,
    margin_bars,
    margins_figure,
)
from fliptrace.views.texts import common_length
from fliptrace.views.wording import brief, capitalised, exact, listed, plain

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from fliptrace.judgements import (
        CachePartNeed,
        CoordinateResult,
        LayerNeed,
        MinimalSet,
        Screening,
        TwoByTwo,
    )

#: Rows of a table of roots or coordinates; the rest is counted, and all are in report.json.
TABLE_ROWS = 200
#: Receipts of one claim that are listed one by one.
_RECEIPT_ROWS = 24
#: Sentences of an investigation before the rest is folded away.
_SENTENCES_TOLD = 4


def section(report: InterventionReport, dtype: str) -> dict[str, Any]:
    """Return what the template needs.

    Args:
        report: what was found.
        dtype: the type to which shrinks are rounded.
    """
    found = report.investigation
    return {
        "verdict": words.headline(report),
        "kind": report.judgement.name.lower(),
        "judgement": judged(report.judgement),
        "caveat": CAVEAT,
        "command": visible(report.command, keep_newlines=True) if report.command else None,
        "checks": checks(report),
        "claims": [_claim(entry) for entry in proved_claims(report)],
        "found": _investigation(found, dtype) if found is not None else None,
        "gaps": words.gaps(report),
    }


def figures(report: InterventionReport, dtype: str) -> dict[str, go.Figure]:
    """Return the section's pictures by the id of the element that shows them."""
    cause = _cause(report.investigation)
    if cause is None:
        return {}
    coordinate, verdict = cause
    return {
        "cause-boundary": boundary_figure(difference_of(coordinate, dtype), dtype),
        "cause-margins": margins_figure(verdict),
    }


def _cause(found: Investigation | None) -> tuple[CoordinateResult, Verdict] | None:
    best = found.best_coordinate if found is not None else None
    return (best, best.verdict) if best is not None and best.verdict is not None else None


def _investigation(found: Investigation, dtype: str) -> dict[str, Any]:
    roots = root_rows(found.roots)
    coordinates = coordinate_rows(found.coordinates)
    return {
        "judged": words.judged_sentence(found),
        "effort": words.effort_sentence(found),
        "sentences": words.found_sentences(found),
        "told": _SENTENCES_TOLD,
        "reconstruction": [
            {
                "which": item.which,
                "steps": item.steps,
                "equal": "bit-equal" if item.equal else f"NO: {said(item.first_mismatch or '?')}",
                "restored": "bit-equal" if item.restored_start else "NO",
            }
            for item in found.reconstruction
        ],
        "roots": roots[:TABLE_ROWS],
        "roots_left_out": max(0, len(roots) - TABLE_ROWS),
        "coordinates": coordinates[:TABLE_ROWS],
        "coordinates_left_out": max(0, len(coordinates) - TABLE_ROWS),
        "cause": _cause_rows(found, dtype),
        "sets": [_set(smallest) for smallest in found.minimal_sets],
        "square": _square(found.two_by_two, found) if found.two_by_two is not None else None,
        "cache_pictures": cache_pictures(found),
        "cache_step": capitalised(stopped(found.first_cache_step.sentence))
        if found.first_cache_step
        else "",
        "layers": [_layer(layer) for layer in found.layers],
        "cache_parts": [_part(part) for part in found.cache_parts],
        "texts": continuation_texts(found.continuations),
        "together": [_together(screening) for screening in found.all_roots],
        "environment": [
            {"key": visible(key), "recorded": shown(_leaf(before)), "now": shown(_leaf(now))}
            for key, before, now in found.environment_differences
        ],
    }


def _leaf(value: Any) -> str | None:
    return None if value is None else plain(value)


def _claim(entry: ClaimEntry) -> dict[str, Any]:
    verdict = entry.verdict
    return {
        "kind": entry.kind,
        "heading": entry.heading,
        "claim": entry.claim,
        "judgement": judged(verdict.judgement),
        "judgement_kind": verdict.judgement.name.lower(),
        "sentence": words.claim_sentence(verdict),
        # Every direction tells its own reasons.
        "reasons": [] if verdict.directions else [stopped(reason) for reason in verdict.reasons],
        "directions": [_direction(result) for result in verdict.directions],
        "texts": continuation_texts(entry.continuations),
        "answer_sentence": words.answer_sentence(entry.continuations),
        "edits": visible(
            json.dumps({"edits": list(verdict.edits)}, ensure_ascii=True), keep_newlines=True
        ),
        "setting": f"Continued under {visible(verdict.reduction)}"
        + ("" if verdict.repeatable_by_construction else ", not repeatable by construction")
        + f"; between several edited sites, shrinks were {visible(verdict.between)}.",
    }


def _direction(result: DirectionResult) -> dict[str, Any]:
    receipts = [
        receipt
        for arm in (result.edited, result.free)
        if arm is not None
        for receipt in arm.receipts
    ]
    return {
        "name": direction_name(result.recipient, result.donor),
        "judgement": judged(result.judgement),
        "judgement_kind": result.judgement.name.lower(),
        "arms": arm_rows(result),
        "reasons": [stopped(reason) for reason in result.reasons],
        "specificity": stopped(result.specificity.sentence) if result.specificity else "",
        "shams": _shams(result),
        "footprint": stopped(result.footprint.sentence) if result.footprint else "",
        "footprint_layers": result.footprint.layers if result.footprint else (),
        "controls": [
            {
                "name": visible(control.name),
                "passed": {True: "passed", False: "FAILED", None: "not possible"}[control.passed],
                "sentence": stopped(control.sentence),
            }
            for control in result.controls
        ],
        "receipts": [
            {
                "place": visible(receipt.place),
                "before": visible(receipt.digest_before[:12]),
                "written": visible(receipt.digest_written[:12]),
                "consumed": visible(receipt.digest_consumed[:12]) or "never",
                "landed": "landed" if receipt.landed else "NOT landed",
            }
            for receipt in receipts[:_RECEIPT_ROWS]
        ],
        "receipts_left_out": max(0, len(receipts) - _RECEIPT_ROWS),
    }


def _shams(result: DirectionResult) -> str:
    special = result.specificity
    if special is None:
        return "not run"
    return f"{special.other_token} of {special.shams} flip ({special.donor_token} to the donor's)"


def _cause_rows(found: Investigation, dtype: str) -> dict[str, Any] | None:
    best = found.best_coordinate
    if best is None:
        return None
    difference = difference_of(best, dtype)
    report = difference.boundary
    values = (
        ("reference", best.reference, best.reference_bits, report.reference_distance),
        ("candidate", best.candidate, best.candidate_bits, report.candidate_distance),
    )
    rounded = {
        "reference": (report.rounded_reference, best.rounded_reference_bits),
        "candidate": (report.rounded_candidate, best.rounded_candidate_bits),
    }
    return {
        "name": visible(best.name),
        "dtype": dtype,
        "boundary": "none" if best.boundary is None else exact(best.boundary),
        "rows": [
            {
                "name": name,
                "value": exact(value),
                "bits": visible(bits),
                "distance": "no number" if distance is None else brief(distance),
                "rounded": exact(rounded[name][0]),
                "rounded_bits": visible(rounded[name][1]),
            }
            for name, value, bits, distance in values
        ],
        "drawn": best.verdict is not None,
        "bars": [
            {
                "label": bar.label,
                "margin": "not known" if bar.margin is None else brief(bar.margin),
                "token": bar.token,
                "tied": bar.tied,
            }
            for bar in (margin_bars(best.verdict) if best.verdict is not None else ())
        ],
    }


def _set(smallest: MinimalSet) -> dict[str, Any]:
    return {
        "unit": visible(smallest.unit),
        "recipient": smallest.recipient,
        "whole": smallest.whole,
        "minimal": "yes"
        if smallest.one_minimal
        else f"not shown: {smallest.undecided} single removals are void"
        if smallest.undecided
        else "the budget ended before it was shown",
        "between": visible(smallest.between),
        "runs": smallest.runs,
        "names": [visible(name) for name in smallest.names],
    }


def _together(screening: Screening) -> dict[str, Any]:
    arm = screening.edited
    return {
        "direction": direction_name(screening.recipient, screening.donor),
        "judgement": judged(screening.judgement),
        "token": "" if arm is None else token_name(arm.token_id, arm.token_text),
        "reasons": [stopped(reason) for reason in screening.reasons],
    }


def _square(square: TwoByTwo, found: Investigation) -> dict[str, Any]:
    tokens = {found.reference_token[0]: "reference", found.candidate_token[0]: "candidate"}
    return {
        "sentence": capitalised(stopped(square.sentence)),
        "rows": [
            {
                "cache": cache,
                "cells": [
                    {
                        "shrinks": shrinks,
                        "kind": "another"
                        if arm.token_id is None
                        else tokens.get(arm.token_id, "another"),
                        "token": token_name(arm.token_id, arm.token_text),
                        "margin": margin_phrase(arm),
                    }
                    for shrinks, arm in cells
                ],
            }
            for cache, cells in two_by_two_cells(square)
        ],
    }


def _layer(layer: LayerNeed) -> dict[str, Any]:
    return _need(layer, f"layer {layer.layer}")


def _part(part: CachePartNeed) -> dict[str, Any]:
    layers = listed([f"{layer}" for layer in part.layers])
    return _need(
        part, f"{visible(part.part)} of layer{'s' if len(part.layers) > 1 else ''} {layers}"
    )


def _need(need: LayerNeed | CachePartNeed, name: str) -> dict[str, Any]:
    answers = {True: "yes", False: "no", None: "not run"}
    return {
        "recipient": need.recipient,
        "name": name,
        "alone": answers[need.sufficient_alone],
        "needed": answers[need.needed],
        "differing": f"{need.differing_elements:,}",
        "kind": "sufficient" if need.sufficient_alone else "",
    }


def continuation_texts(arms: tuple[Arm, ...]) -> dict[str, Any] | None:
    """Cut the continuations where their texts part; None without any text."""
    ended = [(arm, arm.text) for arm in arms if arm.text is not None]
    if not ended:
        return None
    first = ended[0][1]
    length = min(common_length(first, text) for _, text in ended) if len(ended) > 1 else 0
    common = first[:length]
    # Words stay whole: a cut inside one would make two halves of it look like text of their own.
    common = common[: common.rfind(" ") + 1] if any(text != common for _, text in ended) else common
    return {
        "common": visible(common, keep_newlines=True),
        "parts": [
            {
                "name": visible(arm.name),
                "rest": visible(text[len(common) :], keep_newlines=True),
                "answer": "none found" if arm.answer is None else said(arm.answer),
                "correct": {None: "", True: "correct", False: "wrong"}[arm.correct],
                "ended": visible(arm.stop_reason),
                "left": ""
                if arm.left_prefix_at is None
                else f"left the shared tokens at step {arm.left_prefix_at}",
            }
            for arm, text in ended
        ],
    }
