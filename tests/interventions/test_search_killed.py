"""A search that is killed at random moments goes on and ends as an undisturbed one."""

from __future__ import annotations

import dataclasses
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


def without_effort(story):
    """Leave out what depends on the sitting."""
    return dataclasses.replace(story, seconds=0.0, forwards=0).to_json()


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
    assert without_effort(found) == without_effort(undisturbed)
    lines = journal.read_text("utf-8").splitlines()
    keys = [json.loads(line.split(" ", 1)[1])[0] for line in lines if not line.endswith('["torn')]
    assert len(keys) == len(set(keys))
