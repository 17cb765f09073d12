"""Faults planted in live executions are named at their exact coordinate, and where none is planted none is reported.

The pairs are drawn by the script that measures the same over hundreds, examples/measure/planted_faults.py.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from fliptrace.verdicts import Origin


@pytest.fixture(scope="module")
def planting(load_neighbour, repository_root):
    """The measuring script as a module."""
    return load_neighbour(repository_root / "examples" / "measure" / "planted_faults.py")


def plan_with(planting, fault, **changes):
    settings = {
        "prompt": tuple(range(10, 18)),
        "reduction": "unsplit",
        "seed": None,
        "tokens": 4,
        "fault": fault,
    }
    return planting.Plan(**(settings | changes))


def fault_with(planting, **changes):
    settings = {
        "site": 8,
        "step": 2,
        "row": 0,
        "rank_index": 5,
        "surviving": True,
        "ulp": 3,
        "upwards": True,
    }
    return planting.Fault(**(settings | changes))


def test_random_faults_are_found_and_nothing_else(planting, llama, gemma, tmp_path):
    """12 planted and 6 unplanted pairs, latent and surviving, over both models and all reductions."""
    summary = planting.run_pairs([llama, gemma], planted=12, unplanted=6, seed=20, folder=tmp_path)
    assert summary.failures == []
    assert (summary.planted_as_expected, summary.unplanted_identical) == (12, 6)
    assert summary.latent >= 3
    assert summary.surviving >= 3
    assert len(summary.reductions) >= 2


@pytest.mark.parametrize("surviving", [False, True])
@pytest.mark.parametrize(("step", "row", "site"), [(0, 0, 0), (0, 7, 20), (3, 0, 0), (3, 0, 20)])
def test_first_and_last_coordinates(planting, engine, tmp_path, surviving, step, row, site):
    """The corners: first and last site, first and last row, the prefill and the last step."""
    fault = fault_with(planting, site=site, step=step, row=row, rank_index=15, surviving=surviving)
    plan = plan_with(planting, fault)
    found, planter = planting.run_pair(engine, plan, tmp_path)
    assert planting.complaints(engine, plan, found, planter) == []


def test_faults_under_equal_arrival_orders(planting, llama, tmp_path):
    """Under one schedule seed the atomic reduction repeats, so that only the fault differs."""
    for surviving in (False, True):
        fault = fault_with(planting, surviving=surviving)
        plan = plan_with(planting, fault, reduction="atomic:8", seed=11)
        found, planter = planting.run_pair(llama, plan, tmp_path)
        assert planting.complaints(llama, plan, found, planter) == []


def test_a_wrong_report_is_noticed(planting, llama, tmp_path):
    """The check itself fails when the report names another coordinate, class, origin or value, or nothing."""
    plan = plan_with(planting, fault_with(planting))
    found, planter = planting.run_pair(llama, plan, tmp_path)
    assert planting.complaints(llama, plan, found, planter) == []
    first = found.first_difference
    (element,) = first.coordinates
    spoiled = [
        dataclasses.replace(first, site=llama.sites[9]),
        dataclasses.replace(first, position=first.position + 1),
        dataclasses.replace(first, origin=Origin.INHERITED),
        dataclasses.replace(first, row_class=planting.CoordinateClass.LATENT),
        dataclasses.replace(
            first,
            coordinates=(dataclasses.replace(element, candidate_bits=element.reference_bits),),
        ),
        None,
    ]
    for wrong in spoiled:
        changed = dataclasses.replace(found, first_difference=wrong)
        assert planting.complaints(llama, plan, changed, planter)
    unplanted = dataclasses.replace(plan, fault=None)
    assert planting.complaints(llama, unplanted, found, planter)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pushes_cross_one_boundary(planting, dtype):
    """A pushed value rounds to the neighbour, for values of both signs, on a boundary, and next to a power of two."""
    values = [1.0, -1.0, 0.3, -2.0000005, 1 + 2**-8, 1 - 2**-9, 1e-3, -7.5]
    for number in [*values, *torch.randn(50, generator=torch.Generator().manual_seed(1)).tolist()]:
        value = torch.tensor(number)
        for ulp in (1, 16):
            pushed = planting.pushed_across(value, ulp, dtype)
            distance = planting.ordered_integers(
                planting.round_to(pushed, dtype)
            ) - planting.ordered_integers(planting.round_to(value, dtype))
            assert abs(int(distance)) == 1, number


def test_draws_follow_the_seed(planting, llama):
    """One seed gives one series of pairs."""
    first, again, other = (
        [planting.draw_plan(llama, choose, planted=True) for _ in range(5)]
        for choose in (random.Random(3), random.Random(3), random.Random(4))
    )
    assert first == again
    assert first != other
