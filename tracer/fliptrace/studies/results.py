"""What a study leaves for readers: a Markdown page, a figure, a summary for machines, and Parquet with a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fliptrace.studies.journal import replace_file, replacing
from fliptrace.studies.study import Column, Table

if TYPE_CHECKING:
    from fliptrace.studies.running import StudyResult

PAGE_NAME, FIGURE_NAME, SUMMARY_NAME = "table.md", "figure.html", "summary.json"
PICTURE_NAME = "figure.svg"
SCHEMA_NAME = "rows.schema.json"
_NUMBERS = {"type": "object", "additionalProperties": {"type": "number"}}
#: Types of columns in JSON Schema.
_JSON_TYPES: dict[str, dict[str, Any]] = {
    "string": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "strings": {"type": "array", "items": {"type": "string"}},
    "ints": {"type": "array", "items": {"type": "integer"}},
    "floats": {"type": "array", "items": {"type": "number"}},
    "int_lists": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    "float_lists": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
    "numbers": _NUMBERS,
    "object": {"type": "object"},
    "objects": {"type": "array", "items": {"type": "object"}},
}


def write_results(result: StudyResult, sittings: Sequence[Mapping[str, Any]]) -> None:
    """Write table.md, summary.json, figure.html, figure.svg where there is one, the schema of rows, and Parquet tables.

    Raises:
        StorageError: something cannot be written.
    """
    folder = result.folder
    replace_file(folder / PAGE_NAME, "\n".join(page_lines(result, sittings)) + "\n")
    replace_file(folder / SUMMARY_NAME, json.dumps(result.to_json(), indent=1) + "\n")
    columns = list(result.report.row_columns)
    for table in result.report.tables:
        write_parquet(folder / f"{table.name}.parquet", table)
        if table.name == "rows" and not columns:
            columns = list(table.columns)
    if columns:
        write_schema(folder, result.report.title, columns)
    if result.report.figure is not None:
        from fliptrace.studies.figures import page_of

        replace_file(folder / FIGURE_NAME, page_of(result.report.figure, result.report.title))
    if result.report.picture is not None:
        from fliptrace.views.static import write_picture

        write_picture(result.report.picture, folder / PICTURE_NAME)


def page_lines(result: StudyResult, sittings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the Markdown page: the study's own lines, how far it is, and where it ran."""
    unfinished = (
        ""
        if result.complete
        else " **Not finished:** run the same command again to go on; figures below are of these rows."
    )
    return [
        f"# {result.report.title}",
        "",
        f"{result.done:,} of {result.total:,} items have run.{unfinished}",
        "",
        *result.report.lines,
        "",
        "## Where it ran",
        "",
        *_where(sittings),
    ]


def _where(sittings: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per distinct environment: what it was and in which sittings."""
    places: dict[str, list[str]] = {}
    for entry in sittings:
        description = entry["description"]
        environment = description.get("environment", {})
        gpu = environment.get("gpu", {}).get("name")
        versions = environment.get("versions", {})
        kernels = description.get("kernels", {})
        adapter = description.get("adapter")
        with_adapter = (
            f" + {adapter.get('name')} (adapter {str(adapter.get('sha256'))[:12]})"
            if adapter
            else ""
        )
        words = [
            f"{description.get('model', {}).get('name')}{with_adapter}",
            f"engine {description.get('engine', {}).get('name')}",
            gpu or environment.get("processor") or "unknown processor",
            f"torch {versions.get('torch')}",
            "kernels read in the worker: "
            + ("; ".join(f"{name}: {said}" for name, said in kernels.items()) or "none"),
        ]
        places.setdefault(", ".join(words), []).append(f"{entry['sitting']} ({entry['worker']})")
    return [f"- {place}. Sittings: {', '.join(ran)}." for place, ran in places.items()]


def row_schema(title: str, columns: Sequence[Column]) -> dict[str, Any]:
    """Return the JSON Schema of a line of rows.jsonl; other keys are the study's own and may hold anything."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A line of rows.jsonl: {title}",
        "type": "object",
        "required": ["item", "key"],
        "properties": {
            column.name: {
                "description": column.meaning,
                "anyOf": [_JSON_TYPES[column.type], {"type": "null"}],
            }
            for column in columns
        },
    }


def write_schema(folder: Path, title: str, columns: Sequence[Column]) -> None:
    """Write the schema of rows.jsonl beside it; see row_schema.

    Raises:
        StorageError: it cannot be written.
    """
    replace_file(folder / SCHEMA_NAME, json.dumps(row_schema(title, columns), indent=1) + "\n")


def write_parquet(path: Path, table: Table) -> None:
    """Write a table; each column's meaning is in the schema's metadata.

    Raises:
        StorageError: it cannot be written.
    """
    import pyarrow as pa
    from pyarrow import parquet

    types = {
        "string": pa.string(),
        "int": pa.int64(),
        "float": pa.float64(),
        "bool": pa.bool_(),
        "ints": pa.list_(pa.int64()),
        "floats": pa.list_(pa.float64()),
        "strings": pa.list_(pa.string()),
        "int_lists": pa.list_(pa.list_(pa.int64())),
        "float_lists": pa.list_(pa.list_(pa.float64())),
        "numbers": pa.map_(pa.string(), pa.float64()),
    }
    schema = pa.schema(
        [
            pa.field(column.name, types[column.type], metadata={"meaning": column.meaning})
            for column in table.columns
        ]
    )
    rows = [{column.name: row.get(column.name) for column in table.columns} for row in table.rows]
    with replacing(path) as file:
        parquet.write_table(pa.Table.from_pylist(rows, schema=schema), file)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; what would break a cell is escaped."""
    from fliptrace.views.escaping import visible

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(visible(cell).replace("|", "\\|") for cell in cells) + " |"

    return [line(header), "|" + "---|" * len(header), *map(line, rows)]
