from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fliptrace_kernels import (
    ArrivalSchedule,
    ReductionError,
    ShrinkInputError,
    lora_shrink,
    parse_reduction,
    partials,
    specification,
)

UNIT = 2.0**-24  # half an ULP of FP32 at 1.0
REDUCTIONS = [
    "atomic:8",
    "atomic:1",
    "atomic:3/16",
    "unsplit",
    "deterministic:8",
    "deterministic:5/64",
    "tree:4/16",
    "tree:8",
    "local:8",
    "local",
    "atomic:vllm",
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def same_bits(first, second):
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


def random_call(seed, rows, size, rank, slices, dtype, adapters=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=generator).to(dtype)
    shape = (adapters, rank, size) if adapters else (rank, size)
    weights = [torch.randn(shape, generator=generator).to(dtype) for _ in range(slices)]
    mapping = None
    if adapters:
        mapping = torch.randint(-1, adapters, (rows,), generator=generator, dtype=torch.int32)
    return x, weights, mapping


calls = st.builds(
    random_call,
    st.integers(0, 2**31),
    st.integers(0, 9),
    st.integers(1, 300),
    st.integers(1, 20),
    st.integers(1, 3),
    st.sampled_from(DTYPES),
    st.integers(0, 3),
)


def plain_loops(call, reduction, scale, schedule=None, key=0):
    x, weights, mapping = call
    reduction = parse_reduction(reduction).for_rows(x.shape[0])
    orders = None
    if reduction.needs_arrival_order:
        orders = schedule.orders(
            key,
            slices=len(weights),
            rows=x.shape[0],
            rank=weights[0].shape[-2],
            splits=reduction.splits,
        )
    return specification.shrink(x, weights, mapping, reduction, scale, orders)


@settings(deadline=None, max_examples=60)
@given(calls, st.sampled_from(REDUCTIONS), st.sampled_from([1.0, 0.7, -2.0]))
def test_vectorised_equals_plain_loops_bit_for_bit(call, name, scale):
    """What runs on a CPU has the bits of the plain loops, for any shape, tail and mapping."""
    schedule = ArrivalSchedule(7)
    x, weights, mapping = call
    result = lora_shrink(
        x, weights, mapping, reduction=name, scale=scale, schedule=schedule, call_key=11
    )
    assert result.is_contiguous()
    assert same_bits(result, plain_loops(call, name, scale, schedule, 11))


@settings(deadline=None, max_examples=60)
@given(calls, st.sampled_from(REDUCTIONS), st.sampled_from([1.0, 0.7]))
def test_error_against_float64_is_bounded(call, name, scale):
    """Every output is as near to the exact sum as its number of roundings promises."""
    x, weights, mapping = call
    reduction = parse_reduction(name).for_rows(x.shape[0])
    result = lora_shrink(
        x, weights, mapping, reduction=name, scale=scale, schedule=ArrivalSchedule(3)
    )
    rounds = math.ceil(x.shape[1] / reduction.block_k / reduction.splits)
    roundings = math.log2(reduction.block_k) + rounds + reduction.splits + 3
    for index, a in enumerate(weights):
        stacked = (a if a.ndim == 3 else a[None]).double()
        adapter = torch.zeros(x.shape[0], dtype=torch.long) if mapping is None else mapping.long()
        chosen = stacked[adapter.clamp(min=0)]  # [M, R, K]
        live = (adapter >= 0)[:, None]
        terms = chosen * x.double()[:, None, :] * scale
        exact = terms.sum(-1) * live
        bound = terms.abs().sum(-1) * live * 1.01 * roundings * UNIT
        assert ((result[index].double() - exact).abs() <= bound).all()


def test_partials_are_dealt_round_robin():
    """Split p holds blocks p, p + S, ..., and splits without a block hold 0.0."""
    x = torch.ones(1, 5 * 16)
    a = torch.arange(1, 6).repeat_interleave(16).float()[None]
    result = partials(x, a, "deterministic:3/16")
    assert result.flatten().tolist() == [16.0 * (1 + 4), 16.0 * (2 + 5), 16.0 * 3]
    assert partials(x, a, "deterministic:8/16")[5:].tolist() == [[[0.0]]] * 3


def test_scale_place():
    """Atomic partials come scaled, deterministic ones unscaled."""
    x, (a,), _ = random_call(0, 3, 100, 4, 1, torch.bfloat16)
    plain = partials(x, a, "atomic:8", 1.0)
    assert same_bits(partials(x, a, "atomic:8", 0.7), plain * 0.7)
    assert same_bits(partials(x, a, "deterministic:8", 0.7), plain)


def test_total_is_partials_in_order():
    """The total is 0.0 plus the partials in increasing order, then the scale."""
    call = random_call(1, 5, 600, 16, 1, torch.bfloat16)
    sums = partials(call[0], call[1][0], "deterministic:8")
    total = torch.zeros_like(sums[0])
    for partial in sums:
        total = total + partial
    result = lora_shrink(call[0], call[1], reduction="deterministic:8", scale=0.7)
    assert same_bits(result[0], total * 0.7)


def test_tree_and_local_orders_by_hand():
    """The trees of `tree:8` and `local:8`, written out, give the bits of the implementation."""
    call = random_call(4, 5, 600, 16, 1, torch.bfloat16)
    p = partials(call[0], call[1][0], "tree:8")
    pairs = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]))
    groups = (((p[0] + p[1]) + p[2]) + p[3]) + (((p[4] + p[5]) + p[6]) + p[7])
    tree = lora_shrink(call[0], call[1], reduction="tree:8", scale=0.7)[0]
    local = lora_shrink(call[0], call[1], reduction="local:8", scale=0.7)[0]
    assert same_bits(tree, pairs * 0.7)
    assert same_bits(local, groups * 0.7)
    assert not same_bits(tree, local)
    assert same_bits(p, partials(call[0], call[1][0], "local:8"))


