"""Load a causal language model, its tokenizer and a LoRA adapter, or say why they cannot be traced faithfully.

Only safetensors adapters are read: a pickle can run code. GGUF files are dequantised on load, which the manifest says.
The adapter's weights are brought to the model's dtype: left alone, PEFT would keep them in FP32 and the rounding
boundary after the shrink would be gone.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
from fliptrace.errors import InputError, UnsupportedModelError

_NOWHERE = "is no folder or .gguf file here and could not be fetched from the model hub"

#: What transformers raises on files that are missing, cut or of another kind, as seen with each.
_LOADING_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    RuntimeError,
    ImportError,
    TypeError,
    struct.error,
)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be traced.

    Attributes:
        model: the causal language model with LoRA layers in place (the PEFT wrapper taken off).
        tokenizer: the model's tokenizer.
        device: where it lies.
        dtype: the dtype in which it computes, and to which shrinks are rounded.
        description: manifest sections ``model``, ``adapter`` and ``tokenizer``.
    """

    model: nn.Module
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    description: dict[str, dict[str, Any]]


def load_model(
    model: str,
    adapter: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "sdpa",
) -> LoadedModel:
    """Load a model and its adapter.

    Args:
        model: a folder in Hugging Face format, a ``.gguf`` file (dequantised on load), or a hub name.
        adapter: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``, or a hub name.
        device: ``auto`` (CUDA when there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``auto`` (the configuration's; BF16 for GGUF), ``bfloat16``, ``float16`` or ``float32``.
        attention: transformers' attention implementation, ``sdpa`` or ``eager``.

    Raises:
        InputError: not found, unreadable, an adapter for another base model, no such device.
        UnsupportedModelError: quantised, or a LoRA variant whose shrink is not x·Aᵀ.
    """
    chosen_device = choose_device(device)
    if dtype != "auto" and dtype not in _DTYPES:
        raise InputError(f"dtype must be auto, {', '.join(_DTYPES)}; got {dtype!r}")
    with quiet_libraries():
        folder = adapter_folder(adapter)
        configuration = check_adapter(folder)
        base, tokenizer, description = load_base(model, dtype, attention)
        traced = _add_adapter(base, folder, configuration, model)
        traced.to(chosen_device).eval()
    model_dtype = _model_dtype(traced)
    description["model"]["dtype"] = str(model_dtype).removeprefix("torch.")
    description["model"]["attention"] = attention
    description["adapter"] = describe_adapter(
        adapter,
        folder,
        configuration,
        str(model_dtype).removeprefix("torch."),
        dict(_scalings(traced)),
        "applied after expand (PEFT); the shrink is unscaled",
    )
    description["tokenizer"] = describe_tokenizer(tokenizer)
    return LoadedModel(traced, tokenizer, chosen_device, model_dtype, description)


def forward_accepts(model: nn.Module, name: str) -> bool:
    """Tell whether a model's forward takes an argument of that name."""
    return name in inspect.signature(model.forward).parameters


