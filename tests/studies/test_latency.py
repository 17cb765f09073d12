"""trace-study latency: rows under vLLM's names, ratios with intervals, trials that start anew, and vLLM itself."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from fliptrace.errors import InputError
from fliptrace.studies.engine_process_lanes import run_lanes
from fliptrace.studies.engine_process_settings import EngineSettings
from fliptrace.studies.latency import LatencyStudy
from fliptrace.studies.latency_rows import benchmark_fields
from fliptrace.studies.running import run_study
from fliptrace.studies.statistics import paired_ratio

VLLM_PYTHON = os.environ.get("FLIPTRACE_VLLM_PYTHON") or (
    sys.executable if importlib.util.find_spec("vllm") else None
)
#: Results of vLLM's benchmarks, as its sources name them: serve --save-result, latency and throughput --output-json.
VLLM_NAMES = {
    "duration",
    "completed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    *(
        f"{s}_{n}_ms"
        for s in ("mean", "median", "std", "p99")
        for n in ("ttft", "tpot", "itl", "e2el")
    ),
    "avg_latency",
    "latencies",
    "percentiles",
    "elapsed_time",
    "num_requests",
    "total_num_tokens",
    "requests_per_second",
    "tokens_per_second",
}


@pytest.fixture
def study(stand_in, tmp_path):
    """Two trials of two rounds on engines whose times are known."""
    return LatencyStudy(
        reductions=("none", "vllm-own", "unsplit", "local"),
        batch_sizes=(1, 4),
        new_tokens=5,
        trials=2,
        rounds=2,
        engines=EngineSettings(python=str(stand_in), scratch=str(tmp_path / "scratch")),
    )


def test_a_row_has_vllms_names_and_their_values():
    """Two batches of one request by hand: 3 tokens at 0.1, 0.2, 0.4 s, then 2 tokens at 0.2 and 0.3 s."""
    fields = benchmark_fields([0.4, 0.3], [[0.1, 0.2, 0.4], [0.2, 0.3]], [10, 20])
    assert set(fields) == VLLM_NAMES
    expected = {
        "duration": 0.7,
        "completed": 2,
        "total_input_tokens": 30,
        "total_output_tokens": 5,
        "output_throughput": 5 / 0.7,
        "total_token_throughput": 35 / 0.7,
        "mean_ttft_ms": 150.0,
        "mean_tpot_ms": (150.0 + 100.0) / 2,
        "mean_itl_ms": (100.0 + 200.0 + 100.0) / 3,
        "mean_e2el_ms": 350.0,
        "p99_e2el_ms": 300.0 + 0.99 * 100.0,
        "avg_latency": 0.35,
    }
    assert {name: fields[name] for name in expected} == pytest.approx(expected)


def test_a_single_token_has_no_time_per_output_token():
    """As in vLLM, such a request is left out of it."""
    fields = benchmark_fields([0.4], [[0.1], [0.2, 0.4]], [1, 1])
    assert fields["mean_tpot_ms"] == pytest.approx(200.0)


def test_ratios_pair_rounds_and_know_their_units():
    """The geometric mean, with t on logs by hand; three starts are the units, two are not enough to be."""
    pairs = [(0, 1.1, 1.0), (0, 1.2, 1.0), (0, 2.6, 2.0)]
    found = paired_ratio(pairs)
    logs = [math.log(value) for value in (1.1, 1.2, 1.3)]
    mean = sum(logs) / 3
    half = 4.30265273 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2 / 3)
    assert (found.units, found.unit) == (3, "round")
    assert found.value == pytest.approx(math.exp(mean))
    assert found.interval.low == pytest.approx(math.exp(mean - half))
    assert found.interval.high == pytest.approx(math.exp(mean + half))
    starts = paired_ratio(
        [(trial, value, 1.0) for trial, value in ((0, 1.1), (0, 1.1), (1, 1.2), (2, 1.3))]
    )
    assert (starts.units, starts.unit, starts.value) == (3, "trial", pytest.approx(math.exp(mean)))
    assert paired_ratio([(0, 1.1, 1.0)]).interval is None
    assert paired_ratio([]) is None
    with pytest.raises(InputError):
        paired_ratio([(0, 0.0, 1.0)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": "huge"}, "a shape is one of"),
        ({"shape": "tiny", "model": "m", "adapters": ("a",)}, "give a shape, or a model"),
        ({"model": "m"}, "a model needs a LoRA adapter"),
        ({"new_tokens": 1}, "at least 2"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"baseline": "tree:8"}, "must be one of the reductions"),
        ({"shape": "tiny", "ranks": (16, 16)}, "told apart by their rank"),
    ],
)
def test_what_means_nothing_is_refused(study, change, message):
    """Before an engine starts."""
    with pytest.raises(InputError, match=message):
        dataclasses.replace(study, **change).items()


def test_every_round_times_every_engine_in_a_new_order(study):
    """No engine is always first."""
    items = study.items()
    orders = {}
    for item in items:
        asked = item.arguments
        orders.setdefault((asked["trial"], asked["round"], asked["batch"]), []).append(
            asked["reduction"]
        )
    assert len(orders) == 8
    assert all(
        Counter(order) == Counter(["none", "vllm-own", "unsplit/64", "local:32/32"])
        for order in orders.values()
    )
    assert len(set(map(tuple, orders.values()))) > 4


def test_planted_times_come_out_as_ratios(study, tmp_path, rows_of, undeclared):
    """unsplit takes twice the time of vLLM's own; the tables, the figure and the picture for print say so."""
    result = run_study(study, tmp_path / "study", executor=run_lanes)
    engines = {
        (each["engine"], each["rank"], each["batch"]): each
        for each in result.report.summary["engines"]
    }
    own = engines["vllm-own", 16, 1]
    assert own["timings"] == 4
    assert own["mean_e2el_ms"] == pytest.approx(140.0)
    assert own["mean_ttft_ms"] == pytest.approx(100.0)
    assert own["against"]["unsplit/64"]["ratio"] == pytest.approx(0.5)
    assert engines["local:32/32", 16, 4]["against"]["unsplit/64"]["ratio"] == pytest.approx(0.75)
    assert engines["vllm-own", 16, 4]["output_throughput"] == pytest.approx(20 / 0.14)
    assert engines["none", 0, 1]["mean_e2el_ms"] == pytest.approx(70.0)
    page = "\n".join(result.report.lines)
    assert "-50.0 % (95 %: -50.0 to -50.0, 4 rounds)" in page
    names = {path.name for path in (tmp_path / "study").iterdir()}
    assert {"figure.html", "rows.parquet", "table.md"} <= names
    assert result.report.picture is not None
    rows = rows_of(tmp_path / "study")
    assert all(set(row) >= VLLM_NAMES for row in rows)
    assert undeclared(tmp_path / "study") == set()


