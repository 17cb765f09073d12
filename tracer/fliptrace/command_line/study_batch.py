"""trace-study batch: fixed batch sizes, across them, and what a request's neighbours change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fliptrace.command_line.options import (
    MODEL,
    DebugOption,
    DtypeName,
    EngineName,
    QuietOption,
    VersionOption,
)
from fliptrace.command_line.study_options import (
    STUDY,
    AdapterOption,
    BudgetOption,
    ConfigOption,
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
    SelectOption,
    SummaryJsonOption,
    TaskOption,
    ThreadsOption,
    model_settings,
    run_and_show,
    selection_of,
)

ModeOption = Annotated[
    str,
    typer.Option(
        help="graphs (decoding from CUDA graphs), compiled (as vLLM has it), eager; auto is graphs on CUDA, eager on "
        "the CPU.",
        metavar="MODE",
        rich_help_panel=MODEL,
    ),
]
BackendOption = Annotated[
    str,
    typer.Option(
        help="vLLM's name of an attention backend; its own choice if left out.",
        metavar="NAME",
        rich_help_panel=MODEL,
    ),
]
CacheOption = Annotated[
    float,
    typer.Option(
        help="Cache of each engine; several share one GPU.", metavar="GIB", rich_help_panel=MODEL
    ),
]
LengthOption = Annotated[
    int | None,
    typer.Option(
        help="Longest request, in tokens; the model's if left out.",
        metavar="N",
        rich_help_panel=MODEL,
    ),
]
BatchedTokensOption = Annotated[
    int,
    typer.Option(
        help="Tokens of one forward, at most; a prompt beyond it is cut in two.",
        metavar="N",
        rich_help_panel=MODEL,
    ),
]
EnginePythonOption = Annotated[
    Path | None,
    typer.Option(
        help="The Python that has vLLM; this one if left out.",
        metavar="PYTHON",
        rich_help_panel=MODEL,
    ),
]
ScratchOption = Annotated[
    Path | None,
    typer.Option(
        help="Where logs and caches of the engines go; a folder for temporary files if left out.",
        metavar="FOLDER",
        rich_help_panel=MODEL,
    ),
]
StartOption = Annotated[
    float,
    typer.Option(
        help="How long an engine may take to start.", metavar="SECONDS", rich_help_panel=MODEL
    ),
]


def batch(
    *,
    out: FolderOption,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    engine: EngineOption = EngineName.AUTO,
    dtype: DtypeOption = DtypeName.AUTO,
    threads: ThreadsOption = 1,
    mode: ModeOption = "auto",
    attention_backend: BackendOption = "",
    cache_gib: CacheOption = 1.0,
    max_model_len: LengthOption = None,
    max_num_batched_tokens: BatchedTokensOption = 8192,
    engine_python: EnginePythonOption = None,
    scratch: ScratchOption = None,
    start_seconds: StartOption = 300.0,
    task: TaskOption = "bundled",
    select: SelectOption = None,
    prompts: PromptsOption = None,
    prompt_seed: PromptSeedOption = 0,
    no_chat_template: NoTemplateOption = False,
    reduction: ReductionsOption = None,
    batch_invariant: Annotated[
        list[str] | None,
        typer.Option(
            help="Values of VLLM_BATCH_INVARIANT, off and on; both if left out.",
            metavar="SWITCH",
            rich_help_panel=STUDY,
        ),
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(
            help="Requests at once; repeat the option. 16, 32 and 64 if left out.",
            metavar="N",
            rich_help_panel=STUDY,
        ),
    ] = None,
    alone: Annotated[
        int,
        typer.Option(
            help="So many of the prompts also run in batches of one.",
            metavar="N",
            rich_help_panel=STUDY,
        ),
    ] = 16,
    repetitions: Annotated[
        int, typer.Option(help="Of each batch size.", metavar="N", rich_help_panel=STUDY)
    ] = 3,
    max_new_tokens: Annotated[
        int, typer.Option(help="Per request.", metavar="N", rich_help_panel=STUDY)
    ] = 150,
    stop_at_end: Annotated[
        bool,
        typer.Option(
            "--stop-at-end",
            help="Let requests end at their end token; without it all generate the same number.",
            rich_help_panel=STUDY,
        ),
    ] = False,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="What else to vary at each batch size: order, neighbours, prefix (cold and warm prefix cache).",
            metavar="WHAT",
            rich_help_panel=STUDY,
        ),
    ] = None,
    locate: Annotated[
        int,
        typer.Option(
            help="Of so many prompts, name the first module that depends on the neighbours (one more engine per arm, "
            "eager).",
            metavar="N",
            rich_help_panel=STUDY,
        ),
    ] = 0,
    locate_tokens: Annotated[
        int,
        typer.Option(help="How far to look for it.", metavar="N", rich_help_panel=STUDY),
    ] = 16,
    budget_minutes: BudgetOption = None,
    ray: RayOption = None,
    ray_workers: RayWorkersOption = None,
    config: ConfigOption = None,  # noqa: ARG001 (read before parsing)
    as_json: SummaryJsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,  # noqa: ARG001 (read by run)
    version: VersionOption = False,  # noqa: ARG001 (its callback answers)
) -> int:
    """Generate for the same prompts in batches of several sizes, several times, on vLLM (the paper's table 3).

    Counts outputs that change between repetitions of one batch size, and between batch sizes, for each reduction with
    and without VLLM_BATCH_INVARIANT. Without --reduction: vllm-own, deterministic:8 and local. On a CPU vLLM's own
    shrink is all there is: --reduction vllm-own.

    Exit codes: 0 done, or the budget is used up; 1 a reduction that is repeatable by construction did not repeat; 2
    trouble (one line on stderr).
    """
    from fliptrace.studies.batch import BATCH_SIZES, REDUCTIONS, SWITCHES, BatchStudy
    from fliptrace.studies.engine_process_lanes import run_lanes
    from fliptrace.studies.engine_process_settings import EngineSettings

    study = BatchStudy(
        model=model_settings(
            model, adapter, engine, "auto", dtype, "sdpa", threads, no_chat_template
        ),
        task=task,
        selection=selection_of(select, prompts, prompt_seed, 64),
        reductions=tuple(reduction or REDUCTIONS),
        switches=tuple(batch_invariant or SWITCHES),
        batch_sizes=tuple(batch_size or BATCH_SIZES),
        alone=alone,
        repetitions=repetitions,
        max_new_tokens=max_new_tokens,
        stop_at_end=stop_at_end,
        variations=tuple(vary or ()),
        locate=locate,
        locate_tokens=locate_tokens,
        engines=EngineSettings(
            mode=mode,
            attention_backend=attention_backend,
            dtype=str(dtype),
            cache_gib=cache_gib,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            python=None if engine_python is None else str(engine_python),
            scratch="" if scratch is None else str(scratch),
            start_seconds=start_seconds,
        ),
    )
    return run_and_show(
        study,
        out,
        budget_minutes=budget_minutes,
        ray=ray,
        ray_workers=ray_workers,
        as_json=as_json,
        quiet=quiet,
        executor=run_lanes,
    )
