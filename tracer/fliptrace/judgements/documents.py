"""Values that turn into JSON and back without loss."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Self

from fliptrace.displays import html_of
from fliptrace.errors import InputError
from fliptrace.verdicts import as_json

#: The version of these values' JSON; a document of another version is refused.
SCHEMA_VERSION = 1


class Value:
    """A value that turns into JSON and back."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Show itself in a notebook."""
        return html_of(self)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; floats that JSON lacks become strings ("NaN", "Infinity")."""
        document: dict[str, Any] = as_json(self)
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` returned.

        Raises:
            InputError: it is no such document.
        """
        try:
            value: Self = _read(cls, document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"a {cls.__name__} written by this version of fliptrace was expected ({error!r} while reading it); "
                "run the experiment again to write a new one"
            ) from error
        return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read(kind: Any, value: Any) -> Any:
    """Read a JSON value as the annotated type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or origin is dict:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        return _read(inner, value)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return tuple(_read(arguments[0], item) for item in value)
        return tuple(_read(inner, item) for inner, item in zip(arguments, value, strict=True))
    if is_dataclass(kind):
        hints = _hints(typing.cast(type, kind))
        if value.get("schema", SCHEMA_VERSION) != SCHEMA_VERSION:
            raise ValueError(f"schema {value['schema']}; this version reads {SCHEMA_VERSION}")
        return typing.cast(Any, kind)(
            **{item.name: _read(hints[item.name], value[item.name]) for item in fields(kind)}
        )
    if isinstance(kind, type) and issubclass(kind, (Enum, float)):
        return kind(value)
    if not isinstance(value, kind):
        raise TypeError(f"{kind.__name__} expected, got {value!r}")
    return value
