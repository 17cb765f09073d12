"""Digests of the many small tensors of one forward, computed together at its end.

Watching every operation of a 30-layer model sees some ten thousand small tensors per token. Digesting each when it
comes would launch thirty operations per tensor. Here each is copied when it comes, so that nothing that happens to it
later is seen, and all copies of one width are digested in one pass. The digests are those of fliptrace.numerics,
tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fliptrace.numerics.digest import (
    combine_digests,
    digest_rows,
    mix_words,
    position_terms,
    shape_mixed,
)

#: Copies that wait to be digested; beyond it they are digested at once, so that a long prefill stays small.
_WAITING_BYTES = 2**20
#: How much is digested in one pass; thirty operations run over it, so it should stay in the processor's cache.
_CHUNK_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor's place in a batch: the handle of its row digests.

    Attributes:
        handle: from DigestBatch.
        shape: None when the rows are token rows; else the whole tensor's shape, and it counts as one row.
    """

    handle: int
    shape: tuple[int, ...] | None = None


class DigestBatch:
    """Collects the tensors of one forward over ``rows`` tokens."""

    def __init__(self, rows: int) -> None:
        """Start empty."""
        self.rows = rows
        self._waiting: dict[tuple[int, torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
        self._waiting_bytes = 0
        # All row digests one after another, and where those of each handle are.
        self._pieces: list[Tensor] = []
        self._length = 0
        self._firsts: list[int] = []
        self._counts: list[int] = []

    def token_rows(self, tensor: Tensor, dimension: int) -> Part:
        """Copy a tensor whose ``dimension`` holds the token rows."""
        if self.rows == 1:
            return Part(self._copy(tensor.reshape(1, -1)))
        return Part(self._copy(tensor.movedim(dimension, 0).reshape(self.rows, -1)))

    def whole(self, tensor: Tensor) -> Part:
        """Copy a tensor that has no token rows."""
        count = tensor.shape[0] if tensor.dim() else 1
        return Part(
            self._copy(tensor.reshape(count, tensor.numel() // max(count, 1))), tuple(tensor.shape)
        )

    def digested(self, row_digests: Tensor) -> Part:
        """Take row digests, int64 [rows, 2], that were computed elsewhere."""
        handle = self._new_handle(row_digests.shape[0])
        self._firsts[handle] = self._append(row_digests)
        return Part(handle)

    def _new_handle(self, rows: int) -> int:
        self._firsts.append(-1)
        self._counts.append(rows)
        return len(self._firsts) - 1

    def _append(self, digests: Tensor) -> int:
        first = self._length
        self._pieces.append(digests)
        self._length += digests.shape[0]
        return first

    def _copy(self, rows: Tensor) -> int:
        if rows.is_complex():
            rows = torch.view_as_real(rows.resolve_conj()).flatten(1)
        handle = self._new_handle(rows.shape[0])
        copy = rows.clone(memory_format=torch.contiguous_format)
        self._waiting.setdefault((rows.shape[1], rows.dtype, rows.device), []).append(
            (handle, copy)
        )
        self._waiting_bytes += rows.numel() * rows.element_size()
        if self._waiting_bytes > _WAITING_BYTES:
            self._digest()
        return handle

    def _digest(self) -> None:
        for (width, dtype, _), waiting in self._waiting.items():
            rows = torch.cat([copy for _, copy in waiting])
            chunk = max(1, _CHUNK_BYTES // max(1, width * dtype.itemsize))
            first = self._length
            for part in rows.split(chunk):
                self._append(digest_rows(part))
            for handle, _ in waiting:
                self._firsts[handle] = first
                first += self._counts[handle]
        self._waiting.clear()
        self._waiting_bytes = 0

    def resolve(self, lists: Sequence[Sequence[Part]]) -> list[Tensor]:
        """Digest what is waiting and bind the parts of each list into one digest per row.

        Args:
            lists: parts that belong together; a part that is a whole tensor counts for every row. A part alone keeps
                its own digests.

        Returns:
            Per list int64 [rows, 2], or [1, 2] where no part has token rows.
        """
        self._digest()
        self._finish_whole([part for parts in lists for part in parts if part.shape is not None])
        table = self._table()
        firsts, counts = torch.tensor(self._firsts), torch.tensor(self._counts)
        groups: dict[tuple[int, int], list[int]] = {}
        for number, parts in enumerate(lists):
            rows = max([self._counts[part.handle] for part in parts])
            groups.setdefault((len(parts), rows), []).append(number)
        results: list[Tensor] = [table] * len(lists)
        for (count, rows), numbers in groups.items():
            handles = torch.tensor(
                [part.handle for number in numbers for part in lists[number]]
            ).view(-1, count, 1)
            index = firsts[handles] + (counts[handles] > 1) * torch.arange(rows)
            digests = table.index_select(0, index.reshape(-1).to(table.device))
            if count > 1:
                order = (
                    torch.arange(count, device=table.device).view(1, count, 1).expand(index.shape)
                )
                terms = position_terms(digests, order.reshape(-1))
                digests = mix_words(terms.view(*index.shape, 2).sum(1))
            own_rows = digests.view(len(numbers), rows, 2).unbind(0)
            for number, own in zip(numbers, own_rows, strict=True):
                results[number] = own
        return results

    def _table(self) -> Tensor:
        """Lay all digests one after another, on the accelerator where a scalar on the host took part."""
        device = next(
            (piece.device for piece in self._pieces if piece.device.type != "cpu"),
            torch.device("cpu"),
        )
        return torch.cat([piece.to(device) for piece in self._pieces])

    def _finish_whole(self, parts: Sequence[Part]) -> None:
        if not parts:
            return
        table = self._table()
        for part in parts:
            first, count = self._firsts[part.handle], self._counts[part.handle]
            self._firsts[part.handle] = self._append(
                _of_whole(table[first : first + count], part.shape or ())
            )
            self._counts[part.handle] = 1


def _of_whole(row_digests: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Finish digest_tensor from the row digests, int64 [1, 2]."""
    digest = combine_digests(row_digests)
    for size in shape:
        digest = shape_mixed(digest, size)
    return digest.unsqueeze(0)
