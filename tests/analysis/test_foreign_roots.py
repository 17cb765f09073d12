from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fliptrace.analysis import compare
from fliptrace.trace import Kind, Layout, Trace
from fliptrace.verdicts import Origin, Outcome

LAYER = "model.layers.1"
UP = f"{LAYER}.mlp.up_proj"
O_PROJ = f"{LAYER}.self_attn.o_proj"
KEY = f"{LAYER}.self_attn.k_proj"
ATTENTION = f"{LAYER}.self_attn/scaled_dot_product_attention#0"

PAYLOADS = [
    (Kind.SHRINK, UP),
    (Kind.OPERAND, UP),
    (Kind.PROJECTION, UP),
    (Kind.CACHE, "cache.1"),
    (Kind.LOGITS_TOP, "logits"),
    (Kind.LOGITS_TOP_IDS, "logits"),
    (Kind.LOGITS_DIGEST, "logits"),
    (Kind.MODULE_INPUT, UP),
    (Kind.MODULE_OUTPUT, UP),
    (Kind.OPERATION_INPUT, ATTENTION),
    (Kind.OPERATION_OUTPUT, ATTENTION),
]


def planted(kit, *changes, **made):
    """A trace, and one with bits flipped at (step, kind, key, place)."""
    one = other = kit.make_trace(kit.Made(**made))
    for step, kind, key, place in changes:
        other = kit.edited(other, step, kind, key, kit.flipped_bit(place))
    return one, other


@pytest.mark.parametrize(("kind", "key"), PAYLOADS)
@settings(max_examples=10, deadline=None)
@given(step=st.integers(0, 3), bit=st.integers(0, 15))
def test_one_bit_in_any_payload_is_noticed(kit, kind, key, step, bit):
    """No kind of record may differ in a bit without the verdict saying so."""
    one = kit.make_trace(kit.Made(operations=True))
    place = {Kind.CACHE: (1, 0, 1, 2), Kind.LOGITS_TOP: (3,), Kind.LOGITS_TOP_IDS: (3,)}
    other = kit.edited(one, step, kind, key, kit.flipped_bit(place.get(kind, (0, 1)), bit))
    diff = compare(one, other)
    assert diff.outcome is not Outcome.IDENTICAL
    assert (diff.first_difference is not None) is (kind is Kind.SHRINK)
    if kind is not Kind.SHRINK:
        assert diff.foreign_root.step == step
        assert diff.foreign_root.precedes(diff.first_propagating)


@pytest.mark.parametrize("kind", [Kind.OPERAND_VALUES, Kind.LOGITS_FULL])
def test_one_bit_in_optional_payloads_is_noticed(kit, kind):
    """Kinds that are recorded on request count like the others."""
    one = kit.make_trace()
    keys = ["logits"] if kind is Kind.LOGITS_FULL else kit.Made().keys

    tensor = torch.zeros(20 if kind is Kind.LOGITS_FULL else (1, 6), dtype=torch.bfloat16)
    one.source.stored[2, kind] = kit.frame_of(2, kind, dict.fromkeys(keys, tensor))
    one = kit.with_step(one, 2, frames=(*one.steps[2].frames, str(kind)))
    place = (4,) if kind is Kind.LOGITS_FULL else (0, 4)
    diff = compare(one, kit.edited(one, 2, kind, keys[-1], kit.flipped_bit(place)))
    assert diff.outcome is Outcome.SURVIVING
    assert diff.foreign_root.step == 2


def test_an_operand_that_nothing_explains_is_unlocated(kit):
    """The sentence names what lies between and how to see more; the next site is not called a root."""
    diff = compare(
        *planted(kit, (0, Kind.OPERAND, O_PROJ, (3, 0)), (0, Kind.SHRINK, O_PROJ, (3, 0)))
    )
    root = diff.foreign_root
    assert (root.key, root.kind, root.step, root.position) == (O_PROJ, "operand", 0, 3)
    assert root.origin is Origin.UNLOCATED
    assert "the attention of layer 1" in root.explanation
    assert "--modules" in root.explanation
    assert diff.first_difference.origin is Origin.INHERITED
    assert diff.root_rows == 0


