"""Shows again that one LoRA shrink gave two outputs for one input: needs torch, and triton on CUDA, but no model.

Beside it: case.json (what ran, both observed outputs), operands.bin (x, then A), fliptrace_kernels (a copy of what
ran). Exit code 0: the difference showed again.
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
from fliptrace_kernels import ArrivalSchedule, lora_shrink  # noqa: E402

case = json.loads((HERE / "case.json").read_text("utf-8"))
device = "cuda" if torch.cuda.is_available() else "cpu"
data = torch.frombuffer(
    bytearray((HERE / "operands.bin").read_bytes()), dtype=getattr(torch, case["dtype"])
).to(device)
x, a = data.new_zeros(case["rows"], case["k"]), data.new_zeros(case["rank"], case["k"])
kept = data.view(-1, case["k"]).tensor_split([len(case["kept_rows"])])
x[case["kept_rows"]], a[case["kept_ranks"]] = kept  # the others stay zero and are not looked at


def shrink(reduction: str, seed: int) -> torch.Tensor:
    """One run, [T, R] FP32; on CUDA the hardware orders the atomics, on a CPU a schedule drawn from the seed."""
    schedule = ArrivalSchedule(seed) if device == "cpu" else None
    call = {"reduction": reduction, "schedule": schedule, "call_key": case["call_key"]}
    return lora_shrink(x, (a,), **call)[0]


def vllm_shrink() -> torch.Tensor:
    """One run of vLLM's own kernel, in the configuration that it chooses by itself."""
    import vllm.lora.ops.triton_ops.lora_shrink_op  # noqa: F401 (registers the operation)

    rows, out = len(x), torch.empty(1, len(x), len(a), device=device)
    index, lists = torch.arange(rows), ([rows, 0], [0, rows, rows], [0, -1])
    tensors = [torch.as_tensor(v).to(device, torch.int32) for v in (index * 0, index, *lists)]
    flags = torch.tensor([False]), torch.tensor([1], dtype=torch.int32)
    torch.ops.vllm.lora_shrink(x, [a[None, None]], out, *tensors, *flags, 1.0)
    return out[0]


def bits(z: torch.Tensor) -> tuple[str, ...]:
    """The outputs of the row whose operand is at hand, as hexadecimal bits."""
    row = z[case["row"], case["kept_ranks"]].cpu().view(torch.int32)
    return tuple(f"0x{value & 0xFFFFFFFF:08x}" for value in row.tolist())


observed = {who: tuple(row) for who, row in case["observed"].items()}
seeds = list(range(2000 if device == "cuda" else 200))
if device == "cpu" and case["seeds"]:  # recorded on a CPU: the same schedules, the same call
    seeds = case["seeds"]
has_vllm = device == "cuda" and importlib.util.find_spec("vllm") is not None
if case["reduction"] != "vllm-own":
    recorded = case["reduction"]
elif has_vllm:
    recorded = "vLLM's own"
else:  # its blocks and splits, by the kernel beside this script
    recorded = "atomic:vllm"
    print("Recorded under vLLM's own kernel, which cannot run here: atomic:vllm stands for it.")
ours = "atomic:vllm" if case["reduction"] == "vllm-own" else recorded
names = (ours, "unsplit", "deterministic:8")
runs = {name: [bits(shrink(name, seed)) for seed in seeds] for name in names}
if has_vllm:
    runs["vLLM's own"] = [bits(vllm_shrink()) for _ in seeds]
print(f"{case['what']}\nOn {device}, outputs at rank index {case['rank_index']}:")
for name, rows in runs.items():
    came = Counter(row[case["column"]] for row in rows)
    times = ", ".join(
        f"the {who}'s {row[case['column']]} {came[row[case['column']]]}×"
        for who, row in observed.items()
    )
    print(f"  {name}: {len(came)} different in {len(rows)} runs; {times}")
distinct = {name: len(set(rows)) for name, rows in runs.items()}
shown = distinct[recorded] > 1 and distinct["unsplit"] == distinct["deterministic:8"] == 1
if device == "cpu" and case["seeds"]:
    shown &= tuple(runs[recorded]) == tuple(observed.values())
    print(
        f"Both whole rows of {len(case['kept_ranks'])} outputs bit-equal to the recorded: {shown}"
    )
print("The difference showed again." if shown else "The difference did not show.")
sys.exit(0 if shown else 1)
