"""Fragility under real atomics: replays of shrinks and forced replays on CUDA; skipped without a GPU."""

from __future__ import annotations

import json
import math

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from fliptrace.numerics import integer_view
from fliptrace.pair import bundled_model, encode_prompt
from fliptrace_interventions.fragility import (
    FragilityOptions,
    forced_replays,
    measure,
    observe_reference,
    replay_shrinks,
)
from fliptrace_interventions.fragility.replays import Beginning

pytestmark = pytest.mark.gpu
STEPS = 6


def observed(engine, reduction):
    """A short generation with everything kept."""
    prompt = encode_prompt(engine.tokenizer, bundled_model().prompts[5].text, source="5")
    return observe_reference(engine, prompt.ids, reduction=reduction, seed=0, max_new_tokens=STEPS)


def test_captured_replays_of_a_repeatable_reduction_give_the_recorded_bits(engine):
    """Each call in its own launch, in a graph: what it gave in the execution, so nothing survives."""
    run = observed(engine, "deterministic:8")
    found = replay_shrinks(engine, run.calls, reduction="deterministic:8", seed=0, executions=5)
    assert [each.rate for each in found] == [0.0] * len(run.calls)


def test_atomics_differ_in_replays_of_shrinks_alone(engine):
    """Without a seed, by the hardware's own orders: some output has other bits than another one."""
    run = observed(engine, "atomic:8")
    found = replay_shrinks(engine, run.calls, reduction="atomic:8", seed=0, executions=50)
    assert sum(int(each.hits.sum()) for each in found) > 0


def test_beginning_from_the_cache_changes_no_bit_on_cuda(engine):
    """Under a repeatable reduction a replay that begins late has the logits of one from the prompt."""
    run = observed(engine, "deterministic:8")
    number = next(n for n, call in enumerate(run.calls) if call.step == 3)
    begin = Beginning(number, run.calls[number].output)
    options = {"reduction": "deterministic:8", "seed": 0, "reach": math.inf}
    (late,) = forced_replays(engine, run, [begin], **options)
    (whole,) = forced_replays(engine, run, [Beginning()], **options)
    assert late.first_step == 3
    assert late.flips == whole.flips == ()
    assert late.values == whole.values == tuple(step.values for step in run.steps)


def test_an_estimate_under_hardware_orders_is_plain_values(engine):
    """JSON without NaN, and the recorded shrinks are not touched by their replays."""
    run = observed(engine, "atomic:8")
    before = [integer_view(call.output).clone() for call in run.calls]
    options = FragilityOptions(replays=2, executions=8, reach=math.inf)
    measured = measure(engine, run, reduction="atomic:8", seed=0, options=options)
    assert json.loads(json.dumps(measured, allow_nan=False)) == measured
    assert len(measured["replays"]) == 2
    for one, call in zip(before, run.calls, strict=True):
        assert torch.equal(one, integer_view(call.output))
