"""The engine protocol over all ranks of a tensor-parallel vLLM engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fliptrace.capture.arena import ArenaSlots
from fliptrace.capture.engine import (
    CacheLayer,
    ConsumptionAudit,
    Observer,
    ShrinkInterceptor,
    SlotObserver,
    StateTensor,
)
from fliptrace.capture.step_capture import ArenaCapture, CaptureKeys
from fliptrace.capture.vllm_engine.stepping import check_ids, check_prompt
from fliptrace.capture.vllm_engine.tensor_parallel.captures import RanksCapture
from fliptrace.capture.vllm_engine.tensor_parallel.conversation import Conversation
from fliptrace.capture.vllm_engine.tensor_parallel.delivering import Delivery
from fliptrace.capture.vllm_engine.tensor_parallel.describing import described
from fliptrace.capture.vllm_engine.tensor_parallel.layout import (
    joined_cache,
    sites_of,
    split_cache,
)
from fliptrace.capture.vllm_engine.tensor_parallel.loading import LoadedRanks
from fliptrace.capture.vllm_engine.tensor_parallel.messages import (
    Command,
    StepResult,
    pack,
    unpack,
)
from fliptrace.errors import InputError, RecordingError
from fliptrace.sites import Site


class TensorParallelEngine:
    """Runs one LoRA request on all ranks; see fliptrace.capture.engine.Engine for what each method promises.

    Tensors that it lends, takes and returns lie on the CPU: the ranks' devices belong to their processes. Sites are
    those of every rank, each with its rank in its path; see layout.
    """

    def __init__(
        self, loaded: LoadedRanks, *, reduction: str = "unsplit", seed: int | None = None
    ) -> None:
        """Take over ranks that are ready; ``close`` ends them.

        Args:
            loaded: from load_ranks.
            reduction: how shrinks sum; see set_reduction.
            seed: arrival schedule of simulated atomics.

        Raises:
            InputError: an unknown reduction.
        """
        self.loaded = loaded
        self.group = loaded.group
        self.ranks = loaded.group.count
        self._talk = Conversation(self.group)
        facts = loaded.facts[0]
        self._sites = sites_of(facts["sites"], self.ranks)
        self._cache_layers: tuple[int, ...] = tuple(facts["cache_layers"])
        self._windows: dict[int, int | None] = dict(facts["windows"])
        self._step = self._length = 0
        self._pending: tuple[int, ...] | None = None
        self._ready = False
        self._reduction: tuple[str, int | None] = (reduction, seed)
        self._observer: Observer | None = None
        self._interceptor: ShrinkInterceptor | None = None
        self._audit: ConsumptionAudit | None = None
        self._operands = self._modules = False
        self._capture: RanksCapture | None = None
        self._launches: list[tuple[str, ...]] = [()] * self.ranks
        self._sources: list[tuple[int, ...]] = [()] * self.ranks
        try:
            self.set_reduction(reduction, seed)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all ranks' processes."""
        self._ready = False
        self.group.close()

    # What it is -----------------------------------------------------------------------------------

    @property
    def sites(self) -> tuple[Site, ...]:
        """Sites of all ranks in execution order."""
        return self._sites

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """Layers that own a cache."""
        return self._cache_layers

    @property
    def cache_windows(self) -> Mapping[int, int | None]:
        """Windows of the layers that own a cache."""
        return self._windows

    @property
    def state_keys(self) -> tuple[tuple[int, str], ...]:
        """None: models with recurrent state are refused when ranks load."""
        return ()

    @property
    def device(self) -> torch.device:
        """Where tensors are lent, taken and returned."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which shrinks are rounded."""
        dtype: torch.dtype = self.loaded.facts[0]["dtype"]
        return dtype

    @property
    def step_number(self) -> int:
        """The number of the next step."""
        return self._step

    @property
    def context_length(self) -> int | None:
        """How many positions can be computed."""
        return self._limit

    @property
    def _limit(self) -> int:
        return int(self.loaded.facts[0]["limit"])

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.loaded.tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a generation."""
        return frozenset(self.loaded.facts[0]["end_ids"])

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the manifest's sections, as rank 0 read them, and what is the group's."""
        return described(
            self._talk.all_of(Command("describe")), self.loaded, self._reduction, len(self._sites)
        )

    def not_observed(self) -> tuple[str, ...]:
        """Say what no rank could record."""
        fused = (
            "sums over ranks within a kernel that does more (an all-reduce fused with a norm) show only as inputs of "
            "what follows"
        )
        return (*self.loaded.facts[0]["not_observed"], fused)

    def shrink_weight(self, site: int) -> Tensor:
        """Return a copy of A, [R, K], as the shrink at a site reads it: at row-parallel sites the rank's slice of K."""
        if not 0 <= site < len(self._sites):
            raise InputError(f"sites are numbered 0 to {len(self._sites) - 1}; got {site}")
        own, rank = divmod(site, self.ranks)
        return unpack(self._talk.one(rank, Command("shrink_weight", (own,))))

    def text_of(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Decode with the model's tokenizer."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=not special)
        return text

    @property
    def simulates_atomics(self) -> bool:
        """True where ``atomic`` takes its arrival orders from a seeded schedule, of another seed on every rank."""
        return bool(self.loaded.facts[0]["simulates"])

    # How it sums ----------------------------------------------------------------------------------

    def set_reduction(self, reduction: str, seed: int | None = None) -> None:
        """Choose the reduction on all ranks."""
        self._talk.all_of(Command("set_reduction", (reduction, seed)))
        self._reduction = (reduction, seed)

    @contextlib.contextmanager
    def reducing(self, reduction: str, seed: int | None = None) -> Iterator[None]:
        """Sum under another reduction while inside."""
        before = self._reduction
        self.set_reduction(reduction, seed)
        try:
            yield
        finally:
            if not self.group.trouble:
                self.set_reduction(*before)

    # How it runs ----------------------------------------------------------------------------------

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Forget the cache and queue a prompt."""
        ids = tuple(prompt_ids)
        check_prompt(ids, int(self.loaded.facts[0]["vocabulary"]), self._limit)
        self._ready = False
        self._talk.all_of(Command("start", (ids,)))
        self._pending, self._step, self._length, self._ready = ids, 0, 0, True

    def step(self, token_id: int | None = None) -> Tensor:
        """Run one forward on all ranks and return the last row's logits."""
        ids = self._ids_of(token_id)
        observer = self._observer
        if observer is not None:
            observer.begin_step(self._step, self._length, ids)
        capture = self._capture_of(ids)
        # A forward that fails leaves a cache that nothing may go on from.
        self._ready = False
        delivery = Delivery(self.ranks, observer, self._interceptor, self._audit)
        results: list[StepResult] = self._talk.all_of(
            Command("step", (token_id, capture is not None, self._whole_layers())), delivery
        )
        logits = self._logits_of(results)
        if capture is not None:
            self._take(capture, results)
        if observer is not None:
            observer.end_step(logits)
        self._ready = True
        self._step += 1
        self._length += len(ids)
        return logits

    def _whole_layers(self) -> frozenset[int]:
        """Return the layers of which the audit wants rows that were cached in earlier steps."""
        audit = self._audit
        if audit is None:
            return frozenset()
        return frozenset(layer for layer in self._cache_layers if audit.needs_cached_rows(layer))

    def _ids_of(self, token_id: int | None) -> tuple[int, ...]:
        if not self._ready:
            raise RecordingError(
                "start(prompt_ids) must come before step(), also after a step that failed: its cache is half written"
            )
        if (self._step == 0) != (token_id is None):
            raise InputError(
                "the first step runs the prompt and takes no token; every later step takes one"
            )
        ids = (self._pending or ()) if token_id is None else (token_id,)
        check_ids(ids, int(self.loaded.facts[0]["vocabulary"]), "token ids")
        if self._length + len(ids) > self._limit:
            raise InputError(f"the context of {self._limit} positions is full at step {self._step}")
        return ids

    def _capture_of(self, ids: tuple[int, ...]) -> RanksCapture | None:
        """Return what keeps this step, where the ranks can keep it and nobody must be asked."""
        capture, observer = self._capture, self._observer
        alone = self._interceptor is None and self._audit is None
        if capture is None or len(ids) != 1 or not alone or not isinstance(observer, SlotObserver):
            return None
        return capture if observer.row_slots() is capture.row_slots else None

    def _take(self, capture: RanksCapture, results: Sequence[StepResult]) -> None:
        for rank, result in enumerate(results):
            if result.launches is not None and result.sources is not None:
                self._launches[rank], self._sources[rank] = result.launches, result.sources
        capture.received([result.records or b"" for result in results], self._sources)
        launches = [text for group in zip(*self._launches, strict=True) for text in group]
        self._observer.slots_filled(launches, capture.sources)  # type: ignore[union-attr]

    def _logits_of(self, results: Sequence[StepResult]) -> Tensor:
        digests = [result.digest for result in results]
        odd = next((rank for rank, each in enumerate(digests) if each != digests[0]), None)
        if odd is not None:
            raise RecordingError(
                f"the logits of step {self._step} must be the same on all ranks, and those of rank {odd} have other "
                "bits than rank 0's: the ranks would go on with different tokens, so this execution is void"
            )
        if results[0].logits is None:
            raise RecordingError(f"rank 0 gave no logits in step {self._step}")
        return unpack(results[0].logits)

    # Who watches ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def observed(self, observer: Observer, *, modules: bool = False) -> Iterator[None]:
        """Report to an observer while inside."""
        if self._observer is not None:
            raise RecordingError("this engine is being observed already; one observer at a time")
        self._observer, self._capture, self._modules = observer, None, modules
        with self._watched():
            try:
                yield
            finally:
                self._observer = self._capture = None
                self._operands = self._modules = False

    @contextlib.contextmanager
    def intercepted(self, interceptor: ShrinkInterceptor) -> Iterator[None]:
        """Pass every shrink of every rank through an interceptor while inside."""
        before, self._interceptor = self._interceptor, interceptor
        with self._watched():
            try:
                yield
            finally:
                self._interceptor = before

    @contextlib.contextmanager
    def audited(self, audit: ConsumptionAudit) -> Iterator[None]:
        """Report to an audit while inside."""
        if self._audit is not None:
            raise RecordingError("this engine is being audited already; one audit at a time")
        self._audit = audit
        with self._watched():
            try:
                yield
            finally:
                self._audit = None

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Let ranks tell of what is wanted inside, and of what was wanted before after it."""
        self._watch()
        try:
            yield
        finally:
            if not self.group.trouble:
                self._watch()

    def _watch(self) -> None:
        wanted = (
            self._observer is not None,
            self._interceptor is not None,
            self._audit is not None,
            self._operands,
            self._modules,
        )
        self._talk.all_of(Command("watch", wanted))
        self._launches = [()] * self.ranks
        self._sources = [()] * self.ranks

    def decode_capture(
        self,
        keys: CaptureKeys,
        slots: ArenaSlots,
        device: torch.device,
        *,
        operands: bool,
        buffers: int,
    ) -> ArenaCapture:
        """Return what keeps decode steps for the observer: the ranks do, where their heads can be joined."""
        told = self._observer is None or self._modules
        if told or not RanksCapture.fits(slots, self.ranks):
            return ArenaCapture(keys, slots, device, operands=operands, buffers=buffers)
        if operands != self._operands:
            self._operands = operands
            self._talk.all_of(Command("keep_operands", (operands,)))
        self._capture = RanksCapture(
            keys, slots, device, operands=operands, buffers=buffers, ranks=self.ranks
        )
        return self._capture

    # Its cache ------------------------------------------------------------------------------------

    def read_cache(self) -> tuple[CacheLayer, ...]:
        """Return copies of every layer's cache, the heads of all ranks."""
        if not self._ready:
            return ()
        if self._capture is not None:
            self._capture.settle(now_and_next=True)
        parts = [
            [
                CacheLayer(number, unpack(values), first, window)
                for number, values, first, window in own
            ]
            for own in self._talk.all_of(Command("read_cache"))
        ]
        return joined_cache(parts)

    def read_state(self) -> tuple[StateTensor, ...]:
        """Return nothing; see state_keys."""
        return ()

    def write_cache(
        self, layers: Sequence[CacheLayer], step: int, states: Sequence[StateTensor] = ()
    ) -> None:
        """Replace the whole cache on all ranks."""
        if states:
            raise InputError(
                f"this engine has no recurrent state; got {states[0].key} and {len(states) - 1} more"
            )
        if step < 1:
            raise InputError(
                f"a cache precedes a decode step, so step must be at least 1; got {step}"
            )
        parts = split_cache(layers, self.ranks)
        self._ready = False
        sent = [
            [(one.layer, pack(one.values), one.first_position, one.window) for one in own]
            for own in parts
        ]
        self._talk.each([Command("write_cache", (own, step)) for own in sent])
        self._step = step
        self._length = layers[0].first_position + layers[0].values.shape[1]
        self._ready = True

    def generate_alone(self, prompt_ids: Sequence[int], tokens: int) -> list[float]:
        """Let vLLM generate on all ranks with nothing of ours in it, to compare costs; seconds per step at rank 0."""
        self._ready = False
        seconds: list[float] = self._talk.all_of(
            Command("generate_alone", (tuple(prompt_ids), tokens))
        )[0]
        return seconds
