"""The Triton kernels on a real GPU; skipped where there is none."""

from __future__ import annotations

import random
import sys
import warnings

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from fliptrace_kernels import (
    ArrivalSchedule,
    LaunchError,
    ReductionError,
    hand_over_counters,
    launch_configuration,
    lora_shrink,
    parse_reduction,
    prepare,
    specification,
    triton_shrink,
)
from fliptrace_kernels.configurations import Launch

pytestmark = pytest.mark.gpu

REPEATABLE = ["unsplit", "deterministic:8", "deterministic:8/256", "tree:8"]
REDUCTIONS = [*REPEATABLE, "atomic:vllm"]


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
    (17, 600, 16, 1, 0),
    (33, 576, 20, 7, 3),
    (128, 1536, 64, 2, 1),
    (70, 100, 130, 1, 2),
    (3, 7, 1, 1, 0),
    (5, 3072, 512, 1, 0),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_kernels_match_float64(name, shape):
    """Every kernel is near the exact sum for tails, slices, adapters and odd ranks."""
    rows, size, rank, slices, adapters = shape
    call = random_call(1, rows, size, rank, slices, adapters=adapters)
    assert_near_exact(lora_shrink(*call, reduction=name, scale=0.7), call, 0.7)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("unsplit", torch.float16),
        ("deterministic:8", torch.float16),
        ("deterministic:8", torch.float32),
        ("tree:8", torch.float32),
        ("atomic:8", torch.float32),
    ],
)
def test_other_dtypes_match_float64(name, dtype):
    """FP16 and FP32 inputs are as near as BF16 ones."""
    call = random_call(2, 40, 600, 16, 2, dtype=dtype)
    assert_near_exact(lora_shrink(*call, reduction=name, scale=0.7), call, 0.7)


@pytest.mark.parametrize("name", ["unsplit", "deterministic:8", "tree:8", "atomic:8"])
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
    if reduction.kind in ("deterministic", "tree"):
        _, kept = triton_shrink.shrink_with_partials(x, weights, None, reduction, 1.0)
        expected_partials = specification.partials(x, weights[0], reduction)
        assert ((kept[:, 0] - expected_partials).abs() <= 1e-5 * size).all()


@pytest.mark.parametrize("name", REPEATABLE)
def test_repeatable_in_200_runs(name):
    """25 random calls give the bits of their first run in each of 200 runs."""
    chooser = random.Random(name)
    for case in range(25):
        rows = chooser.choice([1, 2, 16, 31, 128, 500])
        size = chooser.choice([600, 1536])
        adapters = chooser.choice([0, 3])
        call = random_call(case, rows, size, 16, 3, adapters=adapters)
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
                chooser.choice([600, 1536]),
                16,
                chooser.choice([1, 3]),
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
@pytest.mark.parametrize("name", ["deterministic:8", "deterministic:8/256", "tree:8"])
def test_output_is_its_partials_in_order(name, shape):
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


@pytest.mark.parametrize("name", ["deterministic:8", "deterministic:8/256"])
@pytest.mark.parametrize("shape", [(1, 1536, 16, 3, 0), (33, 600, 20, 2, 3)], ids=str)
def test_one_launch_equals_two(name, shape):
    """Handing over inside a launch gives the bits of adding in a second one, in the same order."""
    call = random_call(16, *shape[:4], adapters=shape[4])
    result = lora_shrink(*call, reduction=name, scale=0.7)
    oracle = torch.empty_like(result)
    triton_shrink.shrink_in_two_launches(*call, parse_reduction(name), 0.7, oracle)
    assert same_bits(result, oracle)


BATCHES = [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 127, 128, 129, 257, 512, 1000, 2048, 4097, 8191]


