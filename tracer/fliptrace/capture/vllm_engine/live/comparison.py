"""How two executions of one prompt compare: what differs, where it began, and whether that can be said.

Rows are compared by request and position, so that neighbours in the batch and chunks of a prefill may differ. The words
are those of a pair's comparison: a row whose operand is bit-equal and whose shrink differs is a root, one whose operand
differs is inherited, one under another launch or adapter is configuration-variant. The first surviving difference of a
request is named as a root only if it is one and nothing before it is missing; else it is unlocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fliptrace.capture.vllm_engine.live.executions import Execution
from fliptrace.errors import TraceMismatchError
from fliptrace.numerics import BoundaryReport, boundary_report, round_to
from fliptrace.sites import Site
from fliptrace.verdicts import Origin


@dataclass(frozen=True)
class LiveDifference:
    """One row of one site that differs between two executions.

    Attributes:
        site: where.
        layer: number of the LoRA layer; part: of its slice.
        position: of the token; step: 0 in the prefill.
        origin: where the difference came from.
        survives: whether it is still there after rounding to the model's 16-bit type.
        rank_index: first coordinate that survives, or else differs.
        reference: FP32 value there; candidate likewise.
        boundary: how the two lie to the rounding boundaries.
        reference_row: row in the reference's records; candidate_row likewise.
        launch: what ran in the reference.
    """

    site: Site
    layer: int
    part: int
    position: int
    step: int
    origin: Origin
    survives: bool
    rank_index: int
    reference: float
    candidate: float
    boundary: BoundaryReport
    reference_row: int
    candidate_row: int
    launch: str

    @property
    def name(self) -> str:
        """The name that people read."""
        phase = "prefill" if self.step == 0 else f"step {self.step}"
        return (
            f"{self.site.name}, {phase}, token position {self.position}, rank index "
            f"{self.rank_index}"
        )


@dataclass(frozen=True)
class LiveComparison:
    """Two executions of one prompt.

    Attributes:
        reference: one; candidate: the other.
        flip: first generated token, 0-based, that differs; None if none does.
        compared: positions compared, up to the forward that yields the flip.
        latent: records (position and site) that differ and round alike.
        surviving: records that still differ after rounding.
        roots: surviving records whose operand, launch and adapter are equal.
        missing: records (position and layer) that one of the two lacks.
        first: first surviving difference in execution order.
        verdict: of the first surviving difference: root, unlocated or configuration-variant; None without one.
        why: the verdict in a sentence.
    """

    reference: Execution
    candidate: Execution
    flip: int | None
    compared: int
    latent: int
    surviving: int
    roots: int
    missing: int
    first: LiveDifference | None
    verdict: Origin | None
    why: str

    @property
    def word(self) -> str:
        """The verdict in a word: ``equal`` only where nothing is missing, else ``not observed``."""
        return str(self.verdict or ("not observed" if self.missing else "equal"))

    def describe(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        first = self.first
        return {
            "request": self.candidate.number,
            "flip": self.flip,
            "compared": self.compared,
            "latent": self.latent,
            "surviving": self.surviving,
            "roots": self.roots,
            "missing": self.missing,
            "verdict": self.word,
            "why": self.why,
            "first": first
            and {
                "name": first.name,
                "site": first.site.path,
                "position": first.position,
                "step": first.step,
                "rank_index": first.rank_index,
                "origin": str(first.origin),
                "reference": first.reference,
                "candidate": first.candidate,
                "rounded_reference": first.boundary.rounded_reference,
                "rounded_candidate": first.boundary.rounded_candidate,
                "boundary": first.boundary.boundary,
                "launch": first.launch,
            },
        }


def first_flip(reference: Sequence[int], candidate: Sequence[int]) -> int | None:
    """Return the first place at which two generations differ; None if one is the other's beginning."""
    for place, (one, other) in enumerate(zip(reference, candidate, strict=False)):
        if one != other:
            return place
    return None


