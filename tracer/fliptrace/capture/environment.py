"""The environment section of a manifest, read in the process that runs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

_DISTRIBUTIONS = (
    "fliptrace",
    "torch",
    "transformers",
    "peft",
    "tokenizers",
    "safetensors",
    "triton",
    "vllm",
)
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "VLLM_BATCH_INVARIANT",
)


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return versions, hardware, thread count and determinism flags as they are now."""
    versions = {}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__
    description: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "device": device.type,
        "versions": versions,
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        description["gpu"] = {
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
            "bf16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            "fp16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        }
    return description


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver() -> str:
    try:
        with Path("/proc/driver/nvidia/version").open(encoding="utf-8") as file:
            return file.readline().strip()
    except OSError:
        return "unknown"
