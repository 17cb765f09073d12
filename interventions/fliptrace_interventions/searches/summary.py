"""What an investigation found, in sentences: what was run and what came of it, never more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fliptrace.judgements import (
    CAVEAT,
    CoordinateResult,
    DirectionResult,
    Investigation,
    Judgement,
    RootResult,
    Screening,
)


def headline(found: Investigation) -> str:
    """Return the verdict in one sentence, with the number of runs where nothing was found."""
    if found.judgement is Judgement.VOID:
        return _void(found)
    if found.reference_token == found.candidate_token:
        return _same_token(found)
    best = found.best_coordinate
    if best is not None:
        proof = "" if best.verdict is not None else " (screened, not proved: the budget ended)"
        return f"One FP32 value is enough to flip the token: {best.name}, {_where(best)}{proof}"
    smallest = found.minimal_set
    if smallest is not None:
        if len(smallest.edits) == 1:
            proof = "" if smallest.verdict is not None else " (screened, not proved)"
            return f"One root row is enough to flip the token: {smallest.names[0]}, in the {smallest.recipient}{proof}"
        minimal = "a 1-minimal set" if smallest.one_minimal else "not shown to be 1-minimal"
        return (
            f"{len(smallest.edits)} of {smallest.whole} root rows together are enough to flip the token in the "
            f"{smallest.recipient} ({minimal}); no single one is"
        )
    cache = found.cache_substitution
    where = (
        "; the incoming cache of the flip step is enough"
        if cache is not None and cache.sufficient_directions
        else ""
    )
    screenings = [s for root in found.roots for s in root.screenings]
    void = sum(s.judgement is Judgement.VOID for s in screenings)
    unknown = (
        f"; nothing can be said of {void} of {len(screenings)} substitutions of a root row (void)"
        if void
        else ""
    )
    return (
        f"No coordinate, root row or set of root rows that is enough to flip the token was found within {found.runs} "
        f"run{'s' if found.runs != 1 else ''}{unknown}{where}"
    )


def summarise(found: Investigation) -> tuple[str, ...]:
    """Return what was found, the most informative first, and the caveat last."""
    sentences = [found.sentence]
    for part in _PARTS:
        sentences += part(found)
    return (*(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences), CAVEAT)


def _void(found: Investigation) -> str:
    failed = [item for item in found.reconstruction if not item.equal]
    if failed:
        return (
            f"Void: the {failed[0].which} cannot be reconstructed here ({failed[0].first_mismatch})"
        )
    if not all(item.restored_start for item in found.reconstruction):
        return "Void: a cache restored from the record does not give the recorded logits"
    return "Void: no experiment of this pair can be judged here; each says why"


def _same_token(found: Investigation) -> str:
    changing = sum(any(s.changes_token for s in root.screenings) for root in found.roots)
    return (
        f"Both executions chose {found.reference_token[1]!r} at step {found.target_step}; {changing} of "
        f"{len(found.roots)} root rows tried change it to another token"
    )


def _where(coordinate: CoordinateResult) -> str:
    names = [s.recipient for s in coordinate.screenings if s.gives_donor_token]
    return "in both directions" if len(names) == 2 else f"in the {names[0]}"


def _reconstruction(found: Investigation) -> Iterator[str]:
    equal = sum(item.equal for item in found.reconstruction)
    steps = max((item.steps for item in found.reconstruction), default=0)
    yield (
        f"reconstruction from token ids and shrinks alone is bit-equal in cache and logits through {steps} steps in "
        f"{equal} of {len(found.reconstruction)} executions"
    )


def _cache(found: Investigation) -> Iterator[str]:
    verdict = found.cache_substitution
    if verdict is None:
        return
    step = found.target_step
    yield f"cache before step {step}: " + "; ".join(map(_direction, verdict.directions))


def _direction(result: DirectionResult) -> str:
    arm = result.edited
    tie = ", decided by tie-break" if arm is not None and arm.decided_by_tie_break else ""
    token = f", token {arm.token_text!r}{tie}" if arm is not None else ""
    return f"{result.recipient} with the {result.donor}'s: {result.judgement}{token}"


def _square(found: Investigation) -> Iterator[str]:
    if found.two_by_two is not None:
        yield found.two_by_two.sentence


def _roots(found: Investigation) -> Iterator[str]:
    if not found.roots:
        return
    for kind, tried, total in (
        ("root rows", found.roots, found.roots_in_pair),
        ("single coordinates", found.coordinates, len(found.coordinates)),
    ):
        screenings = [s for result in _results(tried) for s in result.screenings]
        enough = sum(any(s.gives_donor_token for s in r.screenings) for r in _results(tried))
        early = sum(
            s.edited is not None and s.edited.stopped_early_at is not None for s in screenings
        )
        void = [s for s in screenings if s.judgement is Judgement.VOID]
        notes = [
            f"{count} of {len(screenings)} screenings {what}"
            for count, what in (
                (early, "stopped early, bit-equal to the unedited arm again"),
                (
                    len(void),
                    f"are void: they say neither that the difference was enough nor that it was not{_why(found, void)}",
                ),
            )
            if count
        ]
        yield (
            f"{kind}: {enough} of {len(tried)} tried are enough alone in some direction"
            + (f" (the pair has {total})" if total > len(tried) else "")
            + "".join(f"; {note}" for note in notes)
        )


def _why(found: Investigation, void: Sequence[Screening]) -> str:
    """Say why screenings are void, as far as one reason explains them."""
    lost = sum(s.unedited is not None and s.unedited.token_id != s.recipient_token for s in void)
    if not lost:
        return ""
    how_many = "" if lost == len(void) else f" in {lost} of them"
    return (
        f"; computing what follows under {found.reduction} changes the token without any edit{how_many} (continuation "
        "'recorded' asks another question that can be judged)"
    )


def _results(
    tried: Sequence[RootResult] | Sequence[CoordinateResult],
) -> Iterator[RootResult | CoordinateResult]:
    yield from tried


def _best(found: Investigation) -> Iterator[str]:
    best = found.best_coordinate
    if best is None:
        return
    boundary = f", across the boundary {best.boundary!r}" if best.boundary is not None else ""
    yield f"{best.name}: {best.reference!r} in the reference, {best.candidate!r} in the candidate{boundary}"
    for result in best.verdict.directions if best.verdict is not None else ():
        special = f"; {result.specificity.sentence}" if result.specificity is not None else ""
        yield f"proof, {_direction(result)}{special}"


def _sets(found: Investigation) -> Iterator[str]:
    if found.all_roots:
        whole = f"all {len(found.all_roots[0].edits)} root rows together"
        if any(screening.gives_donor_token for screening in found.all_roots):
            flipping = [s for s in found.all_roots if s.gives_donor_token]
            yield f"{whole} flip the token in {len(flipping)} of {len(found.all_roots)} ways tried"
        elif void := [s for s in found.all_roots if s.judgement is Judgement.VOID]:
            rest = len(found.all_roots) - len(void)
            others = f"; in the {rest} others they do not flip the token" if rest else ""
            yield (
                f"{whole}: nothing can be said in {len(void)} of {len(found.all_roots)} ways tried (void)"
                f"{_why(found, void)}{others}"
            )
        else:
            yield (
                f"{whole} do not flip the token, in either direction, whether the shrinks between them are kept or "
                f"recomputed: what follows runs under {found.reduction}, not as it was recorded ({_tokens(found)})"
            )
    for smallest in found.minimal_sets:
        if smallest.whole < 2:
            continue
        yield (
            f"of {smallest.whole} {smallest.unit} in the {smallest.recipient}, shrinks between them "
            f"{smallest.between}, {len(smallest.edits)} {'was' if len(smallest.edits) == 1 else 'were'} left after "
            f"{smallest.runs} {'run' if smallest.runs == 1 else 'runs'}"
            + (
                ": none of them can be left out (flips need not be monotone: it is neither the smallest set nor the "
                "only one)"
                if smallest.one_minimal
                else f"; nothing can be said of {smallest.undecided} single removals (void), so it may not be 1-minimal"
                if smallest.undecided
                else "; the budget ended before each single removal was tried"
            )
        )


def _tokens(found: Investigation) -> str:
    def token(screening: Screening) -> str:
        if screening.edited is None:
            return f"{screening.recipient}: {screening.judgement}"
        return f"{screening.recipient}: {screening.edited.token_text!r}"

    return "; ".join(map(token, found.all_roots))


def _layers(found: Investigation) -> Iterator[str]:
    for recipient in dict.fromkeys(layer.recipient for layer in found.layers):
        layers = [layer for layer in found.layers if layer.recipient == recipient]
        alone = [layer.layer for layer in layers if layer.sufficient_alone]
        needed = [layer.layer for layer in layers if layer.needed]
        yield (
            f"cache by layer in the {recipient}: enough alone: {_listed('layer', alone)}; needed: "
            f"{_listed('layer', needed)} (of {len(layers)} layers that differ)"
        )
        parts = [part for part in found.cache_parts if part.recipient == recipient]
        for what, chosen in (
            ("enough alone", [part for part in parts if part.sufficient_alone]),
            ("needed", [part for part in parts if part.needed]),
        ):
            names = [
                f"{part.part} of "
                f"{'all layers' if part.layers == parts[0].layers else _listed('layer', part.layers)}"
                for part in chosen
            ]
            if parts:
                yield f"keys and values apart in the {recipient}, {what}: {', '.join(names) or 'none'}"


def _listed(what: str, numbers: Sequence[int]) -> str:
    if not numbers:
        return "none"
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _first_step(found: Investigation) -> Iterator[str]:
    if found.first_cache_step is not None:
        yield found.first_cache_step.sentence


def _answers(found: Investigation) -> Iterator[str]:
    for unedited, edited in zip(found.continuations[::2], found.continuations[1::2], strict=False):
        changes = "stays" if unedited.answer == edited.answer else "changes"
        right = {None: "", True: ", right", False: ", wrong"}
        yield (
            f"continued to the end, the final answer {changes}: {unedited.name}: {unedited.answer}"
            f"{right[unedited.correct]}; {edited.name}: {edited.answer}{right[edited.correct]}"
        )


_PARTS: tuple[Callable[[Investigation], Iterator[str]], ...] = (
    _best,
    _sets,
    _square,
    _cache,
    _roots,
    _layers,
    _first_step,
    _answers,
    _reconstruction,
)
