"""trace-study: the paper's tables and figures, each by one command."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fliptrace.command_line.arguments import with_rows_joined
from fliptrace.command_line.configuration import (
    CHECK_TABLE,
    with_configuration,
    with_ray_address,
)
from fliptrace.command_line.options import MODEL, PROMPT, VersionOption
from fliptrace.command_line.parameters import with_groups
from fliptrace.command_line.running import TROUBLE, fail, one_line, run
from fliptrace.command_line.study_batch import batch
from fliptrace.command_line.study_latency import latency
from fliptrace.command_line.study_options import (
    STUDY,
    ReductionsOption,
    RepetitionsOption,
    SeedOption,
    SplitOption,
    TaskOption,
)
from fliptrace.command_line.study_parameters import (
    LabelledParameters,
    ModelParameters,
    RowParameters,
    RunParameters,
    ServedParameters,
    check_served,
    run_and_show,
)
from fliptrace.command_line.study_train import train
from fliptrace.errors import InputError

if TYPE_CHECKING:
    from fliptrace.studies import DecideStudy, RepeatStudy
    from fliptrace.studies.running import Executor


@with_groups
def repeat(
    *,
    model: ModelParameters,
    engines: ServedParameters,
    task: TaskOption = "bundled",
    rows: RowParameters,
    scorer: Annotated[
        str | None,
        typer.Option(
            help="A Python function (text, row) that returns True, False or None, or an answer and one of these.",
            metavar="MODULE:FUNCTION",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    run_programs: Annotated[
        bool,
        typer.Option(
            "--run-programs",
            help="With mbpp, run generated programs against their tests, in a sandbox; else they are only compared.",
            rich_help_panel=PROMPT,
        ),
    ] = False,
    reduction: ReductionsOption = None,
    repetitions: RepetitionsOption = 10,
    max_new_tokens: Annotated[
        int,
        typer.Option(help="Per generation, at most.", metavar="N", rich_help_panel=STUDY),
    ] = 256,
    seed: SeedOption = 0,
    run_options: RunParameters,
) -> int:
    """Generate greedily N times per prompt and compare the first time with the others (the paper's table 1).

    Counts changed outputs, where they first changed, changed logits of selected tokens, changed answers and answers
    that became wrong or right. With --engine vllm on CUDA each reduction has an engine of its own, as vLLM serves
    (--mode). Without --reduction: atomic:8, unsplit and deterministic:8.

    Exit codes: 0 done, or the budget is used up; 1 a reduction that is repeatable by construction did not repeat; 2
    trouble (one line on stderr).
    """
    from fliptrace.studies import RepeatStudy
    from fliptrace.studies.repeat import PAPER_REDUCTIONS

    study = RepeatStudy(
        model=model.settings(),
        task=task,
        selection=rows.selection(20),
        reductions=tuple(reduction or PAPER_REDUCTIONS),
        repetitions=repetitions,
        max_new_tokens=max_new_tokens,
        seed=seed,
        scorer=scorer,
        run_programs=run_programs,
        engines=engines.settings(),
        batch_size=engines.batch_size,
    )
    return run_and_show(study, run_options, executor=_executor(study))


@with_groups
def replay(
    *,
    model: ModelParameters,
    task: TaskOption = "bundled",
    rows: RowParameters,
    reduction: ReductionsOption = None,
    executions: Annotated[
        int,
        typer.Option(
            help="Of each call and reduction; the first is what the others are compared with.",
            metavar="N",
            rich_help_panel=STUDY,
        ),
    ] = 5,
    seed: SeedOption = 0,
    run_options: RunParameters,
) -> int:
    """Execute captured shrinks again and again on the same input and count what differs (the paper's figure 3).

    Inputs, weights, scale and mapping are captured from the prefill and the first decode step of each prompt, under
    unsplit. Without --reduction: atomic:8, atomic:vllm, unsplit, deterministic:8 and local:32.

    Exit codes: 0 done, or the budget is used up; 1 a reduction that is repeatable by construction did not repeat; 2
    trouble (one line on stderr).
    """
    from fliptrace.studies import ReplayStudy
    from fliptrace.studies.replay import REDUCTIONS

    study = ReplayStudy(
        model=model.settings(),
        task=task,
        selection=rows.selection(10),
        reductions=tuple(reduction or REDUCTIONS),
        executions=executions,
        seed=seed,
    )
    return run_and_show(study, run_options)


@with_groups
def decide(
    *,
    csv: Annotated[
        Path | None,
        typer.Option(help="A CSV file with a header line.", metavar="FILE", rich_help_panel=PROMPT),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="A data set of the datasets library, such as google/civil_comments, or a folder that it reads.",
            metavar="NAME[:CONFIGURATION]",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    split: SplitOption = None,
    labelled: LabelledParameters,
    server: Annotated[
        str | None,
        typer.Option(
            help="Decide through a running server's own interface (/v1/systemone, vLLM); --model is then the name of a "
            "served model or adapter.",
            metavar="URL",
            rich_help_panel=MODEL,
        ),
    ] = None,
    model: ModelParameters,
    engines: ServedParameters,
    rows: RowParameters,
    reduction: ReductionsOption = None,
    repetitions: RepetitionsOption = 10,
    seed: SeedOption = 0,
    run_options: RunParameters,
) -> int:
    """Decide yes or no N times per text and compare the first time with the others (the paper's table 2).

    The probability of yes is read from the next token's logits, normalised over yes and no; from 0.5 on it is yes.
    Without --reduction: atomic:8, unsplit and deterministic:8.

    Exit codes: 0 done, or the budget is used up; 1 a reduction that is repeatable by construction did not repeat; 2
    trouble (one line on stderr).
    """
    from fliptrace.studies import DecideStudy
    from fliptrace.studies.repeat import PAPER_REDUCTIONS

    if (csv is None) == (dataset is None):
        raise InputError("give the texts: --csv FILE or --dataset NAME")
    if split is not None and dataset is None:
        raise InputError("--split is of a --dataset; a CSV file has none")
    if server is not None:
        if reduction:
            raise InputError("--server decides with what runs there; leave out --reduction")
        check_served(model)
    study = DecideStudy(
        csv="" if csv is None else str(csv),
        dataset=dataset,
        split=split or "test",
        **dataclasses.asdict(labelled),
        model=(model if server is None else dataclasses.replace(model, model=None)).settings(),
        selection=rows.selection(None),
        reductions=tuple(reduction or PAPER_REDUCTIONS),
        repetitions=repetitions,
        seed=seed,
        server=server,
        server_model=model.model if server is not None else None,
        engines=engines.settings(),
        batch_size=engines.batch_size,
    )
    return run_and_show(study, run_options, executor=_executor(study))


def _executor(study: RepeatStudy | DecideStudy) -> Executor | None:
    """Engines of vLLM's own run side by side; None: items one after another."""
    from fliptrace.studies.engine_process_lanes import run_lanes

    return run_lanes if study.in_processes else None


#: Entry points with functions like those of COMMANDS.
STUDIES_GROUP = "fliptrace.studies"

COMMANDS: dict[str, Callable[..., int]] = {
    "batch": batch,
    "latency": latency,
    "replay": replay,
    "repeat": repeat,
    "decide": decide,
    "train": train,
}


def trace_study(
    study: Annotated[str, typer.Argument(help="Which study.", metavar="STUDY")],
    version: VersionOption = False,  # noqa: ARG001 (its callback answers)
) -> int:
    """Measure how often a LoRA stack changes its outputs, how much that matters, and what repeats.

    trace-study replay: shrinks executed again on identical inputs (figure 3).

    trace-study repeat: greedy generations of one prompt against each other (table 1).

    trace-study decide: yes/no decisions against each other (table 2).

    trace-study batch: generations in batches of several sizes against each other (table 3).

    trace-study latency: what a reduction costs whole requests (table 4, figure 6).

    trace-study fragility: how probably a fresh execution flips, from one execution and few replays.

    trace-study train: a LoRA adapter to measure with, as the paper trains its own.

    trace-study STUDY --help says what a study takes.
    """
    raise InputError(f"a study is one of {', '.join([*COMMANDS, *registered()])}; got {study!r}")


def registered() -> dict[str, EntryPoint]:
    """Return the studies that other packages bring, by name: entry points of the group fliptrace.studies."""
    return {entry.name: entry for entry in entry_points(group=STUDIES_GROUP)}


def table_names() -> list[str]:
    """Return the names that a table of a TOML file may have: the studies', and trace-check's."""
    return [*COMMANDS, *registered(), CHECK_TABLE]


def run_study_command(name: str, command: Callable[..., int], typed: Sequence[str]) -> None:
    """Run a study's function on what was typed after its name, and exit."""
    try:
        configured = with_configuration(typed, name, table_names())
        words = with_rows_joined(with_ray_address(configured))
    except InputError as error:
        fail(f"trace-study {name}", one_line(str(error)))
        sys.exit(TROUBLE)
    run(command, f"trace-study {name}", words)


def main() -> None:
    """Run the command."""
    typed = sys.argv[1:]
    if typed and typed[0] in COMMANDS:
        run_study_command(typed[0], COMMANDS[typed[0]], typed[1:])
    entry = registered().get(typed[0]) if typed else None
    if entry is not None:
        run_study_command(entry.name, entry.load(), typed[1:])
    # Of a study that is not there the name is wrong, not the options that it would have.
    named = bool(typed) and not typed[0].startswith("-")
    run(trace_study, "trace-study", typed[:1] if named else typed)


if __name__ == "__main__":
    main()
