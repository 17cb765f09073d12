"""transformers' dynamic caches, seen in canonical form: per layer [keys | values, token, kv_head, head_dim].

Full and sliding-window layers are covered. A sliding layer keeps the last ``window - 1`` rows, so its canonical form
starts at a later position. Recurrent state (Mamba) lies in the same caches and has a form of its own, in ``state``.
Caches of other kinds (indexed, quantised) are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from fliptrace.capture.engine import CacheLayer, ConsumptionAudit, Observer, StateTensor
from fliptrace.capture.transformers_engine.state import (
    IS_ASKED_FOR,
    STATE_ALONE,
    STATE_AND_KEYS,
    StateShape,
    read_state,
    state_name,
    write_state,
)
from fliptrace.errors import InputError, UnsupportedModelError

#: Under which name a model's forward takes its cache: of today, before that, and before that for Mamba.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
#: What keeps keys and values; what keeps nothing, new in transformers 5.
_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer, *STATE_AND_KEYS)
_EMPTY = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))


@dataclass(frozen=True, slots=True)
class CacheRow:
    """What one position of a layer's cache is made of: (kv_heads, head_dim), dtype and device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class ObservableCache(DynamicCache):
    """A dynamic cache that shows new rows to an observer before it stores them, and to an audit what attention gets."""

    observer: Observer | None = None
    audit: ConsumptionAudit | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store rows [1, kv_heads, T, head_dim]; see transformers.Cache.update."""
        if self.observer is not None:
            self.observer.cache_rows(layer_idx, key_states[0], value_states[0])
        result: tuple[Tensor, Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        if self.audit is not None:
            self.audit.cache_consumed(layer_idx, result[0][0], result[1][0])
        return result

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return what a layer's convolution goes on from; see transformers.Cache.get_conv_state."""
        found: Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return self._shown(layer_idx, state_name("conv", state_idx), found)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state that a layer goes on from; see transformers.Cache.get_recurrent_state."""
        found: Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
        return self._shown(layer_idx, state_name("ssm", state_idx), found)

    def has_previous_state(
        self, layer_idx: int | None = None, *arguments: Any, **keywords: Any
    ) -> bool:
        """Say whether a layer has a state; see transformers.Cache.has_previous_state.

        Before transformers 5.24 a layer asks this, and then takes the state without asking.
        """
        found = bool(super().has_previous_state(layer_idx, *arguments, **keywords))
        if found and layer_idx is not None and self.audit is not None and not IS_ASKED_FOR:
            for state in read_state(self):
                if state.layer == layer_idx:
                    self.audit.state_consumed(layer_idx, state.name, state.values)
        return found

    def _shown(self, layer: int, name: str, values: Tensor | None) -> Tensor | None:
        if self.audit is not None and values is not None:
            self.audit.state_consumed(layer, name, values[0])
        return values


def new_cache(model: nn.Module) -> ObservableCache:
    """Make an empty cache for a model.

    Raises:
        UnsupportedModelError: some layer keeps something other than keys and values.
    """
    cache = ObservableCache(config=model.config)
    for number, layer in enumerate(cache.layers):
        if type(layer) not in (*_PLAIN, *STATE_ALONE, *_EMPTY):
            raise UnsupportedModelError(
                f"layer {number} of {type(model).__name__} keeps a {type(layer).__name__}; full and sliding-window "
                "key/value caches and recurrent state can be traced, other state (indexed) cannot yet"
            )
    return cache


def read_cache(cache: ObservableCache, length: int) -> tuple[CacheLayer, ...]:
    """Copy what a cache holds of keys and values into canonical form.

    Args:
        cache: after ``length`` tokens.
        length: how many tokens it has seen.
    """
    layers = []
    for number, layer in enumerate(cache.layers):
        if type(layer) not in _PLAIN or not layer.is_initialized:
            continue
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        values = torch.stack((layer.keys[0], layer.values[0])).transpose(1, 2).contiguous()
        layers.append(CacheLayer(number, values, length - values.shape[1], window))
    return tuple(layers)


def write_cache(
    model: nn.Module,
    layers: Sequence[CacheLayer],
    rows: Mapping[int, CacheRow],
    states: Sequence[StateTensor],
    shapes: Mapping[tuple[int, str], StateShape],
) -> tuple[ObservableCache, int]:
    """Build a cache from canonical form.

    Args:
        model: whose cache it is.
        layers: every layer that owns a cache, once each.
        rows: what each layer's rows look like.
        states: every tensor of recurrent state, once each; they were checked.
        shapes: what each of them looks like.

    Returns:
        The cache, and how many tokens it has seen.

    Raises:
        InputError: layers that do not fit the model or each other.
    """
    for content in layers:
        _check_rows(content, rows[content.layer])
    cache = new_cache(model)
    ends = {content.first_position + content.values.shape[1] for content in layers}
    if len(ends) != 1:
        raise InputError(f"cache layers must end at one position; got ends {sorted(ends)}")
    length = ends.pop()
    for content in layers:
        layer = cache.layers[content.layer]
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        kept = length if window is None else min(length, window - 1)
        if content.values.shape[1] != kept:
            raise InputError(
                f"cache layer {content.layer} after {length} tokens holds {kept} rows (window {window}); "
                f"got {content.values.shape[1]}"
            )
        heads = (
            content.values.to(rows[content.layer].device).transpose(1, 2).contiguous()
        )  # [2, kv_heads, T, head_dim]
        layer.lazy_initialization(heads[:1], heads[1:])
        layer.keys, layer.values = heads[:1].clone(), heads[1:].clone()
        if window is not None:
            layer.cumulative_length = length
    write_state(cache, states, shapes)
    return cache, length


def _check_rows(content: CacheLayer, row: CacheRow) -> None:
    values = content.values
    if values.dim() == 4 and (values.shape[0], values.shape[2:], values.dtype) == (
        2,
        row.shape,
        row.dtype,
    ):
        return
    raise InputError(
        f"cache layer {content.layer} needs {row.dtype} [2, T, {', '.join(map(str, row.shape))}]; "
        f"got {values.dtype} {list(values.shape)}"
    )
