"""trace-study latency: what a reduction costs whole requests."""

from __future__ import annotations

from typing import Annotated

import typer

from fliptrace.command_line.options import MODEL, DtypeName, EngineName
from fliptrace.command_line.parameters import with_groups
from fliptrace.command_line.study_options import (
    STUDY,
    BatchInvariantOption,
    BatchSizesOption,
    DtypeOption,
    EngineOption,
    ModelOption,
    ReductionsOption,
)
from fliptrace.command_line.study_parameters import (
    EngineParameters,
    SittingParameters,
    run_and_show,
)


@with_groups
def latency(
    *,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Dummy weights of this shape (llama-3.2-3b, tiny) and random adapters, instead of a model.",
            metavar="SHAPE",
            rich_help_panel=MODEL,
        ),
    ] = None,
    rank: Annotated[
        list[int] | None,
        typer.Option(
            help="Ranks of the random adapters; repeat the option. 16 and 32 if left out.",
            metavar="N",
            rich_help_panel=MODEL,
        ),
    ] = None,
    model: ModelOption = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="Its LoRA adapters, of different ranks; repeat the option.",
            metavar="ADAPTER",
            rich_help_panel=MODEL,
        ),
    ] = None,
    engine: EngineOption = EngineName.AUTO,
    dtype: DtypeOption = DtypeName.AUTO,
    engines: EngineParameters,
    reduction: ReductionsOption = None,
    batch_invariant: BatchInvariantOption = None,
    batch_size: BatchSizesOption = None,
    requests: Annotated[
        int,
        typer.Option(
            help="At least so many in one timing, in whole batches one after another.",
            metavar="N",
            rich_help_panel=STUDY,
        ),
    ] = 1,
    prompt_tokens: Annotated[
        int,
        typer.Option(help="Of each prompt, random.", metavar="N", rich_help_panel=STUDY),
    ] = 100,
    new_tokens: Annotated[
        int, typer.Option(help="Of each request, exactly.", metavar="N", rich_help_panel=STUDY)
    ] = 150,
    trials: Annotated[
        int,
        typer.Option(help="Times that all engines start anew.", metavar="N", rich_help_panel=STUDY),
    ] = 2,
    rounds: Annotated[
        int, typer.Option(help="Of each trial.", metavar="N", rich_help_panel=STUDY)
    ] = 5,
    seed: Annotated[
        int,
        typer.Option(help="Of prompts and orders.", metavar="N", rich_help_panel=STUDY),
    ] = 0,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="What others are compared with; unsplit if it runs, else the first.",
            metavar="KIND:SPLITS",
            rich_help_panel=STUDY,
        ),
    ] = None,
    run: SittingParameters,
) -> int:
    """Time whole requests on vLLM under each reduction, side by side (the paper's table 4 and figure 6).

    End-to-end latency, time to first token, time per output token and throughput. Every round times every engine once,
    in a new order; starting and warming up are not timed. Without --reduction: none (no adapter), vllm-own, atomic:8,
    unsplit, deterministic:8 and local; without --batch-invariant: off; without --batch-size: 1, 16, 32 and 64. On a
    CPU vLLM's own shrink is all there is: --reduction none --reduction vllm-own.

    Exit codes: 0 done, or the budget is used up; 2 trouble (one line on stderr).
    """
    from fliptrace.studies.engine_process_lanes import run_lanes
    from fliptrace.studies.latency import BATCH_SIZES, REDUCTIONS, LatencyStudy

    settings = engines.settings(str(dtype))
    settings.check(str(engine))
    study = LatencyStudy(
        shape=shape,
        ranks=tuple(rank or (16, 32)),
        model=model,
        adapters=tuple(adapter or ()),
        reductions=tuple(reduction or REDUCTIONS),
        switches=tuple(batch_invariant or ("off",)),
        batch_sizes=tuple(batch_size or BATCH_SIZES),
        requests=requests,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        trials=trials,
        rounds=rounds,
        seed=seed,
        baseline=baseline,
        engines=settings,
    )
    return run_and_show(study, run, executor=run_lanes)
