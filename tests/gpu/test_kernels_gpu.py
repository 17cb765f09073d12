"""The Triton kernels on a real GPU; skipped where there is none."""

from __future__ import annotations

import random
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from fliptrace_kernels import (
    ArrivalSchedule,
    LaunchError,
    ReductionError,
    launch_configuration,
    lora_shrink,
    parse_reduction,
    specification,
    triton_shrink,
)
from fliptrace_kernels.configurations import Launch

pytestmark = pytest.mark.gpu

REPEATABLE = ["unsplit", "deterministic:8", "deterministic:3/128"]
REDUCTIONS = [*REPEATABLE, "atomic:8", "atomic:64/256", "atomic:1"]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fill uninitialised FP32 tensors with NaN, so that an output nobody wrote shows."""
    empty = torch.empty

    def poisoned(*arguments, **options):
        result = empty(*arguments, **options)
        return result.fill_(float("nan")) if result.dtype == torch.float32 else result

    monkeypatch.setattr(torch, "empty", poisoned)


def bits(tensor):
    return tensor.view(torch.int32)


def same_bits(first, second):
    return torch.equal(bits(first), bits(second))


def random_call(seed, rows, size, rank, slices, dtype=torch.bfloat16, adapters=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"generator": generator, "device": "cuda"}
    x = torch.randn(rows, size, **options).to(dtype)
    shape = (adapters, rank, size) if adapters else (rank, size)
    weights = [torch.randn(shape, **options).to(dtype) for _ in range(slices)]
    mapping = None
    if adapters:
        mapping = torch.randint(-1, adapters, (rows,), dtype=torch.int32, **options)
    return x, weights, mapping


def assert_near_exact(result, call, scale):
    """Compare with float64: at most 1e-5 of the sum of absolute products apart, no NaN."""
    x, weights, mapping = call
    for index, a in enumerate(weights):
        stacked = (a if a.ndim == 3 else a[None]).double()
        exact = torch.zeros(x.shape[0], stacked.shape[1], dtype=torch.float64, device="cuda")
        size = torch.zeros_like(exact)
        for adapter in range(stacked.shape[0]):
            rows = slice(None) if mapping is None else mapping == adapter
            exact[rows] = x[rows].double() @ stacked[adapter].T * scale
            size[rows] = x[rows].double().abs() @ stacked[adapter].abs().T * abs(scale)
        apart = (result[index].double() - exact).abs()
        worst = (apart / size.clamp(min=1e-30)).nan_to_num(nan=float("inf")).max().item()
        assert (apart <= 1e-5 * size).all(), f"slice {index}: {worst:.3g} of the absolute products"


SHAPES = [
    (1, 576, 16, 3, 0),
    (1, 3072, 16, 1, 0),
    (17, 600, 16, 1, 0),
    (33, 576, 20, 4, 3),
    (128, 1536, 64, 2, 0),
    (70, 100, 130, 1, 2),
    (3, 7, 1, 1, 0),
    (300, 1000, 8, 2, 5),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_kernels_match_float64(name, shape):
    """Every kernel is near the exact sum for tails, slices, adapters and odd ranks."""
    rows, size, rank, slices, adapters = shape
    call = random_call(1, rows, size, rank, slices, adapters=adapters)
    assert_near_exact(lora_shrink(*call, reduction=name, scale=0.7), call, 0.7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["unsplit", "deterministic:8", "atomic:8"])
def test_other_dtypes_match_float64(name, dtype):
    """FP16 and FP32 inputs are as near as BF16 ones."""
    call = random_call(2, 40, 600, 16, 2, dtype=dtype)
    assert_near_exact(lora_shrink(*call, reduction=name, scale=0.7), call, 0.7)


@pytest.mark.parametrize("name", ["unsplit", "deterministic:8", "atomic:8"])
def test_kernels_match_the_specification(name):
    """A kernel differs from the specification only as far as the order inside a block may."""
    x, weights, _ = random_call(3, 20, 1536, 16, 1)
    reduction = parse_reduction(name)
    result = lora_shrink(x, weights, reduction=name)[0]
    orders = None
    if reduction.needs_arrival_order:
        orders = ArrivalSchedule(0).orders(0, slices=1, rows=20, rank=16, splits=8).cuda()
    expected = specification.shrink(x, weights, None, reduction, 1.0, orders)[0]
    size = x.float().abs() @ weights[0].float().abs().T
    assert ((result - expected).abs() <= 1e-5 * size).all()
    if reduction.kind == "deterministic":
        _, kept = triton_shrink.shrink_with_partials(x, weights, None, reduction, 1.0)
        expected_partials = specification.partials(x, weights[0], reduction)
        assert ((kept[:, 0] - expected_partials).abs() <= 1e-5 * size).all()


@pytest.mark.parametrize("name", REPEATABLE)
def test_repeatable_in_200_runs(name):
    """25 random calls give the bits of their first run in each of 200 runs."""
    chooser = random.Random(name)
    for case in range(25):
        rows = chooser.choice([1, 2, 16, 31, 128, 500])
        size = chooser.choice([576, 600, 1536, 3072])
        adapters = chooser.choice([0, 3])
        call = random_call(case, rows, size, 16, chooser.choice([1, 3]), adapters=adapters)
        first = lora_shrink(*call, reduction=name)
        assert not first.isnan().any()
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(200):
            differing += (bits(lora_shrink(*call, reduction=name)) != bits(first)).sum()
        assert differing.item() == 0, f"case {case}: rows {rows}, K {size}, adapters {adapters}"


def test_random_shapes_repeat():
    """200 calls of random shapes, mixed on one stream, give the same bits twice."""
    chooser = random.Random(5)
    calls = [
        (
            random_call(
                case,
                chooser.randint(1, 200),
                chooser.choice([576, 600, 1536]),
                16,
                chooser.choice([1, 2, 3]),
                adapters=chooser.choice([0, 4]),
            ),
            chooser.choice(["unsplit", "deterministic:8"]),
        )
        for case in range(200)
    ]
    first = [lora_shrink(*call, reduction=name) for call, name in calls]
    again = [lora_shrink(*call, reduction=name) for call, name in calls]
    different = [case for case in range(200) if not same_bits(first[case], again[case])]
    assert different == []


def test_atomic_differs_between_runs():
    """Real atomics do not repeat: some of 200 runs differ from the first."""
    call = random_call(4, 256, 3072, 16, 3)
    first = lora_shrink(*call, reduction="atomic:8")
    runs = [lora_shrink(*call, reduction="atomic:8") for _ in range(200)]
    differing = [(bits(run) != bits(first)).float().mean().item() for run in runs]
    sys.stdout.write(
        f"atomic:8: {sum(d > 0 for d in differing)} of 200 runs differ from the first, "
        f"{100 * sum(differing) / 200:.2f} % of outputs on average\n"
    )
    assert any(differing)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["deterministic:8", "deterministic:3/128"])
def test_deterministic_is_its_partials_in_order(name, shape):
    """The output has the bits of the kernel's own partials, added in order on a CPU."""
    rows, size, rank, slices, adapters = shape
    x, weights, mapping = random_call(5, rows, size, rank, min(slices, 3), adapters=adapters)
    reduction = parse_reduction(name)
    result, kept = triton_shrink.shrink_with_partials(x, weights, mapping, reduction, 0.7)
    assert same_bits(result, lora_shrink(x, weights, mapping, reduction=name, scale=0.7))
    result, kept = result.cpu(), kept.cpu()
    for index in range(len(weights)):
        total = specification.combine(kept[:, index], reduction, 0.7)
        if mapping is not None:
            total[(mapping < 0).cpu()] = 0.0
        assert same_bits(total, result[index])


