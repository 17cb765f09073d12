"""Shrinks on a GPU that is not the current one; skipped where there are not two."""

from __future__ import annotations

import threading

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA GPUs", allow_module_level=True)

from fliptrace_kernels import ShrinkInputError, lora_shrink

pytestmark = pytest.mark.gpu

REPEATABLE = ["unsplit", "deterministic:8", "tree:8", "local"]


def bits(tensor):
    return tensor.view(torch.int32)


def call_on(device, rows=40, adapters=2):
    """Draw on the CPU, so that every device gets the same numbers."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 1000, generator=generator).bfloat16()
    weights = [torch.randn(adapters, 16, 1000, generator=generator).bfloat16() for _ in range(3)]
    mapping = torch.randint(-1, adapters, (rows,), dtype=torch.int32, generator=generator)
    return x.to(device), [a.to(device) for a in weights], mapping.to(device)


@pytest.fixture(autouse=True)
def first_device_is_current():
    with torch.cuda.device(0):
        yield


@pytest.mark.parametrize("name", REPEATABLE)
def test_the_second_gpu_sums_as_the_first(name):
    """Tensors say where a shrink runs; two GPUs of one model run one binary."""
    first, second = (lora_shrink(*call_on(f"cuda:{i}"), reduction=name) for i in (0, 1))
    assert second.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    x, weights, mapping = call_on("cpu")
    exact = torch.stack(
        [torch.einsum("mk,mrk->mr", x.double(), a.double()[mapping]) for a in weights]
    )
    exact[:, mapping < 0] = 0.0
    assert (second.cpu() - exact).abs().max() < 1e-2
    if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
        assert torch.equal(bits(first).cpu(), bits(second).cpu())


@pytest.mark.parametrize("name", REPEATABLE)
def test_graphs_of_both_gpus_replayed_at_once(name):
    """Each GPU has counters, scratch and kernels of its own, captured or not."""
    expected, graphs, outputs = [], [], []
    for index in (0, 1):
        device = f"cuda:{index}"
        call = call_on(device, rows=300)
        expected.append(lora_shrink(*call, reduction=name))
        out = torch.empty_like(expected[-1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(index):
            torch.cuda.synchronize()
            # torch's own capture stream is one for all devices, on the device that used it first.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                lora_shrink(*call, reduction=name, out=out)
        graphs.append((graph, call))
        outputs.append(out)
    for _ in range(20):
        for index, (graph, _) in enumerate(graphs):
            outputs[index].fill_(float("nan"))
            with torch.cuda.device(index):
                graph.replay()
        for index in (0, 1):
            torch.cuda.synchronize(index)
            assert torch.equal(bits(outputs[index]), bits(expected[index]))


@pytest.mark.parametrize("name", ["deterministic:8", "local"])
def test_a_thread_for_each_gpu(name):
    """Threads new to CUDA, each on a GPU of its own and none of them current, share nothing."""
    calls = [call_on(f"cuda:{index}", rows=200) for index in (0, 1)]
    expected = [lora_shrink(*call, reduction=name) for call in calls]
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    same: dict[int, bool] = {}

    def work(index):
        found = [lora_shrink(*calls[index], reduction=name) for _ in range(100)]
        torch.cuda.synchronize(index)
        same[index] = all(torch.equal(bits(one), bits(expected[index])) for one in found)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == {0: True, 1: True}


def test_tensors_of_two_gpus_are_refused():
    """x, A, mapping and out belong to one device."""
    x, weights, mapping = call_on("cuda:0")
    for name in REPEATABLE:
        with pytest.raises(ShrinkInputError, match="device cuda:0"):
            lora_shrink(x, [a.to("cuda:1") for a in weights], mapping, reduction=name)
        with pytest.raises(ShrinkInputError, match="mapping must be int32"):
            lora_shrink(x, weights, mapping.to("cuda:1"), reduction=name)
        with pytest.raises(ShrinkInputError, match="out must be float32"):
            lora_shrink(
                x, weights, mapping, reduction=name, out=torch.empty(3, 40, 16, device="cuda:1")
            )
