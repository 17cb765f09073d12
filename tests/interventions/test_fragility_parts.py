"""Fragility, part by part: distances, replays of shrinks, forced replays, and the arithmetic of estimates."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fliptrace.capture.decoding import generate
from fliptrace.errors import InputError
from fliptrace.numerics import integer_view, round_to
from fliptrace.numerics.rounding import nearest_boundary
from fliptrace.store import open_trace
from fliptrace_interventions import RecordedExecution
from fliptrace_interventions.fragility import (
    FragilityOptions,
    boundary_distances,
    estimate_rows,
    forced_replays,
    measure,
    observe_reference,
    reference_of_trace,
    replay_shrinks,
)
from fliptrace_interventions.fragility.boundaries import distance_bins
from fliptrace_interventions.fragility.estimation import Prior, fit_prior, flip_share
from fliptrace_interventions.fragility.replays import Beginning, beginnings, surviving_weight
from fliptrace_interventions.fragility.scoring import (
    Observed,
    cost,
    halves,
    observe,
    prompt_reliability,
    rate_of_others,
    repetitions_for,
    score,
    step_reliability,
)
from fliptrace_interventions.fragility.survival import (
    CallSurvival,
    _on_device,
    _on_host,
    _survivals,
)

ATOMIC = "atomic:8"
STEPS = 8


@pytest.fixture(scope="module")
def run(llama, tiny):
    """A generation on the tiny Llama under simulated atomics, with everything kept."""
    torch.set_num_threads(1)
    return observe_reference(
        llama, tiny.prompt_ids(10), reduction=ATOMIC, seed=7, max_new_tokens=STEPS
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_distances_are_those_of_single_values(dtype):
    """Whole tensors give what the exact function gives value by value, in ULP."""
    values = torch.randn(200, generator=torch.Generator().manual_seed(3))
    values[0], values[1] = 0.010345458984375, -0.010345458984375  # on a BF16 boundary
    found = boundary_distances(values, dtype)
    for value, distance in zip(values.tolist(), found.tolist(), strict=True):
        _, exponent = math.frexp(value)
        expected = abs(value - nearest_boundary(value, dtype)) / 2.0 ** (exponent - 24)
        assert distance == expected
    if dtype is torch.bfloat16:
        assert found[:2].tolist() == [0.0, 0.0]


def test_where_there_is_no_boundary_the_distance_is_infinite():
    """An FP32 model, NaN, infinities and zero."""
    odd = torch.tensor([float("nan"), float("inf"), 0.0])
    assert boundary_distances(odd, torch.bfloat16).isinf().all()
    assert boundary_distances(torch.ones(3), torch.float32).isinf().all()


def test_distances_in_a_larger_scale_are_smaller():
    """The scale only changes the unit; bins follow powers of two."""
    value = torch.tensor([1.001])
    own = boundary_distances(value, torch.bfloat16)
    scaled = boundary_distances(value, torch.bfloat16, scale=torch.tensor([4.0]))
    assert own.item() == 4 * scaled.item()
    assert distance_bins(torch.tensor([0.0, 0.9, 1.0, 2.0, 3.9, 4.0, 1e30])).tolist() == [
        0,
        0,
        1,
        2,
        2,
        3,
        17,
    ]


def test_the_reference_keeps_every_call_in_order(run, llama):
    """Calls are numbered by step and site, so that a number finds its call."""
    sites = len(llama.sites)
    assert [(call.step, call.site) for call in run.calls] == [
        (step, site) for step in range(STEPS) for site in range(sites)
    ]
    assert [step.token for step in run.steps] == list(run.token_ids)
    assert all(step.values[0] >= step.values[1] for step in run.steps)


@pytest.mark.parametrize("path", ["host", "device"])
def test_a_repeatable_reduction_gives_every_call_its_recorded_bits(llama, tiny, path):
    """Stacked or captured, a replay is the same sum as in the execution; so no coordinate survives."""
    made = observe_reference(
        llama, tiny.prompt_ids(10), reduction="deterministic:8", seed=0, max_new_tokens=3
    )
    weights = {site: llama.shrink_weight(site).contiguous() for site in range(len(llama.sites))}
    outputs = {"host": _on_host, "device": _on_device}[path]
    seen = []
    for calls, replays in outputs(made.calls, weights, "deterministic:8", 0, 3):
        recorded = torch.cat([call.output.flatten() for call in calls])
        assert replays.shape == (3, recorded.numel())
        assert all(torch.equal(integer_view(one), integer_view(recorded)) for one in replays)
        found = _survivals(calls, replays, llama.dtype)
        assert [each.rate for each in found] == [0.0] * len(calls)
        seen += calls
    assert seen == made.calls


def test_survivals_of_several_calls_are_told_apart(llama, run):
    """Coordinates planted in two of three calls are found in those calls, executions and places, with their outputs."""
    calls = run.calls[:3]
    recorded = torch.cat([call.output.flatten() for call in calls])
    made = recorded.repeat(5, 1)
    sizes = [call.output.numel() for call in calls]
    made[4, 7] *= 2  # the first call
    made[1, sizes[0] + sizes[1] + 2] *= -1  # the third one
    first, second, third = _survivals(calls, made, llama.dtype)
    assert first.hits.nonzero().tolist() == [list(divmod(7, first.call.output.shape[1]))]
    assert second.hits.sum() == 0 == len(second.outputs)
    assert third.hits.nonzero().tolist() == [[0, 2]]
    assert (first.rate, second.rate, third.rate) == (0.2, 0.0, 0.2)
    (output,) = third.outputs
    assert torch.equal(output.flatten(), made[1, -sizes[2] :])


def test_survival_counts_what_rounds_otherwise(run, llama):
    """Outputs that are kept differ after rounding, at just the coordinates that were counted."""
    found = replay_shrinks(llama, run.calls, reduction=ATOMIC, seed=400, executions=64)
    kept = [each for each in found if each.outputs]
    assert kept, "the prefill alone has hundreds of coordinates"
    for each in found:
        counted = torch.zeros_like(each.hits)
        for output in each.outputs:
            other = integer_view(round_to(output, llama.dtype)) != integer_view(
                round_to(each.call.output, llama.dtype)
            )
            assert other.any()
            counted += other
        assert torch.equal(counted, each.hits)
    weight = surviving_weight(found)
    assert weight == pytest.approx(1 - math.prod(1 - each.rate for each in found))


def test_as_many_executions_stay_equal_as_single_replays_say(llama, tiny):
    """Shrinks alone, under recorded operands, give the chance that a whole execution crosses no boundary."""
    for prompt in range(
        40
    ):  # bits depend on the processor; some prompt has a coordinate at a boundary
        made = observe_reference(
            llama, tiny.prompt_ids(10, seed=prompt), reduction=ATOMIC, seed=7, max_new_tokens=2
        )
        few = replay_shrinks(llama, made.calls, reduction=ATOMIC, seed=300, executions=50)
        if 0.3 < surviving_weight(few) < 0.8:
            break
    found = replay_shrinks(llama, made.calls, reduction=ATOMIC, seed=400, executions=1_000)
    expected = 1 - surviving_weight(found)
    rounded = [integer_view(round_to(call.output, llama.dtype)) for call in made.calls]
    equal, runs = 0, 150
    for seed in range(1_000, 1_000 + runs):
        other = observe_reference(
            llama, made.prompt_ids, reduction=ATOMIC, seed=seed, max_new_tokens=2
        )
        equal += all(
            torch.equal(integer_view(round_to(call.output, llama.dtype)), own)
            for call, own in zip(other.calls, rounded, strict=True)
        )
    assert 0.1 < expected < 0.9
    assert abs(equal / runs - expected) < 4 * math.sqrt(expected * (1 - expected) / runs)


def survival_of(rates):
    """Made-up survivals with given rates out of 100."""
    return [
        CallSurvival(None, 100, None, tuple(torch.tensor(float(n)) for n in range(hits)))
        for hits in rates
    ]


def test_beginnings_follow_the_first_survivor():
    """A call's share is its rate times that of no survival before; calls that never cross are never drawn."""
    drawn = beginnings(survival_of([0, 20, 0, 50, 100, 10]), 4_000, np.random.default_rng(1))
    shares = np.bincount([each.call for each in drawn], minlength=6) / len(drawn)
    assert shares == pytest.approx([0, 0.2, 0, 0.4, 0.4, 0], abs=0.002)
    assert beginnings(survival_of([0, 0]), 5, np.random.default_rng(1)) == []


