"""Edits: what is put into an execution, as immutable values that turn into JSON and back.

An edit names places and where the value comes from; it holds no tensor and knows no trace. ``donor`` and ``recipient``
are relative, so one edit serves both directions. Which elements it selects in a given pair is decided by
fliptrace_interventions.selection, before anything runs.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import Any

from fliptrace.errors import InputError
from fliptrace.numerics import float32_from_bits
from fliptrace.sites import Coordinate, Site
from fliptrace.verdicts import CoordinateDifference, RowDifference
from fliptrace_interventions.checks import (
    check_expect,
    check_step,
    choose_member,
    is_whole,
    listed,
    put_in_order,
)


class Source(StrEnum):
    """Whose recorded value is put in."""

    DONOR = "donor"
    RECIPIENT = "recipient"


class CachePart(StrEnum):
    """Which part of a layer's cache.

    WHOLE is whatever a layer keeps: keys and values, recurrent state, or all of it. BOTH is keys and values. STATE is
    the recurrent state of layers that keep one.
    """

    WHOLE = "whole"
    BOTH = "both"
    KEYS = "keys"
    VALUES = "values"
    STATE = "state"


_PART_NAMES = {
    CachePart.WHOLE: "cache",
    CachePart.BOTH: "cached keys and values",
    CachePart.KEYS: "cached keys",
    CachePart.VALUES: "cached values",
    CachePart.STATE: "recurrent state",
}


@dataclass(frozen=True, slots=True)
class GivenValue:
    """One FP32 value, by its bits.

    Attributes:
        bits: 0 .. 2**32 - 1.
    """

    bits: int

    def __post_init__(self) -> None:
        """Refuse what is no pattern of 32 bits."""
        if not is_whole(self.bits) or not 0 <= self.bits < 1 << 32:
            raise InputError(f"bits of an FP32 value are 0 .. 0xffffffff; got {self.bits!r}")

    @classmethod
    def of(cls, value: float) -> GivenValue:
        """Take a number; it is rounded to the nearest FP32 value.

        Raises:
            InputError: NaN, whose payload must be given as bits, or a number beyond FP32.
        """
        try:
            if math.isnan(value):
                raise InputError('a NaN must be given by its bits, such as {"bits": "0x7fc00000"}')
            return cls(struct.unpack("<I", struct.pack("<f", value))[0])
        except (OverflowError, struct.error, TypeError) as error:
            raise InputError(f"a given value must fit FP32; got {value!r}") from error

    @property
    def value(self) -> float:
        """The value as a Python float."""
        return float32_from_bits(self.bits)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value; the bits decide, the number is for people."""
        shown = self.value if math.isfinite(self.value) else str(self.value)
        return {"bits": f"0x{self.bits:08x}", "value": shown}


#: Where a value comes from.
EditValue = Source | GivenValue


class _Shown:
    """What every edit shows of itself in a notebook."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from fliptrace.views import edit_html

        edit: Any = self
        return edit_html(edit.name, edit.to_json())


@dataclass(frozen=True, slots=True)
class ShrinkEdit(_Shown):
    """Put a value into one shrink output of one step, before expand reads it.

    Attributes:
        site: the site's path.
        step: 0 for the prefill.
        positions: absolute token positions of the rows, None for all rows of the step.
        rank_indices: which elements of each row, None for all.
        value: whose recorded value, or one FP32 value for every selected element.
        slice: of a fused site, where the engine has such; None where each projection is a site of its own.
        expect: how many elements must be selected; None leaves it open.
    """

    site: str
    step: int
    positions: tuple[int, ...] | None = None
    rank_indices: tuple[int, ...] | None = None
    value: EditValue = Source.DONOR
    slice: str | None = None
    expect: int | None = None

    def __post_init__(self) -> None:
        """Put lists in order and refuse what can select nothing."""
        site: Any = self.site
        if not isinstance(site, str) or not site:
            raise InputError(f"a shrink edit needs the path of a site; got {site!r}")
        if self.slice is not None and not isinstance(self.slice, str):
            raise InputError(f"a slice is named by text, or null; got {self.slice!r}")
        choose_member(self, "value", Source, GivenValue)
        check_step(self.step, 0, "a shrink edit")
        put_in_order(self, "positions", "rank_indices")
        check_expect(self.expect)

    @classmethod
    def of_row(cls, row: RowDifference, value: EditValue = Source.DONOR) -> ShrinkEdit:
        """Substitute a differing row whole."""
        return cls(row.site.path, row.step, (row.position,), value=value, slice=row.site.slice)

    @classmethod
    def of_coordinate(
        cls, where: Coordinate | CoordinateDifference, value: EditValue = Source.DONOR
    ) -> ShrinkEdit:
        """Substitute one coordinate."""
        place = where if isinstance(where, Coordinate) else where.coordinate
        return cls(
            place.site.path,
            place.step,
            (place.position,),
            (place.rank_index,),
            value,
            place.site.slice,
            expect=1,
        )

    @property
    def first_step(self) -> int:
        """The step in which it acts first."""
        return self.step

    @property
    def name(self) -> str:
        """The name that people read."""
        site = Site.from_path(self.site, slice=self.slice)
        words = [f"shrink of {site.name}", _phase(self.step)]
        if self.positions is not None:
            words.append(f"token position {_listed(self.positions)}")
        if self.rank_indices is not None:
            words.append(f"rank index {_listed(self.rank_indices)}")
        return ", ".join(words) + f" := {_value_name(self.value)}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value."""
        return _to_json("shrink", self)


