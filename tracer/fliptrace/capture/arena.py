"""One flat buffer for everything that a decode step records, digested in one pass where the tensors live.

A decode step of a 30-layer model reports some 500 small tensors. Digesting each when it arrives would launch ten
operations per tensor; copying each into its slot of one buffer launches one, and at the end of the step a dozen
operations digest all slots together. Slots begin on whole 64-bit words and their padding stays zero, so the digests
equal those of fliptrace.numerics.digest_rows, which is the specification (a test holds the two together).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fliptrace.numerics.digest import dtype_tag, finish_rows, mix_positioned_words

_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one row of one record.

    Attributes:
        shape: the tensor that is copied in; all of it is one row.
        dtype: its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the row, padding not counted."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    @property
    def words(self) -> int:
        """Whole 64-bit words that the row takes."""
        return -(-self.size_bytes // _WORD_BYTES)


@dataclass
class ArenaSlots:
    """What a decode step will report, learned from the prefill."""

    shrinks: dict[int, Slot] = field(default_factory=dict)
    operands: dict[int, Slot] = field(default_factory=dict)
    projections: dict[int, Slot] = field(default_factory=dict)
    caches: dict[int, Slot] = field(default_factory=dict)
    logits: Slot | None = None


class Arena:
    """Slots in one buffer, in the order given."""

    def __init__(self, slots: Sequence[Slot], device: torch.device, *, head_words: int = 0) -> None:
        """Allocate the buffer; its size is fixed from here on.

        Args:
            slots: what goes into it.
            device: where it lies.
            head_words: 64-bit words before the first slot, for what is computed from the slots and travels with them.
        """
        words = [slot.words for slot in slots]
        ends = torch.tensor(words, dtype=torch.int64).cumsum(0)
        total = int(ends[-1]) if words else 0
        self.storage = torch.zeros(head_words + total, dtype=torch.int64, device=device)
        self.head, self.buffer = self.storage[:head_words], self.storage[head_words:]
        starts = (ends - torch.tensor(words, dtype=torch.int64)).tolist()
        data = self.buffer.view(torch.uint8)
        self.slots: list[Tensor] = []
        for slot, start in zip(slots, starts, strict=True):
            first = start * _WORD_BYTES
            self.slots.append(
                data[first : first + slot.size_bytes].view(slot.dtype).view(slot.shape)
            )
        self.starts_bytes = [start * _WORD_BYTES for start in starts]
        self.sizes_bytes = [slot.size_bytes for slot in slots]
        positions = [torch.arange(count, dtype=torch.int64) for count in words]
        self._positions = torch.cat(positions).to(device) if positions else self.buffer
        self._last = (ends - 1).to(device)
        self._row_bytes = torch.tensor(
            [[slot.size_bytes] for slot in slots], dtype=torch.int64, device=device
        )
        self._tags = torch.tensor(
            [[dtype_tag(slot.dtype)] for slot in slots], dtype=torch.int64, device=device
        )

    def digests(self) -> Tensor:
        """Digest every slot's row, int64 [slots, 2] on the buffer's device.

        Row sums come from one running sum over the whole buffer, whose differences at the row ends are the sums of the
        rows: exact, because all of it is modulo 2**64.
        """
        lanes = torch.stack(mix_positioned_words(self.buffer, self._positions))
        ends = lanes.cumsum(1).index_select(1, self._last)
        sums = torch.diff(ends, dim=1, prepend=torch.zeros_like(ends[:, :1]))
        return finish_rows(sums.t(), self._row_bytes, self._tags)

    def contiguous(self, first: int, count: int) -> bool:
        """Tell whether ``count`` slots from ``first`` follow one another without padding."""
        return all(size % _WORD_BYTES == 0 for size in self.sizes_bytes[first : first + count])
