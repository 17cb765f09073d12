"""trace-study fragility: how probably a fresh execution flips; registered as a study by an entry point."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fliptrace.command_line.options import PROMPT
from fliptrace.command_line.parameters import with_groups
from fliptrace.command_line.study_options import STUDY, ReductionsOption, SeedOption, TaskOption
from fliptrace.command_line.study_parameters import (
    ModelParameters,
    RowParameters,
    RunParameters,
    run_and_show,
)
from fliptrace.command_line.trace_study import run_study_command
from fliptrace.errors import InputError


@with_groups
def fragility(
    *,
    model: ModelParameters,
    task: TaskOption = "bundled",
    rows: RowParameters,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="A recorded execution, to be estimated under its own reduction in place of prompts. Repeat the option "
            "for several.",
            metavar="FILE",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    reduction: ReductionsOption = None,
    replays: Annotated[
        int,
        typer.Option(help="Forced replays of each prompt.", metavar="N", rich_help_panel=STUDY),
    ] = 6,
    executions: Annotated[
        int,
        typer.Option(
            help="Of every shrink alone, under its recorded operands; 0 leaves that out.",
            metavar="N",
            rich_help_panel=STUDY,
        ),
    ] = 32,
    reach: Annotated[
        float,
        typer.Option(
            help="Largest margin, in ULP of the best logit, of a step that is looked at.",
            metavar="ULP",
            rich_help_panel=STUDY,
        ),
    ] = 4.0,
    observed: Annotated[
        int,
        typer.Option(
            help="Free repetitions of each prompt, to hold the estimates against.",
            metavar="N",
            rich_help_panel=STUDY,
        ),
    ] = 0,
    max_new_tokens: Annotated[
        int,
        typer.Option(help="Per generation, at most.", metavar="N", rich_help_panel=STUDY),
    ] = 64,
    seed: SeedOption = 0,
    shard: Annotated[
        str,
        typer.Option(
            help="Only every N-th prompt, from the K-th on: one of N processes, each with a folder of its own.",
            metavar="K/N",
            rich_help_panel=STUDY,
        ),
    ] = "1/1",
    gather: Annotated[
        list[Path] | None,
        typer.Option(
            help="Run nothing: take rows from the folder of a shard. Repeat the option for all of them.",
            metavar="FOLDER",
            rich_help_panel=STUDY,
        ),
    ] = None,
    run_options: RunParameters,
) -> int:
    """Estimate how probably a fresh execution chooses other tokens, per step and prompt, from one execution.

    One generation, then a few replays that are fed its tokens, and every shrink again and again alone. With --observed,
    free repetitions show how right the estimates were. Without --reduction: atomic:8.

    Exit codes: 0 done, or the budget is used up; 2 trouble (one line on stderr).
    """
    from fliptrace_interventions.fragility import FragilityOptions, FragilityStudy, gathered

    study = FragilityStudy(
        model=model.settings(),
        task=task,
        selection=rows.selection(20),
        reductions=tuple(reduction or ["atomic:8"]),
        options=FragilityOptions(replays, executions, reach),
        observed=observed,
        max_new_tokens=max_new_tokens,
        seed=seed,
        traces=tuple(map(str, trace or ())),
        shard=_shard(shard),
    )
    return run_and_show(study, run_options, executor=gathered(gather) if gather else None)


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal()):
        raise InputError(f"a shard is written K/N, such as 1/12; got {text!r}")
    return int(part), int(parts)


def main() -> None:
    """Run the study without the command that it is registered with."""
    run_study_command("fragility", fragility, sys.argv[1:])


if __name__ == "__main__":
    main()
