from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from fliptrace.analysis import compare
from fliptrace.analysis.evidence import woven_labels
from fliptrace.errors import InputError, TraceMismatchError
from fliptrace.trace import Kind, Trace
from fliptrace.verdicts import Outcome


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("model", "sha256"),
        ("model", "dtype"),
        ("adapter", "sha256"),
        ("adapter", "scaling_sha256"),
        ("prompt", "ids_sha256"),
        ("engine", "sites"),
    ],
)
def test_other_identities_are_refused_by_name(kit, section, key):
    """The message names the key and both values."""
    sections = dict(kit.make_trace().manifest.sections)
    base = {**sections, "engine": {"sites": 14}}
    other = {**base, section: {**base[section], key: "other"}}
    with pytest.raises(TraceMismatchError) as caught:
        compare(kit.make_trace(manifest=base), kit.make_trace(manifest=other))
    assert f"{section}.{key}" in str(caught.value) or "sites" in str(caught.value)
    assert "other" in str(caught.value)


def test_other_prompts_say_where_they_differ(kit):
    """With stored ids the first differing index is named."""
    traces = [
        kit.make_trace(manifest={"prompt": {"ids_sha256": str(ids), "ids": ids}})
        for ids in ([1, 2, 3], [1, 7, 3])
    ]
    with pytest.raises(TraceMismatchError, match=r"index 1: 2 and 7"):
        compare(*traces)
    one = kit.make_trace()
    fed = kit.with_step(one, 0, token_ids=(100, 101, 99, 103, 104))
    with pytest.raises(TraceMismatchError, match=r"index 2 \(102 and 99\)"):
        compare(one, fed)


def test_other_sites_are_refused(kit):
    """Traces without a common site are no pair."""
    one, other = kit.make_trace(), kit.make_trace()
    frame = other.source.stored[0, Kind.SHRINK]
    other.source.stored[0, Kind.SHRINK] = kit.frame_of(
        0, Kind.SHRINK, {"elsewhere": frame.tensor(0)}
    )
    with pytest.raises(TraceMismatchError, match="sites"):
        compare(one, other)


def test_nonsense_dtypes_are_refused(kit):
    """Only the types that models round to are taken."""
    with pytest.raises(InputError, match="float64"):
        compare(kit.make_trace(), kit.make_trace(), rounded_dtype="float64")


def test_comparison_stops_at_the_flip(kit):
    """Nothing after the first differing token is compared, and the flip's own step is."""
    one = kit.make_trace()
    other = kit.with_step(one, 1, chosen=11)
    other = kit.with_step(other, 2, token_ids=(11,))
    other = kit.edited(other, 3, Kind.SHRINK, kit.Made().keys[0], kit.flipped_bit((0, 0), 20))
    diff = compare(one, other)
    assert diff.flip.step == 1
    assert len(diff.steps) == diff.coverage.steps_compared == 2
    assert diff.first_difference is None
    assert diff.grids["decode"].columns == (1,)
    assert diff.flip.tokens_after == (3, 3)


def test_forced_tokens_that_differ_stop_the_comparison(kit):
    """Other input without another choice is a gap in coverage, not a flip."""
    one = kit.make_trace()
    diff = compare(one, kit.with_step(one, 2, token_ids=(55,)))
    assert diff.flip is None
    assert diff.coverage.steps_compared == 2
    assert any("Step 2" in sentence for sentence in diff.coverage.missing)


def test_an_incomplete_trace_is_compared_as_far_as_it_goes(kit):
    """The common part is compared, and coverage says what is not."""
    one = kit.make_trace()
    source = copy.copy(one.source)
    source.steps = source.steps[:2]
    source.closing = replace(source.closing, complete=False, stop_reason="killed", steps=2)
    diff = compare(one, Trace(source))
    assert diff.outcome is Outcome.IDENTICAL
    assert diff.coverage.steps_compared == 2
    assert any("killed" in sentence for sentence in diff.coverage.missing)
    assert any("Steps 2 to 3" in sentence for sentence in diff.coverage.missing)
    assert diff.generated == (4, 2)


def test_one_sided_kinds_are_gaps_not_differences(kit):
    """A kind that only one trace recorded is missing from the comparison, which says so."""
    one, other = (
        kit.make_trace(kit.Made(operations=True)),
        kit.make_trace(kit.Made(operations=True)),
    )
    for step in range(4):
        del other.source.stored[step, Kind.OPERATION_OUTPUT]
    diff = compare(one, other)
    assert diff.outcome is Outcome.IDENTICAL
    assert any(
        "operation_output" in sentence and "steps 0 to 3" in sentence
        for sentence in diff.coverage.missing
    )


