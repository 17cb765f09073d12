"""Compares the key and value rows that a step wrote, whole frames at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fliptrace.analysis.align import Group, LayoutPair, group_tensor
from fliptrace.analysis.frame_rows import element_count, largest_per_row, magnitude
from fliptrace.analysis.largest import Elements, largest_of_rows
from fliptrace.numerics import integer_view, ulp_distance
from fliptrace.trace import Frame


@dataclass
class CacheEvidence:
    """Key and value rows written in one step, C cache layers by T rows.

    Attributes:
        layers: layer numbers.
        known: recorded in both, bool [C, T].
        counts: differing elements, int64 [C, 2, T]; keys first.
        magnitudes: float32 [C, 2, T]; ulps: int64 [C, 2, T].
        elements: elements of the layer's record.
        unpaired: places of layers whose record the candidate lacks or has in another shape.
        largest: differing elements, keys and values apart; emptied once the step has been looked at.
        dtype: the records' own, "" where there are none.
    """

    layers: tuple[int, ...]
    known: Tensor
    counts: Tensor
    magnitudes: Tensor
    ulps: Tensor
    elements: tuple[int, ...]
    unpaired: tuple[int, ...] = ()
    largest: tuple[list[Elements], list[Elements]] = field(default_factory=lambda: ([], []))
    dtype: str = ""


def read_cache(
    pair: LayoutPair, before: Frame, after: Frame, rows: int, differs: bool
) -> CacheEvidence:
    """Compare the cache frames of one step.

    Args:
        pair: their layouts, paired.
        before: the reference's frame.
        after: the candidate's.
        rows: token rows of the step.
        differs: the frames are not equal.
    """
    layers = [cache_layer(entry.key) for entry in before.layout.entries]
    shape = (len(layers), 2, rows)
    cache = CacheEvidence(
        layers=tuple(layers),
        known=torch.zeros((len(layers), rows), dtype=torch.bool),
        counts=torch.zeros(shape, dtype=torch.int64),
        magnitudes=torch.zeros(shape),
        ulps=torch.zeros(shape, dtype=torch.int64),
        elements=tuple(element_count(entry.shape) for entry in before.layout.entries),
        unpaired=(*pair.only_reference, *(one for one, _ in pair.reshaped)),
        dtype=before.layout.entries[0].dtype if before.layout.entries else "",
    )
    for group in pair.groups:
        count = min(group.entry.shape[1], rows)
        cache.known[group.places, rows - count :] = True
        if differs:
            _compare_group(cache, group, before, after, count, rows)
    return cache


def _compare_group(
    cache: CacheEvidence, group: Group, before: Frame, after: Frame, count: int, rows: int
) -> None:
    one, other = (
        group_tensor(frame, places, group.entry)[:, :, -count:].flatten(3)
        for frame, places in ((before, group.rows), (after, group.columns))
    )
    different = (integer_view(one) != integer_view(other)).reshape(-1).nonzero().squeeze(1)
    if different.numel() == 0:
        return
    left, right = one.reshape(-1)[different], other.reshape(-1)[different]
    cells = one.shape[0] * 2 * count
    cell = torch.div(different, one.shape[3], rounding_mode="floor")
    shape = (one.shape[0], 2, count)
    window = (group.places, slice(None), slice(rows - count, rows))
    cache.counts[window] = torch.bincount(cell, minlength=cells).view(shape)
    cache.magnitudes[window] = largest_per_row(magnitude(left, right), cell, cells).view(shape)
    cache.ulps[window] = largest_per_row(ulp_distance(left, right), cell, cells).view(shape)
    counts = cache.counts[window]
    for which in (0, 1):
        record, row = counts[:, which].nonzero(as_tuple=True)
        if record.numel():
            of, found = largest_of_rows(
                one[record, which, row], other[record, which, row], group.entry.shape[-1]
            )
            rows_of, columns = group.places[record][of], (row + rows - count)[of]
            cache.largest[which].append(replace(found, rows=rows_of, columns=columns))


def cache_layer(key: str) -> int:
    """Return the layer number in ``cache.<layer>``, -1 when the key has another form."""
    number = key.rpartition(".")[2]
    return int(number) if number.isdigit() else -1
