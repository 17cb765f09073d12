"""Bit equality on one machine, and a fingerprint to hold against another's.

A fixed set of calls, drawn from integers on the CPU so that every machine gets the same bits. Each
is run many times; each is also run row by row. The digest covers all outputs: two GPU models with
one digest computed the same bits in these calls, which is seen, not promised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fliptrace_kernels.dispatch import lora_shrink
from fliptrace_kernels.reduction import parse_reduction

SHAPES: Final = (
    (1, 3072, 3, 16, 0),
    (7, 576, 3, 16, 2),
    (16, 8192, 1, 32, 0),
    (33, 600, 2, 20, 3),
    (64, 1536, 1, 64, 0),
    (130, 3072, 2, 16, 1),
    (300, 1024, 3, 32, 4),
)
"""(rows, K, slices, rank, adapters); 0 adapters: no mapping."""

SCALE: Final = 0.7


@dataclass(frozen=True, slots=True)
class Equality:
    """What one reduction did in the fixed calls.

    Attributes:
        reduction: its identity.
        calls: how many calls, each compared with its first run.
        calls_differing: how many had another bit than their first run.
        rows: how many rows were run alone, too.
        rows_differing: how many had another bit than in their batch.
        digest: SHA-256 over all first outputs, 16 hexadecimal digits.
    """

    reduction: str
    calls: int
    calls_differing: int
    rows: int
    rows_differing: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)


def fixed_call(number: int) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Draw call `number` on the CPU: x, A per slice, and the mapping or None."""
    rows, size, slices, rank, adapters = SHAPES[number]
    generator = torch.Generator().manual_seed(number)
    x = _numbers((rows, size), generator)
    shape = (adapters, rank, size) if adapters else (rank, size)
    weights = [_numbers(shape, generator) for _ in range(slices)]
    mapping = None
    if adapters:
        mapping = torch.randint(-1, adapters, (rows,), dtype=torch.int32, generator=generator)
    return x, weights, mapping


def run_fixed_calls(
    name: str, *, repeats: int, single_rows: int, device: torch.device | str
) -> Equality:
    """Run the fixed calls under one reduction.

    Args:
        name: the reduction.
        repeats: runs of each call beyond the first.
        single_rows: how many rows of each call are run alone.
        device: where.
    """
    reduction = parse_reduction(name)
    digest = hashlib.sha256()
    differing = torch.zeros((), dtype=torch.int64, device=device)
    rows_differing = torch.zeros((), dtype=torch.int64, device=device)
    rows_run = 0
    for number in range(len(SHAPES)):
        x, weights, mapping = _to(fixed_call(number), device)
        first = lora_shrink(x, weights, mapping, reduction=reduction, scale=SCALE)
        for _ in range(repeats):
            again = lora_shrink(x, weights, mapping, reduction=reduction, scale=SCALE)
            differing += (again.view(torch.int32) != first.view(torch.int32)).any()
        for row in range(min(single_rows, x.shape[0])):
            alone = lora_shrink(
                x[row : row + 1],
                weights,
                None if mapping is None else mapping[row : row + 1],
                reduction=reduction,
                scale=SCALE,
            )
            together = first[:, row : row + 1].contiguous()
            rows_differing += (alone.view(torch.int32) != together.view(torch.int32)).any()
            rows_run += 1
        digest.update(bytes(first.cpu().view(torch.uint8).flatten().tolist()))
    return Equality(
        str(reduction),
        len(SHAPES) * repeats,
        int(differing),
        rows_run,
        int(rows_differing),
        digest.hexdigest()[:16],
    )


def _numbers(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw BF16 numbers of either sign, 2^-6 to 2^2 in size, from integers alone."""
    sign = torch.randint(0, 2, tuple(shape), generator=generator) << 15
    exponent = torch.randint(121, 129, tuple(shape), generator=generator) << 7
    fraction = torch.randint(0, 128, tuple(shape), generator=generator)
    bits = sign | exponent | fraction
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(torch.bfloat16)


def _to(
    call: tuple[Tensor, list[Tensor], Tensor | None], device: torch.device | str
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    x, weights, mapping = call
    moved = None if mapping is None else mapping.to(device)
    return x.to(device), [a.to(device) for a in weights], moved