def test_an_operand_explained_by_an_earlier_row_is_not_foreign(kit):
    """Attention carries a difference from an earlier position to a later one, not the other way."""
    shrink = (0, Kind.SHRINK, KEY, (2, 0))
    output = (0, Kind.PROJECTION, KEY, (2, 0))

    def differing(row):
        one, other = planted(kit, shrink, output, (0, Kind.OPERAND, O_PROJ, (row, 0)))
        other = kit.edited(other, 0, Kind.SHRINK, KEY, kit.flipped_bit((2, 0), 20))
        return compare(one, other).foreign_root

    assert differing(2) is differing(3) is differing(4) is None
    assert differing(1).position == 1


def test_an_absorbed_root_explains_nothing(kit):
    """A surviving shrink whose output row is equal has not left its projection."""
    one = kit.make_trace()
    other = kit.edited(one, 0, Kind.SHRINK, KEY, kit.flipped_bit((2, 0), 20))
    other = kit.edited(other, 0, Kind.OPERAND, UP, kit.flipped_bit((2, 0)))
    diff = compare(one, other)
    assert diff.first_surviving is not None
    assert diff.foreign_root.key == UP


def test_a_projection_that_differs_by_itself_is_a_root(kit):
    """Operand and rounded shrink equal: the base projection or the expand gave another result."""
    latent = (0, Kind.SHRINK, UP, (4, 0))
    root = compare(*planted(kit, latent, (0, Kind.PROJECTION, UP, (4, 0)))).foreign_root
    assert (root.key, root.kind, root.position, root.origin) == (UP, "projection", 4, Origin.ROOT)


def test_a_later_projection_root_does_not_precede_the_first(kit):
    """A projection root after a surviving root is reported, and says that it came later."""
    one, other = planted(kit, (0, Kind.PROJECTION, KEY, (2, 0)), (2, Kind.PROJECTION, UP, (0, 0)))
    other = kit.edited(other, 0, Kind.SHRINK, KEY, kit.flipped_bit((2, 0), 20))
    diff = compare(one, other)
    assert (diff.foreign_root.key, diff.foreign_root.step) == (UP, 2)
    assert not diff.foreign_root.precedes(diff.first_propagating)


def test_a_cache_row_that_differs_by_itself_is_a_root(kit):
    """Key projections equal, key rows different; explained when the key projection differs too."""
    cache = (1, Kind.CACHE, "cache.1", (0, 0, 1, 1))
    root = compare(*planted(kit, cache)).foreign_root
    assert (root.key, root.kind, root.step, root.origin) == ("cache.1", "cache", 1, Origin.ROOT)
    one, other = planted(kit, cache, (1, Kind.PROJECTION, KEY, (0, 0)))
    other = kit.edited(other, 1, Kind.SHRINK, KEY, kit.flipped_bit((0, 0), 20))
    assert compare(one, other).foreign_root is None


def test_cached_differences_explain_later_steps(kit):
    """An operand of a later step is explained by a differing cache row of its own or a lower layer."""
    cause = [(0, Kind.PROJECTION, KEY, (2, 0)), (0, Kind.CACHE, "cache.1", (0, 2, 1, 1))]
    for key, foreign in ((O_PROJ, False), ("model.layers.0.self_attn.o_proj", True)):
        one, other = planted(kit, *cause, (2, Kind.OPERAND, key, (0, 0)))
        other = kit.edited(other, 0, Kind.SHRINK, KEY, kit.flipped_bit((2, 0), 20))
        found = compare(one, other).foreign_root
        assert (found is not None) is foreign


