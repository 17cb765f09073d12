"""trace-pair: run a prompt until two executions differ, and say where the difference began."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fliptrace.command_line.arguments import with_rows_joined, without_prompts
from fliptrace.command_line.options import (
    MODEL,
    OUTPUT,
    PROMPT,
    RECORDING,
    SEARCH,
    AttentionName,
    DebugOption,
    DtypeName,
    EngineName,
    FailOn,
    FiguresOption,
    JsonOption,
    LogitsName,
    QuietOption,
    VersionOption,
)
from fliptrace.command_line.output import Output, figure_formats, show_document, show_summary
from fliptrace.command_line.running import exit_code, progress_bar, run
from fliptrace.command_line.runs import trace_one, trace_several
from fliptrace.command_line.vllm_arguments import (
    NeighboursOption,
    VllmArgumentOption,
    read_vllm_arguments,
)
from fliptrace.errors import InputError

if TYPE_CHECKING:
    from fliptrace.pair import Pair, Prompt
    from fliptrace.pair.engines import LoadedEngine


def trace_pair(
    *,
    demo: Annotated[
        bool,
        typer.Option(
            "--demo",
            help="See it work: the bundled model and prompts, on the CPU, in a minute or two.",
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="The base model: a folder, a .gguf file or a hub name.",
            metavar="MODEL",
            rich_help_panel=MODEL,
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            help="Its LoRA adapter in safetensors: a folder or a hub name.",
            metavar="ADAPTER",
            rich_help_panel=MODEL,
        ),
    ] = None,
    engine: Annotated[
        EngineName, typer.Option(help="What runs the model.", rich_help_panel=MODEL)
    ] = EngineName.AUTO,
    device: Annotated[
        str,
        typer.Option(
            help="auto (CUDA when there is one), cpu, cuda or cuda:N.",
            metavar="DEVICE",
            rich_help_panel=MODEL,
        ),
    ] = "auto",
    dtype: Annotated[
        DtypeName,
        typer.Option(help="The type in which the model computes.", rich_help_panel=MODEL),
    ] = DtypeName.AUTO,
    attention: Annotated[
        AttentionName,
        typer.Option(help="Which attention of transformers runs.", rich_help_panel=MODEL),
    ] = AttentionName.SDPA,
    vllm_argument: VllmArgumentOption = None,
    neighbours: NeighboursOption = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="A prompt. Repeat the option for several.",
            metavar="TEXT",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file that holds one prompt. Repeat the option for several.",
            metavar="FILE",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="A file of JSON lines: gsm8k:PATH (field question) or jsonl:PATH (field prompt).",
            metavar="KIND:PATH",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option(
            help="Rows of the data set, from 0: --select 0 5 10-19.",
            metavar="ROWS",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    no_chat_template: Annotated[
        bool,
        typer.Option(
            "--no-chat-template",
            help="Use the prompt as it is, without the model's chat template.",
            rich_help_panel=PROMPT,
        ),
    ] = False,
    reduction: Annotated[
        str,
        typer.Option(
            help="How LoRA shrinks (x·Aᵀ) sum over K: atomic:8, atomic:vllm, unsplit, deterministic:8, tree:8, "
            "local.",
            metavar="KIND:SPLITS",
            rich_help_panel=SEARCH,
        ),
    ] = "atomic:8",
    candidate_reduction: Annotated[
        str | None,
        typer.Option(
            help="Another one for the candidates; every difference is then the variant's.",
            metavar="KIND:SPLITS",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    attempts: Annotated[
        int,
        typer.Option(
            help="Stop after this many candidates without a difference.",
            metavar="N",
            rich_help_panel=SEARCH,
        ),
    ] = 20,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            help="Generate at most this many tokens per execution.",
            metavar="N",
            rich_help_panel=SEARCH,
        ),
    ] = 256,
    seed: Annotated[
        int,
        typer.Option(
            help="First seed of the arrival orders, where atomics are simulated (CPU).",
            metavar="N",
            rich_help_panel=SEARCH,
        ),
    ] = 0,
    fail_on: Annotated[
        FailOn,
        typer.Option(
            help="The difference that ends the search and makes the exit code 1: another token, "
            "FP32 values that stay different in 16 bits, or any bit.",
            rich_help_panel=SEARCH,
        ),
    ] = FailOn.TOKEN,
    modules: Annotated[
        bool,
        typer.Option(
            "--modules",
            help="Record every module and operation, not LoRA shrinks alone (slow).",
            rich_help_panel=RECORDING,
        ),
    ] = False,
    operands: Annotated[
        bool,
        typer.Option(
            "--operands",
            help="Keep the shrinks' inputs whole, not as digests.",
            rich_help_panel=RECORDING,
        ),
    ] = False,
    logits: Annotated[
        LogitsName,
        typer.Option(help="Steps whose logits are kept whole.", rich_help_panel=RECORDING),
    ] = LogitsName.NEAR_TIES,
    state_every: Annotated[
        int,
        typer.Option(
            help="Hybrid models: keep recurrent state whole every so many steps, and digests of it in the others.",
            metavar="STEPS",
            rich_help_panel=RECORDING,
        ),
    ] = 1,
    redact: Annotated[
        bool,
        typer.Option(
            "--redact",
            help="Keep text and token ids out of traces and report. Whoever has the model can still work them "
            "out from the values of its first layer.",
            rich_help_panel=RECORDING,
        ),
    ] = False,
    no_observer_control: Annotated[
        bool,
        typer.Option(
            "--no-observer-control",
            help="Skip the run that shows that recording changes neither tokens nor logits.",
            rich_help_panel=RECORDING,
        ),
    ] = False,
    out: Annotated[
        Path,
        typer.Option(
            help="A new folder for the reports and traces.",
            metavar="FOLDER",
            rich_help_panel=OUTPUT,
        ),
    ],
    figures: FiguresOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,  # noqa: ARG001 (read by run)
    version: VersionOption = False,  # noqa: ARG001 (its callback answers)
) -> int:
    """Run one prompt on a LoRA model until two executions differ, and find the rounding where they parted.

    The first execution is the reference; candidates follow until one differs. Both are compared bit by bit. Into --out
    go report.html, report.json, reference.trace and candidate.trace; with several prompts a folder for each and an
    index page.

    Exit codes: 0 no difference of the kind that --fail-on names, 1 there is one, 2 trouble (one line on stderr), 3 void
    because recording changed the run. With several prompts the worst.
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
        observer_control=not no_observer_control,
        state_every=state_every,
    )
    settings.check()
    require_new(out)
    typed = without_prompts(sys.argv[1:]) if redact else sys.argv[1:]
    command = shlex.join(["trace-pair", *typed])
    output = Output(out, command, as_json, quiet or as_json, figure_formats(figures))
    if demo:
        if model or adapter or prompt or prompt_file or dataset or select:
            raise InputError(
                "--demo brings its own model and prompts; leave out --model, --adapter, prompts and --dataset"
            )
        if vllm_argument or neighbours or engine is EngineName.VLLM:
            raise InputError(
                "--demo runs on transformers; leave out --engine, --vllm-argument and --neighbours"
            )
        if device not in ("auto", "cpu"):
            raise InputError(f"--demo runs on the CPU; got --device {device}")
        if dtype is not DtypeName.AUTO or attention is not AttentionName.SDPA or no_chat_template:
            raise InputError(
                "--demo shows the bundled model as it is; leave out --dtype, --attention and --no-chat-template"
            )
        from fliptrace.command_line.demo import run_demo

        return run_demo(settings, output, str(fail_on))
    if not model or not adapter:
        missing = " and ".join(
            name for name, value in (("--model", model), ("--adapter", adapter)) if not value
        )
        raise InputError(f"{missing} must be given (or --demo; see trace-pair --help)")
    passed = read_vllm_arguments(vllm_argument, str(engine))
    texts = _texts(prompt or [], prompt_file or [], dataset, select or [])
    with progress_bar(output.quiet) as show:
        from fliptrace.pair import load_engine
        from fliptrace.pair.neighbours import read_neighbours

        loaded = load_engine(
            model,
            adapter,
            engine=str(engine),
            device=device,
            dtype=str(dtype),
            attention=str(attention),
            vllm_arguments=passed,
            neighbours=read_neighbours(neighbours, str(engine)),
        )
        prompts = _encode(loaded, texts, chat_template=not no_chat_template)
        if len(prompts) > 1:
            return trace_several(loaded, prompts, settings, output, str(fail_on), show)
        pair = trace_one(loaded, prompts[0], settings, output, show)
    with pair:
        _show(pair, output)
        return exit_code(pair.diff.outcome, str(fail_on))


