"""The floor: partials alone, in every tiling tried, with no hand-over between blocks.

No shrink that splits K can be faster than the fastest of these, unless it finds a better tiling
for the same loads; then that tiling belongs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fliptrace_kernels.bench.cells import Cell
from fliptrace_kernels.bench.partials_kernels import partials_only, partials_only_by_row


@dataclass(frozen=True, slots=True)
class Tiling:
    """One way to cut the work of a partials-only launch.

    Attributes:
        block_m: rows per block; 0 for the kernel that takes one row without a matrix instruction.
        block_n: ranks per block.
        block_k: K elements per step.
        splits: parts of K; 0 for as many as there are K blocks.
        num_warps: warps per block.
        num_stages: pipelining depth of the K loop.
    """

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int = 2

    def __str__(self) -> str:
        """Return text such as `16x16x128 split 24 warps 4`."""
        return (
            f"{self.block_m}x{self.block_n}x{self.block_k} split {self.splits} "
            f"warps {self.num_warps}"
        )


def tilings_for(cell: Cell) -> list[Tiling]:
    """List the tilings that are tried for a shape, each once."""
    wide = max(16, 1 << (min(cell.rank, 64) - 1).bit_length())  # a tile is a power of two
    if cell.rows <= 16:
        found = [
            Tiling(16, 16, 64, 0, 2),
            Tiling(16, 16, 128, 0, 4),
            Tiling(16, 16, 256, 0, 4),
            Tiling(16, 16, 512, 0, 4),
            Tiling(16, 16, 256, -(-cell.k // 512), 4),
            Tiling(16, wide, 128, 0, 4),
        ]
        if cell.rows <= 4:
            found += [Tiling(0, 4, 1024, 0, 4), Tiling(0, 16, 512, 0, 4)]
    elif cell.rows <= 128:
        found = [
            Tiling(16, 16, 128, 0, 4),
            Tiling(16, 16, 256, 8, 4),
            Tiling(16, 16, 128, 8, 4),
            Tiling(32, min(wide, 32), 128, 0, 4),
            Tiling(64, wide, 128, 0, 4),
            Tiling(64, wide, 64, 8, 4, 3),
        ]
    else:
        found = [
            Tiling(16, wide, 128, 8, 4),
            Tiling(64, wide, 64, 8, 4, 4),
            Tiling(64, wide, 128, 4, 4, 3),
            Tiling(64, wide, 64, 2, 4, 4),
            Tiling(128, wide, 64, 4, 4, 4),
            Tiling(128, wide, 64, 1, 4, 4),
        ]
    settled = [_settle(tiling, cell.k) for tiling in found]
    return list(dict.fromkeys(settled))


def partials(
    x: Tensor, a_slices: Sequence[Tensor], tiling: Tiling, *, out: Tensor | None = None
) -> Tensor:
    """Compute unscaled partials and nothing else.

    Args:
        x: inputs, [M, K], contiguous.
        a_slices: up to three contiguous tensors, all [R, K] or [1, R, K].
        tiling: how; `splits` must have been settled, as `tilings_for` does.
        out: where to write, [splits, slices, M, R], FP32; None allocates it.

    Returns:
        Partials, [splits, slices, M, R], FP32; their sum over splits is the shrink.
    """
    rows, size = x.shape
    rank = a_slices[0].shape[-2]
    if out is None:
        shape = (tiling.splits, len(a_slices), rows, rank)
        out = torch.empty(shape, dtype=torch.float32, device=x.device)
    weights = [*a_slices, *list(a_slices[:1]) * (3 - len(a_slices))]
    options: dict[str, Any] = {
        "EVEN_K": size % tiling.block_k == 0,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }
    tiles_n = -(-rank // tiling.block_n)
    launcher: Any
    if tiling.block_m == 0:
        launcher = partials_only_by_row[(tiles_n * tiling.splits, len(a_slices), rows)]
    else:
        tiles = -(-rows // tiling.block_m) * tiles_n
        launcher = partials_only[(tiles * tiling.splits, len(a_slices))]
        options |= {
            "BLOCK_M": tiling.block_m,
            "ONE_BLOCK": tiling.splits == -(-size // tiling.block_k),
        }
    launcher(out, x, *weights, rows, size, rank, tiling.splits, **options)
    return out


def _settle(tiling: Tiling, k: int) -> Tiling:
    blocks = -(-k // tiling.block_k)
    splits = min(tiling.splits or blocks, blocks)
    return Tiling(
        tiling.block_m,
        tiling.block_n,
        tiling.block_k,
        splits,
        tiling.num_warps,
        tiling.num_stages,
    )
