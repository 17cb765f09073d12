"""A rank's observer, interceptor and audit: tells the driver of everything, or keeps a decode step for one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from fliptrace.capture.arena import ArenaSlots, Slot
from fliptrace.capture.engine import RowSlots
from fliptrace.capture.step_capture import ArenaCapture, CaptureKeys
from fliptrace.capture.vllm_engine.tensor_parallel.joining import Operation, packed_operations
from fliptrace.capture.vllm_engine.tensor_parallel.messages import (
    Event,
    Packed,
    Question,
    pack,
    receive,
    send,
    unpack,
)
from fliptrace.errors import RecordingError


class Telling:
    """Stands in the rank's process for those who watch from the driver's.

    Attributes:
        capturing: the step that runs is kept in slots here and exported whole; else each record is told at once.
        whole_layers: of which an audit wants rows that were cached in earlier steps.
    """

    def __init__(
        self,
        connection: Connection,
        sites: Sequence[str],
        cache_layers: Sequence[int],
        device: torch.device,
    ) -> None:
        """Know the rank's sites and caches."""
        self.capturing = False
        self.whole_layers: frozenset[int] = frozenset()
        self._connection = connection
        self._keys = CaptureKeys(tuple(sites), tuple(cache_layers))
        self._device = device
        self._sent_operand: Tensor | None = None
        self._operations: list[Operation] = []
        self._operands = False
        self._slots = ArenaSlots()
        self._capture: ArenaCapture | None = None
        self._launches: tuple[str, ...] | None = None
        self._sources: tuple[int, ...] | None = None
        self._sent: tuple[tuple[str, ...], tuple[int, ...]] | None = None

    def reset(self, *, operands: bool) -> None:
        """Begin again for those who watch from now on.

        What a step's slots look like is kept: an interceptor may come and go between a recording's decode steps.

        Args:
            operands: whole operands are exported, too.
        """
        self.keep_operands(operands)

    def keep_operands(self, operands: bool) -> None:
        """Export whole operands, or not; decided before the first step is exported."""
        self._operands, self._capture, self._sent = operands, None, None

    # Observer -------------------------------------------------------------------------------------

    def begin_step(self, _step: int, _first_position: int, _token_ids: Sequence[int]) -> None:
        """The driver knows."""
        self._sent_operand = None
        self._operations = []

    def shrink(self, site: int, operand: Tensor, output: Tensor, launch: str) -> None:
        """See Observer."""
        self._slots.shrinks[site] = Slot((1, output.shape[-1]), output.dtype)
        self._slots.operands[site] = Slot((1, 1, operand.shape[-1]), operand.dtype)
        self._tell("shrink", site, self._operand(operand), pack(output), launch)

    def projection(self, site: int, output: Tensor) -> None:
        """See Observer."""
        self._slots.projections[site] = Slot((1, 1, output.shape[-1]), output.dtype)
        self._tell("projection", site, pack(output))

    def cache_rows(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See Observer."""
        self._slots.caches[layer] = Slot((keys.shape[0], 1, keys.shape[2]), keys.dtype)
        self._tell("cache_rows", layer, pack(keys), pack(values))

    def operation(self, key: str, is_module: bool, inputs: Tensor, outputs: Tensor) -> None:
        """See Observer; told all together when the step ends."""
        self._operations.append(Operation(key, is_module, inputs, outputs))

    def end_step(self, logits: Tensor) -> None:
        """Learn the last slot, and tell of the step's operations."""
        if self._operations:
            self._tell("operations", None, *packed_operations(self._operations))
            self._operations = []
        self._slots.logits = Slot(tuple(logits.shape), logits.dtype)
        self._sent_operand = None

    def row_slots(self) -> RowSlots | None:
        """Lend slots where the driver wants the step in one transfer."""
        if not self.capturing:
            return None
        if self._capture is None:
            self._capture = ArenaCapture(
                self._keys, self._slots, self._device, operands=self._operands, buffers=1
            )
        return self._capture.row_slots

    def slots_filled(self, launches: Sequence[str], sources: Sequence[int]) -> None:
        """Everything lies in the slots."""
        self._launches, self._sources = tuple(launches), tuple(sources)

    def export(
        self, logits: Tensor
    ) -> tuple[bytes, tuple[int, int], tuple[str, ...] | None, tuple[int, ...] | None]:
        """Digest what lies in the slots and return all that travels; see captures.RanksCapture.

        Returns:
            The bytes, the digest of the logits, launches and sources where they are new.

        Raises:
            RecordingError: the slots were not filled in this step.
        """
        launches, sources = self._launches, self._sources
        if self._capture is None or launches is None or sources is None:
            raise RecordingError("a step was to be kept in slots, and something else watched it")
        self._launches = self._sources = None
        host = self._capture.transfer(logits)
        first, second = host.parts.digests[-1].tolist()
        records = bytes(host.whole.view(torch.uint8).numpy())
        if self._sent == (launches, sources):
            return records, (first, second), None, None
        self._sent = (launches, sources)
        return records, (first, second), launches, sources

    # Interceptor ----------------------------------------------------------------------------------

    def intercept(self, site: int, operand: Tensor, z: Tensor) -> Tensor:
        """Ask the driver what to hand over; its None leaves the shrink alone."""
        send(self._connection, Question(site, self._operand(operand), pack(z)))
        given: Packed | None = receive(self._connection)
        return z if given is None else unpack(given).to(z.device)

    # Audit ----------------------------------------------------------------------------------------

    def tokens_consumed(self, token_ids: Tensor) -> None:
        """See ConsumptionAudit."""
        self._tell("tokens_consumed", None, pack(token_ids))

    def shrink_consumed(self, site: int, z: Tensor) -> None:
        """See ConsumptionAudit."""
        self._tell("shrink_consumed", site, pack(z))

    def needs_cached_rows(self, layer: int) -> bool:
        """See ConsumptionAudit; the driver said before the step."""
        return layer in self.whole_layers

    def state_consumed(self, layer: int, name: str, values: Tensor) -> None:
        """Models with recurrent state are refused when ranks load."""

    def cache_consumed(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See ConsumptionAudit."""
        self._tell("cache_consumed", layer, pack(keys), pack(values))

    def residual(self, values: Tensor) -> None:
        """See ConsumptionAudit."""
        self._tell("residual", None, pack(values))

    def _tell(self, name: str, place: int | None, *arguments: object) -> None:
        send(self._connection, Event(name, place, arguments))

    def _operand(self, operand: Tensor) -> Packed | None:
        """Slices of a fused projection read one operand, which is sent once."""
        address = (operand.data_ptr(), operand.numel())
        last = self._sent_operand
        if last is not None and address == (last.data_ptr(), last.numel()):
            return None
        self._sent_operand = operand
        return pack(operand)
