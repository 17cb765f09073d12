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
from fliptrace.capture.vllm_engine.parallel_layers import OutputHook
from fliptrace.capture.vllm_engine.shrinks import AdaptedLayer, ShrinkRuntime
from fliptrace.capture.vllm_engine.state import StateLayer, read_state
from fliptrace.capture.vllm_engine.stepping import Request
from fliptrace.errors import RecordingError, UnsupportedModelError
from fliptrace.sites import Site


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Leave inference mode for a while."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class ObserverHooks:
    """Tells an observer of projections and new cache rows, by hooks on modules or through a filler of its slots.

    A module with a hook is called by PyTorch's slow path, some microseconds more for each of 150 modules. A filler sees
    projections where expand runs, and new cache rows come to it where they are written, so it needs none.
    """

    def __init__(
        self,
        layers: Sequence[AdaptedLayer],
        paged: Sequence[PagedLayer],
        runtime: ShrinkRuntime,
        observer: Observer,
    ) -> None:
        """Know whom to tell; nothing is put on yet."""
        self._layers, self._paged = layers, paged
        self._runtime, self._observer = runtime, observer
        self._handles: list[Any] = []
        self._filler: Any = None

    def use(self, filler: Any) -> None:
        """Choose for the forwards from now on: this filler, or hooks where it is None."""
        if filler is None:
            self._release()
            if not self._handles:
                self._handles = self._hook()
        elif filler is not self._filler:
            self.remove()
            self._filler = filler
            for number, layer in enumerate(self._paged):
                writer = layer.module.impl
                own = writer.do_kv_cache_update
                writer.do_kv_cache_update = _written(number, own, filler, self._runtime)

    def remove(self) -> None:
        """Take everything off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._release()

    def _release(self) -> None:
        if self._filler is not None:
            self._filler = None
            for layer in self._paged:
                vars(layer.module.impl).pop("do_kv_cache_update", None)

    def _hook(self) -> list[Any]:
        runtime, observer = self._runtime, self._observer
        handles: list[Any] = [
            OutputHook(layer.module, _projections(layer, runtime, observer))
            for layer in self._layers
        ]
        handles += [
            layer.module.register_forward_pre_hook(
                _new_rows(layer, runtime, observer), with_kwargs=True
            )
            for layer in self._paged
        ]
        return handles


def _written(
    number: int, own: Callable[..., Any], filler: Any, runtime: ShrinkRuntime
) -> Callable[..., Any]:
    """Wrap what writes new rows into a paged cache."""

    def do_kv_cache_update(layer: Any, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
        if runtime.rows:
            filler.cache_rows(number, key, value)
        return own(layer, key, value, *rest, **more)

    return do_kv_cache_update


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


def _new_rows(layer: PagedLayer, runtime: ShrinkRuntime, observer: Observer) -> Any:
    def hook(_module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        if not runtime.rows:
            return
        given = dict(zip(("query", "key", "value"), arguments, strict=False)) | keywords
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
    states: Sequence[StateLayer],
    runtime: ShrinkRuntime,
    audit: ConsumptionAudit,
    request: Request,
) -> Iterator[None]:
    """Report to an audit what embedding, attention, mixers and the end of the layer stack get, while inside.

    Args:
        model: vLLM's model.
        stack_path: where its stack of layers lies.
        paged: its caches.
        states: its layers with recurrent state.
        runtime: says which forwards count.
        audit: is told.
        request: the one that runs.
    """
    stack: Any = model.get_submodule(stack_path)
    handles = [
        stack[-1].register_forward_hook(_residual(runtime, audit)),
        embedding_of(model).register_forward_pre_hook(_tokens(runtime, audit), with_kwargs=True),
    ]
    handles += [
        layer.module.register_forward_pre_hook(_state(layer, runtime, audit, request))
        for layer in states
    ]
    try:
        for layer in paged:
            implementation = layer.module.impl
            implementation.forward = _attention(
                implementation.forward, layer, runtime, audit, request.position
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


def _state(
    layer: StateLayer, runtime: ShrinkRuntime, audit: ConsumptionAudit, request: Request
) -> Any:
    """Show the slot of a request before its mixer runs, which reads and overwrites it and nothing else."""

    def hook(_module: nn.Module, _arguments: Any) -> None:
        if not runtime.rows or not request.length:
            return
        with outside():
            for state in read_state((layer,), request.block_ids()):
                audit.state_consumed(layer.number, state.name, state.values)

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
            # Reading a whole cache of every layer in every step would take as long as the forward.
            whole = audit.needs_cached_rows(layer.number)
            first = layer.first_kept(cached) if whole else cached
            with outside():
                rows = read_rows(layer, tables[layer.group], first, last)
                audit.cache_consumed(layer.number, rows[0].transpose(0, 1), rows[1].transpose(0, 1))
        return own(*arguments, **keywords)

    return forward
