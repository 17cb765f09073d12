"""Which LoRA layers of a vLLM model an adapter has weights for, and the order of their sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fliptrace.capture.vllm_engine.shrinks import AdaptedLayer, Slice
from fliptrace.errors import InputError, UnsupportedModelError
from fliptrace.sites import Site


def adapted_layers(manager: Any, adapter_id: int) -> tuple[list[AdaptedLayer], list[str]]:
    """List the LoRA layers that an adapter has weights for.

    Args:
        manager: vLLM's LoRAModelManager, after the adapter was loaded.
        adapter_id: vLLM's number of it.

    Returns:
        The layers in the order of their definition, and sentences on adapted parts that have no shrink to record.

    Raises:
        UnsupportedModelError: nothing to record, or an adapted module that vLLM did not make a LoRA layer.
    """
    adapter = manager.get_adapter(adapter_id)
    layers, unseen, number = [], [], 0
    known = set()
    for name, module in manager.modules.items():
        weights = adapter.get_lora(name)
        if weights is None:
            continue
        known.add(name)
        stacked = getattr(module, "lora_a_stacked", None)
        sizes = getattr(module, "output_slices", None)
        if not isinstance(stacked, (tuple, list)) or sizes is None or stacked[0].dim() != 4:
            unseen.append(
                f"LoRA on {name} ({type(module).__name__}): it goes through no dense shrink, so nothing is recorded "
                "of it"
            )
            continue
        given = weights.lora_a if isinstance(weights.lora_a, list) else [weights.lora_a]
        packed = manager.packed_modules.get(name, [])
        slices, start = [], 0
        for part, size in enumerate(sizes):
            if given[part if len(given) > 1 else 0] is not None:
                label = packed[part].rsplit(".", 1)[-1] if len(packed) == len(sizes) else str(part)
                path = f"{name}[{label}]" if len(sizes) > 1 else name
                slices.append(Slice(Site.from_path(path), part, slice(start, start + size)))
            start += size
        layers.append(AdaptedLayer(name, module, tuple(slices), number))
        number += len(slices)
    if not layers:
        raise UnsupportedModelError(
            f"the adapter has weights for no dense LoRA layer of this engine (vLLM has {len(manager.modules)} LoRA "
            "layers): there is no shrink to trace"
        )
    return layers, unseen


def numbered(layers: Sequence[AdaptedLayer]) -> list[AdaptedLayer]:
    """Number the sites of layers, which are given in the order in which the forward runs them."""
    first, result = 0, []
    for layer in layers:
        result.append(AdaptedLayer(layer.name, layer.module, layer.slices, first))
        first += len(layer.slices)
    return result


def place_of(layers: Sequence[AdaptedLayer], site: int) -> tuple[AdaptedLayer, int]:
    """Return a site's layer, and which of its slices it is.

    Raises:
        InputError: no such site.
    """
    for layer in layers:
        if layer.first <= site < layer.first + len(layer.slices):
            return layer, layer.slices[site - layer.first].part
    count = sum(len(layer.slices) for layer in layers)
    raise InputError(f"sites are numbered 0 to {count - 1}; got {site}")
