"""What a number that a person gives must be: the same words wherever a study takes one."""

from __future__ import annotations

import math

from fliptrace.errors import InputError


def check_at_least(what: str, number: int, least: int = 1) -> None:
    """Refuse a count or a seed that is too small.

    Raises:
        InputError: it is.
    """
    if number < least:
        raise InputError(f"{what} must be at least {least}; got {number}")


def check_above_zero(what: str, number: float, otherwise: str = "") -> None:
    """Refuse an amount that is none: negative, zero, not a number, or without end.

    Args:
        what: its name and unit.
        number: what came.
        otherwise: what to do for what was probably meant.

    Raises:
        InputError: it is none.
    """
    if not (math.isfinite(number) and number > 0):
        hint = f". {otherwise}" if otherwise else ""
        raise InputError(f"{what} must be a finite number above 0; got {number}{hint}")
