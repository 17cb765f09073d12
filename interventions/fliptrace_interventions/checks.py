"""What the fields of an edit and the numbers of a proof may be.

Each check makes a field canonical, or refuses it and says what was expected.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from fliptrace.errors import InputError


def is_whole(value: Any) -> bool:
    """Tell whether a value is an int; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_step(step: Any, least: int, what: str) -> None:
    """Refuse what is no step."""
    if not is_whole(step) or step < least:
        raise InputError(f"{what} needs a step of at least {least}; got {step!r}")


def check_proof(repeats: int, shams: int, seed: int, max_new_tokens: int | None) -> None:
    """Refuse numbers with which no proof can be run; see Workbench for what they are."""
    if repeats < 2:
        raise InputError(f"a proof repeats every arm at least twice; got repeats={repeats}")
    if shams < 0 or seed < 0:
        raise InputError(f"shams and seed must not be negative; got {shams} and {seed}")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise InputError(f"max new tokens must be at least 1; got {max_new_tokens}")


def check_expect(expect: Any) -> None:
    """Refuse what counts nothing; None leaves the number open."""
    if expect is not None and (not is_whole(expect) or expect < 1):
        raise InputError(f"expect counts selected elements, at least 1; got {expect!r}")


def choose_member(edit: Any, name: str, kind: type[StrEnum], other: type | None = None) -> None:
    """Make a field a member of an enumeration, given as itself or as its text; a value of ``other`` stays."""
    chosen: Any = getattr(edit, name)
    if other is not None and isinstance(chosen, other):
        return
    if not isinstance(chosen, str) or chosen not in [*kind]:
        more = f', a number, or {{"bits": "0x3f800000"}} ({other.__name__})' if other else ""
        raise InputError(f"{name} is one of {', '.join(kind)}{more}; got {chosen!r}")
    object.__setattr__(edit, name, kind(chosen))


def listed(numbers: Any) -> tuple[Any, ...]:
    """Take any iterable; what is none gives nothing, which is refused."""
    return tuple(numbers) if isinstance(numbers, Iterable) else ()


def put_in_order(edit: Any, *names: str, sort: bool = True) -> None:
    """Make lists of numbers canonical tuples; None stays."""
    for name in names:
        numbers: Any = getattr(edit, name)
        if numbers is None:
            continue
        chosen = listed(numbers)
        if not chosen or not all(is_whole(number) and number >= 0 for number in chosen):
            raise InputError(
                f"{name} must be whole numbers from 0 on, at least one, or null for all; got {numbers!r}"
            )
        if sort:
            if len(set(chosen)) != len(chosen):
                raise InputError(f"{name} lists a number twice: {list(chosen)}")
            chosen = tuple(sorted(chosen))
        object.__setattr__(edit, name, chosen)