def test_a_replay_from_the_cache_is_the_replay_from_the_prompt(run, llama):
    """Beginning at the surviving call's step changes no bit against handing over recorded shrinks from the start."""
    found = replay_shrinks(llama, run.calls, reduction=ATOMIC, seed=400, executions=64)
    begin = next(
        Beginning(number, each.outputs[0])
        for number, each in enumerate(found)
        if each.outputs and each.call.step >= 2
    )
    options = {"reduction": ATOMIC, "seed": 8, "reach": math.inf}
    (short,) = forced_replays(llama, run, [begin], **options)
    cache, run.cache = run.cache, ()
    try:
        (long,) = forced_replays(llama, run, [begin], **options)
    finally:
        run.cache = cache
    assert short.first_step == run.calls[begin.call].step > 0 == long.first_step
    assert (short.flips, short.values) == (long.flips, long.values)
    assert short.forwards == STEPS - short.first_step


def test_a_replay_is_a_free_execution_up_to_its_first_flip(run, llama):
    """With the same schedule seed both choose the same tokens as long as the prefix is the same."""
    for seed in range(20, 26):
        (replay,) = forced_replays(
            llama, run, [Beginning()], reduction=ATOMIC, seed=seed, reach=math.inf
        )
        llama.set_reduction(ATOMIC, seed)
        free = generate(llama, run.prompt_ids, max_new_tokens=STEPS, end_ids=())
        differing = [step for step in range(STEPS) if free.token_ids[step] != run.token_ids[step]]
        assert replay.flips[:1] == tuple(differing[:1])


