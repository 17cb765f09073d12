"""Programs in generated texts: MBPP's prompt as the paper has it, the program in an answer, and what its tests say.

Nothing here runs a program by itself: programs_scorer asks for a sandbox first.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from fliptrace.studies.sandbox.values import Limits, Outcome, Sandbox, Status

#: Rows of MBPP's full configuration that are its test split, by task_id: 500 tasks.
TEST_TASKS = range(11, 511)
_TASK = "Write a Python program for this task.\n\n"
_SETUP = "\n\nThis code runs before the tests:\n\n"
_TESTS = "\n\nIt must pass these tests:\n\n"
_ANSWER = "\n\nAnswer with the program alone, in one ```python block."
_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(?P<body>.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)


def mbpp_prompt(row: Mapping[str, Any]) -> str:
    """Return the task, optional setup code and the public tests; never the reference program.

    Raises:
        KeyError: a field is missing.
    """
    setup = str(row.get("test_setup_code") or "").strip()
    tests = "\n".join(row["test_list"])
    return f"{_TASK}{row['text']}{_SETUP + setup if setup else ''}{_TESTS}{tests}{_ANSWER}"


def program_of(text: str) -> str:
    """Return the program in an answer: the first fenced block that defines something, else the first, else all of it.

    A block that a cut answer left open ends with the text.
    """
    blocks = [found["body"] for found in _FENCE.finditer(text)]
    defining = [block for block in blocks if re.search(r"^\s*(?:def|class)\s", block, re.MULTILINE)]
    chosen = (defining or blocks or [text])[0]
    return chosen.replace("\r\n", "\n").strip() + "\n"


def with_tests(program: str, row: Mapping[str, Any]) -> str:
    """Return a program followed by a row's setup code, which may use what it defines, and the public tests."""
    setup = str(row.get("test_setup_code") or "").replace("\r\n", "\n")
    return "\n\n".join([program, setup, *row["test_list"]]) + "\n"


def program_digest(program: str) -> str:
    """Return a short digest of a program's text, which takes the place of an answer."""
    return hashlib.sha256(program.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class ProgramJudge:
    """Says whether an answer's program passes its tests; without a sandbox only which program it is."""

    def __init__(self, sandbox: Sandbox | None, limits: Limits | None = None) -> None:
        """Take a sandbox that was probed, or None to run nothing."""
        self._sandbox = sandbox
        self._limits = limits or Limits()

    def judge(self, text: str, row: Mapping[str, Any]) -> tuple[str, bool | None, str | None]:
        """Return the program's digest, whether it passes (None: it was not run), and what became of it."""
        program = program_of(text)
        digest = program_digest(program)
        if self._sandbox is None:
            return digest, None, None
        outcome: Outcome = self._sandbox.run(with_tests(program, row), self._limits)
        return digest, outcome.status is Status.PASSED, str(outcome.status)

    def describe(self) -> dict[str, Any]:
        """Return what runs programs, and under which limits."""
        if self._sandbox is None:
            return {"programs": "not run"}
        return {"programs": {**self._sandbox.describe(), "limits": self._limits.describe()}}