@pytest.mark.parametrize("name", REPEATABLE)
def test_row_bits_do_not_depend_on_the_batch(name):
    """Rows alone have the bits they have in batches of up to 2,048 with NaN and Inf neighbours."""
    x, weights, _ = random_call(6, 2048, 1536, 16, 2)
    x[1], x[18] = float("nan"), float("inf")
    together = lora_shrink(x, weights, reduction=name)
    for rows in (1, 2, 16, 17, 128, 2047):
        part = lora_shrink(x[:rows].contiguous(), weights, reduction=name)
        clean = [row for row in range(min(rows, 64)) if row not in (1, 18)]
        assert same_bits(part[:, clean], together[:, clean]), f"{rows} rows"
    assert not together[:, clean].isnan().any()


@pytest.mark.parametrize("name", ["unsplit", "deterministic:8", "atomic:8"])
def test_mapping(name):
    """-1 gives 0.0 even for a NaN row; an index beyond the adapters gives NaN; others are right."""
    x, weights, _ = random_call(7, 40, 576, 16, 2, adapters=3)
    x[7] = float("nan")
    mapping = torch.arange(40, device="cuda", dtype=torch.int32) % 4 - 1
    mapping[7], mapping[9] = -1, 3
    result = lora_shrink(x, weights, mapping, reduction=name)
    none = mapping == -1
    assert same_bits(result[:, none].contiguous(), torch.zeros_like(result[:, none]))
    assert result[:, 9].isnan().all()
    live = (mapping >= 0) & (mapping < 3)
    call = (x[live], weights, mapping[live])
    assert_near_exact(result[:, live], call, 1.0)


