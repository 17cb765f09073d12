"""trace-study fragility: how probably a fresh execution flips; registered as a study by an entry point."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fliptrace.command_line.options import (
    PROMPT,
    DebugOption,
    DtypeName,
    EngineName,
    QuietOption,
    VersionOption,
)
from fliptrace.command_line.study_options import (
    STUDY,
    AdapterOption,
    AttentionOption,
    BudgetOption,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    EngineOption,
    FolderOption,
    ModelOption,
    NoTemplateOption,
    PromptSeedOption,
    PromptsOption,
    RayOption,
    RayWorkersOption,
    ReductionsOption,
    SeedOption,
    SelectOption,
    SummaryJsonOption,
    TaskOption,
    ThreadsOption,
    model_settings,
    run_and_show,
    selection_of,
)
from fliptrace.command_line.trace_study import run_study_command
from fliptrace.command_line.vllm_arguments import VllmArgumentOption
from fliptrace.errors import InputError


def fragility(
    *,
    out: FolderOption,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    engine: EngineOption = EngineName.AUTO,
    device: DeviceOption = "auto",
    dtype: DtypeOption = DtypeName.AUTO,
    attention: AttentionOption = "sdpa",
    vllm_argument: VllmArgumentOption = None,
    threads: ThreadsOption = 1,
    task: TaskOption = "bundled",
    select: SelectOption = None,
    prompts: PromptsOption = None,
    prompt_seed: PromptSeedOption = 0,
    no_chat_template: NoTemplateOption = False,
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
    budget_minutes: BudgetOption = None,
    ray: RayOption = None,
    ray_workers: RayWorkersOption = None,
    config: ConfigOption = None,  # noqa: ARG001 (read before parsing)
    as_json: SummaryJsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,  # noqa: ARG001 (read by run)
    version: VersionOption = False,  # noqa: ARG001 (its callback answers)
) -> int:
    """Estimate how probably a fresh execution chooses other tokens, per step and prompt, from one execution.

    One generation, then a few replays that are fed its tokens, and every shrink again and again alone. With --observed,
    free repetitions show how right the estimates were. Without --reduction: atomic:8.

    Exit codes: 0 done, or the budget is used up; 2 trouble (one line on stderr).
    """
    from fliptrace_interventions.fragility import FragilityOptions, FragilityStudy, gathered

    study = FragilityStudy(
        model=model_settings(
            model,
            adapter,
            engine,
            device,
            dtype,
            attention,
            threads,
            no_chat_template,
            vllm_argument,
        ),
        task=task,
        selection=selection_of(select, prompts, prompt_seed, 20),
        reductions=tuple(reduction or ["atomic:8"]),
        options=FragilityOptions(replays, executions, reach),
        observed=observed,
        max_new_tokens=max_new_tokens,
        seed=seed,
        traces=tuple(map(str, trace or ())),
        shard=_shard(shard),
    )
    return run_and_show(
        study,
        out,
        budget_minutes=budget_minutes,
        ray=ray,
        ray_workers=ray_workers,
        as_json=as_json,
        quiet=quiet,
        executor=gathered(gather) if gather else None,
    )


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
