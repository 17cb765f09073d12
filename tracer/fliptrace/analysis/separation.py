"""Tells what a shrink added to a difference from what it inherited, where operands were kept and the weights are given.

A shrink is linear: of two outputs z and z' with operands x and x', the part that the operands account for is
A·(x' - x). What is left of z' - z is the difference of the two rounding errors of summation: the shrink's own. Products
and sums are taken in FP64, whose own error is some 2^-29 of that of FP32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fliptrace.errors import InputError
from fliptrace.grids import Grid
from fliptrace.numerics import CoordinateClass
from fliptrace.sites import Site
from fliptrace.trace import Kind, Trace
from fliptrace.verdicts import PairDiff


@dataclass(frozen=True, eq=False)
class Separation:
    """One shrink's difference, candidate minus reference, in two parts.

    Attributes:
        inherited: what the operands account for, FP64 [T, R]; exactly 0 in rows with equal operands.
        added: the rest, FP64 [T, R]: what the two sums added by rounding in their own orders.
    """

    inherited: Tensor
    added: Tensor


def separate(
    reference: Trace, candidate: Trace, key: str, step: int, weight: Tensor, *, scale: float = 1.0
) -> Separation:
    """Separate one shrink's difference into inherited and added.

    Args:
        reference: a trace recorded with its operands (``--operands``).
        candidate: likewise.
        key: the site's path.
        step: which step.
        weight: the adapter's A at this site, in the dtype in which it ran, [R, K].
        scale: by what the engine multiplies before the shrink is recorded; 1 where it scales after it.

    Raises:
        InputError: the weight does not fit, or the records do not have one shape.
        SiteNotFoundError: shrink or operand were not recorded.
    """
    shrinks, operands = (
        [trace.record(key, kind, step) for trace in (reference, candidate)]
        for kind in (Kind.SHRINK, Kind.OPERAND_VALUES)
    )
    return _separated(key, step, shrinks, operands, weight, scale)


def _separated(
    key: str,
    step: int,
    shrinks: list[Tensor],
    operands: list[Tensor],
    weight: Tensor,
    scale: float,
) -> Separation:
    """Separate the records of one shrink; see separate."""
    shrinks, operands = (
        [record.to(torch.float64) for record in pair] for pair in (shrinks, operands)
    )
    wanted = (shrinks[0].shape[-1], operands[0].shape[-1])
    if tuple(weight.shape) != wanted:
        raise InputError(
            f"the weight A of {key} must be [rank, inputs] = {list(wanted)} as recorded; got {list(weight.shape)}; "
            "pass lora_A's weight of this site, not transposed"
        )
    for name, pair in (("shrink", shrinks), ("operand", operands)):
        if pair[0].shape != pair[1].shape:
            raise InputError(
                f"the {name} records of {key} in step {step} must have one shape; got {list(pair[0].shape)} and "
                f"{list(pair[1].shape)}; only steps that are fed the same tokens can be separated"
            )
    inherited = scale * (operands[1] - operands[0]) @ weight.to(torch.float64).T
    return Separation(inherited, (shrinks[1] - shrinks[0]) - inherited)


def separate_all(
    diff: PairDiff, reference: Trace, candidate: Trace, weights: Mapping[str, Tensor]
) -> PairDiff:
    """Separate every differing shrink of a comparison; the grids then hold what each inherited and what it added.

    Args:
        diff: what was found.
        reference: a trace recorded with its operands.
        candidate: likewise.
        weights: the adapter's A by site path, each in the dtype in which it ran, [R, K].

    Returns:
        The comparison with Grid.inherited and Grid.added; as it was where operands were not kept.

    Raises:
        InputError: a weight does not fit.
    """
    traces = (reference, candidate)
    if not diff.steps or any(
        trace.frame(diff.steps[0].step, Kind.OPERAND_VALUES) is None for trace in traces
    ):
        return diff
    grids = {}
    for phase, grid in diff.grids.items():
        shape = grid.classes.shape
        grids[phase] = replace(
            grid, inherited=torch.full(shape, torch.nan), added=torch.full(shape, torch.nan)
        )
    for step in diff.steps:
        found = grids.get("prefill" if step.step == 0 else "decode")
        if found is not None:
            _separate_step(found, step.step, traces, weights)
    chart = diff.propagation_chart
    return replace(
        diff,
        grids=grids,
        propagation_chart=replace(chart, separated=True) if chart is not None else None,
    )


def _separate_step(
    grid: Grid, step: int, traces: tuple[Trace, Trace], weights: Mapping[str, Tensor]
) -> None:
    """Fill the cells of one step: in the prefill one per token row, in decode one for the whole record."""
    shrinks, operands = (
        [trace.frame(step, kind) for trace in traces] for kind in (Kind.SHRINK, Kind.OPERAND_VALUES)
    )
    cells = slice(None) if step == 0 else slice(at := grid.columns.index(step), at + 1)
    classes = grid.classes[:, cells]
    differing = (classes == CoordinateClass.LATENT) | (classes == CoordinateClass.SURVIVING)
    for row, (_, site) in enumerate(grid.rows):
        if not isinstance(site, Site) or site.path not in weights or not bool(differing[row].any()):
            continue
        z, x = (
            [frame.tensor(site.path) for frame in pair if frame is not None]
            for pair in (shrinks, operands)
        )
        found = _separated(site.path, step, z, x, weights[site.path], 1.0)
        for cell, part in ((grid.inherited, found.inherited), (grid.added, found.added)):
            largest = part.abs().amax(dim=1) if step == 0 else part.abs().amax().reshape(1)
            if cell is not None:
                cell[row, cells] = torch.where(differing[row], largest.to(torch.float32), torch.nan)
