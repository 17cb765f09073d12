"""Every notebook of examples/ runs from top to bottom, for real, and shows what it says it shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
#: Notebook -> what its outputs hold, as HTML or text.
SHOWN = {
    "01_trace_a_pair.ipynb": (
        "fliptrace-pair",
        "fliptrace-row",
        "fliptrace-trace",
        "figures/heatmap.svg",
    ),
    "02_test_causes.ipynb": ("fliptrace-edit", "fliptrace-verdict"),
    "03_replace_the_kernel_in_vllm.ipynb": ("deterministic:8  elements of 64 that differ",),
    "04_a_study.ipynb": (
        "72 of 72 generations have their row",
        "0 new rows",
        "deterministic:8/32: no token and no selected logit changed in 24 comparisons",
        "application/vnd.plotly",
        "rows.parquet",
    ),
}


def outputs_of(notebook):
    """All outputs as one text, the kinds of data included."""
    parts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            parts.append(output.get("text", ""))
            for kind, data in output.get("data", {}).items():
                parts += [kind, data if isinstance(data, str) else ""]
    return "\n".join(parts)


def test_every_notebook_is_run_by_a_test():
    """One that nobody runs would rot."""
    assert {path.name for path in FOLDER.glob("*.ipynb")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_notebooks_are_stored_without_outputs(name):
    """What a machine printed is not kept: it would differ on the next one."""
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert all(cell.cell_type in ("code", "markdown") for cell in notebook.cells)


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jupyter_client and zmq
def test_a_notebook_runs_and_shows_its_values(name, tmp_path, monkeypatch):
    """In a kernel of its own, in an empty folder; an exception in a cell fails the test."""
    from nbclient import NotebookClient

    monkeypatch.delenv("FLIPTRACE_SHRINK", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(FOLDER / name, as_version=4)
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    shown = outputs_of(notebook)
    assert [part for part in SHOWN[name] if part not in shown] == []
    assert "<script" not in "".join(
        output.data.get("text/html", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type in ("execute_result", "display_data")
        and "application/vnd.plotly.v1+json" not in output.data
    )


def test_the_vllm_notebook_says_what_is_missing_first():
    """Its first cell decides and says so; no later cell runs vLLM without it."""
    notebook = nbformat.read(FOLDER / "03_replace_the_kernel_in_vllm.ipynb", as_version=4)
    first, second = [cell.source for cell in notebook.cells if cell.cell_type == "code"][:2]
    assert "vLLM does not run in this notebook" in first
    assert second.startswith("if with_vllm:")
    assert 'os.environ["FLIPTRACE_SHRINK"]' in second


def test_a_notebook_runs_as_a_script(tmp_path):
    """Without Jupyter, as on a machine with a GPU: cells in order, the last value printed, a failing cell a failure."""
    script = [sys.executable, str(FOLDER / "run_as_script.py")]
    environment = {key: value for key, value in os.environ.items() if key != "FLIPTRACE_SHRINK"}

    def run(path):
        return subprocess.run(
            [*script, str(path)], capture_output=True, text=True, timeout=240, check=False,
            cwd=tmp_path, env=environment | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    done = run(FOLDER / "03_replace_the_kernel_in_vllm.ipynb")
    assert done.returncode == 0, done.stderr
    assert "== cell 3 of 3" in done.stdout
    assert SHOWN["03_replace_the_kernel_in_vllm.ipynb"][0] in done.stdout
    made = nbformat.v4.new_notebook()
    made.cells = [
        nbformat.v4.new_code_cell(source) for source in ("x = 20", "x += 1\n2 * x", "1 / 0")
    ]
    path = tmp_path / "made.ipynb"
    nbformat.write(made, path)
    done = run(path)
    assert "== cell 2 of 3\n42\n" in done.stdout
    assert done.returncode == 1
    assert "made.ipynb, cell 3" in done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "usage:" in run(tmp_path / "none.ipynb").stderr


def test_the_marimo_notebook_runs(tmp_path):
    """`marimo export html` runs every cell; the verdict and the boundary's values are in what it writes."""
    page = tmp_path / "page.html"
    notebook = tmp_path / "notebook.py"  # a copy: marimo keeps a session beside what it runs
    notebook.write_bytes((FOLDER / "trace_a_pair_marimo.py").read_bytes())
    command = [sys.executable, "-m", "marimo", "export", "html", "--no-sandbox", "-o", str(page)]
    done = subprocess.run(
        [*command, str(notebook)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    text = page.read_text("utf-8")
    assert "fliptrace-pair" in text
    assert "fliptrace-row" in text
