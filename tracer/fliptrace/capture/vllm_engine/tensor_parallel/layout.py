"""How the parts of all ranks lie together in one engine: numbers of sites, heads of caches.

A rank's site ``path`` is the engine's ``path@rankN``. Sites follow one another as a forward runs them, and at each the
ranks in their order, which all run at once: number = the rank's own number * ranks + rank. A cache layer's canonical
form has the heads of rank 0, then those of rank 1 and so on. Where a model has fewer KV heads than there are ranks,
vLLM keeps copies of a head on several; each copy is computed on its own and kept as a head of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fliptrace.capture.engine import CacheLayer
from fliptrace.errors import InputError, RecordingError
from fliptrace.sites import Site


def sites_of(paths: Sequence[str], ranks: int) -> tuple[Site, ...]:
    """Return the engine's sites for paths that every rank has."""
    return tuple(Site.from_path(f"{path}@rank{rank}") for path in paths for rank in range(ranks))


def joined_heads(parts: Sequence[Tensor], dimension: int) -> Tensor:
    """Join the heads of all ranks."""
    return torch.cat(list(parts), dim=dimension)


def joined_cache(parts: Sequence[Sequence[CacheLayer]]) -> tuple[CacheLayer, ...]:
    """Join the caches of all ranks layer by layer.

    Raises:
        RecordingError: ranks hold other layers or positions.
    """
    joined = []
    for layers in zip(*parts, strict=True):
        first = layers[0]
        if any(
            (each.layer, each.first_position, each.values.shape[1])
            != (first.layer, first.first_position, first.values.shape[1])
            for each in layers
        ):
            raise RecordingError(f"ranks hold other positions in the cache of layer {first.layer}")
        values = joined_heads([each.values for each in layers], 2)
        joined.append(CacheLayer(first.layer, values, first.first_position, first.window))
    return tuple(joined)


def split_cache(content: Sequence[CacheLayer], ranks: int) -> list[list[CacheLayer]]:
    """Split joined caches into each rank's heads.

    Raises:
        InputError: heads that do not divide.
    """
    parts: list[list[CacheLayer]] = [[] for _ in range(ranks)]
    for layer in content:
        if layer.values.dim() != 4 or layer.values.shape[2] % ranks:
            raise InputError(
                f"cache layer {layer.layer} needs [2, T, heads, dim] with the heads of {ranks} ranks; got "
                f"{list(layer.values.shape)}"
            )
        for rank, heads in enumerate(layer.values.chunk(ranks, dim=2)):
            parts[rank].append(
                CacheLayer(layer.layer, heads.contiguous(), layer.first_position, layer.window)
            )
    return parts
