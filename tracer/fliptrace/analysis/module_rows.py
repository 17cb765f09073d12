"""Compares the outputs of modules between the shrinks, where they were recorded: digests only, so equal or not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fliptrace.analysis.align import Frames, LayoutPairs
from fliptrace.analysis.frame_rows import rows_that_differ
from fliptrace.numerics import CoordinateClass
from fliptrace.trace import Kind


@dataclass(frozen=True)
class ModuleEvidence:
    """Outputs of one step, M modules in the order in which they ended by T token rows.

    Attributes:
        keys: the modules' paths.
        classes: int8 [M, T]: equal, surviving (bits differ), structural or not observed.
    """

    keys: tuple[str, ...]
    classes: Tensor


def read_modules(
    layouts: LayoutPairs, reference: Frames, candidate: Frames, rows: int
) -> ModuleEvidence | None:
    """Compare the module outputs of one step, None where either trace has none.

    Args:
        layouts: remembered pairings.
        reference: the reference's frames; candidate likewise.
        candidate: the candidate's.
        rows: token rows of the step.
    """
    before, after = reference.get(Kind.MODULE_OUTPUT), candidate.get(Kind.MODULE_OUTPUT)
    if before is None or after is None:
        return None
    pair = layouts.pair(before, after)
    keys = tuple(pair.reference_labels)
    classes = torch.full((len(keys), rows), int(CoordinateClass.NOT_OBSERVED), dtype=torch.int8)
    for one in (*pair.only_reference, *(one for one, _ in pair.reshaped)):
        classes[one] = int(CoordinateClass.STRUCTURAL)
    for group in pair.groups:
        count = min(group.entry.shape[0], rows)
        differs = rows_that_differ(group, before, after)[:, -count:]
        classes[group.places, rows - count :] = differs.to(torch.int8) * int(
            CoordinateClass.SURVIVING
        )
    return ModuleEvidence(keys, classes)
