"""The recording kernel without a GPU: in Triton's interpreter against plain torch, and compiled for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

PROGRAM = """
import torch
from fliptrace.capture.vllm_engine.live.layout import LayerShape, RecordLayout, row_numbers
from fliptrace.capture.vllm_engine.live.ring import Ring
from fliptrace_kernels.vllm_plugin.record_rows import record

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
rows, start = 5, 7 + (3 << 32)
layout = RecordLayout(
    (LayerShape(576, 3, 16), LayerShape(64, 1, 8), LayerShape(1536, 2, 16), LayerShape(100, 1, 8)), torch.bfloat16
)
x = [torch.randn(rows, layer.size, generator=generator).bfloat16() for layer in layout.layers]
z = [torch.randn(layer.slices, rows, layer.rank, generator=generator) for layer in layout.layers]
x[0][1] = 0
z[1][0, 2, 3] = float("nan")
mapping = torch.tensor([0, 0, -1, 1, 0], dtype=torch.int32)
line = layout.operand_starts[-1] * 8


def ring():
    made = Ring(layout, torch.device("cpu"), 8, 6 * line)
    made.counter.fill_(start)
    made.operands.zero_()
    return made


plain = ring()
for number in range(len(x)):
    plain.record_layer(number, x[number], z[number], mapping)
for way in ("by layer", "at the end", "without operands", "one layer left out"):
    made = ring()
    kept = None if way == "without operands" else made.operands
    shared = (made.rows, kept, made.counter, made.table, mapping)
    if way == "by layer":
        for number in range(len(x)):
            record(*shared, rows=rows, tag=made.tag, layer=number, x=x[number], z=z[number])
    else:
        places = torch.tensor([[a.data_ptr(), b.data_ptr()] for a, b in zip(x, z)])
        if way == "one layer left out":
            places[2] = 0
        record(*shared, rows=rows, tag=made.tag, addresses=places)
    expected, operands = plain.rows.clone(), plain.operands.clone()
    if way == "one layer left out":
        expected[:, layout.starts[2] : layout.starts[3]] = 0
        operands[:, layout.operand_starts[2] : layout.operand_starts[3]] = 0
    if way == "without operands":
        operands.zero_()
    assert torch.equal(made.rows, expected), way
    assert torch.equal(made.operands, operands), way
found = plain.rows[[number % 8 for number in range(start, start + rows)]]
assert row_numbers(found).tolist() == list(range(start, start + rows))
print("equal")
"""


def test_the_kernel_writes_what_plain_torch_writes():
    """Header, digests, FP32 bits and operands of a forward that wraps round both rings, each way, bit by bit."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("keeps_operands", [True, False])
def test_it_compiles_for_gpus(direct, keeps_operands):
    """To PTX for three generations; what it stores is in the code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fliptrace_kernels.vllm_plugin.record_rows import LAYER_COLUMNS, record_kernel

    constants = {
        "DIRECT": direct,
        "OPERANDS": keeps_operands,
        "BLOCK": 256,
        "BLOCK_Z": 64,
        "LAYER_COLUMNS": LAYER_COLUMNS,
    }
    types = dict.fromkeys(("counter", "layers", "addresses"), "*i64")
    types |= {"ring": "*i32", "mapping": "*i32", "operands": "*i64" if keeps_operands else "*i32"}
    types |= dict.fromkeys(("x_address", "z_address"), "i64" if direct else "i32")
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in record_kernel.arg_names
    }
    for capability in (80, 90, 100):
        compiled = triton.compile(
            ASTSource(record_kernel, signature, constants),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": 2},
        )
        stores = compiled.asm["ptx"].count("st.global")
        assert stores >= (14 if keeps_operands else 10)
