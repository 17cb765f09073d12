"""What the tests of studies share: a study without a model, the bundled model's settings, a way to run the command."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Result:
    """What a command gave."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def counting(load_neighbour):
    """A module with a study that needs no model."""
    return load_neighbour(Path(__file__).parent / "counting_study.py")


@pytest.fixture
def run_main(monkeypatch, capsys):
    """Run a command's main as a user types it, in this process."""

    def run(main, *arguments):
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return Result(stopped.value.code or 0, captured.out, captured.err)

    return run


@pytest.fixture
def rows_of():
    """A function that reads the rows of a study's folder."""

    def read(folder):
        lines = (Path(folder) / "rows.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]

    return read


@pytest.fixture
def stand_in(tmp_path):
    """A program that takes the place of the Python that has vLLM and answers by arithmetic."""
    inside = Path(__file__).with_name("engine_stand_in.py")
    program = tmp_path / "engine-python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{inside}" "$0" "$@"\n', "utf-8")
    program.chmod(0o755)
    return program
