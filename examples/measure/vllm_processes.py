"""Engines of vLLM in processes of their own, and the model and adapter folders that they load.

Used by vllm_shrink.py and vllm_checks.py; vllm_engine.py is what runs inside.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENGINE = Path(__file__).with_name("vllm_engine.py")
LABELS_WITHOUT_PLUGIN = ("none", "vllm")  # no LoRA at all, and vLLM's own shrink
# Decoding is replayed from CUDA graphs, nothing is compiled: an engine starts in a fraction of the time.
GRAPHS_ONLY: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}

LLAMA_3_2_3B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
TINY = LLAMA_3_2_3B | {
    "head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
SHAPES = {"llama-3.2-3b": LLAMA_3_2_3B, "tiny": TINY}


def write_model(folder: Path, shape: dict[str, Any]) -> Path:
    """Write a model folder without weights or tokenizer, for load_format='dummy'."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=1))
    return folder


def write_adapter(folder: Path, shape: dict[str, Any], rank: int, seed: int) -> Path:
    """Write a random LoRA adapter on all seven projections, in PEFT's format; its B is not zero."""
    import torch
    from safetensors.torch import save_file

    if (folder / "adapter_model.safetensors").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    projections = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, (size, width) in projections.items():
            start = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn(rank, size, generator=generator) / size**0.5
            b = torch.randn(width, rank, generator=generator) * 0.01
            tensors[f"{start}.lora_A.weight"] = a.bfloat16()
            tensors[f"{start}.lora_B.weight"] = b.bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "dummy",
        "bias": "none",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name in projections}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1))
    return folder


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


class Engine:
    """One engine. It answers one command at a time and costs nothing in between.

    Attributes:
        name: as in its log file.
        facts: what it said when it was ready.
    """

    def __init__(
        self, out: Path, name: str, settings: dict[str, Any], variables: dict[str, str]
    ) -> None:
        self.name = name
        self.facts: dict[str, Any] = {}
        (out / "logs").mkdir(parents=True, exist_ok=True)
        self.log = out / "logs" / f"{name.replace(':', '-')}.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(ENGINE), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=variables,
                start_new_session=True,
            )
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._process.stdout as lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put(None)

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=max(seconds, 0.1))
        except queue.Empty:
            return {"error": f"no answer within {seconds:.0f} s"}
        if line is None:
            return {"error": f"the process ended with exit code {self._process.wait()}"}
        return json.loads(line)

    def wait(self, seconds: float) -> bool:
        """Wait until the engine is ready; False, with `facts['error']`, if it is not."""
        self.facts = self._answer(seconds)
        return "error" not in self.facts

    def ask(self, do: str, seconds: float = 120.0, **arguments: Any) -> dict[str, Any]:
        """Give a command and return the answer.

        Raises:
            RuntimeError: if the engine fails at it or takes too long.
        """
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            answer = self._answer(seconds)
        except BrokenPipeError:
            answer = {"error": f"the process ended with exit code {self._process.wait()}"}
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']} (see {self.log})")
        return answer

    def stop(self) -> None:
        """Tell the process that no commands follow; it ends by itself."""
        if not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def close(self) -> None:
        """End the process and what it started."""
        self.stop()
        if self._process.poll() is None:
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(10)
        self._reader.join(10)


def close_all(engines: Iterable[Engine]) -> None:
    """End all at once; one after the other, each takes seconds."""
    engines = list(engines)
    for engine in engines:
        engine.stop()
    for engine in engines:
        engine.close()


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
