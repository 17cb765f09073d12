"""Turn an investigation into one flat JSON row, for tables over many pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fliptrace.judgements import (
    Arm,
    CoordinateResult,
    Investigation,
    MinimalSet,
    RootResult,
    Verdict,
)
from fliptrace.pair import Pair
from fliptrace_interventions import gsm8k_answer
from fliptrace_interventions.outcomes import same_answer

DIRECTIONS = ("reference", "candidate")


def row_of(pair: Pair, found: Investigation, gold: str | None) -> dict[str, Any]:
    """Return everything that is counted over pairs."""
    flip = pair.diff.flip
    manifest = pair.reference.manifest
    texts = [pair.reference.closing.text, pair.candidate.closing.text]
    answers = [gsm8k_answer(text) for text in texts]
    return {
        "source": manifest.get("prompt.source"),
        "prompt_tokens": manifest.get("prompt.tokens"),
        "model": manifest.get("model.name"),
        "device": manifest.get("environment.gpu.name", "CPU"),
        "recorded_reduction": manifest.get("reduction.identity"),
        "continuation": found.reduction,
        "judgement": found.judgement.value,
        "sentence": found.sentence,
        "flip_step": found.target_step,
        "tokens": [found.reference_token[1], found.candidate_token[1]],
        "recorded_margins": [flip.reference_margin, flip.candidate_margin] if flip else None,
        "recorded_tie_breaks": list(flip.decided_by_tie_break) if flip else None,
        "reconstruction": [_plain(item.to_json()) for item in found.reconstruction],
        "reconstructed": all(item.equal and item.restored_start for item in found.reconstruction),
        "cache_substitution": _verdict(found.cache_substitution),
        "roots_in_pair": found.roots_in_pair,
        "roots": _tried(found.roots),
        "root_fates": dict(Counter(root.fate for root in found.roots)),
        "roots_in_prefill": sum(root.step == 0 for root in found.roots),
        "coordinates": _tried(found.coordinates),
        "best_coordinate": _best(found.best_coordinate),
        "all_roots_together": [
            [s.recipient, s.judgement.value, s.edited.token_text if s.edited else None]
            for s in found.all_roots
        ],
        "minimal_sets": [_set(one) for one in found.minimal_sets],
        "layers_enough_alone": _layers(found, "sufficient_alone"),
        "layers_needed": _layers(found, "needed"),
        "first_cache_step": found.first_cache_step.step if found.first_cache_step else None,
        "first_cache_step_sentence": found.first_cache_step.sentence
        if found.first_cache_step
        else None,
        "two_by_two": found.two_by_two.decided_by if found.two_by_two else None,
        "recorded_answers": answers,
        "recorded_correct": [same_answer(answer, gold) for answer in answers] if gold else None,
        "gold": gold,
        "continuations": [
            {
                "name": arm.name,
                "answer": arm.answer,
                "correct": arm.correct,
                "stop_reason": arm.stop_reason,
                "stopped_early_at": arm.stopped_early_at,
            }
            for arm in found.continuations
        ],
        **_changes(found.continuations),
        "runs": found.runs,
        "forwards": found.forwards,
        "forwards_from_scratch_at_least": found.runs * (found.target_step + 1),
        "seconds": found.seconds,
        "budget": found.budget,
        "not_covered": list(found.not_covered),
        "environment_differences": [list(item) for item in found.environment_differences],
    }


def _plain(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if value is not None}


def _tried(results: Sequence[RootResult] | Sequence[CoordinateResult]) -> dict[str, Any]:
    """Count by direction how rows or coordinates were judged."""
    screenings = [screening for result in results for screening in result.screenings]
    sufficient = [r for r in results if any(s.gives_donor_token for s in r.screenings)]
    return {
        "tried": len(results),
        "sufficient": len(sufficient),
        "sufficient_names": [result.name for result in sufficient],
        "by_direction": {
            recipient: dict(
                Counter(s.judgement.value for s in screenings if s.recipient == recipient)
            )
            for recipient in DIRECTIONS
        },
        "stopped_early": sum(
            s.edited is not None and s.edited.stopped_early_at is not None for s in screenings
        ),
        "screenings": len(screenings),
    }


def _best(best: CoordinateResult | None) -> dict[str, Any] | None:
    if best is None:
        return None
    return {
        "name": best.name,
        "reference_bits": best.reference_bits,
        "candidate_bits": best.candidate_bits,
        "boundary": best.boundary,
        "proof": _verdict(best.verdict),
    }


def _verdict(verdict: Verdict | None) -> dict[str, Any] | None:
    if verdict is None:
        return None
    return {
        "judgement": verdict.judgement.value,
        "directions": {result.recipient: _direction(result) for result in verdict.directions},
    }


def _direction(result: Any) -> dict[str, Any]:
    special, left = result.specificity, result.footprint
    return {
        "judgement": result.judgement.value,
        "unedited": _arm(result.unedited),
        "edited": _arm(result.edited),
        "free": _arm(result.free),
        "controls": {control.name: control.passed for control in result.controls},
        "specificity": [special.shams, special.other_token, special.donor_token, special.ulp]
        if special
        else None,
        "footprint": [left.keys, left.values, left.same_positions, left.same_bits]
        if left
        else None,
        "reasons": list(result.reasons),
    }


def _arm(arm: Arm | None) -> dict[str, Any] | None:
    if arm is None:
        return None
    return {
        "token": arm.token_text,
        "margin": None if arm.token_id is None else arm.margin,
        "tied": arm.tied,
        "repeats": arm.repeats,
        "repeatable": arm.repeatable,
        "receipts": [sum(receipt.landed for receipt in arm.receipts), len(arm.receipts)],
        "left_prefix_at": arm.left_prefix_at,
        "stopped_early_at": arm.stopped_early_at,
    }


def _set(smallest: MinimalSet) -> dict[str, Any]:
    return {
        "unit": smallest.unit,
        "recipient": smallest.recipient,
        "between": smallest.between,
        "size": len(smallest.edits),
        "whole": smallest.whole,
        "runs": smallest.runs,
        "one_minimal": smallest.one_minimal,
        "proof": smallest.verdict.judgement.value if smallest.verdict else None,
    }


def _layers(found: Investigation, what: str) -> dict[str, list[int]]:
    return {
        recipient: [
            need.layer
            for need in found.layers
            if need.recipient == recipient and getattr(need, what)
        ]
        for recipient in DIRECTIONS
    }


def _changes(arms: Sequence[Arm]) -> dict[str, Any]:
    """Compare each unedited continuation with its edited one."""
    couples = list(zip(arms[::2], arms[1::2], strict=False))
    return {
        "answer_changes": any(own.answer != edited.answer for own, edited in couples)
        if couples
        else None,
        "correctness_changes": any(own.correct != edited.correct for own, edited in couples)
        if couples and couples[0][0].correct is not None
        else None,
    }


def totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up rows over pairs."""

    def count(test: Any) -> int:
        return sum(bool(test(row)) for row in rows)

    def cache_gives_both(row: dict[str, Any]) -> bool:
        proof = row["cache_substitution"]
        return proof is not None and proof["judgement"] == "sufficient"

    return {
        "pairs": len(rows),
        "reconstructed": count(lambda row: row["reconstructed"]),
        "one_flipped_bit_breaks_reconstruction": count(
            lambda row: row.get("one_flipped_bit_breaks_reconstruction")
        ),
        "flip_at_step_0": count(lambda row: row["flip_step"] == 0),
        "cache_substitution_gives_both_tokens": count(cache_gives_both),
        "roots": sum(row["roots_in_pair"] for row in rows),
        "pairs_with_sufficient_root": count(lambda row: row["roots"]["sufficient"]),
        "sufficient_roots": sum(row["roots"]["sufficient"] for row in rows),
        "pairs_with_sufficient_coordinate": count(lambda row: row["coordinates"]["sufficient"]),
        "sufficient_coordinates": sum(row["coordinates"]["sufficient"] for row in rows),
        "pairs_with_proved_coordinate": count(
            lambda row: (
                row["best_coordinate"]
                and row["best_coordinate"]["proof"]
                and any(
                    result["judgement"] == "sufficient"
                    for result in row["best_coordinate"]["proof"]["directions"].values()
                )
            )
        ),
        "sizes_of_minimal_sets": [
            [one["size"], one["whole"]]
            for row in rows
            for one in row["minimal_sets"]
            if one["unit"] == "rows"
        ],
        "two_by_two": dict(Counter(str(row["two_by_two"]) for row in rows)),
        "answer_changes": count(lambda row: row["answer_changes"]),
        "correctness_changes": count(lambda row: row["correctness_changes"]),
        "recorded_tie_breaks": count(lambda row: row["recorded_tie_breaks"]),
        "forwards": sum(row["forwards"] for row in rows),
        "forwards_from_scratch_at_least": sum(
            row["forwards_from_scratch_at_least"] for row in rows
        ),
        "seconds": sum(row["seconds"] for row in rows),
    }
