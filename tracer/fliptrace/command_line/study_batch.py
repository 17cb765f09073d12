"""trace-study batch: fixed batch sizes, across them, and what a request's neighbours change."""

from __future__ import annotations

from typing import Annotated

import typer

from fliptrace.command_line.parameters import with_groups
from fliptrace.command_line.study_options import (
    STUDY,
    BatchInvariantOption,
    BatchSizesOption,
    ReductionsOption,
    TaskOption,
)
from fliptrace.command_line.study_parameters import (
    AdapterParameters,
    EngineParameters,
    RowParameters,
    RunParameters,
    run_and_show,
)


@with_groups
def batch(
    *,
    model: AdapterParameters,
    engines: EngineParameters,
    task: TaskOption = "bundled",
    rows: RowParameters,
    reduction: ReductionsOption = None,
    batch_invariant: BatchInvariantOption = None,
    batch_size: BatchSizesOption = None,
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
    run: RunParameters,
) -> int:
    """Generate for the same prompts in batches of several sizes, several times, on vLLM (the paper's table 3).

    Counts outputs that change between repetitions of one batch size, and between batch sizes, for each reduction with
    and without VLLM_BATCH_INVARIANT. Without --reduction: vllm-own, deterministic:8 and local; without
    --batch-invariant: off and on; without --batch-size: 16, 32 and 64. On a CPU vLLM's own shrink is all there is:
    --reduction vllm-own --batch-invariant off.

    Exit codes: 0 done, or the budget is used up; 1 a reduction that is repeatable by construction did not repeat; 2
    trouble (one line on stderr).
    """
    from fliptrace.studies.batch import BATCH_SIZES, REDUCTIONS, SWITCHES, BatchStudy
    from fliptrace.studies.engine_process_lanes import run_lanes

    study = BatchStudy(
        model=model.settings(),
        task=task,
        selection=rows.selection(64),
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
        engines=engines.settings(str(model.dtype)),
    )
    return run_and_show(study, run, executor=run_lanes)
