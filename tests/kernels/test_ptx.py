"""What the compiler makes of the kernels, for GPUs that need not be here.

The order of stores, barriers, ticket and reads is what makes the hand-over right, and no test that
runs it can show that it is there. The matrix instruction is what makes a row's bits independent of
the rest.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fliptrace_kernels.configurations import launch_for
from fliptrace_kernels.triton_hand_over import lora_shrink_deterministic
from fliptrace_kernels.triton_kernels import lora_shrink_atomic, lora_shrink_unsplit
from fliptrace_kernels.triton_two_launches import lora_shrink_add_partials, lora_shrink_partials

CAPABILITIES = [80, 90, 100]
TYPES = {
    "out_ptr": "*fp32",
    "scratch_ptr": "*fp32",
    "counter_ptr": "*i32",
    "mapping_ptr": "*i32",
    "launches_ptr": "*i64",
    "delays_ptr": "*i32",
    "scale": "fp32",
}
ALIGNED = ("K", "R", "out_row_stride", "x_stride", "a_adapter_stride", "a_rank_stride")
TICKET = "atom.global.gpu.acq_rel.add.u32"


def ptx(kernel, capability, kind="deterministic", rank=16, block_k=128, dtype="bf16", **changes):
    """Compile as `triton_shrink` does for tensors whose strides are multiples of 16."""
    launch = launch_for(
        kind=kind, rank=rank, block_k=block_k, element_bytes=4 if dtype == "fp32" else 2
    )
    constants = {
        "out_rank_stride": 1,
        "HAS_MAPPING": False,
        "OUT_ALIGNED": True,
        "ONE_ADAPTER": True,
        "COUNT_LAUNCHES": False,
        "EVEN_K": True,
        "SPLITS": 1 if kind == "unsplit" else 8,
        "SLICES": 3,
        "TILES_N": -(-rank // launch.block_n),
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "BLOCK_K": block_k,
        "X_EVICTION": launch.x_eviction,
        "A_EVICTION": launch.a_eviction,
        "TREE": True,
    }
    constants |= changes
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {
        name: "constexpr"
        if name in constants
        else TYPES.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    divisible = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name not in constants and (name.endswith("_ptr") or name in ALIGNED)
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, divisible),
        target=GPUTarget("cuda", capability, 32),
        options={
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            "enable_fp_fusion": False,
        },
    )
    return compiled.asm["ptx"]


def events(text):
    """Stores to and reads past the cache from global memory, barriers and atomics, in order."""
    return re.findall(
        r"st\.global|bar\.sync|barrier\.cta\.sync|atom\.global[.\w]*|red\.global[.\w]*"
        r"|ld\.global\.cg",
        text,
    )


def assert_hand_over(found):
    """Partials, barrier, ticket, barrier, reads, output: in this order."""
    assert found.count(TICKET) == 1
    ticket = found.index(TICKET)
    before, after = found[:ticket], found[ticket + 1 :]
    assert before.count("st.global") >= 1
    assert before[-1] == "bar.sync"
    assert before[-2] == "st.global"
    assert "ld.global.cg" not in before
    assert after[0] == "bar.sync"
    reads = [place for place, event in enumerate(after) if event == "ld.global.cg"]
    assert len(reads) >= 8
    assert "st.global" not in after[: reads[-1]]
    assert after[-1] == "st.global"


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"HAS_MAPPING": True},
        {"HAS_MAPPING": True, "ONE_ADAPTER": False, "block_k": 256, "EVEN_K": False},
        {"rank": 64, "block_k": 32, "dtype": "fp16", "SPLITS": 16, "SLICES": 1},
        {"rank": 20, "dtype": "fp32", "OUT_ALIGNED": False, "COUNT_LAUNCHES": True},
    ],
    ids=str,
)
def test_hand_over(capability, changes):
    """Between the last partial's store and the ticket, and between ticket and reads, is a barrier."""
    found = events(ptx(lora_shrink_deterministic, capability, **changes))
    counted = [event for event in found if event != "red.global.gpu.relaxed.add.u64"]
    counted = [event for event in counted if event != "atom.global.gpu.relaxed.add.u64"]
    assert (counted != found) == changes.get("COUNT_LAUNCHES", False)
    assert_hand_over(counted)


