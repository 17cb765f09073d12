"""The choices and help panels of trace-intervene."""

from __future__ import annotations

from enum import StrEnum

#: Headings under which --help groups options.
CLAIM, EVIDENCE, LIMITS, MODEL, OUTPUT = "Claim", "Evidence", "Limits", "Model", "Output"


class Recipient(StrEnum):
    """In whose execution values are substituted."""

    REFERENCE = "reference"
    CANDIDATE = "candidate"
    BOTH = "both"


class Continuation(StrEnum):
    """How shrinks after an edit come about; see Workbench."""

    COMPUTED = "computed"
    RECORDED = "recorded"


class Answers(StrEnum):
    """How the final answer is taken out of a continuation's text."""

    GSM8K = "gsm8k"
    NONE = "none"
