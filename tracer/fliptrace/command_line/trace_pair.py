"""trace-pair: run a prompt until two executions differ, and say where the difference began."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer
from rich.console import Console

from fliptrace.command_line.output import Output
from fliptrace.command_line.running import TROUBLE, exit_code, fail, one_line, progress_bar, run
from fliptrace.command_line.trace_diff import FailOn
from fliptrace.errors import FliptraceError, InputError, StorageError

if TYPE_CHECKING:
    from fliptrace.capture.transformers_engine import TransformersEngine
    from fliptrace.pair import Pair, PairSettings, Prompt
    from fliptrace.views.index import IndexRow


class EngineName(StrEnum):
    """Which engine runs the model."""

    AUTO = "auto"
    TRANSFORMERS = "transformers"


class DtypeName(StrEnum):
    """In which type the model computes."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class AttentionName(StrEnum):
    """Which attention implementation of transformers runs."""

    SDPA = "sdpa"
    EAGER = "eager"


class LogitsName(StrEnum):
    """Which logits are kept whole."""

    NEAR_TIES = "near-ties"
    ALL = "all"


def trace_pair(
    out: Annotated[Path, typer.Option(help="A new folder for the report and the traces.")],
    model: Annotated[
        str | None, typer.Option(help="Model: a folder, a .gguf file or a hub name.")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="LoRA adapter: a folder or a hub name (safetensors only).")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; give it several times for several prompts.")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="A file that holds one prompt.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="gsm8k:PATH or jsonl:PATH (rows with a prompt field).")
    ] = None,
    select: Annotated[
        list[str] | None, typer.Option(help="Rows of the data set: 0 5 10-19 (repeat or quote).")
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Use the bundled model and a prompt of its own.")
    ] = False,
    reduction: Annotated[
        str, typer.Option(help="How shrinks sum: atomic:8, unsplit, deterministic:8, …")
    ] = "atomic:8",
    candidate_reduction: Annotated[
        str | None, typer.Option(help="Another reduction for the candidates.")
    ] = None,
    attempts: Annotated[
        int, typer.Option(min=1, help="How many candidates to run at the most.")
    ] = 20,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per execution at the most.")
    ] = 256,
    seed: Annotated[
        int, typer.Option(min=0, help="First schedule seed where atomics are simulated (CPU).")
    ] = 0,
    engine: Annotated[EngineName, typer.Option(help="Engine.")] = EngineName.AUTO,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        DtypeName, typer.Option(help="Type in which the model computes.")
    ] = DtypeName.AUTO,
    attention: Annotated[
        AttentionName, typer.Option(help="Attention implementation.")
    ] = AttentionName.SDPA,
    chat_template: Annotated[
        bool, typer.Option(help="Apply the tokenizer's chat template.")
    ] = True,
    modules: Annotated[
        bool, typer.Option("--modules", help="Record every module and operation (slow).")
    ] = False,
    operands: Annotated[
        bool, typer.Option("--operands", help="Keep the shrinks' inputs whole.")
    ] = False,
    logits: Annotated[
        LogitsName, typer.Option(help="Which logits to keep whole.")
    ] = LogitsName.NEAR_TIES,
    redact: Annotated[
        bool, typer.Option("--redact", help="Keep text and token ids out of traces and report.")
    ] = False,
    observer_control: Annotated[
        bool, typer.Option(help="First show that recording changes nothing.")
    ] = True,
    fail_on: Annotated[
        FailOn, typer.Option(help="What ends the search and makes the exit code 1.")
    ] = FailOn.TOKEN,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print report.json instead of the summary.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,  # noqa: ARG001 (read by run)
) -> int:
    """Run a prompt twice and more on a LoRA model until two executions differ; find where the difference began.

    Writes report.html, report.json, reference.trace and candidate.trace into --out (one folder per prompt and an index
    when there are several). Exit codes: 0 identical up to --fail-on, 1 diverged, 2 trouble, 3 void.
    """
    from fliptrace.pair import PairSettings
    from fliptrace.pair.pair import require_new

    settings = PairSettings(
        reduction=reduction,
        candidate_reduction=candidate_reduction,
        attempts=attempts,
        max_new_tokens=max_new_tokens,
        seed=seed,
        until=str(fail_on),
        operands=operands,
        modules=modules,
        full_logits=logits is LogitsName.ALL,
        redact=redact,
        observer_control=observer_control,
    )
    settings.check()
    _check_reductions(reduction, candidate_reduction)
    require_new(out)
    command = shlex.join(
        ["trace-pair", *(without_prompts(sys.argv[1:]) if redact else sys.argv[1:])]
    )
    if demo:
        if model or adapter or prompt or prompt_file or dataset:
            raise InputError(
                "--demo brings its own model and prompt; leave out --model, --adapter, prompts and --dataset"
            )
        from fliptrace.command_line.demo import run_demo

        return run_demo(settings, Output(out, command, as_json, quiet or as_json), str(fail_on))
    if model is None or adapter is None:
        raise click.UsageError("--model and --adapter are required (or --demo)")
    texts = _texts(prompt or [], prompt_file or [], dataset, select or [])
    partial = _partial(out)
    done = False
    try:
        with progress_bar(quiet or as_json) as show:
            loaded = _load(model, adapter, engine, device, dtype, attention)
            prompts = _encode(loaded, texts, chat_template)
            output = Output(out, command, as_json, quiet or as_json)
            code = _trace_all(loaded, prompts, settings, partial, output, str(fail_on), show)
        done = True
    except StorageError as error:
        done = True  # what was acknowledged stays where it is
        raise StorageError(f"{error}; what was recorded is in {partial}") from error
    finally:
        if not done:
            shutil.rmtree(partial, ignore_errors=True)
    return code


