"""Writes down where a difference went, in sentences for people, in the manner of the paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fliptrace.analysis.differing_records import Node, count_records, short_name
from fliptrace.analysis.evidence import StepEvidence
from fliptrace.analysis.propagation import (
    Path,
    build_graph,
    first_that_reaches,
    first_that_spreads,
    leaves_projection,
    path_to_flip,
    rows_reached,
)
from fliptrace.numerics import CoordinateClass
from fliptrace.verdicts import (
    Fate,
    Flip,
    ForeignRoot,
    Origin,
    PropagationSummary,
    RowDifference,
)

_LAYERS_NAMED = 3


def summarise(
    evidence: Sequence[StepEvidence],
    start: RowDifference | ForeignRoot | None,
    flip: Flip | None,
    roots: Sequence[RowDifference],
    model_dtype: str,
) -> PropagationSummary | None:
    """Say where a difference went.

    Args:
        evidence: every compared step.
        start: what to follow: the first propagating root, what entered elsewhere before it, or the best there is.
        flip: the flip, if any.
        roots: the surviving roots in order: one of them may lead to a flip that ``start`` does not lead to.
        model_dtype: the type that the model computes in, ``bfloat16``.

    Returns:
        The summary, None without any difference.
    """
    nodes = count_records(evidence)
    if nodes == 0:
        return None
    separable = all(step.operand_values_known for step in evidence)
    if start is None:
        return PropagationSummary(
            ("Records differ, but none that can be followed.",), nodes, None, (), separable
        )
    sentences = [_entry_sentence(start, model_dtype)]
    if not isinstance(start, ForeignRoot) and not leaves_projection(start):
        return PropagationSummary(
            tuple(sentences), nodes, None if flip is None else False, (), separable
        )
    path: Path = None
    if flip is not None:
        path = path_to_flip(evidence, start, flip)
    graph = build_graph(evidence, None, (start.step,))
    reached, others = _caches(evidence, start, rows_reached(graph, evidence, start))
    sentences.append(_chain_sentence(start, flip, reached, path))
    spreading = first_that_spreads(graph, evidence, start, roots) if others else None
    later = spreading if flip is None and not reached else None
    sentences.append(_others_sentence(start, others, spreading))
    if reached:
        sentences.append(_persistence(start.step, reached[0].layer, evidence[-1].step))
    reaches = None if flip is None else path is not None
    if flip is not None and path is None:
        later, path = first_that_reaches(evidence, roots, flip)
        sentences.append(_lost_sentence(later))
    if not separable:
        sentences.append(
            "Operands were kept as digests only, so that what a later shrink adds cannot be told from what it inherits."
        )
    return PropagationSummary(
        tuple(one for one in sentences if one),
        nodes,
        reaches,
        _names(path or ()),
        separable,
        later,
    )


def _names(path: Iterable[tuple[Node, str]]) -> tuple[str, ...]:
    """Return a path's names; a cache carried through many steps is named once."""
    names: list[str] = []
    for node, name in path:
        if node[1] == "cached" and names and names[-1] == name:
            continue
        names.append(name)
    return tuple(names)


def _entry_sentence(start: RowDifference | ForeignRoot, model_dtype: str) -> str:
    if isinstance(start, ForeignRoot):
        return start.explanation
    where = f"{short_name(start.site)} at token position {start.position}"
    phase = "the prefill" if start.step == 0 else f"step {start.step}"
    if start.row_class is CoordinateClass.LATENT:
        return f"No difference is known to have left a shrink; the first, in {where} in {phase}, was rounded away."
    if start.row_class is CoordinateClass.STRUCTURAL:
        return f"In {phase}, the records of {where} have no partner of the same shape and dtype."
    one = start.surviving == 1
    elements = f"{start.surviving} coordinate{'' if one else 's'}"
    if start.origin is Origin.CONFIGURATION_VARIANT:
        where += ", the first surviving configuration-variant,"
    rounded = start.coordinates[0].rounded_dtype if start.coordinates else model_dtype
    if rounded != "float32":
        left = f"survive{'s' if one else ''} rounding"
    elif model_dtype == "float32":
        left = f"differ{'s' if one else ''} (an FP32 model has no rounding boundary)"
    else:
        left = f"differ{'s' if one else ''} in FP32"
    addition = "FP32 addition" if model_dtype == "float32" else "16-bit addition"
    fate = {
        Fate.PROPAGATING: f" and change{'s' if one else ''} the projection's output",
        Fate.ABSORBED: f", but the {addition} that follows swallowed the difference",
        Fate.NOT_OBSERVED: "; the projection's output was not recorded",
    }[start.fate]
    return f"In {phase}, {elements} of {where} {left}{fate}."


