"""Load a causal language model, its tokenizer and a LoRA adapter, or say why they cannot be traced faithfully.

Only safetensors adapters are read: a pickle can run code. GGUF files are dequantised on load, which the manifest says.
The adapter's weights are brought to the model's dtype: left alone, PEFT would keep them in FP32 and the rounding
boundary after the shrink would be gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fliptrace.errors import InputError, UnsupportedModelError

#: Settings of a LoRA configuration that change how the adapter is computed, with the value that plain LoRA has.
_VARIANT_SETTINGS = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "kasa_config": "KaSA",
    "layer_replication": "layer replication",
    "target_parameters": "LoRA on bare parameters (mixture-of-experts weights)",
    "trainable_token_indices": "trained token embeddings",
    "megatron_config": "Megatron parallel layers",
}

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
    chosen_device = _choose_device(device)
    if dtype != "auto" and dtype not in _DTYPES:
        raise InputError(f"dtype must be auto, {', '.join(_DTYPES)}; got {dtype!r}")
    with _quiet_libraries():
        adapter_folder = _adapter_folder(adapter)
        configuration = _check_adapter(adapter_folder)
        base, tokenizer, description = _load_base(model, dtype, attention)
        _refuse_quantised(base, model)
        traced = _add_adapter(base, adapter_folder, configuration, model)
        traced.to(chosen_device).eval()
    model_dtype = _model_dtype(traced)
    weights = adapter_folder / "adapter_model.safetensors"
    scalings = dict(_scalings(traced))
    description["model"]["dtype"] = str(model_dtype).removeprefix("torch.")
    description["model"]["attention"] = attention
    description["adapter"] = {
        "name": _shown_name(adapter),
        "sha256": sha256_of([weights, adapter_folder / "adapter_config.json"]),
        "rank": configuration.get("r"),
        "alpha": configuration.get("lora_alpha"),
        "target_modules": sorted(configuration.get("target_modules") or [])
        if isinstance(configuration.get("target_modules"), list)
        else configuration.get("target_modules"),
        "dtype": str(model_dtype).removeprefix("torch."),
        # Some (pissa, olora) make PEFT change the base weights on loading, which the model's hash does not show.
        "initialisation": configuration.get("init_lora_weights"),
        "scaling": "applied after expand (PEFT); the shrink is unscaled",
        "scaling_values": sorted(set(scalings.values())),
        "scaling_sha256": hashlib.sha256(json.dumps(scalings, sort_keys=True).encode()).hexdigest(),
    }
    template = getattr(tokenizer, "chat_template", None)
    description["tokenizer"] = {
        "class": type(tokenizer).__name__,
        "vocabulary_size": len(tokenizer),
        "vocabulary_sha256": hashlib.sha256(
            json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True).encode()
        ).hexdigest(),
        "chat_template_sha256": hashlib.sha256(str(template).encode()).hexdigest()
        if template
        else None,
    }
    return LoadedModel(traced, tokenizer, chosen_device, model_dtype, description)


def sha256_of(paths: list[Path]) -> str:
    """Hash the contents of files, in the order given, with their names."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


#: Folder names that say nothing by themselves; the parent's name goes before them.
_PLAIN_NAMES = frozenset(("adapter", "base", "checkpoint", "lora", "model", "output", "snapshot"))


def _shown_name(given: str) -> str:
    """Return how reports call a model or adapter: a hub name as it is, a path by its last part or two."""
    path = Path(given).expanduser()
    if not path.exists():
        return given
    path = path.resolve()
    return f"{path.parent.name}/{path.name}" if path.name in _PLAIN_NAMES else path.name


def forward_accepts(model: nn.Module, name: str) -> bool:
    """Tell whether a model's forward takes an argument of that name."""
    return name in inspect.signature(model.forward).parameters


def _choose_device(device: str) -> torch.device:
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


