"""trace-study batch: what is compared, what is counted, engines in processes, resumption, and vLLM itself."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fliptrace.errors import InputError
from fliptrace.studies.batch import BatchStudy, arranged
from fliptrace.studies.batch_comparisons import comparisons_of
from fliptrace.studies.engine_process import EngineProcessError
from fliptrace.studies.engine_process_lanes import run_lanes
from fliptrace.studies.engine_process_settings import EngineSettings
from fliptrace.studies.engines import ModelSettings
from fliptrace.studies.running import run_study
from fliptrace.studies.tasks import Selection

VLLM_PYTHON = os.environ.get("FLIPTRACE_VLLM_PYTHON") or (
    sys.executable if importlib.util.find_spec("vllm") else None
)


@pytest.fixture
def settings(stand_in, tmp_path):
    """Engines that count instead of generating."""
    return EngineSettings(python=str(stand_in), scratch=str(tmp_path / "scratch"))


@pytest.fixture
def study(settings):
    """Eight prompts in batches of 2 and 4, three of them alone."""
    return BatchStudy(
        selection=Selection(count=8),
        reductions=("vllm-own", "local", "atomic:8"),
        batch_sizes=(2, 4),
        alone=3,
        repetitions=2,
        max_new_tokens=5,
        engines=settings,
    )


def test_atomics_run_with_the_switch_off_alone(study):
    """The plugin refuses atomics under VLLM_BATCH_INVARIANT, so no engine is asked for it."""
    assert [str(arm) for arm in study.arms()] == [
        "vllm-own",
        "local:32/32",
        "atomic:8/32",
        "vllm-own + VLLM_BATCH_INVARIANT",
        "local:32/32 + VLLM_BATCH_INVARIANT",
    ]


def test_arrangements():
    """Order turns each batch around; neighbours deals the same prompts to other batches."""
    assert arranged(5, 2, "fixed") == [0, 1, 2, 3, 4]
    assert arranged(5, 2, "order") == [1, 0, 3, 2, 4]
    dealt = arranged(8, 4, "neighbours")
    assert sorted(dealt) == list(range(8))
    assert set(dealt[:4]) != {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_sizes": (1, 4)}, "begin at 2"),
        ({"batch_sizes": (16,)}, "needs as many prompts; there are 8"),
        ({"repetitions": 1}, "repetitions must be 2"),
        ({"switches": ("maybe",)}, "off or on"),
        ({"variations": ("colour",)}, "order, neighbours, prefix"),
        ({"reductions": ("atomic:8",), "switches": ("on",)}, "nothing can run"),
        ({"model": ModelSettings(engine="transformers")}, "padding several into one batch"),
        ({"max_new_tokens": 0}, "max new tokens must be at least 1"),
        ({"engines": EngineSettings(mode="fast")}, "mode must be one of"),
    ],
)
def test_what_means_nothing_is_refused(study, change, message):
    """Before an engine starts."""
    with pytest.raises(InputError, match=message):
        dataclasses.replace(study, **change).items()


def row(batch, repetition, tokens, arrangement="fixed", prompts=("p", "q")):
    return {
        "arm": "local",
        "batch": batch,
        "arrangement": arrangement,
        "repetition": repetition,
        "prompts": list(prompts),
        "token_ids": tokens,
    }


def test_what_is_compared_with_what():
    """Repetitions and variations with the first of their size; sizes where both have the prompt."""
    rows = [
        row(2, 0, [[1, 2], [3, 4]]),
        row(1, 0, [[1, 9]], prompts=("p",)),
        row(4, 0, [[1, 2], [3, 5]]),
        row(2, 1, [[1, 2], [3, 4]]),
        row(2, 0, [[7, 2], [3, 4]], arrangement="order"),
    ]
    found = {
        (each.kind, each.prompt, each.reference_batch, each.candidate_batch): each.first_divergence
        for each in comparisons_of(rows)
    }
    assert found == {
        ("repetition", "p", 2, 2): None,
        ("repetition", "q", 2, 2): None,
        ("against batch 1", "p", 1, 2): 1,
        ("against batch 1", "p", 1, 4): 1,
        ("between larger batches", "p", 2, 4): None,
        ("between larger batches", "q", 2, 4): 1,
        ("order", "p", 2, 2): 0,
        ("order", "q", 2, 2): None,
    }


def test_counts_are_what_was_planted(study, rows_of, undeclared, tmp_path):
    """Atomic varies always; the others only from batch 2 to 4, and not with the switch on."""
    result = run_study(study, tmp_path / "study", executor=run_lanes)
    arms = result.report.summary["arms"]
    shares = {
        name: {
            kind: (one["outputs"]["hits"], one["outputs"]["trials"]) for kind, one in arm.items()
        }
        for name, arm in arms.items()
    }
    # Against batch 1: three prompts at batch 2 and three at batch 4, of which the latter differ.
    same = {"repetition": (0, 19), "against batch 1": (0, 6), "between larger batches": (0, 8)}
    leaky = same | {"against batch 1": (3, 6), "between larger batches": (8, 8)}
    assert shares == {
        "vllm-own": leaky,
        "local:32/32": leaky,
        "atomic:8/32": {kind: (trials, trials) for kind, (_, trials) in same.items()},
        "vllm-own + VLLM_BATCH_INVARIANT": same,
        "local:32/32 + VLLM_BATCH_INVARIANT": same,
    }
    assert arms["local:32/32"]["against batch 1"]["first_divergences"] == [4, 4, 4]
    assert not result.report.unrepeatable
    assert undeclared(tmp_path / "study") == set()
    pairs = [
        pair
        for row in rows_of(tmp_path / "study")
        for pair in zip(row["prompts"], row["prompt_ids_sha256"], strict=True)
    ]
    assert len(set(pairs)) == len(dict(pairs)) == len({ids for _, ids in pairs}) == 8
    assert {path.name for path in (tmp_path / "study").iterdir()} >= {
        "outputs.parquet",
        "comparisons.parquet",
        "figure.html",
        "table.md",
    }
    sitting = json.loads((tmp_path / "study/sittings.jsonl").read_text("utf-8"))["description"]
    assert sitting["kernels"]["local:32/32"].startswith("kernel of local:32/32 in 3 layers, ")
    assert sitting["kernels"]["vllm-own"] == "kernel of vllm-own"


def test_variations_and_prefixes(study, tmp_path):
    """Warm prefixes say how much was read; other passes read nothing though the engine keeps prefixes."""
    wanted = dataclasses.replace(
        study, variations=("order", "neighbours", "prefix"), reductions=("local",), locate=2
    )
    result = run_study(wanted, tmp_path / "study", executor=run_lanes)
    arm = result.report.summary["arms"]["local:32/32 + VLLM_BATCH_INVARIANT"]
    assert {kind: one["outputs"]["trials"] for kind, one in arm.items()} == {
        "repetition": 19,
        "against batch 1": 6,
        "between larger batches": 8,
        "order": 16,
        "neighbours": 16,
        "cold prefix": 19,
        "warm prefix": 19,
    }
    page = "\n".join(result.report.lines)
    # 19 prompts a pass of all sizes, 2 switches, 3 tokens each, of which 2 come from the cache when it is warm.
    assert "cold prefix: 0 of 114 prompt tokens" in page
    assert "warm prefix: 76 of 114 prompt tokens" in page
    # Only where the switch is on.
    assert [each["arm"] for each in result.report.summary["located"]] == [
        "local:32/32 + VLLM_BATCH_INVARIANT"
    ] * 2
    assert "in 1 of 2 prompts. 1 × RMSNorm (op). A LoRA shrink was the first in 0." in page


def test_a_reduction_that_does_not_repeat_is_reported(study, tmp_path, monkeypatch):
    """One order by construction and another output: exit code 1 comes of this."""
    monkeypatch.setenv("PLANTED", "varies")
    result = run_study(study, tmp_path / "study", executor=run_lanes)
    assert result.report.unrepeatable == ["local:32/32", "local:32/32 + VLLM_BATCH_INVARIANT"]


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        ("does not start", "engine .* did not start: PluginError: planted"),
        ("without vLLM", r"No module named 'vllm'; install .*fliptrace\[vllm\]"),
        ("another kernel", "had to run local:32/32 and says"),
        ("fails", "planted failure"),
    ],
)
def test_an_engine_in_trouble_ends_the_sitting(study, tmp_path, monkeypatch, planted, message):
    """The error names engine and log, no engine is left, and finished rows are kept."""
    monkeypatch.setenv("PLANTED", planted)
    with pytest.raises(EngineProcessError, match=message):
        run_study(study, tmp_path / "study", executor=run_lanes)
    assert not running(tmp_path)
    monkeypatch.setenv("PLANTED", "")
    again = run_study(study, tmp_path / "study", executor=run_lanes)
    assert again.complete


def running(folder):
    """Stand-ins that still run for a test's folder, after a moment."""
    for _ in range(50):
        found = subprocess.run(
            ["pgrep", "-f", str(folder / "engine-python")], capture_output=True, check=False
        )
        if found.returncode:
            return []
        time.sleep(0.1)
    return found.stdout.split()


