"""Seeded orders of arrival: what stands in for hardware when `atomic` runs on a CPU.

A GPU adds the partials of one output in the order in which they arrive, and two neighbouring
outputs need not see the same order. A schedule draws such an order for every output element on
its own. It is simulated: it covers every order, but says nothing about how often a real GPU
produces which.

Orders are counter-based: each is a pure function of (seed, call key, slice, row, rank index,
number of ranks and splits). No generator is advanced, so earlier calls, the number of rows and
the thread count cannot change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from fliptrace_kernels.errors import ReductionError

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class ArrivalSchedule:
    """Orders of arrival drawn from a seed.

    Attributes:
        seed: any whole number from 0 to 2^63 - 1.

    Raises:
        ReductionError: if the seed is out of range.
    """

    seed: int

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise ReductionError(
                f"a schedule seed is a whole number from 0 to 2^63 - 1; got {self.seed!r}"
            )

    def describe(self) -> str:
        """Return the words for a manifest."""
        return f"simulated schedule, seed {self.seed}"

    def orders(self, call_key: int, *, slices: int, rows: int, rank: int, splits: int) -> Tensor:
        """Return the order of arrival at every output of one call.

        Args:
            call_key: any whole number that names the call, such as one built from step and site.
            slices: number of slices.
            rows: M.
            rank: R.
            splits: S.

        Returns:
            [slices, M, R, S], int64; entry i is the split that arrives i-th.
        """
        flat = self.row_orders(
            call_key, torch.arange(rows), slices=slices, rank=rank, splits=splits
        )
        return flat.view(rows, slices, rank, splits).transpose(0, 1).contiguous()

    def row_orders(
        self, call_key: int, rows: Tensor | None, *, slices: int, rank: int, splits: int
    ) -> Tensor:
        """Return the orders of chosen rows, in the layout of the vectorised path.

        Args:
            call_key: as in `orders`.
            rows: row indices, [rows], int64; None means row 0 alone.
            slices: number of slices.
            rank: R.
            splits: S.

        Returns:
            [rows, slices * R, S], int64.
        """
        key = _mix(_mix(self.seed + _GOLDEN) ^ (call_key & _MASK))
        base = _base_words(slices, rank, splits)
        if rows is None:
            words = base ^ _signed(_mix_row(key))
        else:
            row_words = rows * _signed(_GOLDEN)
            row_words += _signed((key + _GOLDEN) & _MASK)
            words = base ^ _mix_words(row_words).view(-1, 1, 1)
        # The words of one output are distinct, so this sort has exactly one answer.
        return torch.argsort(_mix_words(words), dim=-1)


def _mix_row(key: int) -> int:
    """Mix the word of row 0 as `_mix_words` does."""
    return _mix_signed((key + _GOLDEN) & _MASK)


def _mix(value: int) -> int:
    """Mix a 64-bit word (the finaliser of splitmix64)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_signed(value: int) -> int:
    """Mix one 64-bit word exactly as `_mix_words` mixes a tensor of them."""
    word = _signed(value)
    word = _signed(((word ^ (word >> 32)) * 0xD6E8FEB86659FD93) & _MASK)
    word = _signed(((word ^ (word >> 32)) * 0xD6E8FEB86659FD93) & _MASK)
    return (word ^ (word >> 32)) & _MASK


def _mix_words(words: Tensor) -> Tensor:
    """Mix 64-bit words in place; shifts are arithmetic, which keeps the mapping one-to-one."""
    words.bitwise_xor_(words >> 32).mul_(_MULTIPLIER)
    words.bitwise_xor_(words >> 32).mul_(_MULTIPLIER)
    return words.bitwise_xor_(words >> 32)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_MULTIPLIER: Final = _signed(0xD6E8FEB86659FD93)


@lru_cache(maxsize=256)
def _base_words(slices: int, rank: int, splits: int) -> Tensor:
    """Return one distinct word per slice, rank and split, [1, slices * R, S], int64."""
    with torch.inference_mode(False):
        counters = torch.arange(1, slices * rank * splits + 1, dtype=torch.int64)
        counters *= _signed(_GOLDEN)
        return _mix_words(counters).view(1, slices * rank, splits)