def compare_executions(reference: Execution, candidate: Execution) -> LiveComparison:
    """Compare two executions of one prompt up to the forward that yields the first differing token.

    Positions that one of them took from vLLM's prefix cache are not compared. Had the cache held other values for the
    two, the first operand computed from it would differ, and be unlocated.

    Raises:
        TraceMismatchError: other prompts, or engines of other shape.
    """
    if reference.prompt_ids != candidate.prompt_ids:
        raise TraceMismatchError(
            f"two executions of one prompt are required; requests {reference.number} and {candidate.number} have "
            f"prompts of {len(reference.prompt_ids)} and {len(candidate.prompt_ids)} tokens that differ"
        )
    if reference.recording.layout != candidate.recording.layout:
        raise TraceMismatchError(
            "the two executions come from engines with other LoRA layers, or in another order"
        )
    flip = first_flip(reference.token_ids, candidate.token_ids)
    shared = min(len(reference.token_ids), len(candidate.token_ids)) if flip is None else flip + 1
    last = len(reference.prompt_ids) + max(shared, 1) - 1  # positions below it had equal inputs
    differences = _Differences(reference, candidate, last)
    first, verdict, why = differences.judge(flip)
    return LiveComparison(
        reference,
        candidate,
        flip,
        differences.compared,
        differences.latent,
        differences.surviving,
        differences.roots,
        differences.missing,
        first,
        verdict,
        why,
    )


