"""Record one execution: copy at capture time, digest where the tensors live, hand whole steps to the store.

The prefill, and any step of several rows, is kept tensor by tensor; decode steps go through buffers of fixed size
(step_capture). Either way the caller's thread hands a step over and goes on; the store's thread waits for the copies,
assembles the frames and commits. A site that did not report, or reported twice, ends the recording: a trace with a hole
never looks like an equal one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fliptrace.capture.arena import ArenaSlots
from fliptrace.capture.cache_digest import RollingCacheDigest
from fliptrace.capture.decoding import Choice
from fliptrace.capture.engine import CacheLayer, Engine, RowSlots, StateTensor
from fliptrace.capture.frames import (
    OperationLayouts,
    operation_frames,
    single_frame,
    state_frame,
    tensor_bytes,
)
from fliptrace.capture.step_capture import (
    ArenaCapture,
    CaptureKeys,
    RowsCapture,
    StepCapture,
)
from fliptrace.errors import RecordingError
from fliptrace.numerics import digest_hex, digest_tensor
from fliptrace.store import TraceWriter
from fliptrace.trace import Frame, Kind, StepRecord

#: Full logits are kept where the two best are at most this many ULP of the head's dtype apart: where flips happen.
NEAR_TIE_ULP = 2
#: Every how many steps the digest of the whole cache is recomputed from the cache itself.
CACHE_CHECK_STEPS = 64
#: Host buffers of the decode capture beyond those that the store's queue can hold.
_SPARE_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class RecorderOptions:
    """What to record beyond shrinks, operand and projection digests, cache rows and the largest logits.

    Attributes:
        operands: keep the shrinks' inputs whole, not as digests only.
        modules: digests around every module and functional operation.
        state_every: keep recurrent state whole in every so many steps, the prefill first; its digests in the others.
        full_logits: keep every step's logits whole; else only where the two best are NEAR_TIE_ULP or closer.
        redaction_key: when given, token ids are stored as keyed hashes and no logits are kept whole.
    """

    operands: bool = False
    modules: bool = False
    full_logits: bool = False
    state_every: int = 1
    redaction_key: bytes | None = field(default=None, repr=False)

    def describe(self) -> dict[str, object]:
        """Return the manifest's words for it."""
        return {
            "operands": "values and row digests" if self.operands else "row digests",
            "modules": self.modules,
            "logits": "whole"
            if self.full_logits
            else f"64 largest, whole where the top two are within {NEAR_TIE_ULP} ULP",
            "cache_check_steps": CACHE_CHECK_STEPS,
            **({} if self.state_every == 1 else {"state_every": self.state_every}),
            "redacted": self.redaction_key is not None,
        }


@runtime_checkable
class DecodeCapturer(Protocol):
    """An engine that chooses itself what keeps decode steps, since its tensors lie in other processes, for example."""

    def decode_capture(
        self,
        keys: CaptureKeys,
        slots: ArenaSlots,
        device: torch.device,
        *,
        operands: bool,
        buffers: int,
    ) -> ArenaCapture:
        """Return it; the arguments are those of ArenaCapture."""
        ...


