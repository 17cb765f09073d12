"""Time local:S in its arrangements against the other reductions, on one CUDA GPU.

    python examples/measure/local_speed.py OUTPUT.jsonl [--quick] [--seconds 150] [--exhaustive]
        [--rows 2048 8192] [--splits 32]

Every figure is the median over replays of a CUDA graph of many calls, in microseconds per call. Each
call of a graph has weights of its own, and before each replay a buffer larger than the L2 cache is
read, so weights come from memory; x stays where the call before left it. Per shape the table shows
the fastest arrangement for each number of splits, how far the choice of `arrangements.choose` is from
it, and the baselines. All arrangements go to OUTPUT.jsonl, one JSON object per line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import torch
import triton
import triton.language as tl
from torch import Tensor

from fliptrace_kernels import lora_shrink
from fliptrace_kernels.local import Arrangement, device, shrink
from fliptrace_kernels.local.arrangements import CANDIDATES, choose, estimate
from fliptrace_kernels.local.compilation import Variant

SIZES = [
    (3072, 3),
    (3072, 1),
    (3072, 2),
    (8192, 1),
    (576, 3),
    (576, 1),
    (1536, 1),
    (1024, 3),
    (2048, 1),
]
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 2048, 8192]
SPLITS = [32, 16, 64]
FLUSH_BYTES = 192 << 20


@triton.jit
def store_partials(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    M: tl.tensor,
    K: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One program per tile and split stores its partial: nothing is handed over."""
    i_split = tl.program_id(0) % SPLITS
    i_tile = tl.program_id(0) // SPLITS
    i_slice = tl.program_id(1)
    o_m = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    b_rows = o_m < M
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i_block in range(i_split, tl.cdiv(K, BLOCK_K), SPLITS):
        i_k = i_block * BLOCK_K + o_k
        b_x = tl.load(
            x_ptr + o_m[:, None].to(tl.int64) * K + i_k[None, :],
            mask=b_rows[:, None] & (i_k < K)[None, :],
            other=0.0,
        )
        b_a = tl.load(
            a_ptr + i_slice * R * K + o_n[None, :] * K + i_k[:, None],
            mask=(o_n < R)[None, :] & (i_k < K)[:, None],
            other=0.0,
        )
        b_sum = tl.dot(b_x, b_a, b_sum)
    p_out = (i_split * tl.num_programs(1) + i_slice).to(tl.int64) * M * R
    p_out = out_ptr + p_out + o_m[:, None] * R + o_n[None, :]
    tl.store(p_out, b_sum, mask=b_rows[:, None] & (o_n < R)[None, :])


@triton.jit
def nothing(x_ptr: tl.tensor) -> None:
    """Do nothing."""