def test_replays_end_after_the_last_step_in_reach(run, llama):
    """What lies behind can flip nothing that is looked at; with nothing in reach nothing runs."""
    margins = [step.margin for step in run.steps]
    reach = min(margins)
    last = max(step for step, margin in enumerate(margins) if margin <= reach)
    (replay,) = forced_replays(llama, run, [Beginning()], reduction=ATOMIC, seed=1, reach=reach)
    assert replay.forwards == last + 1
    assert len(replay.values) == len(run.near_steps(reach))
    assert forced_replays(llama, run, [Beginning()], reduction=ATOMIC, seed=1, reach=-1) == []


def test_a_recorded_trace_gives_the_run_that_was_observed(planting, llama, tiny, tmp_path, run):
    """Recorded shrinks and tokens restore operands, outputs, choices and cache bit by bit."""
    path = tmp_path / "reference"
    planting.record(llama, run.prompt_ids, path, tokens=STEPS, reduction=ATOMIC, seed=7)
    with open_trace(path) as trace:
        again = reference_of_trace(llama, RecordedExecution(trace, llama))
    assert again.token_ids == run.token_ids
    assert again.steps == run.steps
    for one, two in zip(run.calls, again.calls, strict=True):
        assert torch.equal(integer_view(one.operand), integer_view(two.operand))
        assert torch.equal(integer_view(one.output), integer_view(two.output))
    for one, two in zip(run.cache, again.cache, strict=True):
        assert torch.equal(integer_view(one.values), integer_view(two.values))