@dataclass(frozen=True, slots=True)
class CacheEdit(_Shown):
    """Put values into the cache before a step.

    Attributes:
        step: the step that reads the edited cache first. Before step 0 there is none: such an edit is not applicable.
        layers: which cache layers, None for all.
        part: whatever the layers keep, keys, values, both, or recurrent state.
        positions: absolute token positions, None for all that the cache holds at that step. Positions, heads and
            dimensions select keys and values only: recurrent state is put in whole.
        heads: which key/value heads, None for all.
        dimensions: which elements of a head, None for all.
        value: whose recorded value, or one value for every selected element; it must be one of the type that is cached.
        expect: how many elements must be selected; None leaves it open.
    """

    step: int
    layers: tuple[int, ...] | None = None
    part: CachePart = CachePart.WHOLE
    positions: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    dimensions: tuple[int, ...] | None = None
    value: EditValue = Source.DONOR
    expect: int | None = None

    def __post_init__(self) -> None:
        """Put lists in order and refuse what can select nothing."""
        choose_member(self, "value", Source, GivenValue)
        choose_member(self, "part", CachePart)
        check_step(self.step, 0, "a cache edit")
        put_in_order(self, "layers", "positions", "heads", "dimensions")
        check_expect(self.expect)

    @property
    def first_step(self) -> int:
        """The step in which it acts first."""
        return self.step

    @property
    def name(self) -> str:
        """The name that people read."""
        words = [f"{_PART_NAMES[self.part]} before step {self.step}"]
        for label, chosen in (
            ("layer", self.layers),
            ("token position", self.positions),
            ("head", self.heads),
            ("dimension", self.dimensions),
        ):
            if chosen is not None:
                words.append(f"{label} {_listed(chosen)}")
        return ", ".join(words) + f" := {_value_name(self.value)}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value."""
        return _to_json("cache", self)


@dataclass(frozen=True, slots=True)
class ReplayShrinks(_Shown):
    """Hand over every shrink of some steps as one trace recorded it.

    Attributes:
        trace: whose.
        steps: first and last step, both included; None for every step of the arm.
    """

    trace: Source = Source.DONOR
    steps: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Refuse an empty range."""
        choose_member(self, "trace", Source)
        if self.steps is not None:
            put_in_order(self, "steps", sort=False)
            steps: tuple[int, ...] = self.steps
            if len(steps) != 2 or steps[1] < steps[0]:
                raise InputError(f"steps are first and last; got {list(steps)}")

    @property
    def first_step(self) -> int:
        """The step in which it acts first."""
        return 0 if self.steps is None else self.steps[0]

    @property
    def name(self) -> str:
        """The name that people read."""
        if self.steps is None:
            return f"all shrinks := the {self.trace}'s"
        first, last = self.steps
        where = _phase(first) if first == last else f"steps {first} to {last}"
        return f"all shrinks of {where} := the {self.trace}'s"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value."""
        return {
            "edit": "replay",
            "trace": self.trace.value,
            "steps": None if self.steps is None else list(self.steps),
        }


