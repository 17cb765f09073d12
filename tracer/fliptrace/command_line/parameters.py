"""Lets a command take a group of options as one argument: a dataclass, each of whose fields is an option."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints


def with_groups(command: Callable[..., int]) -> Callable[..., int]:
    """Return a command whose signature has, in place of each parameter that is a dataclass, that one's fields.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class Model:
    ...     model: Annotated[str, typer.Option(help="…")] = "bundled"
    >>> @with_groups
    ... def show(*, model: Model, count: int = 1) -> int: ...   # typer sees: --model, --count
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {
        name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)
    }

    @functools.wraps(command)
    def called(**given: Any) -> int:
        for name, group in groups.items():
            fields = [field.name for field in dataclasses.fields(group)]
            taken = {field: given.pop(field) for field in fields if field in given}
            given[name] = group(**taken)
        return command(**given)

    parameters = list(_expanded(command, hints))
    signature = inspect.Signature(parameters, return_annotation=int)
    called.__signature__ = signature  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": int}
    return called


def _expanded(command: Callable[..., int], hints: dict[str, Any]) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(command).parameters.values():
        group = hints[parameter.name]
        if not dataclasses.is_dataclass(group):
            yield parameter.replace(annotation=group, kind=inspect.Parameter.KEYWORD_ONLY)
            continue
        types = get_type_hints(group, include_extras=True)
        for field in dataclasses.fields(group):
            default = field.default
            yield inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
                annotation=types[field.name],
            )
