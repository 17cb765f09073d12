"""Items of work and rows: what a study does and what comes of it, as plain JSON values.

One item gives one row. A row holds only what the computation gave, nothing of when or where it ran, so that a study
that was killed and resumed, or spread over workers, has the rows of an unbroken one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: A row: ``item`` and ``key`` of its item, then the study's own columns.
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """One piece of work.

    Attributes:
        id: its name, unique within the study and the same in every sitting.
        arguments: JSON values; with the study's settings they decide the row.
    """

    id: str
    arguments: Mapping[str, Any]

    @property
    def key(self) -> str:
        """A digest of the arguments: a row of the same id but another key came of other work."""
        return hashlib.sha256(canonical_json(dict(self.arguments)).encode()).hexdigest()[:16]

    def row(self, values: Mapping[str, Any]) -> Row:
        """Return the row of this item."""
        return {"item": self.id, "key": self.key, **values}


def canonical_json(value: Any) -> str:
    """Serialise so that equal values are equal text."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False)


def row_line(row: Row) -> str:
    """Serialise a row as one line; floats come back with the same bits."""
    return json.dumps(row, ensure_ascii=True, allow_nan=False) + "\n"