def test_coverage_repeats_what_the_traces_say(kit):
    """What engines and recorders did not observe, and the control, are passed on."""
    recording = {
        "not_observed": ["The head was not recorded."],
        "observer_control": "Passed on 8 tokens.",
    }
    diff = compare(kit.make_trace(), kit.make_trace(manifest={"recording": recording}))
    assert "The head was not recorded." in diff.coverage.not_observed
    assert diff.coverage.observer_control == "Passed on 8 tokens."
    assert (
        compare(kit.make_trace(), kit.make_trace()).coverage.observer_control
        == "Observer control was not run."
    )
    assert (
        "recording.not_observed",
        None,
        ["The head was not recorded."],
    ) in diff.manifest_differences


def test_progress_is_told_of_every_step(kit):
    """One call per step, with the number of all."""
    calls = []
    compare(kit.make_trace(), kit.make_trace(), progress=lambda done, of: calls.append((done, of)))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_steps_may_come_in_one_call(kit):
    """A source that returns whole steps is read that way."""
    one = kit.make_trace()
    calls = []

    class Whole(kit.MemorySource):
        def step_frames(self, step):
            calls.append(step)
            return {kind: frame for (at, kind), frame in self.stored.items() if at == step}

    source = Whole(one.manifest, one.closing, one.steps, one.source.stored)
    assert compare(one, Trace(source)).outcome is Outcome.IDENTICAL
    assert calls == [0, 1, 2, 3]


@pytest.mark.parametrize("wrap", [bytes, bytearray, lambda data: memoryview(bytes(data))])
def test_payloads_of_any_buffer_type_compare(kit, wrap):
    """Bytes, bytearrays and memoryviews are the same payload."""
    one = kit.make_trace()
    source = copy.copy(one.source)
    source.stored = {
        place: replace(frame, payload=wrap(frame.payload)) for place, frame in source.stored.items()
    }
    assert compare(one, Trace(source)).outcome is Outcome.IDENTICAL
    other = kit.edited(Trace(source), 0, Kind.SHRINK, kit.Made().keys[3], kit.flipped_bit((2, 1)))
    assert compare(Trace(source), other).first_difference.position == 2


def test_a_key_that_occurs_twice_is_paired_by_occurrence(kit):
    """A site that runs twice in a step keeps both records apart."""
    one = kit.make_trace()
    key = kit.Made().keys[0]
    frame = one.source.stored[1, Kind.SHRINK]
    layout = replace(
        frame.layout,
        entries=(
            frame.layout.entries[0],
            replace(frame.layout.entries[1], key=key),
            *frame.layout.entries[2:],
        ),
    )
    one.source.stored[1, Kind.SHRINK] = replace(frame, layout=layout)
    source = copy.copy(one.source)
    payload = bytearray(frame.payload)
    payload[2] ^= 0x10  # the first of the two
    source.stored = {
        **source.stored,
        (1, Kind.SHRINK): replace(frame, layout=layout, payload=bytes(payload)),
    }
    found = compare(one, Trace(source)).first_difference
    assert (found.site.path, found.order) == (key, 0)


def test_another_execution_order_is_paired_by_key_and_named(kit):
    """Records that ran in another order are compared with their own, and coverage says that they did."""
    one, other = kit.make_trace(), kit.make_trace()
    frame = other.source.stored[0, Kind.SHRINK]
    tensors = {entry.key: frame.tensor(entry.key) for entry in frame.layout.entries}
    swapped = dict(reversed(list(tensors.items())))
    other.source.stored[0, Kind.SHRINK] = kit.frame_of(0, Kind.SHRINK, swapped, "grid 8")
    diff = compare(one, other)
    assert diff.first_difference is None
    assert any("another order" in sentence for sentence in diff.coverage.missing)
    changed = kit.edited(other, 0, Kind.SHRINK, kit.Made().keys[5], kit.flipped_bit((3, 1)))
    found = compare(one, changed).first_difference
    assert (found.site.path, found.position, found.order) == (kit.Made().keys[5], 3, 5)


def test_labels_of_two_engines_are_woven_in_execution_order():
    """What one trace alone has stands before what it precedes, so that keys come before the attention they feed."""
    split = ("q", "k", "v", "o", "gate", "up", "down")
    fused = ("qkv[q]", "qkv[k]", "qkv[v]", "o", "gate_up[gate]", "gate_up[up]", "down", "head")
    assert woven_labels(split, fused) == (
        "q", "k", "v", "qkv[q]", "qkv[k]", "qkv[v]", "o", "gate", "up", "gate_up[gate]", "gate_up[up]", "down", "head",
    )  # fmt: skip
    assert woven_labels(split, split) == split
    assert woven_labels((), fused) == fused
