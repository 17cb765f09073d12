"""The manifest's words for a group of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from fliptrace.capture.vllm_engine.tensor_parallel.loading import LoadedRanks

#: Of the environment that ranks inherit: how they add up.
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "NCCL_ALGO",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NVSHMEM_DISABLE_NVLS",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
)


def described(
    sections: Sequence[Mapping[str, Mapping[str, Any]]],
    loaded: LoadedRanks,
    reduction: tuple[str, int | None],
    sites: int,
) -> dict[str, dict[str, Any]]:
    """Join what ranks said of themselves: rank 0's sections, and what is the group's.

    Args:
        sections: per rank, from VllmEngine.describe.
        loaded: the group.
        reduction: its name and seed, as given to all.
        sites: how many all ranks have.
    """
    result = {name: dict(section) for name, section in sections[0].items()}
    ranks, facts = loaded.group.count, loaded.facts[0]
    _, seed = reduction
    if seed is not None:
        result["reduction"]["seed"] = seed
        result["reduction"]["schedule"] = (
            f"{result['reduction']['schedule']} on rank 0, of another seed on every other rank"
        )
    heads = facts["total_kv_heads"]
    copies = ranks // heads if heads < ranks else 1
    result["engine"] |= {
        "mode": "eager, one request alone, one process per rank",
        "sites": sites,
        "arguments": dict(loaded.arguments),
        "tensor_parallel": {
            "ranks": ranks,
            "devices": [own["device"] for own in loaded.facts],
            "gpus": [each["environment"].get("gpu", {}).get("name", "") for each in sections],
            "sites": "at each place rank 0, then the others; the path names the rank",
            "row_parallel_sites": list(facts["summing"]),
            "projections": "a rank's own output; at row-parallel sites before the sum over ranks",
            "kv_heads": "heads of rank 0, then of the others"
            if copies == 1
            else f"heads of rank 0, then of the others; each of the model's {heads} is on {copies} ranks, as copies "
            "that are computed on their own",
            "logits": "equal on all ranks in every step, else the recording is an error",
            "disable_custom_all_reduce": bool(loaded.arguments.get("disable_custom_all_reduce")),
            "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        },
    }
    return result
