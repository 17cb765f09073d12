"""Where models, adapters and tokenizers come from: what every engine checks before it loads, and says in manifests.

Only safetensors adapters of plain LoRA are accepted: a pickle can run code, and what is not x·Aᵀ·Bᵀ has no shrink.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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


def adapter_folder(adapter: str) -> Path:
    """Return an adapter's folder, fetched from the model hub where the name is no path.

    Raises:
        InputError: it is neither here nor there.
    """
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
            f"adapter {adapter!r} is no folder here and could not be fetched from the model hub ({first_line(error)})"
        ) from error


def check_adapter(folder: Path) -> dict[str, Any]:
    """Return the configuration of an adapter that can be traced.

    Raises:
        InputError: no adapter, or one without safetensors; UnsupportedModelError: not plain LoRA.
    """
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise InputError(
            f"adapter folder {folder} has no adapter_config.json; a PEFT LoRA adapter was expected"
        )
    try:
        configuration: Any = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON ({first_line(error)})") from error
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


def describe_adapter(
    adapter: str,
    folder: Path,
    configuration: Mapping[str, Any],
    dtype: str,
    scalings: Mapping[str, float],
    scaling: str,
) -> dict[str, Any]:
    """Return the manifest's adapter section.

    Args:
        adapter: as the user named it.
        folder: where it is.
        configuration: from check_adapter.
        dtype: in which the adapter's weights are held.
        scalings: ``module.default`` -> alpha / rank (or rsLoRA's) of every adapted module.
        scaling: where it is applied, in words.
    """
    targets = configuration.get("target_modules")
    return {
        "name": shown_name(adapter),
        "sha256": sha256_of([folder / "adapter_model.safetensors", folder / "adapter_config.json"]),
        "rank": configuration.get("r"),
        "alpha": configuration.get("lora_alpha"),
        "target_modules": sorted(targets or []) if isinstance(targets, list) else targets,
        "dtype": dtype,
        # Some (pissa, olora) make PEFT change the base weights on loading, which the model's hash does not show.
        "initialisation": configuration.get("init_lora_weights"),
        "scaling": scaling,
        "scaling_values": sorted(set(scalings.values())),
        "scaling_sha256": hashlib.sha256(json.dumps(scalings, sort_keys=True).encode()).hexdigest(),
    }


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Return the manifest's tokenizer section."""
    template = getattr(tokenizer, "chat_template", None)
    return {
        "class": type(tokenizer).__name__,
        "vocabulary_size": len(tokenizer),
        "vocabulary_sha256": hashlib.sha256(
            json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True).encode()
        ).hexdigest(),
        "chat_template_sha256": hashlib.sha256(str(template).encode()).hexdigest()
        if template
        else None,
    }


def model_files(source: str, config: Any) -> list[Path]:
    """List the files whose contents are the model: configuration and weights."""
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        revision = getattr(config, "_commit_hash", None)
        folder = Path(
            snapshot_download(
                source, revision=revision, allow_patterns=["config.json", "*.safetensors"]
            )
        )
    return sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")])


#: Folder names that say nothing by themselves; the parent's name goes before them.
_PLAIN_NAMES = frozenset(("adapter", "base", "checkpoint", "lora", "model", "output", "snapshot"))


def shown_name(given: str) -> str:
    """Return how reports call a model or adapter: a hub name as it is, a path by its last part or two."""
    path = Path(given).expanduser()
    if not path.exists():
        return given
    path = path.resolve()
    return f"{path.parent.name}/{path.name}" if path.name in _PLAIN_NAMES else path.name


def sha256_of(paths: list[Path]) -> str:
    """Hash the contents of files, in the order given, with their names."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, cut to a length that fits a message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text[:300].rstrip(".")


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
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