@pytest.mark.parametrize(
    ("name", "size", "rank"),
    [*[(name, 3072, 16) for name in REPEATABLE], ("deterministic:16/64", 1536, 64)],
)
def test_row_bits_do_not_depend_on_the_batch(name, size, rank):
    """A row has the same bits in batches of 1 to 8,192, anywhere in them, next to NaN and Inf."""
    x, weights, _ = random_call(6, 8192, size, rank, 2)
    odd = torch.arange(8192, device="cuda") % 17
    x[odd == 1], x[odd == 3] = float("nan"), float("inf")
    clean = (odd != 1) & (odd != 3)
    together = lora_shrink(x, weights, reduction=name)
    assert not together[:, clean].isnan().any()
    for rows in BATCHES:
        part = lora_shrink(x[:rows], weights, reduction=name)
        live = clean[:rows]
        assert same_bits(part[:, live], together[:, :rows][:, live]), f"{rows} rows"
        start = random.Random(rows).randint(1, 8192 - rows)
        part = lora_shrink(x[start : start + rows], weights, reduction=name)
        live = clean[start : start + rows]
        expected = together[:, start : start + rows][:, live]
        assert same_bits(part[:, live], expected), f"{rows} rows from {start}"


@pytest.mark.parametrize("name", ["unsplit", "deterministic:8/256", "tree:8"])
def test_row_bits_do_not_depend_on_other_adapters(name):
    """A row's bits are those of a call with its adapter alone, whatever its neighbours use."""
    x, weights, mapping = random_call(17, 150, 1536, 16, 2, adapters=4)
    x[mapping < 0] = float("nan")
    mixed = lora_shrink(x, weights, mapping, reduction=name)
    for adapter in range(4):
        rows = mapping == adapter
        alone = [a[adapter] for a in weights]
        assert same_bits(mixed[:, rows], lora_shrink(x, alone, reduction=name)[:, rows])
        one = torch.where(rows, 0, -1).int()
        masked = lora_shrink(x, [a[adapter : adapter + 1] for a in weights], one, reduction=name)
        assert same_bits(mixed[:, rows], masked[:, rows])
        assert same_bits(masked[:, ~rows], torch.zeros_like(masked[:, ~rows]))


@pytest.mark.parametrize("name", [*REPEATABLE, "atomic:8"])
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


@pytest.mark.parametrize("name", ["unsplit", "deterministic:8", "tree:8"])
def test_output_of_the_caller(name):
    """A poisoned output of any strides is written whole, and nothing around it."""
    x, weights, mapping = random_call(18, 37, 576, 20, 4, adapters=2)
    expected = lora_shrink(x, weights, mapping, reduction=name, scale=0.7)
    around = torch.full((37, 4, 50), float("nan"), device="cuda")
    out = around[..., 7:27].transpose(0, 1)
    assert lora_shrink(x, weights, mapping, reduction=name, scale=0.7, out=out) is out
    assert same_bits(out.contiguous(), expected)
    assert around[..., :7].isnan().all()
    assert around[..., 27:].isnan().all()
    out = torch.full((20, 4, 37), float("nan"), device="cuda").permute(1, 2, 0)
    lora_shrink(x, weights, mapping, reduction=name, scale=0.7, out=out)
    assert same_bits(out.contiguous(), expected)


def roomy(gibibytes):
    if torch.cuda.mem_get_info()[0] < gibibytes << 30:
        pytest.skip(f"needs {gibibytes} GiB of free GPU memory")


@pytest.mark.parametrize("name", ["unsplit", "deterministic:8", "tree:8"])
def test_more_than_2_to_the_31_elements(name):
    """Rows and outputs that begin beyond 2^31 elements are read and written where they are."""
    roomy(16)
    x, weights, _ = random_call(19, 17, 576, 16, 1)
    expected = lora_shrink(x, weights, reduction=name)
    memory = torch.zeros((1 << 31) + (1 << 20), dtype=torch.bfloat16, device="cuda")
    far = memory.as_strided((17, 576), (1 << 27, 1))
    far.copy_(x)
    assert same_bits(lora_shrink(far, weights, reduction=name), expected)
    del far
    far = memory.as_strided((2, 576), (1 << 31, 1))
    far.copy_(x[:2])
    assert same_bits(lora_shrink(far, weights, reduction=name), expected[:, :2].contiguous())
    del far, memory
    out = torch.zeros((1 << 31) + (1 << 20), device="cuda").as_strided((1, 17, 16), (1, 1 << 27, 1))
    lora_shrink(x, weights, reduction=name, out=out)
    assert same_bits(out.contiguous(), expected)


