"""What a grid keeps of its cells: all of a surviving root's elements, the largest of others; modules where recorded."""

from __future__ import annotations

import torch

from fliptrace.analysis import compare
from fliptrace.numerics import CoordinateClass
from fliptrace.trace import Kind


def elements_of(grid, kind, name, column):
    """The elements of one cell as a list of tuples."""
    row = next(
        n
        for n, (what, place) in enumerate(grid.rows)
        if what == kind and name == (place if isinstance(place, int) else place.path)
    )
    found = grid.largest
    at = (found.cells == row * len(grid.columns) + grid.columns.index(column)).nonzero()[:, 0]
    fields = (found.positions, found.heads, found.indices, found.reference, found.candidate)
    return [tuple(values[n].item() for values in fields) for n in at]


def test_a_surviving_root_keeps_every_element(kit):
    """Surviving ones first, then by size; bits as recorded."""
    one, key = kit.make_trace(kit.Made(rank=8)), kit.Made().keys[8]
    other = one
    for rank_index in range(8):
        bit = 17 if rank_index == 3 else rank_index
        other = kit.edited(other, 0, Kind.SHRINK, key, kit.flipped_bit((2, rank_index), bit))
    found = elements_of(compare(one, other).grids["prefill"], "shrink", key, 2)
    before, after = (trace.record(key, Kind.SHRINK, 0)[2] for trace in (one, other))
    assert found[0][:3] == (2, -1, 3)
    assert sorted(index for _, _, index, _, _ in found) == list(range(8))
    for _, _, index, reference, candidate in found:
        assert torch.tensor([reference, candidate]).view(torch.int32).tolist() == [
            int(values[index].view(torch.int32)) for values in (before, after)
        ]
    sizes = [abs(reference - candidate) for *_, reference, candidate in found[1:]]
    assert sizes == sorted(sizes, reverse=True)


def test_other_cells_keep_the_largest_four(kit):
    """A latent row of eight differences keeps four; a decode step has its own position."""
    one, key = kit.make_trace(kit.Made(rank=8)), kit.Made().keys[1]
    other = one
    for rank_index in range(8):
        other = kit.edited(other, 2, Kind.SHRINK, key, kit.flipped_bit((0, rank_index), 0))
    grid = compare(one, other).grids["decode"]
    found = elements_of(grid, "shrink", key, 2)
    before, after = (trace.record(key, Kind.SHRINK, 2)[0] for trace in (one, other))
    largest = (before - after).abs().topk(4).values.tolist()
    assert [abs(reference - candidate) for *_, reference, candidate in found] == largest
    assert {position for position, *_ in found} == {one.steps[2].first_position}
    assert (grid.largest.cells.diff() >= 0).all()


def test_keys_and_values_name_head_and_element(kit):
    """An element of the second head of layer 1's values, with the records' type."""
    one = kit.make_trace()
    other = kit.edited(one, 0, Kind.CACHE, "cache.1", kit.set_to((1, 3, 1, 2), 100.0))
    grid = compare(one, other).grids["prefill"]
    ((position, head, element, reference, candidate),) = elements_of(grid, "value", 1, 3)
    assert (position, head, element, candidate) == (3, 1, 2, 100.0)
    assert reference == float(one.record("cache.1", Kind.CACHE, 0)[1, 3, 1, 2])
    assert grid.largest.cache_dtype == "bfloat16"


def test_equal_traces_keep_nothing(kit):
    """No element, no module grid without module records."""
    diff = compare(kit.make_trace(), kit.make_trace())
    assert [grid.largest for grid in diff.grids.values()] == [None, None]
    assert diff.module_grids == {}


def test_module_outputs_are_equal_or_not(kit):
    """One differing row of one module in one step, all else equal, in both phases."""
    one = kit.make_trace(kit.Made(operations=True))
    key = "model.layers.1.self_attn"
    other = kit.edited(one, 2, Kind.MODULE_OUTPUT, key, kit.flipped_bit((0, 0), 3))
    grids = compare(one, other).module_grids
    assert {kind for kind, _ in grids["decode"].rows} == {"module"}
    row = [site.path for _, site in grids["decode"].rows].index(key)
    wanted = torch.zeros_like(grids["decode"].classes)
    wanted[row, grids["decode"].columns.index(2)] = int(CoordinateClass.SURVIVING)
    assert torch.equal(grids["decode"].classes, wanted)
    assert not grids["prefill"].classes.any()