def test_resumed_after_kills_the_rows_are_those_of_an_unbroken_run(study, tmp_path, stand_in):
    """Killed twice while rows come, the command ends with byte-identical rows; no engine outlives its study."""
    unbroken = tmp_path / "unbroken"
    run_study(dataclasses.replace(study, reductions=("local",)), unbroken, executor=run_lanes)
    arguments = "--prompts 8 --reduction local --batch-size 2 --batch-size 4 --alone 3"
    command = [sys.executable, "-m", "fliptrace.command_line.trace_study", "batch"]
    command += [*arguments.split(), "--repetitions", "2", "--max-new-tokens", "5", "--quiet"]
    command += ["--engine-python", str(stand_in), "--scratch", str(tmp_path / "s")]
    command += ["--out", str(tmp_path / "killed")]
    rows = tmp_path / "killed/rows.jsonl"
    for enough in (2, 5):
        process = subprocess.Popen(command, env=os.environ | {"PLANTED": "slow"})
        deadline = time.monotonic() + 60
        while not rows.exists() or rows.read_bytes().count(b"\n") < enough:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not running(tmp_path)
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    assert rows.read_bytes() == (unbroken / "rows.jsonl").read_bytes()


@pytest.mark.skipif(
    VLLM_PYTHON is None, reason="needs vLLM; FLIPTRACE_VLLM_PYTHON may name its Python"
)
def test_vllm_itself(tmp_path):
    """vLLM's own shrink on a CPU: every pass is compared, nothing is located that its tokens deny."""
    study = BatchStudy(
        selection=Selection(count=4),
        reductions=("vllm-own",),
        switches=("off",),
        batch_sizes=(2,),
        alone=2,
        repetitions=2,
        max_new_tokens=6,
        variations=("order",),
        locate=1,
        locate_tokens=2,
        engines=EngineSettings(python=VLLM_PYTHON, scratch=str(tmp_path / "s"), cache_gib=0.25),
    )
    result = run_study(study, tmp_path / "study", executor=run_lanes)
    (arm,) = result.report.summary["arms"].values()
    assert {kind: one["outputs"]["trials"] for kind, one in arm.items()} == {
        "repetition": 6,
        "against batch 1": 2,
        "order": 4,
    }
    (located,) = result.report.summary["located"]
    assert located["calls"] > 100
