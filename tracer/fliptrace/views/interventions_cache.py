"""Which layer's cache, and whether its keys or its values, are enough or needed: a picture made of a table's cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fliptrace.judgements import Judgement

if TYPE_CHECKING:
    from fliptrace.judgements import CachePartNeed, Investigation, LayerNeed

_ANSWERS = {True: "yes", False: "no", None: "not run"}
_WHOLE = "keys and values"
#: Column of all layers that differ, together.
_ALL = -1


@dataclass(frozen=True, slots=True)
class CacheCell:
    """One part of the cache.

    Attributes:
        alone: ``yes``, ``no`` or ``not run``: the donor's part alone gives the donor's token.
        needed: likewise: with all the rest from the donor and this part not, the donor's token is not reached.
        words: the same in words, with the part's name.
    """

    alone: str
    needed: str
    words: str

    @property
    def signs(self) -> str:
        """✓ for enough alone, ◆ for needed, · for neither, nothing where it was not run."""
        signs = ("✓" if self.alone == "yes" else "") + ("◆" if self.needed == "yes" else "")
        if signs or (self.alone == "not run" and self.needed == "not run"):
            return signs
        return "·"


@dataclass(frozen=True, slots=True)
class CachePicture:
    """The picture in one execution.

    Attributes:
        recipient: in whose execution the donor's parts were put.
        columns: ``all``, then layers.
        rows: (what, a cell per column).
    """

    recipient: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[CacheCell, ...]], ...]


def cache_pictures(found: Investigation) -> tuple[CachePicture, ...]:
    """Return a picture per direction that was run; none where no layer was tried."""
    recipients = dict.fromkeys(
        [layer.recipient for layer in found.layers] + [part.recipient for part in found.cache_parts]
    )
    return tuple(_picture(found, recipient) for recipient in recipients)


def _picture(found: Investigation, recipient: str) -> CachePicture:
    layers = [layer for layer in found.layers if layer.recipient == recipient]
    parts = [part for part in found.cache_parts if part.recipient == recipient]
    numbers = sorted(
        {layer.layer for layer in layers}
        | {part.layers[0] for part in parts if len(part.layers) == 1}
    )
    cells = {(_WHOLE, layer.layer): _cell(layer, f"layer {layer.layer}") for layer in layers}
    for part in parts:
        column = part.layers[0] if len(part.layers) == 1 else _ALL
        where = f"layer {column}" if column != _ALL else "all layers"
        cells[part.part, column] = _cell(part, f"{part.part} of {where}")
    whole = _whole_cache(found, recipient)
    if whole is not None:
        cells[_WHOLE, _ALL] = whole
    nothing = CacheCell("not run", "not run", "not run")
    columns = [_ALL, *numbers]
    return CachePicture(
        recipient,
        ("all", *(str(number) for number in numbers)),
        tuple(
            (what, tuple(cells.get((what, column), nothing) for column in columns))
            for what in (_WHOLE, "keys", "values")
            if any((what, column) in cells for column in columns)
        ),
    )


def _cell(need: LayerNeed | CachePartNeed, name: str) -> CacheCell:
    alone, needed = _ANSWERS[need.sufficient_alone], _ANSWERS[need.needed]
    return CacheCell(alone, needed, f"{name}: enough alone: {alone}; needed: {needed}")


def _whole_cache(found: Investigation, recipient: str) -> CacheCell | None:
    verdict = found.cache_substitution
    results = [] if verdict is None else verdict.directions
    for result in results:
        if result.recipient == recipient and result.edited is not None:
            enough = _ANSWERS[result.judgement is Judgement.SUFFICIENT]
            if result.judgement is Judgement.VOID:
                enough = _ANSWERS[None]
            return CacheCell(enough, "not run", f"the whole cache: enough: {enough}")
    return None
