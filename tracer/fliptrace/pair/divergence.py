"""The first surviving difference, as something a notebook can show."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fliptrace.verdicts import RowDifference


@dataclass(frozen=True, slots=True)
class Divergence(RowDifference):
    """The row at which two executions first differ in a way that survives rounding; see RowDifference."""

    @classmethod
    def of(cls, row: RowDifference) -> Divergence:
        """Take over a row that the comparison found."""
        return cls(**{field.name: getattr(row, field.name) for field in fields(RowDifference)})

    def _repr_html_(self) -> str:
        """Show itself in a notebook."""
        from fliptrace.views import row_html

        return row_html(self)
