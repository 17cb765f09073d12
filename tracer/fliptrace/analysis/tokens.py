"""Compares what each step chose and why: logits, margins, ties, and the flip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fliptrace.analysis.align import Frames, same_bytes
from fliptrace.analysis.evidence import StepEvidence
from fliptrace.trace import Frame, Kind, StepRecord, Trace
from fliptrace.verdicts import Flip, StepComparison, TokenLogit

_LOGITS_KINDS = (Kind.LOGITS_DIGEST, Kind.LOGITS_FULL, Kind.LOGITS_TOP, Kind.LOGITS_TOP_IDS)
_DEFAULT_TIE_RULE = "lowest token id"


@dataclass(frozen=True)
class StepLogits:
    """The logits that one execution's step recorded.

    Attributes:
        logits: float64 [N].
        ids: their token ids, int64 [N]; None where the whole vocabulary was kept.
    """

    logits: Tensor
    ids: Tensor | None

    @classmethod
    def read(cls, step: StepRecord, frames: Frames) -> StepLogits:
        """Take what is there: full logits, else the top list, else the two of the step's record."""
        full = frames.get(Kind.LOGITS_FULL)
        if full is not None and full.layout.entries:
            return cls(_values(full), None)
        top, ids = frames.get(Kind.LOGITS_TOP), frames.get(Kind.LOGITS_TOP_IDS)
        if top is not None and ids is not None and top.layout.entries and ids.layout.entries:
            return cls(_values(top), ids.tensor(0).reshape(-1))
        return cls(torch.tensor(step.top_values, dtype=torch.float64), torch.tensor(step.top_ids))

    @cached_property
    def values(self) -> Mapping[int, float]:
        """Token id -> logit."""
        logits = self.logits.tolist()
        return dict(
            enumerate(logits) if self.ids is None else zip(self.ids.tolist(), logits, strict=False)
        )

    def at(self, other: StepLogits) -> Tensor | None:
        """Return the logits of another step's tokens, in its order; None where some may not be here."""
        if other.ids is None:
            same = self.ids is None and len(self.logits) == len(other.logits)
            return self.logits if same else None
        if self.ids is not None or len(other.ids) != len(other.logits) or not len(other.ids):
            return None
        inside = int(other.ids.min()) >= 0 and int(other.ids.max()) < len(self.logits)
        return self.logits[other.ids] if inside else None


def _values(frame: Frame) -> Tensor:
    return frame.tensor(0).reshape(-1).to(torch.float64)


def logits_differ(
    before: StepRecord, after: StepRecord, reference: Frames, candidate: Frames
) -> bool | None:
    """Say whether the last row's logits differ in any recorded bit; None where the recorded part is equal."""
    known: bool | None = None
    for kind in _LOGITS_KINDS:
        one, other = reference.get(kind), candidate.get(kind)
        if one is None or other is None:
            continue
        if one.layout != other.layout or not same_bytes(one, other):
            return True
        if kind in (Kind.LOGITS_DIGEST, Kind.LOGITS_FULL):
            known = False
    if before.top_values != after.top_values or before.top_ids != after.top_ids:
        return True
    return known


def compare_step(
    evidence: StepEvidence,
    before: StepRecord,
    after: StepRecord,
    logits: tuple[StepLogits, StepLogits] | None,
) -> StepComparison:
    """Set one step of both executions side by side.

    Args:
        evidence: what the records show.
        before: the reference's step.
        after: the candidate's.
        logits: both steps' logits; None where they are not to be compared (equal, or the flip step).
    """
    return StepComparison(
        step=evidence.step,
        reference_margin=before.margin,
        candidate_margin=after.margin,
        reference_tied=before.tied,
        candidate_tied=after.tied,
        logits_differ=evidence.logits_differ,
        largest_logit_difference=_largest_difference(*logits)
        if logits
        else _no_difference(evidence),
        shrink_latent=0 if evidence.equal else int(evidence.latent.sum()),
        shrink_surviving=0 if evidence.equal else int(evidence.surviving.sum()),
        shrink_elements=evidence.element_count,
        cache_differs=Kind.CACHE in evidence.differing_kinds,
    )


def _no_difference(evidence: StepEvidence) -> float | None:
    return 0.0 if evidence.logits_differ is False else None


def _largest_difference(reference: StepLogits, candidate: StepLogits) -> float | None:
    for one, other in ((reference, candidate), (candidate, reference)):
        paired = one.at(other)
        if paired is not None and len(paired):
            differs = paired != other.logits  # infinities that are equal have no difference to take
            return float((paired - other.logits)[differs].abs().max()) if differs.any() else 0.0
    common = reference.values.keys() & candidate.values.keys()
    pairs = [(reference.values[token], candidate.values[token]) for token in common]
    return max((abs(one - other) if one != other else 0.0 for one, other in pairs), default=None)


def describe_flip(
    traces: tuple[Trace, Trace], step: int, logits: tuple[StepLogits, StepLogits]
) -> Flip:
    """Describe the first step at which two executions chose different tokens.

    Args:
        traces: reference and candidate.
        step: the step.
        logits: both executions' logits there.
    """
    records = [trace.steps[step] for trace in traces]
    tokens = [
        TokenLogit(
            token_id=record.chosen,
            text=trace.closing.piece_texts[step] if step < len(trace.closing.piece_texts) else "",
            reference_logit=logits[0].values.get(record.chosen),
            candidate_logit=logits[1].values.get(record.chosen),
        )
        for trace, record in zip(traces, records, strict=True)
    ]
    tie_broken = [
        name
        for name, record, found in zip(("reference", "candidate"), records, logits, strict=True)
        if record.tied > 1
        and found.values.get(record.chosen, record.top_values[0]) == record.top_values[0]
    ]
    rules = [trace.manifest.get("decoding.tie_rule") for trace in traces]
    return Flip(
        step=step,
        reference_token=tokens[0],
        candidate_token=tokens[1],
        reference_margin=records[0].margin,
        candidate_margin=records[1].margin,
        reference_tied=records[0].tied,
        candidate_tied=records[1].tied,
        decided_by_tie_break=tuple(tie_broken),
        tie_rule=str(rules[0] or rules[1] or _DEFAULT_TIE_RULE),
        tokens_after=(len(traces[0].steps) - step, len(traces[1].steps) - step),
    )