def without_prompts(arguments: list[str]) -> list[str]:
    """Return a command's arguments with the prompts blotted out, for a redacted report."""
    shown: list[str] = []
    for argument in arguments:
        if shown and shown[-1] == "--prompt":
            shown.append("(redacted)")
        elif argument.startswith("--prompt="):
            shown.append("--prompt=(redacted)")
        else:
            shown.append(argument)
    return shown


def _check_reductions(*names: str | None) -> None:
    from fliptrace_kernels import ReductionError, parse_reduction

    for name in names:
        if name is not None:
            try:
                parse_reduction(name)
            except ReductionError as error:
                raise InputError(str(error)) from error


def _partial(out: Path) -> Path:
    """Name the folder in which everything is written first; it becomes ``out`` in one step at the end."""
    partial = out.parent / f".{out.name}.partial"
    if partial.exists():
        raise InputError(
            f"{partial} is left from an interrupted run; its traces can be read with trace-diff. Move or remove it first"
        )
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise StorageError(f"output folder {out} cannot be made ({error})") from error
    return partial


def _texts(
    prompts: list[str], files: list[Path], dataset: str | None, select: list[str]
) -> list[tuple[str, str]]:
    from fliptrace.pair.prompts import parse_selection, read_dataset

    texts = [("command line", text) for text in prompts]
    for path in files:
        try:
            texts.append((path.name, path.read_text("utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"prompt file {path} cannot be read ({error})") from error
    if dataset is not None:
        rows = parse_selection(select)
        if not rows:
            raise InputError("--dataset needs --select with row numbers, for example --select 0-19")
        texts.extend(read_dataset(dataset, rows))
    elif select:
        raise InputError("--select picks rows of a data set; give --dataset, or leave it out")
    if not texts:
        raise InputError(
            "there is nothing to ask: give --prompt, --prompt-file or --dataset with --select"
        )
    return texts


def _load(
    model: str,
    adapter: str,
    engine: EngineName,
    device: str,
    dtype: DtypeName,
    attention: AttentionName,
) -> TransformersEngine:
    from fliptrace.pair import load_engine

    return load_engine(
        model,
        adapter,
        engine=str(engine),
        device=device,
        dtype=str(dtype),
        attention=str(attention),
    )


def _encode(
    engine: TransformersEngine,
    texts: list[tuple[str, str]],
    chat_template: bool,
) -> list[Prompt]:
    from fliptrace.pair import encode_prompt

    prompts = [
        encode_prompt(engine.loaded.tokenizer, text, chat_template=chat_template, source=source)
        for source, text in texts
    ]
    for prompt in prompts:
        limit = engine.context_length
        if limit is not None and len(prompt.ids) + 1 > limit:
            raise InputError(
                f"the prompt ({prompt.source}) has {len(prompt.ids)} tokens and the model's context {limit}; "
                "a prompt must leave room for at least one generated token"
            )
    return prompts


def _trace_all(
    engine: TransformersEngine,
    prompts: list[Prompt],
    settings: PairSettings,
    partial: Path,
    output: Output,
    fail_on: str,
    show: Callable[[str, int, int], None],
) -> int:
    """Trace every prompt, write the reports, move everything into place; return the worst exit code."""
    from fliptrace.pair import trace_pair as trace_one
    from fliptrace.views import IndexRow, render_index, terminal_summary

    several = len(prompts) > 1
    codes: list[int] = []
    rows: list[IndexRow] = []
    documents: list[object] = []
    for number, prompt in enumerate(prompts):
        folder = partial / f"prompt-{number:04d}" if several else partial
        label = f"prompt {number + 1} of {len(prompts)}: " if several else ""

        def tell(what: str, done: int, total: int, label: str = label) -> None:
            show(label + what, done, total)

        try:
            pair = trace_one(
                engine, prompt=prompt, settings=settings, directory=folder, progress=tell
            )
        except StorageError:
            raise
        except FliptraceError as error:
            if not several:
                raise
            fail("trace-pair", f"{prompt.source}: {one_line(str(error))}")
            shutil.rmtree(folder, ignore_errors=True)
            codes.append(TROUBLE)
            rows.append(
                IndexRow(
                    prompt.source,
                    "" if settings.redact else prompt.text,
                    None,
                    note=one_line(str(error)),
                )
            )
            continue
        with pair:
            pair.write_report(folder, command=output.command)
            codes.append(exit_code(pair.diff.outcome, fail_on))
            if several:
                rows.append(index_row(pair, prompt, folder.name, settings))
            if output.as_json:
                documents.append(pair.to_json(output.command))
            elif several:
                typer.echo(f"{folder.name} ({prompt.source}): {pair!r}")
            else:
                Console().print(terminal_summary(pair.diff, pair.reference, pair.candidate))
    if several:
        (partial / "index.html").write_text(render_index(rows), "utf-8")
    partial.replace(output.folder)  # an empty folder of that name gives way
    if output.as_json:
        typer.echo(json.dumps(documents if several else documents[0], indent=1))
    else:
        typer.echo(f"The report is {output.folder / ('index.html' if several else 'report.html')}")
    return max(codes)


def index_row(pair: Pair, prompt: Prompt, folder: str, settings: PairSettings) -> IndexRow:
    """Describe one pair for the index page."""
    from fliptrace.views import IndexRow

    text = "" if settings.redact else prompt.text
    note = f"candidate {pair.attempts} of at most {settings.attempts}"
    return IndexRow.from_diff(prompt.source, text, pair.diff, folder=folder, note=note)


def main() -> None:
    """Run the command."""
    run(trace_pair, "trace-pair")


if __name__ == "__main__":
    main()
