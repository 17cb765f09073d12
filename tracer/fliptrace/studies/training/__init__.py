"""Train LoRA adapters as the paper does: ranks 16 and 32, alpha twice the rank, seeds and splits fixed.

What comes out is a PEFT adapter in safetensors, in the model's own type, with a card that says how it was made. This is
no general trainer: no base weights change, nothing is resumed, one device computes.
"""

from __future__ import annotations

from fliptrace.studies.training.run import train_adapter
from fliptrace.studies.training.settings import Training, TrainSettings

__all__ = ["TrainSettings", "Training", "train_adapter"]