def test_measuring_is_json_and_repeats(run, llama):
    """The same seed gives the same values; what is named is the most crossing."""
    options = FragilityOptions(replays=3, executions=16, reach=math.inf)
    one = measure(llama, run, reduction=ATOMIC, seed=7, options=options)
    two = measure(llama, run, reduction=ATOMIC, seed=7, options=options)
    assert one == two
    assert one["near"] == list(range(STEPS))
    assert sum(one["survival"]["bins"]) == one["survival"]["coordinates"]
    shares = [place["share"] for place in one["survival"]["most_crossing"]]
    assert shares == sorted(shares, reverse=True)
    assert sum(one["survival"]["bins_crossing"]) == pytest.approx(sum(one["survival"]["expected"]))


@pytest.mark.parametrize(
    "options",
    [FragilityOptions(replays=-1), FragilityOptions(executions=-1), FragilityOptions(reach=-0.5)],
)
def test_options_that_mean_nothing_are_refused(options):
    """Each by its name and value."""
    with pytest.raises(InputError, match="-"):
        options.check()


# The arithmetic -----------------------------------------------------------------------------------


def made_up_rows(count, replays, generator):
    """Rows whose only near step flips with a known chance, and those chances."""
    rows, chances = [], []
    for number in range(count):
        chance = float(generator.choice([0.0, 0.0, 0.0, 0.5, 0.9]))
        flips = [[3] if generator.random() < chance else [] for _ in range(replays)]
        near_tie = chance > 0
        values = [4.0, 3.96875 if near_tie else 3.0, 1.0, 0.5]
        moved = [3.96875, 4.0, 1.0, 0.5] if near_tie else [3.9375, 3.0, 1.0, 0.5]
        rows.append(
            {
                "prompt": f"prompt {number}",
                "reduction": "atomic:8/32",
                "repetition": None,
                "token_ids": [1] * 10,
                "margins": [9.0] * 10,
                "near": [3],
                "top_values": [values],
                "top_ids": [[5, 6, 7, 8]],
                "ulps": [0.03125],
                "weight": 1.0,
                "survival": None,
                "replays": [
                    {"flips": flip, "values": [moved if flip else values], "first_step": 0}
                    for flip in flips
                ],
                "forwards": 10 + 4 * replays,
            }
        )
        chances.append(chance)
    return rows, chances


def test_estimates_are_nearer_to_the_truth_than_counts():
    """Shrinkage helps on average: squared errors of estimates are below those of replays' frequencies."""
    rows, chances = made_up_rows(200, 6, np.random.default_rng(5))
    estimates, prior, _ = estimate_rows(rows)
    truth = np.array(chances)
    found = np.array([each.probability for each in estimates])
    counts = np.array([(each.flipped + 0.5) / (each.replays + 1) for each in estimates])
    assert ((found - truth) ** 2).mean() < ((counts - truth) ** 2).mean()
    assert found.mean() == pytest.approx(truth.mean(), abs=0.04)
    assert prior.fitted == 200
    inside = [
        each.low <= chance <= each.high + 1e-3
        for each, chance in zip(estimates, chances, strict=True)
    ]
    assert np.mean(inside) > 0.85


def test_the_weight_bounds_the_probability():
    """Executions that never leave the reference cannot flip; what is out of reach is 0."""
    rows, _ = made_up_rows(20, 6, np.random.default_rng(5))
    for row in rows:
        row["weight"] = 0.25
        row["survival"] = {"executions": 64}
    rows[0] |= {
        "near": [],
        "top_values": [],
        "top_ids": [],
        "ulps": [],
        "replays": [],
        "weight": 0.0,
    }
    estimates, _, _ = estimate_rows(rows)
    assert all(each.probability < 0.25 for each in estimates)
    assert (estimates[0].probability, estimates[0].high) == (0.0, 0.0)


