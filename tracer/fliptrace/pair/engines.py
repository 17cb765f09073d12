"""Choose and load an engine by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fliptrace.errors import InputError

if TYPE_CHECKING:
    from fliptrace.capture.transformers_engine import TransformersEngine

ENGINES = ("auto", "transformers")


def load_engine(
    model: str,
    adapter: str,
    *,
    engine: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "sdpa",
) -> TransformersEngine:
    """Load a model with a LoRA adapter on an engine.

    Args:
        model: a folder in Hugging Face format, a ``.gguf`` file or a hub name.
        adapter: a folder with a PEFT LoRA adapter in safetensors, or a hub name.
        engine: ``auto`` or ``transformers``. ``auto`` takes the only engine that this version has.
        device: ``auto`` (CUDA when there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``auto``, ``bfloat16``, ``float16`` or ``float32``.
        attention: ``sdpa`` or ``eager``.

    Raises:
        InputError: something cannot be found or read, or an option is none of the above.
        UnsupportedModelError: the model or adapter cannot be traced faithfully.
    """
    if engine not in ENGINES:
        raise InputError(f"engine must be one of {', '.join(ENGINES)}; got {engine!r}")
    if attention not in ("sdpa", "eager"):
        raise InputError(f"attention must be sdpa or eager; got {attention!r}")
    from fliptrace.capture.transformers_engine import TransformersEngine, load_model

    return TransformersEngine(
        load_model(model, adapter, device=device, dtype=dtype, attention=attention)
    )
