"""The bench's own kernels in Triton's interpreter, with FP32 inputs: indexing, masks, order."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

INTERPRETED = """
import torch

from fliptrace_kernels import specification
from fliptrace_kernels.bench import floor, two_launch
from fliptrace_kernels.bench.cells import Cell

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(shape, generator=generator)


for rows, size, rank, slices, adapters in (
    (1, 576, 16, 3, 1), (3, 600, 20, 1, 2), (33, 520, 32, 2, 3), (0, 256, 16, 1, 1)
):
    x, weights = draw(rows, size), [draw(adapters, rank, size) for _ in range(slices)]
    mapping = torch.randint(-1, adapters, (rows,), generator=generator).int()
    kept = torch.full((slices, 8, rows, rank), float("nan"))
    out = torch.full((slices, rows, rank), float("nan"))
    result = two_launch.shrink(x, weights, mapping, 0.7, out=out, partials=kept)
    assert result is out
    live = mapping >= 0
    assert result[:, ~live].isnan().all()  # declared unwritten
    for index in range(slices):
        total = specification.combine(kept[index], two_launch.SAME_ORDER, 0.7)[live]
        assert torch.equal(total.view(torch.int32), result[index, live].view(torch.int32))
        for adapter in range(adapters):
            mine = mapping == adapter
            sums = specification.partials(x[mine], weights[index][adapter], two_launch.SAME_ORDER)
            assert torch.allclose(kept[index][:, mine], sums, atol=1e-4, rtol=1e-5)
    assert two_launch.shrink(x, weights, mapping)[:, ~live].eq(0).all()

for rows, size, rank, slices in ((1, 600, 16, 3), (5, 1100, 64, 1), (20, 576, 20, 1), (3, 64, 16, 1)):
    x, weights = draw(rows, size), [draw(rank, size) for _ in range(slices)]
    exact = torch.stack([x @ a.T for a in weights])
    tried = 0
    for tiled_for in (rows, 64, 300)[: 3 if rows < 4 else 1]:
        for tiling in floor.tilings_for(Cell(tiled_for, size, slices, rank)):
            out = torch.full((tiling.splits, slices, rows, rank), float("nan"))
            partials = floor.partials(x, weights, tiling, out=out)
            assert torch.allclose(partials.sum(0), exact, atol=1e-3), tiling
            tried += 1
    assert tried >= 5
print("done")
"""


def test_kernels_compute_what_they_say():
    """Two launches add their own partials in order; every tiling's partials add up to the shrink."""
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


def test_every_tiling_compiles_for_hopper():
    """What the default table launches on an NVIDIA H200 compiles there, within its shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fliptrace_kernels.bench import partials_kernels
    from fliptrace_kernels.bench.cells import table_cells
    from fliptrace_kernels.bench.floor import tilings_for

    def compiled(kernel, constants, warps, stages):
        types = {"scale": "fp32", "partial_ptr": "*fp32", "out_ptr": "*fp32", "mapping_ptr": "*i32"}
        signature = {
            name: "constexpr"
            if name in constants
            else types.get(name, "*bf16" if name.endswith("_ptr") else "i32")
            for name in kernel.arg_names
        }
        return triton.compile(
            ASTSource(kernel, signature, constants),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": warps, "num_stages": stages},
        )

    tilings = {
        (
            t.block_m,
            t.block_n,
            t.block_k,
            t.num_warps,
            t.num_stages,
            t.splits == -(-c.k // t.block_k),
        )
        for c in table_cells(["SmolLM2-135M"], ranks=[64])
        for t in tilings_for(c)
    }
    assert len(tilings) > 12
    for block_m, block_n, block_k, warps, stages, one_block in sorted(tilings):
        constants = {"EVEN_K": True, "BLOCK_N": block_n, "BLOCK_K": block_k}
        kernel = partials_kernels.partials_only_by_row
        if block_m:
            kernel = partials_kernels.partials_only
            constants |= {"BLOCK_M": block_m, "ONE_BLOCK": one_block}
        assert compiled(kernel, constants, warps, stages).metadata.shared <= 227 * 1024
    fixed = {"R": 16, "HAS_MAPPING": True, "SPLITS": 8, "BLOCK_M": 32, "BLOCK_N": 16}
    compiled(partials_kernels.two_launch_sum, fixed, 4, 2)
    constants = fixed | {"K": 3072, "BLOCK_K": 256}
    compiled(partials_kernels.two_launch_partials, constants, 4, 2)
