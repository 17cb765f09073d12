"""Triton kernels without a GPU: their logic in Triton's interpreter, their hand-over in PTX.

The interpreter runs one program after the other, so it shows indexing, masks, dealing and the
order of the final sum, and nothing about races. It is trusted with FP32 inputs only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

INTERPRETED = """
import torch

from fliptrace_kernels import ArrivalSchedule, parse_reduction, specification, triton_shrink

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)


def same_bits(first, second):
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


for name in ("unsplit/32", "atomic:8", "deterministic:8", "deterministic:3/64", "atomic:1"):
    reduction = parse_reduction(name)
    for rows, size, rank, slices, adapters in (
        (1, 576, 16, 3, 0),
        (20, 100, 16, 1, 0),
        (33, 600, 20, 2, 3),
        (5, 64, 70, 4, 2),
        (0, 32, 16, 1, 0),
    ):
        x = torch.randn(rows, size, generator=generator)
        shape = (adapters, rank, size) if adapters else (rank, size)
        weights = [torch.randn(shape, generator=generator) for _ in range(slices)]
        mapping = None
        if adapters:
            mapping = torch.randint(-1, adapters, (rows,), generator=generator).int()
        result = torch.full((slices, rows, rank), float("nan"))
        triton_shrink.shrink(x, weights, mapping, reduction, 0.7, result)
        orders = None
        if reduction.needs_arrival_order:
            orders = ArrivalSchedule(1).orders(
                0, slices=slices, rows=rows, rank=rank, splits=reduction.splits
            )
        expected = specification.shrink(x, weights, mapping, reduction, 0.7, orders)
        assert torch.allclose(result, expected, atol=1e-4, rtol=1e-5), (name, rows, size)
        if reduction.kind == "deterministic" and slices <= 3:
            result, kept = triton_shrink.shrink_with_partials(x, weights, mapping, reduction, 0.7)
            for index in range(slices):
                total = specification.combine(kept[:, index], reduction, 0.7)
                if mapping is not None:
                    total[mapping < 0] = 0.0
                assert same_bits(total, result[index]), (name, rows, size)

x, weights = torch.randn(3, 64), [torch.randn(2, 16, 64)]
for name in ("unsplit", "atomic:8", "deterministic:8"):
    mapping = torch.tensor([0, 5, 1], dtype=torch.int32)
    result = torch.full((1, 3, 16), float("inf"))
    triton_shrink.shrink(x, weights, mapping, parse_reduction(name), 1.0, result)
    assert result.isnan().all(-1).tolist() == [[False, True, False]]
print("done")
"""


def test_kernels_follow_the_specification_in_the_interpreter():
    """Every kernel agrees with the specification; deterministic adds its partials in order."""
    numpy_version = tuple(map(int, metadata.version("numpy").split(".")[:2]))
    if triton.__version__.startswith("3.6") and numpy_version >= (2, 4):
        pytest.skip("the interpreter of Triton 3.6 does not run with numpy 2.4")
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "done\n", run.stderr


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_hand_over_in_ptx(capability):
    """Partials are stored before a barrier, then the ticket, a barrier, and only then read."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fliptrace_kernels.triton_kernels import lora_shrink_deterministic

    constants = {
        "HAS_MAPPING": False,
        "EVEN_K": True,
        "SPLITS": 8,
        "BLOCK_M": 16,
        "BLOCK_N": 16,
        "BLOCK_K": 32,
    }
    types = {"out_ptr": "*fp32", "scratch_ptr": "*fp32", "counter_ptr": "*i32", "scale": "fp32"}
    signature = {
        name: "constexpr"
        if name in constants
        else types.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in lora_shrink_deterministic.arg_names
    }
    compiled = triton.compile(
        ASTSource(lora_shrink_deterministic, signature, constants),
        target=GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": False},
    )
    events = re.findall(
        r"(?:st\.global|bar\.sync|atom\.global\.gpu\.acq_rel\.add|ld\.global\.cg)",
        compiled.asm["ptx"],
    )
    ticket = events.index("atom.global.gpu.acq_rel.add")
    before, after = events[:ticket], events[ticket + 1 :]
    assert "st.global" in before
    assert before[-1] == "bar.sync"
    assert "st.global" not in before[before[::-1].index("bar.sync") + len(before) :]
    assert after.index("bar.sync") < after.index("ld.global.cg")
    assert "ld.global.cg" not in before
