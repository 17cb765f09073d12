"""Engines of vLLM in processes of their own, and the model and adapter folders that they load.

Used by vllm_shrink.py and vllm_checks.py; vllm_engine.py is what runs inside. The processes themselves are those of
`trace-study batch` and `trace-study latency`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from fliptrace.studies.engine_process import GRAPHS_ONLY, EngineProcess, close_all
from fliptrace.studies.latency_shapes import SHAPES, write_adapter, write_model

__all__ = [
    "GRAPHS_ONLY",
    "LABELS_WITHOUT_PLUGIN",
    "SHAPES",
    "Engine",
    "close_all",
    "engine_options",
    "environment",
    "wait_for_all",
    "write_adapter",
    "write_model",
    "write_opposite",
]

ROOT = Path(__file__).resolve().parents[2]
ENGINE = Path(__file__).with_name("vllm_engine.py")
LABELS_WITHOUT_PLUGIN = ("none", "vllm")  # no LoRA at all, and vLLM's own shrink


def write_opposite(folder: Path, adapter: Path) -> Path:
    """Write an adapter that changes a model the other way: B negated."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in tensors:
        if "lora_B" in name:
            tensors[name] = -tensors[name]
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    return folder


def write_entry_point(folder: Path) -> Path:
    """Write what makes the plugin visible to vLLM where fliptrace is not installed.

    The same lines as in pyproject.toml; an installed fliptrace has them in its own metadata.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    info = folder / "fliptrace_working_tree-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fliptrace-working-tree\nVersion: 0\n"
    )
    group = "vllm.general_plugins"
    lines = [f"{name} = {target}" for name, target in project["entry-points"][group].items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    return folder


def environment(scratch: Path, name: str, label: str, **more: str) -> dict[str, str]:
    """Return the environment of one engine.

    Args:
        scratch: where caches go, and what makes the plugin visible.
        name: of the engine.
        label: a reduction, 'vllm' for vLLM's own shrink, 'none', or 'bare': no plugin in sight.
        more: further variables.
    """
    variables = {k: v for k, v in os.environ.items() if not k.startswith("FLIPTRACE_")}
    paths = (
        []
        if label == "bare"
        else [str(write_entry_point(scratch / "entry")), str(ROOT / "kernels")]
    )
    variables["PYTHONPATH"] = os.pathsep.join([*paths, variables.get("PYTHONPATH", "")]).strip(":")
    # Engines that start at once must not write one cache.
    variables["VLLM_CACHE_ROOT"] = str(scratch / "cache" / name)
    variables.setdefault("OMP_NUM_THREADS", "1")
    variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    variables["VLLM_NO_USAGE_STATS"] = "1"
    if label not in (*LABELS_WITHOUT_PLUGIN, "bare"):
        variables["FLIPTRACE_SHRINK"] = label
    return variables | more


def engine_options(attention_backend: str) -> dict[str, Any]:
    """Return the options that every engine gets."""
    found = {
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "seed": 0,
        # Small enough never to fail on memory that a neighbour holds; the cache is given in bytes.
        "gpu_memory_utilization": 0.02,
    }
    return found | ({"attention_backend": attention_backend} if attention_backend else {})


class Engine(EngineProcess):
    """An engine whose inside is vllm_engine.py (None), or another script that answers likewise."""

    def __init__(
        self,
        out: Path,
        name: str,
        settings: dict[str, Any],
        variables: dict[str, str],
        script: Path | None = None,
    ) -> None:
        log = out / "logs" / f"{name.replace(':', '-')}.log"
        super().__init__(
            name, log, [sys.executable, str(script or ENGINE), json.dumps(settings)], variables
        )


def wait_for_all(engines: list[Engine], deadline: float) -> list[Engine]:
    """Wait for engines that are starting; close and report those that do not get ready."""
    ready = []
    for engine in engines:
        if engine.wait(deadline - time.monotonic()):
            print(f"{engine.name}: ready after {engine.facts['ready']} s", flush=True)
            ready.append(engine)
        else:
            print(f"{engine.name}: FAILED: {engine.facts['error']} ({engine.log})", flush=True)
            engine.close()
    return ready
