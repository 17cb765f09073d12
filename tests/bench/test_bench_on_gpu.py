"""The bench and the stress where there is a GPU: a small table, end to end."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from fliptrace_kernels import lora_shrink
from fliptrace_kernels.bench.cells import Cell
from fliptrace_kernels.bench.command_line import main
from fliptrace_kernels.bench.results import read_results

pytestmark = pytest.mark.gpu

KERNELS = ["floor", "two-launch", "atomic:vllm", "deterministic:8/256", "local:32"]
SMALL = ["--models", "SmolLM2-135M", "--ranks", "16", "--kernels", *KERNELS]


def bits(tensor):
    return tensor.view(torch.int32)


@pytest.mark.parametrize(
    ("rows", "size", "slices", "rank", "adapters"),
    [(1, 3072, 3, 16, 1), (33, 576, 2, 32, 3), (200, 600, 1, 20, 2), (64, 8192, 1, 64, 1)],
)
def test_two_launches_give_the_bits_of_one(rows, size, slices, rank, adapters):
    """deterministic:8/256 and the kernel built from vLLM 0.32's description agree in every bit."""
    from fliptrace_kernels.bench import two_launch

    generator = torch.Generator("cuda").manual_seed(rows)
    options = {"generator": generator, "device": "cuda"}
    x = torch.randn(rows, size, **options).bfloat16()
    weights = [torch.randn(adapters, rank, size, **options).bfloat16() for _ in range(slices)]
    mapping = torch.randint(-1, adapters, (rows,), dtype=torch.int32, **options)
    mapping[0] = 0  # a single row must have an adapter, or nothing is compared
    one = lora_shrink(x, weights, mapping, reduction=two_launch.SAME_ORDER, scale=0.7)
    two = two_launch.shrink(x, weights, mapping, 0.7)
    assert torch.equal(bits(one), bits(two))
    assert one[:, mapping >= 0].abs().min() > 0


def test_a_table_is_filled_over_two_sittings(tmp_path, capsys):
    """The first sitting ends before it begins, the second measures, the third has nothing to do."""
    options = ["--folder", str(tmp_path), "--rows", "1", "128", *SMALL]
    assert main([*options, "--seconds", "0"]) == 0
    assert "0 of 8 cells are complete" in capsys.readouterr().out
    assert main(options) == 0
    assert "8 of 8 cells are complete" in capsys.readouterr().out
    results = read_results(tmp_path / "bench.jsonl")
    assert len(results.rows) == 8 * len(KERNELS)
    for row in results.rows:
        assert row.failure == ""
        assert len(row.microseconds) == 2
        assert 0.5 < row.time < 1000.0
    same = [row.details.get("same_bits_as_two_launch") for row in results.rows]
    assert same.count(True) == 8
    assert same.count(False) == 0
    floors = [row for row in results.rows if row.key.kernel == "floor"]
    assert all(row.details["fastest"] in row.details["candidates"] for row in floors)
    assert main(options) == 0
    assert len(read_results(tmp_path / "bench.jsonl").rows) == len(results.rows)


def test_a_kernel_that_computes_something_else_has_no_time(tmp_path, monkeypatch):
    """A wrong result is a failure with its error, and the other kernels of the cell go on."""
    from fliptrace_kernels.bench import two_launch

    real = two_launch.shrink

    def wrong(*arguments, out, **options):
        return real(*arguments, out=out, **options).mul_(1.01)

    monkeypatch.setattr(two_launch, "shrink", wrong)
    options = ["--rows", "1", *SMALL[:4], "--kernels", "two-launch", "floor"]
    assert main(["--folder", str(tmp_path), *options]) == 0
    rows = read_results(tmp_path / "bench.jsonl").rows
    failures = {row.key.kernel: row.failure for row in rows if row.key.cell == Cell(1, 576, 3, 16)}
    assert "wrong result: 0.01" in failures["two-launch"]
    assert failures["floor"] == ""


def test_a_small_stress(tmp_path, repository_root):
    """A few thousand launches: none differs, and what was compared is counted."""
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("local needs cuda-bindings")
    script = repository_root / "examples/measure/shrink_stress.py"
    options = ["--launches", "40000", "--mutant-rounds", "1", "--folder", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "stress.json").read_text())
    assert found["launches"] == 40000
    assert found["differing"] == 0
    assert all(count["sums_checked"] == count["calls"] for count in found["kernels"].values())
    assert found["mutants"]["no reset"]["caught"]
