"""A request's recurrent state (Mamba) in vLLM: one slot per layer, read and written whole.

Layers with recurrent state lie in KV groups of their own. Without prefix caching a request has one block there, however
long it is; its number is the slot, in each of the layer's state tensors, that vLLM reads and overwrites in every
forward. Attention layers may share the memory, never the block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fliptrace.capture.engine import StateTensor
from fliptrace.errors import InputError, RecordingError, UnsupportedModelError

#: Names of the first tensors of a layer; more of them are numbered.
_NAMES = ("conv", "ssm")


@dataclass(frozen=True)
class StateLayer:
    """One layer that keeps recurrent state.

    Attributes:
        number: 0-based layer number.
        name: of the layer in vLLM.
        module: the mixer, to which the state is bound.
        group: number of its KV group.
    """

    number: int
    name: str
    module: Any
    group: int

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name -> [slots, ...]; looked up each time, as vLLM may bind others."""
        return {
            _NAMES[number] if number < len(_NAMES) else f"state{number}": tensor
            for number, tensor in enumerate(self.module.kv_cache)
        }


def keeps_state(group: Any, name: str) -> bool:
    """Tell whether a layer of a KV group keeps recurrent state.

    Args:
        group: vLLM's KVCacheGroupSpec.
        name: of the layer.

    Raises:
        UnsupportedModelError: it keeps states of several positions, between which a forward would choose.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = group.kv_cache_spec
    spec = getattr(spec, "kv_cache_specs", {}).get(name, spec)
    if not isinstance(spec, MambaSpec):
        return False
    if spec.mamba_cache_mode != "none" or spec.num_speculative_blocks:
        raise UnsupportedModelError(
            f"{name} must keep one recurrent state per request; its cache mode is {spec.mamba_cache_mode} with "
            f"{spec.num_speculative_blocks} speculative blocks. Make the LLM with enable_prefix_caching=False and "
            "without speculative decoding"
        )
    return True


def state_keys(layers: Sequence[StateLayer]) -> tuple[tuple[int, str], ...]:
    """Return layer and name of every tensor, in order."""
    return tuple((layer.number, name) for layer in layers for name in layer.tensors)


def slot_of(layer: StateLayer, block_ids: Sequence[Sequence[int]]) -> int:
    """Return a request's slot in a layer.

    Args:
        layer: which.
        block_ids: per group the request's blocks.

    Raises:
        RecordingError: the request has none, or several.
    """
    ids = list(block_ids[layer.group])
    if len(ids) != 1 or ids[0] == 0:
        raise RecordingError(
            f"layer {layer.number}: a request must have one slot of recurrent state; vLLM gave it {ids}"
        )
    return int(ids[0])


def _slots(
    layers: Sequence[StateLayer], block_ids: Sequence[Sequence[int]]
) -> Iterator[tuple[int, str, Tensor]]:
    for layer in layers:
        slot = slot_of(layer, block_ids)
        for name, tensor in layer.tensors.items():
            yield layer.number, name, tensor[slot]


def read_state(
    layers: Sequence[StateLayer], block_ids: Sequence[Sequence[int]]
) -> tuple[StateTensor, ...]:
    """Copy a request's recurrent state."""
    return tuple(
        StateTensor(layer, name, values.clone(memory_format=torch.contiguous_format))
        for layer, name, values in _slots(layers, block_ids)
    )


def check_state(layers: Sequence[StateLayer], states: Sequence[StateTensor]) -> None:
    """Refuse states that do not fit an engine's layers.

    Raises:
        InputError: one is missing, unknown, given twice, or of another shape or dtype.
    """
    wanted = {
        (layer.number, name): tensor for layer in layers for name, tensor in layer.tensors.items()
    }
    given = [(state.layer, state.name) for state in states]
    if sorted(given) != sorted(wanted):
        raise InputError(
            f"every recurrent state of {list(wanted)} must be given, and none twice; got {given}"
        )
    for state in states:
        tensor = wanted[state.layer, state.name]
        expected, found = (tensor.shape[1:], tensor.dtype), (state.values.shape, state.values.dtype)
        if found != expected:
            raise InputError(
                f"the recurrent state {state.name} of layer {state.layer} needs {tensor.dtype} "
                f"{list(tensor.shape[1:])}; got {state.values.dtype} {list(state.values.shape)}"
            )


@torch.inference_mode()
def write_state(
    layers: Sequence[StateLayer],
    block_ids: Sequence[Sequence[int]],
    states: Sequence[StateTensor],
) -> None:
    """Put states, which were checked, into a request's slots."""
    given = {(state.layer, state.name): state.values for state in states}
    for layer, name, values in _slots(layers, block_ids):
        values.copy_(given[layer, name])
