"""The calls that are the same on every machine."""

from __future__ import annotations

import pytest
import torch

from fliptrace_kernels import lora_shrink
from fliptrace_kernels.bench import fixed_calls
from fliptrace_kernels.bench.fixed_calls import SHAPES, fixed_call, run_fixed_calls


def test_inputs_are_finite_and_fixed():
    """Both signs, no zero, NaN or Inf, the same bits each time; this machine's bits are pinned."""
    sums = []
    for number in range(len(SHAPES)):
        x, weights, mapping = fixed_call(number)
        again, _, _ = fixed_call(number)
        assert torch.equal(x.view(torch.int16), again.view(torch.int16))
        for tensor in (x, *weights):
            size = tensor.float().abs()
            assert size.min() >= 2.0**-6
            assert size.max() < 4.0
            assert (tensor < 0).any()
            assert (tensor > 0).any()
        if mapping is not None:
            assert set(mapping.tolist()) <= {-1, *range(SHAPES[number][4])}
        sums.append(int(x.view(torch.int16).long().sum()))
    assert sums[:2] == [-2481154, -753105]


def test_repeatable_reductions_repeat():
    """No repeat and no row alone differs, and the digest is of the outputs."""
    first = run_fixed_calls("deterministic:8", repeats=2, single_rows=3, device="cpu")
    assert (first.calls, first.calls_differing) == (2 * len(SHAPES), 0)
    assert (first.rows, first.rows_differing) == (1 + 3 * (len(SHAPES) - 1), 0)
    other = run_fixed_calls("unsplit", repeats=0, single_rows=0, device="cpu")
    assert other.digest != first.digest


def test_differences_are_counted(monkeypatch):
    """A wrong bit in a repeat and one in a row alone show in their counts."""
    calls = []

    def faulty(*arguments, **options):
        z = lora_shrink(*arguments, **options)
        calls.append(z)
        # Each shape: a first run, a repeat, a row alone.
        if len(calls) in (2, 6):
            z.view(torch.int32)[0, 0, 0] += 1
        return z

    monkeypatch.setattr(fixed_calls, "lora_shrink", faulty)
    monkeypatch.setattr(fixed_calls, "SHAPES", ((1, 64, 1, 16, 0), (2, 64, 1, 16, 0)))
    found = run_fixed_calls("unsplit", repeats=1, single_rows=1, device="cpu")
    assert (found.calls_differing, found.rows_differing) == (1, 1)


@pytest.mark.parametrize("name", ["unsplit", "local:32"])
def test_any_reduction_can_be_run(name):
    """Every repeatable reduction runs all calls."""
    assert run_fixed_calls(name, repeats=0, single_rows=0, device="cpu").digest