def test_more_than_2_to_the_31_elements_in_a_row_of_rows():
    """A contiguous input of 2.1 thousand million elements gives each row its own bits."""
    roomy(16)
    size = (1 << 18) + 32
    x = torch.empty(8192, size, dtype=torch.bfloat16, device="cuda").normal_()
    weights = [torch.randn(8, size, device="cuda").bfloat16()]
    result = lora_shrink(x, weights, reduction="deterministic:8/256")
    for row in (0, 4095, 8190, 8191):
        alone = lora_shrink(x[row : row + 1], weights, reduction="deterministic:8/256")
        assert same_bits(alone, result[:, row : row + 1].contiguous())
    assert_near_exact(result[:, -2:], (x[-2:], weights, None), 1.0)


@pytest.mark.parametrize("name", ["unsplit", "deterministic:8", "atomic:8"])
def test_no_rows(name):
    """M = 0 launches nothing and gives an empty output."""
    call = random_call(8, 0, 576, 16, 2)
    assert lora_shrink(*call, reduction=name).shape == (2, 0, 16)


def test_counters_return_to_zero():
    """After any mix of calls, captured ones included, every counter of every stream is 0."""
    for case in range(20):
        call = random_call(case, 1 + 37 * case, 600, 16, 1 + case % 3, adapters=case % 3)
        lora_shrink(*call, reduction="deterministic:8")
    torch.cuda.synchronize()
    everything = list(hand_over_counters._by_stream.values())
    everything += [r.counters for rs in hand_over_counters._reserves.values() for r in rs]
    assert len(everything) >= 2
    for counters in everything:
        assert not counters.any()


def test_launches_are_counted_on_the_device():
    """A counter rises by 1 per launch, replays of a graph included, and changes no bit."""
    call = random_call(20, 33, 1536, 16, 4)
    for name, launches in (("unsplit", 2), ("deterministic:8", 2), ("tree:8", 2), ("atomic:1", 2)):
        reduction = parse_reduction(name)
        expected = lora_shrink(*call, reduction=name)
        counter = torch.zeros(1, dtype=torch.int64, device="cuda")
        out = torch.empty_like(expected)
        arguments = (*call, reduction, 1.0, out)
        triton_shrink.shrink(*arguments, launch_counter=counter)
        assert same_bits(out, expected)
        assert counter.item() == launches
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            triton_shrink.shrink(*arguments, launch_counter=counter)
        assert counter.item() == launches
        for _ in range(5):
            graph.replay()
        assert counter.item() == 6 * launches


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


