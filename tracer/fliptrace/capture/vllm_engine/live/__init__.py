"""The recorder of vLLM's production configuration: written inside captured graphs, read per forward."""

from __future__ import annotations

from fliptrace.capture.vllm_engine.live.comparison import (
    LiveComparison,
    LiveDifference,
    compare_executions,
)
from fliptrace.capture.vllm_engine.live.executions import Execution
from fliptrace.capture.vllm_engine.live.recorder import LiveRecorder
from fliptrace.capture.vllm_engine.live.watching import forget_watch, prepare_watch, watch

__all__ = [
    "Execution",
    "LiveComparison",
    "LiveDifference",
    "LiveRecorder",
    "compare_executions",
    "forget_watch",
    "prepare_watch",
    "watch",
]
