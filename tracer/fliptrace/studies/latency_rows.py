"""Times of requests as a row, under the names that vLLM's own benchmarks give their results.

``vllm bench serve --save-result``: duration, completed, total_input_tokens, total_output_tokens, request_throughput,
output_throughput, total_token_throughput, and mean, median, std and p99 of ttft, tpot, itl and e2el in milliseconds.
``vllm bench latency --output-json``: avg_latency, latencies, percentiles. ``vllm bench throughput --output-json``:
elapsed_time, num_requests, total_num_tokens, requests_per_second, tokens_per_second.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

_PERCENTAGES = (10, 25, 50, 75, 90, 99)


def benchmark_fields(
    seconds: Sequence[float],
    times: Sequence[Sequence[float]],
    prompt_tokens: Sequence[int],
) -> dict[str, Any]:
    """Return what a run of several batches, one after another, gives.

    Args:
        seconds: each batch from its first request handed in to its last token.
        times: per request, when it got each token, in seconds after its batch began.
        prompt_tokens: per request, how long its prompt is.

    Returns:
        JSON values; a time per output token leaves out the first token, and one of a request with a single token is
        not counted, both as vLLM has it.
    """
    duration = float(sum(seconds))
    first = [each[0] for each in times]
    whole = [each[-1] for each in times]
    gaps = [later - before for each in times for before, later in pairwise(each)]
    per_token = [(each[-1] - each[0]) / (len(each) - 1) for each in times if len(each) > 1]
    given, made = int(sum(prompt_tokens)), sum(map(len, times))
    fields: dict[str, Any] = {
        "duration": duration,
        "completed": len(times),
        "total_input_tokens": given,
        "total_output_tokens": made,
        "request_throughput": len(times) / duration,
        "output_throughput": made / duration,
        "total_token_throughput": (given + made) / duration,
    }
    for name, values in (("ttft", first), ("tpot", per_token), ("itl", gaps), ("e2el", whole)):
        fields |= _statistics(name, values)
    latencies = [float(value) for value in seconds]
    return fields | {
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": {
            str(percentage): float(np.percentile(latencies, percentage))
            for percentage in _PERCENTAGES
        },
        "elapsed_time": duration,
        "num_requests": len(times),
        "total_num_tokens": given + made,
        "requests_per_second": len(times) / duration,
        "tokens_per_second": (given + made) / duration,
    }


def _statistics(name: str, values: Sequence[float]) -> dict[str, float]:
    found = np.asarray(values or [0.0], float) * 1000.0
    return {
        f"mean_{name}_ms": float(found.mean()),
        f"median_{name}_ms": float(np.median(found)),
        f"std_{name}_ms": float(found.std()),
        f"p99_{name}_ms": float(np.percentile(found, 99)),
    }
