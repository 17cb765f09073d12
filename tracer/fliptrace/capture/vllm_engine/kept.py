"""What the layers of a vLLM model keep between forwards: paged keys and values, and recurrent state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fliptrace.capture.engine import CacheLayer, StateTensor, state_section
from fliptrace.capture.vllm_engine import cache, state
from fliptrace.capture.vllm_engine.cache import PagedLayer, number_of, paged_layer
from fliptrace.capture.vllm_engine.hosting import Host
from fliptrace.capture.vllm_engine.state import StateLayer, keeps_state
from fliptrace.errors import UnsupportedModelError

#: Per KV group a request's blocks, from position 0 on.
BlockIds = Sequence[Sequence[int]]


@dataclass(frozen=True)
class KeptLayers:
    """The layers, each kind in the order of their numbers.

    Attributes:
        paged: attention layers that own a cache.
        states: layers with recurrent state.
        sharing: numbers of layers that read another layer's cache.
    """

    paged: tuple[PagedLayer, ...]
    states: tuple[StateLayer, ...]
    sharing: tuple[int, ...]

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that own a cache."""
        return tuple(layer.number for layer in self.paged)

    @property
    def backends(self) -> list[str]:
        """Names of the attention backends."""
        return sorted({layer.module.attn_backend.get_name() for layer in self.paged})

    def describe(self) -> dict[str, list[Any]]:
        """Return what a manifest's engine section says of it."""
        return {
            "cache_layers": list(self.cache_layers),
            "cache_layouts": sorted({layer.layout.value for layer in self.paged}),
            **state_section(self.state_keys),
        }

    @property
    def not_observed(self) -> list[str]:
        """Sentences on layers that have nothing of their own to record."""
        if not self.sharing:
            return []
        listed = ", ".join(map(str, self.sharing))
        return [f"layers {listed} read another layer's cache and have none of their own"]

    @property
    def state_keys(self) -> tuple[tuple[int, str], ...]:
        """Layer and name of every tensor of recurrent state."""
        return state.state_keys(self.states)

    def read(self, blocks: BlockIds, length: int) -> tuple[CacheLayer, ...]:
        """Copy the keys and values of a request of that length."""
        return cache.read_cache(self.paged, blocks, length)

    def read_state(self, blocks: BlockIds) -> tuple[StateTensor, ...]:
        """Copy a request's recurrent state."""
        return state.read_state(self.states, blocks)

    def check(self, layers: Sequence[CacheLayer], states: Sequence[StateTensor]) -> int:
        """Check that canonical content fits, and return how many tokens it has seen.

        Raises:
            InputError: something is missing or given twice, or its shape, dtype or positions do not fit.
        """
        state.check_state(self.states, states)
        return cache.check_content(self.paged, layers)

    def write(
        self, blocks: BlockIds, layers: Sequence[CacheLayer], states: Sequence[StateTensor]
    ) -> None:
        """Put content, which was checked, where a request of its length has its blocks."""
        cache.write_cache(self.paged, blocks, layers)
        state.write_state(self.states, blocks, states)


def kept_layers(host: Host) -> KeptLayers:
    """List what a model's layers keep.

    Raises:
        UnsupportedModelError: a layer keeps something other than keys and values or one recurrent state, or in an
            unknown layout.
    """
    layers: list[PagedLayer] = []
    states: list[StateLayer] = []
    sharing: list[int] = []
    for group, content in enumerate(host.runner.kv_cache_config.kv_cache_groups):
        for name in content.layer_names:
            module = host.static_layers[name]
            if getattr(module, "kv_sharing_target_layer_name", None) is not None:
                sharing.append(number_of(name))
            elif keeps_state(content, name):
                states.append(StateLayer(number_of(name), name, module, group))
            else:
                layers.append(paged_layer(name, module, group, content))
    layers.sort(key=lambda layer: layer.number)
    states.sort(key=lambda layer: layer.number)
    _refuse_two_of_a_number(layers)
    _refuse_two_of_a_number(states)
    return KeptLayers(tuple(layers), tuple(states), tuple(sorted(sharing)))


def _refuse_two_of_a_number(layers: Sequence[PagedLayer | StateLayer]) -> None:
    numbers = [layer.number for layer in layers]
    if len(set(numbers)) != len(numbers):
        odd = next(number for number in numbers if numbers.count(number) > 1)
        raise UnsupportedModelError(
            f"layer {odd} keeps {numbers.count(odd)} caches; one per layer can be traced (cross-attention cannot yet)"
        )
