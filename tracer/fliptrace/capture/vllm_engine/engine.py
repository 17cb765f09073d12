"""The engine protocol inside vLLM."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fliptrace.capture.engine import (
    CacheLayer,
    ConsumptionAudit,
    Observer,
    ShrinkInterceptor,
    SlotObserver,
    StateTensor,
)
from fliptrace.capture.vllm_engine.adapted import adapted_layers, numbered, place_of
from fliptrace.capture.vllm_engine.batch import BatchRows, check_batch, require_mapping
from fliptrace.capture.vllm_engine.cache import prove_layouts
from fliptrace.capture.vllm_engine.describing import describe_engine
from fliptrace.capture.vllm_engine.hooks import (
    ObserverHooks,
    consumption,
    outside,
    stack_path,
)
from fliptrace.capture.vllm_engine.hosting import check_plugin, check_settings, find_host
from fliptrace.capture.vllm_engine.kept import kept_layers
from fliptrace.capture.vllm_engine.loading import LoadedLlm
from fliptrace.capture.vllm_engine.operations import OperationWatch
from fliptrace.capture.vllm_engine.reductions import choose_reduction
from fliptrace.capture.vllm_engine.shrinks import (
    AdaptedLayer,
    ShrinkPath,
    ShrinkRuntime,
    check_fired,
)
from fliptrace.capture.vllm_engine.slot_filling import SlotFiller
from fliptrace.capture.vllm_engine.stepping import Request, check_ids, check_prompt
from fliptrace.errors import InputError, RecordingError, UnsupportedModelError
from fliptrace.sites import Site


class VllmEngine:
    """Runs one LoRA request on a vLLM engine, alone or in a batch; see fliptrace.capture.engine.Engine for the methods.

    vLLM fuses projections: q, k and v are slices of one LoRA layer, gate and up of another, and each slice is a site,
    named like ``model.layers.0.self_attn.qkv_proj[q_proj]``. Neighbours (loaded.neighbours) are computed in the same
    forwards: their shrinks are vLLM's own, their tokens what vLLM samples, and nothing of them is observed or edited.
    """

    def __init__(
        self, loaded: LoadedLlm, *, reduction: str = "unsplit", seed: int | None = None
    ) -> None:
        """Look the engine over; it is touched only while a step of ours runs, and ``close`` ends the request.

        Args:
            loaded: from load_llm or describe_llm.
            reduction: how shrinks sum; see set_reduction.
            seed: arrival schedule of simulated atomics.

        Raises:
            InputError: an engine in another process, or a plugin that was asked for and is not there.
            UnsupportedModelError: settings, adapter or cache that cannot be recorded faithfully.
        """
        self.loaded = loaded
        self.host = find_host(loaded.llm, ranks=loaded.ranks)
        self.settings = check_settings(self.host)
        self.plugin = check_plugin()
        config = self.host.config.model_config
        self._device = torch.device(self.host.worker.device)
        self._dtype: torch.dtype = config.dtype
        self._vocabulary = int(config.get_vocab_size())
        # vLLM ends a request whose last token fills the model, before it is computed.
        self._limit = int(config.max_model_len) - 1
        if loaded.neighbours is not None:
            check_batch(self.host, loaded.neighbours, self._vocabulary, loaded.rank)
        self._request = Request(
            self.host, loaded.lora_request, self._limit + 1, loaded.neighbours, self._laid_out
        )
        self.kept = kept_layers(self.host)
        self.paged = self.kept.paged
        self._pending: tuple[int, ...] | None = None
        self._ready = False
        self._filler: SlotFiller | None = None
        self._hooks: ObserverHooks | None = None
        self._layers: list[AdaptedLayer] = []
        self._not_observed: list[str] = []
        self.runtime = ShrinkRuntime(None, loaded.rank, 0, map_rows=self._map_rows)
        self._open(reduction, seed)

    def _open(self, reduction: str, seed: int | None) -> None:
        scheduler = self.host.scheduler
        if scheduler.has_unfinished_requests():
            raise RecordingError(
                f"the vLLM engine has {scheduler.get_num_unfinished_requests()} unfinished requests; let them end first"
            )
        prove_layouts(self.paged)
        self._load_adapter()
        self._path = ShrinkPath(self._wrapper, self._layers, self.runtime)
        try:
            self._settle_order()
            self.set_reduction(reduction, seed)
        except BaseException:
            self.close()
            raise

    def _load_adapter(self) -> None:
        self.host.llm.llm_engine.add_lora(self.loaded.lora_request)
        manager = self.host.runner.lora_manager._adapter_manager
        number = self.loaded.lora_request.lora_int_id
        if manager.get_adapter(number) is None:
            raise RecordingError(
                f"vLLM did not load the adapter {self.loaded.lora_request.lora_path}"
            )
        self._layers, self._not_observed = adapted_layers(manager, number)
        wrappers = {
            id(layer.module.punica_wrapper): layer.module.punica_wrapper for layer in self._layers
        }
        if len(wrappers) != 1:
            raise UnsupportedModelError(
                f"the adapted layers must share one punica wrapper; these have {len(wrappers)} (a multimodal model "
                "whose towers are adapted, too, cannot be traced yet)"
            )
        (self._wrapper,) = wrappers.values()
        self._not_observed += self.kept.not_observed

    def close(self) -> None:
        """End the request and take everything off the vLLM engine, which can go on as before."""
        try:
            self._request.end()
        finally:
            self._path.remove()
            self._ready = False

    @property
    def sites(self) -> tuple[Site, ...]:
        """Sites in the order in which the forward runs them."""
        return tuple(part.site for layer in self._layers for part in layer.slices)

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """Layers that own a cache."""
        return self.kept.cache_layers

    @property
    def cache_windows(self) -> Mapping[int, int | None]:
        """Windows of the layers that own a cache."""
        return {layer.number: layer.window for layer in self.paged}

    @property
    def state_keys(self) -> tuple[tuple[int, str], ...]:
        """Layer and name of every tensor of recurrent state."""
        return self.kept.state_keys

    @property
    def step_number(self) -> int:
        """The number of the next step."""
        return self.runtime.step

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which shrinks are rounded."""
        return self._dtype

    @property
    def context_length(self) -> int | None:
        """How many positions can be computed; vLLM's max_model_len counts the last sampled token, too."""
        return self._limit

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.loaded.tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a generation."""
        return self.loaded.end_ids

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the manifest's sections model, adapter, tokenizer, reduction, engine and environment."""
        return describe_engine(self)

    def not_observed(self) -> tuple[str, ...]:
        """Say which adapted parts have no shrink that could be recorded."""
        return tuple(self._not_observed)

    def shrink_weight(self, site: int) -> Tensor:
        """Return a copy of A, [R, K], as the shrink at a site reads it."""
        layer, part = place_of(self._layers, site)
        stacked: Any = layer.module.lora_a_stacked
        weight: Tensor = stacked[part][self.runtime.slot, 0, : self.runtime.rank]
        return weight.detach().clone()

    def text_of(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Decode with the model's tokenizer."""
        text: str = self.loaded.tokenizer.decode(list(token_ids), skip_special_tokens=not special)
        return text

    @property
    def simulates_atomics(self) -> bool:
        """True where ``atomic`` takes its arrival orders from a seeded schedule."""
        return self._device.type != "cuda"

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
        """Choose the reduction; ``vllm-own`` leaves every shrink to vLLM's own kernel."""
        size = int(self.shrink_weight(0).shape[1])
        shape = (self.runtime.rank, size)
        self.runtime.reduction, self.runtime.schedule = choose_reduction(
            reduction, seed, shape, self._dtype, self._device
        )

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Forget the cache and queue a prompt."""
        ids = tuple(prompt_ids)
        check_prompt(ids, self._vocabulary, self._limit)
        self._begin(ids)
        self._pending = ids
        self.runtime.step = 0

    def _begin(self, ids: tuple[int, ...]) -> None:
        self._ready = False
        self._request.begin(ids)
        self._ready = True

    def step(self, token_id: int | None = None) -> Tensor:
        """Run one forward and return the last row's logits."""
        runtime = self.runtime
        if not self._ready:
            raise RecordingError(
                "start(prompt_ids) must come before step(), also after a step that failed: its cache is half written"
            )
        if (runtime.step == 0) != (token_id is None):
            raise InputError(
                "the first step runs the prompt and takes no token; every later step takes one"
            )
        ids = (self._pending or ()) if token_id is None else (token_id,)
        check_ids(ids, self._vocabulary, "token ids")
        if self._request.length + len(ids) > self._limit:
            raise InputError(
                f"the context of {self._limit} positions is full at step {runtime.step}"
            )
        if runtime.observer is not None:
            runtime.observer.begin_step(runtime.step, self._request.length, ids)
        # A forward that fails leaves a cache that nothing may go on from.
        self._ready = False
        filler = self._filler_of(ids)
        if self._hooks is not None:
            self._hooks.use(filler)
        runtime.rows, runtime.fired = len(ids), []
        runtime.batch = None
        try:
            for one in (filler, runtime.watch):
                if one is not None:
                    one.begin(len(ids))
            stands = self._path.is_needed
            with self._path.standing(filler) if stands else contextlib.nullcontext():
                logits = self._request.forward(ids, runtime.step)
        finally:
            runtime.rows = 0
        with outside():
            logits = logits.clone()
            if filler is not None:
                runtime.observer.slots_filled(*filler.finish())  # type: ignore[union-attr]
            elif stands:
                check_fired(runtime, self.sites)
            if runtime.watch is not None:
                runtime.watch.finish()
            if runtime.observer is not None:
                runtime.observer.end_step(logits)
        self._ready = True
        runtime.step += 1
        return logits

    def _laid_out(self, rows: BatchRows) -> None:
        self.runtime.batch = rows

    def _map_rows(self, rows: BatchRows) -> int:
        runtime, manager = self.runtime, self.host.runner.lora_manager._adapter_manager
        number = self.loaded.lora_request.lora_int_id
        return require_mapping(manager, number, rows, runtime.rows, runtime.step)

    def neighbour_token_ids(self) -> tuple[tuple[int, ...], ...]:
        """Return what each neighbour has generated so far, or since it began again, as vLLM booked it."""
        return self._request.neighbours.token_ids()

    def _filler_of(self, ids: tuple[int, ...]) -> SlotFiller | None:
        """Return what fills the observer's slots in this forward, where slots are lent and nobody else watches."""
        runtime = self.runtime
        observer = runtime.observer
        alone = runtime.interceptor is None and runtime.audit is None and runtime.watch is None
        if len(ids) != 1 or not alone or not isinstance(observer, SlotObserver):
            return None
        slots = observer.row_slots()
        if slots is None:
            return None
        if self._filler is None or self._filler.slots is not slots:
            self._filler = SlotFiller(self._path, self._layers, self.paged, slots)
        return self._filler

    @contextlib.contextmanager
    def observed(self, observer: Observer, *, modules: bool = False) -> Iterator[None]:
        """Report to an observer while inside."""
        runtime = self.runtime
        if runtime.observer is not None:
            raise RecordingError("this engine is being observed already; one observer at a time")
        self._hooks = ObserverHooks(self._layers, self.paged, runtime, observer)
        runtime.observer = observer
        if modules:
            model = self.host.runner.model
            runtime.watch = OperationWatch(
                model,
                self._layers,
                self.paged,
                runtime,
                observer,
                self._request.position,
                ranks=self.host.config.parallel_config.tensor_parallel_size,
            )
        try:
            yield
        finally:
            self._hooks.remove()
            if runtime.watch is not None:
                runtime.watch.close()
            runtime.observer = runtime.watch = self._filler = self._hooks = None

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
        if self.runtime.audit is not None:
            raise RecordingError("this engine is being audited already; one audit at a time")
        with consumption(
            self.host.runner.model,
            stack_path(self._layers),
            self.paged,
            self.kept.states,
            self.runtime,
            audit,
            self._request,
        ):
            self.runtime.audit = audit
            try:
                yield
            finally:
                self.runtime.audit = None

    def read_cache(self) -> tuple[CacheLayer, ...]:
        """Return copies of every layer's cache."""
        if not self._request.is_running or not self._ready:
            return ()
        with outside():
            return self.kept.read(self._request.block_ids(), self._request.length)

    def read_state(self) -> tuple[StateTensor, ...]:
        """Return copies of the recurrent state."""
        # Asked after every step: a model without any shall not pay for looking its blocks up.
        if not self.kept.states:
            return ()
        if not (self._ready and self._request.is_running and self._request.length):
            return ()
        with outside():
            return self.kept.read_state(self._request.block_ids())

    def write_cache(
        self, layers: Sequence[CacheLayer], step: int, states: Sequence[StateTensor] = ()
    ) -> None:
        """Replace the whole cache, recurrent state included.

        vLLM allocates blocks only for tokens that it schedules. Where no request of the right length runs, one is made
        by a forward over as many placeholder tokens, which nobody sees; then its rows are overwritten.
        """
        if step < 1:
            raise InputError(
                f"a cache precedes a decode step, so step must be at least 1; got {step}"
            )
        length = self.kept.check(layers, states)
        if not 0 < length <= self._limit:
            raise InputError(
                f"a cache of 1 to {self._limit} tokens can be written; got one of {length}"
            )
        if not (self._ready and self._request.length == length):
            self._make_room(length)
        with outside():
            self.kept.write(self._request.block_ids(), layers, states)
        if self.runtime.watch is not None:
            self.runtime.watch.forget_cache()
        self.runtime.step = step

    def _make_room(self, length: int) -> None:
        ids = (0,) * length
        self._begin(ids)
        self._ready = False
        self._request.forward(ids, 0)
        self._ready = True

    def _settle_order(self) -> None:
        """Run one token to learn in which order the forward runs the layers, and that each runs once."""
        manager = self.host.runner.lora_manager._adapter_manager
        self._request.begin((0,), alone=True)
        self.runtime.rows = 1
        try:
            order = self._path.order_in(lambda: self._request.forward((0,), 0))
        finally:
            self.runtime.rows = 0
            self._ready = False
        number = self.loaded.lora_request.lora_int_id
        if number not in manager.lora_index_to_id:
            raise RecordingError("vLLM did not activate the adapter for its request")
        self.runtime.slot = manager.lora_index_to_id.index(number)
        self._request.end()
        self._layers = numbered(order)
        self._path.layers = {layer.key: layer for layer in self._layers}
