"""What a study is to the frame that runs it: settings, items, workers, and a report of the rows.

Whoever implements Study gets resumption, sittings, budgets, Ray, Parquet, Markdown and figures for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fliptrace.studies.items import Item, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture
    from plotly.graph_objects import Figure


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table for machines.

    Attributes:
        name: its key in the rows.
        type: ``string``, ``int``, ``float``, ``bool``; ``strings``, ``ints``, ``floats``; ``int_lists`` and
            ``float_lists``, lists of those; ``numbers``, numbers by name; ``object`` and ``objects``, JSON objects, in
            JSON lines alone. Any value may be missing (None).
        meaning: one line; it travels in the file.
    """

    name: str
    type: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with a schema, to become a Parquet file.

    Attributes:
        name: the file's name without its ending.
        columns: the schema.
        rows: mappings with these columns.
    """

    name: str
    columns: tuple[Column, ...]
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Report:
    """What the rows of a study say.

    Attributes:
        title: one line.
        lines: of the Markdown page: tables and sentences.
        summary: the same figures as JSON values.
        tables: for Parquet.
        figure: a plotly figure, None where there is nothing to draw yet.
        picture: the same for print, a matplotlib figure; None where the study has none.
        unrepeatable: reductions that are repeatable by construction and did not repeat.
        row_columns: what a line of rows.jsonl holds, where that is not the table named ``rows``.
    """

    title: str
    lines: Sequence[str]
    summary: Mapping[str, Any]
    tables: Sequence[Table]
    figure: Figure | None = None
    picture: Picture | None = None
    unrepeatable: Sequence[str] = field(default=())
    row_columns: Sequence[Column] = field(default=())


def unrepeatable_lines(names: Sequence[str]) -> list[str]:
    """Return what a page says of reductions that had to repeat and did not; nothing when all did."""
    if not names:
        return []
    return ["", f"**{', '.join(names)} sums in one order by construction and did not repeat.**"]


class Worker(Protocol):
    """A process that has loaded what the items need."""

    def describe(self) -> Mapping[str, Any]:
        """Return model, adapter, reductions, kernels and environment as read in this process."""
        ...

    def run(self, item: Item) -> Mapping[str, Any]:
        """Run one item; return the row's columns, the same whoever runs it and whenever."""
        ...


class Study(Protocol):
    """A study. It travels to workers, so it is a plain value."""

    @property
    def name(self) -> str:
        """The subcommand's name."""
        ...

    def identity(self) -> Mapping[str, Any]:
        """Return the settings on which every row depends; a folder begun with others is refused."""
        ...

    def items(self) -> Sequence[Item]:
        """Return all items in their order, the same for the same settings."""
        ...

    def open(self) -> Worker:
        """Load what the items need, in this process."""
        ...

    def report(self, rows: Sequence[Row]) -> Report:
        """Say what the rows show; some may not have run yet."""
        ...
