"""Tables as text."""

from __future__ import annotations

import dataclasses
import json

import pytest

from fliptrace_kernels.bench import report
from fliptrace_kernels.bench.cells import table_cells
from fliptrace_kernels.bench.columns import columns_grid
from fliptrace_kernels.bench.results import Copy, Results, ResultsError, append_results

CELLS = table_cells(["SmolLM2-135M"], [1, 128], [16])


@pytest.fixture
def rows(make_row):
    found = []
    for cell in CELLS:
        found += [
            make_row("local:32/32", cell, 2.0, 2.1),
            make_row("deterministic:8/256", cell, 3.0, 3.0, same_bits_as_two_launch=True),
            make_row("atomic:vllm", cell, 4.0, 4.0),
            make_row("two-launch", cell, 4.1, 4.1),
            make_row("floor", cell, 1.8, 1.8),
        ]
    return found


def table(rows, machine, copies=()):
    return report.table_of(Results(tuple(rows), tuple(copies)), machine, CELLS)


def test_every_cell_has_its_times(rows, machine):
    """Microseconds of each kernel, the bytes bound, and the best of ours over the baselines."""
    grid = report.cells_grid(table(rows, machine, [Copy(machine, 1e12)]))
    assert grid.headers == (
        "",
        "bytes",
        "floor",
        "atomic:vllm",
        "two-launch",
        "local:32/32",
        "deterministic:8/256",
        "best/atomic:vllm",
        "best/floor",
    )
    assert len(grid.rows) == len(CELLS)
    name, least, *times = grid.rows[0]
    assert name == "K 576 × 3, rank 16, M 1"
    assert float(least) == pytest.approx(CELLS[0].least_bytes / 1e6, abs=0.005)
    assert times == ["1.80", "4.00", "4.10", "2.05", "3.00", "0.51", "1.14"]


def test_vllm_itself_comes_before_what_stands_for_it(rows, machine, make_row):
    """The default is vLLM's own kernel as soon as it was measured, and the note says which."""
    assert table(rows, machine).default == "atomic:vllm"
    assert "vLLM was not measured" in report.goals_grid(table(rows, machine)).notes[0]
    rows.append(make_row("vllm-0.26.0", CELLS[0], 5.0, 5.0))
    assert table(rows, machine).default == "vllm-0.26.0"
    assert "vLLM's default is vllm-0.26.0" in report.goals_grid(table(rows, machine)).notes[0]


def test_goals_name_the_worst_cell(rows, machine, make_row):
    """A slower cell shows in the line of its goal."""
    slow = CELLS[-1]
    rows.append(make_row("local:32/32", slow, 3.9, 3.9))
    rows.append(make_row("deterministic:8/256", slow, 3.8, 3.8, same_bits_as_two_launch=False))
    lines = {row[0]: row for row in report.goals_grid(table(rows, machine)).rows}
    line = lines["M ≥ 128: over vLLM's default"]
    assert line[1:7] == ("0.55", "0.95", "0.95", "0.95", "not met", "3/4/4")
    assert line[7] == f"{slow}: deterministic:8/256"
    assert lines["decode, M ≤ 16, ranks 16 and 32: over the floor"][5] == "met"
    text = "\n".join(report.checks(table(rows, machine)))
    assert "7 of 8 cells" in text


def test_rows_are_summed_up_over_layer_shapes(rows, machine):
    """Median and worst ratio per number of rows."""
    grid = report.rows_grid(table(rows, machine))
    assert [row[0] for row in grid.rows] == ["rank 16, M 1", "rank 16, M 128"]
    assert grid.rows[0][1:] == ("0.51 (0.51)", "1.14 (1.14)", "0.50 (0.50)", "local:32/32")


def test_failures_noise_and_mixed_sources_are_told(rows, machine, make_row):
    """What did not run, how large the noise is, and which columns mix versions."""
    rows.append(make_row("tree:8/32", CELLS[2], failure="LaunchError: too large"))
    rows.append(make_row("floor", CELLS[0], 1.7, 1.7, source="s2"))
    text = "\n".join(report.checks(table(rows, machine)))
    assert f"tree:8/32 did not run in 1 cells, first in {CELLS[2]}: LaunchError" in text
    assert "floor: rows of 2 versions" in text
    assert "5.0 % at most" in text
    assert "fails" in report.cells_grid(table(rows, machine)).rows[2]


def test_an_empty_table_is_still_a_table(machine):
    """Before the first row every goal is open."""
    grid = report.goals_grid(table([], machine))
    assert {row[5] for row in grid.rows} == {"open"}
    assert report.document(table([], machine))


def test_markdown_columns_line_up(rows, machine):
    """Every line of a table is as long as its rule, so plain text reads like a table."""
    for grid in (
        report.cells_grid(table(rows, machine)),
        report.goals_grid(table(rows, machine)),
    ):
        lines = [line for line in grid.to_markdown().splitlines() if line.startswith("|")]
        assert len({len(line) for line in lines}) == 1
        assert len({line.count("|") for line in lines}) == 1


def test_columns_of_several_gpus(tmp_path, rows, machine, make_row):
    """Each folder is a column; what one GPU lacks is a dash, and digests stand side by side."""
    append_results(tmp_path / "first" / "bench.jsonl", [*rows, Copy(machine, 4.3e12)])
    other = dataclasses.replace(machine, gpu="NVIDIA Other")
    append_results(
        tmp_path / "second" / "bench.jsonl", [make_row("floor", CELLS[0], 1.0, on=other)]
    )
    equality = {
        "reductions": [
            {
                "reduction": "local:32/32",
                "calls": 70,
                "calls_differing": 0,
                "rows": 30,
                "rows_differing": 0,
                "digest": "0123456789abcdef",
            }
        ]
    }
    (tmp_path / "first" / "equality.json").write_text(json.dumps(equality))
    replay = {
        "rows": [
            {
                "reduction": "atomic:8/32",
                "phase": "prefill",
                "comparisons": 200,
                "comparisons_differing": 199,
            }
        ]
    }
    (tmp_path / "second" / "replay.json").write_text(json.dumps(replay))
    stress = {"kernels": {"local": {"launches": 1000, "differing": 0}}}
    (tmp_path / "second" / "stress.json").write_text(json.dumps(stress))
    (tmp_path / "empty").mkdir()
    grid = columns_grid(tmp_path, CELLS)
    assert grid.headers == ("", "first", "second")
    lines = {row[0]: row[1:] for row in grid.rows}
    assert lines["machine"][1].startswith("NVIDIA Other")
    assert lines["copy, TB/s"] == ("4.30", "-")
    assert lines["M ≥ 128: over vLLM's default (≤ 0.55)"] == ("0.51 (4/4)", "-")
    assert lines["local:32/32: digest"] == ("0123456789abcdef", "-")
    assert lines["replay, atomic:8/32, prefill: comparisons that differ"] == (
        "-",
        "99.50 % of 200",
    )
    assert lines["stress, local: launches that differ"] == ("-", "0/1000")


def test_no_columns(tmp_path):
    """A folder without results is named."""
    with pytest.raises(ResultsError, match="none"):
        columns_grid(tmp_path, CELLS)
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "stress.json").write_text("{")
    with pytest.raises(ResultsError, match="cannot be read"):
        columns_grid(tmp_path, CELLS)
