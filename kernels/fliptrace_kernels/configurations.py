"""The table that decides every number a sum depends on; nothing here is tuned at run time.

A launch is chosen by reduction, rank and dtype alone, never by the number of rows, so a row's
sum is shaped the same way whether it comes alone or in a batch. Changing a K block changes bits,
and changing a tile may: either needs an entry in the decision log of kernels/README.md.
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


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch numbers of one Triton kernel.

    Attributes:
        block_m: rows of x per tile.
        block_n: ranks per tile.
        num_warps: warps per block.
        num_stages: software pipelining depth of the K loop.
        x_eviction: cache hint of x: '', 'evict_first' or 'evict_last'. Hints change no bit.
        a_eviction: cache hint of A.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    x_eviction: str = ""
    a_eviction: str = ""


_ANY: Final = 1 << 30

# Rows per tile stay below 64: from there on Triton would pick another matrix instruction on newer
# GPUs (wgmma, tcgen05). The stages keep a tile in flight within 96 KB of shared memory, which every
# GPU since compute capability 8.0 has; only FP32 with a K block of 1024 asks for more.
_FIXED_ORDER: Final[tuple[tuple[int, int, int, Launch], ...]] = (
    # element bytes, rank up to, K block up to
    (2, 16, 128, Launch(16, 16, 4, 4)),
    (2, 16, 256, Launch(16, 16, 4, 3)),
    (2, 16, 512, Launch(16, 16, 4, 2)),
    (2, 16, _ANY, Launch(16, 16, 4, 1)),
    (2, 32, 128, Launch(16, 32, 4, 4)),
    (2, 32, 256, Launch(16, 32, 4, 3)),
    (2, 32, _ANY, Launch(16, 32, 4, 1)),
    (2, _ANY, 64, Launch(16, 64, 4, 4)),
    (2, _ANY, 128, Launch(16, 64, 4, 3)),
    (2, _ANY, 256, Launch(16, 64, 4, 2)),
    (2, _ANY, 512, Launch(16, 64, 4, 1)),
    (2, _ANY, _ANY, Launch(16, 16, 4, 1)),
    (4, 16, 256, Launch(16, 16, 4, 2)),
    (4, 16, _ANY, Launch(16, 16, 4, 1)),
    (4, 32, 256, Launch(16, 32, 4, 1)),
    (4, _ANY, 128, Launch(16, 64, 4, 2)),
    (4, _ANY, 256, Launch(16, 64, 4, 1)),
    (4, _ANY, _ANY, Launch(16, 16, 4, 1)),
)
"""Launches of `unsplit`, `deterministic` and `tree`: the first row that fits."""

_VLLM: Final = Launch(32, 16, 4, 2)
"""vLLM's own tile, for `atomic`.

Source: vLLM 0.26 to 0.32, get_lora_op_configs without a tuned configuration.
"""

_VLLM_LARGE_BLOCK: Final = Launch(32, 16, 4, 1)  # where two stages would not fit


def launch_for(*, kind: str, rank: int, block_k: int, element_bytes: int) -> Launch:
    """Return the launch of a shrink kernel.

    Args:
        kind: kind of the reduction.
        rank: R, rows of one A slice.
        block_k: K block of the reduction.
        element_bytes: size of one element of x, 2 or 4.
    """
    if kind == "atomic":
        return _VLLM if block_k * element_bytes <= 1024 else _VLLM_LARGE_BLOCK
    return next(
        launch
        for size, ranks, blocks, launch in _FIXED_ORDER
        if element_bytes == size and rank <= ranks and block_k <= blocks
    )