@dataclass(frozen=True, slots=True)
class ForcedTokens(_Shown):
    """Feed other tokens than the recorded ones.

    Attributes:
        from_step: the step whose generated token is replaced first; the step after it is the first to read it.
        token_ids: the tokens of that step and those after it.
    """

    from_step: int
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse no tokens at all."""
        check_step(self.from_step, 0, "forced tokens")
        ids = listed(self.token_ids)
        if not ids or not all(is_whole(token) and token >= 0 for token in ids):
            raise InputError(f"forced tokens are token ids, at least one; got {self.token_ids!r}")
        object.__setattr__(self, "token_ids", ids)

    @property
    def first_step(self) -> int:
        """The step in which it acts first."""
        return self.from_step + 1

    @property
    def name(self) -> str:
        """The name that people read."""
        last = self.from_step + len(self.token_ids) - 1
        where = f"step {last}" if last == self.from_step else f"steps {self.from_step} to {last}"
        return f"tokens of {where} := {_listed(self.token_ids)}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value."""
        return {
            "edit": "tokens",
            "from_step": self.from_step,
            "token_ids": list(self.token_ids),
        }


#: Any edit.
Edit = ShrinkEdit | CacheEdit | ReplayShrinks | ForcedTokens

_KINDS: Mapping[str, type[Edit]] = {
    "shrink": ShrinkEdit,
    "cache": CacheEdit,
    "replay": ReplayShrinks,
    "tokens": ForcedTokens,
}


def edits_to_json(edits: Iterable[Edit]) -> list[dict[str, Any]]:
    """Return edits as a JSON list."""
    return [edit.to_json() for edit in edits]


def edits_from_json(document: Any) -> tuple[Edit, ...]:
    """Read edits: one object, a list of them, or ``{"edits": [...]}``.

    Raises:
        InputError: something is no edit; the message names the entry and what was expected.
    """
    if isinstance(document, Mapping) and "edits" in document:
        document = document["edits"]
    if isinstance(document, Mapping):
        document = [document]
    if not isinstance(document, list) or not document:
        raise InputError(
            "edits are a JSON object with the key 'edit', or a list of at least one of them; "
            f"got {type(document).__name__}"
        )
    return tuple(_edit_from_json(number, entry) for number, entry in enumerate(document))


def _edit_from_json(number: int, entry: Any) -> Edit:
    kinds = [*_KINDS]  # a list looks for what cannot be hashed, too
    if not isinstance(entry, Mapping) or entry.get("edit") not in kinds:
        raise InputError(
            f"edit {number} must be an object whose key 'edit' is one of {', '.join(_KINDS)}; got {entry!r}"
        )
    kind = _KINDS[entry["edit"]]
    known = {item.name for item in fields(kind)}
    unknown = sorted(set(entry) - known - {"edit"})
    if unknown:
        raise InputError(
            f"edit {number} ({entry['edit']}) has no {unknown[0]!r}; it takes {', '.join(sorted(known))}"
        )
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in entry]
    if missing:
        raise InputError(f"edit {number} ({entry['edit']}) needs {' and '.join(missing)}")
    try:
        return kind(**{name: _from_json(name, entry[name]) for name in known if name in entry})
    except (InputError, ValueError, TypeError) as error:
        raise InputError(f"edit {number} ({entry['edit']}): {error}") from error


def _from_json(name: str, value: Any) -> Any:
    if name == "value":
        return _value_from_json(value)
    return tuple(value) if isinstance(value, list) else value


def _value_from_json(value: Any) -> Any:
    """Read numbers and bits; what is none of these is left to the edit, which refuses it."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return GivenValue.of(value)
    if isinstance(value, Mapping) and "bits" in value:
        bits = value["bits"]
        return GivenValue(int(bits, 16) if isinstance(bits, str) else bits)
    return Source(value) if isinstance(value, str) and value in [*Source] else value


def _to_json(kind: str, edit: ShrinkEdit | CacheEdit) -> dict[str, Any]:
    document: dict[str, Any] = {"edit": kind}
    for item in fields(edit):
        value = getattr(edit, item.name)
        if isinstance(value, GivenValue):
            value = value.to_json()
        elif isinstance(value, StrEnum):
            value = value.value
        document[item.name] = list(value) if isinstance(value, tuple) else value
    return document


def _phase(step: int) -> str:
    return "prefill" if step == 0 else f"step {step}"


def _listed(numbers: Sequence[int]) -> str:
    """List a few numbers; of many the first ones and the count."""
    shown = ", ".join(map(str, numbers[:4]))
    return shown if len(numbers) <= 4 else f"{shown} … ({len(numbers)} of them)"


def _value_name(value: EditValue) -> str:
    return f"the {value}'s" if isinstance(value, Source) else f"{value.value!r}"
