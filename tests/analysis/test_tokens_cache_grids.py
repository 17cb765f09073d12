from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fliptrace.analysis import compare
from fliptrace.analysis.coordinates import boundary_reports
from fliptrace.analysis.roles import Role, role_of
from fliptrace.numerics import CoordinateClass, boundary_report
from fliptrace.sites import Site
from fliptrace.trace import Kind
from fliptrace.verdicts import Outcome

bits = st.integers(-(2**31), 2**31 - 1)


def as_float(pattern):
    return float(torch.tensor(pattern, dtype=torch.int32).view(torch.float32))


@settings(max_examples=300, deadline=None)
@given(
    first=bits,
    step=st.integers(-70000, 70000),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
)
def test_boundaries_of_many_equal_boundaries_of_one(first, step, dtype):
    """The vectorised reports are those of the specification, on any bits."""
    second = max(-(2**31), min(2**31 - 1, first + step))
    for pair in ((first, second), (first & ~0x7FFF, second & ~0x7FFF)):
        one, other = (
            torch.tensor([value], dtype=torch.int32).view(torch.float32) for value in pair
        )
        (found,) = boundary_reports(one, other, getattr(torch, dtype))
        wanted = boundary_report(float(one), float(other), getattr(torch, dtype))
        assert repr(found) == repr(wanted)  # NaN equals itself there


def test_the_flip_is_described(kit):
    """Tokens with their logits in both executions, texts, margins and ties."""
    one = kit.with_step(kit.make_trace(), 3, tied=2, top_values=(8.0, 8.0))
    other = kit.with_step(one, 3, chosen=11, tied=1, top_values=(8.0, 7.875))
    other = kit.edited(other, 3, Kind.LOGITS_TOP, "logits", kit.set_to((0,), 7.875))
    flip = compare(one, other).flip
    assert flip.step == 3
    assert (flip.reference_token.token_id, flip.candidate_token.token_id) == (10, 11)
    assert (flip.reference_token.reference_logit, flip.reference_token.candidate_logit) == (
        8.0,
        7.875,
    )
    assert flip.candidate_token.candidate_logit == 7.0
    assert flip.reference_token.text == "d"
    assert (flip.reference_margin, flip.candidate_margin) == (0.0, 0.125)
    assert flip.decided_by_tie_break == ("reference",)
    assert flip.tie_rule == "lowest token id"


def test_logits_of_the_flip_step_stay_out_of_the_statistics(kit):
    """Largest logit differences are given for steps with equal tokens only."""
    one = kit.make_trace()
    other = kit.edited(one, 1, Kind.LOGITS_TOP, "logits", kit.set_to((2,), 6.5))
    other = kit.edited(other, 3, Kind.LOGITS_TOP, "logits", kit.set_to((2,), 1.0))
    diff = compare(one, kit.with_step(other, 3, chosen=11))
    assert [step.largest_logit_difference for step in diff.steps] == [0.0, 0.5, 0.0, None]
    assert [step.logits_differ for step in diff.steps] == [False, True, False, True]


def test_equal_infinities_do_not_differ(kit):
    """Two infinite logits are a tie of margin 0, and as far apart in both executions as they are: not at all."""
    ends = {"top_values": (math.inf, math.inf), "tied": 2}
    one, other = (kit.with_step(kit.make_trace(), 1, **ends) for _ in range(2))
    for place in (0, 1):
        change = kit.set_to((place,), math.inf)
        one, other = (
            kit.edited(trace, 1, Kind.LOGITS_TOP, "logits", change) for trace in (one, other)
        )
    other = kit.edited(other, 1, Kind.LOGITS_TOP, "logits", kit.set_to((5,), 2.5))
    step = compare(one, other).steps[1]
    assert (step.reference_margin, step.candidate_margin) == (0.0, 0.0)
    assert step.largest_logit_difference == 0.5


def test_unrecorded_logits_are_not_equal(kit):
    """Without a digest equal top lists do not make equal logits."""
    drop = (Kind.LOGITS_DIGEST,)
    diff = compare(*(kit.make_trace(kit.Made(drop=drop)) for _ in range(2)))
    assert {step.logits_differ for step in diff.steps} == {None}