def test_the_hand_over_check_finds_planted_faults():
    """The check above fails without either barrier, and with a ticket that is not acq_rel."""
    good = ["st.global", "bar.sync", TICKET, "bar.sync", *["ld.global.cg"] * 8, "st.global"]
    assert_hand_over(good)
    relaxed = [event.replace("acq_rel", "relaxed") for event in good]
    for bad in ([*good[:1], *good[2:]], [*good[:3], *good[4:]], relaxed, good[1:]):
        with pytest.raises((AssertionError, IndexError)):
            assert_hand_over(bad)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_reads_are_not_spread_over_the_sum(capability):
    """Each of 8 partials of a 16 × 16 tile is read by one 8-byte load, and nothing else is read."""
    text = ptx(lora_shrink_deterministic, capability)
    assert len(re.findall(r"ld\.global\.cg\.v2\.b32", text)) == 8
    assert len(re.findall(r"ld\.global", text)) == 8


SUMS = {
    "unsplit": (lora_shrink_unsplit, {"block_k": 64}),
    "deterministic": (lora_shrink_deterministic, {"block_k": 32}),
    "deterministic, large block": (lora_shrink_deterministic, {"block_k": 256, "rank": 64}),
    "tree": (lora_shrink_partials, {"block_k": 32, "rank": 32}),
    "atomic": (lora_shrink_atomic, {"kind": "atomic", "block_k": 256}),
}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_one_matrix_instruction(name, capability, dtype):
    """Every 16-bit kernel multiplies by one instruction, the same for all ranks and K blocks."""
    kernel, changes = SUMS[name]
    changes = {"kind": name.partition(",")[0]} | changes
    text = ptx(kernel, capability, dtype=dtype, HAS_MAPPING=True, **changes)
    found = set(re.findall(r"(?:mma|wgmma|tcgen05)[.\w]*", text))
    operand = {"bf16": "bf16", "fp16": "f16"}[dtype]
    assert found == {f"mma.sync.aligned.m16n8k16.row.col.f32.{operand}.{operand}.f32"}
    assert "fma.rn.f32" not in text


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("tree", [True, False])
def test_second_launch_adds_without_contraction(capability, tree):
    """The sum of partials and its scale stay two roundings, also where the scale could be fused."""
    text = ptx(lora_shrink_add_partials, capability, TREE=tree, HAS_MAPPING=True)
    assert "fma" not in text
    assert re.search(r"mul\.(rn\.)?f32", text)
    hand_over = ptx(lora_shrink_deterministic, capability)
    assert "fma" not in hand_over.replace("mma.sync", "")


@pytest.fixture(scope="module")
def mutants(load_neighbour, repository_root):
    return load_neighbour(repository_root / "examples" / "measure" / "shrink_mutants.py")


def instructions(text):
    """The body of a kernel without comments, debug information and its own name."""
    body = text[text.index("{\n", text.index(".entry")) :]
    body = body[: body.index("\n}")]
    body = re.sub(r"\s*//.*|^\s*\.loc.*$|^\$L__(?:tmp|func)\w+:$", "", body, flags=re.MULTILINE)
    return re.sub(r"\w+_param_", "param_", body)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_mutants_break_one_thing_each(mutants, capability):
    """The faithful copy is the real kernel, instruction by instruction; each mutant lacks its part."""
    real = instructions(ptx(lora_shrink_deterministic, capability))
    texts = {
        name: ptx(mutants.lora_shrink_mutant, capability, DELAYED_WARPS=0, **constants)
        for name, constants in mutants.MUTANTS.items()
    }
    found = {name: events(text) for name, text in texts.items()}
    good = found["faithful"]
    assert instructions(texts["faithful"]) == real
    before = found["no barrier"][: found["no barrier"].index(TICKET)]
    assert before[-1] == "st.global"
    relaxed = TICKET.replace("acq_rel", "relaxed")
    assert found["relaxed ticket"] == [relaxed if event == TICKET else event for event in good]
    assert found["no reset"] == good[:-1]
    for name in ("no barrier", "relaxed ticket"):
        with pytest.raises(AssertionError):
            assert_hand_over(found[name])


def test_delays_come_right_before_the_partial(mutants):
    """A late partial waits and stores in one piece, with no barrier between wait and ticket."""
    constants = mutants.MUTANTS["no barrier"] | {"DELAYED_WARPS": 4}
    text = ptx(mutants.lora_shrink_mutant, 90, **constants)
    last_wait = text.rindex("@again bra wait")
    assert "bar.sync" not in text[text.index("%globaltimer") : text.index(TICKET)]
    assert last_wait < text.index(TICKET)
