"""Which layers and elements of a cache an edit names, and whether they are there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fliptrace.capture.engine import Engine
from fliptrace.errors import InputError
from fliptrace.numerics import integer_view
from fliptrace_interventions.edits import CacheEdit, CachePart, GivenValue
from fliptrace_interventions.plans import StatePatch


def chosen_layers(
    edit: CacheEdit, engine: Engine
) -> tuple[tuple[int, ...], tuple[tuple[int, str], ...]]:
    """Say which layers' keys and values, and which tensors of recurrent state, an edit names.

    Raises:
        InputError: a layer keeps nothing of what is asked for, or positions, heads or dimensions of a recurrent state.
    """
    with_keys, states = engine.cache_layers, engine.state_keys
    narrowed = any(chosen is not None for chosen in (edit.positions, edit.heads, edit.dimensions))
    if edit.part is CachePart.STATE:
        if not states:
            raise InputError(
                f"{edit.name}: this engine's model keeps keys and values only, no recurrent state; choose keys, values "
                "or both"
            )
        if narrowed:
            raise InputError(
                f"{edit.name}: recurrent state has no token positions, heads or dimensions of heads; it is put in "
                "whole, so leave them out"
            )
    keys_chosen = edit.part is not CachePart.STATE
    states_chosen = edit.part in (CachePart.STATE, CachePart.WHOLE) and not narrowed
    allowed = set(with_keys if keys_chosen else ()) | {
        layer for layer, _ in states if states_chosen
    }
    unknown = [layer for layer in edit.layers or () if layer not in allowed]
    if unknown:
        kept = "has no cache of its own" if keys_chosen else "keeps no recurrent state"
        raise InputError(
            f"{edit.name}: layer {unknown[0]} {kept}; layers with one are {', '.join(map(str, sorted(allowed)))}"
        )
    wanted = allowed if edit.layers is None else set(edit.layers)
    return (
        tuple(layer for layer in with_keys if keys_chosen and layer in wanted),
        tuple(key for key in states if states_chosen and key[0] in wanted),
    )


def refuse_state_twice(step: int, patches: Sequence[StatePatch]) -> None:
    """Refuse a recurrent state that two edits select.

    Raises:
        InputError: which.
    """
    seen: set[tuple[int, str]] = set()
    for patch in patches:
        if (patch.layer, patch.name) in seen:
            raise InputError(
                f"the recurrent state {patch.name} of layer {patch.layer} before step {step} is selected by more than "
                "one edit; edits must not overlap"
            )
        seen.add((patch.layer, patch.name))


def check_cache_places(
    edit: CacheEdit, layer: int, shape: tuple[int, ...], first_position: int
) -> None:
    """Refuse positions, heads and elements that this layer's cache does not hold.

    Raises:
        InputError: what was asked for and what there is; a position that a sliding window has evicted is named as such.
    """
    end = first_position + shape[1]
    for position in edit.positions or ():
        if position < first_position:
            raise InputError(
                f"{edit.name}: layer {layer} attends through a sliding window and has evicted position {position} "
                f"before step {edit.step}; the first position that it keeps is {first_position}. Name later positions, "
                "an earlier step, or only layers that still hold this position"
            )
        if position >= end:
            raise InputError(
                f"{edit.name}: before step {edit.step} the cache ends at position {end - 1}; got {position}"
            )
    for what, numbers, size in (
        ("heads", edit.heads, shape[2]),
        ("dimensions", edit.dimensions, shape[3]),
    ):
        if numbers is not None and numbers[-1] >= size:
            raise InputError(
                f"{edit.name}: layer {layer} has {what} 0 to {size - 1}; got {numbers[-1]}"
            )


def check_representable(edit: CacheEdit, dtype: torch.dtype) -> None:
    """Refuse a given value that a cache of this dtype does not hold exactly.

    Raises:
        InputError: the nearest value that it holds is named.
    """
    if not isinstance(edit.value, GivenValue):
        return
    value = torch.tensor([edit.value.value], dtype=torch.float32)
    back = value.to(dtype).to(torch.float32)
    if not torch.equal(integer_view(value), integer_view(back)):
        raise InputError(
            f"{edit.name}: the cache is {dtype}, which does not hold {edit.value.value!r}; the nearest value that it "
            f"holds is {float(back)!r}"
        )
