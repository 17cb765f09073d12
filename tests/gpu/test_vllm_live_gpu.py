"""The live recorder under CUDA graphs: what graphs left in the ring, against the reduction run alone.

The plugin's shrink is chosen once per process, so these run where FLIPTRACE_SHRINK is set to a repeatable one:

    FLIPTRACE_SHRINK=deterministic:8 python -m pytest tests/gpu/test_vllm_live_gpu.py
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here", allow_module_level=True)
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
if not os.environ.get("FLIPTRACE_SHRINK"):
    pytest.skip("needs FLIPTRACE_SHRINK=deterministic:8", allow_module_level=True)

import fliptrace as ft
from fliptrace.capture.vllm_engine.live.layout import row_numbers
from fliptrace.numerics import digest_rows
from fliptrace.pair import bundled_model
from fliptrace_kernels import lora_shrink

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
PROMPTS = [[5 + number, 6, 7, 8 + number] * (3 + number) for number in range(6)]


@pytest.fixture(scope="module")
def llm():
    """The bundled model with full graphs of its decode steps, recorded."""
    from vllm import LLM

    ft.prepare_watch(rows=2048, operand_bytes=2**28)
    return LLM(
        model=bundled_model().model,
        enable_lora=True,
        max_lora_rank=16,
        dtype="bfloat16",
        attention_backend="TRITON_ATTN",
        enable_prefix_caching=False,
        max_model_len=256,
        max_num_seqs=8,
        gpu_memory_utilization=0.02,
        kv_cache_memory_bytes=2**28,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8],
        },
    )


def record(llm):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("mine", 3, bundled_model().adapter)
    with ft.watch(llm) as recorder:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in PROMPTS],
            [SamplingParams(temperature=0, max_tokens=8 + n, ignore_eos=True) for n in range(6)],
            lora_request=lora,
            use_tqdm=False,
        )
    return recorder, recorder.executions(), [tuple(o.outputs[0].token_ids) for o in outputs]


def test_replayed_graphs_are_recorded(llm):
    """Every record is there, decode steps came from captured graphs, and two recordings are bit-equal."""
    recorder, executions, tokens = record(llm)
    assert [execution.token_ids for execution in executions] == tokens
    assert [execution.missing() for execution in executions] == [0] * 6
    captured = dict(recorder.writer.captured)
    assert set(captured) == {1, 2, 4, 8}
    assert {8, 4, 2, 1} <= {int(rows) for rows in executions[-1].rows[:, 3]}
    for one, other in zip(executions, record(llm)[1], strict=True):
        assert ft.compare_executions(one, other).word == "equal"


def test_rows_of_graphs_are_what_the_reduction_gives_alone(llm):
    """For every decode step and layer: digests of the operands in the ring, and the shrink of these, bit by bit."""
    recorder, executions, _ = record(llm)
    layout, ring = recorder.ring.layout, recorder.ring
    checked = 0
    for execution in executions:
        for row in range(len(execution.prompt_ids), len(execution)):
            rows = int(execution.rows[row, 3])
            place = int(execution.places[row])
            base = int(row_numbers(execution.rows[row : row + 1])[0]) - place
            for layer in range(len(layout.layers)):
                x = torch.stack([ring.operand(base + index, layer) for index in range(rows)]).cuda()
                recorded = layout.digests(execution.rows[row : row + 1])[0, layer]
                assert torch.equal(digest_rows(x)[place].cpu(), recorded)
                weights = [a.cuda() for a in recorder.weights(layer, execution, row)]
                z = lora_shrink(x, weights, reduction=os.environ["FLIPTRACE_SHRINK"])[:, place]
                kept = execution.shrink(layer)[row].contiguous()
                assert torch.equal(kept.view(torch.int32), z.cpu().contiguous().view(torch.int32))
                checked += 1
    assert checked > 300
