"""Results on file: nothing acknowledged is lost, and nothing foreign is touched."""

from __future__ import annotations

import dataclasses
import random

import pytest

from fliptrace_kernels.bench.cells import Cell, table_cells
from fliptrace_kernels.bench.results import (
    Copy,
    Results,
    ResultsError,
    append_results,
    read_results,
)

CELLS = table_cells(["SmolLM2-135M"], [1, 16], [16])


def test_rows_come_back_as_they_were(tmp_path, make_row, machine):
    """Times, failures, details and bandwidth survive the file bit by bit."""
    rows = [
        make_row("deterministic:8/32", CELLS[0], 3.1234567890123, 3.2, launch={"grid": [1, 2]}),
        make_row("vllm-0.26.0", CELLS[1], failure="OutOfMemory: ä"),
    ]
    path = tmp_path / "folder" / "bench.jsonl"
    append_results(path, [rows[0], Copy(machine, 4.3e12)])
    append_results(path, [rows[1]])
    assert read_results(path) == Results(tuple(rows), (Copy(machine, 4.3e12),))


def test_a_missing_file_is_an_empty_one(tmp_path):
    """The first sitting has no file."""
    assert read_results(tmp_path / "bench.jsonl") == Results((), ())


def test_a_kill_at_any_byte_loses_the_torn_row_only(tmp_path, make_row):
    """Whatever prefix reached the disk, whole rows are read and the next sitting fits behind."""
    rows = [make_row("floor", cell, 1.0 + index, 1.5) for index, cell in enumerate(CELLS)]
    whole = tmp_path / "whole.jsonl"
    append_results(whole, rows)
    content = whole.read_bytes()
    path = tmp_path / "bench.jsonl"
    chooser = random.Random(1)
    cuts = [0, 1, len(content) - 1, *(chooser.randrange(len(content)) for _ in range(200))]
    for cut in cuts:
        path.write_bytes(content[:cut])
        kept = content[:cut].count(b"\n")
        assert read_results(path).rows == tuple(rows[:kept])
        missing = [row for row in rows if row.key not in read_results(path).measured]
        append_results(path, missing)
        assert path.read_bytes() == content, cut


def test_only_the_same_key_is_measured(make_row, machine):
    """Another driver, source, kernel or shape, or a failure, leaves a cell to be measured."""
    row = make_row("local:32/32", CELLS[0], 2.0, 2.1)
    measured = Results((row, make_row("tree:8/32", CELLS[0], failure="no")), ()).measured
    assert measured == {row.key}
    key = row.key
    for other in (
        dataclasses.replace(key, machine=dataclasses.replace(machine, driver="9")),
        dataclasses.replace(key, source="s2"),
        dataclasses.replace(key, kernel="local:16/32"),
        dataclasses.replace(key, cell=CELLS[1]),
    ):
        assert other not in measured


def test_the_last_row_of_a_kernel_counts(make_row, machine):
    """A new version of a kernel replaces the old one in the table, not in the file."""
    old = make_row("floor", CELLS[0], 3.0, source="old")
    new = make_row("floor", CELLS[0], 2.0, source="new")
    assert Results((old, new), ()).latest(machine) == {("floor", CELLS[0]): new}


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "{}",
        '{"schema": 2, "what": "time"}',
        '{"schema": 1, "what": "time", "gpu": "x"}',
        "[1]",
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path, make_row, line):
    """A damaged line in the middle is an error with its number, not skipped."""
    path = tmp_path / "bench.jsonl"
    append_results(path, [make_row("floor", CELLS[0], 1.0)])
    with path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ResultsError, match="line 2 is no row"):
        read_results(path)


@pytest.mark.parametrize("time", ["0.0", "-1.0", "NaN", "Infinity"])
def test_impossible_times_are_refused(tmp_path, make_row, time):
    """A time is a positive number."""
    path = tmp_path / "bench.jsonl"
    append_results(path, [make_row("floor", CELLS[0], 123.0)])
    path.write_text(path.read_text().replace("123.0", time))
    with pytest.raises(ResultsError, match="positive"):
        read_results(path)


def test_a_foreign_file_is_not_cut(tmp_path, make_row):
    """A file that ends in something else keeps every byte."""
    path = tmp_path / "notes.txt"
    path.write_text("my notes\nwithout a last line end")
    with pytest.raises(ResultsError, match="not of this bench"):
        append_results(path, [make_row("floor", Cell(1, 16, 1, 16), 1.0)])
    assert path.read_text() == "my notes\nwithout a last line end"


def test_an_unwritable_folder_is_named(tmp_path, make_row):
    """The message names the file."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="cannot be written"):
        append_results(tmp_path / "file" / "bench.jsonl", [make_row("floor", CELLS[0], 1.0)])


def test_time_and_noise(make_row):
    """The mean of two medians, and how far they are apart."""
    row = make_row("floor", CELLS[0], 2.0, 2.2)
    assert row.time == pytest.approx(2.1)
    assert row.noise == pytest.approx(0.1)
