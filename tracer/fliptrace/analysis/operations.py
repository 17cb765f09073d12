"""Finds the operation, between the recorded shrinks, at which a difference entered.

An operation's input digest of row i covers everything that row i depends on. Equal there and different in the output
means that the operation itself gave another result, whatever the modules around it are called.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fliptrace.analysis.align import Frames
from fliptrace.analysis.evidence import StepEvidence, StepReader
from fliptrace.analysis.frame_rows import rows_that_differ
from fliptrace.sites import split_path
from fliptrace.trace import Kind
from fliptrace.verdicts import ForeignRoot, Origin

#: The name under which shrinks appear among the operations.
SHRINK_OPERATION = "lora_shrink"


_DIGESTED_KINDS = frozenset(
    (Kind.MODULE_INPUT, Kind.MODULE_OUTPUT, Kind.OPERATION_INPUT, Kind.OPERATION_OUTPUT)
)


@dataclass(frozen=True)
class _Differences:
    """Which rows of which records of one kind differ: label -> bool [rows], labels in the reference's order."""

    rows: dict[str, Tensor]


def find_operation(
    evidence: StepEvidence, reader: StepReader, reference: Frames, candidate: Frames
) -> ForeignRoot | None:
    """Return the first operation in execution order, other than a shrink, with equal inputs and different outputs."""
    if Kind.OPERATION_OUTPUT not in evidence.differing_kinds:
        return None
    outputs = _differences(Kind.OPERATION_OUTPUT, reader, reference, candidate)
    inputs = _differences(Kind.OPERATION_INPUT, reader, reference, candidate)
    for label, differs in outputs.rows.items():
        if label not in inputs.rows or operation_name(label) == SHRINK_OPERATION:
            continue
        row = _first_own_row(inputs.rows[label], differs)
        if row is not None:
            position = evidence.first_position + row if differs.numel() == evidence.rows else -1
            return _describe(
                evidence, label, position, _next_shrink(evidence, label, list(outputs.rows))
            )
    return None


def operation_name(label: str) -> str:
    """Return the operation's name in ``module path/name#occurrence``."""
    return label.rpartition("/")[2].partition("#")[0]


def _first_own_row(inputs: Tensor, outputs: Tensor) -> int | None:
    """Return the first row whose output differs although its input does not; None without one."""
    if inputs.numel() == outputs.numel():
        own = outputs & ~inputs
    elif bool(inputs.any()):  # rows do not correspond: only wholly equal inputs acquit them
        return None
    else:
        own = outputs
    places = own.nonzero()
    return int(places[0, 0]) if places.numel() else None


def _next_shrink(evidence: StepEvidence, label: str, labels: list[str]) -> int:
    """Return the order of the first shrink that ran after an operation, the number of shrinks when none did."""
    for later in labels[labels.index(label) + 1 :]:
        path = later.partition("/")[0]
        if operation_name(later) == SHRINK_OPERATION and path in evidence.keys:
            return evidence.keys.index(path)
    return len(evidence.keys)


def _describe(evidence: StepEvidence, label: str, position: int, before_order: int) -> ForeignRoot:
    phase = "the prefill" if evidence.step == 0 else f"step {evidence.step}"
    where = f", token position {position}," if position >= 0 else ""
    path = label.partition("/")[0]
    return ForeignRoot(
        key=label,
        kind="operation",
        step=evidence.step,
        position=position,
        origin=Origin.ROOT,
        explanation=(
            f"The operation {operation_name(label)} in {path or 'the model'} got bit-equal inputs in {phase}{where} "
            "and gave another result; it is not a LoRA shrink."
        ),
        before_order=before_order,
    )


def _differences(
    kind: Kind, reader: StepReader, reference: Frames, candidate: Frames
) -> _Differences:
    before, after = reference.get(kind), candidate.get(kind)
    if before is None or after is None:
        return _Differences({})
    pair = reader.pair(before, after)
    found: dict[int, Tensor] = {}
    for group in pair.groups:
        differs = rows_that_differ(group, before, after)
        found.update(zip(group.rows, differs, strict=True))
    labels = pair.reference_labels
    return _Differences({labels[place]: found[place] for place in sorted(found)})


def find_unexplained_module(
    evidence: StepEvidence, reader: StepReader, reference: Frames, candidate: Frames
) -> ForeignRoot | None:
    """Return the innermost module, or the operation, that differs although no recorded difference could reach it.

    Only for steps in which nothing else differs: a module's output may depend on rows and caches that its own input
    digests do not cover, so that a module is named when nothing better was recorded.
    """
    if not evidence.differing_kinds & _DIGESTED_KINDS:
        return None
    latent = [
        key for key, row in zip(evidence.keys, evidence.classes, strict=True) if (row > 0).any()
    ]
    for outer, inner, kind in (
        (Kind.MODULE_OUTPUT, Kind.MODULE_INPUT, "module"),
        (Kind.OPERATION_OUTPUT, Kind.OPERATION_INPUT, "operation"),
    ):
        if not {outer, inner} & evidence.differing_kinds:
            continue
        outputs = _differences(outer, reader, reference, candidate).rows
        inputs = _differences(inner, reader, reference, candidate).rows
        differing = [
            label
            for label in dict.fromkeys((*inputs, *outputs))
            if _any(inputs, label) | _any(outputs, label) and not _around(label, latent)
        ]
        if differing:
            label = _innermost(differing, inputs, outputs)
            located = not _any(inputs, label)
            return _describe_module(
                evidence, label, kind, located, outputs.get(label), inputs.get(label)
            )
    return None


def _any(rows: dict[str, Tensor], label: str) -> bool:
    return label in rows and bool(rows[label].any())


def _around(label: str, keys: list[str]) -> bool:
    """The label is a site with a latent difference, something inside one, or around one."""
    path = split_path(label.partition("/")[0])[0]
    # A latent difference may reach everything in its layer, and other ranks.
    modules = {split_path(key)[0] for key in keys}
    return not path or any(
        key == path or key.startswith(f"{path}.") or path.startswith(f"{key}.") for key in modules
    )


def _innermost(differing: list[str], inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> str:
    own = [
        label for label in differing if _any(outputs, label) and not _any(inputs, label)
    ] or differing
    places = [(path, rank) for path, _, rank in map(split_path, own)]
    return next(
        label
        for label, (path, rank) in zip(own, places, strict=True)
        if not any(other.startswith(f"{path}.") and at == rank for other, at in places)
    )


def _describe_module(
    evidence: StepEvidence,
    label: str,
    kind: str,
    located: bool,
    outputs: Tensor | None,
    inputs: Tensor | None,
) -> ForeignRoot:
    rows = outputs if located else inputs
    places = rows.nonzero() if rows is not None else torch.zeros((0, 1))
    first = int(places[0, 0]) if places.numel() else -1
    fits = rows is not None and rows.numel() == evidence.rows and first >= 0
    phase = "the prefill" if evidence.step == 0 else f"step {evidence.step}"
    text = (
        f"The {kind} {label} got bit-equal inputs in {phase} and gave another result, and nothing recorded inside it "
        "shows where."
        if located
        else f"The input of the {kind} {label} differs in {phase}, although no record before it does."
    )
    return ForeignRoot(
        key=label,
        kind=kind,
        step=evidence.step,
        position=evidence.first_position + first if fits else -1,
        origin=Origin.ROOT if located else Origin.UNLOCATED,
        explanation=text,
    )
