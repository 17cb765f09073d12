from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading

import pytest
import torch

import fliptrace_kernels
from fliptrace_kernels import (
    ArrivalSchedule,
    LaunchError,
    ReductionError,
    ShrinkInputError,
    launch_configuration,
    lora_shrink,
    prepare,
    vectorised,
)


def same_bits(first, second):
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


def weight(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_exported_names():
    """The package exports exactly its documented names, in alphabetical order."""
    assert fliptrace_kernels.__all__ == [
        "ArrivalSchedule",
        "FliptraceKernelsError",
        "LaunchError",
        "Reduction",
        "ReductionError",
        "ShrinkInputError",
        "launch_configuration",
        "lora_shrink",
        "parse_reduction",
        "partials",
        "prepare",
    ]
    assert all(hasattr(fliptrace_kernels, name) for name in fliptrace_kernels.__all__)


def test_import_does_not_load_triton():
    """Importing the package and running on a CPU leaves Triton alone."""
    code = (
        "import sys, torch, fliptrace_kernels as fk; before = 'triton' in sys.modules;"
        "fk.lora_shrink(torch.ones(1, 8), [torch.ones(2, 8)], reduction='unsplit');"
        "assert before == ('triton' in sys.modules);"
        "assert 'fliptrace_kernels.triton_shrink' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_atomic_on_cpu_needs_a_schedule():
    """Simulated atomics do not run without saying in which order; one split needs none."""
    x, a = weight(1, 64), weight(4, 64, seed=1)
    with pytest.raises(ReductionError, match="needs a schedule"):
        lora_shrink(x, [a], reduction="atomic:8")
    assert lora_shrink(x, [a], reduction="atomic:1").shape == (1, 1, 4)


@pytest.mark.parametrize(
    ("x", "a_slices", "mapping", "match"),
    [
        (torch.zeros(3), [torch.zeros(2, 3)], None, r"x must be \[M, K\]"),
        (torch.zeros(1, 3), [], None, "at least one weight"),
        (torch.zeros(1, 3), [torch.zeros(2, 4)], None, "K = 3"),
        (torch.zeros(1, 3), [torch.zeros(0, 3)], None, "K = 3"),
        (torch.zeros(1, 3), [torch.zeros(2, 3), torch.zeros(4, 3)], None, "slice 1"),
        (torch.zeros(1, 3), [torch.zeros(2, 3).bfloat16()], None, "float32"),
        (torch.zeros(1, 3).double(), [torch.zeros(2, 3).double()], None, "float64"),
        (torch.zeros(1, 3), [torch.zeros(2, 2, 3)], None, "mapping must say"),
        (torch.zeros(1, 3), [torch.zeros(2, 2, 3)], torch.tensor([0]), "int32"),
        (torch.zeros(1, 3), [torch.zeros(2, 3)], torch.tensor([0, 0]).int(), r"int32 \[1\]"),
        (torch.zeros(1, 3), [torch.zeros(2, 2, 3)], torch.tensor([2]).int(), "to 1; got 2"),
        (torch.zeros(1, 3), [torch.zeros(2, 3)], torch.tensor([-2]).int(), "to 0; got -2"),
        (torch.zeros(1, 3, device="meta"), [torch.zeros(2, 3)], None, "cpu or cuda"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(x, a_slices, mapping, match):
    """Each mismatch is named with what was required and what came."""
    with pytest.raises(ShrinkInputError, match=match):
        lora_shrink(x, a_slices, mapping, reduction="unsplit")


def test_rows_without_an_adapter_are_zero():
    """A row mapped to -1 is 0.0 even when its input is NaN; the others are as if alone."""
    x, a = weight(4, 100), weight(2, 8, 100, seed=1)
    x[1] = float("nan")
    mapping = torch.tensor([1, -1, 0, 1], dtype=torch.int32)
    result = lora_shrink(x, [a, a], mapping, reduction="deterministic:8")
    assert same_bits(result[:, 1].contiguous(), torch.zeros(2, 8))
    for row, adapter in ((0, 1), (2, 0), (3, 1)):
        alone = lora_shrink(x[row : row + 1], [a[adapter]], reduction="deterministic:8")
        assert same_bits(result[0, row], alone[0, 0])
        assert same_bits(result[1, row], alone[0, 0])


def test_mapped_rows_keep_their_own_orders():
    """Under a schedule a row's order depends on its place in the call, not on its adapter."""
    x, a = weight(6, 256), weight(1, 8, 256, seed=1)
    mapping = torch.tensor([0, -1, 0, 0, -1, 0], dtype=torch.int32)
    arguments = {"reduction": "atomic:8", "schedule": ArrivalSchedule(5), "call_key": 2}
    mapped = lora_shrink(x, [a], mapping, **arguments)
    plain = lora_shrink(x, [a], **arguments)
    assert same_bits(mapped[:, mapping == 0], plain[:, mapping == 0])


OUTPUTS = {
    "contiguous": lambda: torch.full((2, 5, 8), float("nan")),
    "rows apart": lambda: torch.full((2, 5, 20), float("nan"))[..., :8],
    "ranks first": lambda: torch.full((8, 2, 5), float("nan")).permute(1, 2, 0),
    "rows first": lambda: torch.full((5, 2, 8), float("nan")).transpose(0, 1),
}


@pytest.mark.parametrize("layout", OUTPUTS)
@pytest.mark.parametrize("name", ["unsplit", "deterministic:8", "tree:8", "local", "atomic:vllm"])
def test_output_of_the_caller(name, layout):
    """An output of any strides is written in place, every element of it, and returned."""
    x, a = weight(5, 100), weight(2, 8, 100, seed=1)
    mapping = torch.tensor([1, -1, 0, 1, 0], dtype=torch.int32)
    arguments = {"reduction": name, "schedule": ArrivalSchedule(5), "scale": 0.7}
    out = OUTPUTS[layout]()
    result = lora_shrink(x, [a, a], mapping, **arguments, out=out)
    assert result is out
    assert same_bits(out, lora_shrink(x, [a, a], mapping, **arguments))


@pytest.mark.parametrize(
    ("out", "match"),
    [
        (torch.zeros(1, 2, 4), r"\[1, 2, 3\].*\[1, 2, 4\]"),
        (torch.zeros(1, 2, 3).double(), "float64"),
        (torch.zeros(1, 2, 3, device="meta"), "meta"),
        (torch.zeros(1, 1, 3).expand(1, 2, 3), "expanded"),
        (torch.zeros(9).as_strided((1, 2, 3), (9, 2, 1)), "memory of its own"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(out, match):
    """Shape, dtype, device and overlapping memory of an output are checked."""
    with pytest.raises(ShrinkInputError, match=match):
        lora_shrink(torch.zeros(2, 8), [torch.zeros(3, 8)], reduction="unsplit", out=out)


def test_local_on_cuda_takes_16_bits():
    """FP32 inputs of local are refused by name on CUDA, and run on the CPU."""
    shapes = [1, 64], [[16, 64]]
    with pytest.raises(ShrinkInputError, match=r"bfloat16 or float16; got torch\.float32"):
        launch_configuration(*shapes, torch.float32, "cuda", "local")
    assert launch_configuration(*shapes, torch.float32, "cpu", "local")["block_k"] == 32
    assert lora_shrink(torch.ones(1, 64), [torch.ones(2, 64)], reduction="local")[0, 0, 0] == 64


def test_configuration_states_what_vllm_chooses():
    """atomic:vllm is recorded as the reduction that a call of that many rows runs."""
    found = [
        launch_configuration([rows, 576], [[16, 576]], torch.bfloat16, "cpu", "atomic:vllm")
        for rows in (1, 128)
    ]
    assert [each["reduction"] for each in found] == ["atomic:64/256", "atomic:8/32"]


@pytest.mark.parametrize("mapping", [None, torch.zeros(0, dtype=torch.int32)])
def test_no_rows(mapping):
    """M = 0 gives an empty output."""
    result = lora_shrink(weight(0, 33), [weight(5, 33)] * 2, mapping, reduction="unsplit")
    assert result.shape == (2, 0, 5)
    assert result.dtype == torch.float32


def test_strided_inputs():
    """A transposed or sliced input gives the bits of its copy."""
    x, a = weight(100, 6), weight(4, 200, seed=1)
    reference = lora_shrink(x.T.contiguous(), [a[:, :100].contiguous()], reduction="unsplit")
    assert same_bits(lora_shrink(x.T, [a[:, :100]], reduction="unsplit"), reference)


def test_changed_weights_are_seen():
    """No write to a weight goes unnoticed, not even one past torch's version counter."""
    x = weight(1, 64)
    parameter = torch.nn.Parameter(weight(4, 64, seed=1))
    stacked = weight(2, 4, 64, seed=2)
    for a, mapping in ((parameter, None), (stacked, torch.ones(1, dtype=torch.int32))):
        before = lora_shrink(x, [a], mapping, reduction="unsplit")
        a.data[..., 3, 5] += 1.0
        after = lora_shrink(x, [a], mapping, reduction="unsplit")
        fresh = lora_shrink(x, [a.detach().clone()], mapping, reduction="unsplit")
        assert same_bits(after, fresh)
        assert not same_bits(before, after)


def test_prepared_weights_die_with_their_tensor():
    """Dropping a weight drops what was prepared from it."""
    gc.collect()
    count = len(vectorised._prepared_by_source)
    weights = [weight(4, 64, seed=seed) for seed in range(3)]
    lora_shrink(weight(1, 64), weights, reduction="unsplit")
    assert len(vectorised._prepared_by_source) == count + 1
    del weights[1]
    gc.collect()
    assert len(vectorised._prepared_by_source) == count


def test_grad_and_inference_mode():
    """Trainable weights and inference mode change neither the bits nor later calls."""
    parameter = torch.nn.Parameter(weight(7, 96, seed=1))
    x = weight(3, 96)
    with torch.inference_mode():
        inside = lora_shrink(x, [parameter], reduction="deterministic:8")
        made_inside = lora_shrink(x, [parameter.clone()], reduction="deterministic:8")
    outside = lora_shrink(x.requires_grad_(), [parameter], reduction="deterministic:8")
    assert not outside.requires_grad
    assert same_bits(inside, outside)
    assert same_bits(made_inside, outside)


def test_threads_do_not_disturb_each_other():
    """Calls of the same shape in several threads keep apart."""
    a = weight(16, 576, seed=1)
    inputs = [weight(1, 576, seed=seed) for seed in range(4)]
    expected = [lora_shrink(x, [a], reduction="deterministic:8") for x in inputs]
    wrong = []

    def work(index):
        wrong.extend(
            index
            for _ in range(200)
            if not same_bits(
                lora_shrink(inputs[index], [a], reduction="deterministic:8"), expected[index]
            )
        )

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_results_are_not_overwritten_by_the_next_call():
    """An output is the caller's own: later calls do not write to it."""
    x, a = weight(1, 64), weight(4, 64, seed=1)
    for name in ("unsplit", "atomic:1", "deterministic:8"):
        first = lora_shrink(x, [a], reduction=name)
        kept = first.clone()
        lora_shrink(x * 2, [a], reduction=name)
        assert same_bits(first, kept)


def test_launch_configuration_on_cpu_is_json():
    """A CPU configuration names the specification and the long identity."""
    found = launch_configuration([1, 576], [[16, 576]], torch.bfloat16, "cpu", "atomic:8")
    assert json.loads(json.dumps(found)) == found
    assert found["implementation"] == "torch specification"
    assert found["reduction"] == "atomic:8/32"
    assert found["torch"] == torch.__version__
    with pytest.raises(ShrinkInputError, match="cpu or cuda"):
        launch_configuration([1, 576], [[16, 576]], torch.bfloat16, "meta", "atomic:8")


def test_cuda_without_triton_is_an_error():
    """Where Triton is missing, CUDA is refused by name and nothing falls back."""
    try:
        import triton  # noqa: F401
    except ImportError:
        with pytest.raises(LaunchError, match="needs Triton"):
            launch_configuration([1, 576], [[16, 576]], torch.bfloat16, "cuda", "unsplit")
    else:
        found = launch_configuration([1, 576], [[16, 576]], torch.bfloat16, "cuda", "unsplit")
        assert found["kernel"] == "lora_shrink_unsplit"


def test_prepare_on_cpu():
    """On a CPU there is nothing to prepare; other devices are refused."""
    prepare("cpu")
    with pytest.raises(ShrinkInputError, match="cpu or cuda"):
        prepare("meta")