class Recorder:
    """Observes an engine and writes a trace; one recorder per execution."""

    def __init__(
        self, engine: Engine, writer: TraceWriter, options: RecorderOptions, *, queue_steps: int = 2
    ) -> None:
        """Prepare to record what ``engine`` runs next.

        Args:
            engine: its sites and cache layers are what every step must report.
            writer: an open trace; closed by whoever opened it.
            options: what to record.
            queue_steps: the writer's.
        """
        self.engine = engine
        self.writer = writer
        self.options = options
        self._sites = engine.sites
        self._keys = CaptureKeys(tuple(site.path for site in engine.sites), engine.cache_layers)
        self._buffers = queue_steps + _SPARE_BUFFERS
        self._capture: StepCapture | None = None
        self._arena: ArenaCapture | None = None
        self._rolling: RollingCacheDigest | None = None
        self._step = -1
        self._first_position = 0
        self._token_ids: tuple[int, ...] = ()
        self._launches: list[str] = []
        self._projected: list[bool] = []
        self._cached: set[int] = set()
        self._operations: list[tuple[str, bool, Tensor, Tensor]] = []
        self._operation_layouts = OperationLayouts()

    # What the engine reports ----------------------------------------------------------------------

    def begin_step(self, step: int, first_position: int, token_ids: Sequence[int]) -> None:
        """A forward begins.

        Raises:
            RecordingError: the first step is not the prefill, so that the cache before it is unknown.
        """
        if self._rolling is None and step != 0:
            raise RecordingError(
                f"a recording begins with the prefill, step 0; step {step} came first, and what the cache held before "
                "it was not seen being written"
            )
        self._step, self._first_position, self._token_ids = step, first_position, tuple(token_ids)
        self._launches = [""] * len(self._sites)
        self._projected = [False] * len(self._sites)
        self._cached = set()
        self._operations = []
        if self._arena is not None and len(token_ids) == 1:
            self._capture = self._arena
        else:
            self._capture = RowsCapture(self._keys, operands=self.options.operands)

    def shrink(self, site: int, operand: Tensor, output: Tensor, launch: str) -> None:
        """A shrink ran."""
        if self._launches[site]:
            raise RecordingError(
                f"{self._sites[site].name} reported two shrinks in step {self._step}"
            )
        self._launches[site] = launch
        self._running().shrink(site, operand, output)

    def projection(self, site: int, output: Tensor) -> None:
        """A LoRA layer returned."""
        self._projected[site] = True
        self._running().projection(site, output)

    def cache_rows(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """A layer caches new rows."""
        if layer in self._cached:
            raise RecordingError(f"layer {layer} cached rows twice in step {self._step}")
        self._cached.add(layer)
        self._running().cache_rows(layer, keys, values)

    def row_slots(self) -> RowSlots | None:
        """Lend the decode capture's slots; see fliptrace.capture.engine.SlotObserver."""
        arena = self._arena
        return arena.row_slots if arena is not None and self._capture is arena else None

    def slots_filled(self, launches: Sequence[str], sources: Sequence[int]) -> None:
        """An engine filled the slots of this step.

        Raises:
            RecordingError: no slots were lent for it.
        """
        if self._arena is None or self._capture is not self._arena:
            raise RecordingError(
                f"slots were filled in step {self._step}, for which none were lent"
            )
        self._arena.filled(sources)
        self._launches = list(launches)
        self._projected = [True] * len(self._sites)
        self._cached = set(self._keys.cache_layers)

    def operation(self, key: str, is_module: bool, inputs: Tensor, outputs: Tensor) -> None:
        """A module or functional operation ran."""
        self._operations.append((key, is_module, inputs, outputs))

    def end_step(self, logits: Tensor) -> None:
        """The forward is over: everything expected must have reported.

        Raises:
            RecordingError: a hook never fired.
        """
        for what, reported in (("shrink", self._launches), ("projection", self._projected)):
            if not all(reported):
                silent = next(
                    site for site, fired in zip(self._sites, reported, strict=True) if not fired
                )
                fired = sum(map(bool, reported))
                raise RecordingError(
                    f"{silent.name} reported no {what} in step {self._step}; {fired} of {len(self._sites)} sites did. "
                    "The hook never fired: the layer was skipped, merged or its adapter disabled, so this execution "
                    "cannot be recorded"
                )
        missing = [layer for layer in self._keys.cache_layers if layer not in self._cached]
        if missing:
            raise RecordingError(
                f"layer {missing[0]} cached no rows in step {self._step}; {len(self._cached)} of "
                f"{len(self._keys.cache_layers)} cache layers did, so the cache cannot be recorded"
            )

    # What the driver reports ----------------------------------------------------------------------

    def complete_step(self, step: int, choice: Choice, logits: Tensor) -> None:
        """Hand the finished step, with the token chosen from it, to the store.

        Raises:
            RecordingError: the cache is not what was seen being written to it.
            StorageError: the store's thread could not write an earlier step.
        """
        if step != self._step:
            raise RecordingError(f"step {step} was completed, but step {self._step} was recorded")
        capture = self._running()
        states = self._read_states()
        state_digests = [digest_tensor(state.values) for state in states]
        content = self._due_content(logits.device)
        # A capture may roll while a later step runs.
        captured = capture.finish(logits, functools.partial(self._roll, self._first_position))
        full_digest = self._rolling.check(content, step) if content and self._rolling else ""
        whole = self.options.full_logits or _near_tie(choice, logits.dtype)
        whole_logits = (
            logits.detach().clone() if whole and self.options.redaction_key is None else None
        )
        launches = tuple(self._launches)
        record = StepRecord(
            step=step,
            first_position=self._first_position,
            token_ids=self._hidden(self._token_ids),
            chosen=self._hidden((choice.token,))[0],
            top_values=choice.top_values,
            top_ids=(self._hidden(choice.top_ids)[0], self._hidden(choice.top_ids)[1]),
            tied=choice.tied,
            cache_digest="",
            cache_digest_full=full_digest,
            frames=(),
        )
        operations = self._operations

        def assemble() -> tuple[StepRecord, list[Frame]]:
            frames = captured.frames(step, launches)
            if states:
                whole_states = step % self.options.state_every == 0
                digests = torch.stack(state_digests)
                frames.append(state_frame(step, states, digests, whole=whole_states))
            if self.options.redaction_key is not None:
                frames = [self._redacted(frame) for frame in frames]
            if whole_logits is not None:
                frames.append(single_frame(step, Kind.LOGITS_FULL, whole_logits.cpu()))
            frames.extend(operation_frames(step, operations, self._operation_layouts))
            kinds = tuple(str(frame.kind) for frame in frames)
            return dataclasses.replace(
                record, cache_digest=digest_hex(captured.cache_digest()), frames=kinds
            ), frames

        self.writer.write_step(None, assemble)
        if self._arena is None and isinstance(capture, RowsCapture):
            engine = self.engine
            make = engine.decode_capture if isinstance(engine, DecodeCapturer) else ArenaCapture
            self._arena = make(
                self._keys,
                capture.slots,
                logits.device,
                operands=self.options.operands,
                buffers=self._buffers,
            )
        self._capture = None

    def finish(self) -> None:
        """Check the cache a last time; called after the last step.

        Raises:
            RecordingError: something changed the cache since the last check.
        """
        if self._rolling is not None:
            self._rolling.check(self.engine.read_cache(), self._step)

    def _due_content(self, device: torch.device) -> tuple[CacheLayer, ...]:
        """Return the cache at the prefill and every 64 steps, when its digest is checked against it; else nothing."""
        content = self.engine.read_cache() if self._step % CACHE_CHECK_STEPS == 0 else ()
        if self._rolling is None:
            self._rolling = RollingCacheDigest(self._keys.cache_layers, device)
            self._rolling.watch_windows({layer.layer: layer.window for layer in content})
        return content

    def _read_states(self) -> tuple[StateTensor, ...]:
        """Return the recurrent state after the step, of which every tensor must be there.

        Raises:
            RecordingError: one is not.
        """
        states = self.engine.read_state()
        found = [(state.layer, state.name) for state in states]
        if found != list(self.engine.state_keys):
            raise RecordingError(
                f"step {self._step} left the recurrent states {found}, where {list(self.engine.state_keys)} were "
                "expected: a layer did not run, so this execution cannot be recorded"
            )
        return states

    def _roll(self, first_position: int, row_digests: Tensor) -> Tensor:
        """Add the step's rows to the cache's digest, int64 [2]."""
        if self._rolling is None:
            raise RecordingError("the engine reported cache rows outside a step")
        self._rolling.add(row_digests, first_position)
        return self._rolling.value

    def _running(self) -> StepCapture:
        if self._capture is None:
            raise RecordingError("the engine reported a record outside a step")
        return self._capture

    def _hidden(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return token ids as they are stored: keyed hashes of them when the trace is redacted."""
        key = self.options.redaction_key
        if key is None:
            return tuple(token_ids)
        return tuple(keyed_hash(token, key) for token in token_ids)

    def _redacted(self, frame: Frame) -> Frame:
        if frame.kind is not Kind.LOGITS_TOP_IDS:
            return frame
        hidden = torch.tensor(self._hidden(frame.tensor(0).tolist()), dtype=torch.int64)
        return Frame(frame.step, frame.kind, frame.layout, tensor_bytes(hidden), frame.digests)


def keyed_hash(token: int, key: bytes) -> int:
    """Return a 56-bit keyed hash of a token id: equal ids stay equal within one key, and the key is never stored."""
    return int.from_bytes(
        hashlib.blake2b(token.to_bytes(8, "little"), key=key, digest_size=7).digest(), "little"
    )


def _near_tie(choice: Choice, dtype: torch.dtype) -> bool:
    """Tell whether the two best logits are at most NEAR_TIE_ULP of the head's dtype apart."""
    best, second = choice.top_values
    _, exponent = math.frexp(best)
    return best - second <= NEAR_TIE_ULP * torch.finfo(dtype).eps * 2.0 ** (exponent - 1)
