"""The command `python -m fliptrace_kernels.bench`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

from fliptrace_kernels.bench import report
from fliptrace_kernels.bench.cells import MODELS, RANKS, ROWS, Cell, table_cells
from fliptrace_kernels.bench.columns import BENCH_FILE, EQUALITY_FILE, columns_grid
from fliptrace_kernels.bench.device import require_cuda, this_machine
from fliptrace_kernels.bench.fixed_calls import run_fixed_calls
from fliptrace_kernels.bench.results import Machine, ResultsError, read_results
from fliptrace_kernels.errors import FliptraceKernelsError

_DESCRIPTION: Final = """Time LoRA shrinks on this machine's GPU.

  measure   fill the table and print it (this is what happens if nothing is said)
  table     print the table from the file; needs no GPU
  equality  run fixed calls again and again: bits, and a digest to compare GPUs by
  columns   one column per GPU from the folders in --folder; needs no GPU

A table that was interrupted, or cut short by --seconds, goes on where it stopped: run the same
command again. What was measured under another driver, torch, Triton or source is measured anew."""

_LOG_SECONDS: Final = 10.0
_REPEATS: Final = 200
_SINGLE_ROWS: Final = 40
_EQUALITY_NAMES: Final = (
    "unsplit",
    "deterministic:8",
    "deterministic:8/256",
    "tree:8",
    "local:32",
    "atomic:8",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0, or 2 after one line on stderr.
    """
    options = _parser().parse_args(arguments)
    actions: dict[str, Callable[[argparse.Namespace], None]] = {
        "measure": _measure,
        "table": _table,
        "equality": _equality,
        "columns": _columns,
    }
    try:
        actions[options.what](options)
    except FliptraceKernelsError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("stopped; every finished cell is kept\n")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m fliptrace_kernels.bench",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what",
        nargs="?",
        default="measure",
        choices=["measure", "table", "equality", "columns"],
    )
    parser.add_argument("--folder", type=Path, default=Path("shrink-bench"), help="of the results")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for this sitting")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=_positive, default=list(ROWS), help="M")
    parser.add_argument("--ranks", nargs="+", type=_positive, default=list(RANKS))
    parser.add_argument(
        "--kernels",
        nargs="+",
        help="floor, two-launch, vllm and reductions; without it all that can run here",
    )
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line; the usage is in --help."""
        self.exit(2, f"error: {message}; see --help\n")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text[:9]) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1; got {text!r}")
    return int(text[:9])


def _cells(options: argparse.Namespace) -> list[Cell]:
    return table_cells(options.models, options.rows, options.ranks)


def _measure(options: argparse.Namespace) -> None:
    require_cuda()
    # Needs Triton, which a machine without a GPU may not have.
    from fliptrace_kernels.bench.sitting import SECONDS_PER_CELL, SECONDS_TO_START, run_sitting
    from fliptrace_kernels.bench.variants import default_names

    cells = _cells(options)
    names = options.kernels or default_names()
    path = options.folder / BENCH_FILE
    sys.stderr.write(
        f"{len(cells)} cells, {len(names)} kernels: {', '.join(names)}; about "
        f"{SECONDS_TO_START + SECONDS_PER_CELL * len(cells):.0f} s for a whole table\n"
    )
    with _progress() as progress:
        sitting = run_sitting(path, cells, names, seconds=options.seconds, progress=progress)
    _print_table(options, sitting.machine)
    for problem in sitting.problems:
        sys.stderr.write(f"while compiling ahead: {problem}\n")
    sys.stdout.write(
        f"{sitting.finished} of {sitting.cells} cells are complete after {sitting.seconds:.0f} s"
        f"{'' if sitting.finished == sitting.cells else '; run the same command again to go on'}. "
        f"Rows: {path}\n"
    )


def _table(options: argparse.Namespace) -> None:
    results = read_results(options.folder / BENCH_FILE)
    machines = results.machines()
    if not machines:
        raise ResultsError(
            f"{options.folder / BENCH_FILE} holds no times; measure first, or name another --folder"
        )
    for machine in machines:
        _print_table(options, machine)


def _print_table(options: argparse.Namespace, machine: Machine) -> None:
    """Print the long table first, so that the end of a log holds the goals."""
    table = report.table_of(read_results(options.folder / BENCH_FILE), machine, _cells(options))
    _print_grid(report.cells_grid(table))
    _print_grid(report.rows_grid(table))
    _print_grid(report.goals_grid(table))
    sys.stdout.write("".join(f"- {line}\n" for line in report.checks(table)))
    name = "-".join(machine.gpu.split())
    _write(options.folder / f"bench-{name}.md", report.document(table))


def _equality(options: argparse.Namespace) -> None:
    require_cuda()
    found = [
        run_fixed_calls(name, repeats=_REPEATS, single_rows=_SINGLE_ROWS, device="cuda")
        for name in options.kernels or _EQUALITY_NAMES
    ]
    value = {
        "machine": str(this_machine()),
        "reductions": [equality.to_json() for equality in found],
    }
    _write(options.folder / EQUALITY_FILE, json.dumps(value, indent=1) + "\n")
    for equality in found:
        sys.stdout.write(
            f"{equality.reduction}: {equality.calls_differing} of {equality.calls} repeats differ, "
            f"{equality.rows_differing} of {equality.rows} rows differ alone, "
            f"digest {equality.digest}\n"
        )


def _columns(options: argparse.Namespace) -> None:
    grid = columns_grid(options.folder, _cells(options))
    _print_grid(grid)
    _write(options.folder / "gpus.md", grid.to_markdown())


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ResultsError(f"{path} cannot be written: {error}") from error


def _print_grid(grid: report.Grid) -> None:
    """Draw a table on a terminal; elsewhere write Markdown, which stays whole in a log."""
    if not sys.stdout.isatty():
        sys.stdout.write(grid.to_markdown() + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=grid.title)
    for number, header in enumerate(grid.headers):
        table.add_column(header, justify="right" if number else "left")
    for row in grid.rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    for note in grid.notes:
        console.print(note, style="dim", markup=False)


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Draw a bar on a terminal; elsewhere write a line now and then."""
    if not sys.stderr.isatty():
        last = [0.0]

        def write(done: int, cells: int, doing: str) -> None:
            now = time.monotonic()
            if now - last[0] >= _LOG_SECONDS or done == cells:
                last[0] = now
                sys.stderr.write(f"{done} of {cells} cells: {doing}\n")
                sys.stderr.flush()

        yield write
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting")

        def draw(done: int, cells: int, doing: str) -> None:
            bar.update(task, completed=done, total=cells, description=doing)

        yield draw
