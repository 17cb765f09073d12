"""Recurrent state (Mamba) in transformers' caches: which layers keep some, how it is read, and how it is put back.

A layer keeps up to two tensors: the last inputs of its convolution, ``conv``, and the state proper, ``ssm``. Both are
whole at every step, changed in place by the next, and lie beside the keys and values of the attention layers. Batch is
1, so the canonical form has no batch axis.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicCache

from fliptrace.capture.engine import StateTensor
from fliptrace.errors import InputError


def _kinds(*names: str) -> tuple[type, ...]:
    """Return the cache layers of these names; none where this transformers keeps states in another form."""
    found = [getattr(cache_utils, name, None) for name in names]
    known = [kind for kind in found if kind is not None]
    return tuple(
        kind for kind in known if "number_of_states" in inspect.signature(kind.__init__).parameters
    )


#: Layers of recurrent state alone, and those that keep keys and values, too.
STATE_ALONE = _kinds("LinearAttentionLayer")
STATE_AND_KEYS = _kinds(
    "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"
)
#: Whether layers ask the cache for the state that they go on from (5.24), or only whether there is one.
IS_ASKED_FOR = hasattr(DynamicCache, "get_recurrent_state")
_CONV, _SSM = "conv", "ssm"


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a tensor of recurrent state must look like: its shape, dtype and device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def state_layers(cache: DynamicCache | None) -> tuple[int, ...]:
    """Return the layers that keep recurrent state."""
    layers = enumerate(cache.layers if cache is not None else ())
    return tuple(
        number for number, layer in layers if isinstance(layer, (*STATE_ALONE, *STATE_AND_KEYS))
    )


def state_name(kind: str, number: int) -> str:
    """Name a tensor of a layer; the first of a kind has no number."""
    return kind if number == 0 else f"{kind}{number}"


def read_state(cache: DynamicCache) -> tuple[StateTensor, ...]:
    """Copy the recurrent state that a cache holds."""
    return tuple(
        StateTensor(layer, name, held[number][0].clone())
        for layer, name, held, number in _slots(cache)
        if held[number] is not None
    )


def _slots(cache: DynamicCache) -> Iterator[tuple[int, str, dict[int, Any], int]]:
    """Yield (layer, name, where it is kept, number there) of every tensor, in order."""
    for number in state_layers(cache):
        layer: Any = cache.layers[number]
        for kind, held in ((_CONV, layer.conv_states), (_SSM, layer.recurrent_states)):
            for index in held:
                yield number, state_name(kind, index), held, index


def check_state(
    states: Sequence[StateTensor], shapes: Mapping[tuple[int, str], StateShape]
) -> None:
    """Refuse states that do not fit a model.

    Raises:
        InputError: one is missing, unknown, given twice, or of another shape or dtype.
    """
    given = [(state.layer, state.name) for state in states]
    if sorted(given) != sorted(shapes):
        raise InputError(
            f"every recurrent state of {list(shapes)} must be given, and none twice; got {given}"
        )
    for state in states:
        wanted = shapes[state.layer, state.name]
        if (tuple(state.values.shape), state.values.dtype) != (wanted.shape, wanted.dtype):
            raise InputError(
                f"the recurrent state {state.name} of layer {state.layer} needs {wanted.dtype} {list(wanted.shape)}; "
                f"got {state.values.dtype} {list(state.values.shape)}"
            )


def write_state(
    cache: DynamicCache,
    states: Sequence[StateTensor],
    shapes: Mapping[tuple[int, str], StateShape],
) -> None:
    """Put states, which were checked, into a new cache; its layers then go on from them."""
    given = {(state.layer, state.name): state.values for state in states}
    for number, name, held, index in _slots(cache):
        values = given.get((number, name))
        if values is None:  # a kind that this model's layers leave empty
            continue
        layer: Any = cache.layers[number]
        rows = values.to(shapes[number, name].device).unsqueeze(0)
        argument = "conv_states" if held is layer.conv_states else "recurrent_states"
        layer.lazy_initialization(**{argument: rows}, state_idx=index)
        held[index].copy_(rows)
        layer.has_previous_state[index] = True
