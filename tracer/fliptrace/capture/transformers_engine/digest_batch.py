"""Digests of the many small tensors of one forward, computed together at its end.

Watching every operation of a 30-layer model sees some ten thousand small tensors per token. Digesting each when it comes
would launch thirty operations per tensor. Here each is copied when it comes, so that nothing that happens to it later is
seen, and all copies of one width are digested in one pass. The digests are those of fliptrace.numerics, tensor by tensor.
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
_WAITING_BYTES = 16 * 2**20


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
        self._digests: list[Tensor | None] = []

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
        self._digests.append(row_digests)
        return Part(len(self._digests) - 1)

    def _copy(self, rows: Tensor) -> int:
        handle = len(self._digests)
        self._digests.append(None)
        key = (rows.shape[1], rows.dtype, rows.device)
        self._waiting.setdefault(key, []).append(
            (handle, rows.clone(memory_format=torch.contiguous_format))
        )
        self._waiting_bytes += rows.numel() * rows.element_size()
        if self._waiting_bytes > _WAITING_BYTES:
            self._digest()
        return handle

    def _digest(self) -> None:
        for waiting in self._waiting.values():
            digests = digest_rows(torch.cat([rows for _, rows in waiting]))
            counts = [rows.shape[0] for _, rows in waiting]
            for (handle, _), own in zip(waiting, digests.split(counts), strict=True):
                self._digests[handle] = own
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
        table, places = self._table({part for parts in lists for part in parts})
        groups: dict[tuple[int, int], list[int]] = {}
        for number, parts in enumerate(lists):
            rows = max(places[part][1] for part in parts)
            groups.setdefault((len(parts), rows), []).append(number)
        results: list[Tensor] = [table] * len(lists)
        for (count, rows), numbers in groups.items():
            bases = torch.tensor(
                [[places[part][0] for part in lists[number]] for number in numbers]
            )
            strides = torch.tensor(
                [[int(places[part][1] > 1) for part in lists[number]] for number in numbers]
            )
            index = bases.unsqueeze(2) + strides.unsqueeze(2) * torch.arange(rows)
            digests = table.index_select(0, index.reshape(-1).to(table.device))
            if count > 1:
                order = (
                    torch.arange(count, device=table.device).view(1, count, 1).expand(index.shape)
                )
                terms = position_terms(digests, order.reshape(-1))
                digests = mix_words(terms.view(*index.shape, 2).sum(1))
            for number, own in zip(
                numbers, digests.view(len(numbers), rows, 2).unbind(0), strict=True
            ):
                results[number] = own
        return results

    def _table(self, parts: set[Part]) -> tuple[Tensor, dict[Part, tuple[int, int]]]:
        """Lay all digests one after another: the table, and each part's (first row, rows)."""
        pieces: list[Tensor] = []
        places: dict[Part, tuple[int, int]] = {}
        length = 0
        for part in sorted(parts, key=lambda part: part.handle):
            digests = self._digests[part.handle]
            if digests is None:
                raise RuntimeError(f"digest {part.handle} was never computed")
            if part.shape is not None:
                digests = _of_whole(digests, part.shape)
            pieces.append(digests)
            places[part] = (length, digests.shape[0])
            length += digests.shape[0]
        return torch.cat(pieces), places


def _of_whole(row_digests: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Finish digest_tensor from the row digests, int64 [1, 2]."""
    digest = combine_digests(row_digests)
    for size in shape:
        digest = shape_mixed(digest, size)
    return digest.unsqueeze(0)
