"""What a comparison of two traces found, as plain values: the language between analysis, views and the command line.

Nothing here computes; fliptrace.analysis fills these values and fliptrace.views shows them. Each has ``to_json`` for
report.json (schema: fliptrace/views/report.schema.json).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum, StrEnum
from typing import Any

import torch
from torch import Tensor

from fliptrace.chart import PropagationChart
from fliptrace.displays import html_of
from fliptrace.grids import Grid
from fliptrace.numerics import BoundaryReport, CoordinateClass, SpecialDifference
from fliptrace.ranks import RankAgreement
from fliptrace.sites import Coordinate, Site


class Origin(StrEnum):
    """Where a differing record row got its difference from."""

    ROOT = "root"
    INHERITED = "inherited"
    CONFIGURATION_VARIANT = "configuration-variant"
    UNLOCATED = "unlocated"


class Fate(StrEnum):
    """What became of a surviving root row at the end of its own projection."""

    PROPAGATING = "propagating"
    ABSORBED = "absorbed"
    NOT_OBSERVED = "not observed"


class Outcome(StrEnum):
    """The verdict on a pair, from best to worst news. Compared up to and including the flip step, or to the end."""

    IDENTICAL = "identical"
    LATENT = "latent differences only"
    SURVIVING = "surviving differences, same tokens"
    TOKEN = "token flipped"


#: What counts as a difference, from the strictest to the laxest, as ``--fail-on`` says it.
LEVELS: Mapping[str, frozenset[Outcome]] = {
    "token": frozenset((Outcome.TOKEN,)),
    "surviving": frozenset((Outcome.TOKEN, Outcome.SURVIVING)),
    "any": frozenset((Outcome.TOKEN, Outcome.SURVIVING, Outcome.LATENT)),
}


@dataclass(frozen=True, slots=True)
class CoordinateDifference:
    """One coordinate whose FP32 bits differ.

    Attributes:
        coordinate: where.
        reference: FP32 value of the reference; candidate likewise.
        reference_bits: its 32 bits as ``0x........``.
        coordinate_class: LATENT or SURVIVING.
        rounded_dtype: the type that the consumer rounds to, ``bfloat16``.
        rounded_reference_bits: the bits after rounding, ``0x....``.
        distance_ulp: distance of the FP32 values in FP32 ULP.
        boundary: how both lie to the rounding boundary.
        special: sign of zero or NaN payload, else None.
    """

    coordinate: Coordinate
    reference: float
    candidate: float
    reference_bits: str
    candidate_bits: str
    coordinate_class: CoordinateClass
    rounded_dtype: str
    rounded_reference_bits: str
    rounded_candidate_bits: str
    distance_ulp: int
    boundary: BoundaryReport
    special: SpecialDifference | None = None


@dataclass(frozen=True, slots=True)
class RowDifference:
    """One differing token row of a shrink record (the unit on which an origin is decided).

    Attributes:
        site: where; step, position: which row.
        order: the record's place in execution order within its step.
        origin: decided on this row's own operands.
        row_class: the worst class among the row's coordinates.
        fate: for surviving rows, what the projection's output row shows.
        latent: how many coordinates are latent; surviving likewise.
        coordinates: the surviving coordinates; for a row without any, its first latent one. At most 64, the rest
            counted.
    """

    site: Site
    step: int
    position: int
    order: int
    origin: Origin
    row_class: CoordinateClass
    fate: Fate
    latent: int
    surviving: int
    coordinates: tuple[CoordinateDifference, ...]

    @property
    def name(self) -> str:
        """The name that people read."""
        phase = "prefill" if self.step == 0 else f"step {self.step}"
        return f"{self.site.name}, {phase}, token position {self.position}"


@dataclass(frozen=True, slots=True)
class ForeignRoot:
    """The first difference that entered somewhere other than a shrink.

    Attributes:
        key: the record's key: an operation (``model.layers.0.self_attn/scaled_dot_product_attention#0``), a module, or
            the place at which it was first seen.
        kind: ``operation``, ``module``, ``operand``, ``projection`` (the base projection or the expand), ``cache``,
            ``state`` (a recurrent state), ``logits``, or ``token`` (equal logits, other choice).
        step: which step; position: first differing row's absolute position, -1 when the record has no token rows.
        origin: ROOT when its inputs were observed equal, UNLOCATED when what feeds it was not recorded.
        explanation: one sentence for people: what was seen, and what to run to see more.
        before_order: it entered before the shrink record of this order in its step (RowDifference.order).
    """

    key: str
    kind: str
    step: int
    position: int
    origin: Origin
    explanation: str
    before_order: int = 0

    def precedes(self, row: RowDifference | None) -> bool:
        """Say whether it entered before a shrink row in execution order; True without a row."""
        return row is None or (self.step, self.before_order) <= (row.step, row.order)


@dataclass(frozen=True, slots=True)
class TokenLogit:
    """A token with its logit in both executions (None where it was not recorded)."""

    token_id: int
    text: str
    reference_logit: float | None
    candidate_logit: float | None


@dataclass(frozen=True, slots=True)
class Flip:
    """The first step at which the executions chose different tokens.

    Attributes:
        step: the step (generated token ``step``, 0-based).
        reference_token: the reference's choice with its logit in both executions; candidate_token likewise.
        reference_margin: largest minus second largest logit; 0.0 is a tie. candidate_margin likewise.
        reference_tied: how many tokens share the largest logit exactly in the reference (1: no tie).
        decided_by_tie_break: the executions in which the token was chosen among exact equals: "reference", "candidate".
        tie_rule: the sampler's rule ("lowest token id").
        tokens_after: how many tokens each execution generated from the flip on: (reference, candidate).
    """

    step: int
    reference_token: TokenLogit
    candidate_token: TokenLogit
    reference_margin: float
    candidate_margin: float
    reference_tied: int
    candidate_tied: int
    decided_by_tie_break: tuple[str, ...]
    tie_rule: str
    tokens_after: tuple[int, int]


@dataclass(frozen=True, slots=True)
class CacheDifference:
    """How many key and value elements of one cache layer differ among the rows written in one step."""

    layer: int
    step: int
    keys: int
    values: int
    elements: int
    positions: tuple[int, ...]
    largest: float


@dataclass(frozen=True, slots=True)
class StateDifference:
    """How many elements of one tensor of a layer's recurrent state differ after a step.

    There is no rounding boundary to tell of: the state is kept in ``dtype``, and each differing element is real. Where
    a step's digests alone were kept it is known that some element differs, and the other numbers are None.
    """

    layer: int
    step: int
    name: str
    differing: int | None
    elements: int | None
    dtype: str | None
    largest: float | None


@dataclass(frozen=True, slots=True)
class StepComparison:
    """One step of both executions, side by side; input tokens are equal up to and including the flip step.

    Attributes:
        reference_margin: top-2 margin; candidate_margin likewise.
        reference_tied: tokens sharing the largest logit; candidate_tied likewise.
        logits_differ: the digests of the whole logits rows differ; None where not recorded.
        largest_logit_difference: over the tokens recorded in both top lists, None where there are none.
        shrink_latent: latent coordinates over all shrinks of the step; shrink_surviving likewise.
        shrink_elements: coordinates compared.
        cache_differs: some key or value element written in this step differs.
    """

    step: int
    reference_margin: float
    candidate_margin: float
    reference_tied: int
    candidate_tied: int
    logits_differ: bool | None
    largest_logit_difference: float | None
    shrink_latent: int
    shrink_surviving: int
    shrink_elements: int
    cache_differs: bool


@dataclass(frozen=True, slots=True)
class PropagationSummary:
    """Where the first surviving propagating root went, in sentences and in numbers.

    Attributes:
        sentences: for people, in order.
        nodes: differing records in the graph (before pruning).
        reaches_flip: a path of differing records leads from the root to the flip's logits; None without root or flip.
        path: the records of one shortest path to the flip, as names: from the root, or, where it does not reach the
            flip, from the first root that does.
        separable: False where operands were kept as digests only, so that "added here" cannot be told from "inherited".
        leading: the first root whose rows lead to the flip, or without a flip to keys or values of that step, where
            those of the root that is followed do not.
    """

    sentences: tuple[str, ...]
    nodes: int
    reaches_flip: bool | None
    path: tuple[str, ...]
    separable: bool
    leading: RowDifference | None = None


#: What Coverage.not_observed says where a trace was compared with itself.
ONE_FILE = "A second execution: both traces are the same file."


@dataclass(frozen=True, slots=True)
class Coverage:
    """What was compared and what was not.

    Attributes:
        steps_compared: steps whose records were compared (up to and including the flip).
        records_compared: how many records; elements_compared: how many FP32 shrink coordinates.
        not_observed: sentences, each one thing that the traces do not cover.
        missing: sentences on what was not compared, or ran in another way: records that one trace has and the other
            lacks, steps with other input tokens, other launches.
        observer_control: one sentence: what the recorded-against-unrecorded control showed, or that it was not run.
    """

    steps_compared: int
    records_compared: int
    elements_compared: int
    not_observed: tuple[str, ...]
    missing: tuple[str, ...]
    observer_control: str

    @property
    def of_one_file(self) -> bool:
        """One recording was compared with itself."""
        return ONE_FILE in self.not_observed


@dataclass(frozen=True, slots=True)
class ShrinkStatistics:
    """Counts over the coordinates of rows whose operands were bit-equal, and over all.

    Attributes:
        equal_operand_elements: coordinates in rows with equal operands; equal_operand_differing: of these, how many
            differ in FP32; equal_operand_surviving: of these, how many survive rounding.
        elements, differing, surviving: the same over all compared rows.
    """

    equal_operand_elements: int
    equal_operand_differing: int
    equal_operand_surviving: int
    elements: int
    differing: int
    surviving: int


@dataclass(frozen=True, eq=False, repr=False)
class PairDiff:
    """Everything that the comparison of two traces found.

    Attributes:
        outcome: the verdict.
        same_reduction: both executions used one reduction; without it there are no roots.
        rounded_dtype: the type at whose boundary survival was decided, ``bfloat16``; ``float32``: the model has none.
        flip: the first differing token, None when all tokens are equal.
        first_difference: the first differing shrink row in execution order, latent ones included.
        first_surviving: the first surviving root row, propagating or not.
        first_propagating: the first surviving root row that is propagating: the answer to "where did it start".
        first_variant: the first configuration-variant row (another reduction or launch), latent ones included.
        foreign_root: the first difference that is known not to have entered through a shrink, wherever it lies; ask
            ``foreign_root.precedes(first_propagating)`` whether it came first.
        roots: every surviving root row in execution order (at most 10,000, then counted in root_rows).
        root_rows: how many rows are roots; surviving_root_rows: of these, how many have a surviving coordinate.
        statistics: counts of coordinates.
        cache_differences: every step and layer in which K or V rows differ, in order.
        steps: one StepComparison per compared step.
        grids: ``prefill`` and ``decode``.
        propagation: where the difference went, None without a difference.
        coverage: what was compared.
        manifest_differences: (key, reference value, candidate value).
        generated: lengths (reference, candidate) in tokens.
        first_surviving_variant: the first configuration-variant row with a surviving coordinate.
        propagation_chart: the propagation graph pruned and laid out, None where nothing can be followed.
        state_differences: every step, layer and tensor of recurrent state that differs after the step, in order.
        module_grids: as grids, rows ("module", Site) with classes only; empty where modules were not recorded.
        rank_agreement: of reference and candidate, over the compared steps; None for an execution on one rank.
    """

    outcome: Outcome
    same_reduction: bool
    rounded_dtype: str
    flip: Flip | None
    first_difference: RowDifference | None
    first_surviving: RowDifference | None
    first_propagating: RowDifference | None
    first_variant: RowDifference | None
    foreign_root: ForeignRoot | None
    roots: tuple[RowDifference, ...]
    root_rows: int
    surviving_root_rows: int
    statistics: ShrinkStatistics
    cache_differences: tuple[CacheDifference, ...]
    steps: tuple[StepComparison, ...]
    grids: dict[str, Grid] = field(repr=False)
    propagation: PropagationSummary | None
    coverage: Coverage
    manifest_differences: tuple[tuple[str, Any, Any], ...]
    generated: tuple[int, int]
    first_surviving_variant: RowDifference | None = None
    propagation_chart: PropagationChart | None = field(default=None, repr=False)
    state_differences: tuple[StateDifference, ...] = ()
    module_grids: dict[str, Grid] = field(default_factory=dict, repr=False)
    rank_agreement: tuple[RankAgreement | None, RankAgreement | None] = (None, None)

    def __repr__(self) -> str:
        """Say the verdict in one line; the fields hold thousands of values."""
        flip = f" at step {self.flip.step}" if self.flip is not None else ""
        return (
            f"PairDiff({self.outcome}{flip}: {self.surviving_root_rows} surviving of {self.root_rows} root rows, "
            f"{self.coverage.steps_compared} steps and {self.coverage.records_compared} records compared)"
        )

    def _repr_html_(self) -> str:
        """Show itself in a notebook."""
        return html_of(self)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; what is made to be drawn leaves as counts, or not: the traces hold the data."""
        document = {
            f.name: as_json(getattr(self, f.name))
            for f in fields(self)
            if f.name not in ("grids", "module_grids", "propagation_chart")
        }
        document["grids"] = {
            name: {
                "rows": len(grid.rows),
                "columns": len(grid.columns),
                "cells": {
                    label.label: int((grid.classes == int(label)).sum())
                    for label in CoordinateClass
                },
            }
            for name, grid in self.grids.items()
        }
        return document


def as_json(value: Any) -> Any:
    """Turn a value of this module into JSON: non-finite floats become strings ("NaN", "Infinity"), names are added."""
    if isinstance(value, CoordinateClass):
        return value.label
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        if value != value:
            return "NaN"
        if value in (float("inf"), float("-inf")):
            return "Infinity" if value > 0 else "-Infinity"
        return value
    if is_dataclass(value) and not isinstance(value, type):
        document = {f.name: as_json(getattr(value, f.name)) for f in fields(value)}
        name = getattr(type(value), "name", None)
        if isinstance(name, property):
            document["name"] = value.name  # type: ignore[attr-defined]
        return document
    if isinstance(value, dict):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [as_json(inner) for inner in value]
    if isinstance(value, Tensor):
        return as_json(value.to(torch.float64).tolist())
    return value
