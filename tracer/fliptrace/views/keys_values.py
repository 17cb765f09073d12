"""Keys and values as words: where they differ, where they are equal, and where they were not recorded.

Recurrent state, where a model keeps some, is told of in the same place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fliptrace.numerics import CoordinateClass
from fliptrace.verdicts import Outcome
from fliptrace.views import wording
from fliptrace.views.wording import count

if TYPE_CHECKING:
    from torch import Tensor

    from fliptrace.verdicts import PairDiff

#: How many layers of differences are named before they are counted.
NAMED_LAYERS = 3


def cache_gist(diff: PairDiff) -> str:
    """Say in one line how many key and value elements differ, or that none does or none was recorded."""
    layers = len({entry.layer for entry in diff.cache_differences})
    states = len({entry.layer for entry in diff.state_differences})
    also = f"; recurrent state differs in {wording.count(states, 'layer')}" if states else ""
    if layers:
        keys = sum(entry.keys for entry in diff.cache_differences)
        values = sum(entry.values for entry in diff.cache_differences)
        return f"{keys:,} key and {values:,} value elements differ, in {wording.count(layers, 'layer')}{also}"
    return ("no recorded element differs" if records_cache(diff) else "not recorded") + also


def cache_states(diff: PairDiff) -> dict[int, str]:
    """Say of every compared step what its keys and values did.

    A step's own flag is a plain no where nothing was recorded, so equality is taken from the grids.

    Returns:
        Step -> ``differ``, ``structural``, ``equal``, ``equal where recorded`` or ``not recorded``.
    """
    states = {step.step: "not recorded" for step in diff.steps}
    for phase, grid in diff.grids.items():
        rows = [number for number, (kind, _) in enumerate(grid.rows) if kind in ("key", "value")]
        cells = grid.classes[rows]
        if not cells.numel():
            continue
        if phase == "prefill":
            states[0] = _state(cells)
            continue
        states |= {step: _state(cells[:, place]) for place, step in enumerate(grid.columns)}
    states |= {entry.step: "differ" for entry in diff.cache_differences}
    return states | {step.step: "differ" for step in diff.steps if step.cache_differs}


def _state(cells: Tensor) -> str:
    classes = {CoordinateClass(value) for value in cells.unique().tolist()}
    if classes & {CoordinateClass.LATENT, CoordinateClass.SURVIVING}:
        return "differ"
    if CoordinateClass.STRUCTURAL in classes:
        return "structural"
    if CoordinateClass.NOT_OBSERVED not in classes:
        return "equal"
    return "equal where recorded" if len(classes) > 1 else "not recorded"


def records_cache(diff: PairDiff) -> bool:
    """Say whether any key or value row was recorded and compared."""
    return any(state != "not recorded" for state in cache_states(diff).values())


def cache_sentences(diff: PairDiff) -> tuple[str, ...]:
    """Tell in which layers and steps keys and values differ, the root's own step first; then of recurrent state."""
    return (*_rows_sentences(diff), *_state_sentences(diff))


def _state_sentences(diff: PairDiff) -> tuple[str, ...]:
    """Tell after which steps recurrent state differs; nothing where none does."""
    differences = diff.state_differences
    if not differences:
        return ()
    step = differences[0].step
    here = [entry for entry in differences if entry.step == step]
    sentences = [
        f"Layer {entry.layer}, recurrent state {entry.name} ({entry.dtype}) after {_the(step)}: "
        f"{count(entry.differing, 'element')} of {entry.elements:,} "
        f"{wording.verb(entry.differing, 'differ')}."
        if entry.differing is not None
        else f"Layer {entry.layer}, recurrent state {entry.name} after {_the(step)}: its digests differ."
        for entry in here[:NAMED_LAYERS]
    ]
    layers, steps = ({getattr(one, name) for one in differences} for name in ("layer", "step"))
    sentences.append(
        f"Over all compared steps, recurrent state differs in {count(len(layers), 'layer')} and after "
        f"{count(len(steps), 'step')}. It is replaced whole in every step and has no rounding boundary."
    )
    return tuple(sentences)


def _rows_sentences(diff: PairDiff) -> tuple[str, ...]:
    differences = diff.cache_differences
    if not differences:
        if not records_cache(diff):
            return ("Keys and values were not recorded.",)
        return (
            ()
            if diff.outcome is Outcome.IDENTICAL
            else ("No recorded key or value element differs.",)
        )
    root = diff.first_propagating
    step = root.step if root is not None else differences[0].step
    here = [entry for entry in differences if entry.step == step]
    sentences = []
    for entry in here[:NAMED_LAYERS]:
        places = [str(position) for position in entry.positions[:8]]
        more = f" and {len(entry.positions) - 8:,} more" if len(entry.positions) > 8 else ""
        noun = "position" if len(entry.positions) == 1 else "positions"
        sentences.append(
            f"Layer {entry.layer}, {wording.step_name(step)}: "
            f"{count(entry.keys, 'key element')} and {count(entry.values, 'value element')} differ "
            f"(of {entry.elements:,} compared), at token {noun} "
            f"{', '.join(places)}{more}."
        )
    if len(here) > NAMED_LAYERS:
        rest = here[NAMED_LAYERS:]
        sentences.append(
            f"In that step {count(len(rest), 'more layer')} {wording.verb(len(rest), 'differ')}: "
            f"{count(sum(entry.keys for entry in rest), 'key element')} and "
            f"{count(sum(entry.values for entry in rest), 'value element')}."
        )
    if root is not None and not here:
        sentences.append(
            f"No key or value element written in {_the(root.step)} differs; the first ones that do "
            f"were written in {_the(differences[0].step)}, layer {differences[0].layer}."
        )
    steps = len({entry.step for entry in differences})
    layers = len({entry.layer for entry in differences})
    sentences.append(
        f"Over all compared steps, keys or values differ in {count(layers, 'layer')} and "
        f"{count(steps, 'step')}."
    )
    return tuple(sentences)


def _the(step: int) -> str:
    return "the prefill" if step == 0 else f"step {step}"
