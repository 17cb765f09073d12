"""The plugin's function on a GPU, called through torch's dispatcher, captured and replayed."""

from __future__ import annotations

import pytest
import torch

from fliptrace_kernels import lora_shrink, parse_reduction
from fliptrace_kernels.vllm_plugin.errors import PluginError
from fliptrace_kernels.vllm_plugin.installation import install
from fliptrace_kernels.vllm_plugin.settings import Settings

pytestmark = pytest.mark.gpu

REPEATABLE = ["unsplit", "deterministic:8", "tree:8", "local", "local:8"]
SHAPE = {"rows": 21, "size": 576, "rank": 16, "slices": 3, "adapters": 3, "device": "cuda"}


def replaced(operators, reduction, *, count=False):
    operator = operators.define(dispatch_key="CUDA")
    return operator, install(Settings(parse_reduction(reduction), count), operator)


def expected(x, weights, mapping, reduction):
    return lora_shrink(x, [w.squeeze(1) for w in weights], mapping, reduction=reduction)


def same(first, second):
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


@pytest.mark.parametrize("reduction", REPEATABLE)
@pytest.mark.parametrize("rows", [1, 2, 21, 300])
def test_the_operator_runs_the_reduction(operators, reduction, rows):
    """Every bit is that of `lora_shrink`; rows without an adapter come out as 0.0."""
    operator, installation = replaced(operators, reduction)
    x, weights, out, mapping = operators.tensors(**SHAPE | {"rows": rows})
    operator.call(x, weights, out, *operators.metadata(mapping, 3), 1.0)
    assert same(out, expected(x, weights, mapping, reduction))
    assert installation.is_reached(x.device)


def test_the_atomic_baseline_runs(operators):
    """Its bits may change, its values may not."""
    operator, _ = replaced(operators, "atomic:vllm")
    x, weights, out, mapping = operators.tensors(**SHAPE)
    operator.call(x, weights, out, *operators.metadata(mapping, 3), 1.0)
    torch.testing.assert_close(out, expected(x, weights, mapping, "unsplit"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reduction", [*REPEATABLE, "atomic:8"])
def test_replays_run_the_kernel_and_count_it(operators, reduction):
    """Launches are counted by the kernels: a replay, where Python does not run, counts too."""
    operator, installation = replaced(operators, reduction, count=True)
    assert installation.replacement.launches() == 0
    x, weights, out, mapping = operators.tensors(**SHAPE)
    meta = operators.metadata(mapping, 3)
    operator.call(x, weights, out, *meta, 1.0)
    assert installation.replacement.launches() == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operator.call(x, weights, out, *meta, 1.0)
    assert installation.replacement.launches() == 1
    for replay in range(1, 6):
        out.fill_(float("nan"))
        x.mul_(-1)
        mapping.copy_(mapping.roll(1))
        graph.replay()
        assert installation.replacement.launches() == 1 + replay
        if parse_reduction(reduction).is_repeatable:
            assert same(out, expected(x, weights, mapping, reduction))


def test_without_the_switch_nothing_is_counted(operators):
    """Counting costs an atomic; who does not ask does not pay."""
    operator, installation = replaced(operators, "local")
    x, weights, out, mapping = operators.tensors(**SHAPE)
    operator.call(x, weights, out, *operators.metadata(mapping, 3), 1.0)
    assert installation.replacement.launches() is None


@pytest.mark.parametrize("reduction", REPEATABLE)
def test_padded_rows_do_no_harm(operators, reduction):
    """vLLM pads a captured batch and leaves old or never written adapter indices in its last rows."""
    operator, _ = replaced(operators, reduction)
    x, weights, out, mapping = operators.tensors(**SHAPE)
    meta = operators.metadata(mapping.clone(), 3)
    wanted = expected(x, weights, mapping, reduction)
    meta[0][13:] = torch.tensor([2, 0, -5, 99, 2**31 - 1, -(2**31), 3, -1]).int().cuda()
    x[13:] = float("nan")
    operator.call(x, weights, out, *meta, 1.0)
    assert same(out[:, :13], wanted[:, :13])


def test_a_layer_first_seen_during_a_capture_is_refused(operators):
    """What a capture must not do would then happen inside it."""
    operator, _ = replaced(operators, "local", count=True)
    x, weights, out, mapping = operators.tensors(**SHAPE)
    meta = operators.metadata(mapping, 3)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(PluginError, match="first seen during a capture"), torch.cuda.graph(graph):
        operator.call(x, weights, out, *meta, 1.0)
    operator.call(x, weights, out, *meta, 1.0)
    assert same(out, expected(x, weights, mapping, "local"))


def test_every_kernel_of_local_is_ready_after_the_first_call(operators):
    """Calls with few and many rows start different kernels; none is compiled later."""
    from fliptrace_kernels.local import device

    operator, _ = replaced(operators, "local")
    x, weights, out, mapping = operators.tensors(**SHAPE | {"rows": 512, "size": 640})
    operator.call(x, weights, out, *operators.metadata(mapping, 3), 1.0)
    ready = len(device._loaded)
    for rows in (1, 2, 5, 8, 16, 31, 64, 128, 257):
        meta = operators.metadata(mapping[:rows], 3)
        operator.call(x[:rows], weights, out[:, :rows], *meta, 1.0)
    assert len(device._loaded) == ready
