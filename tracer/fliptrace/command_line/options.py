"""The choices and help panels that options of the commands share."""

from __future__ import annotations

from enum import StrEnum

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
