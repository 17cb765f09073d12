"""Operators with the signature of vLLM's shrink, defined by torch under names of their own."""

from __future__ import annotations

import itertools

import torch

from fliptrace_kernels.vllm_plugin.shrink_operator import Operator

SIGNATURE = (
    "(Tensor inputs, Tensor[] lora_a_weights, Tensor(a2!) output_tensor, Tensor "
    "token_lora_mapping, Tensor token_indices_sorted_by_lora_ids, Tensor num_tokens_per_lora, "
    "Tensor lora_token_start_loc, Tensor lora_ids, Tensor no_lora_flag_cpu, Tensor "
    "num_active_loras, float scaling) -> ()"
)
"""As `torch.ops.vllm.lora_shrink.default._schema` prints it in vLLM 0.26.0, 0.29.0 and 0.32.0."""

_numbers = itertools.count()
_kept = []


def define(signature=SIGNATURE, dispatch_key="CPU"):
    """Define a new operator whose kernel marks that it ran by writing -7."""
    namespace = f"fliptrace_test_{next(_numbers)}"
    library = torch.library.Library(namespace, "DEF")
    library.define(f"lora_shrink{signature}")
    if dispatch_key is not None:
        library.impl("lora_shrink", mark, dispatch_key)
    _kept.append(library)
    return Operator(namespace, "lora_shrink", dispatch_key or "CPU")


def mark(inputs, lora_a_weights, output_tensor, *rest):
    if inputs.shape[0]:
        output_tensor.fill_(-7.0)


def metadata(mapping, adapters, *, no_lora=False):
    """What vLLM passes between the output and the scaling, for a mapping on any device.

    Source: LoRAKernelMeta.prepare_tensors of vLLM 0.26.0.
    """
    device = mapping.device
    ids, counts = torch.unique(mapping, sorted=True, return_counts=True)
    lora_ids = torch.full((adapters + 1,), -1, dtype=torch.int32, device=device)
    lora_ids[: len(ids)] = ids
    per_lora = torch.zeros(adapters + 1, dtype=torch.int32, device=device)
    per_lora[: len(ids)] = counts.int()
    starts = torch.zeros(adapters + 2, dtype=torch.int32, device=device)
    starts[1 : len(ids) + 1] = counts.cumsum(0).int()
    return [
        mapping,
        mapping.sort(stable=True).indices.int(),
        per_lora,
        starts,
        lora_ids,
        torch.tensor([no_lora]),
        torch.tensor([adapters + 1], dtype=torch.int32),
    ]


def tensors(*, rows, size, rank, slices, adapters, dtype=torch.bfloat16, device="cpu", seed=0):
    """Inputs, weights as vLLM stacks them, a poisoned output and a mapping with all adapters and none."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=generator).to(dtype).to(device)
    weights = [
        (torch.randn(adapters, 1, rank, size, generator=generator) / size**0.5).to(dtype).to(device)
        for _ in range(slices)
    ]
    out = torch.full((slices, rows, rank), float("nan"), device=device)
    mapping = (torch.arange(rows, dtype=torch.int32, device=device) % (adapters + 1)) - 1
    return x, weights, out, mapping
