"""The digest of a whole cache, kept up to date by additions and checked against the cache itself from time to time.

Every key row and every value row of every layer is digested once, when it is written. The cache's digest is a sum of
those row digests, each bound to its layer, to K or V, and to its absolute position; a decode step adds to it.
Recomputing it from the cache shows whether anything changed rows after they were recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fliptrace.capture.engine import CacheLayer
from fliptrace.capture.finishing import Replay
from fliptrace.errors import RecordingError
from fliptrace.numerics.digest import digest_hex, digest_rows, mix_words, position_terms

#: Layer and K/V share the upper half of a row's position number.
_POSITION_BITS = 32


def cache_row_digests(values: Tensor) -> Tensor:
    """Digest the rows of one layer's cache.

    Args:
        values: [2, T, kv_heads, head_dim], keys then values.

    Returns:
        int64 [2, T, 2].
    """
    rows = values.reshape(values.shape[0] * values.shape[1], -1)
    return digest_rows(rows).view(values.shape[0], values.shape[1], 2)


class RollingCacheDigest:
    """Sums of row digests per layer, on the device where the cache lives."""

    def __init__(self, layers: Sequence[int], device: torch.device) -> None:
        """Start from an empty cache with these layers."""
        self._index = {layer: number for number, layer in enumerate(layers)}
        self._layers = tuple(layers)
        self._sums = torch.zeros((len(layers), 2), dtype=torch.int64, device=device)
        halves = torch.tensor(
            [[2 * layer, 2 * layer + 1] for layer in layers], dtype=torch.int64, device=device
        )
        self._bases = (halves << _POSITION_BITS).view(-1, 2, 1)  # [layers, 2, 1]
        self._windowed: dict[int, list[Tensor]] = {}
        self._one_row: _OneRow | None = None
        self._value: Tensor | None = None

    def add(self, row_digests: Tensor, first_position: int) -> None:
        """Add the rows that a step wrote.

        Args:
            row_digests: int64 [layers, 2, T, 2], in the order of the layers.
            first_position: absolute position of the first row.
        """
        self._value = None
        if row_digests.shape[2] == 1:
            self._add_one(row_digests, first_position)
        else:
            self._sums += self._terms(row_digests, self._bases, first_position).sum((1, 2))
        for layer, rows in self._windowed.items():
            rows.append(row_digests[self._index[layer]].clone())

    def _add_one(self, row_digests: Tensor, position: int) -> None:
        one = self._one_row
        if one is None or one.digests.data_ptr() != row_digests.data_ptr():
            one = self._one_row = _OneRow(row_digests, self._bases, self._sums)
        sums, self._value = one.added(position)
        self._sums.copy_(sums)

    @property
    def value(self) -> Tensor:
        """The digest, int64 [2] on the device; valid until the next addition."""
        return mix_words(self._sums.sum(0)) if self._value is None else self._value

    def check(self, content: Sequence[CacheLayer], step: int) -> str:
        """Recompute the digest from the cache and compare.

        Args:
            content: the cache as it is now. Sliding-window layers are compared over the rows that they still hold.
            step: for the error message.

        Returns:
            The digest, 32 hexadecimal digits.

        Raises:
            RecordingError: a layer's rows are not those that were recorded.
        """
        found = {layer.layer: layer for layer in content}
        for layer in self._layers:
            number = self._index[layer]
            held = found[layer]
            digests = cache_row_digests(held.values).unsqueeze(0)
            now = self._terms(digests, self._bases[number : number + 1], held.first_position).sum(
                (1, 2)
            )[0]
            if not torch.equal(now, self._expected(layer, held)):
                raise RecordingError(
                    f"after step {step} the cache of layer {layer} (positions {held.first_position} to "
                    f"{held.first_position + held.values.shape[1] - 1}) is not what was seen being written to it: "
                    "something changed it in place, so this recording would mislead"
                )
        return digest_hex(self.value)

    def watch_windows(self, windows: Mapping[int, int | None]) -> None:
        """Keep the row digests of sliding-window layers, without which evicted rows cannot be subtracted.

        Args:
            windows: layer -> window, None for full attention. Called once, before the first ``add``.
        """
        self._windowed = {
            layer: []
            for layer, window in windows.items()
            if window is not None and layer in self._index
        }

    def _expected(self, layer: int, held: CacheLayer) -> Tensor:
        number = self._index[layer]
        if layer not in self._windowed:
            return self._sums[number]
        rows = torch.cat(self._windowed[layer], dim=1)[:, -held.values.shape[1] :]
        self._windowed[layer] = [rows]
        return self._terms(
            rows.unsqueeze(0), self._bases[number : number + 1], held.first_position
        ).sum((1, 2))[0]

    @staticmethod
    def _terms(row_digests: Tensor, bases: Tensor, first_position: int) -> Tensor:
        """Bind digests [layers, 2, T, 2] to layer, K or V, and position."""
        count = row_digests.shape[2]
        offsets = torch.arange(
            first_position, first_position + count, dtype=torch.int64, device=row_digests.device
        )
        positions = (bases + offsets).reshape(-1)
        return position_terms(row_digests.reshape(-1, 2), positions).view_as(row_digests)


class _OneRow:
    """Adds one row per layer, digested at a fixed address, by one captured graph instead of some thirty launches."""

    def __init__(self, digests: Tensor, bases: Tensor, sums: Tensor) -> None:
        """Know the addresses: digests [layers, 2, 1, 2], bases [layers, 2, 1], sums [layers, 2]; all int64."""
        self.digests = digests
        self._bases, self._sums = bases, sums
        self._position = bases.new_zeros(1)
        self._result = sums.new_zeros((sums.shape[0] + 1, 2))  # the sums, then the digest
        self._replay = Replay(self._compute, self._result)

    def added(self, position: int) -> tuple[Tensor, Tensor]:
        """Return the sums with the rows at this position added, and their digest; both until the next call."""
        self._position.fill_(position)
        self._replay.run()
        return self._result[:-1], self._result[-1]

    def _compute(self) -> None:
        positions = (self._bases + self._position).reshape(-1)
        terms = position_terms(self.digests.reshape(-1, 2), positions).view_as(self.digests)
        sums = self._sums + terms.sum((1, 2))
        self._result[:-1].copy_(sums)
        self._result[-1].copy_(mix_words(sums.sum(0)))
