"""Compile `source.cu` for one set of constants with NVRTC. Needs no GPU and no driver."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any, Final

from fliptrace_kernels.errors import LaunchError
from fliptrace_kernels.local.arrangements import Arrangement

NO_MAPPING: Final = 0
ONE_ADAPTER: Final = 1
MANY_ADAPTERS: Final = 2

WITHOUT_PARTIALS: Final = 0
WITH_PARTIALS: Final = 1
PARTIALS_ONLY: Final = 2

LOWEST_CAPABILITY: Final = (8, 0)  # the first with BF16 matrix instructions


@dataclass(frozen=True, slots=True)
class Variant:
    """Everything that is constant inside one compiled kernel.

    Attributes:
        size: K.
        rank: R.
        splits: S.
        arrangement: layout of a block.
        element: 'bf16' or 'f16'.
        adapters_mode: NO_MAPPING, ONE_ADAPTER or MANY_ADAPTERS.
        vector: whether x and A are read 16 bytes at a time.
        partials: WITHOUT_PARTIALS, WITH_PARTIALS or PARTIALS_ONLY.
    """

    size: int
    rank: int
    splits: int
    arrangement: Arrangement
    element: str = "bf16"
    adapters_mode: int = NO_MAPPING
    vector: bool = True
    partials: int = WITHOUT_PARTIALS

    @property
    def kernel(self) -> str:
        """Name of the kernel, as a profiler shows it."""
        kind = ("", "_with_partials", "_partials_only")[self.partials]
        return f"fliptrace_lora_shrink_local{kind}_s{self.splits}"

    @property
    def constants(self) -> dict[str, int | str]:
        """Constants of the source, by name."""
        arrangement = self.arrangement
        return {
            "KERNEL": self.kernel,
            "K": self.size,
            "RANK": self.rank,
            "SPLITS": self.splits,
            "DIAGONAL": arrangement.diagonal,
            "HALVES": arrangement.halves,
            "TOKEN_TILES": arrangement.token_tiles,
            "RANK_TILES": arrangement.rank_tiles,
            "TOKEN_WARPS": arrangement.token_warps,
            "RANK_WARPS": arrangement.rank_warps,
            "TURNS": arrangement.turns,
            "DEPTH": arrangement.depth_for(self.size, self.splits),
            "MIN_BLOCKS": arrangement.min_blocks,
            "VECTOR": int(self.vector),
            "ADAPTERS_MODE": self.adapters_mode,
            "PARTIALS": self.partials,
            "ELEMENT": f'"{self.element}"',
        }


@dataclass(frozen=True, slots=True)
class Compiled:
    """What NVRTC made of a variant.

    Attributes:
        image: machine code (cubin) or PTX, as `cuModuleLoadData` takes it.
        target: what it was compiled for, such as 'sm_90' or 'compute_90'.
        log: what the compiler and the assembler said.
    """

    image: bytes
    target: str
    log: str


def cuda_bindings(name: str) -> Any:
    """Return a module of cuda.bindings: `nvrtc` or `driver`.

    Raises:
        LaunchError: if the package is not installed.
    """
    try:
        return import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise LaunchError(
            "local reductions need the package cuda-bindings, which torch's CUDA builds bring "
            f"along; importing it failed: {error}. Run `pip install cuda-bindings`, or use "
            "deterministic:8"
        ) from error


def source() -> str:
    """Return the CUDA C++ source."""
    return files("fliptrace_kernels.local").joinpath("source.cu").read_text(encoding="utf-8")


@cache
def nvrtc_version() -> tuple[int, int]:
    """Return the version of NVRTC.

    Raises:
        LaunchError: if cuda.bindings or NVRTC is not installed.
    """
    nvrtc = _nvrtc()
    error, major, minor = nvrtc.nvrtcVersion()
    _require(error, "asking NVRTC for its version")
    return int(major), int(minor)


def compile_for(variant: Variant, capability: tuple[int, int]) -> Compiled:
    """Compile a variant for a GPU.

    Args:
        variant: what to compile.
        capability: compute capability of the GPU, such as (9, 0).

    Returns:
        Machine code if this NVRTC knows the GPU, else PTX of the newest one it knows below.

    Raises:
        LaunchError: if the GPU is too old, NVRTC is missing or the source does not compile.
    """
    if capability < LOWEST_CAPABILITY:
        raise LaunchError(
            "local reductions need a GPU of compute capability 8.0 or higher, for its BF16 matrix "
            f"instructions; this one has {capability[0]}.{capability[1]}. Use deterministic:8"
        )
    wanted = capability[0] * 10 + capability[1]
    error, supported = _nvrtc().nvrtcGetSupportedArchs()
    _require(error, "asking NVRTC for its targets")
    if wanted in supported:
        return _compile(variant, f"sm_{wanted}", "CUBIN")
    older = max((target for target in supported if target < wanted), default=0)
    if older < LOWEST_CAPABILITY[0] * 10:
        raise LaunchError(
            f"NVRTC {nvrtc_version()} must know a target up to compute capability "
            f"{capability[0]}.{capability[1]}; it knows {list(supported)}. Install another "
            "nvidia-cuda-nvrtc"
        )
    return _compile(variant, f"compute_{older}", "PTX")


def compile_ptx(variant: Variant, target: str) -> Compiled:
    """Compile a variant to PTX, for reading.

    Args:
        variant: what to compile.
        target: such as 'compute_90'.

    Raises:
        LaunchError: if NVRTC is missing or the source does not compile.
    """
    return _compile(variant, target, "PTX")


def compile_cubin(variant: Variant, target: str) -> Compiled:
    """Compile a variant to machine code; the log holds its registers and spills.

    Args:
        variant: what to compile.
        target: such as 'sm_90'.

    Raises:
        LaunchError: if NVRTC is missing or the source does not compile.
    """
    return _compile(variant, target, "CUBIN")


def _compile(variant: Variant, target: str, kind: str) -> Compiled:
    nvrtc = _nvrtc()
    nvrtc_version()  # says it first and well if the library is not there
    options = [
        f"--gpu-architecture={target}",
        "--std=c++17",
        "--fmad=false",
        *(f"-D{name}={value}" for name, value in variant.constants.items()),
    ]
    if kind == "CUBIN":
        options.append("--ptxas-options=-v")
    error, program = nvrtc.nvrtcCreateProgram(
        source().encode(), b"fliptrace_local.cu", 0, None, None
    )
    _require(error, "creating an NVRTC program")
    try:
        (failure,) = nvrtc.nvrtcCompileProgram(
            program, len(options), [option.encode() for option in options]
        )
        log = _text(program, "ProgramLog")
        if int(failure):
            raise LaunchError(
                f"NVRTC {nvrtc_version()} could not compile {variant} for {target}. Its log:\n{log}"
            )
        return Compiled(_bytes(program, kind), target, log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _bytes(program: Any, what: str) -> bytes:
    nvrtc = _nvrtc()
    error, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    _require(error, f"asking NVRTC for its {what}")
    content = bytes(size)  # NVRTC writes into it
    (error,) = getattr(nvrtc, f"nvrtcGet{what}")(program, content)
    _require(error, f"asking NVRTC for its {what}")
    return content


def _text(program: Any, what: str) -> str:
    return _bytes(program, what).decode(errors="replace").rstrip("\0")


def _require(error: Any, doing: str) -> None:
    if int(error):
        raise LaunchError(f"{doing} must succeed; NVRTC answered {error!r}")


@cache
def _nvrtc() -> Any:
    nvrtc = cuda_bindings("nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise LaunchError(
            "local reductions need NVRTC, which torch's CUDA builds bring along; loading it "
            f"failed: {error}. Run `pip install nvidia-cuda-nvrtc`, or use deterministic:8"
        ) from error
    return nvrtc
