"""Turn results into tables: the goals, one line per number of rows, and every cell."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fliptrace_kernels.bench.cells import Cell, layers_of
from fliptrace_kernels.bench.goals import (
    CHOICES,
    Outcome,
    Times,
    best_of,
    judge,
    table_goals,
)
from fliptrace_kernels.bench.results import Machine, Results, Row

OURS: Final = "ours"
TWO_LAUNCH: Final = "two-launch"
FLOOR: Final = "floor"
STAND_IN: Final = "atomic:vllm"
_LEADING: Final = (FLOOR, "vllm", STAND_IN, "atomic", TWO_LAUNCH)
_GOALS_NOTE: Final = (
    "Ratios are of the worst cell, ours over the baseline, by which of ours is chosen: the fastest "
    "in each cell, one for each K and rank, one for all. Verdict, met cells and the worst cell are "
    "by `cell` for vLLM and the floor, by `shape` for two launches."
)


@dataclass(frozen=True, slots=True)
class Grid:
    """A table as text.

    Attributes:
        title: one line.
        headers: column names; the first column is text, the others are numbers or short words.
        rows: as many words as there are headers.
        notes: lines below the table.
    """

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def to_markdown(self) -> str:
        """Return the table as Markdown whose columns line up in plain text, too."""
        lines = [self.headers, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.headers))]

        def line(words: Sequence[str]) -> str:
            first = words[0].ljust(widths[0])
            others = [word.rjust(width) for word, width in zip(words[1:], widths[1:], strict=True)]
            return "| " + " | ".join([first, *others]) + " |"

        rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        text = [f"### {self.title}", "", line(self.headers), line(rule), *map(line, self.rows)]
        return "\n".join([*text, "", *(f"{note}  " for note in self.notes)]).rstrip() + "\n"


@dataclass(frozen=True, slots=True)
class Table:
    """What is known about one machine.

    Attributes:
        machine: where.
        cells: every cell of the table, measured or not.
        rows: last row of every kernel and cell.
        copy_bandwidth: bytes per second, or None.
    """

    machine: Machine
    cells: tuple[Cell, ...]
    rows: Mapping[tuple[str, Cell], Row]
    copy_bandwidth: float | None

    @property
    def times(self) -> Times:
        """Microseconds by cell and kernel."""
        times: dict[Cell, dict[str, float]] = {}
        for (kernel, cell), row in self.rows.items():
            if row.microseconds:
                times.setdefault(cell, {})[kernel] = row.time
        return times

    @property
    def kernels(self) -> list[str]:
        """Kernels that have a row, baselines first."""
        names = dict.fromkeys(kernel for kernel, _ in self.rows)
        position = {name: index for index, name in enumerate(names)}

        def rank(name: str) -> tuple[int, int]:
            leading = [i for i, prefix in enumerate(_LEADING) if name.startswith(prefix)]
            return (leading[0] if leading else len(_LEADING), position[name])

        return sorted(names, key=rank)

    @property
    def ours(self) -> list[str]:
        """Kernels that the goals are about."""
        found = dict.fromkeys(
            kernel for (kernel, _), row in self.rows.items() if row.details.get("role") == OURS
        )
        return list(found)

    @property
    def default(self) -> str:
        """The kernel that stands for vLLM's default: vLLM's own if it was measured."""
        return next((name for name in self.kernels if name.startswith("vllm")), STAND_IN)


def table_of(results: Results, machine: Machine, cells: Iterable[Cell]) -> Table:
    """Gather what a file knows about one machine."""
    wanted = tuple(cells)
    inside = set(wanted)
    rows = {key: row for key, row in results.latest(machine).items() if key[1] in inside}
    return Table(machine, wanted, rows, results.copy_bandwidth(machine))


def outcomes_of(table: Table) -> list[Outcome]:
    """Judge every goal."""
    times, ours = table.times, table.ours
    return [judge(goal, table.cells, times, ours) for goal in table_goals(table.default)]


def goals_grid(table: Table) -> Grid:
    """The goals, each with its worst ratio under three choices of reduction."""
    rows = []
    for outcome in outcomes_of(table):
        goal = outcome.goal
        worst = outcome.worst[goal.choice]
        ratios = [
            f"{found.ratio:.2f}" if (found := outcome.worst[choice]) else "-" for choice in CHOICES
        ]
        verdict = {True: "met", False: "not met", None: "open"}[outcome.passed]
        where = f"{worst.cell}: {worst.kernel}" if worst else "not measured"
        rows.append(
            (
                goal.name,
                f"{goal.limit:.2f}",
                *ratios,
                verdict,
                f"{outcome.met}/{outcome.measured}/{outcome.cells}",
                where,
            )
        )
    default = (
        f"vLLM's default is {table.default}"
        if table.default != STAND_IN
        else f"vLLM was not measured; {STAND_IN}, our kernel with vLLM's choices, stands for it"
    )
    return Grid(
        f"Goals on {table.machine}",
        ("goal", "limit", *CHOICES, "verdict", "met/measured/cells", "worst cell"),
        tuple(rows),
        (f"{default}. {_GOALS_NOTE}",),
    )


def rows_grid(table: Table) -> Grid:
    """One line per rank and number of rows: median over the layer shapes, worst in brackets."""
    times, ours = table.times, table.ours
    lines = []
    groups = dict.fromkeys((cell.rank, cell.rows) for cell in table.cells)
    for rank, count in groups:
        cells = [cell for cell in table.cells if (cell.rank, cell.rows) == (rank, count)]
        best = {cell: best_of(times.get(cell, {}), ours) for cell in cells}
        ratios = []
        for baseline in (table.default, FLOOR, TWO_LAUNCH):
            found = [
                times[cell][name] / times[cell][baseline]
                for cell, name in best.items()
                if name is not None and baseline in times[cell]
            ]
            ratios.append(f"{statistics.median(found):.2f} ({max(found):.2f})" if found else "-")
        names = [name for name in best.values() if name is not None]
        fastest = max(dict.fromkeys(names), key=names.count, default="-")
        lines.append((f"rank {rank}, M {count}", *ratios, fastest))
    return Grid(
        "Fastest of ours over the baselines: median over layer shapes (worst)",
        ("", table.default, FLOOR, TWO_LAUNCH, "most often fastest"),
        tuple(lines),
    )


def cells_grid(table: Table) -> Grid:
    """Every cell: microseconds per call of every kernel."""
    times = table.times
    kernels = table.kernels
    lines = []
    for cell in table.cells:
        found = times.get(cell, {})
        least = "-"
        if table.copy_bandwidth is not None:
            least = f"{1e6 * cell.least_bytes / table.copy_bandwidth:.2f}"
        words = [
            f"{found[name]:.2f}"
            if name in found
            else "fails"
            if (name, cell) in table.rows
            else "-"
            for name in kernels
        ]
        best = best_of(found, table.ours)
        lines.append(
            (
                f"K {cell.k} × {cell.slices}, rank {cell.rank}, M {cell.rows}",
                least,
                *words,
                *(
                    f"{found[best] / found[baseline]:.2f}" if best and baseline in found else "-"
                    for baseline in (table.default, FLOOR)
                ),
            )
        )
    return Grid(
        "Microseconds per call",
        ("", "bytes", *kernels, f"best/{table.default}", "best/floor"),
        tuple(lines),
        tuple(_legend(table)),
    )


def checks(table: Table) -> list[str]:
    """Say what else the rows tell: noise, bits, failures, mixed versions."""
    lines = []
    noises = sorted(row.noise for row in table.rows.values() if row.microseconds)
    if noises:
        lines.append(
            f"The same kernel timed twice in a cell: {100 * statistics.median(noises):.1f} % apart "
            f"in the median, {100 * noises[int(0.95 * (len(noises) - 1))]:.1f} % at the 95th "
            f"percentile, {100 * noises[-1]:.1f} % at most ({len(noises)} pairs)."
        )
    same = [
        bool(row.details["same_bits_as_two_launch"])
        for row in table.rows.values()
        if "same_bits_as_two_launch" in row.details
    ]
    if same:
        lines.append(
            f"Bit-equal to the two-launch kernel of the same order: {sum(same)} of {len(same)} cells."
        )
    if table.copy_bandwidth is not None:
        lines.append(
            f"A large copy moves {table.copy_bandwidth / 1e12:.2f} TB/s, both ways counted."
        )
    for kernel in table.kernels:
        rows = [row for (name, _), row in table.rows.items() if name == kernel]
        sources = {row.key.source for row in rows if row.microseconds}
        if len(sources) > 1:
            lines.append(
                f"{kernel}: rows of {len(sources)} versions of its source; run the bench again."
            )
        failures = [row for row in rows if not row.microseconds]
        if failures:
            lines.append(
                f"{kernel} did not run in {len(failures)} cells, first in {failures[0].key.cell}: "
                f"{failures[0].failure}"
            )
    return lines


def document(table: Table) -> str:
    """Return everything as one Markdown text."""
    parts = [
        f"# LoRA shrinks on {table.machine}\n",
        goals_grid(table).to_markdown(),
        "\n".join(f"- {line}" for line in checks(table)) + "\n",
        rows_grid(table).to_markdown(),
        cells_grid(table).to_markdown(),
    ]
    return "\n".join(parts)


def _legend(table: Table) -> Iterable[str]:
    yield (
        "bytes: inputs and weights read once and outputs written once, at the bandwidth of a large "
        "copy. floor: the fastest launch that stores partials and adds nothing up. two-launch: "
        "batch-invariant as vLLM 0.32 describes it. best: the fastest repeatable one of ours."
    )
    shapes = dict.fromkeys((cell.k, cell.slices) for cell in table.cells)
    yield "; ".join(f"K {k} × {slices}: {layers_of(k, slices)}" for k, slices in shapes)
