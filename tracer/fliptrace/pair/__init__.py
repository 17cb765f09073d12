"""The public API above the parts: record a pair, compare it, keep it, show it."""

from __future__ import annotations

from fliptrace.pair.engines import load_engine
from fliptrace.pair.pair import Pair, diff_traces, load_pair
from fliptrace.pair.prompts import Prompt, encode_prompt, read_dataset
from fliptrace.pair.tracing import PairSettings, trace_pair

__all__ = [
    "Pair",
    "PairSettings",
    "Prompt",
    "diff_traces",
    "encode_prompt",
    "load_engine",
    "load_pair",
    "read_dataset",
    "trace_pair",
]