def test_without_another_reduction_the_figure_shows_no_adapter(study, tmp_path):
    """As on a CPU, where there are only vLLM without adapters and its own shrink; else it is left out."""
    shown = run_study(study, tmp_path / "all", executor=run_lanes).report.figure
    assert {trace.name for trace in shown.data} == {"vllm-own, rank 16", "local:32/32, rank 16"}
    few = dataclasses.replace(study, reductions=("none", "vllm-own"), trials=1)
    shown = run_study(few, tmp_path / "few", executor=run_lanes).report.figure
    assert {trace.name for trace in shown.data} == {"none, rank 16"}


def test_a_trial_starts_engines_anew(study, tmp_path, rows_of):
    """Counts of requests begin again, so the stand-in's atomic outputs of both trials are the same."""
    atomic = dataclasses.replace(study, reductions=("atomic:8",), batch_sizes=(1,), baseline=None)
    run_study(atomic, tmp_path / "study", executor=run_lanes)
    rows = rows_of(tmp_path / "study")
    outputs = {(row["trial"], row["round"]): row["output"] for row in rows}
    assert outputs[0, 0] == outputs[1, 0] != outputs[0, 1]


def test_more_rounds_are_added_to_what_is_there(study, tmp_path):
    """Finished timings are kept as they are."""
    fewer = dataclasses.replace(study, trials=1, rounds=1)
    run_study(fewer, tmp_path / "study", executor=run_lanes)
    before = (tmp_path / "study/rows.jsonl").read_text("utf-8").splitlines()
    more = run_study(dataclasses.replace(fewer, rounds=2), tmp_path / "study", executor=run_lanes)
    assert (more.new, more.total) == (8, 16)
    after = (tmp_path / "study/rows.jsonl").read_text("utf-8").splitlines()
    assert after[:8] == before


@pytest.mark.skipif(
    VLLM_PYTHON is None, reason="needs vLLM; FLIPTRACE_VLLM_PYTHON may name its Python"
)
def test_vllm_itself(tmp_path):
    """A shape with dummy weights on a CPU: times are positive and in order, outputs one."""
    study = LatencyStudy(
        shape="tiny",
        ranks=(8,),
        reductions=("vllm-own",),
        batch_sizes=(2,),
        prompt_tokens=8,
        new_tokens=4,
        trials=1,
        rounds=2,
        engines=EngineSettings(python=VLLM_PYTHON, scratch=str(tmp_path / "s"), cache_gib=0.25),
    )
    result = run_study(study, tmp_path / "study", executor=run_lanes)
    (engine,) = result.report.summary["engines"]
    assert 0 < engine["mean_ttft_ms"] < engine["mean_e2el_ms"]
    assert (engine["timings"], engine["outputs"]) == (2, 1)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here")
@pytest.mark.filterwarnings("ignore")
def test_vllms_own_benchmarks_take_a_row(tmp_path, monkeypatch):
    """What vLLM does with its own JSON works with a row, and serve has the names that a row has."""
    import vllm.benchmarks
    from vllm.benchmarks import latency, throughput

    row = benchmark_fields([0.4, 0.3], [[0.1, 0.2, 0.4], [0.2, 0.3]], [10, 20])
    monkeypatch.setenv("SAVE_TO_PYTORCH_BENCHMARK_FORMAT", "1")
    for tool, values in (
        (latency, {"latency": row["latencies"]}),
        (throughput, {"tokens_per_second": [row["tokens_per_second"]]}),
    ):
        place = tmp_path / f"{tool.__name__}.json"
        arguments = argparse.Namespace(model="m", tensor_parallel_size=1, output_json=str(place))
        tool.save_to_pytorch_benchmark_format(arguments, row)
        records = json.loads(place.with_suffix(".pytorch.json").read_text())
        found = {each["metric"]["name"]: each["metric"]["benchmark_values"] for each in records}
        assert {name: found[name] for name in values} == values
    source = (Path(vllm.benchmarks.__file__).parent / "serve.py").read_text("utf-8")
    for name in ("duration", "completed", "total_input_tokens", "total_output_tokens"):
        assert f'"{name}": ' in source
    for name in ("request_throughput", "output_throughput", "total_token_throughput"):
        assert f'"{name}": ' in source
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert f'process_one_metric("{name}"' in source
