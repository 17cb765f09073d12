"""The choices, help panels and whole options that the commands share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from fliptrace.command_line.running import show_version

#: Headings under which --help groups options.
MODEL, PROMPT, SEARCH, RECORDING, COMPARISON, OUTPUT = (
    "Model",
    "Prompt",
    "Search",
    "Recording",
    "Comparison",
    "Output",
)


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


class EngineName(StrEnum):
    """Which engine runs the model."""

    AUTO = "auto"
    TRANSFORMERS = "transformers"
    VLLM = "vllm"


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


JsonOption = Annotated[
    bool,
    typer.Option(
        "--json", help="Print report.json instead of the summary.", rich_help_panel=OUTPUT
    ),
]
FiguresOption = Annotated[
    str | None,
    typer.Option(
        help="Also write pictures for papers and tickets into the folder figures/: svg, pdf, png, separated by "
        "commas.",
        metavar="FORMATS",
        rich_help_panel=OUTPUT,
    ),
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", help="No progress on stderr.", rich_help_panel=OUTPUT)
]
#: Read by running.run from the command line itself, so that it holds for what goes wrong before a command starts.
DebugOption = Annotated[
    bool, typer.Option("--debug", help="Show tracebacks and warnings.", rich_help_panel=OUTPUT)
]
#: Its callback answers.
VersionOption = Annotated[
    bool, typer.Option("--version", help="Show the version.", callback=show_version, is_eager=True)
]