@dataclasses.dataclass
class Case:
    """Tensors of one shape: as many weight sets as a graph has calls, back to back in memory."""

    rows: int
    size: int
    slices: int
    rank: int
    x: Tensor
    weights: list[Tensor]  # per set [slices, rank, size]
    outs: list[Tensor]

    @classmethod
    def make(cls, rows: int, size: int, slices: int, rank: int) -> Case:
        """Fill a case with random numbers."""
        calls = 100 if rows <= 256 else 40 if rows <= 2048 else 16
        x = torch.randn(rows, size, device="cuda").bfloat16()
        pool = torch.empty(calls, slices, rank, size, device="cuda", dtype=torch.bfloat16)
        pool.normal_()
        outs = [torch.empty(slices, rows, rank, device="cuda") for _ in range(4)]
        return cls(rows, size, slices, rank, x, list(pool.unbind(0)), outs)

    def calls(self) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Yield weights and output of each call of a graph."""
        for index, weight in enumerate(self.weights):
            yield list(weight.unbind(0)), self.outs[index % 4]


class Clock:
    """Times graphs of calls."""

    def __init__(self, replays: int) -> None:
        self.flush = torch.ones(FLUSH_BYTES // 4, device="cuda")
        self.replays = replays
        self.stream = torch.cuda.Stream()

    def time(self, case: Case, call: Callable[[list[Tensor], Tensor], object]) -> float:
        """Return the median microseconds per call."""
        weights, out = next(case.calls())
        call(weights, out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`: it collects garbage and empties the cache, some 50 ms a graph.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            graph.capture_begin()
            for weights, out in case.calls():
                call(weights, out)
            graph.capture_end()
        graph.replay()
        events = []
        for _ in range(self.replays):
            self.flush.sum()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) * 1000 / len(case.weights) for begin, end in events]
        return statistics.median(times)


def sensible(case: Case, splits: int, exhaustive: bool) -> list[Arrangement]:
    """Return the arrangements worth timing: the best by estimate, and the chosen one."""
    fitting = [a for a in CANDIDATES if a.fits(splits)]
    fitting = [a for a in fitting if a.tokens < 2 * case.rows or a.tokens <= 2]
    shape = (case.rows, case.size, case.rank, case.slices, splits)
    fitting.sort(key=lambda a: estimate(a, *shape))
    kept = fitting if exhaustive else fitting[: 8 if splits == 32 else 4]
    chosen = choose(
        rows=case.rows, size=case.size, rank=case.rank, slices=case.slices, splits=splits
    )
    plain = dataclasses.replace(chosen, depth=0)
    return [*kept, *([] if plain in kept else [plain])]


def compile_all(shapes: list[tuple[int, int, int, int]], splits: list[int], every: bool) -> None:
    """Compile what will be timed, many at once, before any clock runs."""
    variants = set()
    for rows, size, slices, rank in shapes:
        case = Case(rows, size, slices, rank, torch.empty(0), [], [])
        for split in splits:
            for arrangement in sensible(case, split, every):
                variants.add(Variant(size, rank, split, arrangement))
    begin = time.monotonic()
    device.load_all(variants, torch.cuda.current_device())
    print(f"{len(variants)} kernels compiled and loaded in {time.monotonic() - begin:.1f} s")


def baselines(case: Case, clock: Clock) -> dict[str, float | str]:
    """Time the other reductions, the floor and an empty kernel."""
    found: dict[str, float | str] = {}

    def attempt(name: str, call: Callable[[list[Tensor], Tensor], object]) -> None:
        try:
            found[name] = clock.time(case, call)
        except (RuntimeError, ValueError, TypeError) as error:
            # One baseline must not end the table.
            found[name] = f"{type(error).__name__}: {error}"[:200]

    attempt("empty", lambda _, out: nothing[(1,)](out))
    for name in ("vllm", "deterministic:8/128"):
        attempt(
            name,
            lambda weights, out, name=name: lora_shrink(case.x, weights, reduction=name, out=out),
        )
    partials = torch.empty(16, case.slices, case.rows, case.rank, device="cuda")
    floors = []
    for splits, block_k in [(16, 128), (8, 256)] if case.rows <= 64 else [(8, 128), (4, 128)]:

        def floor(
            weights: list[Tensor], _: Tensor, splits: int = splits, block_k: int = block_k
        ) -> None:
            grid = (-(-case.rows // 16) * splits, case.slices)
            store_partials[grid](
                partials,
                case.x,
                weights[0],
                case.rows,
                case.size,
                case.rank,
                splits,
                16,
                max(16, case.rank),
                block_k,
                num_warps=4,
                num_stages=3,
            )

        attempt("floor", floor)
        floors.append(found["floor"])
    numbers = [value for value in floors if isinstance(value, float)]
    found["floor"] = min(numbers) if numbers else floors[0]
    return found


def name_of(arrangement: Arrangement) -> str:
    """Return a short name: diagonal, halves, token tiles x rank tiles, warps, turns, blocks."""
    a = arrangement
    return (
        f"C{a.diagonal}H{a.halves} {a.token_tiles}x{a.rank_tiles} w{a.token_warps}x{a.rank_warps}"
        f" t{a.turns} m{a.min_blocks}"
    )


def measure(case: Case, clock: Clock, splits: list[int], exhaustive: bool, log: TextIO) -> None:
    """Time one shape, print its line and log every figure."""
    shape = {
        "rows": case.rows,
        "size": case.size,
        "slices": case.slices,
        "rank": case.rank,
        "calls": len(case.weights),
        "replays": clock.replays,
    }
    others = baselines(case, clock)
    log.writelines(
        json.dumps({**shape, "what": name, "microseconds": figure}) + "\n"
        for name, figure in others.items()
    )
    cells = []
    for split in splits:
        figures: dict[Arrangement, float] = {}
        for arrangement in sensible(case, split, exhaustive):

            def call(
                weights: list[Tensor],
                out: Tensor,
                split: int = split,
                arrangement: Arrangement = arrangement,
            ) -> None:
                shrink(case.x, weights, None, split, 1.0, out, arrangement=arrangement)

            figures[arrangement] = clock.time(case, call)
            log.write(
                json.dumps(
                    {
                        **shape,
                        "what": f"local:{split}",
                        "arrangement": dataclasses.asdict(arrangement),
                        "grid": arrangement.grid(case.rows, case.rank, case.slices, 1),
                        "estimate": estimate(
                            arrangement, case.rows, case.size, case.rank, case.slices, split
                        ),
                        "microseconds": figures[arrangement],
                    }
                )
                + "\n"
            )
        best = min(figures, key=figures.__getitem__)
        chosen = dataclasses.replace(
            choose(
                rows=case.rows, size=case.size, rank=case.rank, slices=case.slices, splits=split
            ),
            depth=0,
        )
        over = figures[chosen] / figures[best]
        cells.append(f"{figures[best]:6.2f} {over:4.2f} {name_of(best):21s}")
    log.flush()

    def shown(name: str) -> str:
        figure = others[name]
        return f"{figure:6.2f}" if isinstance(figure, float) else "failed"

    ratio = ""
    if isinstance(others["vllm"], float):
        ratio = f"{min(float(cell.split()[0]) for cell in cells) / others['vllm']:5.2f}"
    print(
        f"{case.size:5d} {case.slices} {case.rank:3d} {case.rows:5d} | {shown('empty')} "
        f"{shown('floor')} {shown('vllm')} {shown('deterministic:8/128')} | "
        f"{' | '.join(cells)} | {ratio}",
        flush=True,
    )


def main() -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="JSON lines, one figure each")
    parser.add_argument("--quick", action="store_true", help="two sizes, rank 16, six row counts")
    parser.add_argument("--exhaustive", action="store_true", help="every arrangement that fits")
    parser.add_argument("--seconds", type=float, default=150.0, help="stop starting shapes then")
    parser.add_argument("--rows", type=int, nargs="+", help="these row counts only")
    parser.add_argument("--splits", type=int, nargs="+", help="these numbers of splits only")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU", file=sys.stderr)
        return 2
    begin = time.monotonic()
    sizes = [(3072, 3), (576, 3)] if options.quick else SIZES
    ranks = [16] if options.quick else [16, 32]
    rows = options.rows or ([1, 4, 16, 64, 256, 2048] if options.quick else ROWS)
    splits = options.splits or ([32] if options.quick else SPLITS)
    shapes = [(m, k, s, r) for r in ranks for k, s in sizes for m in rows]
    compile_all(shapes, splits, options.exhaustive)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    columns = " | ".join(f"local:{split:2d} chosen/best best      " for split in splits)
    print(f"    K s   R     M |  empty  floor   vllm  det8/128 | {columns} | best/vllm")
    clock = Clock(replays=7)
    left_out = []
    with options.output.open("w", encoding="utf-8") as log:
        for m, k, s, r in shapes:
            if time.monotonic() - begin > options.seconds:
                left_out.append((m, k, s, r))
                continue
            measure(Case.make(m, k, s, r), clock, splits, options.exhaustive, log)
    if left_out:
        print(f"{len(left_out)} shapes were left out for lack of time, from {left_out[0]} on")
    print(f"{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
