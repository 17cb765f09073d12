from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fliptrace.analysis import compare
from fliptrace.numerics import CoordinateClass, SpecialDifference
from fliptrace.trace import Kind
from fliptrace.verdicts import Fate, Origin, Outcome

UP = "model.layers.1.mlp.up_proj"
MIDPOINT = 0.010345458984375  # a BF16 boundary: the paper's example
BELOW = 0.010345457121729851

places = st.tuples(
    st.integers(0, 3),  # step
    st.integers(0, 13),  # site
    st.integers(0, 4),  # row, prefill only
    st.integers(0, 3),  # rank index
)


def planted(kit, place, first, second, **made):
    """Two traces that differ in one shrink coordinate, with the values given."""
    step, site, row, index = place
    row = row if step == 0 else 0
    key = kit.Made(**made).keys[site]
    base = kit.make_trace(kit.Made(**made))
    one = kit.edited(base, step, Kind.SHRINK, key, kit.set_to((row, index), first))
    other = kit.edited(base, step, Kind.SHRINK, key, kit.set_to((row, index), second))
    return one, other, key, base.steps[step].first_position + row


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), operations=st.booleans())
def test_equal_traces_report_nothing(kit, seed, operations):
    """Two equal traces are identical, and every list of findings is empty."""
    made = kit.Made(seed=seed, operations=operations)
    diff = compare(kit.make_trace(made), kit.make_trace(made))
    assert diff.outcome is Outcome.IDENTICAL
    assert diff.first_difference is diff.first_surviving is diff.first_variant is None
    assert diff.foreign_root is diff.propagation is diff.flip is None
    assert diff.roots == diff.cache_differences == ()
    assert diff.statistics.differing == diff.root_rows == 0
    for grid in diff.grids.values():
        assert set(grid.classes.unique().tolist()) == {int(CoordinateClass.EQUAL)}


@settings(max_examples=60, deadline=None)
@given(place=places, survives=st.booleans())
def test_a_planted_difference_is_found_at_its_coordinate(kit, place, survives):
    """A latent or surviving difference is the first one, at its coordinate, with class and origin."""
    first, second = (MIDPOINT, BELOW) if survives else (1.0, 1.0000001192092896)
    one, other, key, position = planted(kit, place, first, second)
    diff = compare(one, other)
    found = diff.first_difference
    assert (found.site.path, found.step, found.position) == (key, place[0], position)
    assert found.origin is Origin.ROOT
    wanted = CoordinateClass.SURVIVING if survives else CoordinateClass.LATENT
    assert found.row_class is wanted
    (coordinate,) = found.coordinates
    assert coordinate.coordinate.rank_index == place[3]
    assert coordinate.coordinate_class is wanted
    assert (coordinate.reference, coordinate.candidate) == (first, second)
    assert coordinate.distance_ulp == (2 if survives else 1)
    assert diff.statistics.differing == 1
    assert diff.statistics.equal_operand_differing == 1
    assert diff.root_rows == 1
    assert len(diff.roots) == diff.surviving_root_rows == int(survives)
    assert diff.outcome is (Outcome.SURVIVING if survives else Outcome.LATENT)
    assert diff.foreign_root is None
    grid = diff.grids["decode" if place[0] else "prefill"]
    assert grid.rows[(grid.classes > 0).nonzero()[0, 0]][1].path == key
    assert int((grid.classes > 0).sum()) == 1
    assert grid.columns[(grid.classes > 0).nonzero()[0, 1]] == (place[0] or position)


def test_the_papers_value_is_described(kit):
    """The boundary, both rounded values and their bits are those of the paper."""
    one, other, _, _ = planted(kit, (0, 12, 3, 2), MIDPOINT, BELOW)
    (coordinate,) = compare(one, other).first_surviving.coordinates
    assert coordinate.boundary.boundary == MIDPOINT
    assert coordinate.boundary.reference_on_boundary
    assert coordinate.boundary.boundaries_crossed == 1
    assert coordinate.boundary.rounded_reference == 0.0103759765625
    assert coordinate.boundary.rounded_candidate == 0.01031494140625
    assert coordinate.rounded_dtype == "bfloat16"
    assert coordinate.reference_bits.startswith("0x3c29")


@settings(max_examples=25, deadline=None)
@given(place=places, other_place=places, survives=st.booleans())
def test_swapping_the_traces_swaps_the_finding(kit, place, other_place, survives):
    """First rows, classes and counts are the same in both directions."""
    first, second = (MIDPOINT, BELOW) if survives else (1.0, 1.0000001192092896)
    one, other, _, _ = planted(kit, place, first, second)
    step, site, row, index = other_place
    assume((place[0], place[1], place[3]) != (step, site, index))
    other = kit.edited(
        other,
        step,
        Kind.SHRINK,
        kit.Made().keys[site],
        kit.flipped_bit((row if step == 0 else 0, index)),
    )
    forth, back = compare(one, other), compare(other, one)
    assert forth.outcome is back.outcome
    assert forth.first_difference.name == back.first_difference.name
    assert forth.first_difference.row_class is back.first_difference.row_class
    assert [root.name for root in forth.roots] == [root.name for root in back.roots]
    assert forth.statistics == back.statistics
    for phase in ("prefill", "decode"):
        assert torch.equal(forth.grids[phase].classes, back.grids[phase].classes)


