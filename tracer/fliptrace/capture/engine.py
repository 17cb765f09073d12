"""What an engine must do so that executions on it can be recorded, compared and, later, edited.

An engine runs one prompt at a time, one forward at a time. It owns a model with a LoRA adapter, a cache and a
reduction; it knows nothing of files, verdicts or sampling. Whoever implements these methods as their docstrings say
gets the recorder, ``trace-pair`` and the comparison for nothing. fliptrace.capture.transformers_engine is one
implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fliptrace.capture.arena import Arena
from fliptrace.sites import Site

#: Called with (site index, operand rows [T, K], shrink [T, R] FP32) before the shrink is handed to expand; returns what
#: to hand over instead: the same tensor to leave it alone, or another of the same shape and dtype.
ShrinkInterceptor = Callable[[int, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """One layer's cache in canonical form.

    Attributes:
        layer: 0-based layer number.
        values: keys, then values: [2, T, kv_heads, head_dim] in the cache's dtype, on its device, not aliased.
        first_position: absolute position of the first row; larger than 0 once a sliding window has moved on.
        window: how many positions attention sees (the row's own included), None for full attention.
        shares_with: the layer whose cache this layer reads, None when it has its own.
    """

    layer: int
    values: Tensor
    first_position: int
    window: int | None
    shares_with: int | None = None


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a layer's recurrent state, whole: it has no token axis, and every step replaces all of it.

    Attributes:
        layer: 0-based layer number.
        name: which of the layer's tensors: ``conv`` for the convolution's last inputs, ``ssm`` for the state proper.
        values: of the engine's own shape and dtype, on its device, not aliased.
    """

    layer: int
    name: str
    values: Tensor

    @property
    def key(self) -> str:
        """The key of its record."""
        return state_key(self.layer, self.name)


def state_key(layer: int, name: str) -> str:
    """Return the key under which a tensor of recurrent state is recorded."""
    return f"state.{layer}.{name}"


def state_section(keys: Sequence[tuple[int, str]]) -> dict[str, list[int]]:
    """Return what a manifest's engine section says of recurrent state: its layers; nothing without any."""
    layers = list(dict.fromkeys(layer for layer, _ in keys))
    return {"state_layers": layers} if layers else {}


class Observer(Protocol):
    """What an engine tells while it runs. Tensors are only lent: an observer copies what it wants to keep."""

    def begin_step(self, step: int, first_position: int, token_ids: Sequence[int]) -> None:
        """A forward is about to run over ``token_ids``, whose first row has absolute position ``first_position``."""

    def shrink(self, site: int, operand: Tensor, output: Tensor, launch: str) -> None:
        """A shrink ran: operand rows [T, K], output [T, R] FP32 exactly as handed to expand, and its launch."""

    def projection(self, site: int, output: Tensor) -> None:
        """The LoRA layer at a site returned [T, N]: base projection plus expanded shrink, in the model's dtype."""

    def cache_rows(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """A layer is about to cache new rows: keys and values, each [kv_heads, T, head_dim]."""

    def operation(self, key: str, is_module: bool, inputs: Tensor, outputs: Tensor) -> None:
        """A module or functional operation ran; row digests int64 [rows, 2] of what each row depends on, and gave."""

    def end_step(self, logits: Tensor) -> None:
        """The forward is over; logits [vocabulary] of the last row, in the head's dtype."""


@dataclass(frozen=True, slots=True)
class RowSlots:
    """Room that an observer lends for what a forward over one token reports.

    Attributes:
        arena: whose slots these are.
        shrinks: number of each site's slot for its shrink [1, R].
        operands: likewise for its operand [1, 1, K].
        projections: likewise for its projection [1, 1, N].
        caches: layer -> number of the slot for its key row [kv_heads, 1, head_dim]; the value row's is the next.
        every_operand: each site's operand is wanted; else that of one site of those that read the same.
    """

    arena: Arena
    shrinks: range
    operands: range
    projections: range
    caches: Mapping[int, int]
    every_operand: bool


@runtime_checkable
class SlotObserver(Observer, Protocol):
    """An observer that lets an engine fill its slots instead of telling it of every record by a call."""

    def row_slots(self) -> RowSlots | None:
        """Return room for the forward that began, None where each record must be reported by its own call."""
        ...

    def slots_filled(self, launches: Sequence[str], sources: Sequence[int]) -> None:
        """Everything lies in the slots now.

        Args:
            launches: per site.
            sources: per site the site whose slot holds its operand.
        """
        ...


class ConsumptionAudit(Protocol):
    """What arrives at those who read it: evidence that an edit did. Tensors are only lent and must not be changed."""

    def tokens_consumed(self, token_ids: Tensor) -> None:
        """The input embedding got these token ids, int64 [T]."""

    def shrink_consumed(self, site: int, z: Tensor) -> None:
        """The operation that rounds a shrink for expand got z [T, R] FP32; called inside it, before it rounds."""

    def needs_cached_rows(self, layer: int) -> bool:
        """Tell before a layer's attention whether rows cached in earlier steps must be shown; asked in every step."""
        ...

    def cache_consumed(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Attention of a layer gets keys and values, each [kv_heads, T, head_dim]: the cached rows, then the new.

        Where needs_cached_rows said no, the new rows may come alone.
        """

    def state_consumed(self, layer: int, name: str, values: Tensor) -> None:
        """A layer with recurrent state goes on from this tensor of it; not called in the prefill."""

    def residual(self, values: Tensor) -> None:
        """The layer stack ended with this residual stream, all rows of the step: [T, hidden]."""


class Engine(Protocol):
    """A model that can be stepped, observed, intercepted and audited."""

    @property
    def sites(self) -> tuple[Site, ...]:
        """The shrinks' sites in execution order; a site's index here is its number everywhere."""
        ...

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that own a cache, in execution order."""
        ...

    @property
    def cache_windows(self) -> Mapping[int, int | None]:
        """How many positions attention of each cache layer sees, the row's own included; None for full attention."""
        ...

    @property
    def state_keys(self) -> tuple[tuple[int, str], ...]:
        """(layer, name) of every tensor of recurrent state, in the order of read_state; empty without such layers."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the tensors are that the engine lends, takes and returns."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which shrinks are rounded."""
        ...

    @property
    def step_number(self) -> int:
        """The number of the next step: 0 after start."""
        ...

    @property
    def context_length(self) -> int | None:
        """How many positions the model has, None when it does not say."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, as transformers makes it: it turns prompts into ids and has the chat template."""
        ...

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a generation: the generation configuration's, else the tokenizer's; may be empty."""
        ...

    def describe(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the manifest's sections that the engine knows, as read in the process that runs."""
        ...

    def not_observed(self) -> tuple[str, ...]:
        """Return sentences, each one thing that this engine cannot see in this model."""
        ...

    def shrink_weight(self, site: int) -> Tensor:
        """Return a copy of A, [R, K], as the shrink at a site reads it."""
        ...

    def text_of(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids, with the special tokens in it or without them."""
        ...

    @property
    def simulates_atomics(self) -> bool:
        """True where ``atomic`` takes its arrival orders from a seeded schedule."""
        ...

    def set_reduction(self, reduction: str, seed: int | None = None) -> None:
        """Choose how shrinks sum from now on.

        Args:
            reduction: an identity such as ``atomic:8``, short or long.
            seed: arrival schedule of simulated atomics; required for ``atomic`` where the hardware has no atomics of
                its own, refused (must be None) where it has.
        """
        ...

    def reducing(self, reduction: str, seed: int | None = None) -> AbstractContextManager[None]:
        """Sum under another reduction while inside; see set_reduction."""
        ...

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Forget the cache and queue a prompt, to be run by the next step.

        Raises:
            InputError: empty, an id outside the vocabulary, or longer than the context.
        """
        ...

    def step(self, token_id: int | None = None) -> Tensor:
        """Run one forward: the prompt first (token_id None), then one token each time.

        Returns:
            Logits [vocabulary] of the last row, on the engine's device, in the head's dtype.

        Raises:
            InputError: the context is full.
        """
        ...

    def observed(
        self, observer: Observer, *, modules: bool = False
    ) -> AbstractContextManager[None]:
        """Report to an observer while inside; without one an engine has no hooks at all.

        Args:
            observer: who is told.
            modules: also report every module and functional operation.
        """
        ...

    def intercepted(self, interceptor: ShrinkInterceptor) -> AbstractContextManager[None]:
        """Pass every shrink through an interceptor while inside; the observer sees what the interceptor returned."""
        ...

    def audited(self, audit: ConsumptionAudit) -> AbstractContextManager[None]:
        """Report to an audit while inside; one at a time."""
        ...

    def read_cache(self) -> tuple[CacheLayer, ...]:
        """Return copies of every layer's cache in canonical form."""
        ...

    def read_state(self) -> tuple[StateTensor, ...]:
        """Return copies of the recurrent state after the last step; empty before the first."""
        ...

    def write_cache(
        self, layers: Sequence[CacheLayer], step: int, states: Sequence[StateTensor] = ()
    ) -> None:
        """Replace the whole cache, recurrent state included, and say which step comes next.

        Args:
            layers: every layer that owns a cache, once each.
            step: the next step, at least 1.
            states: every tensor of ``state_keys``, once each.

        Raises:
            InputError: a layer or state is missing, or its shape, dtype or positions do not fit.
        """
        ...
