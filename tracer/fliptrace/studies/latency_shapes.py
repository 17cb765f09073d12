"""Models that have a shape and no training: for times, which depend on shapes, and never for what is generated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fliptrace.errors import InputError

LLAMA_3_2_3B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
TINY: dict[str, Any] = LLAMA_3_2_3B | {
    "head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
SHAPES: dict[str, dict[str, Any]] = {"llama-3.2-3b": LLAMA_3_2_3B, "tiny": TINY}


def shape_of(name: str) -> dict[str, Any]:
    """Return a shape by its name.

    Raises:
        InputError: there is none of that name.
    """
    if name not in SHAPES:
        raise InputError(f"a shape is one of {', '.join(SHAPES)}; got {name!r}")
    return SHAPES[name]


def write_model(folder: Path, shape: Mapping[str, Any]) -> Path:
    """Write a model folder without weights or tokenizer, for load_format='dummy'."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(shape), indent=1))
    return folder


def write_adapter(folder: Path, shape: Mapping[str, Any], rank: int, seed: int) -> Path:
    """Write a random LoRA adapter on all seven projections, in PEFT's format; its B is not zero.

    Args:
        folder: where; one that holds an adapter stays as it is.
        shape: of the model.
        rank: of the adapter; alpha is twice as much.
        seed: of its weights.
    """
    import torch
    from safetensors.torch import save_file

    if (folder / "adapter_config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    projections = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, (size, width) in projections.items():
            start = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn(rank, size, generator=generator) / size**0.5
            b = torch.randn(width, rank, generator=generator) * 0.01
            tensors[f"{start}.lora_A.weight"] = a.bfloat16()
            tensors[f"{start}.lora_B.weight"] = b.bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "dummy",
        "bias": "none",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name in projections}),
    }
    # Last, so that a folder that has it is whole.
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1))
    return folder
