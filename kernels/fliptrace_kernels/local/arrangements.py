"""How tokens, ranks and splits are laid on instructions, warps and blocks, and which layout is used.

An arrangement changes the time of a launch and never a bit of its result (`source.cu` says why), so
it may follow the number of rows. The choice is a fixed formula over a fixed list, with figures of an
NVIDIA H200; nothing is tuned at run time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

BLOCK_K: Final = 32
"""K block of every `local` reduction."""
GROUP: Final = 4
"""Consecutive splits added together before the groups are."""
SPLITS: Final = (8, 16, 32, 64)
"""Numbers of splits that `local` takes."""
MAX_TOKENS: Final = 64  # of one block
SHARED_BYTES: Final = 99 << 10  # of one block, on the smallest GPUs that run the kernel
REGISTERS: Final = 65536  # of one multiprocessor

_OTHER_REGISTERS: Final = 36  # what a thread needs beside chains, fragments and pointers
_MAX_FRAGMENT_REGISTERS: Final = 96  # more in flight saturates the memory no better


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A layout of one block.

    Attributes:
        diagonal: C, splits that share one matrix instruction: 1, 2, 4 or 8.
        halves: 2 if all 16 rows of the instruction carry tokens, 1 if only the first 8 do.
        token_tiles: instruction tiles of one warp along the tokens.
        rank_tiles: instruction tiles of one warp along the ranks.
        token_warps: warps of a block along the tokens.
        rank_warps: warps of a block along the ranks.
        turns: times that a warp goes over K, each time for other splits; more tokens and ranks then
            share what is read, since fewer sums are under way at once.
        depth: steps of K loaded ahead; 0 lets `depth_for` choose.
        min_blocks: blocks that must fit one multiprocessor at once, for the register allocator.
    """

    diagonal: int
    halves: int
    token_tiles: int = 1
    rank_tiles: int = 1
    token_warps: int = 1
    rank_warps: int = 1
    turns: int = 1
    depth: int = 0
    min_blocks: int = 1

    @property
    def tokens(self) -> int:
        """Rows of x per block."""
        return self.token_warps * self.token_tiles * 8 * self.halves // self.diagonal

    @property
    def ranks(self) -> int:
        """Columns of the output per block."""
        return self.rank_warps * self.rank_tiles * self.ranks_per_tile

    @property
    def ranks_per_tile(self) -> int:
        """Ranks of one matrix instruction."""
        return 8 // self.diagonal

    @property
    def sets(self) -> int:
        """Chains of matrix instructions that one warp keeps at once, per tile."""
        return max(1, GROUP // self.diagonal)

    def units(self, splits: int) -> int:
        """Return the warps of a block along the splits; 0 if the arrangement is too wide."""
        return splits // (self.diagonal * self.sets * self.turns)

    def threads(self, splits: int) -> int:
        """Return the threads of a block."""
        return 32 * self.units(splits) * self.token_warps * self.rank_warps

    def fits(self, splits: int) -> bool:
        """Tell whether such a block can exist without spilling registers."""
        threads = self.threads(splits)
        if not 0 < threads <= 1024 or threads * self.min_blocks > 2048:
            return False
        if self.tokens > MAX_TOKENS or self.shared_bytes(splits) > SHARED_BYTES:
            return False
        return self._free_registers(splits) >= (self._registers_of_fragments())

    def shared_bytes(self, splits: int) -> int:
        """Return the dynamic shared memory of a block; the arithmetic of `source.cu`."""
        if self.diagonal > 1:
            sums = self.tokens * self.ranks * (splits + 4)
        else:
            sums = self.tokens * self.ranks * splits // GROUP
        return 4 * (MAX_TOKENS + sums)

    def steps(self, size: int, splits: int) -> int:
        """Return how many fragments one warp loads per tile and turn."""
        blocks = -(-size // BLOCK_K)
        return -(-blocks // splits) * self.sets

    def is_unrolled(self, size: int, splits: int) -> bool:
        """Tell whether the loop over K is laid out whole; the condition of `source.cu`."""
        return self.steps(size, splits) * self.token_tiles * self.rank_tiles <= 192

    def column_tiles(self, rank: int, slices: int) -> int:
        """Return the instruction tiles along the ranks of all slices of a launch."""
        return slices * -(-rank // self.ranks_per_tile)

    def grid(self, rows: int, rank: int, slices: int, adapters: int) -> tuple[int, int, int]:
        """Return the grid of a launch; adapters is 1 without a mapping."""
        per_block = self.rank_warps * self.rank_tiles
        passes = min(adapters, rows, self.tokens, 8)
        columns = self.column_tiles(rank, slices)
        return -(-columns // per_block), -(-rows // self.tokens), passes

    def depth_for(self, size: int, splits: int) -> int:
        """Return the steps loaded ahead: what the registers of a thread allow, at most 8."""
        depth = self.depth
        if depth == 0:
            free = min(self._free_registers(splits), _MAX_FRAGMENT_REGISTERS)
            depth = max(1, min(8, free // self._registers_of_fragments()))
        depth = min(depth, self.steps(size, splits))
        if not self.is_unrolled(size, splits):
            depth = 1 << (depth.bit_length() - 1)
        if self.turns > 1:
            depth = next(d for d in range(depth, 0, -1) if self._may_be_ahead(d, size, splits))
        return depth

    def _may_be_ahead(self, depth: int, size: int, splits: int) -> bool:
        """Tell whether a turn of several ends where the buffers of the next begin."""
        power = depth & (depth - 1) == 0 or self.is_unrolled(size, splits)
        return power and self.steps(size, splits) % depth == 0

    def registers(self, size: int, splits: int) -> int:
        """Estimate the registers of a thread."""
        depth = self.depth_for(size, splits)
        ahead = depth * self._registers_of_fragments()
        if depth == self.steps(size, splits) * self.turns:  # a fragment's are then a chain's
            return 26 + ahead + (10 if size % (splits * BLOCK_K) == 0 else 0)
        return min(255, _OTHER_REGISTERS + self._registers_of_chains() + ahead)

    def _registers_of_chains(self) -> int:
        return 4 * self.sets * self.token_tiles * self.rank_tiles

    def _registers_of_fragments(self) -> int:
        return 4 * (self.token_tiles * self.halves + self.rank_tiles)

    def _free_registers(self, splits: int) -> int:
        allowed = min(255, REGISTERS // (self.threads(splits) * self.min_blocks))
        pointers = 2 * (self.token_tiles * self.halves + self.rank_tiles)
        return allowed - _OTHER_REGISTERS - pointers - self._registers_of_chains()


CANDIDATES: Final = (
    Arrangement(8, 1),  # 1 token x 1 rank
    Arrangement(8, 1, rank_warps=2),  # 1 x 2
    Arrangement(4, 1),  # 2 x 2
    Arrangement(4, 2),  # 4 x 2
    Arrangement(2, 1),  # 4 x 4
    Arrangement(2, 2),  # 8 x 4
    Arrangement(2, 2, rank_tiles=2),  # 8 x 8
    Arrangement(1, 1),  # 8 x 8
    Arrangement(1, 2),  # 16 x 8
    Arrangement(1, 2, rank_tiles=2),  # 16 x 16
    Arrangement(1, 2, rank_warps=2),  # 16 x 16
    Arrangement(1, 2, rank_tiles=3),  # 16 x 24
    Arrangement(1, 2, rank_tiles=3, min_blocks=2),  # 16 x 24
    Arrangement(1, 2, rank_tiles=2, rank_warps=2),  # 16 x 32
    Arrangement(1, 2, rank_tiles=3, rank_warps=2),  # 16 x 48
    Arrangement(1, 2, token_tiles=2),  # 32 x 8
    Arrangement(1, 2, token_tiles=2, rank_tiles=2),  # 32 x 16
    Arrangement(1, 2, token_tiles=2, rank_tiles=3),  # 32 x 24
    Arrangement(1, 2, token_warps=2, rank_tiles=3),  # 32 x 24
    Arrangement(1, 2, token_tiles=2, rank_tiles=2, rank_warps=2),  # 32 x 32
    Arrangement(1, 2, token_tiles=2, rank_tiles=3, rank_warps=2),  # 32 x 48
    Arrangement(1, 2, token_warps=2, rank_tiles=6, turns=2),  # 32 x 48
    Arrangement(1, 2, token_warps=2, token_tiles=2, rank_tiles=2, turns=2),  # 64 x 16
    Arrangement(1, 2, token_warps=2, token_tiles=2, rank_tiles=3, turns=2),  # 64 x 24
    Arrangement(1, 2, token_warps=4, rank_tiles=4, turns=4),  # 64 x 32
    Arrangement(1, 2, token_warps=4, rank_tiles=6, turns=4),  # 64 x 48
)
"""Every layout that `choose` picks from."""

ROW_STEPS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""The choice is made for the first of these that is not below the rows; the last stands for more."""

# Figures of an NVIDIA H200. Those in the second block were fitted to measured times, once
# (`tests/kernels/test_local_choice.py` holds the choice against them): take them as a whole.
_MULTIPROCESSORS: Final = 132
_LOADS: Final = 224e3  # bytes per microsecond that one multiprocessor loads, its L1 cache included
_PRODUCTS: Final = 1.8e-3  # microseconds of one multiprocessor for two matrix instructions

_START: Final = 1.51  # microseconds
_BLOCK_START: Final = 0.00067  # microseconds per block of the grid
_LATENCY: Final = 0.60  # microseconds that a block waits for its first fragments ...
_LATER: Final = 0.30  # ... and this part of it for each later round of them
_FETCH: Final = 199e3  # bytes per microsecond that one multiprocessor fetches from the L2 cache
_MEMORY: Final = 4.0e6  # bytes per microsecond from memory
_SHARED_WEIGHTS: Final = 0.61  # microseconds when all multiprocessors read the same weights at once
_ADDING: Final = 0.018  # microseconds per result and thread


def choose(*, rows: int, size: int, rank: int, slices: int, splits: int) -> Arrangement:
    """Return the arrangement of a launch.

    Args:
        rows: M.
        size: K.
        rank: R.
        slices: slices of this launch, 1 to 4.
        splits: S.
    """
    step = ROW_STEPS[min(bisect_left(ROW_STEPS, rows), len(ROW_STEPS) - 1)]
    return _choose(step, size, rank, slices, splits)


def choices(*, size: int, rank: int, slices: int, splits: int) -> list[Arrangement]:
    """Return every arrangement that `choose` returns for some number of rows."""
    found = [_choose(step, size, rank, slices, splits) for step in ROW_STEPS]
    return list(dict.fromkeys(found))


@lru_cache(maxsize=4096)
def _choose(rows: int, size: int, rank: int, slices: int, splits: int) -> Arrangement:
    fitting = [a for a in CANDIDATES if a.fits(splits)]
    best = min(fitting, key=lambda a: estimate(a, rows, size, rank, slices, splits))
    return replace(best, depth=best.depth_for(size, splits))


def estimate(
    arrangement: Arrangement, rows: int, size: int, rank: int, slices: int, splits: int
) -> float:
    """Estimate the microseconds of a launch; good for comparing arrangements, no more."""
    across, down, _ = arrangement.grid(rows, rank, slices, 1)
    blocks = across * down
    threads = arrangement.threads(splits)
    steps = arrangement.steps(size, splits) * arrangement.turns
    registers = arrangement.registers(size, splits)
    resident = max(1, min(2048 // threads, REGISTERS // (registers * threads)))
    per_multiprocessor = -(-blocks // _MULTIPROCESSORS)
    waves = -(-per_multiprocessor // resident)
    rounds = -(-steps // arrangement.depth_for(size, splits))
    waiting = _LATENCY * (1 + _LATER * (rounds - 1)) * waves
    fetched = 2 * size * (arrangement.ranks + min(rows, arrangement.tokens))
    warps = threads // 32
    fragments = arrangement.token_tiles * arrangement.halves + arrangement.rank_tiles
    products = arrangement.token_tiles * arrangement.rank_tiles
    busy = per_multiprocessor * max(
        fetched / _FETCH,
        512 * fragments * steps * warps / _LOADS,
        products * steps * warps * _PRODUCTS,
    )
    reading = math.hypot(busy, 2 * size * (rows + slices * rank) / _MEMORY)
    adding = _ADDING * arrangement.tokens * arrangement.ranks * splits / GROUP / threads * waves
    sharing = _SHARED_WEIGHTS * min(1.0, down / _MULTIPROCESSORS)
    return _START + _BLOCK_START * blocks + waiting + reading + adding + sharing
