"""Put LoRA layers on a model and write them; the one module of studies that imports peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fliptrace.errors import UnsupportedModelError
from fliptrace.studies.training.settings import TrainSettings

#: What is adapted where a model has these; another model's linear layers are all adapted, its head excepted.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def add_adapter(base: nn.Module, settings: TrainSettings) -> tuple[Any, str | list[str]]:
    """Return the model with new LoRA layers, in FP32, the only ones that learn; and what is adapted.

    Raises:
        UnsupportedModelError: PEFT finds nothing to adapt.
    """
    from peft import LoraConfig, get_peft_model

    names = {name.rpartition(".")[2] for name, part in base.named_modules() if _is_linear(part)}
    targets: str | list[str] = list(PROJECTIONS) if set(PROJECTIONS) <= names else "all-linear"
    configuration = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(settings.seed)  # the initial A
    try:
        return get_peft_model(base, configuration), targets
    except ValueError as error:
        raise UnsupportedModelError(f"PEFT cannot adapt this model ({error})") from error


def save_adapter(model: Any, folder: Path, dtype: torch.dtype, base_name: str) -> None:
    """Write the adapter in the base model's dtype, in which it will run; the base by name, not by path."""
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(dtype)
    for configuration in model.peft_config.values():
        configuration.base_model_name_or_path = base_name
    model.save_pretrained(str(folder), safe_serialization=True)


def _is_linear(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear)
