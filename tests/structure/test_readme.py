"""The README is executed: what it shows a newcomer must run as it stands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(root: Path, language: str) -> list[str]:
    """Return the README's fenced blocks in a language."""
    found = BLOCK.findall((root / "README.md").read_text("utf-8"))
    return [body for name, body in found if name == language]


def test_the_python_example_runs(repository_root, tmp_path):
    """The Python block runs in an empty folder and leaves the files that it says."""
    (code,) = blocks(repository_root, "python")
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stderr
    assert "Pair(" in finished.stdout
    names = {path.name for path in (tmp_path / "pair").iterdir()}
    assert names == {"report.html", "report.json", "reference.trace", "candidate.trace"}


def test_the_command_for_a_model_of_ones_own_runs(repository_root, tmp_path):
    """trace-pair runs with the bundled model in the place of MODEL and ADAPTER; trace-diff reads its pair."""
    command = next(
        block for block in blocks(repository_root, "bash") if block.startswith("trace-pair")
    )
    bundled = repository_root / "tracer" / "fliptrace" / "bundled"
    folders = {"MODEL": str(bundled / "model"), "ADAPTER": str(bundled / "adapter")}
    words = [folders.get(word, word) for word in shlex.split(command)]
    program = [sys.executable, "-m", "fliptrace.command_line.trace_pair", *words[1:]]
    finished = subprocess.run(
        [*program, "--attempts", "1", "--max-new-tokens", "24", "--device", "cpu"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        text=True,
        timeout=240,
    )
    assert finished.returncode in (0, 1), finished.stderr
    text = (repository_root / "README.md").read_text("utf-8")
    (diff,) = re.findall(r"`(trace-diff [^`]+)`", text)
    compared = subprocess.run(
        [sys.executable, "-m", "fliptrace.command_line.trace_diff", *shlex.split(diff)[1:]],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert compared.returncode == finished.returncode, compared.stderr


@pytest.mark.parametrize("script", ["examples/demo.sh", "examples/test.sh"])
def test_the_two_commands_exist(repository_root, script):
    """Both set-up commands are there and are valid shell; .ci/run runs them."""
    assert f"bash {script}\n" in blocks(repository_root, "bash")
    subprocess.run(["bash", "-n", script], cwd=repository_root, check=True)
    assert script in (repository_root / ".ci" / "run").read_text("utf-8")


def test_options_named_in_the_readme_exist(repository_root):
    """Every option that the README names is one of the commands that it names."""
    named = set(re.findall(r"--[a-z][a-z-]+", (repository_root / "README.md").read_text("utf-8")))
    known = set()
    for module in (
        "fliptrace.command_line.trace_pair",
        "fliptrace.command_line.trace_check",
        "fliptrace_interventions.command_line.trace_intervene",
    ):
        finished = subprocess.run(
            [sys.executable, "-m", module, "--help"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": "200"},
        )
        known |= set(re.findall(r"--[a-z][a-z-]+", finished.stdout))
    assert named <= known


def test_the_demonstration_of_an_intervention_runs(repository_root, tmp_path):
    """It proves what the README shows, or says why it cannot be judged on this processor."""
    command = next(
        block for block in blocks(repository_root, "bash") if block.startswith("trace-intervene")
    )
    module = "fliptrace_interventions.command_line.trace_intervene"
    finished = subprocess.run(
        [sys.executable, "-m", module, *shlex.split(command)[1:]],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        text=True,
        timeout=240,
    )
    assert finished.returncode in (0, 3), finished.stderr
    if finished.returncode == 3:
        assert "cannot be reconstructed here" in " ".join(finished.stdout.split())
        return
    shown = next(
        block for block in blocks(repository_root, "text") if block.startswith("One FP32 value")
    )
    for part in shown.split("...\n"):
        assert part in finished.stdout
    assert (tmp_path / "demo-intervention" / "report.html").is_file()


def test_links_lead_somewhere(repository_root):
    """Every relative link of the README points at a file."""
    links = re.findall(r"\]\(([^)#]+)\)", (repository_root / "README.md").read_text("utf-8"))
    missing = [
        link
        for link in links
        if not link.startswith("http") and not (repository_root / link).exists()
    ]
    assert links
    assert not missing
