"""trace-check: is my stack affected? The answer of a minute, with an exit code."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fliptrace.command_line.configuration import CHECK_TABLE, with_configuration
from fliptrace.command_line.options import MODEL, OUTPUT, PROMPT, SEARCH
from fliptrace.command_line.output import show_document
from fliptrace.command_line.parameters import with_groups
from fliptrace.command_line.running import (
    DIVERGED,
    IDENTICAL,
    TROUBLE,
    fail,
    one_line,
    progress_bar,
    run,
)
from fliptrace.command_line.study_options import ConfigOption
from fliptrace.command_line.study_parameters import (
    CommonParameters,
    ModelParameters,
    check_served,
)
from fliptrace.errors import InputError

if TYPE_CHECKING:
    from fliptrace.studies.check import CheckResult


@with_groups
def trace_check(
    *,
    demo: Annotated[
        bool, typer.Option("--demo", help="Check the bundled model, on the CPU.")
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(
            help="Check a running server that speaks OpenAI's completions, such as vLLM's; --model is then the name of "
            "a served model or adapter.",
            metavar="URL",
            rich_help_panel=MODEL,
        ),
    ] = None,
    model: ModelParameters,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="A prompt; repeat the option for several. Six are built in.",
            metavar="TEXT",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    reduction: Annotated[
        str | None,
        typer.Option(
            help="How LoRA shrinks sum; left out, as vLLM's own kernel does (atomic:vllm; --demo: atomic:8).",
            metavar="KIND:SPLITS",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    runs: Annotated[
        int,
        typer.Option(help="Runs of each prompt, at most.", metavar="N", rich_help_panel=SEARCH),
    ] = 10,
    seconds: Annotated[
        float,
        typer.Option(
            help="Begin no further round of runs that would end later; two always run.",
            metavar="S",
            rich_help_panel=SEARCH,
        ),
    ] = 60.0,
    max_new_tokens: Annotated[
        int,
        typer.Option(help="Per generation, at most.", metavar="N", rich_help_panel=SEARCH),
    ] = 64,
    fail_on: Annotated[
        str,
        typer.Option(
            help="What makes the exit code 1: another token, or any bit of a logit.",
            metavar="token|any",
            rich_help_panel=SEARCH,
        ),
    ] = "any",
    save: Annotated[
        Path | None,
        typer.Option(
            help="Write golden digests of tokens and logits to this file, if the runs repeated.",
            metavar="FILE",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Compare with golden digests, such as of another machine or version.",
            metavar="FILE",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Also write every run as a row (JSON lines and Parquet), a table and a figure to this new folder.",
            metavar="FOLDER",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the answer as JSON.", rich_help_panel=OUTPUT),
    ] = False,
    config: ConfigOption = None,  # noqa: ARG001 (read before parsing)
    common: CommonParameters,
) -> int:
    """Say in about a minute whether greedy outputs of a LoRA stack repeat bit for bit.

    Runs a few prompts again and again and gives the kernel in use, token flips per 1,000 tokens with a bound, changed
    bits of logits, and ties.

    Exit codes: 0 passed, 1 failed: something changed that --fail-on names, or differs from --against; 2 trouble (one
    line on stderr), also where all passed and --save found nothing that repeats.
    """
    from fliptrace.studies.check import CheckSettings, check_numbers, run_check
    from fliptrace.studies.check_folder import prepared_folder

    if server is not None:
        if demo or reduction:
            raise InputError(
                "--server checks what runs there; leave out --demo, --adapter and --reduction"
            )
        check_served(model)
        from fliptrace.studies.server_check import ServerSettings, run_server_check

        asked = ServerSettings(
            url=server,
            model=model.model,
            prompts=tuple(prompt or ()),
            rounds=runs,
            seconds=seconds,
            max_new_tokens=max_new_tokens,
            fail_on=fail_on,
        )
        check_numbers(fail_on, runs, seconds, max_new_tokens)
        with prepared_folder(out), progress_bar(common.quiet or as_json) as show:
            found = run_server_check(asked, against=against, save=save, progress=show)
        return _shown(found, as_json, out)

    if demo and (model.model or model.adapter):
        raise InputError("--demo checks the bundled model; leave out --model and --adapter")
    if not demo and not (model.model and model.adapter):
        raise InputError("give --model and --adapter, --server, or --demo (see trace-check --help)")
    on_cpu = demo and model.device == "auto"
    settings = CheckSettings(
        model=(dataclasses.replace(model, device="cpu") if on_cpu else model).settings(),
        reduction=reduction,
        prompts=tuple(prompt or ()),
        rounds=runs,
        seconds=seconds,
        max_new_tokens=max_new_tokens,
        fail_on=fail_on,
    )
    check_numbers(fail_on, runs, seconds, max_new_tokens)
    with prepared_folder(out), progress_bar(common.quiet or as_json) as show:
        found = run_check(settings, against=against, save=save, progress=show)
    return _shown(found, as_json, out)


def _shown(result: CheckResult, as_json: bool, out: Path | None) -> int:
    if out is not None:
        from fliptrace.studies.check_folder import write_check

        write_check(result, out)
    if as_json:
        show_document(result.to_json())
    else:
        from fliptrace.views.escaping import visible

        typer.echo("\n".join(map(visible, result.sentences())))
    if result.unsaved is not None:
        fail("trace-check", one_line(result.unsaved))
    if not result.passed:
        return DIVERGED
    return IDENTICAL if result.unsaved is None else TROUBLE


def main() -> None:
    """Run the command."""
    from fliptrace.command_line.trace_study import table_names

    try:
        words = with_configuration(sys.argv[1:], CHECK_TABLE, table_names())
    except InputError as error:
        fail("trace-check", one_line(str(error)))
        sys.exit(TROUBLE)
    run(trace_check, "trace-check", words)


if __name__ == "__main__":
    main()