def choose_device(device: str) -> torch.device:
    """Return the device of a name, see load_model.

    Raises:
        InputError: no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise InputError(f"device must be auto, cpu, cuda or cuda:N; got {device!r}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise InputError(f"device must be auto, cpu, cuda or cuda:N; got {device!r}")
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(
                f"device {device} was asked for, but torch {torch.__version__} sees no CUDA device; "
                "use --device cpu, or install a CUDA build of torch and a driver"
            )
        if (chosen.index or 0) >= torch.cuda.device_count():
            raise InputError(
                f"device {device} was asked for, but there are {torch.cuda.device_count()} CUDA devices"
            )
    return chosen


def load_base(
    model: str, dtype: str, attention: str
) -> tuple[nn.Module, Any, dict[str, dict[str, Any]]]:
    """Load a model without an adapter, its tokenizer, and the manifest's section ``model``; see load_model.

    Raises:
        InputError: not found or unreadable.
        UnsupportedModelError: quantised.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path = Path(model).expanduser()
    options: dict[str, Any] = {"attn_implementation": attention}
    source: str = str(path) if path.exists() else model
    is_gguf = path.is_file()
    if is_gguf:
        if path.suffix != ".gguf":
            raise InputError(
                f"model must be a folder, a .gguf file or a hub name; {model} is another kind of file"
            )
        from transformers import GgufConfig

        source = str(path.parent)
        options |= {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
    try:
        if not is_gguf:
            _refuse_quantised_configuration(AutoConfig.from_pretrained(source), model)
        tokenizer = AutoTokenizer.from_pretrained(
            source, **({"gguf_file": path.name} if is_gguf else {})
        )
        wanted = _DTYPES.get(dtype, torch.bfloat16 if is_gguf else "auto")
        base = AutoModelForCausalLM.from_pretrained(
            source, dtype=wanted, use_safetensors=None if is_gguf else True, **options
        )
    except UnsupportedModelError:
        raise
    except (*_LOADING_ERRORS, SafetensorError) as error:
        what = "could not be loaded" if path.exists() else _NOWHERE
        raise InputError(f"model {model!r} {what}: {first_line(error)}") from error
    _refuse_quantised(base, model)
    files = [path] if is_gguf else model_files(source, base.config)
    description = {
        "model": {
            "name": shown_name(model),
            "architecture": type(base).__name__,
            "layers": getattr(base.config.get_text_config(decoder=True), "num_hidden_layers", None),
            "sha256": sha256_of(files),
            "source": "GGUF, dequantised on load" if is_gguf else "safetensors",
            "dequantised_on_load": is_gguf,
        }
    }
    return base, tokenizer, description


def _refuse_quantised_configuration(config: Any, model: str) -> None:
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(_quantised_message(model))


def _refuse_quantised(base: nn.Module, model: str) -> None:
    quantizer = getattr(base, "hf_quantizer", None)
    dequantised = quantizer is None or bool(
        getattr(getattr(quantizer, "quantization_config", None), "dequantize", False)
    )
    integer = [
        name
        for name, weight in base.named_parameters()
        if not weight.is_floating_point() or weight.element_size() < 2
    ]
    if not dequantised or integer:
        raise UnsupportedModelError(_quantised_message(model))


def _quantised_message(model: str) -> str:
    return (
        f"model {model!r} computes on quantised weights; its projections are not those that a trace describes. "
        "Use a BF16, FP16 or FP32 model, or a GGUF file, which is dequantised on load"
    )


def _add_adapter(
    base: nn.Module, folder: Path, configuration: dict[str, Any], model: str
) -> nn.Module:
    from peft import PeftModel
    from peft.utils.save_and_load import get_peft_model_state_dict
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(folder / "adapter_model.safetensors"), framework="pt") as file:
            stored = set(file.keys())
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{folder / 'adapter_model.safetensors'} is no readable safetensors file ({first_line(error)})"
        ) from error
    mismatch = (
        f"adapter {folder} does not fit model {model!r}: it was made for another base model ("
    )
    mismatch += f"its configuration names {configuration.get('base_model_name_or_path')!r}). "
    try:
        wrapped = PeftModel.from_pretrained(base, str(folder), autocast_adapter_dtype=False)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise InputError(mismatch + first_line(error)) from error
    expected = set(get_peft_model_state_dict(wrapped))
    if stored != expected:
        odd = sorted(stored ^ expected)
        raise InputError(mismatch + f"{len(odd)} weights have no partner, for example {odd[0]}")
    inner: nn.Module = wrapped.base_model.model
    dtype = _model_dtype(inner)
    for name, parameter in inner.named_parameters():
        parameter.requires_grad_(False)
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    return inner


def _model_dtype(model: nn.Module) -> torch.dtype:
    """Return the one dtype of the base projections under LoRA (or of all weights without any)."""
    bases = [
        getattr(module, "base_layer", None)
        for module in model.modules()
        if hasattr(module, "lora_A")
    ]
    dtypes = {base.weight.dtype for base in bases if isinstance(base, nn.Linear)}
    dtypes = dtypes or {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= set(_DTYPES.values()):
        raise UnsupportedModelError(
            f"the adapted projections must share one dtype of {', '.join(_DTYPES)}; found {sorted(map(str, dtypes))}"
        )
    return dtypes.pop()


def _scalings(model: nn.Module) -> Iterator[tuple[str, float]]:
    for name, module in model.named_modules():
        scaling = getattr(module, "scaling", None)
        if hasattr(module, "lora_A") and isinstance(scaling, dict):
            for adapter_name, value in scaling.items():
                yield f"{name}.{adapter_name}", float(value)
