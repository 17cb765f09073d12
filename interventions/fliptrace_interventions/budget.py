"""How much a search may spend, counted in runs or minutes, and what it has spent.

A run is one edited continuation. Unedited arms are shared by all runs that start at the same place and are not counted;
nor is the reconstruction, without which nothing that follows would mean anything. What a journal already holds counts
as spent: a budget is that of the whole search, not of one sitting, so a resumed search ends where an undisturbed one
would have ended.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from fliptrace.errors import FliptraceError, InputError

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(runs?|minutes?|min|m|hours?|h|seconds?|s)?")
_MINUTES = {"m": 1.0, "h": 60.0, "s": 1 / 60}


class BudgetSpentError(FliptraceError):
    """Raised when a search may not start another run; every search turns it into a partial result that says so."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a search may spend at the most.

    Attributes:
        runs: how many runs, None for any number.
        minutes: how much time running, None for any.
    """

    runs: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        """Refuse what allows nothing."""
        if self.runs is not None and self.runs < 1:
            raise InputError(f"a budget of runs is at least 1; got {self.runs}")
        if self.minutes is not None and not (math.isfinite(self.minutes) and self.minutes > 0):
            raise InputError(f"a budget of minutes is more than 0; got {self.minutes}")

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read what a person wrote: ``200 runs``, ``200``, ``15 minutes``, ``15m``, ``300 runs, 1h``.

        Raises:
            InputError: anything else.
        """
        runs: int | None = None
        minutes: float | None = None
        for part in text.lower().split(","):
            match = _AMOUNT.fullmatch(part.strip())
            unit = (match.group(2) or "runs")[0] if match else ""
            if match is None or (unit == "r" and not match.group(1).isdecimal()):
                raise InputError(
                    f"a budget is a number of runs or a time, such as 200 runs or 15 minutes; got {text!r}"
                )
            if unit == "r":
                runs = int(match.group(1))
            else:
                minutes = float(match.group(1)) * _MINUTES[unit]
        return cls(runs, minutes)

    def __str__(self) -> str:
        """Say it in words: ``200 runs``, ``15 minutes``, ``no limit``."""
        parts = []
        if self.runs is not None:
            parts.append(f"{self.runs} run{'s' if self.runs != 1 else ''}")
        if self.minutes is not None:
            parts.append(f"{self.minutes:g} minute{'s' if self.minutes != 1 else ''}")
        return " and ".join(parts) or "no limit"


class Spending:
    """What a search has spent of its budget so far."""

    def __init__(self, budget: Budget | None = None) -> None:
        """Start with nothing spent; no budget means no limit."""
        self.budget = budget or Budget()
        self.runs = 0
        self.seconds = 0.0

    def add(self, runs: int, seconds: float) -> None:
        """Count what was spent, now or in an earlier sitting."""
        self.runs += runs
        self.seconds += seconds

    def require(self, runs: int = 1) -> None:
        """Ask before something is started.

        Args:
            runs: how many runs it takes.

        Raises:
            BudgetSpentError: the budget has no room for it.
        """
        limit, minutes = self.budget.runs, self.budget.minutes
        if limit is not None and self.runs + runs > limit:
            needed = "another run" if runs == 1 else f"{runs} more runs"
            raise BudgetSpentError(
                f"the budget of {self.budget} has no room for {needed}: {self.runs} were spent"
            )
        if minutes is not None and self.seconds >= minutes * 60:
            raise BudgetSpentError(
                f"the budget of {self.budget} is spent: {self.seconds / 60:.1f} minutes in {self.runs} runs"
            )
