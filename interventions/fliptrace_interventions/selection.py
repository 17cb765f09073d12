"""What edits select in a recorded pair, decided and counted before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from fliptrace_interventions.edits import Edit


@dataclass(frozen=True, slots=True)
class SelectedEdit:
    """What one edit selects.

    Attributes:
        edit: the edit.
        elements: how many elements; differing: how many of them the edit would change, bit by bit.
        places: for people, in execution order: ``layer 2 mlp.up_proj, prefill, 1 row of 16``.
    """

    edit: Edit
    elements: int
    differing: int
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """What edits select together.

    Attributes:
        edits: one entry per edit.
        first_step: the step with which an arm begins.
    """

    edits: tuple[SelectedEdit, ...]
    first_step: int

    @property
    def elements(self) -> int:
        """How many elements are selected."""
        return sum(selected.elements for selected in self.edits)

    @property
    def differing(self) -> int:
        """How many elements an arm with these edits would get other bits of."""
        return sum(selected.differing for selected in self.edits)

    def describe(self) -> str:
        """Say what is selected, one line per edit."""
        return "\n".join(
            f"{selected.edit.name}: {selected.elements} elements, {selected.differing} of them differ ("
            f"{'; '.join(selected.places)})"
            for selected in self.edits
        )
