"""The options that the studies share, and how a study is run for a person."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fliptrace.command_line.options import (
    MODEL,
    OUTPUT,
    PROMPT,
    DtypeName,
    EngineName,
)
from fliptrace.command_line.output import show_document
from fliptrace.command_line.running import (
    DIVERGED,
    IDENTICAL,
    InterruptedWithResultsError,
    progress_bar,
)
from fliptrace.command_line.vllm_arguments import read_vllm_arguments

if TYPE_CHECKING:
    from fliptrace.studies import ModelSettings, Selection, Study
    from fliptrace.studies.running import Executor

STUDY = "Study"

ModelOption = Annotated[
    str | None,
    typer.Option(
        help="The base model: a folder, a .gguf file or a hub name; the bundled one if left out.",
        metavar="MODEL",
        rich_help_panel=MODEL,
    ),
]
AdapterOption = Annotated[
    str | None,
    typer.Option(
        help="Its LoRA adapter in safetensors: a folder or a hub name.",
        metavar="ADAPTER",
        rich_help_panel=MODEL,
    ),
]
EngineOption = Annotated[
    EngineName, typer.Option(help="What runs the model.", rich_help_panel=MODEL)
]
DeviceOption = Annotated[
    str,
    typer.Option(
        help="auto (CUDA when there is one), cpu, cuda or cuda:N.",
        metavar="DEVICE",
        rich_help_panel=MODEL,
    ),
]
DtypeOption = Annotated[
    DtypeName, typer.Option(help="The type in which the model computes.", rich_help_panel=MODEL)
]
AttentionOption = Annotated[
    str,
    typer.Option(
        help="sdpa or eager; with --engine vllm the name of its backend, such as TRITON_ATTN (sdpa leaves it to vLLM).",
        metavar="NAME",
        rich_help_panel=MODEL,
    ),
]
ThreadsOption = Annotated[
    int,
    typer.Option(help="Threads of torch, on a CPU.", metavar="N", rich_help_panel=MODEL),
]
NoTemplateOption = Annotated[
    bool,
    typer.Option(
        "--no-chat-template",
        help="Use prompts as they are, without the model's chat template.",
        rich_help_panel=PROMPT,
    ),
]
TaskOption = Annotated[
    str,
    typer.Option(
        help="Where prompts come from: bundled, gsm8k:PATH (fields question, answer), mbpp:PATH (its test split), "
        "jsonl:PATH (fields prompt and, if scored, answer), lm-eval:PATH or inspect:PATH (logs of these harnesses).",
        metavar="TASK",
        rich_help_panel=PROMPT,
    ),
]
SelectOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Rows, from 0: --select 0 5 10-19. Without it rows are drawn.",
        metavar="ROWS",
        rich_help_panel=PROMPT,
    ),
]
PromptsOption = Annotated[
    int | None,
    typer.Option(help="How many prompts.", metavar="N", rich_help_panel=PROMPT),
]
PromptSeedOption = Annotated[
    int,
    typer.Option(help="Seed of the draw.", metavar="N", rich_help_panel=PROMPT),
]
ReductionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--reduction",
        help="How LoRA shrinks sum; repeat the option for several.",
        metavar="KIND:SPLITS",
        rich_help_panel=STUDY,
    ),
]
RepetitionsOption = Annotated[
    int,
    typer.Option(help="Of each prompt and reduction.", metavar="N", rich_help_panel=STUDY),
]
SeedOption = Annotated[
    int,
    typer.Option(
        help="Where schedule seeds begin, where atomics are simulated (CPU).",
        metavar="N",
        rich_help_panel=STUDY,
    ),
]
FolderOption = Annotated[
    Path,
    typer.Option(
        "--out",
        help="The study's folder: new, or one that the same study has begun; finished rows are kept.",
        metavar="FOLDER",
        rich_help_panel=OUTPUT,
    ),
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        help="Begin no more work after so many minutes; run the same command again to go on.",
        metavar="MINUTES",
        rich_help_panel=STUDY,
    ),
]
RayOption = Annotated[
    str | None,
    typer.Option(
        help="Spread the work with Ray: on this machine, or at an address (auto, HOST:PORT).",
        metavar="[ADDRESS]",
        rich_help_panel=STUDY,
    ),
]
RayWorkersOption = Annotated[
    int | None,
    typer.Option(
        help="How many workers; one per GPU, or two, if left out.",
        metavar="N",
        rich_help_panel=STUDY,
    ),
]
#: Its file is read before the command line is parsed.
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        help="A TOML file with options by name; what is typed goes before it.",
        metavar="FILE",
        rich_help_panel=STUDY,
    ),
]
SummaryJsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print summary.json instead of the table.", rich_help_panel=OUTPUT),
]


def model_settings(
    model: str | None,
    adapter: str | None,
    engine: EngineName,
    device: str,
    dtype: DtypeName,
    attention: str,
    threads: int,
    no_chat_template: bool,
    vllm_argument: list[str] | None = None,
) -> ModelSettings:
    """Put the model's options together.

    Raises:
        InputError: a --vllm-argument that cannot be read, or without --engine vllm.
    """
    from fliptrace.studies import ModelSettings

    return ModelSettings(
        model=model,
        adapter=adapter,
        engine=str(engine),
        device=device,
        dtype=str(dtype),
        attention=attention,
        chat_template=not no_chat_template,
        threads=threads,
        vllm_arguments=read_vllm_arguments(vllm_argument, str(engine)),
    )


def selection_of(
    select: list[str] | None, prompts: int | None, prompt_seed: int, default: int | None
) -> Selection:
    """Return the rows that were named, or as many as are to be drawn."""
    from fliptrace.studies import Selection

    if select:
        return Selection(tuple(select), prompts, prompt_seed)
    return Selection((), default if prompts is None else prompts, prompt_seed)


def run_and_show(
    study: Study,
    out: Path,
    *,
    budget_minutes: float | None,
    ray: str | None,
    ray_workers: int | None,
    as_json: bool,
    quiet: bool,
    command: Sequence[str] | None = None,
    executor: Executor | None = None,
) -> int:
    """Run a study, print its page or summary, and return the exit code.

    Returns:
        1 where a reduction that is repeatable by construction did not repeat, else 0.
    """
    from fliptrace.studies import run_study
    from fliptrace.studies.results import PAGE_NAME
    from fliptrace.studies.running import run_here

    chosen = executor or run_here
    if ray is not None:
        from fliptrace.studies.ray_workers import ray_executor

        chosen = ray_executor(ray, ray_workers)
    try:
        with progress_bar(quiet or as_json) as show:
            result = run_study(
                study,
                out,
                budget_minutes=budget_minutes,
                executor=chosen,
                command=command or ["trace-study", *sys.argv[1:]],
                progress=show,
            )
    except KeyboardInterrupt:
        raise InterruptedWithResultsError(
            f"interrupted; finished rows are kept in {out}, run the same command again to go on"
        ) from None
    if as_json:
        show_document(result.to_json())
    else:
        typer.echo((out / PAGE_NAME).read_text("utf-8"), nl=False)
        typer.echo(f"\nRows, tables and figure are in {out}")
    return DIVERGED if result.report.unrepeatable else IDENTICAL
