"""local:S, a shrink whose splits are added inside one block of a CUDA grid.

One launch, nothing handed over between blocks, the same bits for every number of rows. Written in
CUDA C++ (`source.cu`) and compiled at run time by NVRTC; importing this package needs torch alone.
Not here: the public call (`fliptrace_kernels.dispatch`) and the plain-torch specification.
"""

from __future__ import annotations

from fliptrace_kernels.local.arrangements import BLOCK_K, GROUP, SPLITS, Arrangement
from fliptrace_kernels.local.calls import DEFAULT_SPLITS
from fliptrace_kernels.local.launch import (
    describe_launch,
    partials_only,
    prepare,
    shrink,
    with_partials,
)

__all__ = [
    "BLOCK_K",
    "DEFAULT_SPLITS",
    "GROUP",
    "SPLITS",
    "Arrangement",
    "describe_launch",
    "partials_only",
    "prepare",
    "shrink",
    "with_partials",
]
