"""One column for each GPU model: what its folder of results says, in a few lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from fliptrace_kernels.bench.cells import Cell
from fliptrace_kernels.bench.report import Grid, outcomes_of, table_of
from fliptrace_kernels.bench.results import ResultsError, read_results

BENCH_FILE: Final = "bench.jsonl"
EQUALITY_FILE: Final = "equality.json"
STRESS_FILE: Final = "stress.json"
REPLAY_FILE: Final = "replay.json"

_NOTE: Final = (
    "Ratios are of the worst cell, judged as in each GPU's own table; (n/m) says how many of its "
    "cells were measured. Equal digests mean equal bits in the fixed calls."
)


def columns_grid(folder: Path, cells: Iterable[Cell]) -> Grid:
    """Read every folder in `folder` that holds results, one per GPU.

    Args:
        folder: holds one folder per GPU, named after it.
        cells: the table.

    Raises:
        ResultsError: if no folder holds results, or a file cannot be read.
    """
    wanted = tuple(cells)
    columns: dict[str, dict[str, str]] = {}
    for path in sorted(entry for entry in folder.glob("*/") if entry.is_dir()):
        column = (
            _bench(path / BENCH_FILE, wanted)
            | _equality(_read(path / EQUALITY_FILE))
            | _stress(_read(path / STRESS_FILE))
            | _replay(_read(path / REPLAY_FILE))
        )
        if column:
            columns[path.name] = column
    if not columns:
        raise ResultsError(
            f"{folder} must hold a folder of results for each GPU; it holds none. "
            "Run examples/measure/check_gpu.sh first"
        )
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [(name, *(column.get(name, "-") for column in columns.values())) for name in names]
    return Grid(
        "The same check on every GPU",
        ("", *columns),
        tuple(rows),
        (_NOTE,),
    )


def _bench(path: Path, cells: tuple[Cell, ...]) -> dict[str, str]:
    results = read_results(path)
    machines = results.machines()
    if not machines:
        return {}
    table = table_of(results, machines[-1], cells)
    column = {"machine": str(table.machine)}
    if table.copy_bandwidth is not None:
        column["copy, TB/s"] = f"{table.copy_bandwidth / 1e12:.2f}"
    for outcome in outcomes_of(table):
        goal = outcome.goal
        worst = outcome.worst[goal.choice]
        column[f"{goal.name} (≤ {goal.limit:.2f})"] = (
            f"{worst.ratio:.2f} ({outcome.measured}/{outcome.cells})" if worst else "-"
        )
    return column


def _equality(value: Mapping[str, Any]) -> dict[str, str]:
    column = {}
    for found in value.get("reductions", []):
        name = found["reduction"]
        column[f"{name}: repeats that differ"] = f"{found['calls_differing']}/{found['calls']}"
        column[f"{name}: rows that differ alone"] = f"{found['rows_differing']}/{found['rows']}"
        if found["calls_differing"] == 0:
            column[f"{name}: digest"] = found["digest"]
    return column


def _stress(value: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"stress, {name}: launches that differ": f"{found['differing']}/{found['launches']}"
        for name, found in value.get("kernels", {}).items()
    }


def _replay(value: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"replay, {found['reduction']}, {found['phase']}: comparisons that differ": (
            f"{100 * found['comparisons_differing'] / found['comparisons']:.2f} % of "
            f"{found['comparisons']}"
        )
        for found in value.get("rows", [])
    }


def _read(path: Path) -> Mapping[str, Any]:
    try:
        value: object = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ResultsError(f"{path} must hold a JSON object; got {type(value).__name__}")
    return value
