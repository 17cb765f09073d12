"""trace-study train: a LoRA adapter as the paper trains its own."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from fliptrace.command_line.options import (
    OUTPUT,
    PROMPT,
    DtypeName,
)
from fliptrace.command_line.output import show_document
from fliptrace.command_line.parameters import with_groups
from fliptrace.command_line.running import IDENTICAL, progress_bar
from fliptrace.command_line.study_options import (
    STUDY,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    NoTemplateOption,
    SplitOption,
    ThreadsOption,
)
from fliptrace.command_line.study_parameters import CommonParameters, LabelledParameters


@with_groups
def train(
    *,
    out: Annotated[
        Path,
        typer.Option(
            help="The adapter's folder; it must be new or empty.",
            metavar="FOLDER",
            rich_help_panel=OUTPUT,
        ),
    ],
    task: Annotated[
        str,
        typer.Option(
            help="What is learnt: gsm8k:PATH (its training file), mbpp:PATH, csv:PATH (texts with yes or no), or "
            "dataset:NAME[:CONFIGURATION] (the same, of the datasets library).",
            metavar="TASK",
            rich_help_panel=PROMPT,
        ),
    ],
    model: ModelOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = DtypeName.AUTO,
    threads: ThreadsOption = 1,
    no_chat_template: NoTemplateOption = False,
    rank: Annotated[
        int,
        typer.Option(
            help="Of the adapter; alpha is twice that.", metavar="N", rich_help_panel=STUDY
        ),
    ] = 16,
    epochs: Annotated[int, typer.Option(help="At most.", metavar="N", rich_help_panel=STUDY)] = 3,
    max_steps: Annotated[
        int | None,
        typer.Option(help="Of the optimiser, at most.", metavar="N", rich_help_panel=STUDY),
    ] = None,
    batch: Annotated[
        int, typer.Option(help="Rows per step.", metavar="N", rich_help_panel=STUDY)
    ] = 16,
    learning_rate: Annotated[
        float, typer.Option(help="The highest.", metavar="X", rich_help_panel=STUDY)
    ] = 2e-4,
    max_length: Annotated[
        int,
        typer.Option(help="Rows of more tokens are left out.", metavar="N", rich_help_panel=STUDY),
    ] = 1024,
    seed: Annotated[
        int,
        typer.Option(
            help="Of splits, first weights and order.", metavar="N", rich_help_panel=STUDY
        ),
    ] = 0,
    split: SplitOption = None,
    labelled: LabelledParameters,
    training_rows: Annotated[
        int | None,
        typer.Option(
            help="Of labelled texts, at random; all that are left if left out.",
            metavar="N",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    validation_rows: Annotated[
        int,
        typer.Option(
            help="Of labelled texts, for choosing the best epoch.",
            metavar="N",
            rich_help_panel=PROMPT,
        ),
    ] = 200,
    test_rows: Annotated[
        int,
        typer.Option(
            help="Of labelled texts, kept out of training and written to test.csv, for decide.",
            metavar="N",
            rich_help_panel=PROMPT,
        ),
    ] = 0,
    config: ConfigOption = None,  # noqa: ARG001 (read before parsing)
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print training.json.", rich_help_panel=OUTPUT),
    ] = False,
    common: CommonParameters,
) -> int:
    """Train a LoRA adapter as the paper does: alpha twice the rank, seeds and splits fixed.

    Writes a PEFT adapter in safetensors, in the model's type, README.md (how it was made), training.json and, for
    labelled texts with --test-rows, test.csv.

    Exit codes: 0 done; 2 trouble (one line on stderr).
    """
    from fliptrace.studies.training import TrainSettings, train_adapter
    from fliptrace.studies.training.run import RECORD_NAME

    settings = TrainSettings(
        task=task,
        model=model,
        rank=rank,
        epochs=epochs,
        max_steps=max_steps,
        batch=batch,
        learning_rate=learning_rate,
        max_length=max_length,
        seed=seed,
        device=device,
        dtype=str(dtype),
        chat_template=not no_chat_template,
        threads=threads,
        split=split or "train",
        training_rows=training_rows,
        validation_rows=validation_rows,
        test_rows=test_rows,
        **dataclasses.asdict(labelled),
    )
    with progress_bar(common.quiet or as_json) as show:
        made = train_adapter(settings, out, command=["trace-study", *sys.argv[1:]], progress=show)
    if as_json:
        import json

        show_document(json.loads((out / RECORD_NAME).read_text("utf-8")))
        return IDENTICAL
    first, last = made.losses[0][1], made.losses[made.best_epoch][1]
    typer.echo(
        f"{made.steps} steps on {made.rows['training']:,} rows in {made.seconds:.0f} s; validation loss {first:.4f} "
        f"before, {last:.4f} after epoch {made.best_epoch}, whose weights were kept"
    )
    typer.echo(f"The adapter and its card are in {out}")
    return IDENTICAL
