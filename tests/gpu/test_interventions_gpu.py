"""Interventions on a pair of real atomics: the reproducer's script, and the whole story; skipped without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from fliptrace.pair import bundled_model, trace_pair
from fliptrace_interventions import Workbench, export_reproducer

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def pair(engine, tmp_path_factory):
    """A pair of the hardware's own atomics with a surviving root."""
    for number, prompt in enumerate(bundled_model().prompts[:20]):
        found = trace_pair(
            engine,
            prompt=prompt.text,
            attempts=4,
            max_new_tokens=12,
            until="surviving",
            observer_control=False,
            directory=tmp_path_factory.mktemp("gpu") / f"pair-{number}",
        )
        if found.diff.roots:
            return found
        found.close()
    raise AssertionError("no pair of 20 prompts has a surviving root")


def test_both_executions_are_reconstructed(engine, pair):
    """From an empty cache, by token ids and shrinks alone, bit by bit, whatever the atomics did."""
    workbench = Workbench(pair, engine, target=0)
    for found in workbench.reconstruct():
        assert found.equal, found.first_mismatch


def test_the_reproducer_shows_the_difference_on_the_gpu(engine, pair, tmp_path):
    """Atomics change from run to run, the two fixed orders do not; nothing of ours is on the path."""
    script = export_reproducer(pair, engine, pair.diff.roots[0], tmp_path / "root")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-I", str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "On cuda" in done.stdout
    assert "showed again" in done.stdout
