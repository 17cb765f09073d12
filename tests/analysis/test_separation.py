"""What a shrink adds and what it inherits: exact where rows inherit nothing, and true to how the sums were made."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fliptrace.analysis import compare, separate, separate_all
from fliptrace.errors import InputError, SiteNotFoundError
from fliptrace.grids import Grid
from fliptrace.sites import Site
from fliptrace.trace import Kind

KEY = "model.layers.0.mlp.up_proj"


def with_operands(kit, trace, operand, shrink):
    """A trace whose step 0 holds one shrink with the operand that it was made from."""
    source = trace.source
    source.stored[0, Kind.SHRINK] = kit.frame_of(0, Kind.SHRINK, {KEY: shrink})
    source.stored[0, Kind.OPERAND_VALUES] = kit.frame_of(0, Kind.OPERAND_VALUES, {KEY: operand})
    return trace


def made(kit):
    """A reference summed in one order, a candidate in another and with one other operand row, and the weight."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(4, 512, generator=generator).to(torch.bfloat16)
    operand = torch.randn(3, 512, generator=generator).to(torch.bfloat16)
    other = operand.clone()
    other[1, 7] *= 1.5
    order = torch.randperm(512, generator=generator)

    def summed(values, places):
        total = torch.zeros(3, 4)
        for place in places.tolist():
            total += values[:, place : place + 1].float() * weight[:, place].float()
        return total

    reference = with_operands(kit, kit.make_trace(), operand, summed(operand, torch.arange(512)))
    candidate = with_operands(kit, kit.make_trace(), other, summed(other, order))
    return reference, candidate, weight, operand, other


def test_inherited_and_added_are_told_apart(kit):
    """Rows with equal operands inherit exactly nothing; the other row inherits A·Δx and adds what rounding adds."""
    reference, candidate, weight, operand, other = made(kit)
    found = separate(reference, candidate, KEY, 0, weight)
    assert torch.equal(found.inherited[[0, 2]], torch.zeros(2, 4, dtype=torch.float64))
    expected = weight[:, 7].double() * (other[1, 7].double() - operand[1, 7].double())
    assert torch.allclose(found.inherited[1], expected, rtol=1e-14, atol=0)
    difference = (
        candidate.record(KEY, Kind.SHRINK, 0).double()
        - reference.record(KEY, Kind.SHRINK, 0).double()
    )
    assert torch.equal(found.added[[0, 2]], difference[[0, 2]])
    assert 0 < found.added.abs().max() < 1e-4
    assert found.inherited[1].abs().min() > 100 * found.added[1].abs().max()


def test_the_same_order_adds_little_and_another_weight_shows(kit):
    """A wrong weight leaves a rest of the size of the difference: what is said to be added is not made up."""
    reference, candidate, weight, *_ = made(kit)
    wrong = separate(reference, candidate, KEY, 0, weight + 1)
    assert wrong.added[1].abs().max() > 0.01
    same = separate(reference, reference, KEY, 0, weight)
    assert not same.added.any()
    assert not same.inherited.any()


def test_what_does_not_fit_is_refused(kit):
    """A transposed weight, other shapes, traces without operands."""
    reference, candidate, weight, operand, _ = made(kit)
    with pytest.raises(InputError, match="not transposed"):
        separate(reference, candidate, KEY, 0, weight.T)
    short = with_operands(kit, kit.make_trace(), operand[:2], torch.zeros(2, 4))
    with pytest.raises(InputError, match="one shape"):
        separate(reference, short, KEY, 0, weight)
    with pytest.raises(SiteNotFoundError, match="operand_values"):
        separate(kit.make_trace(), kit.make_trace(), KEY, 0, weight)


def test_a_comparison_holds_both_parts_of_every_differing_cell(kit):
    """The grids hold what separate gives, by its largest part; equal cells and traces without operands hold none."""
    reference, candidate, weight, *_ = made(kit)
    found = separate(reference, candidate, KEY, 0, weight)
    grid = Grid(
        phase="prefill",
        rows=(("shrink", Site.from_path(KEY)), ("key", 0)),
        columns=(0, 1, 2),
        classes=torch.tensor([[1, 2, 0], [2, 2, 2]], dtype=torch.int8),
        magnitudes=torch.zeros(2, 3),
        ulps=torch.zeros(2, 3, dtype=torch.int64),
        origins=torch.zeros(2, 3, dtype=torch.int8),
        surviving=torch.zeros(2, 3, dtype=torch.int32),
    )
    plain = compare(kit.make_trace(), kit.make_trace())
    diff = dataclasses.replace(plain, grids={"prefill": grid}, steps=plain.steps[:1])
    told = separate_all(diff, reference, candidate, {KEY: weight}).grids["prefill"]
    for part, cells in ((found.inherited, told.inherited), (found.added, told.added)):
        assert torch.equal(cells[0, :2], part.abs().amax(dim=1).float()[:2])
        assert cells[0, 2:].isnan().all()
        assert cells[1].isnan().all()
    assert told.added[0, 0] > 0 == told.inherited[0, 0]
    assert separate_all(diff, reference, candidate, {}).grids["prefill"].added.isnan().all()
    assert separate_all(diff, kit.make_trace(), candidate, {KEY: weight}) is diff
