"""local:S on a real GPU; skipped where there is none."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from fliptrace_kernels import LaunchError, ReductionError, ShrinkInputError
from fliptrace_kernels.local import (
    Arrangement,
    describe_launch,
    device,
    partials_only,
    prepare,
    shrink,
    with_partials,
)
from fliptrace_kernels.local.arrangements import CANDIDATES
from fliptrace_kernels.local.calls import launches

pytestmark = pytest.mark.gpu

MANY_ROWS = [1, 2, 3, 7, 8, 9, 16, 31, 64, 65, 128, 200, 256, 512, 1000, 1024, 2048, 4096, 8192]


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


def poisoned(slices, rows, rank):
    return torch.full((slices, rows, rank), float("nan"), device="cuda")


def run(x, weights, mapping=None, splits=32, scale=0.7, arrangement=None):
    out = poisoned(len(weights), x.shape[0], weights[0].shape[-2])
    shrink(x, weights, mapping, splits, scale, out, arrangement=arrangement)
    return out


def in_order(partials, scale):
    """Add partials [S, ...] on the CPU as local does, one FP32 operation at a time."""
    partials = partials.cpu()
    groups = []
    for first in range(0, partials.shape[0], 4):
        group = partials[first]
        for i in range(1, 4):
            group = group + partials[first + i]
        groups.append(group)
    total = groups[0]
    for group in groups[1:]:
        total = total + group
    return total * torch.tensor(scale, dtype=torch.float32)


def assert_near_exact(result, call, scale):
    x, weights, mapping = call
    for index, a in enumerate(weights):
        stacked = (a if a.ndim == 3 else a[None]).double()
        exact = torch.zeros(result.shape[1:], dtype=torch.float64, device="cuda")
        size = torch.zeros_like(exact)
        for adapter in range(stacked.shape[0]):
            rows = slice(None) if mapping is None else mapping == adapter
            exact[rows] = x[rows].double() @ stacked[adapter].T * scale
            size[rows] = x[rows].double().abs() @ stacked[adapter].abs().T * abs(scale)
        apart = (result[index].double() - exact).abs()
        assert not apart.isnan().any()
        assert (apart <= 1e-5 * size).all(), f"slice {index}: {apart.max().item()}"


def compile_together(calls, splits, arrangements=(None,), kinds=(0,)):
    """Compile what calls will start, on all cores at once; one by one takes minutes."""
    variants = []
    for x, weights, mapping in calls:
        out = torch.empty(len(weights), x.shape[0], weights[0].shape[-2], device="cuda")
        for split in splits:
            partials = torch.empty(split, *out.shape, device="cuda") if any(kinds) else None
            for arrangement in arrangements:
                if arrangement is not None and not arrangement.fits(split):
                    continue
                for kind in kinds:
                    variants += [
                        kernel.variant
                        for kernel, _, _ in launches(
                            x, weights, mapping, split, 1.0, out, partials, arrangement, None, kind
                        )
                    ]
    device.load_all(variants, 0)


SHAPES = [
    (1, 576, 16, 3, 0),
    (1, 3072, 16, 1, 0),
    (17, 600, 16, 1, 0),
    (33, 576, 20, 4, 3),
    (128, 1536, 64, 2, 0),
    (70, 100, 130, 1, 2),
    (3, 7, 1, 1, 0),
    (300, 1000, 8, 2, 5),
    (40, 3071, 512, 1, 0),
    (5, 1021, 24, 5, 40),
    (9, 28672, 16, 1, 0),
    (300, 14336, 32, 3, 0),
]


@pytest.mark.parametrize(
    ("splits", "dtype"),
    [(8, torch.bfloat16), (32, torch.bfloat16), (32, torch.float16), (64, torch.bfloat16)],
    ids=str,
)
def test_near_float64(splits, dtype):
    """Tails, odd K, slices, adapters and odd ranks are all near the exact sum."""
    calls = [
        random_call(1, rows, size, rank, slices, dtype, adapters)
        for rows, size, rank, slices, adapters in SHAPES
    ]
    compile_together(calls, [splits])
    for call in calls:
        assert_near_exact(run(*call, splits=splits), call, 0.7)


@pytest.mark.parametrize(("size", "rank", "slices"), [(3072, 16, 3), (1000, 20, 2), (8192, 32, 1)])
@pytest.mark.parametrize("splits", [16, 32, 64])
def test_a_row_has_the_same_bits_for_every_number_of_rows(size, rank, slices, splits):
    """Batch-invariance from 1 to 8192 rows, wherever in the batch the row stands."""
    x, weights, _ = random_call(2, 8192, size, rank, slices)
    prepare(size=size, rank=rank, slices=slices, dtype=x.dtype, splits=splits, mapping=False)
    full = run(x, weights, splits=splits)
    for rows in MANY_ROWS:
        first = (8192 - rows) // 3
        part = run(x[first : first + rows], weights, splits=splits)
        assert same_bits(part, full[:, first : first + rows].contiguous()), rows
    assert same_bits(full, run(x, weights, splits=splits))


@pytest.mark.parametrize("size", [3072, 1000])
@pytest.mark.parametrize("splits", [8, 16, 32, 64])
def test_every_arrangement_gives_the_same_bits(size, splits):
    """All layouts of the table, at a number of rows that fills none of them."""
    x, weights, _ = random_call(3, 75, size, 20, 2)
    compile_together([(x, weights, None)], [splits], [None, *CANDIDATES])
    expected = run(x, weights, splits=splits)
    for arrangement in CANDIDATES:
        if arrangement.fits(splits):
            got = run(x, weights, splits=splits, arrangement=arrangement)
            assert same_bits(got, expected), arrangement


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("splits", [8, 32, 64])
def test_totals_are_their_partials_added_in_the_specified_order(splits, dtype):
    """Bit for bit, and keeping the partials changes nothing."""
    calls = [random_call(4, rows, 1536, 16, 3, dtype) for rows in (1, 6, 40, 300, 8192)]
    compile_together(calls, [splits], kinds=(0, 1, 2))
    for x, weights, _ in calls:
        check_partials(x, weights, splits)


def check_partials(x, weights, splits):
    rows = x.shape[0]
    out = poisoned(3, rows, 16)
    partials = with_partials(x, weights, None, splits, 0.7, out)
    assert same_bits(out.cpu(), in_order(partials, 0.7))
    assert same_bits(out, run(x, weights, splits=splits))
    alone = torch.full_like(partials, float("nan"))
    partials_only(x, weights, splits, alone)
    assert same_bits(alone, partials)
    k = torch.arange(1536, device="cuda") // 32 % splits
    for split in range(splits):
        exact = x[:, k == split].double() @ weights[0][:, k == split].double().T
        size = x[:, k == split].double().abs() @ weights[0][:, k == split].double().abs().T
        assert ((partials[split, 0].double() - exact).abs() <= 1e-5 * size).all()


@pytest.mark.parametrize("rows", [2, 8, 50, 200, 2000])
def test_neighbours_do_not_matter(rows):
    """NaN and Inf in other rows, beyond K and in another adapter's weights change no bit."""
    x, weights, _ = random_call(5, rows, 1000, 16, 2, adapters=3)
    mapping = torch.zeros(rows, dtype=torch.int32, device="cuda")
    clean = run(x, weights, mapping)
    wide = torch.full((rows, 1024), float("nan"), dtype=torch.bfloat16, device="cuda")
    wide[:, :1000] = x
    wide[1::2] = float("inf")
    dirty_mapping = mapping.clone()
    dirty_mapping[1::2] = torch.tensor([-1, 1, 2, 0], dtype=torch.int32, device="cuda").repeat(
        rows
    )[: rows // 2]
    dirty_weights = [a.clone() for a in weights]
    for a in dirty_weights:
        a[1:] = float("nan")
    dirty = run(wide[:, :1000], dirty_weights, dirty_mapping)
    assert same_bits(dirty[:, ::2].contiguous(), clean[:, ::2].contiguous())
    none = dirty_mapping == -1
    assert (bits(dirty[:, none].contiguous()) == 0).all()


@pytest.mark.parametrize("adapters", [1, 2, 7, 64])
@pytest.mark.parametrize("rows", [1, 33, 4000])
def test_many_adapters_match_one_at_a_time(rows, adapters):
    """A row's bits are those it has alone with its adapter; -1 gives zeros, beyond gives NaN."""
    x, weights, mapping = random_call(6, rows, 640, 12, 2, adapters=adapters)
    mapping[rows // 2] = adapters
    out = run(x, weights, mapping)
    for adapter in range(adapters):
        chosen = mapping == adapter
        if chosen.any():
            alone = run(x, [a[adapter].contiguous() for a in weights])
            assert same_bits(out[:, chosen].contiguous(), alone[:, chosen].contiguous())
    assert (bits(out[:, mapping == -1].contiguous()) == 0).all()
    assert out[:, mapping == adapters].isnan().all()


@pytest.mark.parametrize("slices", [1, 4, 5, 9])
def test_slices(slices):
    """More slices than one launch takes are several launches, and the device counts them."""
    x, weights, _ = random_call(7, 20, 512, 16, slices)
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")
    out = poisoned(slices, 20, 16)
    shrink(x, weights, None, 32, 0.7, out, launch_counter=counter)
    for index, a in enumerate(weights):
        assert same_bits(out[index], run(x, [a])[0])
    assert counter.item() == -(-slices // 4)


@pytest.mark.parametrize("rank", [1, 24, 33, 128, 512])
def test_ranks(rank):
    """A rank's bits do not depend on how many there are."""
    x, weights, _ = random_call(8, 37, 768, rank, 2)
    call = x, weights, None
    out = run(*call)
    assert_near_exact(out, call, 0.7)
    some = run(x, [a[: rank // 2 + 1] for a in weights])
    assert same_bits(some, out[:, :, : rank // 2 + 1].contiguous())


def test_strides_and_misalignment():
    """Strided x, weights and outputs, aligned or not, give the same bits and touch nothing else."""
    x, weights, _ = random_call(9, 50, 1024, 16, 2)
    expected = run(x, weights)
    for shift in (0, 1, 8):
        wide = torch.full((50, 1100), float("nan"), dtype=torch.bfloat16, device="cuda")
        wide[:, shift : shift + 1024] = x
        tall = torch.full((2, 16, 1100), float("nan"), dtype=torch.bfloat16, device="cuda")
        for index, a in enumerate(weights):
            tall[index, :, shift : shift + 1024] = a
        got = run(
            wide[:, shift : shift + 1024], [tall[i, :, shift : shift + 1024] for i in range(2)]
        )
        assert same_bits(got, expected), shift
    assert same_bits(run(x.T.contiguous().T, weights), expected)
    memory = torch.full((16, 60, 3, 2), 99.0, device="cuda")
    out = memory[:, :50, 1].permute(2, 1, 0)
    shrink(x, weights, None, 32, 0.7, out)
    assert same_bits(out.contiguous(), expected)
    out.fill_(99.0)
    assert (memory == 99.0).all()


def test_no_rows():
    """No rows, no launch."""
    x, weights, _ = random_call(10, 1, 512, 16, 2)
    assert run(x[:0], weights).shape == (2, 0, 16)


def test_more_than_2_31_elements():
    """Offsets of x, of out and of the weights beyond 32 bits."""
    size, rows = 3072, 8192
    stride = 300_000
    memory = torch.zeros(rows * stride, dtype=torch.bfloat16, device="cuda")
    assert memory.numel() > 2**31
    x, weights, _ = random_call(11, rows, size, 16, 1)
    far = memory.view(rows, stride)[:, :size]
    far.copy_(x)
    assert same_bits(run(far, weights), run(x, weights))
    adapters = 2**31 // (16 * size) + 2
    many = memory[: adapters * 16 * size].view(adapters, 16, size)
    many[-1] = weights[0]
    mapping = torch.full((3,), adapters - 1, dtype=torch.int32, device="cuda")
    assert same_bits(run(x[:3], [many], mapping), run(x[:3], weights))


def test_more_rows_than_one_grid():
    """More tiles than a grid's height are several launches."""
    x, weights, _ = random_call(12, 70_000, 64, 4, 1)
    out = run(x, weights, arrangement=Arrangement(8, 1))
    assert same_bits(out, run(x, weights))


def test_replays_on_two_streams():
    """Two graphs replayed at once on two streams give the bits of a plain call."""
    calls = [random_call(13 + i, 5 + i, 1536, 16, 3) for i in range(2)]
    expected = [run(*call) for call in calls]
    graphs, outs = [], []
    for x, weights, mapping in calls:
        out = poisoned(3, x.shape[0], 16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(50):
                shrink(x, weights, mapping, 32, 0.7, out)
        graphs.append(graph)
        outs.append(out)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(40):
        for graph, stream, out in zip(graphs, streams, outs, strict=True):
            with torch.cuda.stream(stream):
                out.fill_(float("nan"))
                graph.replay()
    torch.cuda.synchronize()
    for out, result in zip(outs, expected, strict=True):
        assert same_bits(out, result)


CAPTURE_FIRST = """
import torch
from fliptrace_kernels.local import shrink
x = torch.randn(5, 1040, device="cuda").bfloat16()
a = torch.randn(16, 1040, device="cuda").bfloat16()
out = torch.full((1, 5, 16), float("nan"), device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    shrink(x, [a], None, 32, 1.0, out)
assert out.isnan().all()
graph.replay()
captured = out.clone()
shrink(x, [a], None, 32, 1.0, out)
assert torch.equal(out, captured) and not out.isnan().any()
"""

FRESH_THREAD = """
import threading, torch
from fliptrace_kernels.local import shrink
x = torch.randn(5, 1040, device="cuda").bfloat16()
a = torch.randn(16, 1040, device="cuda").bfloat16()
out = torch.full((1, 5, 16), float("nan"), device="cuda")
failures = []
def work(stream):
    try:
        if stream is None:
            shrink(x, [a], None, 32, 1.0, out)
        else:
            with torch.cuda.stream(stream):
                shrink(x, [a], None, 32, 1.0, out)
        assert torch.cuda.current_device() == 0
        torch.zeros(3, device="cuda").sum().item()
    except BaseException as error:
        failures.append(error)
for stream in (None, None, torch.cuda.Stream()):
    torch.cuda.synchronize()
    out.fill_(float("nan"))
    torch.cuda.synchronize()
    thread = threading.Thread(target=work, args=(stream,))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failures, failures
    assert not out.isnan().any()
"""


@pytest.mark.parametrize("program", [CAPTURE_FIRST, FRESH_THREAD], ids=["capture", "thread"])
def test_first_use(program):
    """The first call of a process may be captured, or come from a thread new to CUDA."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_prepare_leaves_nothing_to_compile():
    """After prepare no call of that shape loads a kernel."""
    ready = prepare(size=1288, rank=16, slices=5, dtype=torch.bfloat16, splits=16)
    assert ready > 0
    before = len(device._loaded)
    x, weights, _ = random_call(14, 600, 1288, 16, 5)
    for rows in (1, 3, 60, 600):
        mapping = torch.zeros(rows, dtype=torch.int32, device="cuda")
        run(x[:rows], weights, mapping, splits=16)
    assert len(device._loaded) == before


def test_the_kernel_has_its_name_in_a_profile():
    """A profiler shows a name that can be recognised."""
    x, weights, _ = random_call(15, 4, 512, 16, 1)
    run(x, weights)
    activity = torch.profiler.ProfilerActivity.CUDA
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        with torch.profiler.profile(activities=[activity]) as profile:
            run(x, weights)
            torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    if not names:
        pytest.skip("the profiler sees no kernels on this machine")
    kernel = describe_launch([4, 512], [[16, 512]], torch.bfloat16)["kernel"]
    assert any(kernel in name for name in names), names


def test_wrong_calls_are_refused():
    """Splits, dtypes and tensors that do not fit are refused before anything starts."""
    x, weights, _ = random_call(16, 4, 512, 16, 1)
    with pytest.raises(ReductionError, match="local takes 8, 16, 32, 64 splits; got 4"):
        run(x, weights, splits=4)
    with pytest.raises(ShrinkInputError, match="bfloat16 or float16"):
        run(x.float(), [weights[0].float()])
    with pytest.raises(ShrinkInputError, match="out must be"):
        shrink(x, weights, None, 32, 1.0, torch.empty(1, 4, 15, device="cuda"))
    with pytest.raises(LaunchError, match="could not compile"):
        run(x, weights, arrangement=Arrangement(1, 2, token_tiles=5))
