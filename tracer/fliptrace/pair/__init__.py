"""The public API above the parts: record a pair, compare it, keep it, show it."""

from __future__ import annotations

from fliptrace.pair.bundled import BundledModel, bundled_model
from fliptrace.pair.engines import attach, load_engine, shrink_weights
from fliptrace.pair.pair import Pair, diff_traces, load_pair
from fliptrace.pair.prompts import Prompt, encode_prompt, read_dataset
from fliptrace.pair.settings import PairSettings
from fliptrace.pair.tracing import trace_pair

__all__ = [
    "BundledModel",
    "Pair",
    "PairSettings",
    "Prompt",
    "attach",
    "bundled_model",
    "diff_traces",
    "encode_prompt",
    "load_engine",
    "load_pair",
    "read_dataset",
    "shrink_weights",
    "trace_pair",
]
