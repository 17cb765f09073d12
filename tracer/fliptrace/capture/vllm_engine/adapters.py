"""Which LoRA adapters vLLM computes as PEFT does, told from their configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fliptrace.errors import UnsupportedModelError

#: Ranks for which vLLM makes buffers.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
#: Initialisations after which PEFT changes the base weights on loading, which vLLM does not.
_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga")


def buffer_rank(ranks: int) -> int:
    """Return the smallest rank that vLLM makes buffers for and that holds this one."""
    return next(size for size in _RANKS if size >= ranks)


def check_for_vllm(folder: Path, configuration: Mapping[str, Any]) -> int:
    """Return an adapter's rank; refuse what vLLM would compute differently from PEFT.

    Args:
        folder: where it is.
        configuration: from check_adapter.

    Raises:
        UnsupportedModelError: it would.
    """
    for setting in ("rank_pattern", "alpha_pattern"):
        if configuration.get(setting):
            raise UnsupportedModelError(
                f"{folder} has {setting}={configuration[setting]!r}: vLLM applies one rank and scaling to all "
                "modules, so it would compute another function than PEFT. Use the transformers engine"
            )
    start = str(configuration.get("init_lora_weights")).lower()
    if start.startswith(_CHANGES_BASE):
        raise UnsupportedModelError(
            f"{folder} was initialised with init_lora_weights={start!r}: PEFT changes the base weights when it loads "
            "such an adapter and vLLM does not, so it would compute another function. Convert it to plain LoRA first"
        )
    rank = configuration.get("r")
    if not isinstance(rank, int) or not 0 < rank <= _RANKS[-1]:
        raise UnsupportedModelError(
            f"vLLM takes adapters of rank 1 to {_RANKS[-1]}; {folder} has r={rank!r}"
        )
    return rank