def test_logits_that_differ_by_themselves_are_a_root(kit):
    """All that was added to the last row is equal: the head is to blame; not when a layer differed there."""
    root = compare(*planted(kit, (0, Kind.LOGITS_DIGEST, "logits", (0, 0)))).foreign_root
    assert (root.kind, root.origin, root.position) == ("logits", Origin.ROOT, 4)
    blind = planted(kit, (0, Kind.LOGITS_DIGEST, "logits", (0, 0)), drop=(Kind.PROJECTION,))
    assert compare(*blind).foreign_root.origin is Origin.UNLOCATED
    one, other = planted(
        kit, (0, Kind.LOGITS_DIGEST, "logits", (0, 0)), (0, Kind.PROJECTION, UP, (4, 0))
    )
    other = kit.edited(other, 0, Kind.SHRINK, UP, kit.flipped_bit((4, 0), 20))
    assert compare(one, other).foreign_root is None


def test_a_changed_cache_digest_is_noticed(kit):
    """A cache that changed without a recorded row is named."""
    one = kit.with_step(kit.make_trace(), 2, cache_digest="0" * 32)
    other = kit.with_step(kit.make_trace(), 2, cache_digest="1" * 32)
    diff = compare(one, other)
    assert diff.outcome is Outcome.SURVIVING
    assert (diff.foreign_root.kind, diff.foreign_root.step) == ("cache", 2)


def test_equal_logits_with_other_tokens_blame_the_sampler(kit):
    """A flip without any difference of bits is not explained by the network."""
    one = kit.make_trace()
    diff = compare(one, kit.with_step(one, 3, chosen=11))
    assert diff.outcome is Outcome.TOKEN
    assert diff.foreign_root.kind == "token"


@settings(max_examples=30, deadline=None)
@given(step=st.integers(0, 3), row=st.integers(0, 4), layer=st.integers(0, 1))
def test_attention_is_named_and_never_the_next_module(kit, step, row, layer):
    """Attention that differs on equal inputs is the root; everything after it is inherited."""
    row = row if step == 0 else 0
    at = f"model.layers.{layer}"
    attention = f"{at}.self_attn/scaled_dot_product_attention#0"
    one, other = planted(
        kit,
        (step, Kind.OPERATION_OUTPUT, attention, (row, 0)),
        (step, Kind.OPERATION_INPUT, f"{at}.self_attn.o_proj/lora_shrink#0", (row, 0)),
        (step, Kind.OPERATION_OUTPUT, f"{at}.self_attn.o_proj/lora_shrink#0", (row, 0)),
        (step, Kind.OPERAND, f"{at}.self_attn.o_proj", (row, 0)),
        (step, Kind.PROJECTION, f"{at}.self_attn.o_proj", (row, 0)),
        (step, Kind.MODULE_INPUT, f"{at}.self_attn.o_proj", (row, 0)),
        (step, Kind.MODULE_OUTPUT, f"{at}.self_attn.o_proj", (row, 0)),
        operations=True,
    )
    other = kit.edited(
        other, step, Kind.SHRINK, f"{at}.self_attn.o_proj", kit.flipped_bit((row, 0), 20)
    )
    diff = compare(one, other)
    root = diff.foreign_root
    assert (root.key, root.kind, root.step) == (attention, "operation", step)
    assert root.position == one.steps[step].first_position + row
    assert root.origin is Origin.ROOT
    assert root.precedes(diff.first_difference)
    assert diff.first_difference.origin is Origin.INHERITED
    assert diff.roots == ()


def test_a_shrink_is_never_a_foreign_root(kit):
    """A latent or surviving shrink that shows among the operations stays a shrink."""
    name = f"{UP}/lora_shrink#0"
    for bit in (0, 20):
        one, other = planted(kit, (0, Kind.OPERATION_OUTPUT, name, (1, 0)), operations=True)
        other = kit.edited(other, 0, Kind.SHRINK, UP, kit.flipped_bit((1, 0), bit))
        diff = compare(one, other)
        assert diff.foreign_root is None
        assert diff.outcome is (Outcome.SURVIVING if bit else Outcome.LATENT)


