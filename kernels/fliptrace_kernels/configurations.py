"""The table that decides every number a sum depends on; nothing here is tuned at run time.

A launch is chosen by reduction, rank and dtype alone, never by the number of rows, so a row's
sum is shaped the same way whether it comes alone or in a batch. Changing an entry changes bits:
it needs an entry in the decision log of kernels/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DEFAULT_BLOCK_K: Final[dict[str, int]] = {
    # vLLM's own block for 128 tokens and more, where its split is 8 too.
    "atomic": 32,
    # The same blocks as atomic, so that the two differ in the final sum only.
    "deterministic": 32,
    # One split walks all of K, so a larger block halves its loop.
    "unsplit": 64,
    # As atomic and deterministic.
    "tree": 32,
    "local": 32,
}
"""K block that a short form such as `atomic:8` stands for."""

DEFAULT_SPLITS: Final[dict[str, int]] = {"unsplit": 1, "local": 32}
"""Splits of the kinds that may be named without a number."""

LOCAL_SPLITS: Final = (8, 16, 32, 64)
LOCAL_BLOCK_K: Final = 32
LOCAL_GROUP: Final = 4  # consecutive partials that are added up first

VLLM_ROWS: Final = 128
VLLM_FEW_ROWS: Final = (64, 256)
VLLM_MANY_ROWS: Final = (8, 32)
"""Splits and K block that vLLM takes below and from VLLM_ROWS rows.

Source: vLLM 0.26 to 0.32, get_lora_op_configs without a tuned configuration.
"""

MIN_BLOCK_K: Final = 16  # the smallest K of a 16-bit matrix instruction
MAX_BLOCK_K: Final = 1024
MAX_SPLITS: Final = 64  # vLLM's largest default

_BLOCK_M: Final = 16
_MIN_BLOCK_N: Final = 16
_MAX_BLOCK_N: Final = 64
_SHARED_MEMORY_BYTES: Final = 96 * 1024  # what every GPU since compute capability 8.0 has


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch numbers of one Triton kernel.

    Attributes:
        block_m: rows of x per tile.
        block_n: ranks per tile.
        num_warps: warps per block.
        num_stages: software pipelining depth of the K loop.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def launch_for(*, rank: int, block_k: int, element_bytes: int) -> Launch:
    """Return the launch of a shrink kernel.

    Args:
        rank: R, rows of one A slice.
        block_k: K block of the reduction.
        element_bytes: size of one element of x.
    """
    block_n = _MIN_BLOCK_N
    while block_n < min(rank, _MAX_BLOCK_N):
        block_n *= 2
    stages = 2

    def tile_bytes() -> int:
        return (_BLOCK_M + block_n) * block_k * element_bytes * stages

    if tile_bytes() > _SHARED_MEMORY_BYTES:
        stages = 1
    while tile_bytes() > _SHARED_MEMORY_BYTES and block_n > _MIN_BLOCK_N:
        block_n //= 2
    return Launch(block_m=_BLOCK_M, block_n=block_n, num_warps=4, num_stages=stages)
