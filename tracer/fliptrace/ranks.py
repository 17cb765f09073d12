"""What the ranks of one execution say of one another, as a value; found by fliptrace.analysis.rank_agreement."""

from __future__ import annotations

from dataclasses import dataclass

from fliptrace.sites import Coordinate


@dataclass(frozen=True, slots=True)
class RankAgreement:
    """Whether the ranks of one execution computed the same where they must: column-parallel shrinks of equal operands.

    Attributes:
        ranks: how many there are.
        compared_rows: shrink rows with bit-equal operands on two ranks; disagreeing_rows: of these, how many differ in
            FP32; disagreeing_elements: how many coordinates of those.
        steps: in which steps.
        first: the first of them, at the rank that differs from rank 0.
    """

    ranks: int
    compared_rows: int
    disagreeing_rows: int
    disagreeing_elements: int
    steps: tuple[int, ...]
    first: Coordinate | None

    @property
    def sentence(self) -> str:
        """What people read."""
        if self.first is None:
            return (
                f"{self.ranks} ranks agree: {self.compared_rows:,} rows of column-parallel shrinks with equal operands "
                "are bit-equal"
            )
        return (
            f"ranks disagree within this one execution: {self.disagreeing_rows:,} of {self.compared_rows:,} rows of "
            f"column-parallel shrinks differ from rank 0's with equal operands, in {len(self.steps):,} "
            f"step{'s' if len(self.steps) != 1 else ''}, first at {self.first.name}"
        )
