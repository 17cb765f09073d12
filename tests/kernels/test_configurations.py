from __future__ import annotations

import inspect

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fliptrace_kernels import launch_configuration, parse_reduction
from fliptrace_kernels.configurations import DEFAULT_BLOCK_K, DEFAULT_SPLITS, Launch, launch_for
from fliptrace_kernels.hand_over_counters import _Reserve
from fliptrace_kernels.local.calls import launches

KINDS = ["unsplit", "deterministic", "tree", "atomic"]
BLOCKS = [16, 32, 64, 128, 256, 512, 1024]


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_has_a_launch(kind):
    """Every rank, block and dtype has a launch, and all but the largest fit 96 KB."""
    for rank in (1, 8, 16, 17, 32, 33, 64, 512):
        for block_k in BLOCKS:
            for size in (2, 4):
                launch = launch_for(kind=kind, rank=rank, block_k=block_k, element_bytes=size)
                buffers = max(1, launch.num_stages - 1)  # of tiles in flight
                tile = (launch.block_m + launch.block_n) * block_k * size * buffers
                assert tile <= 96 * 1024 or size * block_k >= 2048


def test_launches_stay_with_one_matrix_instruction():
    """No tile reaches 64 rows, from where newer GPUs would add in another order."""
    for kind in KINDS:
        for rank in (1, 16, 64, 512):
            for block_k in BLOCKS:
                launch = launch_for(kind=kind, rank=rank, block_k=block_k, element_bytes=2)
                assert launch.block_m in (16, 32)
                assert launch.num_warps == 4


def test_launches_cannot_depend_on_the_number_of_rows():
    """Nothing that the table is asked with knows the rows; atomics take vLLM's tile."""
    assert set(inspect.signature(launch_for).parameters) == {
        "kind",
        "rank",
        "block_k",
        "element_bytes",
    }
    for block_k in (32, 256):
        chosen = launch_for(kind="atomic", rank=64, block_k=block_k, element_bytes=2)
        assert chosen == Launch(block_m=32, block_n=16, num_warps=4, num_stages=2)


def test_short_forms_have_blocks_and_splits():
    """Each kind that has a short form says which block it takes; two need no number of splits."""
    assert set(DEFAULT_BLOCK_K) == {"atomic", "deterministic", "local", "tree", "unsplit"}
    assert set(DEFAULT_SPLITS) == {"unsplit", "local"}
    assert str(parse_reduction("local")) == "local:32/32"


def described(reduction, rows=128, slices=4):
    return launch_configuration(
        [rows, 576], [[16, 576]] * slices, torch.bfloat16, "cuda", reduction
    )


def test_described_launches():
    """A configuration names kernel, grids and tile, one grid per launch of three slices."""
    found = described("deterministic:8")
    assert found["kernel"] == "lora_shrink_deterministic"
    assert found["grid"] == [[192, 1, 1], [64, 1, 1]]
    assert (found["block_m"], found["block_n"], found["block_k"]) == (16, 16, 32)
    assert found["x_eviction"] == found["a_eviction"] == ""
    assert "second_kernel" not in found
    tree = described("tree:8")
    assert (tree["kernel"], tree["second_kernel"]) == (
        "lora_shrink_partials",
        "lora_shrink_add_partials",
    )
    assert described("deterministic:1")["kernel"] == "lora_shrink_unsplit"
    assert described("deterministic:8", rows=0)["grid"] == []
    vllm = described("atomic:vllm", rows=1, slices=3)
    assert (vllm["reduction"], vllm["block_m"], vllm["grid"]) == (
        "atomic:64/256",
        32,
        [[192, 1, 1]],
    )


def test_described_launches_of_local():
    """Five slices are two launches with a grid each; the first one's kernel is told with all its constants."""
    pytest.importorskip("cuda.bindings")
    found = described("local", rows=300, slices=5)
    assert found["reduction"] == "local:32/32"
    assert found["kernel"] == "fliptrace_lora_shrink_local_s32"
    weights = [torch.empty(16, 576, dtype=torch.bfloat16) for _ in range(5)]
    x, out = torch.empty(300, 576, dtype=torch.bfloat16), torch.empty(5, 300, 16)
    started = list(launches(x, weights, None, 32, 1.0, out))
    assert found["grid"] == [list(grid) for _, grid, _ in started]
    assert found["arrangement"] == started[0][0].variant.constants
    assert described("local", rows=0)["arrangement"] is None


def test_captured_launches_never_share_counters():
    """What a reserve hands out does not overlap, not even in one cache line."""
    reserve = _Reserve(torch.zeros(256, dtype=torch.int32))
    first, second = reserve.take(1), reserve.take(33)
    assert (first.numel(), second.numel()) == (1, 33)
    assert second.data_ptr() - first.data_ptr() == 32 * 4
    assert reserve.left == 256 - 32 - 64
