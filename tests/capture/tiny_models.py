"""Tiny random language models with random LoRA adapters, as folders that load_model reads.

They say nothing sensible, but every part is there: several layers, grouped key and value heads, sliding windows, all
seven projections adapted, B not zero, a tokenizer with a chat template.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

#: What can be adapted in Nemotron-H by PEFT; vLLM adapts out_proj, too.
HYBRID_PROJECTIONS = (
    "in_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "up_proj",
    "down_proj",
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VOCABULARY = 320
CONTEXT = 160
_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def llama_configuration(**changes: Any) -> Any:
    """Three layers, hidden 256: a shrink over it has 8 partials under ``atomic:8``."""
    from transformers import LlamaConfig

    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.06,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaConfig(**(settings | changes))


def gemma_configuration(**changes: Any) -> Any:
    """Sliding window 8, with one layer of full attention between two that slide."""
    from transformers import Gemma3TextConfig

    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.06,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return Gemma3TextConfig(**(settings | changes))


def nemotron_configuration(pattern: str = "M*-M", **changes: Any) -> Any:
    """Nemotron-H: Mamba-2 (``M``), attention (``*``) and MLP (``-``) layers, hidden 256."""
    from transformers import NemotronHConfig

    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 16,
        "hybrid_override_pattern": pattern,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.02,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return NemotronHConfig(**(settings | changes))


def write_model(
    folder: Path, configuration: Any, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write a random causal language model and its tokenizer."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(configuration).to(dtype)
        model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a word-level tokenizer whose words are w0, w1, ...; it has a chat template."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {name: number for number, name in enumerate(("<pad>", "<s>", "</s>", "<unk>"))}
    words |= {f"w{number}": number for number in range(4, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)


def write_adapter(
    folder: Path, model: Path, *, seed: int = 1, strength: float = 0.05, **settings: Any
) -> Path:
    """Write a LoRA adapter for a model, B drawn from N(0, strength²)."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    chosen = {
        "r": 16,
        "lora_alpha": 32,
        "target_modules": list(PROJECTIONS),
        "task_type": "CAUSAL_LM",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
        torch.manual_seed(seed)
        wrapped = get_peft_model(base, LoraConfig(**(chosen | settings)))
        fill_adapter(wrapped, strength)
        wrapped.save_pretrained(folder)
    return folder


def write_plain_adapter(
    folder: Path,
    model: Path,
    targets: Sequence[str],
    *,
    rank: int = 16,
    seed: int = 1,
    strength: float = 0.05,
) -> Path:
    """Write an adapter in PEFT's format without PEFT, which adapts no out_proj of Mamba layers and vLLM does."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    with safe_open(str(model / "model.safetensors"), "pt") as file:
        for name in sorted(file.keys()):
            path = name.removesuffix(".weight")
            if path.rpartition(".")[2] not in targets:
                continue
            rows, columns = file.get_slice(name).get_shape()
            place = f"base_model.model.{path.replace('backbone.', 'model.', 1)}"
            for part, shape, deviation in (
                ("lora_A", (rank, columns), columns**-0.5),
                ("lora_B", (rows, rank), strength),
            ):
                values = torch.randn(shape, generator=generator) * deviation
                tensors[f"{place}.{part}.weight"] = values.to(torch.bfloat16)
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    configuration = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(configuration), "utf-8")
    return folder


def fill_adapter(model: nn.Module, strength: float) -> None:
    """Draw every B, and the parts of variants that start at zero, at random."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                parameter.normal_(0, strength)


def copy_adapter(source: Path, target: Path, **changes: Any) -> Path:
    """Copy an adapter with other settings in its configuration."""
    target.mkdir(parents=True)
    configuration = json.loads((source / "adapter_config.json").read_text("utf-8")) | changes
    (target / "adapter_config.json").write_text(json.dumps(configuration), "utf-8")
    (target / "adapter_model.safetensors").write_bytes(
        (source / "adapter_model.safetensors").read_bytes()
    )
    return target


def prompt_ids(length: int, seed: int = 5) -> list[int]:
    """Draw a prompt of ordinary words."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()