def _adapter_folder(adapter: str) -> Path:
    folder = Path(adapter).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise InputError(
            f"adapter must be a folder with adapter_config.json and adapter_model.safetensors; {adapter} is a file"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(adapter, allow_patterns=["adapter_config.json", "adapter_model.*"])
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"adapter {adapter!r} is no folder here and could not be fetched from the model hub ({_first_line(error)})"
        ) from error


def _check_adapter(folder: Path) -> dict[str, Any]:
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise InputError(
            f"adapter folder {folder} has no adapter_config.json; a PEFT LoRA adapter was expected"
        )
    try:
        configuration: Any = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON ({_first_line(error)})") from error
    if (
        not isinstance(configuration, dict)
        or str(configuration.get("peft_type", "")).upper() != "LORA"
    ):
        kind = (
            configuration.get("peft_type")
            if isinstance(configuration, dict)
            else type(configuration).__name__
        )
        raise UnsupportedModelError(
            f"a PEFT adapter of type LORA is required; {path} says {kind!r}"
        )
    if not (folder / "adapter_model.safetensors").is_file():
        pickled = [
            name
            for name in ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
            if (folder / name).exists()
        ]
        reason = (
            f"it has only {pickled[0]}, a pickle, which could run code when loaded"
            if pickled
            else "it has no weights"
        )
        raise InputError(
            f"adapter folder {folder} must hold adapter_model.safetensors; {reason}. Convert it with "
            "peft's save_pretrained(..., safe_serialization=True)"
        )
    for setting, name in _VARIANT_SETTINGS.items():
        if configuration.get(setting):
            raise UnsupportedModelError(
                f"{folder} uses {name} ({setting}={configuration[setting]!r}); its result is not x·Aᵀ·Bᵀ, so a "
                "trace of shrinks would be wrong. Plain LoRA and rsLoRA are supported"
            )
    if str(configuration.get("init_lora_weights")).startswith("pissa_niter"):
        raise UnsupportedModelError(
            f"{folder} was initialised with init_lora_weights={configuration['init_lora_weights']!r}: PEFT changes the "
            "base weights by a randomised decomposition whenever it loads such an adapter, so no two loads compute "
            "the same model. Convert it to plain LoRA with peft's save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...)"
        )
    return dict(configuration)


def _load_base(
    model: str, dtype: str, attention: str
) -> tuple[nn.Module, Any, dict[str, dict[str, Any]]]:
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
        raise InputError(f"model {model!r} {what}: {_first_line(error)}") from error
    files = [path] if is_gguf else _model_files(source, base)
    description = {
        "model": {
            "name": _shown_name(model),
            "architecture": type(base).__name__,
            "layers": getattr(base.config.get_text_config(decoder=True), "num_hidden_layers", None),
            "sha256": sha256_of(files),
            "source": "GGUF, dequantised on load" if is_gguf else "safetensors",
            "dequantised_on_load": is_gguf,
        }
    }
    return base, tokenizer, description


def _model_files(source: str, base: nn.Module) -> list[Path]:
    """List the files whose contents are the model: configuration and weights."""
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        revision = getattr(base.config, "_commit_hash", None)
        folder = Path(
            snapshot_download(
                source, revision=revision, allow_patterns=["config.json", "*.safetensors"]
            )
        )
    return sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")])


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
            f"{folder / 'adapter_model.safetensors'} is no readable safetensors file ({_first_line(error)})"
        ) from error
    mismatch = (
        f"adapter {folder} does not fit model {model!r}: it was made for another base model ("
    )
    mismatch += f"its configuration names {configuration.get('base_model_name_or_path')!r}). "
    try:
        wrapped = PeftModel.from_pretrained(base, str(folder), autocast_adapter_dtype=False)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise InputError(mismatch + _first_line(error)) from error
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


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text[:300].rstrip(".")


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keep progress bars and advice of the loading libraries off the terminal; errors still come through."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    showed_bars = transformers_logging.is_progress_bar_enabled()
    hub_verbosity = hub_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity(logging.ERROR)  # it tells of every retry
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if showed_bars:
            transformers_logging.enable_progress_bar()