def capture(call, name, **options):
    """Capture one call; it has run before, so nothing is compiled inside."""
    lora_shrink(*call, reduction=name, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = lora_shrink(*call, reduction=name, **options)
    return graph, out


def capture_and_fail(*calls):
    """Begin to capture the calls and raise what they raise, or an error of our own."""
    marker = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        marker.add_(1)  # torch warns of a graph of nothing
        for call in calls:
            call()
        raise RuntimeError("on purpose")


def test_failed_launch_leaves_counters_usable(monkeypatch):
    """A tile too large for the GPU is refused, captured or not, and the next calls are right."""
    call = random_call(11, 20, 3072, 16, 1)
    name = "deterministic:2/1024"
    expected = lora_shrink(*call, reduction=name)
    with monkeypatch.context() as patched:
        patched.setattr(triton_shrink, "launch_for", lambda **_: Launch(16, 128, 4, 4))
        with pytest.raises(LaunchError, match="must fit this device"):
            lora_shrink(*call, reduction=name)
        with pytest.raises(LaunchError, match="must fit this device"):
            capture_and_fail(lambda: lora_shrink(*call, reduction=name))
    assert same_bits(lora_shrink(*call, reduction=name), expected)
    graph, captured = capture(call, name)
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        assert same_bits(captured, expected)


@pytest.mark.parametrize("name", REPEATABLE)
def test_graph_replay(name):
    """A captured call replays with the bits of an eager one, and eager calls go on beside it."""
    x, weights, mapping = random_call(12, 33, 1536, 16, 4, adapters=2)
    call = (x, weights, mapping)
    expected = lora_shrink(*call, reduction=name, scale=0.7)
    graph, captured = capture(call, name, scale=0.7)
    for _ in range(50):
        captured.fill_(float("nan"))
        graph.replay()
        assert same_bits(captured, expected)
        assert same_bits(lora_shrink(*call, reduction=name, scale=0.7), expected)
    other = random_call(21, 33, 1536, 16, 1)[0]
    x.copy_(other)
    graph.replay()
    assert same_bits(captured, lora_shrink(*call, reduction=name, scale=0.7))


def test_replay_runs_one_kernel(monkeypatch):
    """A replay of deterministic is one kernel: nothing is zeroed or filled for it."""
    monkeypatch.undo()
    call = random_call(12, 33, 1536, 16, 3)
    graph, _ = capture(call, "deterministic:8")
    torch.cuda.synchronize()
    activity = torch.profiler.ProfilerActivity.CUDA
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        with torch.profiler.profile(activities=[activity]) as profile:
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    ran = [event.name for event in profile.events() if event.device_type == device]
    if not ran:
        pytest.skip("the profiler sees no kernels on this machine")
    assert ran == ["lora_shrink_deterministic"] * 3


def test_two_graphs_of_one_stream_at_once():
    """Two graphs captured on one stream stay right when two streams replay them at once."""
    calls = [random_call(22, 512, 3072, 16, 3), random_call(23, 512, 3072, 16, 3)]
    name = "deterministic:8"
    expected = [lora_shrink(*call, reduction=name) for call in calls]
    captured = [capture(call, name) for call in calls]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    differing = torch.zeros(2, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for _ in range(200):
        for index in (0, 1):
            graph, out = captured[index]
            with torch.cuda.stream(streams[index]):
                out.fill_(float("nan"))
                graph.replay()
                differing[index] += (bits(out) != bits(expected[index])).sum()
    torch.cuda.synchronize()
    assert differing.tolist() == [0, 0]


def test_discarded_captures():
    """Graphs that are dropped unused, or whose capture failed, disturb nobody."""
    call = random_call(24, 100, 1536, 16, 2)
    name = "deterministic:8"
    expected = lora_shrink(*call, reduction=name)
    graph, captured = capture(call, name)
    for _ in range(3):
        dropped, _ = capture(call, name)
        dropped.reset()
        with pytest.raises(RuntimeError, match="on purpose"):
            capture_and_fail(lambda: lora_shrink(*call, reduction=name))
        captured.fill_(float("nan"))
        graph.replay()
        assert same_bits(captured, expected)
        assert same_bits(lora_shrink(*call, reduction=name), expected)
        again, out = capture(call, name)
        again.replay()
        assert same_bits(out, expected)


def test_first_call_inside_a_capture(monkeypatch):
    """A capture without counters is refused by name; after `prepare` it works."""
    call = random_call(25, 20, 576, 16, 1)
    name = "deterministic:8"
    expected = lora_shrink(*call, reduction=name)
    torch.cuda.synchronize()
    monkeypatch.setattr(hand_over_counters, "_reserves", {})
    with pytest.raises(LaunchError, match=r"has 0 left.*prepare\('cuda:0'"):
        capture_and_fail(lambda: lora_shrink(*call, reduction=name))
    with pytest.raises(LaunchError, match="outside of a CUDA graph capture"):
        capture_and_fail(lambda: prepare("cuda"))
    prepare("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = lora_shrink(*call, reduction=name)
    graph.replay()
    assert same_bits(out, expected)


def test_renewed_reserve_leaves_graphs_alone():
    """A graph keeps its counters when the reserve they came from has been replaced."""
    call = random_call(26, 20, 576, 16, 1)
    expected = lora_shrink(*call, reduction="deterministic:8")
    graph, captured = capture(call, "deterministic:8")
    index = torch.cuda.current_device()
    before = len(hand_over_counters._reserves[index])
    prepare("cuda", counters=hand_over_counters._reserves[index][-1].left + 1)
    assert len(hand_over_counters._reserves[index]) == before + 1
    ones = [torch.ones(1 << 20, dtype=torch.int32, device="cuda") for _ in range(8)]
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        assert same_bits(captured, expected)
    assert all(each.all() for each in ones)


def test_strided_input():
    """A row stride beyond K and a transposed input give the bits of their copies."""
    x, weights, _ = random_call(13, 64, 1200, 16, 1)
    weights = [weights[0][:, :600]]
    for view in (x[:, :600], random_call(14, 600, 64, 16, 1)[0].T):
        copied = lora_shrink(view.contiguous(), [weights[0].contiguous()], reduction="unsplit")
        assert same_bits(lora_shrink(view, weights, reduction="unsplit"), copied)


@pytest.mark.parametrize("name", REPEATABLE)
def test_alignment_changes_no_bit(name):
    """Inputs and weights that start or lie at odd addresses give the bits of aligned ones."""
    x, weights, _ = random_call(27, 40, 1537, 16, 3)
    odd_x, odd_weights = x[:, 1:], [a[:, 1:] for a in weights]
    expected = lora_shrink(
        odd_x.contiguous(), [a.contiguous() for a in odd_weights], reduction=name
    )
    assert same_bits(lora_shrink(odd_x, odd_weights, reduction=name), expected)


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
    assert found["grid"] == [[192, 1, 1], [64, 1, 1]]
    assert found["block_k"] == 32


@pytest.fixture(scope="module")
def mutants(load_neighbour, repository_root):
    return load_neighbour(repository_root / "examples" / "measure" / "shrink_mutants.py")


def test_delays_catch_mutants(mutants):
    """With delayed blocks the faithful copy is right, and two of its mutants are caught."""
    x, weights, _ = random_call(28, 64, 1536, 16, 3)
    expected = lora_shrink(x, weights, reduction="deterministic:8")
    blocks, warps = mutants.delays_shape(x, weights)
    delays = torch.randint(0, 20_000, (blocks, warps), dtype=torch.int32, device="cuda")
    for _ in range(20):
        assert same_bits(mutants.run_mutant("faithful", x, weights, delays=delays), expected)
        assert same_bits(mutants.run_mutant("faithful", x, weights), expected)
    # The thread that takes the ticket is in warp 0; the other warps of every third block are late.
    delays.zero_()
    delays[::3, 1:] = 50_000
    runs = [mutants.run_mutant("no barrier", x, weights, delays=delays) for _ in range(20)]
    assert not all(same_bits(run, expected) for run in runs)
    assert all(
        same_bits(mutants.run_mutant("faithful", x, weights, delays=delays), expected)
        for _ in range(20)
    )
    counters = torch.zeros(blocks, dtype=torch.int32, device="cuda")
    first = mutants.run_mutant("no reset", x, weights, counters=counters)
    second = mutants.run_mutant("no reset", x, weights, counters=counters)
    assert same_bits(first, expected)
    assert second.isnan().all()


def test_local_runs_by_the_same_call():
    """`local` on CUDA is reached by the public call, writes where it is told, and is near exact."""
    x, weights, mapping = random_call(29, 20, 576, 16, 2, adapters=2)
    call = (x, weights, mapping)
    out = torch.full((2, 20, 16), float("nan"), device="cuda")
    assert lora_shrink(*call, reduction="local", scale=0.7, out=out) is out
    assert_near_exact(out, call, 0.7)
    assert same_bits(out, lora_shrink(*call, reduction="local", scale=0.7))