def test_an_operation_after_a_shrink_does_not_precede_it(kit):
    """The order between shrinks and operations comes from the shrinks among the operations."""
    one, other = planted(kit, (0, Kind.OPERATION_OUTPUT, ATTENTION, (1, 0)), operations=True)
    early = kit.edited(other, 0, Kind.SHRINK, KEY, kit.flipped_bit((1, 0), 20))
    late = kit.edited(other, 0, Kind.SHRINK, O_PROJ, kit.flipped_bit((1, 0), 20))
    for trace, precedes in ((early, False), (late, True)):
        diff = compare(one, trace)
        assert diff.foreign_root.precedes(diff.first_surviving) is precedes


@pytest.mark.parametrize("alone", [True, False])
def test_another_batch_has_no_root_at_a_shrink_or_elsewhere(kit, alone):
    """Products and scans over other rows, or other rows' adapters, are another launch even if it is described alike."""
    differing = (0, Kind.PROJECTION, KEY, kit.flipped_bit((3, 0)))
    batches = [{} if alone else {"neighbours": {"count": 3}}, {"neighbours": {"count": 2}}]
    one, other = (kit.make_trace(kit.Made(), {"engine": batch}) for batch in batches)
    assert compare(other, kit.edited(other, *differing)).foreign_root.origin is Origin.ROOT
    root = compare(one, kit.edited(other, *differing)).foreign_root
    assert root.origin is Origin.CONFIGURATION_VARIANT
    assert "other batches" in root.explanation
    shrink = (0, Kind.SHRINK, KEY, kit.flipped_bit((3, 0), 20))
    assert len(compare(other, kit.edited(other, *shrink)).roots) == 1
    diff = compare(one, kit.edited(other, *shrink))
    assert not diff.roots
    assert diff.first_surviving_variant.site.path == KEY


def renamed(trace, rename):
    """The same trace under other keys."""
    source = copy.copy(trace.source)
    source.stored = {
        place: replace(
            frame,
            layout=Layout(
                tuple(replace(entry, key=rename(entry.key)) for entry in frame.layout.entries)
            ),
        )
        for place, frame in source.stored.items()
    }
    return Trace(source)


def test_the_innermost_module_of_a_rank_is_named(kit):
    """Paths end with the rank, so that a module's is no beginning of those inside it."""
    block = f"{LAYER}.self_attn"

    def on_rank(key):
        path, slash, name = key.partition("/")
        return f"{path}@rank1{slash}{name}" if path.startswith(block) else key

    pair = planted(
        kit,
        (2, Kind.MODULE_OUTPUT, block, (0, 0)),
        (2, Kind.MODULE_OUTPUT, O_PROJ, (0, 0)),
        operations=True,
    )
    root = compare(*(renamed(trace, on_rank) for trace in pair)).foreign_root
    assert (root.key, root.kind, root.origin) == (f"{O_PROJ}@rank1", "module", Origin.ROOT)


@pytest.mark.parametrize("rank", ["", "@rank1"])
def test_expand_is_not_blamed_for_a_latent_difference_in_a_slice(kit, rank):
    """A fused layer's expand reads the slices' FP32 shrinks: what rounding removes entered through one of them."""
    one, other = planted(
        kit,
        (1, Kind.SHRINK, f"{LAYER}.self_attn.q_proj", (0, 0)),
        (1, Kind.OPERATION_OUTPUT, f"{LAYER}.self_attn.q_proj/lora_shrink#0", (0, 0)),
        (1, Kind.OPERATION_INPUT, ATTENTION, (0, 0)),
        operations=True,
    )

    def fused(key):
        key = key.replace("self_attn.q_proj", f"self_attn.qkv_proj[q_proj]{rank}")
        return key.replace(ATTENTION, f"{LAYER}.self_attn.qkv_proj{rank}/lora_expand#0")

    diff = compare(*(renamed(trace, fused) for trace in (one, other)))
    assert diff.outcome is Outcome.LATENT
    assert diff.foreign_root is None