@pytest.mark.parametrize("name", ["unsplit", "deterministic:8", "atomic:8"])
def test_no_rows(name):
    """M = 0 launches nothing and gives an empty output."""
    call = random_call(8, 0, 576, 16, 2)
    assert lora_shrink(*call, reduction=name).shape == (2, 0, 16)


def test_counters_return_to_zero():
    """After any mix of calls every counter of every stream is 0."""
    for case in range(20):
        call = random_call(case, 1 + 37 * case, 600, 16, 1 + case % 3, adapters=case % 3)
        lora_shrink(*call, reduction="deterministic:8")
    torch.cuda.synchronize()
    assert triton_shrink._buffers
    for _, counters in triton_shrink._buffers.values():
        assert not counters.any()


def test_two_streams():
    """Calls that run at once on two streams do not disturb each other."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    calls = [random_call(9, 512, 3072, 16, 3), random_call(10, 512, 3072, 16, 3)]
    expected = [lora_shrink(*call, reduction="deterministic:8") for call in calls]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(100):
        for index in (0, 1):
            with torch.cuda.stream(streams[index]):
                results[index].append(lora_shrink(*calls[index], reduction="deterministic:8"))
    torch.cuda.synchronize()
    for index in (0, 1):
        assert all(same_bits(result, expected[index]) for result in results[index])


def test_failed_launch_leaves_counters_usable(monkeypatch):
    """A tile too large for the GPU is refused with a LaunchError, and the next call is right."""
    call = random_call(11, 20, 3072, 16, 1)
    name = "deterministic:2/1024"
    expected = lora_shrink(*call, reduction=name)
    with monkeypatch.context() as patched:
        patched.setattr(triton_shrink, "launch_for", lambda **_: Launch(16, 128, 4, 4))
        with pytest.raises(LaunchError, match="must fit this device"):
            lora_shrink(*call, reduction=name)
    assert same_bits(lora_shrink(*call, reduction=name), expected)


def test_graph_replay():
    """A captured deterministic call replays with the bits of an eager one."""
    call = random_call(12, 33, 1536, 16, 3)
    expected = lora_shrink(*call, reduction="deterministic:8")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = lora_shrink(*call, reduction="deterministic:8")
    for _ in range(50):
        captured.fill_(float("nan"))
        graph.replay()
        assert same_bits(captured, expected)
    assert same_bits(lora_shrink(*call, reduction="deterministic:8"), expected)


def test_strided_input():
    """A row stride beyond K and a transposed input give the bits of their copies."""
    x, weights, _ = random_call(13, 64, 1200, 16, 1)
    weights = [weights[0][:, :600]]
    for view in (x[:, :600], random_call(14, 600, 64, 16, 1)[0].T):
        copied = lora_shrink(view.contiguous(), [weights[0].contiguous()], reduction="unsplit")
        assert same_bits(lora_shrink(view, weights, reduction="unsplit"), copied)


def test_schedule_is_refused():
    """On a GPU nobody can choose the order of arrival."""
    call = random_call(15, 1, 576, 16, 1)
    with pytest.raises(ReductionError, match="hardware decides"):
        lora_shrink(*call, reduction="atomic:8", schedule=ArrivalSchedule(7))


def test_launch_configuration_names_the_kernel():
    """The configuration of a CUDA call is the launch that runs."""
    found = launch_configuration(
        [128, 576], [[16, 576]] * 4, torch.bfloat16, "cuda", "deterministic:8"
    )
    assert found["implementation"] == "triton"
    assert found["kernel"] == "lora_shrink_deterministic"
    assert found["grid"] == [[64, 3, 1], [64, 1, 1]]
    assert found["block_k"] == 32
