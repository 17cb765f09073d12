"""Find the first module whose rows depend on a request's neighbours in its batch, inside vLLM.

    FLIPTRACE_SHRINK=local VLLM_BATCH_INVARIANT=1 python examples/measure/batch_rows.py MODEL ADAPTER --tokens 64

Six requests run in one batch and then each alone, eager and greedy, under whatever shrink this process has installed.
Every row that a module of the model or a LoRA shrink puts out is reduced to a 64-bit digest. A row that a request has
alone must occur among the rows that the same module put out for the batch; the first that does not, in the order of
execution, is where that request's result began to depend on its neighbours. Digests of equal rows are equal, so what
is named differs; that nothing differs is as sure as 64 bits are. One JSON line a request on stdout, then a summary.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from vllm_processes import write_entry_point

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
QUESTIONS = (
    "Tom has 3 boxes with 14 pens each and gives 9 pens away. How many pens are left?",
    "A train runs 80 km in the first hour and 95 km in each of the next 3 hours. How far does it run?",
    "What is the capital of France, and which river flows through it?",
    "A shop sells 12 apples for 3 dollars. What do 60 apples cost?",
)


class Rows:
    """What modules put out, as digests of rows, in the order of execution."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, torch.Tensor]] = []
        self._factors: dict[int, torch.Tensor] = {}

    def keep(self, name: str, values: torch.Tensor) -> None:
        """Add a tensor [rows, ...]."""
        rows = values.detach().reshape(values.shape[0], -1)
        integers = rows.contiguous().view({2: torch.int16, 4: torch.int32}[rows.element_size()])
        width = integers.shape[1]
        if width not in self._factors:
            draw = torch.Generator().manual_seed(width)
            factors = torch.randint(-(2**62), 2**62, (width,), generator=draw) | 1
            self._factors[width] = factors.to(values.device)
        self.calls.append((name, (integers.long() * self._factors[width]).sum(1)))

    def taken(self) -> list[tuple[str, list[int]]]:
        """Return what was kept since the last time."""
        found = [(name, digests.tolist()) for name, digests in self.calls]
        self.calls = []
        return found


def watch(llm: Any, rows: Rows) -> None:
    """Put hooks on every module and on the shrink."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def hook(name: str) -> Any:
        def after(_module: Any, _inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            for number, tensor in enumerate(tensors):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    rows.keep(f"{name}[{number}]" if number else name, tensor)

        return after

    for name, module in runner.model.named_modules():
        if name:
            module.register_forward_hook(hook(name))
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    shrink = PunicaWrapperGPU.add_shrink

    def kept(self: Any, y: torch.Tensor, x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        rows.keep("shrink operand", x.reshape(-1, x.shape[-1]))
        result = shrink(self, y, x, *rest, **named)
        rows.keep("shrink", y.transpose(0, 1))
        return result

    PunicaWrapperGPU.add_shrink = kept


def main() -> None:
    """Run the batch, then each request alone, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("adapter")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--attention-backend", default="TRITON_ATTN")
    options = parser.parse_args()
    # vLLM finds the plugin by its entry point; a checkout has none until it is installed.
    sys.path.insert(0, str(write_entry_point(Path(tempfile.mkdtemp()))))
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=options.model,
        enable_lora=True,
        max_lora_rank=16,
        max_loras=2,
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
        async_scheduling=False,
        attention_backend=options.attention_backend,
        kv_cache_memory_bytes=2**30,
        disable_log_stats=True,
    )
    rows = Rows()
    watch(llm, rows)
    tokenizer = llm.get_tokenizer()
    texts = [*QUESTIONS, *QUESTIONS[:2]]
    adapter = LoRARequest("adapter", 1, options.adapter)
    adapters = [adapter, None, adapter, adapter, None, adapter]
    prompts = [
        {
            "prompt_token_ids": tokenizer(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
                ),
                add_special_tokens=False,
            )["input_ids"]
        }
        for text in texts
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)

    def run(numbers: list[int]) -> tuple[list[list[int]], list[tuple[str, list[int]]]]:
        outputs = llm.generate(
            [prompts[n] for n in numbers],
            sampling,
            lora_request=[adapters[n] for n in numbers],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs], rows.taken()

    together, kept = run(list(range(len(prompts))))
    batch: dict[str, set[int]] = {}
    for name, digests in kept:
        batch.setdefault(name, set()).update(digests)
    firsts: Counter[str] = Counter()
    changed = 0
    for number in range(len(prompts)):
        (alone,), calls = run([number])
        same = alone == together[number]
        changed += not same
        first, step = None, -1
        for name, digests in calls:
            step += name == calls[0][0]
            if name == "shrink" and adapters[number] is None:  # nobody writes such rows
                continue
            if any(digest not in batch.get(name, ()) for digest in digests):
                first = {"module": name, "step": step, "rows": len(digests)}
                break
        firsts[first["module"] if first else "none"] += 1
        print(
            json.dumps(
                {
                    "request": number,
                    "adapter": adapters[number] is not None,
                    "same_tokens": same,
                    "first_module_that_differs": first,
                    "calls": len(calls),
                }
            ),
            flush=True,
        )
    print(
        json.dumps(
            {
                "shrink": os.environ.get("FLIPTRACE_SHRINK", "vLLM's own"),
                "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0"),
                "gpu": torch.cuda.get_device_name(),
                "outputs_changed": changed,
                "first_modules": dict(firsts),
            }
        )
    )


if __name__ == "__main__":
    main()
