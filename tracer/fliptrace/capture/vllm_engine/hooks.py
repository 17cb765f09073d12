"""Hooks on the modules of a vLLM model: projections, new cache rows, and what consumers get.

They are put on while somebody watches and taken off after; an idle engine has none. vLLM computes under inference mode,
whose tensors have no version counters, so whoever is told is called outside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fliptrace.capture.engine import ConsumptionAudit, Observer
from fliptrace.capture.vllm_engine.cache import PagedLayer, read_rows
from fliptrace.capture.vllm_engine.shrinks import AdaptedLayer, ShrinkRuntime
from fliptrace.errors import RecordingError, UnsupportedModelError
from fliptrace.sites import Site


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Leave inference mode for a while."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def observe(
    layers: Sequence[AdaptedLayer],
    paged: Sequence[PagedLayer],
    runtime: ShrinkRuntime,
    observer: Observer,
) -> list[Any]:
    """Tell an observer of projections and new cache rows; returns the handles, the projections' first."""
    handles: list[Any] = [ProjectionHooks(layers, runtime, observer)]
    handles += [
        layer.module.register_forward_pre_hook(
            _new_rows(number, layer, runtime, observer), with_kwargs=True
        )
        for number, layer in enumerate(paged)
    ]
    return handles


class ProjectionHooks:
    """Tells an observer of projections; on the layers only where no filler sees them, as a hook slows every call."""

    def __init__(
        self, layers: Sequence[AdaptedLayer], runtime: ShrinkRuntime, observer: Observer
    ) -> None:
        """Know the layers; ``stand`` puts the hooks on."""
        self._layers = layers
        self._told = [_projections(layer, runtime, observer) for layer in layers]
        self._handles: list[Any] = []

    def stand(self) -> None:
        """Put the hooks on, if they are off."""
        if not self._handles:
            self._handles = [
                layer.module.register_forward_hook(hook)
                for layer, hook in zip(self._layers, self._told, strict=True)
            ]

    def remove(self) -> None:
        """Take them off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _projections(layer: AdaptedLayer, runtime: ShrinkRuntime, observer: Observer) -> Any:
    def hook(_module: nn.Module, _arguments: Any, output: Any) -> None:
        if not runtime.rows:
            return
        whole = output[0] if isinstance(output, tuple) else output
        with outside():
            kept = runtime.own(whole.reshape(-1, whole.shape[-1])).clone().unsqueeze(0)
            for offset, part in enumerate(layer.slices):
                observer.projection(layer.first + offset, kept[..., part.columns])

    return hook


def _new_rows(number: int, layer: PagedLayer, runtime: ShrinkRuntime, observer: Observer) -> Any:
    def hook(_module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        if not runtime.rows:
            return
        filler = runtime.filler
        if filler is not None and len(arguments) > 2:
            filler.cache_rows(number, arguments[1], arguments[2])
            return
        given = dict(zip(("query", "key", "value"), arguments, strict=False)) | keywords
        if filler is not None:
            filler.cache_rows(number, given["key"], given["value"])
            return
        keys, values = (_heads_first(given.get(name), layer, runtime) for name in ("key", "value"))
        with outside():
            observer.cache_rows(layer.number, keys, values)

    return hook


def _heads_first(rows: Tensor | None, layer: PagedLayer, runtime: ShrinkRuntime) -> Tensor:
    """Return [kv_heads, T, head_dim] of the request's rows of what an attention layer was called with."""
    if rows is None:
        raise RecordingError(
            f"layer {layer.number}: attention was called without new keys and values, so its cache rows were not seen"
        )
    return runtime.own(rows.reshape(-1, *layer.row_shape)).transpose(0, 1)


@contextlib.contextmanager
def consumption(
    model: nn.Module,
    stack_path: str,
    paged: Sequence[PagedLayer],
    runtime: ShrinkRuntime,
    audit: ConsumptionAudit,
    position: Callable[[], tuple[int, dict[int, Tensor]]],
) -> Iterator[None]:
    """Report to an audit what embedding, attention and the end of the layer stack get, while inside.

    Args:
        model: vLLM's model.
        stack_path: where its stack of layers lies.
        paged: its caches.
        runtime: says which forwards count.
        audit: is told.
        position: returns how many tokens were cached before the forward that runs, and the block table of each KV
            group.
    """
    stack: Any = model.get_submodule(stack_path)
    handles = [
        stack[-1].register_forward_hook(_residual(runtime, audit)),
        embedding_of(model).register_forward_pre_hook(_tokens(runtime, audit), with_kwargs=True),
    ]
    try:
        for layer in paged:
            implementation = layer.module.impl
            implementation.forward = _attention(
                implementation.forward, layer, runtime, audit, position
            )
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in paged:
            vars(layer.module.impl).pop("forward", None)


def stack_path(layers: Sequence[AdaptedLayer]) -> str:
    """Return the path of the stack of layers in which the adapted projections lie.

    Raises:
        UnsupportedModelError: none lies in one.
    """
    for layer in layers:
        site = Site.from_path(layer.name)
        if site.layer is not None:
            return layer.name.removesuffix(f".{site.layer}.{site.module}")
    raise UnsupportedModelError(
        "no adapted projection lies in a stack of layers, so the end of the stack cannot be audited"
    )


def embedding_of(model: nn.Module) -> nn.Module:
    """Return the module that looks token ids up.

    Raises:
        RecordingError: there is none.
    """
    from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    for module in model.modules():
        kinds = (VocabParallelEmbeddingWithLoRA, VocabParallelEmbedding)
        if isinstance(module, kinds) and not isinstance(module, ParallelLMHead):
            found: nn.Module = module
            return found
    raise RecordingError(
        f"{type(model).__name__} has no embedding of token ids that could be audited"
    )


def _tokens(runtime: ShrinkRuntime, audit: ConsumptionAudit) -> Any:
    def hook(_module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        if runtime.rows:
            ids = arguments[0] if arguments else next(iter(keywords.values()))
            with outside():
                audit.tokens_consumed(runtime.own(ids).to(torch.int64, copy=True))

    return hook


def _residual(runtime: ShrinkRuntime, audit: ConsumptionAudit) -> Any:
    def hook(_module: nn.Module, _arguments: Any, output: Any) -> None:
        if not runtime.rows:
            return
        with outside():
            if isinstance(output, tuple) and len(output) > 1 and output[1] is not None:
                hidden = output[0] + output[1]  # vLLM adds them inside the final norm
            else:
                hidden = output[0] if isinstance(output, tuple) else output
            audit.residual(runtime.own(hidden))

    return hook


def _attention(
    own: Callable[..., Any],
    layer: PagedLayer,
    runtime: ShrinkRuntime,
    audit: ConsumptionAudit,
    position: Callable[[], tuple[int, dict[int, Tensor]]],
) -> Callable[..., Any]:
    """Wrap a backend's attention: new rows are in the paged cache by then, and the kernel reads nothing else."""

    def forward(*arguments: Any, **keywords: Any) -> Any:
        if runtime.rows:
            cached, tables = position()
            last = cached + runtime.rows
            with outside():
                rows = read_rows(layer, tables[layer.group], layer.first_kept(cached), last)
                audit.cache_consumed(layer.number, rows[0].transpose(0, 1), rows[1].transpose(0, 1))
        return own(*arguments, **keywords)

    return forward
