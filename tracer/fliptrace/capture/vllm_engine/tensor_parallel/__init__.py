"""Tensor parallel in the vllm engine: a process per rank, driven together, seen as one engine with all their sites."""

from __future__ import annotations

from fliptrace.capture.vllm_engine.tensor_parallel.engine import TensorParallelEngine
from fliptrace.capture.vllm_engine.tensor_parallel.loading import load_ranks, wanted_ranks

__all__ = ["TensorParallelEngine", "load_ranks", "wanted_ranks"]
