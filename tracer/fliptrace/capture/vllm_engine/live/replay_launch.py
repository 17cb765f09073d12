"""Replays one LoRA shrink launch that gave two outputs for one input inside vLLM: needs torch and vllm, no model.

Beside it: case.json (what ran, both observed outputs), operands.bin (x, then A per slice), fliptrace_kernels (a copy).
Exit code 0: both observed values came again.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from fliptrace_kernels import lora_shrink  # noqa: E402

case = json.loads((HERE / "case.json").read_text("utf-8"))
device = "cuda" if torch.cuda.is_available() else "cpu"
data = torch.frombuffer(
    bytearray((HERE / "operands.bin").read_bytes()), dtype=getattr(torch, case["dtype"])
).to(device)
rows, rank, slices = case["rows"], case["rank"], case["slices"]
kept, *weights = data.view(-1, case["k"]).split([len(case["kept_rows"]), *[rank] * slices])
x = data.new_zeros(rows, case["k"])
x[case["kept_rows"]] = kept  # other rows stay zero
weights = [weight.contiguous() for weight in weights]


def vllm_shrink() -> torch.Tensor:
    """One launch of vLLM's own shrink, in the configuration that it chooses by itself: [R] of the root's row."""
    if device == "cpu":
        from vllm.lora.ops.torch_ops import sgmv_shrink

        out = torch.zeros(rows, rank)
        one = torch.tensor([rows])
        places = torch.tensor([0]), one, torch.tensor([0]), 1, rows, rows
        sgmv_shrink(x, weights[case["part"]][None, None], out, *places, 1.0)
        return out[case["row"]]
    import vllm.lora.ops.triton_ops.lora_shrink_op  # noqa: F401 (registers the operation)

    out = torch.empty(slices, rows, rank, device=device)
    index, lists = torch.arange(rows), ([rows, 0], [0, rows, rows], [0, -1])
    tensors = [torch.as_tensor(v).to(device, torch.int32) for v in (index * 0, index, *lists)]
    flags = torch.tensor([False]), torch.tensor([1], dtype=torch.int32)
    stacked = [weight[None, None] for weight in weights]
    torch.ops.vllm.lora_shrink(x, stacked, out, *tensors, *flags, 1.0)
    return out[case["part"], case["row"]]


def fliptrace_shrink(reduction: str) -> torch.Tensor:
    """One launch of a reduction of fliptrace's kernels: [R] of the root's row."""
    return lora_shrink(x, weights, reduction=reduction)[case["part"], case["row"]]


def bits(row: torch.Tensor) -> tuple[str, ...]:
    """A row as hexadecimal bits."""
    values = row.contiguous().view(torch.int32).cpu().tolist()
    return tuple(f"0x{value & 0xFFFFFFFF:08x}" for value in values)


count = 2000 if device == "cuda" else 20
observed = {who: tuple(row) for who, row in case["observed"].items()}
column = case["column"]
names = ["unsplit", "deterministic:8"]
recorded = case["reduction"]
if recorded == "vllm-own" and importlib.util.find_spec("vllm") is None:
    sys.exit("this launch was vLLM's own shrink: install vllm to replay it")
runs = {
    recorded: [
        bits(vllm_shrink()) if recorded == "vllm-own" else bits(fliptrace_shrink(recorded))
        for _ in range(count)
    ]
}
runs |= {
    name: [bits(fliptrace_shrink(name)) for _ in range(count)] for name in names if name != recorded
}
print(f"{case['what']}\nOn {device}, {count} launches each; at rank index {column}:")
came = {}
for name, outputs in runs.items():
    values = Counter(row[column] for row in outputs)
    came[name] = {who: values[row[column]] for who, row in observed.items()}
    times = ", ".join(f"the {who}'s {observed[who][column]} {n}×" for who, n in came[name].items())
    print(f"  {name}: {len(set(outputs))} different rows, {len(values)} different values; {times}")
shown = all(came[recorded].values())
print("Both observed values came again." if shown else "They did not both come again.")
sys.exit(0 if shown else 1)