def test_cache_differences_are_counted(kit):
    """Keys and values apart, with positions and the largest difference, in a step's own rows."""
    one = kit.make_trace()
    other = one
    for place in ((0, 1, 0, 0), (0, 3, 1, 2), (1, 3, 0, 1)):
        other = kit.edited(other, 0, Kind.CACHE, "cache.1", kit.flipped_bit(place, 3))
    other = kit.edited(other, 2, Kind.CACHE, "cache.0", kit.set_to((1, 0, 0, 0), 100.0))
    first, second = compare(one, other).cache_differences
    assert (first.layer, first.step, first.keys, first.values, first.elements) == (1, 0, 2, 1, 60)
    assert first.positions == (1, 3)
    before = one.record("cache.1", Kind.CACHE, 0).float()
    after = other.record("cache.1", Kind.CACHE, 0).float()
    assert first.largest == float((before - after).abs().max())
    assert (second.layer, second.step, second.keys, second.values, second.positions) == (
        0,
        2,
        0,
        1,
        (6,),
    )


def test_grids_place_cache_rows_where_they_are_written(kit):
    """Key and value rows follow the value projection of their layer."""
    rows = compare(kit.make_trace(), kit.make_trace()).grids["prefill"].rows
    names = [what.module if kind == "shrink" else kind for kind, what in rows]
    assert names[:6] == [*kit.MODULES[:3], "key", "value", kit.MODULES[3]]
    assert len(rows) == 18


def test_grids_tell_not_observed_from_equal(kit):
    """What was not recorded in both traces is never shown as equal."""
    grid = compare(*(kit.make_trace(kit.Made(drop=(Kind.CACHE,))) for _ in range(2))).grids[
        "decode"
    ]
    for (kind, _), classes in zip(grid.rows, grid.classes, strict=True):
        wanted = CoordinateClass.EQUAL if kind == "shrink" else CoordinateClass.NOT_OBSERVED
        assert set(classes.tolist()) == {int(wanted)}
    assert grid.columns == (1, 2, 3)


def test_grid_cells_hold_the_worst_of_their_row(kit):
    """Class, magnitude, ULP, origin and count of one cell."""
    one = kit.make_trace()
    key = kit.Made().keys[8]
    other = kit.edited(one, 0, Kind.SHRINK, key, kit.flipped_bit((2, 1), 0))
    other = kit.edited(other, 0, Kind.SHRINK, key, kit.flipped_bit((2, 3), 17))
    grid = compare(one, other).grids["prefill"]
    row = next(
        n for n, (kind, site) in enumerate(grid.rows) if kind == "shrink" and site.path == key
    )
    assert grid.classes[row].tolist() == [0, 0, 2, 0, 0]
    assert int(grid.ulps[row, 2]) == 1 << 17
    assert int(grid.surviving[row, 2]) == 1
    assert int(grid.origins[row, 2]) == 1
    before, after = (trace.record(key, Kind.SHRINK, 0)[2] for trace in (one, other))
    assert float(grid.magnitudes[row, 2]) == float((before - after).abs().max())


def test_nan_makes_an_infinite_magnitude(kit):
    """A difference to NaN is the largest there is, and JSON can carry it."""
    one = kit.make_trace()
    other = kit.edited(one, 0, Kind.SHRINK, kit.Made().keys[0], kit.set_to((0, 0), math.nan))
    diff = compare(one, other)
    assert float(diff.grids["prefill"].magnitudes.max()) == math.inf
    assert diff.outcome is Outcome.SURVIVING


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("model.layers.0.self_attn.q_proj", Role.QUERY),
        ("model.layers.0.self_attn.qkv_proj", Role.ATTENTION_IN),
        ("transformer.h.3.attn.c_attn", Role.ATTENTION_IN),
        ("transformer.h.3.attn.c_proj", Role.ATTENTION_OUT),
        ("transformer.h.3.mlp.c_proj", Role.MLP_OUT),
        ("gpt_neox.layers.1.attention.dense", Role.ATTENTION_OUT),
        ("model.layers.0.mlp.gate_up_proj", Role.MLP_IN),
        ("model.layers.0.mlp.fc2", Role.MLP_OUT),
        ("model.layers.0.mixer.in_proj_x", Role.OTHER),
        ("lm_head", Role.OTHER),
    ],
)
def test_roles_are_read_from_names(path, role):
    """The common families' names, and OTHER for the rest."""
    assert role_of(Site.from_path(path)) is role
