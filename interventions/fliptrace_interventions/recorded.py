"""One recorded execution, as what it gives to experiments: copies of its tensors, checked to stay what they were.

Tensors that are asked for again and again are kept on the engine's device. Whoever asks gets a copy; ``changes`` says
whether somebody reached the kept ones all the same.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from fliptrace.capture.engine import CacheLayer, Engine, StateTensor, state_key
from fliptrace.errors import InputError, SiteNotFoundError
from fliptrace.numerics import digest_hex, digest_tensor
from fliptrace.trace import Frame, Kind, Layout, StepRecord, Trace
from fliptrace_interventions.digests import digest_tensors
from fliptrace_interventions.identity import check_trace
from fliptrace_interventions.replayed_states import replayed_state

#: How many bytes of shrinks are kept per execution; the least recently used steps are read again when needed.
KEPT_SHRINK_BYTES = 32 * 2**20


@dataclass(frozen=True)
class _KeptShrinks:
    """All shrinks of one step.

    Attributes:
        payload: FP32 elements one after another, on the engine's device.
        layout: which elements are whose.
        digests: of the records, as they were recorded, int64 [sites, 2] on the host.
        seal: digest of the payload as it was read.
    """

    payload: Tensor
    layout: Layout
    digests: Tensor
    seal: Tensor


@dataclass(frozen=True)
class _KeptCache:
    """All cache rows of the first steps.

    Attributes:
        steps: how many steps wrote them.
        layers: per cache layer [2, T, kv_heads, head_dim], on the engine's device.
        seals: digests of the layers as they were read, int64 [layers, 2].
    """

    steps: int
    layers: dict[int, Tensor]
    seals: Tensor


class RecordedExecution:
    """A trace that belongs to an engine's model.

    Attributes:
        which: ``reference`` or ``candidate``.
        trace: the trace.
    """

    def __init__(self, trace: Trace, engine: Engine, which: str = "reference") -> None:
        """Check that the trace belongs to the engine.

        Raises:
            InputError: redacted, cut short, or of another model, adapter, dtype, attention or set of sites.
        """
        check_trace(trace, engine, which)
        self.which = which
        self.trace = trace
        self._engine = engine
        self._shrinks: OrderedDict[int, _KeptShrinks] = OrderedDict()
        self._operands: tuple[int, Frame] | None = None
        self._cache: _KeptCache | None = None
        self._row_shapes: dict[str, tuple[int, ...]] = {}
        self._cache_digests: dict[int, dict[int, str]] = {}
        self._fingerprint = ""
        self._replayed: dict[int, tuple[StateTensor, ...]] = {}
        self._handed_steps: set[int] = set()
        self._handed_cache = False

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return self.trace.steps[0].token_ids

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated token ids."""
        return tuple(self.trace.generated_ids)

    @property
    def steps(self) -> int:
        """How many steps were recorded."""
        return len(self.trace.steps)

    def step(self, step: int) -> StepRecord:
        """Return what is known of a step.

        Raises:
            SiteNotFoundError: no such step.
        """
        if not 0 <= step < self.steps:
            raise SiteNotFoundError(
                f"the {self.which} has steps 0 to {self.steps - 1}; got step {step}"
            )
        return self.trace.steps[step]

    def positions(self, step: int) -> range:
        """Absolute token positions of a step's rows."""
        record = self.step(step)
        return range(record.first_position, record.first_position + len(record.token_ids))

    def shrink(self, step: int, site: int) -> Tensor:
        """Return a copy of a recorded shrink, FP32 [T, R], on the engine's device."""
        kept = self._kept_shrinks(step)
        self._handed_steps.add(step)
        offsets = kept.layout.offsets
        flat = kept.payload[offsets[site] // 4 : offsets[site + 1] // 4]
        return self._copy(flat.view(kept.layout.entries[site].shape))

    def shrink_digest(self, step: int, site: int) -> str:
        """Return the digest of a shrink as it was recorded, 32 hexadecimal digits."""
        return digest_hex(self._kept_shrinks(step).digests[site])

    def operand_digests(self, step: int, site: int) -> Tensor:
        """Return the row digests of a shrink's operand, int64 [T, 2], on the host."""
        if self._operands is None or self._operands[0] != step:
            self._operands = step, self._frame(step, Kind.OPERAND)
        return self._operands[1].tensor(site)

    def cache_rows(self, step: int, layer: int) -> Tensor:
        """Return a copy of the rows that a step wrote: [2, T, kv_heads, head_dim]."""
        rows = self.positions(step)
        self._handed_cache = True
        return self._copy(self._kept_cache(step + 1).layers[layer][:, rows.start : rows.stop])

    def cache_shape(self, step: int, layer: int) -> tuple[int, ...]:
        """Return the shape of a layer's cache before a step: (2, T, kv_heads, head_dim)."""
        if not self._row_shapes:
            layout = self._frame(0, Kind.CACHE).layout
            self._row_shapes = {entry.key: entry.shape[2:] for entry in layout.entries}
        length = self.positions(step).start - self.first_kept_position(step, layer)
        return (2, length, *self._row_shapes[f"cache.{layer}"])

    def cache_before(self, step: int) -> tuple[CacheLayer, ...]:
        """Return a copy of the whole cache as it was before a step, sliding windows as far as they keep rows."""
        if step < 1:
            raise InputError(
                f"there is no cache before step {step}; the first is that before step 1"
            )
        length = self.positions(step).start
        kept = self._kept_cache(step)
        self._handed_cache = True
        layers = []
        for layer in self._engine.cache_layers:
            first = self.first_kept_position(step, layer)
            values = self._copy(kept.layers[layer][:, first:length])
            layers.append(CacheLayer(layer, values, first, self._engine.cache_windows[layer]))
        return tuple(layers)

    def state_after(self, step: int) -> tuple[StateTensor, ...]:
        """Return the recurrent state that a step left; empty where the model keeps none.

        Where the trace holds its digests alone, the steps since the last whole state are replayed on the engine, whose
        cache is then another; what comes of it must have the recorded digests.

        Raises:
            InputError: it has others, so that this machine does not compute what was recorded.
        """
        if not self._engine.state_keys:
            return ()
        frame = self.trace.frame(self.step(step).step, Kind.STATE)
        if frame is None:
            if step not in self._replayed:
                self._replayed = {step: replayed_state(self._engine, self, step)}
            return tuple(
                StateTensor(state.layer, state.name, self._copy(state.values))
                for state in self._replayed[step]
            )
        return tuple(
            StateTensor(layer, name, frame.tensor(state_key(layer, name)).to(self._engine.device))
            for layer, name in self._engine.state_keys
        )

    def state_digests(self, step: int) -> Tensor:
        """Return the digests of the recurrent state that a step left, int64 [states, 2], on the host."""
        frame = self.trace.frame(self.step(step).step, Kind.STATE)
        if frame is not None and frame.digests is not None:
            return frame.digests
        held = self._frame(step, Kind.STATE_DIGEST)
        return torch.cat([held.tensor(number) for number in range(len(held.layout.entries))])

    def last_whole_state(self, step: int) -> int:
        """Return the last step up to this one whose recurrent state the trace holds whole."""
        return next(
            at for at in range(step, -1, -1) if self.trace.frame(at, Kind.STATE) is not None
        )

    def state_before(self, step: int) -> tuple[StateTensor, ...]:
        """Return the recurrent state as it was before a step, which the step before it left."""
        if step < 1:
            raise InputError(
                f"there is no recurrent state before step {step}; the first is that before step 1"
            )
        return self.state_after(step - 1)

    def cache_digests(self, step: int) -> dict[int, str]:
        """Return the digest of every layer's cache before a step, 32 hexadecimal digits each."""
        found = self._cache_digests.get(step)
        if found is None:
            layers = self.cache_before(step)
            digests = digest_tensors([layer.values for layer in layers]).tolist()
            found = self._cache_digests[step] = {
                layer.layer: digest_hex(digest)
                for layer, digest in zip(layers, digests, strict=True)
            }
        return found

    def first_kept_position(self, step: int, layer: int) -> int:
        """Return the first position that a layer's cache still holds before a step."""
        length = self.positions(step).start
        window = self._engine.cache_windows[layer]
        return 0 if window is None else length - min(length, window - 1)

    def logits_digest(self, step: int) -> str:
        """Return the digest of a step's logits, 32 hexadecimal digits."""
        return digest_hex(self.trace.record("logits", Kind.LOGITS_DIGEST, self.step(step).step)[0])

    def fingerprint(self) -> str:
        """Return a hash of what the trace holds: the same for the same recording, wherever its file lies."""
        if not self._fingerprint:
            content = hashlib.sha256(self.trace.manifest.to_json().encode())
            for step in self.trace.steps:
                content.update(repr(step).encode())
            for kind in (
                Kind.SHRINK,
                Kind.OPERAND,
                Kind.CACHE,
                Kind.STATE,
                Kind.STATE_DIGEST,
                Kind.LOGITS_DIGEST,
            ):
                for frame in self.trace.source.frames(kind):
                    sealed = frame.payload if frame.digests is None else frame.digests.numpy()
                    content.update(bytes(sealed))
            self._fingerprint = content.hexdigest()[:32]
        return self._fingerprint

    def changes(self, *, everything: bool = True) -> tuple[str, ...]:
        """Name every tensor kept here that is no longer what was read from the trace; none when all is well.

        Args:
            everything: look at all that is kept; else only at what was handed out since this was last called.
        """
        steps = self._shrinks.keys() if everything else self._handed_steps & self._shrinks.keys()
        found = [
            f"the {self.which}'s shrinks of step {step}"
            for step in sorted(steps)
            if not torch.equal(digest_tensor(self._shrinks[step].payload), self._shrinks[step].seal)
        ]
        if self._cache is not None and (everything or self._handed_cache):
            equal = (
                (digest_tensors(list(self._cache.layers.values())) == self._cache.seals)
                .all(1)
                .tolist()
            )
            found += [
                f"the {self.which}'s cached rows of layer {layer}"
                for layer, same in zip(self._cache.layers, equal, strict=True)
                if not same
            ]
        self._handed_steps.clear()
        self._handed_cache = False
        return tuple(found)

    def keep(self, steps: int) -> None:
        """Read the cache rows of the first steps at once, rather than again whenever a later one is asked for."""
        self._kept_cache(steps)

    def forget(self) -> None:
        """Drop what is kept; it is read from the trace again when asked for."""
        self._shrinks.clear()
        self._operands = self._cache = None

    @staticmethod
    def _copy(kept: Tensor) -> Tensor:
        """Nobody outside may reach what is kept."""
        return kept.clone(memory_format=torch.contiguous_format)

    def _frame(self, step: int, kind: Kind) -> Frame:
        frame = self.trace.frame(self.step(step).step, kind)
        if frame is None:
            raise SiteNotFoundError(f"{self.trace.name} holds no {kind} records in step {step}")
        return frame

    def _kept_shrinks(self, step: int) -> _KeptShrinks:
        found = self._shrinks.get(step)
        if found is not None:
            self._shrinks.move_to_end(step)
            return found
        frame = self._frame(step, Kind.SHRINK)
        if any(entry.torch_dtype is not torch.float32 for entry in frame.layout.entries):
            raise InputError(f"shrinks are FP32; {self.trace.name} holds others in step {step}")
        if frame.digests is None:
            raise InputError(f"{self.trace.name} holds no digests of its shrinks in step {step}")
        payload = torch.frombuffer(bytearray(frame.payload), dtype=torch.float32)
        payload = payload.to(self._engine.device)
        found = _KeptShrinks(payload, frame.layout, frame.digests, digest_tensor(payload))
        self._shrinks[step] = found
        size = sum(kept.payload.numel() * 4 for kept in self._shrinks.values())
        while size > KEPT_SHRINK_BYTES and len(self._shrinks) > 1:
            _, dropped = self._shrinks.popitem(last=False)
            size -= dropped.payload.numel() * 4
        return found

    def _kept_cache(self, steps: int) -> _KeptCache:
        """Return the rows of the first steps, at least ``steps`` of them."""
        if self._cache is not None and self._cache.steps >= steps:
            return self._cache
        pieces: dict[int, list[Tensor]] = {layer: [] for layer in self._engine.cache_layers}
        for step in range(steps):
            frame = self._frame(step, Kind.CACHE)
            for layer, rows in pieces.items():
                rows.append(frame.tensor(f"cache.{layer}"))
        layers = {
            layer: torch.cat(rows, dim=1).to(self._engine.device) for layer, rows in pieces.items()
        }
        self._cache = _KeptCache(steps, layers, digest_tensors(list(layers.values())))
        return self._cache


def recorded_parts(execution: RecordedExecution, step: int) -> dict[int | tuple[int, str], Tensor]:
    """Return all that an execution kept before a step: keys and values by layer, recurrent state by layer and name."""
    parts: dict[int | tuple[int, str], Tensor] = {
        layer.layer: layer.values for layer in execution.cache_before(step)
    }
    return parts | {
        (state.layer, state.name): state.values for state in execution.state_before(step)
    }
