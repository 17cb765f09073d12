"""The engine for any PEFT LoRA causal language model in transformers, on CPU or CUDA, one prompt at a time."""

from __future__ import annotations

from fliptrace.capture.transformers_engine.engine import TransformersEngine
from fliptrace.capture.transformers_engine.loading import LoadedModel, load_model

__all__ = ["LoadedModel", "TransformersEngine", "load_model"]
