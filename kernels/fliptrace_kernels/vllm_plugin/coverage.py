"""What an engine does that the plugin does not cover: refused, or named.

Refused is what would break a promise of the reduction unseen. Named is what merely stays as vLLM
has it. The reasons are in kernels/README.md.
"""

from __future__ import annotations

from typing import Any

import torch

from fliptrace_kernels.reduction import Reduction
from fliptrace_kernels.vllm_plugin.errors import PluginError


def check_process(
    reduction: Reduction, *, platform: str, dual_stream: bool, batch_invariant: bool
) -> None:
    """Refuse what can be known before there is an engine.

    Args:
        reduction: the reduction asked for.
        platform: name of vLLM's platform, such as 'cuda'.
        dual_stream: whether VLLM_LORA_ENABLE_DUAL_STREAM is on.
        batch_invariant: whether VLLM_BATCH_INVARIANT is on.

    Raises:
        PluginError: if the plugin cannot keep what the reduction promises.
    """
    if platform != "cuda":
        raise PluginError(
            f"FLIPTRACE_SHRINK={reduction} needs vLLM on an NVIDIA GPU, where LoRA goes through "
            f"the operator vllm::lora_shrink; vLLM's platform here is '{platform}', whose LoRA "
            "layers never call it. Unset FLIPTRACE_SHRINK to run here without the plugin"
        )
    if dual_stream:
        raise PluginError(
            f"FLIPTRACE_SHRINK={reduction} does not cover VLLM_LORA_ENABLE_DUAL_STREAM=1: shrink "
            "and expand then overlap by programmatic dependent launch, which has not been tried "
            "with these kernels. Unset one of the two"
        )
    if batch_invariant and not reduction.is_batch_invariant:
        raise PluginError(
            f"VLLM_BATCH_INVARIANT=1 asks for bits that do not change, and {reduction} adds in "
            "order of arrival. Choose a repeatable reduction, such as FLIPTRACE_SHRINK=unsplit, "
            "or unset VLLM_BATCH_INVARIANT"
        )


def check_engine(reduction: Reduction, config: Any) -> list[str]:
    """Refuse or name what an engine's configuration shows.

    Args:
        reduction: the reduction that is installed.
        config: a `vllm.config.VllmConfig`.

    Returns:
        One sentence for each thing that stays as vLLM has it.

    Raises:
        PluginError: if the plugin cannot keep what the reduction promises.
    """
    lora = config.lora_config
    if lora is None:
        return [
            f"FLIPTRACE_SHRINK={reduction} has nothing to do: LoRA is not enabled in this engine."
        ]
    parallel = config.parallel_config.tensor_parallel_size
    if lora.fully_sharded_loras and parallel > 1:
        raise PluginError(
            f"FLIPTRACE_SHRINK={reduction} does not cover fully_sharded_loras=True on {parallel} "
            "GPUs: there the GPUs add their shrinks to one another, in an order that no reduction "
            "names. Leave fully_sharded_loras out"
        )
    dtype = config.model_config.dtype if lora.lora_dtype in (None, "auto") else lora.lora_dtype
    if dtype not in (torch.bfloat16, torch.float16, "bfloat16", "float16"):
        raise PluginError(
            f"FLIPTRACE_SHRINK={reduction} covers bfloat16 and float16 adapters, as vLLM's own "
            f"shrink does; this engine's are {dtype}. Pass dtype='bfloat16'"
        )
    notes = []
    if config.model_config.is_moe:
        notes.append(
            "Adapters on the experts of this mixture-of-experts model keep vLLM's own kernel "
            f"(vllm::fused_moe_lora); only its other layers run {reduction}."
        )
    return notes
