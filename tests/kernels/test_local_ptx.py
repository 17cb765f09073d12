"""What NVRTC makes of local:S for three generations of GPUs; needs NVRTC, no GPU."""

from __future__ import annotations

import importlib.util
import os
import re

import pytest

from fliptrace_kernels import LaunchError
from fliptrace_kernels.local import Arrangement, compilation
from fliptrace_kernels.local.arrangements import ROW_STEPS, choices, choose
from fliptrace_kernels.local.compilation import Variant, compile_cubin, compile_for, compile_ptx


def has_nvrtc():
    if importlib.util.find_spec("cuda") is None:
        return False
    try:
        compilation.nvrtc_version()
    except LaunchError:
        return False
    return True


@pytest.fixture(autouse=True)
def nvrtc():
    if not has_nvrtc():
        if os.environ.get("CI"):
            pytest.fail("NVRTC is missing; pip install cuda-bindings nvidia-cuda-nvrtc")
        pytest.skip("needs cuda-bindings and nvidia-cuda-nvrtc")


ARCHITECTURES = ["80", "90", "100"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("element", ["bf16", "f16"])
@pytest.mark.parametrize("diagonal", [1, 2, 4, 8])
def test_the_instructions_are_the_specified_ones(architecture, element, diagonal):
    """One matrix instruction, rounded additions that nothing can contract, one barrier."""
    variant = Variant(3072, 16, 32, Arrangement(diagonal, 2), element)
    ptx = compile_ptx(variant, f"compute_{architecture}").image.decode()
    assert f".entry {variant.kernel}(" in ptx
    products = re.findall(r"mma\.sync\S+", ptx)
    assert set(products) == {f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32"}
    assert len(products) == 2 * variant.arrangement.steps(3072, 32)
    floating = set(re.findall(r"\b(?:add|sub|mul|fma|mad|div)(?:\.\w+)*\.f32\b", ptx))
    assert floating == {"add.rn.f32", "mul.rn.f32"}
    assert ptx.count("bar.sync") == 1
    stored = [line for line in ptx.splitlines() if "st.shared" in line]
    assert stored, "the partials go through shared memory"
    assert ptx.index("st.shared") < ptx.index("bar.sync") < ptx.index("ld.shared")
    assert re.search(r"\b(?:atom|red)[.\w:]*\.add", ptx), "the launch counter"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_and_inputs_are_read_sixteen_bytes_at_a_time(architecture):
    """Every operand comes by one wide load through the read-only path."""
    variant = Variant(3072, 16, 32, Arrangement(8, 1))
    ptx = compile_ptx(variant, f"compute_{architecture}").image.decode()
    loads = re.findall(r"ld\.global\S+", ptx)
    assert len([load for load in loads if ".v4.u32" in load]) == 2 * 3
    assert not [load for load in loads if ".u16" in load]


def spilled(log):
    return [int(amount) for amount in re.findall(r"(\d+) bytes spill", log)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("size", "slices"), [(3072, 3), (8192, 1), (576, 3)])
def test_chosen_kernels_do_not_spill(architecture, size, slices):
    """Whatever the table chooses for the default number of splits fits the registers."""
    for arrangement in choices(size=size, rank=16, slices=slices, splits=32):
        log = compile_cubin(Variant(size, 16, 32, arrangement), f"sm_{architecture}").log
        assert spilled(log) == [0, 0], (arrangement, log)


def test_a_kernel_that_spills_is_noticed():
    """The check above can fail: three blocks per multiprocessor leave too few registers."""
    layout = Arrangement(1, 2, token_tiles=2, rank_tiles=2, depth=4, min_blocks=4)
    log = compile_cubin(Variant(3072, 16, 32, layout), "sm_90").log
    assert max(spilled(log)) > 0


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("partials", [0, 1, 2])
@pytest.mark.parametrize("vector", [True, False])
def test_every_kind_of_kernel_compiles_without_a_warning(mode, partials, vector):
    """All constants combine, for diagonal and plain layouts."""
    for diagonal in (1, 8):
        variant = Variant(
            1000, 20, 16, Arrangement(diagonal, 2), "bf16", mode, vector, partials
        )  # fmt: skip
        assert "warning" not in compile_ptx(variant, "compute_90").log


def test_old_gpus_and_impossible_layouts_are_refused():
    """The error names the capability needed, or holds the compiler's log."""
    variant = Variant(3072, 16, 32, Arrangement(8, 1))
    with pytest.raises(LaunchError, match=r"compute capability 8\.0 or higher.*has 7\.5"):
        compile_for(variant, (7, 5))
    too_wide = Variant(3072, 16, 32, Arrangement(1, 2, token_tiles=5))
    with pytest.raises(LaunchError, match="an arrangement that does not exist"):
        compile_for(too_wide, (9, 0))


def test_a_newer_gpu_gets_ptx():
    """A GPU that this NVRTC does not know is given PTX of the newest one below it."""
    compiled = compile_for(Variant(576, 16, 8, Arrangement(8, 1)), (99, 0))
    assert compiled.target.startswith("compute_")
    assert compiled.image.lstrip().startswith(b"//")
    assert compile_for(Variant(576, 16, 8, Arrangement(8, 1)), (9, 0)).target == "sm_90"


def test_the_choice_is_a_function_of_the_shape():
    """Every number of rows gets a layout that fits; choices lists them all."""
    for splits in (8, 16, 32, 64):
        listed = choices(size=3072, rank=16, slices=3, splits=splits)
        for rows in (1, 3, 100, 5000, 10**6, *ROW_STEPS):
            chosen = choose(rows=rows, size=3072, rank=16, slices=3, splits=splits)
            assert chosen in listed
            assert chosen.fits(splits)
