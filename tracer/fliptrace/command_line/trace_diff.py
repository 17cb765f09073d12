"""trace-diff: compare two stored traces; no model is needed."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fliptrace.command_line.running import exit_code, progress_bar, run


class FailOn(StrEnum):
    """What makes a command exit with 1."""

    TOKEN = "token"
    SURVIVING = "surviving"
    ANY = "any"


class RoundTo(StrEnum):
    """At whose boundary survival is decided."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def trace_diff(
    reference: Annotated[Path, typer.Argument(help="The reference's trace file.")],
    candidate: Annotated[Path, typer.Argument(help="The candidate's trace file.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Write report.html, report.json and copies of both traces here."),
    ] = None,
    round_to: Annotated[
        RoundTo | None,
        typer.Option(
            help="Decide survival at this type's rounding boundary instead of the model's."
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="First check every stored byte and digest of both files."),
    ] = False,
    fail_on: Annotated[FailOn, typer.Option(help="What makes the exit code 1.")] = FailOn.TOKEN,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print report.json instead of the summary.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,  # noqa: ARG001 (read by run)
) -> int:
    """Compare two stored traces bit by bit and name the first difference that survives the 16-bit rounding.

    Exit codes: 0 identical up to --fail-on, 1 diverged, 2 trouble, 3 void.
    """
    from fliptrace.errors import TraceCorruptError
    from fliptrace.pair.pair import Pair, require_new
    from fliptrace.store import open_trace, verify_trace
    from fliptrace.views import terminal_summary

    if out is not None:
        require_new(out)
    if verify:
        for path in (reference, candidate):
            findings = verify_trace(path)
            if findings:
                more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
                raise TraceCorruptError(findings[0] + more)
    command = f"trace-diff {reference} {candidate}"
    with (
        progress_bar(quiet or as_json) as show,
        open_trace(reference) as first,
        open_trace(candidate) as second,
    ):
        pair = Pair(
            first,
            second,
            rounded_dtype=str(round_to) if round_to else None,
            progress=lambda done, total: show("comparing", done, total),
        )
        page = pair.save(out, command=command) if out is not None else None
        if as_json:
            typer.echo(json.dumps(pair.to_json(command), indent=1))
        else:
            Console().print(terminal_summary(pair.diff, first, second))
            if page is not None:
                typer.echo(f"The report is {page}")
        return exit_code(pair.diff.outcome, str(fail_on))


def main() -> None:
    """Run the command."""
    run(trace_diff, "trace-diff")


if __name__ == "__main__":
    main()