def test_a_tie_goes_to_the_lowest_id():
    """A difference that makes two logits equal flips the choice only if the other id is lower."""
    pool = np.array([[0.0, 1.0]])
    assert flip_share(pool, [2.0, 1.5], [9, 3], 0.5) == 1.0
    assert flip_share(pool, [2.0, 1.5], [3, 9], 0.5) == 0.0


def test_few_prompts_fit_nothing():
    """Below ten the plain prior stands."""
    assert fit_prior([0.5] * 9, [0] * 9, [6] * 9) == Prior()
    assert fit_prior([0.5] * 30, [0] * 30, [6] * 30).mean(0.5) < 0.1


def test_few_prompts_are_as_sure_as_their_replays():
    """Nothing fitted: an interval holds its estimate and the exact bound of the replays, times the weight's own."""
    rows, _ = made_up_rows(3, 6, np.random.default_rng(4))
    for row in rows:
        for replay in row["replays"]:
            replay["flips"] = []
    estimates, prior, _ = estimate_rows(rows)
    assert not prior.fitted
    for row, found in zip(rows, estimates, strict=True):
        assert found.low <= found.probability <= found.high
        assert found.high >= row["weight"] * (1 - 0.05 ** (1 / 6)) * 0.9


def observed_of(rows, divergences):
    """Estimates of made-up rows with given first divergences."""
    estimates, _, _ = estimate_rows(rows)
    return [Observed(each, tuple(divergences)) for each in estimates]


def test_scores_of_known_predictions():
    """Brier and log score by hand."""
    rows, _ = made_up_rows(2, 6, np.random.default_rng(1))
    observed = observed_of(rows, [3, None, None, None])
    assert score(observed, [0.25, 0.25]).value == pytest.approx(0.25 * 0.75)
    assert score(observed, [0.0, 0.0], logarithmic=True).value == pytest.approx(
        -(math.log(0.001) + 3 * math.log(0.999)) / 4
    )
    assert rate_of_others(observed) == [0.3, 0.3]
    predictions, rest = halves(observed)
    assert predictions == [0.5, 0.5]
    assert [each.divergences for each in rest] == [(None, None)] * 2


def test_reliability_counts_every_comparison_once():
    """Prompts and steps land in the bin of their prediction; a flip before a step takes the repetition out."""
    rows, _ = made_up_rows(30, 6, np.random.default_rng(2))
    observed = observed_of(rows, [3, None, 1])
    assert sum(each.observed.trials for each in prompt_reliability(observed)) == 90
    steps = step_reliability(observed)
    assert sum(each.observed.trials for each in steps) == 60
    assert sum(each.observed.hits for each in steps) == 30


def test_repetitions_are_compared_with_their_own_reference():
    """By prompt and reduction; an estimate without repetitions is left out."""
    rows, _ = made_up_rows(2, 6, np.random.default_rng(1))
    same = {
        "prompt": "prompt 0",
        "reduction": "atomic:8/32",
        "repetition": 1,
        "token_ids": [1] * 10,
    }
    other = {**same, "repetition": 2, "token_ids": [1, 1, 2]}
    estimates, _, _ = estimate_rows(rows)
    (found,) = observe(estimates, [*rows, same, other])
    assert found.divergences == (None, 2)
    assert found.changed == 1


def test_narrower_intervals_take_more_repetitions():
    """And the cost is theirs against that of the estimates."""
    rows, _ = made_up_rows(60, 6, np.random.default_rng(3))
    estimates, _, _ = estimate_rows(rows)
    needed = [
        repetitions_for(replace(estimates[0], probability=0.2, low=0.2 - half, high=0.2 + half))
        for half in (0.19, 0.1, 0.05, 0.001)
    ]
    assert needed[0] < needed[1] < needed[2]
    assert needed[3] is None
    found = cost(estimates)
    compared = [each for each in estimates if repetitions_for(each) is not None]
    assert found.prompts == len(compared) > 0
    assert found.forwards == sum(each.forwards for each in compared)
    assert found.ratio == found.repeat_forwards / found.forwards
