"""Controls of a claim: what must change nothing, and how much else would have changed the token.

Self-substitution puts the recipient's own values in by the same way as the edit. A latent sham changes FP32 bits of
the cause without crossing its rounding boundary. Surviving shams push other coordinates of the same record across
their own boundary, as far as the cause: how many of them flip the token too is a result, not a failure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fliptrace.capture.engine import Engine
from fliptrace.judgements import Control, Specificity
from fliptrace.numerics import integer_view, round_to
from fliptrace_interventions.arms import ArmRun
from fliptrace_interventions.edits import GivenValue, Source
from fliptrace_interventions.plans import Place, Plan, ShrinkPatch
from fliptrace_interventions.pushing import latent_neighbour, pushed_across, rounded_distance

#: Runs an edited arm once, beside its unedited arm.
Runner = Callable[[Plan], ArmRun]


@dataclass(frozen=True, slots=True)
class Cause:
    """The record that an edit changes first, and how far.

    Attributes:
        place: step and site; name: for people.
        recorded: the recipient's recorded shrink [T, R].
        changed: which of its elements the edit gives other bits, bool [T, R].
        coordinate: row and rank index of the first element that the edit carries across a boundary, else of the first
            that it changes, else of the first selected one.
        ulp: by how many 16-bit ULP the edit moves an element at the most; 0 where nothing survives rounding.
    """

    place: Place
    name: str
    recorded: Tensor
    changed: Tensor
    coordinate: tuple[int, int]
    ulp: int


def cause_of(plan: Plan, engine: Engine) -> Cause | None:
    """Find what an edit changes first; None where it edits no shrink, or only computed ones."""
    places = [place for place in sorted(plan.patches) if plan.is_recorded(place)]
    if not places:
        return None
    place = places[0]
    step, site = place
    own = plan.recipient.shrink(step, site)
    after = own.clone()
    selected = torch.zeros(own.shape, dtype=torch.bool)
    for patch in plan.patches[place]:
        source = None
        if isinstance(patch.value, Source):
            source = plan.execution(patch.value).shrink(step, site)
        patch.apply(after, source)
        selected[patch.index(tuple(own.shape))] = True
    own, after = own.cpu(), after.cpu()
    differs = integer_view(own) != integer_view(after)
    survives = integer_view(round_to(own, engine.dtype)) != integer_view(
        round_to(after, engine.dtype)
    )
    chosen = next(mask for mask in (survives, differs, selected) if bool(mask.any()))
    row, rank = torch.nonzero(chosen)[0].tolist()
    distances = rounded_distance(own, after, engine.dtype)[survives]
    phase = "prefill" if step == 0 else f"step {step}"
    return Cause(
        place=place,
        name=f"{engine.sites[site].name}, {phase}",
        recorded=own,
        changed=differs,
        coordinate=(row, rank),
        ulp=int(distances.max()) if distances.numel() else 0,
    )


def self_substitution(plan: Plan, unedited: ArmRun, run: Runner) -> Control:
    """Put the recipient's own values in; nothing may change."""
    found = run(plan.with_own_values())
    return _unchanged(
        "self-substitution", "the recipient's own values put in by the same way", found, unedited
    )


def latent_sham(
    cause: Cause | None, plan: Plan, unedited: ArmRun, run: Runner, engine: Engine
) -> Control:
    """Change FP32 bits of the cause without crossing its boundary; nothing may change."""
    name = "latent sham"
    if cause is None:
        return Control(name, None, "not possible: no recorded shrink is edited")
    row, rank = cause.coordinate
    value = cause.recorded[row, rank]
    other = latent_neighbour(value, engine.dtype)
    if other is None:
        why = (
            "the model computes in FP32, where every change survives"
            if engine.dtype is torch.float32
            else f"no other FP32 value rounds as {float(value)!r} does"
        )
        return Control(name, None, f"not possible: {why}")
    found = run(_sham_plan(cause, plan, row, rank, other))
    what = f"{float(value)!r} changed to {float(other)!r}, which rounds alike, in {cause.name}"
    return _unchanged(name, what, found, unedited)


def surviving_shams(
    cause: Cause,
    plan: Plan,
    run: Runner,
    engine: Engine,
    *,
    count: int,
    seed: int,
    tokens: tuple[int, int],
) -> tuple[Specificity, Control]:
    """Push other coordinates of the cause's record across their own boundaries.

    Args:
        cause: whose record it is; the coordinates that the edit changes are left out, those that it selects and leaves
            as they are may serve: in a decode step a whole row is the record.
        plan: of the edited arm.
        run: runs an arm.
        engine: for the dtype at whose boundaries values are pushed.
        count: how many shams.
        seed: of the draw.
        tokens: the recipient's token at the target step, and the donor's.

    Returns:
        How many gave another token, and a control that fails when a sham did not reach its consumer.
    """
    ulp = max(1, cause.ulp)
    others = donors = tried = 0
    lost = ""
    for row, rank, value in _draw(cause, engine.dtype, ulp, count, seed):
        found = run(_sham_plan(cause, plan, row, rank, value))
        tried += 1
        choice = found.choice(plan.target)
        token = None if choice is None else choice.token
        others += token != tokens[0]
        donors += token == tokens[1] and tokens[1] != tokens[0]
        lost = lost or next((r.place for r in found.receipts if not r.landed), "")
    fewer = (
        f"; the record has no more other coordinates that can be pushed, {count} were asked for"
        if tried < count
        else ""
    )
    latent = "" if cause.ulp else "; the edit itself crosses no boundary"
    sentence = (
        f"of {tried} other coordinates of {cause.name}, each pushed across its boundary by {ulp} ULP, {others} gave "
        f"another token than the recipient's, {donors} the donor's{latent}{fewer}"
    )
    said = (
        f"the value for {lost} did not reach its consumer"
        if lost
        else "every sham arrived as written"
        if tried
        else "no other coordinate of the record can be pushed"
    )
    arrived = Control("sham receipts", not lost if tried else None, said)
    return Specificity(tried, count, others, donors, seed, ulp, cause.name, sentence), arrived


def _draw(
    cause: Cause, dtype: torch.dtype, ulp: int, count: int, seed: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield rows, rank indices and pushed values; where coordinates run out, the farther boundary is taken, too."""
    free = torch.nonzero(~cause.changed).tolist()
    step, site = cause.place
    random.Random(f"{seed} {step} {site} {cause.coordinate}").shuffle(free)
    left = count
    for away in (False, True):
        for row, rank in free:
            if left == 0:
                return
            value = pushed_across(cause.recorded[row, rank], ulp, dtype, away=away)
            if value is not None:
                left -= 1
                yield row, rank, value


def _sham_plan(cause: Cause, plan: Plan, row: int, rank: int, value: Tensor) -> Plan:
    """Return the unedited plan with one element of the cause's record replaced."""
    bits = int(value.view(torch.int32)) & 0xFFFFFFFF
    unedited = plan.unedited()
    patch = ShrinkPatch((row,), (rank,), GivenValue(bits))
    return unedited.with_patches({**unedited.patches, cause.place: (patch,)})


def _unchanged(name: str, what: str, found: ArmRun, unedited: ArmRun) -> Control:
    lost = next((receipt.place for receipt in found.receipts if not receipt.landed), None)
    if lost is not None:
        return Control(name, False, f"{what}: the value for {lost} did not reach its consumer")
    step = found.first_difference(unedited)
    if step is None:
        return Control(name, True, f"{what}: tokens, cache rows and logits are bit-equal")
    return Control(
        name,
        False,
        f"{what}: step {step} differs from the unedited arm in its token, cache rows or logits",
    )