class _Differences:
    """All records of two executions below a position, classified."""

    def __init__(self, reference: Execution, candidate: Execution, last: int) -> None:
        self.reference, self.candidate = reference, candidate
        self.layout = reference.recording.layout
        self.start = max(reference.cached, candidate.cached)
        one, other = _aligned(reference.positions, candidate.positions, self.start, last)
        self.one, self.other = one, other
        self.compared = int(one.numel())
        layers = len(self.layout.layers)
        both = reference.observed[one] & candidate.observed[other]
        self.missing = max(0, last - self.start) * layers - int(both.sum())
        self._first_missing = self._missing_order(both, last)
        moved = reference.operand_digests()[one] != candidate.operand_digests()[other]
        self.inherited = moved.any(-1)
        self.variant = self._variants()
        self.latent = self.surviving = self.roots = 0
        self._best: tuple[tuple[int, ...], LiveDifference] | None = None
        changed = (reference.rows[one] != candidate.rows[other]).any(0)
        for layer in range(layers):
            begin, end = self.layout.starts[layer] + 6, self.layout.starts[layer + 1]
            if bool(changed[begin:end].any()):
                self._look_at(layer, both[:, layer])

    def _variants(self) -> Tensor:
        """Rows, [N, layers], that another launch or another adapter computed."""
        layers = range(len(self.layout.layers))
        counts = self.reference.rows[self.one, 3], self.candidate.rows[self.other, 3]
        if self.reference.adapter != self.candidate.adapter:
            return torch.ones((self.compared, len(layers)), dtype=torch.bool)
        known: dict[tuple[int, int], list[bool]] = {}
        found = []
        for pair in zip(counts[0].tolist(), counts[1].tolist(), strict=True):
            if pair not in known:
                known[pair] = [self._launch(n, 0, pair) != self._launch(n, 1, pair) for n in layers]
            found.append(known[pair])
        return torch.tensor(found, dtype=torch.bool).view(self.compared, len(layers))

    def _launch(self, layer: int, which: int, rows: tuple[int, int]) -> str:
        recording = (self.reference, self.candidate)[which].recording
        return recording.launches.get((layer, rows[which]), f"unknown, {rows[which]} rows")

    def _look_at(self, layer: int, both: Tensor) -> None:
        values = self.reference.shrink(layer)[self.one], self.candidate.shrink(layer)[self.other]
        bits = [value.view(torch.int32) for value in values]
        rounded = [
            round_to(value, self.layout.dtype).contiguous().view(torch.int16)
            if self.layout.dtype != torch.float32
            else value.view(torch.int32)
            for value in values
        ]
        differs = (bits[0] != bits[1]) & both[:, None, None]
        survives = (rounded[0] != rounded[1]) & differs
        for part, site in self.reference.recording.layers[layer].sites:
            rows, kept = differs[:, part].any(-1), survives[:, part].any(-1)
            self.latent += int((rows & ~kept).sum())
            self.surviving += int(kept.sum())
            own = kept & ~self.inherited[:, layer] & ~self.variant[:, layer]
            self.roots += int(own.sum())
            if not bool(kept.any()):
                continue
            # Later positions run in the same forward or a later one: the first row is the first of its site.
            row = int(kept.nonzero()[0])
            order = (*self._order(row, layer), part)
            if self._best is None or order < self._best[0]:
                found = self._difference(layer, part, site, row, survives[row, part], values)
                self._best = order, found

    def _order(self, row: int, layer: int) -> tuple[int, int, int]:
        place = int(self.one[row])
        return (
            int(self.reference.forwards[place]),
            layer,
            int(self.reference.positions[place]),
        )

    def _missing_order(self, both: Tensor, last: int) -> tuple[int, int, int] | None:
        """Where in execution order the first missing record would be: before it nothing is missing."""
        forwards = self.reference.forwards[self.one]
        positions = self.reference.positions[self.one]
        found = []
        is_absent = torch.ones(last, dtype=torch.bool)
        is_absent[: self.start] = False  # from vLLM's prefix cache
        is_absent[positions] = False
        if bool(is_absent.any()):
            first = int(is_absent.nonzero()[0])
            later = forwards[positions > first]
            # It ran no later than the next recorded position did.
            found.append((int(later[0]) if later.numel() else 2**62, -1, first))
        rows, layers = (~both).nonzero(as_tuple=True)
        for number in forwards[rows].unique()[:1].tolist():
            within = forwards[rows] == number
            layer = int(layers[within].min())
            first = int(positions[rows[within & (layers == layer)]].min())
            found.append((int(number), layer, first))
        return min(found, default=None)

    def _difference(
        self,
        layer: int,
        part: int,
        site: Site,
        row: int,
        survives: Tensor,
        values: tuple[Tensor, Tensor],
    ) -> LiveDifference:
        rank_index = int(survives.nonzero()[0])
        one, other = (float(value[row, part, rank_index]) for value in values)
        place = int(self.one[row])
        position = int(self.reference.positions[place])
        origin = (
            Origin.INHERITED
            if bool(self.inherited[row, layer])
            else Origin.CONFIGURATION_VARIANT
            if bool(self.variant[row, layer])
            else Origin.ROOT
        )
        rows = int(self.reference.rows[place, 3])
        return LiveDifference(
            site,
            layer,
            part,
            position,
            self.reference.step(position),
            origin,
            True,
            rank_index,
            one,
            other,
            boundary_report(one, other, self.layout.dtype),
            place,
            int(self.other[row]),
            self._launch(layer, 0, (rows, rows)),
        )

    def judge(self, flip: int | None) -> tuple[LiveDifference | None, Origin | None, str]:
        """Return the first surviving difference, the verdict and its reason."""
        void = [*self.reference.void, *self.candidate.void]
        if void:
            return None, Origin.UNLOCATED, f"the recording is void: {'; '.join(void)}"
        if self._best is None:
            if flip is None:
                lacking = f"; {self.missing} records are missing" if self.missing else ""
                return None, None, f"no recorded shrink differs after rounding{lacking}"
            return (
                None,
                Origin.UNLOCATED,
                f"generated token {flip + 1} differs, and no recorded shrink before it differs after rounding: the "
                "cause is an operation that is not recorded"
                + (f", or lies in the {self.missing} missing records" if self.missing else ""),
            )
        order, first = self._best
        if self._first_missing is not None and self._first_missing < order:
            return (
                first,
                Origin.UNLOCATED,
                (
                    f"{first.name} is the first recorded difference that survives, but {self.missing} records are "
                    "missing, some of them before it"
                ),
            )
        if first.origin is Origin.INHERITED:
            return (
                first,
                Origin.UNLOCATED,
                (
                    f"the operand of {first.name} differs already and no recorded shrink before it does after "
                    "rounding: the difference entered at an operation that is not recorded"
                ),
            )
        if first.origin is Origin.CONFIGURATION_VARIANT:
            return (
                first,
                first.origin,
                f"{first.name} was computed under another launch or adapter, so it has no root",
            )
        return (
            first,
            Origin.ROOT,
            f"{first.name}: operand, adapter and launch are equal, and the shrink differs after rounding",
        )


def _aligned(one: Tensor, other: Tensor, start: int, last: int) -> tuple[Tensor, Tensor]:
    """Return the rows of positions from ``start`` to below ``last`` that both executions have."""
    places = {position: row for row, position in enumerate(other.tolist())}
    pairs = [
        (row, places[position])
        for row, position in enumerate(one.tolist())
        if start <= position < last and position in places
    ]
    if not pairs:
        empty = torch.empty(0, dtype=torch.int64)
        return empty, empty
    rows = torch.tensor(pairs, dtype=torch.int64)
    return rows[:, 0], rows[:, 1]
