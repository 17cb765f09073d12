"""The CUDA source of local:S, run on the CPU one fiber per thread (`local_on_host.h`)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fliptrace_kernels import ShrinkInputError
from fliptrace_kernels.local import Arrangement, compilation, device
from fliptrace_kernels.local.arrangements import CANDIDATES
from fliptrace_kernels.local.calls import launches

COMPILER = shutil.which("g++")
HEADER = Path(__file__).with_name("local_on_host.h")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def bits(tensor):
    return tensor.view(torch.int32)


class Host:
    """Compiles variants with g++ and runs their launches."""

    def __init__(self, folder):
        self.folder = folder
        self.source = folder / "source.cu"
        self.source.write_text(compilation.source())
        self.libraries = {}

    def library(self, variant):
        if variant not in self.libraries:
            target = self.folder / f"{len(self.libraries)}.so"
            constants = dict(variant.constants)
            del constants["KERNEL"]
            subprocess.run(
                [
                    COMPILER,
                    *"-std=c++17 -O1 -shared -fPIC -ffp-contract=off -Wno-unknown-pragmas".split(),
                    f'-DSOURCE="{self.source}"',
                    *(f"-D{name}={value}" for name, value in constants.items()),
                    *["-x", "c++", str(HEADER), "-o", str(target)],
                ],
                check=True,
            )
            self.libraries[variant] = ctypes.CDLL(str(target))
        return self.libraries[variant]

    def run(
        self,
        x,
        weights,
        mapping=None,
        splits=8,
        scale=0.7,
        arrangement=None,
        out=None,
        partials=None,
        kind=compilation.WITHOUT_PARTIALS,
        backwards=False,
        counter=None,
    ):
        if out is None:
            out = torch.full((len(weights), x.shape[0], weights[0].shape[-2]), float("nan"))
        buffer = ctypes.create_string_buffer(device.LAYOUT.size)
        ranges = [x, *weights]
        addresses = []
        for i in range(8):
            tensor = ranges[min(i, len(ranges) - 1)]
            storage = tensor.untyped_storage()
            addresses += [storage.data_ptr(), storage.data_ptr() + storage.nbytes()]
        ranges = (ctypes.c_uint64 * 16)(*addresses)
        for kernel, grid, arguments in launches(
            x, weights, mapping, splits, scale, out, partials, arrangement, counter, kind
        ):
            device.LAYOUT.pack_into(buffer, 0, *arguments)
            variant = kernel.variant
            shared = variant.arrangement.shared_bytes(splits)
            failure = self.library(variant).run_on_host(
                buffer, ranges, *grid, shared, int(backwards)
            )
            assert failure == 0, "shared memory was written beyond what was asked for"
        return out


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return Host(tmp_path_factory.mktemp("local"))


def whole_numbers(rows, size, rank, slices, adapters=0):
    """Make inputs whose every sum is exact in FP32, so that any order gives the same bits."""
    x = torch.randint(-8, 9, (rows, size)).bfloat16()
    shape = (adapters, rank, size) if adapters else (rank, size)
    return x, [torch.randint(-8, 9, shape).bfloat16() for _ in range(slices)]


def exact(x, weights, mapping=None):
    stacked = [a if a.ndim == 3 else a[None] for a in weights]
    out = torch.zeros(len(weights), x.shape[0], weights[0].shape[-2])
    for index, a in enumerate(stacked):
        for row in range(x.shape[0]):
            adapter = 0 if mapping is None else int(mapping[row])
            if adapter >= a.shape[0]:
                out[index, row] = float("nan")
            elif adapter >= 0:
                out[index, row] = (a[adapter].double() @ x[row].double()).float()
    return out


SMALL = [a for a in CANDIDATES if a.fits(8)]


@pytest.mark.parametrize("arrangement", SMALL, ids=str)
def test_every_arrangement_sums_everything_once(host, arrangement):
    """Exact sums over two rounds and a tail, rows and ranks that fill no tile, two slices."""
    x, weights = whole_numbers(arrangement.tokens + 3, 8 * 32 + 72, 5, 2)
    out = host.run(x, weights, scale=1.0, arrangement=arrangement)
    assert torch.equal(bits(out), bits(exact(x, weights)))


TURNING = [a for a in CANDIDATES if a.turns > 1]


@pytest.mark.parametrize("arrangement", TURNING, ids=str)
def test_warps_that_go_over_k_several_times(host, arrangement):
    """Several turns give the bits and the partials of one, with a tail and rows that fill no tile."""
    x = torch.randn(arrangement.tokens + 3, 16 * 32 + 72).bfloat16()
    weights = [torch.randn(5, x.shape[1]).bfloat16() for _ in range(2)]
    seen = []
    for layout in (arrangement, Arrangement(4, 2)):
        partials = torch.full((16, 2, x.shape[0], 5), float("nan"))
        call = {"splits": 16, "arrangement": layout, "partials": partials}
        seen.append((host.run(x, weights, **call, kind=compilation.WITH_PARTIALS), partials))
    (out, partials), (expected, expected_partials) = seen
    assert torch.equal(bits(out), bits(expected))
    assert torch.equal(bits(partials), bits(expected_partials))
    assert torch.equal(bits(out), bits(in_order(partials, 0.7)))


@pytest.mark.parametrize("adapters", [1, 3])
def test_tiles_of_64_tokens_with_a_mapping(host, adapters):
    """Adapters of the second 32 tokens of a tile are found, even if nobody before uses them."""
    x, weights = whole_numbers(70, 300, 5, 1, adapters=adapters)
    mapping = torch.randint(-1, 1, (70,), dtype=torch.int32)
    mapping[40:60] = torch.randint(-1, adapters + 1, (20,), dtype=torch.int32)
    mapping[50] = adapters - 1
    layout = Arrangement(1, 2, token_warps=2, token_tiles=2, turns=2)
    assert layout.tokens == 64
    for backwards in (False, True):
        out = host.run(x, weights, mapping, scale=1.0, arrangement=layout, backwards=backwards)
        assert torch.equal(bits(out), bits(exact(x, weights, mapping)))


def in_order(partials, scale):
    """Add partials [S, ...] as local does."""
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


FAMILIES = [
    Arrangement(8, 1),
    Arrangement(8, 2, rank_tiles=2, depth=1),
    Arrangement(4, 2),
    Arrangement(2, 1, rank_warps=2),
    Arrangement(1, 2, token_tiles=2, rank_tiles=3),
]


@pytest.mark.parametrize("splits", [8, 16, 32])
def test_arrangements_agree_in_every_bit_and_with_their_partials(host, splits):
    """Totals and partials are bit-equal across arrangements; totals are the sums in order."""
    x = torch.randn(9, 1000).bfloat16()
    weights = [torch.randn(6, 1000).bfloat16() for _ in range(3)]
    seen = None
    for arrangement in FAMILIES if splits == 8 else FAMILIES[::2]:
        if not arrangement.fits(splits):
            continue
        partials = torch.full((splits, 3, 9, 6), float("nan"))
        out = host.run(
            x,
            weights,
            splits=splits,
            arrangement=arrangement,
            partials=partials,
            kind=compilation.WITH_PARTIALS,
        )
        assert torch.equal(bits(out), bits(in_order(partials, 0.7)))
        if seen is not None:
            assert torch.equal(bits(out), bits(seen[0]))
            assert torch.equal(bits(partials), bits(seen[1]))
        seen = out, partials
    exact_out = exact(x, weights) * 0.7
    size = torch.stack([x.float().abs() @ a.float().abs().T for a in weights])
    assert ((seen[0] - exact_out).abs() <= 1e-5 * size).all()


def test_partials_are_those_of_round_robin_blocks(host):
    """Split p sums blocks p, p + S, ... and nothing else."""
    x, weights = whole_numbers(3, 700, 5, 1)
    partials = torch.full((8, 1, 3, 5), float("nan"))
    host.run(
        x,
        weights,
        arrangement=Arrangement(4, 1),
        partials=partials,
        kind=compilation.PARTIALS_ONLY,
    )
    owner = torch.arange(700) // 32 % 8
    for split in range(8):
        k = owner == split
        expected = x[:, k].float() @ weights[0][:, k].float().T
        assert torch.equal(partials[split, 0], expected)


@pytest.mark.parametrize("arrangement", [Arrangement(8, 1), Arrangement(2, 2)], ids=str)
def test_one_adapter_with_a_mapping(host, arrangement):
    """Rows without an adapter are zeroed, an adapter that does not exist gives NaN."""
    x, weights = whole_numbers(11, 264, 3, 1)
    mapping = torch.tensor([0, -1, 0, 1, 0, -5, 0, 0, 0, 0, -1], dtype=torch.int32)
    out = host.run(x, weights, mapping, scale=1.0, arrangement=arrangement)
    assert torch.equal(bits(out), bits(exact(x, weights, mapping)))


def test_a_tile_without_adapters_is_filled(host):
    """A block none of whose rows has an adapter writes zeros and NaN and reads no weight."""
    x, weights = whole_numbers(40, 256, 8, 1)
    mapping = torch.full((40,), -1, dtype=torch.int32)
    mapping[20] = 7
    mapping[39] = 0
    out = host.run(x, weights, mapping, scale=1.0, arrangement=Arrangement(1, 2))
    assert torch.equal(bits(out), bits(exact(x, weights, mapping)))


@pytest.mark.parametrize(
    "arrangement", [Arrangement(8, 2), Arrangement(4, 2), Arrangement(1, 2)], ids=str
)
def test_many_adapters(host, arrangement):
    """Each row meets its own adapter, whatever its neighbours use; strays are as promised."""
    x, weights = whole_numbers(21, 264, 5, 2, adapters=6)
    mapping = torch.randint(-1, 7, (21,), dtype=torch.int32)
    out = host.run(x, weights, mapping, scale=1.0, arrangement=arrangement)
    assert torch.equal(bits(out), bits(exact(x, weights, mapping)))


@pytest.mark.parametrize("arrangement", [Arrangement(4, 2), Arrangement(1, 2)], ids=str)
def test_neighbours_that_are_nan_do_not_spread(host, arrangement):
    """NaN and Inf in other rows, other ranks and beyond K change no bit."""
    size, rank = 300, 9
    x = torch.randn(7, size).bfloat16()
    weights = [torch.randn(rank, size).bfloat16()]
    clean = host.run(x, weights, arrangement=arrangement)
    wide_x = torch.full((7, size + 212), float("nan"), dtype=torch.bfloat16)
    wide_x[:, :size] = x
    wide_a = torch.full((rank, size + 20), float("inf"), dtype=torch.bfloat16)
    wide_a[:, :size] = weights[0]
    wide_x[2] = float("nan")
    wide_x[5, 3] = float("inf")
    wide_a[4] = float("nan")
    dirty = host.run(wide_x[:, :size], [wide_a[:, :size]], arrangement=arrangement)
    rows = [0, 1, 3, 4, 6]
    ranks = [i for i in range(rank) if i != 4]
    kept = bits(dirty)[:, rows][:, :, ranks]
    assert torch.equal(kept, bits(clean)[:, rows][:, :, ranks])
    assert dirty[:, 2].isnan().all()


@pytest.mark.parametrize("size", [31, 263, 264])
def test_loads_one_by_one_give_the_bits_of_wide_loads(host, size):
    """An x that is not aligned, or an odd K, takes another path to the same bits."""
    x = torch.randn(3, size).bfloat16()
    weights = [torch.randn(4, size).bfloat16()]
    arrangement = Arrangement(4, 1)
    aligned = torch.zeros(3, 272, dtype=torch.bfloat16)
    aligned[:, :size] = x
    aligned_a = torch.zeros(4, 272, dtype=torch.bfloat16)
    aligned_a[:, :size] = weights[0]
    shifted = torch.full((3, size + 6), float("nan"), dtype=torch.bfloat16)
    shifted[:, 3 : 3 + size] = x
    variants = [kernel.variant for kernel, _, _ in launches(shifted[:, 3 : 3 + size], weights, None, 8, 0.7,
                torch.empty(1, 3, 4), arrangement=arrangement)]  # fmt: skip
    assert not variants[0].vector
    first = host.run(shifted[:, 3 : 3 + size], weights, arrangement=arrangement)
    second = host.run(aligned, [aligned_a], arrangement=arrangement)
    assert torch.equal(bits(first), bits(second))


def test_weights_that_reuse_memory_are_told_apart(host):
    """The same address with another shape, other strides or other contents is another call."""
    x, (memory,) = whole_numbers(3, 64, 8, 1)
    views = [memory, memory[:4], memory[::2], memory[:4], memory.view(2, 4, 64)]
    layout = Arrangement(4, 2)
    mapping = torch.tensor([1, 0, 1], dtype=torch.int32)
    for _ in range(2):
        for view in views:
            mapped = mapping if view.ndim == 3 else None
            out = host.run(x, [view], mapped, scale=1.0, arrangement=layout)
            assert torch.equal(bits(out), bits(exact(x, [view], mapped)))
        memory.neg_()
    with pytest.raises(ShrinkInputError, match="a mapping must say"):
        host.run(x, [views[-1]], arrangement=layout)


def test_strided_outputs_five_slices_and_the_counter(host):
    """Five slices make two launches; outputs land where their strides say and nowhere else."""
    x, weights = whole_numbers(5, 96, 3, 5)
    memory = torch.full((3, 5, 6, 7), 99.0)
    out = memory[:, :, 1:6, 2].permute(1, 2, 0)  # [5 slices, 5 rows, 3 ranks]
    counter = torch.zeros(1, dtype=torch.int64)
    host.run(x, weights, scale=1.0, arrangement=Arrangement(4, 2), out=out, counter=counter)
    assert torch.equal(out, exact(x, weights))
    out.fill_(99.0)
    assert (memory == 99.0).all()
    assert counter.item() == 2


def test_the_order_in_which_threads_run_does_not_matter(host):
    """Started from the last thread, a block gives the same bits: no barrier is missing."""
    x, weights = whole_numbers(21, 264, 5, 2, adapters=6)
    mapping = torch.randint(-1, 7, (21,), dtype=torch.int32)
    for arrangement in (Arrangement(4, 2), Arrangement(1, 2)):
        out = host.run(x, weights, mapping, scale=1.0, arrangement=arrangement, backwards=True)
        assert torch.equal(bits(out), bits(exact(x, weights, mapping)))


def test_a_loop_that_is_not_unrolled(host):
    """A long K rolls the loop up; every depth gives the same exact sums."""
    x, weights = whole_numbers(2, 8 * 32 * 30 + 40, 9, 1)
    layout = Arrangement(1, 2, token_tiles=2, rank_tiles=1)
    assert not layout.is_unrolled(x.shape[1], 8)
    layouts = [replace(layout, depth=depth) for depth in (1, 2, 8)]
    for tried in (*layouts, replace(layout, depth=4, turns=2)):
        out = host.run(x, weights, scale=1.0, arrangement=tried)
        assert torch.equal(bits(out), bits(exact(x, weights)))
