"""What trace-check leaves in a folder: every run as a row, in the forms that studies have."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from fliptrace.errors import InputError, StorageError
from fliptrace.studies.check import CheckResult
from fliptrace.studies.items import Item, Row, row_line
from fliptrace.studies.journal import ROWS_NAME, replace_file
from fliptrace.studies.results import (
    FIGURE_NAME,
    PAGE_NAME,
    SUMMARY_NAME,
    markdown_table,
    write_parquet,
    write_schema,
)
from fliptrace.studies.study import Column, Table

_TITLE = "Is this stack affected?"
ROW_COLUMNS = (
    Column("item", "string", "prompt and run"),
    Column("key", "string", "digest of what was asked"),
    Column("reduction", "string", "its identity, or server"),
    Column("prompt", "string", "the prompt's name"),
    Column(
        "prompt_ids_sha256", "string", "of the prompt's token ids; of its text, asked of a server"
    ),
    Column("run", "int", "from 0; run 0 is what the others are compared with"),
    Column("tokens", "int", "generated"),
    Column("tokens_digest", "string", "of their ids"),
    Column("logits_digest", "string", "of all logits of all steps; missing: not seen"),
    Column("flip", "int", "step, from 0, of the first token that is not run 0's"),
    Column("changed_bits", "int", "first step whose logits have other bits than run 0's"),
    Column("ties", "int", "steps whose two best logits are equal"),
)


@contextlib.contextmanager
def prepared_folder(folder: Path | None) -> Iterator[None]:
    """Make the folder, before a minute's work is lost for it; without a check's answer it does not stay.

    Args:
        folder: None for none.

    Raises:
        InputError: it holds something.
        StorageError: it cannot be made.
    """
    if folder is None:
        yield
        return
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        strangers = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise StorageError(f"folder {folder} cannot be used ({error}); name another") from error
    if strangers:
        raise InputError(
            f"the folder of a check must be new or empty; {folder} holds {strangers[0]!r}. Name another"
        )
    try:
        yield
    except BaseException:
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def write_check(result: CheckResult, folder: Path) -> None:
    """Write rows.jsonl with its schema, rows.parquet, summary.json, table.md and figure.html.

    Raises:
        StorageError: something cannot be written.
    """
    from fliptrace.studies.figures import page_of, shares_figure

    rows = list(rows_of(result))
    replace_file(folder / ROWS_NAME, "".join(map(row_line, rows)))
    write_schema(folder, _TITLE, ROW_COLUMNS)
    write_parquet(folder / "rows.parquet", Table("rows", ROW_COLUMNS, rows))
    replace_file(folder / SUMMARY_NAME, json.dumps(result.to_json(), indent=1) + "\n")
    replace_file(folder / PAGE_NAME, "\n".join(page_lines(result)) + "\n")
    figure = shares_figure(
        {
            "prompts with a changed token": {result.reduction: result.prompts_changed},
            "prompts with any changed bit": {result.reduction: result.prompts_any_bit},
        },
        title=_TITLE,
    )
    replace_file(folder / FIGURE_NAME, page_of(figure, _TITLE))


def rows_of(result: CheckResult) -> Iterator[Row]:
    """Yield a row per prompt and run."""
    for prompt in result.prompts:
        first = prompt.runs[0]
        for number, run in enumerate(prompt.runs):
            asked = {"ids": prompt.ids_sha256, "reduction": result.reduction, "run": number}
            yield Item(f"{prompt.name} | run {number}", asked).row(
                {
                    "reduction": result.reduction,
                    "prompt": prompt.name,
                    "prompt_ids_sha256": prompt.ids_sha256,
                    "run": number,
                    "tokens": len(run.token_ids),
                    "tokens_digest": run.tokens_digest,
                    "logits_digest": run.logits_digest,
                    "flip": run.flip_from(first),
                    "changed_bits": run.bits_from(first),
                    "ties": run.ties,
                }
            )


def page_lines(result: CheckResult) -> list[str]:
    """Return the answer as Markdown: the sentences, then a line per prompt."""
    table = [
        (
            prompt.name,
            prompt.ids_sha256[:12],
            str(len(prompt.runs)),
            ", ".join(map(str, prompt.flips)) or "none",
            str(prompt.changed_bits),
            "not seen" if prompt.runs[0].ties is None else str(prompt.runs[0].ties),
        )
        for prompt in result.prompts
    ]
    header = ("prompt", "ids (sha256)", "runs", "flips at step", "runs with other bits", "ties")
    return [
        f"# {_TITLE}",
        "",
        *(f"- {sentence}" for sentence in result.sentences()),
        "",
        *markdown_table(header, table),
    ]
