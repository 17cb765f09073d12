"""The options that the studies share, in groups that a command takes whole, and how a study is run for a person."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import typer

from fliptrace.command_line.options import (
    DebugOption,
    DtypeName,
    EngineName,
    QuietOption,
    VersionOption,
)
from fliptrace.command_line.output import show_document
from fliptrace.command_line.running import (
    DIVERGED,
    IDENTICAL,
    InterruptedWithResultsError,
    progress_bar,
)
from fliptrace.command_line.study_options import (
    AdapterOption,
    AttentionOption,
    BackendOption,
    BatchedTokensOption,
    BudgetOption,
    CacheOption,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    EngineOption,
    EnginePythonOption,
    FolderOption,
    LabelColumnOption,
    LengthOption,
    ModelOption,
    ModeOption,
    NoDeviceOption,
    NoOption,
    NoTemplateOption,
    PromptSeedOption,
    PromptsOption,
    QuestionOption,
    RayOption,
    RayWorkersOption,
    ScratchOption,
    SelectOption,
    ServedBatchOption,
    ServedModeOption,
    StartOption,
    SummaryJsonOption,
    TextColumnOption,
    ThreadsOption,
    ThresholdOption,
    YesOption,
)
from fliptrace.command_line.vllm_arguments import VllmArgumentOption, read_vllm_arguments
from fliptrace.errors import InputError

if TYPE_CHECKING:
    from fliptrace.studies import ModelSettings, Selection, Study
    from fliptrace.studies.engine_process_settings import EngineSettings
    from fliptrace.studies.running import Executor


@dataclass(frozen=True, kw_only=True)
class AdapterParameters:
    """The model and its adapter."""

    model: ModelOption = None
    adapter: AdapterOption = None
    engine: EngineOption = EngineName.AUTO
    dtype: DtypeOption = DtypeName.AUTO
    threads: ThreadsOption = 1
    no_chat_template: NoTemplateOption = False

    def settings(self) -> ModelSettings:
        """Return what the studies take."""
        from fliptrace.studies import ModelSettings

        return ModelSettings(
            model=self.model,
            adapter=self.adapter,
            engine=str(self.engine),
            dtype=str(self.dtype),
            chat_template=not self.no_chat_template,
            threads=self.threads,
        )


@dataclass(frozen=True, kw_only=True)
class ModelParameters(AdapterParameters):
    """The same, and how an engine of this process runs them."""

    device: DeviceOption = "auto"
    attention: AttentionOption = "sdpa"
    vllm_argument: VllmArgumentOption = None

    def settings(self) -> ModelSettings:
        """Return what the studies take.

        Raises:
            InputError: a --vllm-argument that cannot be read, or without --engine vllm.
        """
        return replace(
            super().settings(),
            device=self.device,
            attention=self.attention,
            vllm_arguments=read_vllm_arguments(self.vllm_argument, str(self.engine)),
        )


def check_served(model: ModelParameters) -> None:
    """Refuse options of an engine of this process where a running server is asked; only the model's name is one of its.

    Raises:
        InputError: which option says nothing to a server.
    """
    plain = ModelParameters(model=model.model, no_chat_template=model.no_chat_template)
    odd = [
        f"--{each.name.replace('_', '-')}"
        for each in fields(ModelParameters)
        if getattr(model, each.name) != getattr(plain, each.name)
    ]
    if odd:
        raise InputError(f"--server asks what runs there; leave out {' and '.join(odd)}")


@dataclass(frozen=True, kw_only=True)
class RowParameters:
    """Which rows of a data set."""

    select: SelectOption = None
    prompts: PromptsOption = None
    prompt_seed: PromptSeedOption = 0

    def selection(self, default: int | None) -> Selection:
        """Return the rows that were named, or as many as are to be drawn."""
        from fliptrace.studies import Selection

        if self.select:
            return Selection(tuple(self.select), self.prompts, self.prompt_seed)
        return Selection((), default if self.prompts is None else self.prompts, self.prompt_seed)


@dataclass(frozen=True, kw_only=True)
class LabelledParameters:
    """How texts and labels become questions with answers."""

    question: QuestionOption = "Is this comment toxic?"
    text_column: TextColumnOption = "text"
    label_column: LabelColumnOption = "label"
    threshold: ThresholdOption = 0.5
    yes: YesOption = "yes"
    no: NoOption = "no"


@dataclass(frozen=True, kw_only=True)
class ProcessParameters:
    """How vLLM engines in processes of their own are made."""

    cache_gib: CacheOption = 2.0
    max_model_len: LengthOption = None
    max_num_batched_tokens: BatchedTokensOption = 8192
    engine_python: EnginePythonOption = None
    scratch: ScratchOption = None
    start_seconds: StartOption = 300.0

    def made(self, **more: str) -> EngineSettings:
        """Return what the studies take.

        Args:
            more: mode, attention backend and type.
        """
        from fliptrace.studies.engine_process_settings import EngineSettings

        return EngineSettings(
            cache_gib=self.cache_gib,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            python=None if self.engine_python is None else str(self.engine_python),
            scratch="" if self.scratch is None else str(self.scratch),
            start_seconds=self.start_seconds,
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class EngineParameters(ProcessParameters):
    """The same for studies that have no other engines."""

    mode: ModeOption = "auto"
    attention_backend: BackendOption = ""
    device: NoDeviceOption = "auto"

    def settings(self, dtype: str) -> EngineSettings:
        """Return what the studies take.

        Raises:
            InputError: a device was named.
        """
        if self.device != "auto":
            raise InputError(
                f"these engines are vLLM's and run on what it is built for, CUDA or a CPU; got --device {self.device}. "
                "Leave it out: --engine-python names the Python of another build, CUDA_VISIBLE_DEVICES chooses GPUs"
            )
        return self.made(mode=self.mode, attention_backend=self.attention_backend, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class ServedParameters(ProcessParameters):
    """The same for studies that can also step an engine themselves; type and attention are those of the model."""

    mode: ServedModeOption = "auto"
    batch_size: ServedBatchOption = 1

    def settings(self) -> EngineSettings:
        """Return what the studies take."""
        return self.made(mode=self.mode)


@dataclass(frozen=True, kw_only=True)
class CommonParameters:
    """What every command takes; most of it is read before the command runs."""

    quiet: QuietOption = False
    debug: DebugOption = False
    version: VersionOption = False


@dataclass(frozen=True, kw_only=True)
class SittingParameters(CommonParameters):
    """How a study is run, and what is shown."""

    out: FolderOption
    budget_minutes: BudgetOption = None
    config: ConfigOption = None
    as_json: SummaryJsonOption = False


@dataclass(frozen=True, kw_only=True)
class RunParameters(SittingParameters):
    """The same for a study that can be spread over workers."""

    ray: RayOption = None
    ray_workers: RayWorkersOption = None


def run_and_show(
    study: Study,
    run: SittingParameters,
    *,
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
    if isinstance(run, RunParameters) and run.ray is None and run.ray_workers is not None:
        raise InputError(f"--ray-workers goes with --ray; got {run.ray_workers} and no --ray")
    if isinstance(run, RunParameters) and run.ray is not None:
        from fliptrace.studies.ray_workers import ray_executor

        chosen = ray_executor(run.ray, run.ray_workers)
    try:
        with progress_bar(run.quiet or run.as_json) as show:
            result = run_study(
                study,
                run.out,
                budget_minutes=run.budget_minutes,
                executor=chosen,
                command=command or ["trace-study", *sys.argv[1:]],
                progress=show,
            )
    except KeyboardInterrupt:
        raise InterruptedWithResultsError(
            f"interrupted; finished rows are kept in {run.out}, run the same command again to go on"
        ) from None
    if run.as_json:
        show_document(result.to_json())
    else:
        typer.echo((run.out / PAGE_NAME).read_text("utf-8"), nl=False)
        typer.echo(f"\nRows, tables and figure are in {run.out}")
    return DIVERGED if result.report.unrepeatable else IDENTICAL