@pytest.mark.parametrize(
    ("first", "second", "special", "wanted"),
    [
        (0.0, -0.0, SpecialDifference.SIGN_OF_ZERO, CoordinateClass.SURVIVING),
        # Rounding gives every NaN one payload.
        (float("nan"), None, SpecialDifference.NAN_PAYLOAD, CoordinateClass.LATENT),
        (1.0, float("nan"), None, CoordinateClass.SURVIVING),
        (float("inf"), float("-inf"), None, CoordinateClass.SURVIVING),
    ],
)
def test_special_values_are_named(kit, first, second, special, wanted):
    """Signs of zero and NaN payloads are differences and are named; nothing breaks on infinities."""
    base = kit.make_trace()
    one = kit.edited(base, 1, Kind.SHRINK, UP, kit.set_to((0, 1), first))
    change = kit.flipped_bit((0, 1), 20) if second is None else kit.set_to((0, 1), second)
    other = kit.edited(one, 1, Kind.SHRINK, UP, change)
    diff = compare(one, other)
    (coordinate,) = diff.first_difference.coordinates
    assert coordinate.special is special
    assert coordinate.coordinate_class is wanted
    assert diff.to_json()["first_difference"]


def test_fate_follows_the_projection(kit):
    """A surviving root is propagating when its output row differs, absorbed when not, else not observed."""
    one, other, key, _ = planted(kit, (0, 12, 3, 2), MIDPOINT, BELOW)
    absorbed = compare(one, other)
    assert absorbed.first_surviving.fate is Fate.ABSORBED
    assert absorbed.first_propagating is None
    moved = kit.edited(other, 0, Kind.PROJECTION, key, kit.flipped_bit((3, 0)))
    propagating = compare(one, moved)
    assert propagating.first_propagating.fate is Fate.PROPAGATING
    assert propagating.foreign_root is None
    blind = planted(kit, (0, 12, 3, 2), MIDPOINT, BELOW, drop=(Kind.PROJECTION,))[:2]
    assert compare(*blind).first_surviving.fate is Fate.NOT_OBSERVED


def test_a_differing_operand_makes_a_row_inherited_and_leaves_other_rows_roots(kit):
    """Origins are decided row by row."""
    one = kit.make_trace()
    other = one
    for row in (1, 3):
        other = kit.edited(other, 0, Kind.SHRINK, UP, kit.flipped_bit((row, 0), 16))
    other = kit.edited(other, 0, Kind.OPERAND, UP, kit.flipped_bit((1, 0)))
    diff = compare(one, other)
    assert diff.first_difference.origin is Origin.INHERITED
    assert [(root.position, root.origin) for root in diff.roots] == [(3, Origin.ROOT)]
    assert diff.statistics.equal_operand_differing == 1
    assert diff.statistics.differing == 2


def test_missing_operands_leave_rows_unlocated(kit):
    """Without operands nothing is called a root, and coverage says so."""
    one, other, _, _ = planted(kit, (1, 3, 0, 0), MIDPOINT, BELOW, drop=(Kind.OPERAND,))
    diff = compare(one, other)
    assert diff.first_difference.origin is Origin.UNLOCATED
    assert diff.roots == ()
    assert any("Operands were not recorded" in sentence for sentence in diff.coverage.not_observed)


def test_two_reductions_have_no_roots(kit):
    """With another reduction every differing row with equal operands is a configuration-variant."""
    one, _, _, _ = planted(kit, (1, 3, 0, 0), MIDPOINT, BELOW)
    _, other, key, _ = planted(kit, (1, 3, 0, 0), MIDPOINT, BELOW, reduction="unsplit/64")
    diff = compare(one, other)
    assert not diff.same_reduction
    assert diff.roots == ()
    assert diff.first_variant.site.path == key
    assert diff.first_variant.origin is Origin.CONFIGURATION_VARIANT
    assert diff.first_surviving_variant == diff.first_variant
    assert not any("launched" in sentence for sentence in diff.coverage.missing)
    earlier = kit.edited(other, 0, Kind.SHRINK, key, kit.flipped_bit((2, 0)))
    diff = compare(one, earlier)
    assert diff.first_variant.row_class is CoordinateClass.LATENT
    assert (diff.first_surviving_variant.step, diff.first_surviving_variant.surviving) == (1, 1)
    assert (
        "the first surviving configuration-variant, survives rounding"
        in (diff.propagation.sentences[0])
    )


