"""Choose and load an engine by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fliptrace.errors import InputError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from fliptrace.capture.transformers_engine import TransformersEngine
    from fliptrace.capture.vllm_engine import VllmEngine
    from fliptrace.capture.vllm_engine.tensor_parallel import TensorParallelEngine
    from fliptrace.pair.neighbours import NeighbourLike

    LoadedEngine = TransformersEngine | VllmEngine | TensorParallelEngine

ENGINES = ("auto", "transformers", "vllm")
#: The reduction of the vllm engine that leaves every shrink to vLLM's own kernel.
VLLM_OWN = "vllm-own"
#: What says nothing to vLLM, and what its CPU build has no choice about.
_NO_BACKEND = ("sdpa", "CPU_ATTN")


def load_engine(
    model: str,
    adapter: str,
    *,
    engine: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "sdpa",
    vllm_arguments: Mapping[str, Any] | None = None,
    neighbours: Sequence[NeighbourLike] = (),
) -> LoadedEngine:
    """Load a model with a LoRA adapter on an engine.

    Args:
        model: a folder in Hugging Face format, a ``.gguf`` file or a hub name.
        adapter: a folder with a PEFT LoRA adapter in safetensors, or a hub name.
        engine: ``auto``, ``transformers`` or ``vllm``. ``auto`` takes transformers, which runs everywhere.
        device: ``auto`` (CUDA when there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``auto``, ``bfloat16``, ``float16`` or ``float32``.
        attention: ``sdpa`` or ``eager``; with vllm the name of its backend, such as ``TRITON_ATTN``, where ``sdpa``
            leaves the choice to vLLM.
        vllm_arguments: with vllm only: further arguments of ``vllm.LLM``. With ``tensor_parallel_size`` above 1 every
            rank runs in a process of its own, and the engine's sites are those of all ranks.
        neighbours: with vllm only: requests that run in one batch with the traced one, each a text, token ids or a
            Neighbour; None among them is the place of the traced request in the queue, which is first without it.

    Raises:
        InputError: something cannot be found or read, or an option is none of the above.
        UnsupportedModelError: the model or adapter cannot be traced faithfully.
    """
    if engine not in ENGINES:
        raise InputError(f"engine must be one of {', '.join(ENGINES)}; got {engine!r}")
    if engine == "vllm":
        return _load_vllm(
            model, adapter, device, dtype, attention, dict(vllm_arguments or {}), neighbours
        )
    if neighbours:
        raise InputError(
            f"neighbours go with engine='vllm', which computes batches; got engine={engine!r}"
        )
    if vllm_arguments:
        raise InputError(
            f"vllm_arguments go with engine='vllm'; got engine={engine!r} and {sorted(vllm_arguments)}"
        )
    if attention not in ("sdpa", "eager"):
        raise InputError(f"attention must be sdpa or eager; got {attention!r}")
    from fliptrace.capture.transformers_engine import TransformersEngine, load_model

    return TransformersEngine(
        load_model(model, adapter, device=device, dtype=dtype, attention=attention)
    )


def attach(
    llm: Any,
    adapter: Any,
    *,
    reduction: str = VLLM_OWN,
    seed: int | None = None,
    neighbours: Sequence[NeighbourLike] = (),
) -> AbstractContextManager[VllmEngine]:
    """Trace on a ``vllm.LLM`` that you already have, while inside a ``with`` block.

    >>> with ft.attach(llm, lora_request) as tracer:
    ...     pair = ft.trace_pair(tracer, prompt="Tom has 3 apples …", reduction="vllm-own")

    Args:
        llm: made in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), eager, with LoRA, without prefix caching, chunked
            prefill or asynchronous scheduling; what does not fit is refused with its reason.
        adapter: the LoRARequest that your own requests use, or the adapter's folder.
        reduction: how shrinks sum at first; ``vllm-own`` leaves them to vLLM's kernel.
        seed: arrival schedule of simulated atomics.
        neighbours: see load_engine; the LLM must have room for them (max_num_seqs, max_loras).

    Returns:
        A context whose value is an engine, for trace_pair and everything else that takes one.

    Raises:
        InputError, UnsupportedModelError: on entry: something given cannot be used.
        RecordingError: on entry: the LLM has unfinished requests.
    """
    from fliptrace.capture.vllm_engine import attach as attached

    def tokenizer() -> Any:
        return (
            llm.get_tokenizer()
        )  # looked up late: what is no LLM is refused by attach, with its reason

    return attached(
        llm,
        adapter,
        reduction=reduction,
        seed=seed,
        neighbours=_encoded(neighbours, tokenizer),
    )


def _encoded(neighbours: Sequence[NeighbourLike], tokenizer: Callable[[], Any]) -> Any:
    if not neighbours:
        return ()
    from fliptrace.pair.neighbours import encoded

    return encoded(neighbours, tokenizer)


def _load_vllm(
    model: str,
    adapter: str,
    device: str,
    dtype: str,
    attention: str,
    arguments: dict[str, Any],
    neighbours: Sequence[NeighbourLike],
) -> VllmEngine | TensorParallelEngine:
    from fliptrace.capture.vllm_engine import VllmEngine, load_llm, load_tokenizer

    if attention == "eager":
        raise InputError(
            "attention eager is transformers'; with the vllm engine name one of its backends (such as TRITON_ATTN), or "
            "leave it out"
        )
    if attention not in _NO_BACKEND:
        arguments.setdefault("attention_backend", attention)
    from fliptrace.capture.vllm_engine.tensor_parallel import (
        TensorParallelEngine,
        load_ranks,
        wanted_ranks,
    )

    if wanted_ranks(arguments) > 1:
        if neighbours:
            raise InputError(
                "with several ranks one request alone can be traced; leave neighbours out, or use "
                "tensor_parallel_size=1"
            )
        return TensorParallelEngine(
            load_ranks(model, adapter, device=device, dtype=dtype, arguments=arguments)
        )
    return VllmEngine(
        load_llm(
            model,
            adapter,
            device=device,
            dtype=dtype,
            arguments=arguments,
            neighbours=_encoded(neighbours, lambda: load_tokenizer(model)),
        )
    )


def shrink_weights(engine: LoadedEngine) -> dict[str, Tensor]:
    """Return the adapter's A of every site, [R, K], in the dtype in which it runs, on the CPU; see Pair.separate."""
    return {
        site.path: engine.shrink_weight(number).cpu() for number, site in enumerate(engine.sites)
    }