def test_negative_zero_products():
    """A row of zeros gives +0.0 whatever the signs; only a scaled total can be -0.0."""
    x, a = torch.zeros(2, 64), -torch.ones(3, 64)
    for name in REDUCTIONS:
        result = lora_shrink(x, [a], reduction=name, schedule=ArrivalSchedule(0))
        assert same_bits(result, torch.zeros(1, 2, 3))
        scaled = lora_shrink(x, [a], reduction=name, schedule=ArrivalSchedule(0), scale=-1.0)
        assert same_bits(scaled, plain_loops((x, [a], None), name, -1.0, ArrivalSchedule(0)))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_row_bits_do_not_depend_on_the_batch(name):
    """A row alone has the bits it has among others, NaN and Inf included, on any thread count."""
    x, weights, _ = random_call(2, 70, 600, 16, 2, torch.bfloat16)
    x[3], x[5] = float("nan"), float("inf")
    schedule = ArrivalSchedule(1)
    together = lora_shrink(x, weights, reduction=name, schedule=schedule)
    first = lora_shrink(x[:1], weights, reduction=name, schedule=schedule)
    assert same_bits(together[:, :1].contiguous(), first)
    some = lora_shrink(x[:23], weights, reduction=name, schedule=schedule)
    assert same_bits(together[:, :23].contiguous(), some)
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if threads == 1 else 1)
    try:
        again = lora_shrink(x, weights, reduction=name, schedule=schedule)
    finally:
        torch.set_num_threads(threads)
    assert same_bits(together, again)


def test_combine_checks_its_order():
    """An order of arrival is required by atomic and refused by the rest."""
    sums = torch.zeros(8, 2, 3)
    order = ArrivalSchedule(0).orders(0, slices=1, rows=2, rank=3, splits=8)[0]
    with pytest.raises(ReductionError, match="needs an order"):
        specification.combine(sums, "atomic:8")
    with pytest.raises(ReductionError, match="order of its own"):
        specification.combine(sums, "deterministic:8", order=order)


def test_partials_refuse_wrong_shapes():
    """partials takes one slice of one adapter."""
    with pytest.raises(ShrinkInputError, match=r"x \[M, K\]"):
        partials(torch.zeros(2, 8), torch.zeros(1, 3, 8), "unsplit")


def test_bit_comparison_sees_one_bit():
    """The comparison these tests rest on fails on a single flipped bit, and on a zero's sign."""
    value = torch.randn(4, 4)
    changed = value.clone()
    changed.view(torch.int32)[2, 1] ^= 1
    assert same_bits(value, value.clone())
    assert not same_bits(value, changed)
    assert not same_bits(torch.zeros(1), -torch.zeros(1))
