"""A search that is killed at random moments goes on and ends as an undisturbed one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from fliptrace.judgements import Investigation
from fliptrace_interventions.budget import Budget
from fliptrace_interventions.searches.investigation import investigate
from fliptrace_interventions.workbench import Workbench

SCRIPT = Path(__file__).parent / "search_until_killed.py"
KILLS, SHAMS, RUNS = 3, 0, 60


def without_effort(value):
    """Leave out what depends on the sitting: time, and what an unedited arm could share with another one."""
    if isinstance(value, dict):
        effort = ("seconds", "forwards", "stopped_early_at")
        return {key: without_effort(one) for key, one in value.items() if key not in effort}
    return [without_effort(one) for one in value] if isinstance(value, (list, tuple)) else value


def test_a_killed_search_goes_on(tmp_path, model_folders, planted):
    """SIGKILL anywhere, even in the middle of a line: no finished run is repeated, the result is the same."""
    plant = planted("llama")
    journal, out = tmp_path / "search.jsonl", tmp_path / "found.json"
    traces = [plant.pair.reference.name, plant.pair.candidate.name]
    folders = [str(folder) for folder in model_folders("llama")]
    settings = [str(journal), str(out), str(SHAMS), str(RUNS), str(KILLS)]
    command = [sys.executable, str(SCRIPT), *folders, *traces, *settings]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[0] == "killed"
    found = Investigation.from_json(json.loads(out.read_text("utf-8")))
    bench = Workbench(plant.pair, plant.engine, shams=SHAMS)
    undisturbed = investigate(bench, budget=Budget(runs=RUNS))
    assert without_effort(found.to_json()) == without_effort(undisturbed.to_json())
    lines = journal.read_text("utf-8").splitlines()
    keys = [json.loads(line.split(" ", 1)[1])[0] for line in lines if not line.endswith('["torn')]
    assert len(keys) == len(set(keys))
