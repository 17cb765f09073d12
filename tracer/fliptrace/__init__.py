"""fliptrace: find the rounding that flipped a token.

>>> import fliptrace as ft
>>> pair = ft.trace_pair("path/to/model", "path/to/adapter", "Tom has 3 apples and buys 5 more. How many?")
>>> pair.divergence        # the first difference that survives the 16-bit rounding
>>> pair.heatmap()         # a plotly figure
>>> pair.save("report")    # report.html, report.json and both traces

Importing this package needs torch alone; everything else is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fliptrace.lazy import lazy_names

if TYPE_CHECKING:
    from fliptrace.analysis import compare
    from fliptrace.capture.vllm_engine import Neighbour
    from fliptrace.capture.vllm_engine.live import compare_executions, prepare_watch, watch
    from fliptrace.pair import (
        Pair,
        PairSettings,
        Prompt,
        attach,
        bundled_model,
        diff_traces,
        encode_prompt,
        load_engine,
        load_pair,
        trace_pair,
    )
    from fliptrace.store import open_trace
    from fliptrace.studies.repeatability import assert_repeatable
    from fliptrace.trace import Kind, Trace
    from fliptrace.verdicts import PairDiff

_HOMES = {
    "Kind": "trace",
    "Neighbour": "capture.vllm_engine",
    "Pair": "pair",
    "PairDiff": "verdicts",
    "PairSettings": "pair",
    "Prompt": "pair",
    "Trace": "trace",
    "assert_repeatable": "studies.repeatability",
    "attach": "pair",
    "bundled_model": "pair",
    "compare": "analysis",
    "compare_executions": "capture.vllm_engine.live",
    "diff_traces": "pair",
    "encode_prompt": "pair",
    "load_engine": "pair",
    "load_pair": "pair",
    "open_trace": "store",
    "prepare_watch": "capture.vllm_engine.live",
    "trace_pair": "pair",
    "watch": "capture.vllm_engine.live",
}

__all__ = [
    "Kind",
    "Neighbour",
    "Pair",
    "PairDiff",
    "PairSettings",
    "Prompt",
    "Trace",
    "assert_repeatable",
    "attach",
    "bundled_model",
    "compare",
    "compare_executions",
    "diff_traces",
    "encode_prompt",
    "load_engine",
    "load_pair",
    "open_trace",
    "prepare_watch",
    "trace_pair",
    "watch",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