def _chain_sentence(
    start: RowDifference | ForeignRoot, flip: Flip | None, reached: list[_CacheRows], path: Path
) -> str:
    """Write the chain in the manner of the paper: root, the first layers whose cache differs, the logits."""
    first = start.key if isinstance(start, ForeignRoot) else short_name(start.site)
    links = [f"{first} at token position {start.position}" if start.position >= 0 else first]
    if start.step:
        links[0] += f" in step {start.step}"
    links.extend(
        f"layer-{one.layer} key/value: {one.keys} key and {one.values} value elements {_at(one.positions)}"
        for one in reached[:_LAYERS_NAMED]
    )
    if len(reached) > _LAYERS_NAMED:
        more = len(reached) - _LAYERS_NAMED
        links.append(f"{more} more layer{'s' if more > 1 else ''} up to layer {reached[-1].layer}")
    if not reached:
        links.append("no recorded key or value of this step")
    if flip is not None and path:
        links.append(f"logits of step {flip.step}")
    return " -> ".join(links) + "."


@dataclass(frozen=True, slots=True)
class _CacheRows:
    """Differing elements of one layer's cache."""

    layer: int
    keys: int
    values: int
    positions: tuple[int, ...]


def _caches(
    evidence: Sequence[StepEvidence],
    start: RowDifference | ForeignRoot,
    reached: Mapping[Node, Tensor],
) -> tuple[list[_CacheRows], list[_CacheRows]]:
    """List the differing cache rows of the start's own step: those that it can have got to, and the others."""
    step = next(one for one in evidence if one.step == start.step)
    cache, first = step.cache, step.first_position
    if cache is None:
        return [], []
    sides: tuple[list[_CacheRows], list[_CacheRows]] = ([], [])
    for place, layer in enumerate(cache.layers):
        for side, wanted in zip(sides, (True, False), strict=True):
            counts = cache.counts[place].clone()
            for which, name in enumerate(("key", "value")):
                rows = reached.get((start.step, name, layer))
                if rows is not None:
                    counts[which, rows != wanted] = 0
                elif wanted:
                    counts[which] = 0
            keys, values = counts.sum(dim=1).tolist()
            if keys + values:
                positions = (counts.sum(dim=0) > 0).nonzero().squeeze(1) + first
                side.append(_CacheRows(layer, keys, values, tuple(positions.tolist())))
    return sides


def _others_sentence(
    start: RowDifference | ForeignRoot, others: list[_CacheRows], spreading: RowDifference | None
) -> str:
    """Say what differs in the same step without a recorded way from the start."""
    if not others:
        return ""
    phase = "the prefill" if start.step == 0 else f"step {start.step}"
    keys, values = sum(one.keys for one in others), sum(one.values for one in others)
    first = others[0]
    if spreading is None:
        why = "they have another origin, or what connects them was not recorded"
    else:
        why = (
            f"the first root from which one leads to keys or values is {short_name(spreading.site)} at token position "
            f"{spreading.position}"
        )
    return (
        f"No recorded way leads from there to {keys:,} key and {values:,} value elements that differ in {phase} as "
        f"well, from layer {first.layer} on ({_at(first.positions)} of it): {why}."
    )


def _at(positions: tuple[int, ...]) -> str:
    if len(positions) == 1:
        return f"at position {positions[0]}"
    return f"at {len(positions)} positions from {positions[0]} to {positions[-1]}"


def _persistence(first: int, layer: int, last: int) -> str:
    steps = last - first
    if steps == 0:
        return ""
    return f"The cached differences of layer {layer} stayed for {steps} step{'s' if steps > 1 else ''}."


def _lost_sentence(later: RowDifference | None) -> str:
    if later is None:
        return (
            "No chain of recorded differences leads from there to the flip: what connects them was not recorded, or "
            "the flip has another cause."
        )
    phase = "the prefill" if later.step == 0 else f"step {later.step}"
    return (
        f"No chain of differing records leads from there to the flip; the first root that one does lead from is "
        f"{short_name(later.site)} at token position {later.position} in {phase}."
    )
