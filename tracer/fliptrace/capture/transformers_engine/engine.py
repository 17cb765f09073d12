"""The engine protocol on transformers and PEFT."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fliptrace.capture.engine import (
    CacheLayer,
    ConsumptionAudit,
    Observer,
    ShrinkInterceptor,
    StateTensor,
    state_section,
)
from fliptrace.capture.environment import describe_environment
from fliptrace.capture.reductions import choose_reduction, describe_reduction
from fliptrace.capture.transformers_engine.cache import (
    CACHE_ARGUMENTS,
    CacheRow,
    ObservableCache,
    new_cache,
    read_cache,
    write_cache,
)
from fliptrace.capture.transformers_engine.loading import LoadedModel, forward_accepts
from fliptrace.capture.transformers_engine.operations import OperationObserver, QuietObserver
from fliptrace.capture.transformers_engine.order import OrderObserver
from fliptrace.capture.transformers_engine.shrink_module import (
    Shrink,
    ShrinkRuntime,
    ShrinkThenRound,
)
from fliptrace.capture.transformers_engine.state import (
    StateShape,
    check_state,
    read_state,
)
from fliptrace.errors import InputError, RecordingError, UnsupportedModelError
from fliptrace.sites import Site
from fliptrace_kernels import parse_reduction


class TransformersEngine:
    """Runs a LoRA model of transformers and PEFT; see fliptrace.capture.engine.Engine for what each method promises."""

    def __init__(
        self, loaded: LoadedModel, *, reduction: str = "unsplit", seed: int | None = None
    ) -> None:
        """Put a Shrink in the place of every ``lora_A``.

        Args:
            loaded: from load_model. The engine takes it over: its LoRA layers are changed in place.
            reduction: how shrinks sum; see set_reduction.
            seed: arrival schedule of simulated atomics.

        Raises:
            UnsupportedModelError: LoRA layers whose shrink cannot be traced, or a cache of another kind.
        """
        self.loaded = loaded
        self.model: Any = loaded.model  # to mypy a module's attributes are tensors or modules
        self.runtime = ShrinkRuntime(reduction=parse_reduction("unsplit"))
        self._not_observed: list[str] = []
        self._layers, self._shrinks = self._install()
        self.runtime.site_count = len(self._shrinks)
        self._sites = tuple(Site.from_path(path) for path, _ in self._layers)
        self._cache: ObservableCache | None = None
        self._cache_argument = next(
            (name for name in CACHE_ARGUMENTS if forward_accepts(self.model, name)),
            "past_key_values",
        )
        self._keep_last = (
            {"logits_to_keep": 1} if forward_accepts(self.model, "logits_to_keep") else {}
        )
        self._observer: Observer | None = None
        self._operations: OperationObserver | None = None
        self._pending: tuple[int, ...] = ()
        self._position = 0
        self._cache_layers: tuple[int, ...] = ()
        self._cache_rows: dict[int, CacheRow] = {}
        self._cache_windows: dict[int, int | None] = {}
        self._state_shapes: dict[tuple[int, str], StateShape] = {}
        self._audit: ConsumptionAudit | None = None
        self._settle_order()
        self.set_reduction(reduction, seed)

    @property
    def sites(self) -> tuple[Site, ...]:
        """Sites in the order in which the forward calls them."""
        return self._sites

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """Layers that own a cache."""
        return self._cache_layers

    @property
    def cache_windows(self) -> Mapping[int, int | None]:
        """Windows of the layers that own a cache."""
        return self._cache_windows

    @property
    def state_keys(self) -> tuple[tuple[int, str], ...]:
        """Layer and name of every tensor of recurrent state."""
        return tuple(self._state_shapes)

    @property
    def step_number(self) -> int:
        """The number of the next step."""
        return self.runtime.step

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.loaded.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which shrinks are rounded."""
        return self.loaded.dtype

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.loaded.tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a generation."""
        configured = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        if configured is None:
            configured = getattr(self.tokenizer, "eos_token_id", None)
        if configured is None:
            return frozenset()
        return frozenset(configured if isinstance(configured, (list, tuple)) else [int(configured)])

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the manifest's sections model, adapter, tokenizer, reduction, engine and environment."""
        return {
            **self.loaded.description,
            "reduction": describe_reduction(self.runtime.reduction, self.runtime.schedule),
            "engine": {
                "name": "transformers",
                "mode": "eager, batch 1, no padding",
                "sites": len(self._sites),
                "fusion": "every projection is a site of its own (q, k, v, gate and up are not fused)",
                "cache_layers": list(self.cache_layers),
                **state_section(self.state_keys),
            },
            "environment": describe_environment(self.device),
        }

    def not_observed(self) -> tuple[str, ...]:
        """Say which adapted parts have no shrink that could be recorded."""
        return tuple(self._not_observed)

    def shrink_weight(self, site: int) -> Tensor:
        """Return a copy of A, [R, K], as the shrink at a site reads it."""
        return self._shrinks[site].weight.detach().clone()

    def text_of(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Decode with the model's tokenizer."""
        text: str = self.loaded.tokenizer.decode(list(token_ids), skip_special_tokens=not special)
        return text

    @contextlib.contextmanager
    def reducing(self, reduction: str, seed: int | None = None) -> Iterator[None]:
        """Sum under another reduction while inside."""
        before = self.runtime.reduction, self.runtime.schedule
        self.set_reduction(reduction, seed)
        try:
            yield
        finally:
            self.runtime.reduction, self.runtime.schedule = before

    def set_reduction(self, reduction: str, seed: int | None = None) -> None:
        """Choose the reduction and, on the CPU, the arrival schedule of ``atomic``."""
        weight = self._shrinks[0].weight
        self.runtime.reduction, self.runtime.schedule = choose_reduction(
            reduction, seed, tuple(weight.shape), weight.dtype, weight.device
        )

    @property
    def simulates_atomics(self) -> bool:
        """True where ``atomic`` takes its arrival orders from a seeded schedule."""
        return self.device.type != "cuda"

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Forget the cache and queue a prompt."""
        if not prompt_ids:
            raise InputError("the prompt is empty: at least one token is needed")
        self._check_ids(prompt_ids, "prompt ids")
        limit = self.context_length
        if limit is not None and len(prompt_ids) >= limit:
            raise InputError(
                f"the prompt has {len(prompt_ids)} tokens and the model's context {limit}; a prompt must leave room "
                "for at least one generated token"
            )
        self._cache = new_cache(self.model)
        self._cache.observer, self._cache.audit = self._observer, self._audit
        self._pending = tuple(prompt_ids)
        self._position = 0
        self.runtime.step = 0

    @property
    def context_length(self) -> int | None:
        """How many positions the model has, None when it does not say."""
        value = getattr(
            self.model.config.get_text_config(decoder=True), "max_position_embeddings", None
        )
        return int(value) if value else None

    def _check_ids(self, ids: Sequence[int], what: str) -> None:
        vocabulary = int(self.model.get_input_embeddings().weight.shape[0])
        odd = [token for token in ids if not 0 <= token < vocabulary]
        if odd:
            raise InputError(f"{what} must lie in 0 .. {vocabulary - 1}; got {odd[0]}")

    @torch.no_grad()
    def step(self, token_id: int | None = None) -> Tensor:
        """Run one forward and return the last row's logits."""
        # no_grad and not inference_mode above: recorders read version counters
        if self._cache is None:
            raise RecordingError(
                "start(prompt_ids) must come before step(), also after a step that failed: its cache is half written"
            )
        if (self.runtime.step == 0) != (token_id is None):
            raise InputError(
                "the first step runs the prompt and takes no token; every later step takes one"
            )
        ids = self._pending if token_id is None else (token_id,)
        self._check_ids(ids, "token ids")
        limit = self.context_length
        if limit is not None and self._position + len(ids) > limit:
            raise InputError(
                f"the context of {limit} positions is full at step {self.runtime.step}"
            )
        if self._observer is not None:
            self._observer.begin_step(self.runtime.step, self._position, ids)
        inputs = torch.tensor([ids], dtype=torch.long, device=self.device)
        # A forward that fails leaves a cache that nothing may go on from.
        cache, self._cache = self._cache, None
        with self._operations.recording(len(ids)) if self._operations else contextlib.nullcontext():
            output = self.model(
                input_ids=inputs, use_cache=True, **{self._cache_argument: cache}, **self._keep_last
            )
        logits: Tensor = output.logits[0, -1]
        if self._observer is not None:
            self._observer.end_step(logits)
        self._cache = cache
        self._position += len(ids)
        self.runtime.step += 1
        return logits

    @contextlib.contextmanager
    def observed(self, observer: Observer, *, modules: bool = False) -> Iterator[None]:
        """Report to an observer while inside."""
        if self._observer is not None:
            raise RecordingError("this engine is being observed already; one observer at a time")
        handles: list[Any] = []
        if modules:
            self._operations = OperationObserver(self.model, observer)
            observer = QuietObserver(observer)
        self._observer = observer
        try:
            self.runtime.observer = observer
            for index, (_, layer) in enumerate(self._layers):
                handles.append(layer.register_forward_hook(_projection_hook(observer, index)))
            if self._cache is not None:
                self._cache.observer = observer
            yield
        finally:
            for handle in handles:
                handle.remove()
            if self._operations is not None:
                self._operations.close()
            self._operations = None
            self._observer = self.runtime.observer = None
            if self._cache is not None:
                self._cache.observer = None

    @contextlib.contextmanager
    def intercepted(self, interceptor: ShrinkInterceptor) -> Iterator[None]:
        """Pass every shrink through an interceptor while inside."""
        before = self.runtime.interceptor
        self.runtime.interceptor = interceptor
        try:
            yield
        finally:
            self.runtime.interceptor = before

    @contextlib.contextmanager
    def audited(self, audit: ConsumptionAudit) -> Iterator[None]:
        """Report to an audit while inside."""
        if self._audit is not None:
            raise RecordingError("this engine is being audited already; one audit at a time")
        handles = (
            self._last_layer().register_forward_hook(_residual_hook(audit)),
            self.model.get_input_embeddings().register_forward_pre_hook(_tokens_hook(audit)),
        )
        self._audit = self.runtime.audit = audit
        try:
            if self._cache is not None:
                self._cache.audit = audit
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._audit = self.runtime.audit = None
            if self._cache is not None:
                self._cache.audit = None

    def _last_layer(self) -> nn.Module:
        """Return the last layer of the stack in which the sites are; its output is the residual stream."""
        for site in self._sites:
            if site.layer is not None:
                stack = self.model.get_submodule(
                    site.path.removesuffix(f".{site.layer}.{site.module}")
                )
                layer: nn.Module = stack[-1]
                return layer
        raise UnsupportedModelError(
            "no adapted projection lies in a stack of layers, so the end of the stack cannot be audited"
        )

    def read_cache(self) -> tuple[CacheLayer, ...]:
        """Return copies of every layer's cache."""
        return () if self._cache is None else read_cache(self._cache, self._position)

    def read_state(self) -> tuple[StateTensor, ...]:
        """Return copies of the recurrent state."""
        return () if self._cache is None else read_state(self._cache)

    def write_cache(
        self, layers: Sequence[CacheLayer], step: int, states: Sequence[StateTensor] = ()
    ) -> None:
        """Replace the whole cache, recurrent state included."""
        check_state(states, self._state_shapes)
        given = [content.layer for content in layers]
        missing, unknown = set(self.cache_layers) - set(given), set(given) - set(self.cache_layers)
        if missing or unknown or len(given) != len(set(given)):
            raise InputError(
                f"every cache layer of {list(self.cache_layers)} must be given, and none twice; got {given}"
            )
        if step < 1:
            raise InputError(
                f"a cache precedes a decode step, so step must be at least 1; got {step}"
            )
        self._cache, self._position = write_cache(
            self.model, layers, self._cache_rows, states, self._state_shapes
        )
        self._cache.observer, self._cache.audit = self._observer, self._audit
        self.runtime.step = step

    def _install(self) -> tuple[list[tuple[str, nn.Module]], list[Shrink]]:
        """Replace every ``lora_A`` and list the LoRA layers in the order of their definition."""
        layers: list[tuple[str, nn.Module]] = []
        shrinks: list[Shrink] = []
        for path, layer in list(self.model.named_modules()):
            adapters = getattr(layer, "lora_A", None)
            if not isinstance(adapters, nn.ModuleDict):
                continue
            if len(getattr(layer, "lora_embedding_A", ())):
                self._not_observed.append(
                    f"LoRA on the embedding {path}: it has no shrink, so nothing is recorded of it"
                )
                continue
            if not isinstance(layer.base_layer, nn.Linear) or list(adapters) != list(
                layer.active_adapters
            ):
                raise UnsupportedModelError(
                    f"{path} is a LoRA layer over {type(layer.base_layer).__name__} with adapters {list(adapters)}; "
                    "one active adapter over torch.nn.Linear can be traced"
                )
            if getattr(layer, "lora_variant", None):
                raise UnsupportedModelError(
                    f"{path} computes a LoRA variant; only plain LoRA can be traced"
                )
            (name,) = adapters
            weight: Any = adapters[name].weight
            module = ShrinkThenRound(weight, len(shrinks), self.runtime)
            adapters[name] = module
            layers.append((path, layer))
            shrinks.append(module.shrink)
        if not layers:
            raise UnsupportedModelError(
                "the adapter adds no LoRA layer over torch.nn.Linear: there is no shrink to trace"
            )
        return layers, shrinks

    def _settle_order(self) -> None:
        """Run one token to learn in which order the forward calls the sites and which layers own a cache."""
        order = OrderObserver()
        with self.observed(order):
            self.start((0,))
            self.step()
        content = self.read_cache()
        self._state_shapes = {
            (state.layer, state.name): StateShape(
                tuple(state.values.shape), state.values.dtype, state.values.device
            )
            for state in self.read_state()
        }
        self._cache_rows = {
            layer.layer: CacheRow(
                tuple(layer.values.shape[2:]), layer.values.dtype, layer.values.device
            )
            for layer in content
        }
        self._cache_windows = {layer.layer: layer.window for layer in content}
        self._cache, self.runtime.step = None, 0
        fired = list(dict.fromkeys(order.sites))
        if sorted(fired) != list(range(len(self._shrinks))) or len(order.sites) != len(fired):
            odd = next(
                index for index in range(len(self._shrinks)) if order.sites.count(index) != 1
            )
            raise UnsupportedModelError(
                f"every LoRA layer must run exactly once in a forward; {self._sites[odd].path} ran "
                f"{order.sites.count(odd)} times (a layer that is skipped or shared cannot be traced)"
            )
        self._layers = [self._layers[index] for index in fired]
        self._shrinks = [self._shrinks[index] for index in fired]
        for number, shrink in enumerate(self._shrinks):
            shrink.index = number
        self._sites = tuple(self._sites[index] for index in fired)
        self._cache_layers = tuple(dict.fromkeys(order.cache_layers))


def _projection_hook(observer: Observer, index: int) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_module: nn.Module, _arguments: tuple[Any, ...], output: Tensor) -> None:
        observer.projection(index, output)

    return hook


def _tokens_hook(audit: ConsumptionAudit) -> Callable[[nn.Module, Any], None]:
    return lambda _module, arguments: audit.tokens_consumed(arguments[0][0])


def _residual_hook(audit: ConsumptionAudit) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_module: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        audit.residual(hidden[0])

    return hook