def test_a_variant_that_leaves_its_shrink_is_followed_before_what_came_later(kit):
    """Where the difference went starts where it started: at the variant, not at a later difference elsewhere."""
    one, _, _, _ = planted(kit, (1, 3, 0, 0), MIDPOINT, BELOW)
    _, other, key, _ = planted(kit, (1, 3, 0, 0), MIDPOINT, BELOW, reduction="unsplit/64")
    later = kit.edited(other, 3, Kind.CACHE, "cache.0", kit.flipped_bit((0, 0, 0, 0)))
    absorbed = compare(one, later)
    assert absorbed.foreign_root is not None
    assert absorbed.propagation.sentences[0] == absorbed.foreign_root.explanation
    moved = kit.edited(later, 1, Kind.PROJECTION, key, kit.flipped_bit((0, 0)))
    diff = compare(one, moved)
    assert diff.first_surviving_variant.fate is Fate.PROPAGATING
    assert "the first surviving configuration-variant" in diff.propagation.sentences[0]


def test_another_launch_makes_a_variant(kit):
    """A difference under another launch is no root; a launch alone is no difference."""
    one, _, _, _ = planted(kit, (1, 3, 0, 0), MIDPOINT, BELOW)
    same, other, _, _ = planted(kit, (1, 3, 0, 0), MIDPOINT, BELOW, launch="grid 4")
    assert compare(one, other).first_difference.origin is Origin.CONFIGURATION_VARIANT
    assert compare(one, other).first_surviving_variant == compare(one, other).first_difference
    alone = compare(one, same)
    assert alone.outcome is Outcome.IDENTICAL
    # Nothing differs, and yet it is told: 14 shrinks in each of 4 steps.
    (sentence,) = alone.coverage.missing
    assert sentence.startswith("56 shrinks were launched differently in the candidate")
    assert "first layer 0 self_attn.q_proj (step 0);" in sentence
    assert compare(one, one).coverage.missing == ()


def test_another_shape_is_structural(kit):
    """A record of another shape, or without a partner, is structural and named in the coverage."""
    one = kit.make_trace()
    other = kit.edited(one, 2, Kind.SHRINK, UP, lambda tensor: tensor[:, :3])
    diff = compare(one, other)
    assert diff.first_difference.row_class is CoordinateClass.STRUCTURAL
    assert diff.first_difference.site.path == UP
    assert diff.outcome is Outcome.SURVIVING
    assert any(UP in sentence for sentence in diff.coverage.missing)
    narrow = kit.make_trace()
    frame = narrow.source.stored[2, Kind.SHRINK]
    kept = {e.key: frame.tensor(e.key) for e in frame.layout.entries if e.key != UP}
    narrow.source.stored[2, Kind.SHRINK] = kit.frame_of(2, Kind.SHRINK, kept, "grid 8")
    for pair in ((one, narrow), (narrow, one)):
        diff = compare(*pair)
        assert diff.first_difference.row_class is CoordinateClass.STRUCTURAL
        assert diff.first_difference.origin is Origin.UNLOCATED
        assert any(UP in sentence and "only" in sentence for sentence in diff.coverage.missing)


def test_a_float32_model_has_no_boundary(kit):
    """Without rounding every difference survives, and the coverage says why."""
    one, other, _, _ = planted(kit, (0, 2, 1, 1), 1.0, 1.0000001192092896, dtype="float32")
    diff = compare(one, other)
    assert diff.first_surviving.coordinates[0].boundary.boundary is None
    assert diff.rounded_dtype == "float32"
    assert (
        "differs (an FP32 model has no rounding boundary), but the FP32 addition that follows"
        in (diff.propagation.sentences[0])
    )
    assert any("no boundary" in sentence for sentence in diff.coverage.not_observed)


def test_the_threshold_changes_without_a_new_run(kit):
    """Another rounded_dtype re-decides survival on the same traces."""
    one, other, _, _ = planted(kit, (0, 2, 1, 1), 1.0, 1.0004882)  # next to an FP16 midpoint
    assert compare(one, other).outcome is Outcome.LATENT
    again = compare(one, other, rounded_dtype="float32")
    assert again.first_surviving is not None
    assert any("not rounded to bfloat16 (float32)" in one for one in again.coverage.not_observed)
    assert "differs in FP32, but the 16-bit addition that follows" in again.propagation.sentences[0]
    assert again.foreign_root is None


def test_mixed_ranks_are_compared_by_shape(kit):
    """Records of several ranks in one frame are each compared at their own width."""
    one = kit.make_trace()
    key = "model.layers.0.self_attn.v_proj"
    one = kit.edited(
        one, 0, Kind.SHRINK, key, lambda tensor: torch.cat([tensor, tensor, tensor], 1)
    )
    other = kit.edited(one, 0, Kind.SHRINK, key, kit.flipped_bit((2, 11), 16))
    found = compare(one, other).first_difference
    assert (found.site.path, found.position) == (key, 2)
    assert found.coordinates[0].coordinate.rank_index == 11
