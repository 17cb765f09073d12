"""Digests of many tensors at once, equal to those of fliptrace.numerics one by one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fliptrace.numerics import combine_digests, digest_hex, digest_rows, digest_tensor
from fliptrace.numerics.digest import mix_words, position_terms, shape_mixed

_Key = TypeVar("_Key", bound=Hashable)


def digest_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Digest tensors each for itself; those of one shape and dtype in one pass.

    Args:
        tensors: at least one, each of one dimension or more, all on one device.

    Returns:
        int64 [tensors, 2]; each row is the tensor's ``digest_tensor``.
    """
    groups: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault((tensor.shape, tensor.dtype), []).append(number)
    found = torch.empty((len(tensors), 2), dtype=torch.int64, device=tensors[0].device)
    for (shape, _), numbers in groups.items():
        rows = digest_rows(torch.stack([tensors[number] for number in numbers]).flatten(0, 1))
        positions = torch.arange(shape[0], device=rows.device).repeat(len(numbers))
        terms = position_terms(rows, positions).view(len(numbers), shape[0], 2)
        digest = mix_words(terms.sum(1))
        for size in shape:
            digest = shape_mixed(digest, size)
        found[torch.tensor(numbers, device=rows.device)] = digest
    return found


def digests_by_key(tensors: Mapping[_Key, Tensor]) -> dict[_Key, Tensor]:
    """Digest tensors each for itself, int64 [2] each; none at all where there are none."""
    if not tensors:
        return {}
    return dict(zip(tensors, digest_tensors(list(tensors.values())), strict=True))


def digest_of_layers(layers: dict[int, Tensor]) -> Tensor:
    """Digest tensors of several layers as one, int64 [2]; the layers' order counts."""
    return combine_digests(digest_tensors(list(layers.values())))


def digest_of_shrinks(shrinks: list[Tensor]) -> Tensor:
    """Digest shrinks [T, R] of several sites as one, int64 [2]."""
    return digest_tensor(torch.cat([z.reshape(-1) for z in shrinks]))


def hexes(digests: dict[_Key, Tensor]) -> dict[_Key, str]:
    """Bring digests to the host, all at once."""
    if not digests:
        return {}
    rows = torch.stack(list(digests.values())).tolist()
    return {key: digest_hex(row) for key, row in zip(digests, rows, strict=True)}
