"""The command line where there is no GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fliptrace_kernels.bench.cells import table_cells
from fliptrace_kernels.bench.command_line import main
from fliptrace_kernels.bench.results import append_results

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def one_line(capsys):
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@without_cuda
@pytest.mark.parametrize("what", [[], ["measure"], ["equality"]])
def test_no_cuda_is_one_line(tmp_path, capsys, what):
    """Exit 2, one line that says what is needed, and no file."""
    assert main([*what, "--folder", str(tmp_path / "results")]) == 2
    assert "needs a CUDA device" in one_line(capsys)
    assert not (tmp_path / "results").exists()


@without_cuda
def test_as_a_module():
    """`python -m fliptrace_kernels.bench` is the same command."""
    run = subprocess.run(
        [sys.executable, "-m", "fliptrace_kernels.bench"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1, run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "whole number from 1; got '0'"),
        (["--ranks", "x"], "whole number from 1; got 'x'"),
        (["--models", "GPT"], "invalid choice: 'GPT'"),
        (["dance"], "invalid choice: 'dance'"),
        (["--seconds", "soon"], "invalid float value: 'soon'"),
    ],
)
def test_wrong_options_are_one_line(capsys, arguments, message):
    """Exit 2 and what was wrong with which option."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in one_line(capsys)


def test_table_without_times(tmp_path, capsys):
    """There is nothing to print yet."""
    assert main(["table", "--folder", str(tmp_path)]) == 2
    assert "holds no times" in one_line(capsys)


def test_table_from_a_file(tmp_path, capsys, make_row):
    """A table is printed and saved on a machine without a GPU, the goals last."""
    cells = table_cells(["Qwen3-0.6B"], [1], [16])
    append_results(
        tmp_path / "bench.jsonl",
        [make_row(kernel, cell, 2.0, 2.0) for cell in cells for kernel in ("floor", "local:32/32")],
    )
    options = ["--folder", str(tmp_path), "--models", "Qwen3-0.6B", "--rows", "1", "--ranks", "16"]
    assert main(["table", *options]) == 0
    printed = capsys.readouterr().out
    assert printed.index("Microseconds per call") < printed.index("Goals on NVIDIA Test")
    saved = (tmp_path / "bench-NVIDIA-Test.md").read_text("utf-8")
    assert saved.index("Goals on NVIDIA Test") < saved.index("Microseconds per call")
    assert "K 1024 × 3, rank 16, M 1" in saved
