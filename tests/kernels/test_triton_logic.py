"""The logic of the Triton kernels without a GPU, in Triton's interpreter.

The interpreter runs one program after the other, so it shows indexing, masks, dealing and the
order of the final sum, and nothing about races. It is trusted with FP32 inputs only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

PRELUDE = """
import torch

from fliptrace_kernels import ArrivalSchedule, parse_reduction, specification, triton_shrink

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)


def same_bits(first, second):
    return torch.equal(first.contiguous().view(torch.int32), second.contiguous().view(torch.int32))


def random_call(rows, size, rank, slices, adapters):
    x = torch.randn(rows, size, generator=generator)
    shape = (adapters, rank, size) if adapters else (rank, size)
    weights = [torch.randn(shape, generator=generator) for _ in range(slices)]
    mapping = None
    if adapters:
        mapping = torch.randint(-1, adapters, (rows,), generator=generator).int()
    return x, weights, mapping


def run(call, name, scale=1.0, out=None, **more):
    x, weights, mapping = call
    if out is None:
        out = torch.full((len(weights), x.shape[0], weights[0].shape[-2]), float("nan"))
    reduction = parse_reduction(name).for_rows(x.shape[0])
    triton_shrink.shrink(x, weights, mapping, reduction, scale, out, **more)
    return out
"""

SPECIFICATION = """
for name in ("unsplit/32", "atomic:8", "deterministic:8", "deterministic:3/64", "tree:4/64"):
    reduction = parse_reduction(name)
    for shape in (
        (1, 576, 16, 3, 0),
        (20, 100, 16, 1, 1),
        (17, 200, 20, 2, 3),
        (5, 64, 36, 4, 2),
        (3, 7, 1, 1, 0),
        (0, 32, 16, 1, 0),
    ):
        call = random_call(*shape)
        result = run(call, name, 0.7)
        orders = None
        if reduction.needs_arrival_order:
            orders = ArrivalSchedule(1).orders(
                0, slices=shape[3], rows=shape[0], rank=shape[2], splits=reduction.splits
            )
        expected = specification.shrink(*call, reduction, 0.7, orders)
        assert torch.allclose(result, expected, atol=1e-4, rtol=1e-5), (name, shape)
"""

PARTIALS = """
for name in ("deterministic:8", "deterministic:3/64", "tree:8", "tree:2/64"):
    reduction = parse_reduction(name)
    for shape in ((1, 300, 16, 3, 0), (17, 200, 20, 1, 2), (20, 100, 16, 1, 1)):
        call = random_call(*shape)
        result, kept = triton_shrink.shrink_with_partials(*call, reduction, 0.7)
        for index in range(shape[3]):
            total = specification.combine(kept[:, index], reduction, 0.7)
            if call[2] is not None:
                total[call[2] < 0] = 0.0
            assert same_bits(total, result[index]), (name, shape)
        assert same_bits(result, run(call, name, 0.7)), (name, shape)
        if reduction.kind == "deterministic":
            out = torch.full_like(result, float("nan"))
            triton_shrink.shrink_in_two_launches(*call, reduction, 0.7, out)
            assert same_bits(result, out), (name, shape)
"""

LAYOUTS = """
for name in ("unsplit/32", "atomic:2", "deterministic:2", "tree:2"):
    x, weights, mapping = random_call(19, 96, 20, 3, 2)
    expected = run((x, weights, mapping), name, 0.7)
    wide = torch.full((19, 3, 50), float("nan"))
    out = wide[..., 7:27].transpose(0, 1)
    assert run((x, weights, mapping), name, 0.7, out) is out
    assert same_bits(out, expected), name
    assert wide[..., :7].isnan().all() and wide[..., 27:].isnan().all(), name
    ranks_first = torch.full((20, 3, 19), float("nan")).permute(1, 2, 0)
    assert same_bits(run((x, weights, mapping), name, 0.7, ranks_first), expected), name

    rows_apart = torch.full((19, 200), float("nan"))
    rows_apart[:, 3:99] = x
    columns = x.T.contiguous().T
    inside = torch.full((2, 30, 130), float("nan"))
    inside[:, 5:25, 9:105] = weights[1]
    others = [weights[0], inside[:, 5:25, 9:105], *weights[2:]]
    every_second = torch.stack([mapping, mapping + 1], dim=1)[:, 0]
    for operand in (rows_apart[:, 3:99], columns):
        assert same_bits(run((operand, others, every_second), name, 0.7), expected), name
    alike = [weight.repeat(1, 2, 2)[:, 20:, 96:] for weight in weights]
    assert same_bits(run((x, alike, mapping), name, 0.7), expected), name
"""

ROWS = """
for name in ("unsplit", "atomic:8", "deterministic:8", "tree:8"):
    x, weights, _ = random_call(5, 64, 16, 2, 2)
    x[3] = float("nan")
    mapping = torch.tensor([0, 5, 1, -1, -7], dtype=torch.int32)
    result = run((x, weights, mapping), name, -1.0)
    assert result.isnan().all(-1).tolist() == [[False, True, False, False, False]] * 2, name
    assert same_bits(result[:, 3:], torch.zeros(2, 2, 16)), name
    for row, adapter in ((0, 0), (2, 1)):
        alone = run((x[row : row + 1], [a[adapter] for a in weights], None), name, -1.0)
        assert same_bits(result[:, row : row + 1], alone), name

    mapping = torch.tensor([0, 1, 0, -1, 0], dtype=torch.int32)
    one = run((x, [a[:1] for a in weights], mapping), name, -1.0)
    assert one.isnan().all(-1).tolist() == [[False, True, False, False, False]] * 2, name
    assert same_bits(one[:, 3:4], torch.zeros(2, 1, 16)), name
    for row in (0, 2):
        alone = run((x[row : row + 1], [a[0] for a in weights], None), name, -1.0)
        assert same_bits(one[:, row : row + 1], alone), name
"""

COUNTER = """
for name, launches in (("unsplit", 2), ("atomic:2", 2), ("deterministic:2", 2), ("tree:2", 2)):
    counter = torch.zeros(1, dtype=torch.int64)
    call = random_call(20, 64, 16, 4, 2)
    counted = run(call, name, launch_counter=counter)
    assert counter.item() == launches, name
    assert same_bits(counted, run(call, name)), name
    run((call[0][:0], call[1], call[2][:0]), name, launch_counter=counter)
    assert counter.item() == launches, name
"""


SCRIPTS = {
    "specification": SPECIFICATION,
    "partials": PARTIALS,
    "layouts": LAYOUTS,
    "rows": ROWS,
    "counter": COUNTER,
}

RUN_ALL = """
import json
import sys
import traceback


def outcome(script):
    try:
        exec(script, dict(globals()))
    except Exception:
        return traceback.format_exc()
    return "done"


print(json.dumps({name: outcome(script) for name, script in json.load(sys.stdin).items()}))
"""


@pytest.fixture(scope="module")
def outcomes():
    """What became of each script, all run in one process whose Triton interprets."""
    numpy_version = tuple(map(int, metadata.version("numpy").split(".")[:2]))
    if triton.__version__.startswith("3.6") and numpy_version >= (2, 4):
        pytest.skip("the interpreter of Triton 3.6 does not run with numpy 2.4")
    run = subprocess.run(
        [sys.executable, "-c", PRELUDE + RUN_ALL],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        input=json.dumps(SCRIPTS),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", SCRIPTS)
def test_kernels_in_the_interpreter(outcomes, name):
    """Kernels agree with the specification, their own partials, and themselves in any layout."""
    assert outcomes[name] == "done"
