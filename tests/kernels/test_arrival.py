from __future__ import annotations

import pytest
import torch

from fliptrace_kernels import ArrivalSchedule, ReductionError, lora_shrink

SHAPE = {"slices": 2, "rows": 5, "rank": 4, "splits": 8}
PINNED = [[[[6, 2, 1, 5, 0, 4, 7, 3]], [[5, 4, 6, 3, 7, 2, 1, 0]]]]


def test_every_order_is_a_permutation():
    """At every output each split arrives exactly once."""
    orders = ArrivalSchedule(7).orders(3, **SHAPE)
    assert orders.shape == (2, 5, 4, 8)
    assert torch.equal(orders.sort(-1).values, torch.arange(8).expand(2, 5, 4, 8))


def test_outputs_have_orders_of_their_own():
    """Outputs of one call do not share an order: 40 outputs show nearly 40 orders."""
    orders = ArrivalSchedule(7).orders(3, **SHAPE).view(-1, 8)
    assert len(set(map(tuple, orders.tolist()))) >= 38


def test_orders_ignore_history_and_batch():
    """Orders depend on seed, key and place alone."""
    first = ArrivalSchedule(7).orders(3, **SHAPE)
    ArrivalSchedule(7).orders(4, **SHAPE)
    torch.manual_seed(1)
    assert torch.equal(first, ArrivalSchedule(7).orders(3, **SHAPE))
    alone = ArrivalSchedule(7).orders(3, **(SHAPE | {"rows": 1}))
    assert torch.equal(first[:, :1], alone)
    row = ArrivalSchedule(7).row_orders(3, None, slices=2, rank=4, splits=8)
    assert torch.equal(row.view(2, 4, 8), alone[:, 0])


@pytest.mark.parametrize(("seed", "key"), [(8, 3), (7, 4), (7, -3), (7, 3 + 2**63)])
def test_seed_and_key_change_orders(seed, key):
    """Another seed or key gives other orders at most outputs."""
    reference = ArrivalSchedule(7).orders(3, **SHAPE)
    candidate = ArrivalSchedule(seed).orders(key, **SHAPE)
    assert (reference != candidate).any(-1).float().mean() > 0.9


def test_pinned_orders():
    """Stored schedules stay valid: these orders may never change."""
    assert ArrivalSchedule(7).orders(3, slices=1, rows=2, rank=1, splits=8).tolist() == PINNED


def test_orders_are_uniform():
    """All 24 orders of 4 splits are equally likely, over outputs and over calls."""
    over_outputs = ArrivalSchedule(0).orders(0, slices=1, rows=1500, rank=16, splits=4).view(-1, 4)
    over_calls = torch.cat(
        [
            ArrivalSchedule(0).orders(key, slices=1, rows=1, rank=16, splits=4).view(-1, 4)
            for key in range(1500)
        ]
    )
    for orders in (over_outputs, over_calls):
        _, counts = (orders * torch.tensor([64, 16, 4, 1])).sum(-1).unique(return_counts=True)
        assert len(counts) == 24
        chi_squared = ((counts - 1000.0) ** 2 / 1000.0).sum().item()
        assert chi_squared < 49.7  # 99.9 % quantile at 23 degrees of freedom


def test_description_and_refusals():
    """A schedule says that it is simulated, and refuses seeds it cannot hold."""
    assert ArrivalSchedule(7).describe() == "simulated schedule, seed 7"
    for seed in (-1, 1 << 63, 1.5, True):
        with pytest.raises(ReductionError, match="schedule seed"):
            ArrivalSchedule(seed)


def test_orders_change_half_the_outputs_and_few_survive_rounding():
    """Two schedules differ in 40 to 65 % of FP32 outputs; about 1e-4 of those differ in BF16."""
    generator = torch.Generator().manual_seed(20)
    different = surviving = outputs = 0
    for key in range(8):
        x = torch.randn(1024, 256, generator=generator).bfloat16()
        a = torch.randn(128, 256, generator=generator).bfloat16()
        results = [
            lora_shrink(x, [a], reduction="atomic:8", schedule=ArrivalSchedule(seed), call_key=key)
            for seed in (1, 2)
        ]
        different += int((results[0] != results[1]).sum())
        surviving += int((results[0].bfloat16() != results[1].bfloat16()).sum())
        outputs += results[0].numel()
    assert 0.40 < different / outputs < 0.65
    assert 0.4e-4 < surviving / different < 2.5e-4
