"""trace-diff: compare two stored traces; no model is needed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from fliptrace.command_line.options import (
    COMPARISON,
    OUTPUT,
    DebugOption,
    FailOn,
    FiguresOption,
    JsonOption,
    QuietOption,
    RoundTo,
    VersionOption,
)
from fliptrace.command_line.output import (
    figure_formats,
    show_document,
    show_summary,
    write_pictures,
)
from fliptrace.command_line.running import exit_code, progress_bar, run


def trace_diff(
    reference: Annotated[Path, typer.Argument(help="The reference's trace file.")],
    candidate: Annotated[Path, typer.Argument(help="The candidate's trace file.")],
    round_to: Annotated[
        RoundTo | None,
        typer.Option(
            help="Decide what survives at this type's rounding boundary instead of the model's.",
            rich_help_panel=COMPARISON,
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="First check every stored byte of both files.",
            rich_help_panel=COMPARISON,
        ),
    ] = False,
    across_engines: Annotated[
        bool,
        typer.Option(
            "--across-engines",
            help="Compare traces of two engines, too: different computations, so no difference is a root.",
            rich_help_panel=COMPARISON,
        ),
    ] = False,
    fail_on: Annotated[
        FailOn, typer.Option(help="What makes the exit code 1.", rich_help_panel=COMPARISON)
    ] = FailOn.TOKEN,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write report.html, report.json and copies of both traces into this new folder.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    figures: FiguresOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,  # noqa: ARG001 (read by run)
    version: VersionOption = False,  # noqa: ARG001 (its callback answers)
) -> int:
    """Compare two stored traces bit by bit and name the first difference that survives the 16-bit rounding.

    No model is needed.

    Exit codes: 0 no difference of the kind that --fail-on names, 1 there is one, 2 trouble (one line on stderr).
    """
    from fliptrace.errors import InputError, TraceCorruptError
    from fliptrace.pair.pair import Pair, require_new
    from fliptrace.store import open_trace, verify_trace

    formats = figure_formats(figures)
    if out is not None:
        require_new(out)
    elif formats:
        raise InputError("--figures needs a folder to write into; name a new one with --out")
    if verify:
        for path in (reference, candidate):
            findings = verify_trace(path)
            if findings:
                more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
                raise TraceCorruptError(findings[0] + more)
    command = shlex.join(["trace-diff", *sys.argv[1:]])
    with open_trace(reference) as first, open_trace(candidate) as second:
        with progress_bar(quiet or as_json) as show:
            pair = Pair(
                first,
                second,
                rounded_dtype=str(round_to) if round_to else None,
                across_engines=across_engines,
                progress=lambda done, total: show("comparing", done, total),
            )
            page = None
            if out is not None:
                page = pair.save(out, command=command)
                write_pictures(pair, out, formats)
        if as_json:
            show_document(pair.to_json(command))
        else:
            show_summary(pair)
            if page is not None:
                typer.echo(f"\nThe report is {page}")
        return exit_code(pair.diff.outcome, str(fail_on))


def main() -> None:
    """Run the command."""
    run(trace_diff, "trace-diff")


if __name__ == "__main__":
    main()
