"""Start the two-launch kernel that stands for vLLM 0.32's batch-invariant shrink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fliptrace_kernels.bench.partials_kernels import two_launch_partials, two_launch_sum
from fliptrace_kernels.errors import ShrinkInputError

SPLITS: Final = 8
BLOCK_K: Final = 256
SAME_ORDER: Final = f"deterministic:{SPLITS}/{BLOCK_K}"
"""The reduction whose bits these launches must give."""

_BLOCK_M: Final = 32
_BLOCK_N: Final = 16
_LAUNCH: Final[dict[str, Any]] = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}


def shrink(
    x: Tensor,
    a_slices: Sequence[Tensor],
    mapping: Tensor | None,
    scale: float = 1.0,
    *,
    out: Tensor | None = None,
    partials: Tensor | None = None,
) -> Tensor:
    """Run one shrink in two launches.

    Args:
        x: inputs, [M, K], contiguous, BF16, FP16 or FP32.
        a_slices: up to three contiguous tensors, all [adapters, R, K].
        mapping: adapter of each row, [M], int32, -1 for none; None means adapter 0 for every row.
        scale: factor of the total.
        out: where to write, [slices, M, R], FP32; rows without an adapter are not written. None
            allocates it, filled with zeros if there is a mapping.
        partials: scratch, [slices, 8, M, R], FP32; None allocates it.

    Returns:
        The output.

    Raises:
        ShrinkInputError: if there are more than three slices or something is not contiguous.
    """
    weights = list(a_slices)
    if not 1 <= len(weights) <= 3 or not all(t.is_contiguous() for t in (x, *weights)):
        raise ShrinkInputError(
            f"two launches take one to three contiguous slices and a contiguous x; "
            f"got {len(weights)} slices. Copy what is strided"
        )
    rows, size = x.shape
    adapters, rank, _ = weights[0].shape
    shape = (len(weights), rows, rank)
    if out is None:
        make = torch.empty if mapping is None else torch.zeros
        out = make(shape, dtype=torch.float32, device=x.device)
    if rows == 0:
        return out
    if partials is None:
        partials = torch.empty(
            (len(weights), SPLITS, rows, rank), dtype=torch.float32, device=x.device
        )
    tiles = -(-rows // _BLOCK_M) * -(-rank // _BLOCK_N)
    has_mapping = mapping is not None
    index = x if mapping is None else mapping
    first: Any = two_launch_partials[(tiles * SPLITS, len(weights), adapters)]
    first(
        partials,
        x,
        *weights,
        *weights[:1] * (3 - len(weights)),
        index,
        rows,
        K=size,
        R=rank,
        HAS_MAPPING=has_mapping,
        SPLITS=SPLITS,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=BLOCK_K,
        **_LAUNCH,
    )
    second: Any = two_launch_sum[(tiles, len(weights), adapters)]
    second(
        out,
        partials,
        index,
        rows,
        float(scale),
        R=rank,
        HAS_MAPPING=has_mapping,
        SPLITS=SPLITS,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=_BLOCK_N,
        **_LAUNCH,
    )
    return out
