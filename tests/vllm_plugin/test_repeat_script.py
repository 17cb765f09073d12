"""The mode `repeat` of examples/measure/vllm_shrink.py, with engines that count instead of generating."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time

import pytest

ENGINE = """
import json, os, sys
print(json.dumps({"ready": 0.0, "vllm": "0", "torch": "0"}), flush=True)
label, asked = os.environ.get("FLIPTRACE_SHRINK", "vllm"), 0
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "chat":
        answer = {"prompts": [[len(text)] for text in command["texts"]]}
    elif command["do"] == "status":
        answer = {"status": [{"reduction": label}]} if label != "unsplit" else {"error": "planted"}
    else:
        (prompt,) = command["prompts"]
        asked += 1
        changes = label == "atomic:8" and prompt == [2] and asked > 3
        answer = {"tokens": [[1, 2, 3, 4 + changes]]}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def script(repository_root, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(repository_root / "examples/measure"))
    module = importlib.import_module("vllm_shrink")
    engine = tmp_path / "engine.py"
    engine.write_text(ENGINE)
    monkeypatch.setattr(sys.modules["vllm_processes"], "ENGINE", engine)
    yield module
    for name in ("vllm_shrink", "vllm_checks", "vllm_processes"):
        sys.modules.pop(name, None)


def options(folder, seconds):
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"question": "x" * n}) + "\n" for n in (1, 2, 3)))
    out = folder / "out"
    out.mkdir()
    return argparse.Namespace(
        prompts=prompts,
        count=20,
        repeats=4,
        tokens=4,
        model="model",
        adapter="adapter",
        attention_backend="",
        reductions=["none", "vllm", "atomic:8", "local"],
        out=out,
        scratch=folder / "scratch",
        deadline=time.monotonic() + seconds,
    )


def test_engines_that_work_at_once_are_counted_apart(script, tmp_path):
    """Each engine gets its row, whole lines of its own, and what changed is found where it did."""
    wanted = options(tmp_path, 60.0)
    assert script.repeat(wanted)
    table = (wanted.out / "repeat.md").read_text()
    assert "| vllm | 0 of 9 | 0 of 3 | none |" in table
    assert "| atomic:8 | 3 of 9 | 1 of 3 | 3 to 3 |" in table
    assert "| local | 0 of 9 | 0 of 3 | none |" in table
    assert "FAILED" not in table
    rows = [json.loads(line) for line in (wanted.out / "repeat.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 3 * 4
    for label in ("vllm", "atomic:8", "local"):
        places = [(row["repeat"], row["prompt"]) for row in rows if row["reduction"] == label]
        assert places == [(turn, prompt) for turn in range(4) for prompt in range(3)]


def test_a_run_that_is_cut_short_says_so(script, tmp_path):
    """It is no success, and the rows name the repeat that was not finished."""
    wanted = options(tmp_path, 60.0)
    ready = script.wait_for_all

    def late(engines, deadline):
        found = ready(engines, deadline)
        wanted.deadline = time.monotonic() - 1
        return found

    script.wait_for_all = late
    assert not script.repeat(wanted)
    assert (wanted.out / "repeat.md").read_text().count("stopped in repeat 0: time is up") == 3


def test_an_engine_that_fails_leaves_the_others_alone(script, tmp_path):
    """Its row says why, theirs are complete, and the run is no success."""
    wanted = options(tmp_path, 60.0)
    wanted.reductions = ["unsplit", "local"]
    assert not script.repeat(wanted)
    table = (wanted.out / "repeat.md").read_text()
    assert "| unsplit | FAILED: unsplit: planted" in table
    assert "| local | 0 of 9 | 0 of 3 | none |" in table
