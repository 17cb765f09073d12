"""The parts of examples/measure/shrink_stress.py that need no GPU."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import pytest
import torch

from fliptrace_kernels import lora_shrink, parse_reduction, specification
from fliptrace_kernels.local.arrangements import ROW_STEPS
from fliptrace_kernels.local.calls import launches


@pytest.fixture(scope="module")
def script(load_neighbour, repository_root):
    return load_neighbour(repository_root / "examples" / "measure" / "shrink_stress.py")


def test_random_calls_stay_inside_their_pool(script):
    """2,000 calls use every family, few and many rows, and nothing beyond the pool's end."""
    cases = script.draw_cases(random.Random(1), 2000, 1 << 25)
    assert cases == script.draw_cases(random.Random(1), 2000, 1 << 25)
    assert {case.family for case in cases} == set(script.FAMILIES)
    rows = [case.rows for case in cases]
    assert min(rows) == 1
    assert max(rows) == script.MANY_ROWS
    assert sum(count <= 16 for count in rows) > 500
    for case in cases:
        family = case.family
        weight = max(1, family.adapters) * family.rank * family.size
        assert len(case.a_starts) == family.slices
        assert case.x_start + case.rows * family.size <= 1 << 25
        assert all(start % 64 == 0 and start + weight <= 1 << 25 for start in case.a_starts)


def test_the_same_call_has_the_same_tensors(script):
    """A mapping is drawn from the call's own seed and holds every adapter and none."""
    numbers = script.Numbers(1 << 20, "cpu", 1)
    family = script.FAMILIES[2]
    case = script.Case(family, 300, 1.0, 64, (0, 128, 256), 5)
    x, weights, mapping = numbers.tensors(case)
    assert x.shape == (300, family.size)
    assert [a.shape for a in weights] == [(3, 16, 576)] * 3
    assert set(mapping.tolist()) == {-1, 0, 1, 2}
    assert torch.equal(mapping, numbers.tensors(case)[2])


def test_regions_are_aligned_and_apart(script):
    """Each call writes its own outputs, and begins where a tensor of its own would."""
    cases = script.draw_cases(random.Random(2), 50, 1 << 25)
    buffer = torch.zeros(int(script.ends_of(cases)[-1]))
    for case, region in zip(cases, script.regions_of(buffer, cases), strict=True):
        assert region.shape == case.shape
        assert region.storage_offset() % 64 == 0
        region.add_(1)
    assert buffer.max() == 1
    assert buffer.sum() == sum(case.outputs for case in cases)


@pytest.mark.parametrize("planted", [(0, 0), (1, 5), (2, 11)])
def test_a_single_bit_is_found_in_its_call(script, planted):
    """A call differs if any of its bits does, NaN included; a sign of zero counts."""
    call, place = planted
    out = torch.full((12,), float("nan"))
    out[1], out[6] = 0.0, -0.0
    expected = out.clone()
    ends = torch.tensor([4, 8, 12])
    assert script.differing_calls(out, expected, ends).tolist() == [0, 0, 0]
    out.view(torch.int32)[place] += 1
    assert script.differing_calls(out, expected, ends).tolist() == [
        int(i == call) for i in range(3)
    ]
    expected[6] = 0.0
    assert script.differing_calls(out, expected, ends)[1] == 1


@pytest.mark.parametrize("name", ["deterministic:8/128", "deterministic:16/32", "local:32"])
def test_partials_are_added_as_specified(script, name):
    """Partials of the specification give its outputs; one bit of one partial does not."""
    reduction = parse_reduction(name)
    case = script.Case(script.Family(600, 20, 2, 2), 9, 0.7, 0, (0, 64), 3)
    x, weights, mapping = script.Numbers(1 << 18, "cpu", 1).tensors(case)
    of_each = torch.stack(
        [torch.stack([specification.partials(x, one, reduction) for one in a]) for a in weights]
    )  # [slices, adapters, S, M, R]
    rows = torch.arange(case.rows)
    partials = of_each[:, mapping.clamp(min=0).long(), :, rows].permute(2, 1, 0, 3).contiguous()
    expected = lora_shrink(x, weights, mapping, reduction=reduction, scale=0.7)
    live = script.live_outputs(case, mapping)
    partials[:, ~live] = float("nan")
    total = script.sum_on_cpu(reduction, 0.7, partials, live)
    assert torch.equal(script.bits(total), script.bits(expected))
    row = int((mapping >= 0).nonzero()[0])
    partials[3, 1, row, 7] *= 1.01
    total = script.sum_on_cpu(reduction, 0.7, partials, live)
    assert (script.bits(total) != script.bits(expected)).nonzero().tolist() == [[1, row, 7]]


def test_every_kernel_of_local_is_compiled_before_the_first_graph(script):
    """What random calls start, with and without partials, is on the list; compiling one by one took minutes."""
    name = "local:32"
    listed = set(script.local_variants(name, [n for n in ROW_STEPS if n <= script.MANY_ROWS]))
    numbers = script.Numbers(1 << 25, "cpu", 1)
    met = set()
    for case in script.draw_cases(random.Random(3), 400, numbers.size):
        x, weights, mapping = numbers.tensors(case)
        out = torch.empty(case.shape)
        for kind, partials in ((0, None), (1, torch.empty(32, *case.shape))):
            arguments = (x, weights, mapping, 32, 1.0, out, partials, None, None, kind)
            met |= {kernel.variant for kernel, _, _ in launches(*arguments)}
    assert len(met) > 100
    assert met <= listed


def test_every_kernel_gets_its_share(script):
    """A million launches, as many at once as there are streams."""
    rounds = list(script.plan(1_000_000, script.REDUCTIONS, script.REPLAYS))
    names = [name for names in rounds for name in names]
    assert len(names) * script.REPLAYS * script.CALLS_PER_GRAPH == 1_000_000
    assert max(len(names) for names in rounds) == script.STREAMS
    counts = {name: names.count(name) for name in names}
    assert set(counts) == {*script.REDUCTIONS, script.FAITHFUL}
    assert max(counts.values()) - min(counts.values()) <= 1
    assert math.isclose(len(names) / len(counts), 25)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_is_one_line(repository_root, tmp_path):
    """Exit 2 and one line on stderr."""
    script = repository_root / "examples/measure/shrink_stress.py"
    run = subprocess.run(
        [sys.executable, str(script), "--folder", str(tmp_path / "results")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert "needs a CUDA device" in run.stderr
    assert not (tmp_path / "results").exists()
