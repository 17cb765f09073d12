"""trace-study replay on the bundled model; tests/bench/test_replay_script.py tests what counts."""

from __future__ import annotations

import json

import pytest
import torch

from fliptrace.command_line import trace_study
from fliptrace.studies.shrink_replay import Comparison, Tally, merged

ARGUMENTS = (
    "replay --device cpu --select 0 1 --executions 3 --reduction atomic:8 --reduction unsplit --quiet --json"
).split()


def test_the_bundled_model_end_to_end(run_main, rows_of, undeclared, tmp_path):
    """Atomics differ in both phases, the unsplit sum in none; all 32 calls of a forward count; a cut study resumes."""
    folder = tmp_path / "study"
    result = run_main(trace_study.main, *ARGUMENTS, "--out", folder)
    assert result.code == 0
    entries = json.loads(result.out)["reductions"]
    assert [(entry["reduction"], entry["phase"]) for entry in entries] == [
        (reduction, phase)
        for reduction in ("atomic:8/32", "unsplit/64")
        for phase in ("prefill", "first decode step")
    ]
    assert {entry["calls"] for entry in entries} == {2 * 4 * 8}
    for entry in entries[:2]:
        assert entry["comparisons"] == 2 * 2 * 32
        assert entry["comparisons_differing"] > 0.9 * entry["comparisons"]
        assert 0 < entry["elements_surviving"] < 0.01 * entry["elements_differing"] or (
            entry["phase"] == "first decode step"
        )
    for entry in entries[2:]:
        assert entry["elements_differing"] == 0
        assert entry["shares"]["comparisons"]["interval"]["high"] == pytest.approx(1 - 0.05**0.5)
    rows = rows_of(folder)
    digests = {(row["prompt"], row["phase"]): row["operands_digest"] for row in rows}
    assert len(set(digests.values())) == 4
    assert (folder / "figure.svg").read_text("utf-8").count("<path") > 20
    assert undeclared(folder) == set()
    whole = (folder / "rows.jsonl").read_bytes()
    (folder / "rows.jsonl").write_bytes(whole[: len(whole) // 2])
    assert run_main(trace_study.main, *ARGUMENTS, "--out", folder).code == 0
    assert (folder / "rows.jsonl").read_bytes() == whole


def test_survival_is_decided_at_the_models_type():
    """The same difference survives rounding to FP32 and FP16, not to BF16."""
    first = torch.tensor([1.0])
    other = torch.tensor([1.0 + 2**-9])
    found = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        comparison = Comparison(first, torch.tensor([1]), dtype)
        comparison.add(other)
        found[dtype] = int(comparison.surviving)
    assert found == {torch.bfloat16: 0, torch.float16: 1, torch.float32: 1}


def test_means_are_of_all_elements():
    """A tally of 30 elements counts three times one of 10."""
    small = Tally("r", "prefill", elements=10, mean_difference=4.0, largest_difference=5.0)
    large = Tally("r", "prefill", elements=30, mean_difference=0.0, largest_difference=1.0)
    found = merged("r", "prefill", [small, large])
    assert (found.elements, found.mean_difference, found.largest_difference) == (40, 1.0, 5.0)
    assert merged("r", "prefill", []).mean_difference == 0.0