def _texts(
    prompts: list[str], files: list[Path], dataset: str | None, select: list[str]
) -> list[tuple[str, str]]:
    from fliptrace.pair.prompts import parse_selection, read_dataset, require_text

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
    for source, text in texts:
        require_text(text, source)  # before minutes of loading, not after
    return texts


def _encode(
    engine: LoadedEngine,
    texts: list[tuple[str, str]],
    *,
    chat_template: bool,
) -> list[Prompt]:
    from fliptrace.pair import encode_prompt

    prompts = [
        encode_prompt(engine.tokenizer, text, chat_template=chat_template, source=source)
        for source, text in texts
    ]
    for prompt in prompts:
        limit = engine.context_length
        if limit is not None and len(prompt.ids) + 1 > limit:
            raise InputError(
                f"the prompt ({prompt.source}) has {len(prompt.ids)} tokens and the model's context is {limit}; "
                "a prompt must leave room for at least one generated token, so shorten it"
            )
    return prompts


def _show(pair: Pair, output: Output) -> None:
    """Print the result of one prompt."""
    if output.as_json:
        show_document(pair.to_json(output.command))
        return
    show_summary(pair)
    output.say(f"\nThe report is {output.folder / 'report.html'}")


def main() -> None:
    """Run the command."""
    run(trace_pair, "trace-pair", with_rows_joined(sys.argv[1:]))


if __name__ == "__main__":
    main()
