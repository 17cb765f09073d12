"""Launch repeatable shrinks a million times under stress and compare every output bit.

    python examples/measure/shrink_stress.py --folder results

``--launches 100000`` and the mutants took 47 s on an NVIDIA H200, most of it, by all signs, for compiling kernels
of `local` one by one when a number of rows was first met. Now all are compiled at once; a million should take one
to two minutes. For memory errors see shrink_memcheck.py.

Random calls (rows, offsets, mapping with -1, scale; layer shapes, ranks, slices, adapters and dtypes of
FAMILIES) are captured into CUDA graphs, all on one stream, and the graphs are replayed at once on several
streams beside kernels that do nothing but take multiprocessors away. Before a replay every output is filled
with NaN, after it every output bit is compared, inside the graph, with the first run of that call: eager,
alone on the device. That first run is compared, bit by bit, with its own partials added up on the CPU in the
specified order.

The same is done with a copy of the hand-over kernel whose blocks and warps are delayed at random (`faithful`
of shrink_mutants), and with broken copies: a stress that catches none of them proves little. Writes
stress.json and shrink_stress.log. Exit code 1 if an output differs that must not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fliptrace_kernels import FliptraceKernelsError, lora_shrink, parse_reduction, specification
from fliptrace_kernels.bench.device import require_cuda, this_machine
from fliptrace_kernels.bench.in_processes import in_processes
from fliptrace_kernels.local import device
from fliptrace_kernels.local.arrangements import ROW_STEPS, choose
from fliptrace_kernels.local.calls import WORD, adapters_mode, element_of
from fliptrace_kernels.local.compilation import WITH_PARTIALS, WITHOUT_PARTIALS, Variant
from fliptrace_kernels.reduction import Reduction

REDUCTIONS = ("deterministic:8/128", "deterministic:16/32", "local:32")
MUTANT_REDUCTION = "deterministic:8"
FAITHFUL = "faithful"
STREAMS = 4
CALLS_PER_GRAPH = 250
REPLAYS = 40
LONGEST_DELAY = 3000  # nanoseconds; a launch without delays takes about as long
MOST_ROWS = 512
MANY_ROWS = 2048  # taken by one call in 100
SCALES = (1.0, 0.7, 2.0)

BF16, FP16 = "bfloat16", "float16"


@dataclass(frozen=True)
class Family:
    """What a compiled kernel depends on.

    Attributes:
        size: K.
        rank: R.
        slices: A matrices of a call.
        adapters: 0 for a call without a mapping.
        dtype: of x and A.
    """

    size: int
    rank: int
    slices: int
    adapters: int
    dtype: str = BF16


FAMILIES = (
    Family(3072, 16, 3, 0),
    Family(3072, 16, 3, 1),
    Family(576, 16, 3, 3),
    Family(600, 20, 2, 2),
    Family(8192, 32, 1, 0),
    Family(1536, 64, 1, 4),
    Family(1024, 32, 2, 1, FP16),
    Family(2048, 8, 1, 0, FP16),
    Family(100, 16, 3, 2),
    Family(3072, 64, 2, 1),
    Family(576, 128, 1, 0),
    Family(3072, 16, 3, 5, FP16),
)


@dataclass(frozen=True)
class Case:
    """One random call.

    Attributes:
        family: shapes and dtype.
        rows: M.
        scale: factor of the total.
        x_start: where x begins in the pool of numbers.
        a_starts: where the A of each slice begin.
        seed: of mapping and delays.
    """

    family: Family
    rows: int
    scale: float
    x_start: int
    a_starts: tuple[int, ...]
    seed: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the outputs, [slices, M, R]."""
        return self.family.slices, self.rows, self.family.rank

    @property
    def outputs(self) -> int:
        """Number of FP32 outputs."""
        return math.prod(self.shape)

    @property
    def space(self) -> int:
        """Room for the outputs in a buffer, so that the next call's are aligned as tensors are."""
        return -(-self.outputs // 64) * 64


def draw_cases(chooser: random.Random, count: int, pool_size: int) -> list[Case]:
    """Draw random calls whose tensors lie in pools of ``pool_size`` elements, at multiples of 64."""
    cases = []
    for _ in range(count):
        family = chooser.choice(FAMILIES)
        rows = round(math.exp(chooser.uniform(0.0, math.log(MOST_ROWS))))
        if chooser.randrange(100) == 0:
            rows = MANY_ROWS
        weight = max(family.adapters, 1) * family.rank * family.size

        def start(length: int) -> int:
            return 64 * chooser.randrange((pool_size - length) // 64)

        cases.append(
            Case(
                family,
                rows,
                chooser.choice(SCALES),
                start(rows * family.size),
                tuple(start(weight) for _ in range(family.slices)),
                chooser.randrange(1 << 30),
            )
        )
    return cases


class Numbers:
    """Random numbers that all calls share."""

    def __init__(self, size: int, device: str, seed: int) -> None:
        """Draw ``size`` numbers in each dtype."""
        generator = torch.Generator(device).manual_seed(seed)
        values = torch.empty(size, device=device).normal_(generator=generator)
        self.size = size
        self._pools = {BF16: values.bfloat16(), FP16: values.half()}
        self._device = device

    def tensors(self, case: Case) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Return x, the A of each slice, and the mapping of a call."""
        family = case.family
        pool = self._pools[family.dtype]
        shape = (family.rank, family.size)
        if family.adapters:
            shape = (family.adapters, *shape)
        mapping = None
        if family.adapters:
            generator = torch.Generator().manual_seed(case.seed)
            mapping = torch.randint(
                -1, family.adapters, (case.rows,), dtype=torch.int32, generator=generator
            ).to(self._device)
        x = pool[case.x_start :][: case.rows * family.size].view(case.rows, family.size)
        weights = [pool[start:][: math.prod(shape)].view(shape) for start in case.a_starts]
        return x, weights, mapping


def live_outputs(case: Case, mapping: Tensor | None) -> Tensor | None:
    """Tell which outputs, [slices, M, R], belong to a row with an adapter; None means all."""
    if mapping is None:
        return None
    return (mapping >= 0)[None, :, None].expand(case.shape)


def sum_on_cpu(reduction: Reduction, scale: float, partials: Tensor, live: Tensor | None) -> Tensor:
    """Add partials [S, ...] up on the CPU as the specification says; outputs that are not live are 0.0."""
    flat = partials.cpu().flatten(1)[:, None, :]
    total = specification.combine(flat, reduction, scale)[0].view(partials.shape[1:])
    return total if live is None else torch.where(live.cpu(), total, torch.zeros(()))


def differing_calls(out: Tensor, expected: Tensor, ends: Tensor) -> Tensor:
    """Tell which calls have a bit that differs.

    Args:
        out: outputs of all calls in one buffer, FP32.
        expected: the same, as they should be.
        ends: int64, where each call's room ends.

    Returns:
        One int64 per call, 0 or 1.
    """
    unequal = bits(out) != bits(expected)
    before = torch.nn.functional.pad(torch.cumsum(unequal, 0, dtype=torch.int64)[ends - 1], (1, 0))
    return (before[1:] > before[:-1]).to(torch.int64)


@dataclass
class Count:
    """What was launched and what differed.

    Attributes:
        launches: graph-replayed launches, each compared with the first of its kind.
        differing: how many had another bit.
        calls: different random calls.
        calls_differing: how many of them differed at least once.
        outputs: outputs compared.
        sums_checked: first runs compared with their partials added on the CPU.
        sums_differing: how many had another bit.
    """

    launches: int = 0
    differing: int = 0
    calls: int = 0
    calls_differing: int = 0
    outputs: int = 0
    sums_checked: int = 0
    sums_differing: int = 0


@dataclass
class Loaded:
    """A graph of calls, and where it counts."""

    name: str
    graph: torch.cuda.CUDAGraph
    cases: list[Case]
    differing: Tensor  # int64 per call: replays that differed
    keeps: list[Any] = field(default_factory=list)


class Stress:
    """Builds graphs of random calls and replays them at once."""

    def __init__(self, seed: int) -> None:
        """Draw the numbers and make the streams."""
        self.numbers = Numbers(1 << 25, "cuda", seed)
        self.chooser = random.Random(seed)
        self.counts: dict[str, Count] = defaultdict(Count)
        self._capture_stream = torch.cuda.Stream()
        self._streams = [torch.cuda.Stream() for _ in range(STREAMS)]
        self._noise_stream = torch.cuda.Stream()
        self._noise = [torch.randn(size, size, device="cuda") for size in (128, 512, 1024)]

    def first_runs(self, name: str, cases: Sequence[Case], regions: Sequence[Tensor]) -> None:
        """Run each call alone, into its region, and hold it against its own partials."""
        count = self.counts[name]
        reduction = parse_reduction(MUTANT_REDUCTION if name in mutants() else name)
        for case, region in zip(cases, regions, strict=True):
            x, weights, mapping = self.numbers.tensors(case)
            lora_shrink(x, weights, mapping, reduction=reduction, scale=case.scale, out=region)
            if name in mutants() and name != FAITHFUL:
                continue
            kept = kept_partials(reduction, x, weights, mapping, case.scale)
            total = sum_on_cpu(reduction, case.scale, kept, live_outputs(case, mapping))
            count.sums_checked += 1
            count.sums_differing += not torch.equal(bits(total), bits(region.cpu()))

    def load(self, name: str, cases: list[Case]) -> Loaded:
        """Capture the calls into one graph that also poisons, compares and counts."""
        ends = ends_of(cases).cuda()
        expected = torch.full((int(ends[-1]),), float("nan"), device="cuda")
        self.first_runs(name, cases, regions_of(expected, cases))
        out = torch.empty_like(expected)
        regions = regions_of(out, cases)
        differing = torch.zeros(len(cases), dtype=torch.int64, device="cuda")
        launch, keeps = self._launch(name, cases)
        arguments = [self.numbers.tensors(case) for case in cases]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._capture_stream):
            graph.capture_begin()
            try:
                out.fill_(float("nan"))
                for number, region in enumerate(regions):
                    launch(number, arguments[number], region)
                differing += differing_calls(out, expected, ends)
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return Loaded(name, graph, cases, differing, [expected, ends, out, arguments, keeps])

    def _launch(
        self, name: str, cases: Sequence[Case]
    ) -> tuple[Callable[[int, Any, Tensor], None], list[Any]]:
        if name not in mutants():
            reduction = parse_reduction(name)

            def real(number: int, arguments: Any, region: Tensor) -> None:
                x, weights, mapping = arguments
                scale = cases[number].scale
                lora_shrink(x, weights, mapping, reduction=reduction, scale=scale, out=region)

            return real, []
        from shrink_mutants import delays_shape, run_mutant

        delays = []
        most = 0
        for case in cases:
            x, weights, _ = self.numbers.tensors(case)
            shape = delays_shape(x, weights, MUTANT_REDUCTION)
            generator = torch.Generator("cuda").manual_seed(case.seed)
            options = {"dtype": torch.int32, "device": "cuda", "generator": generator}
            delays.append(torch.randint(0, LONGEST_DELAY, shape, **options))
            most = max(most, shape[0])
        # Shared by all launches of the graph, which follow one another, and left as they are between
        # replays: only a kernel that resets them can run twice.
        counters = torch.zeros(most, dtype=torch.int32, device="cuda")

        def mutant(number: int, arguments: Any, region: Tensor) -> None:
            x, weights, mapping = arguments
            region.copy_(
                run_mutant(
                    name,
                    x,
                    weights,
                    mapping,
                    reduction=MUTANT_REDUCTION,
                    scale=cases[number].scale,
                    delays=delays[number],
                    counters=counters,
                )
            )

        return mutant, [delays, counters]

    def run(self, names: Sequence[str], replays: int) -> None:
        """Replay one new graph for each name at once, and count."""
        graphs = [
            self.load(name, draw_cases(self.chooser, CALLS_PER_GRAPH, self.numbers.size))
            for name in names
        ]
        torch.cuda.synchronize()
        for _ in range(replays):
            # On another stream each time, beside the others; never beside itself: the driver lets
            # a graph wait for its own last launch.
            streams = self.chooser.sample(self._streams, len(graphs))
            for loaded, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    loaded.graph.replay()
            with torch.cuda.stream(self._noise_stream):
                block = self.chooser.choice(self._noise)
                for _ in range(self.chooser.randrange(4)):
                    torch.mm(block, block)
        torch.cuda.synchronize()
        for loaded in graphs:
            count = self.counts[loaded.name]
            count.launches += replays * len(loaded.cases)
            count.outputs += replays * sum(case.outputs for case in loaded.cases)
            count.differing += int(loaded.differing.sum())
            count.calls += len(loaded.cases)
            count.calls_differing += int((loaded.differing > 0).sum())
            loaded.graph.reset()
        graphs.clear()
        torch.cuda.empty_cache()


def bits(tensor: Tensor) -> Tensor:
    """View FP32 as integers, so that NaN and signed zeros are compared, too."""
    return tensor.view(torch.int32)


def ends_of(cases: Sequence[Case]) -> Tensor:
    """Return where the room of each call ends in a buffer of all."""
    return torch.tensor([case.space for case in cases]).cumsum(0)


def regions_of(buffer: Tensor, cases: Sequence[Case]) -> list[Tensor]:
    """Return each call's outputs in a buffer of all, as [slices, M, R]."""
    rooms = buffer.split([case.space for case in cases])
    return [room[: case.outputs].view(case.shape) for case, room in zip(cases, rooms, strict=True)]


def mutants() -> tuple[str, ...]:
    """Names of the delayed copies of the hand-over kernel, the faithful one first."""
    from shrink_mutants import MUTANTS

    return (FAITHFUL, *(name for name in MUTANTS if name != FAITHFUL))


def kept_partials(
    reduction: Reduction,
    x: Tensor,
    weights: Sequence[Tensor],
    mapping: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the partials, [S, slices, M, R], that the kernel itself adds."""
    if reduction.kind == "local":
        from fliptrace_kernels import local

        out = torch.empty((len(weights), x.shape[0], weights[0].shape[-2]), device=x.device)
        return local.with_partials(x, weights, mapping, reduction.splits, scale, out)
    from fliptrace_kernels import triton_shrink

    return triton_shrink.shrink_with_partials(x, weights, mapping, reduction, scale)[1]


def compile_family(job: tuple[str, Family]) -> str:
    """Run a Triton kernel once in one family, so that Triton's cache holds it."""
    name, family = job
    numbers = Numbers(1 << 24, "cuda", 0)
    # One binary serves every number of rows.
    for rows in (1, 40):
        case = Case(family, rows, 0.7, 0, (0,) * family.slices, 0)
        x, weights, mapping = numbers.tensors(case)
        if name in mutants():
            from shrink_mutants import delays_shape, run_mutant

            shape = delays_shape(x, weights, MUTANT_REDUCTION)
            delays = torch.zeros(shape, dtype=torch.int32, device="cuda")
            run_mutant(
                name, x, weights, mapping, reduction=MUTANT_REDUCTION, scale=0.7, delays=delays
            )
        else:
            reduction = parse_reduction(name)
            lora_shrink(x, weights, mapping, reduction=reduction, scale=0.7)
            if reduction.kind == "deterministic":
                kept_partials(reduction, x, weights, mapping, 0.7)
    torch.cuda.synchronize()
    return ""


def local_variants(name: str, rows: Sequence[int]) -> list[Variant]:
    """List what calls of `local` with so many rows start, in every family, with and without partials."""
    splits = parse_reduction(name).splits
    found = []
    for family in FAMILIES:
        shape = {"size": family.size, "rank": family.rank, "slices": family.slices}
        mode = adapters_mode(max(1, family.adapters), mapping=family.adapters > 0)
        element = element_of(getattr(torch, family.dtype))
        for count in rows:
            layout = choose(rows=count, splits=splits, **shape)
            found += [
                Variant(
                    family.size,
                    family.rank,
                    splits,
                    layout,
                    element,
                    mode,
                    family.size % WORD == 0,
                    kind,
                )
                for kind in (WITHOUT_PARTIALS, WITH_PARTIALS)
            ]
    return list(dict.fromkeys(found))


def compile_local(names: Sequence[str], rows: Sequence[int]) -> None:
    """Compile and load at once, on all cores: what `local` compiles is kept in this process alone."""
    variants = [
        variant
        for name in names
        if parse_reduction(name).kind == "local"
        for variant in local_variants(name, rows)
    ]
    device.load_all(variants, torch.cuda.current_device())


def compile_all(names: Sequence[str], log: Callable[[str], None]) -> None:
    """Fill Triton's cache in as many processes as there are cores, and compile `local` meanwhile."""
    local_names = [name for name in names if name.startswith("local")]
    jobs = [(name, family) for name in names if name not in local_names for family in FAMILIES]
    with in_processes(compile_family, jobs) as problems:
        compile_local(local_names, [rows for rows in ROW_STEPS if rows <= MANY_ROWS])
    for problem in problems:
        log(f"while compiling: {problem}")


def plan(launches: int, reductions: Sequence[str], replays: int) -> Iterator[list[str]]:
    """Yield which kernels run at once, until every launch is planned; each gets its share."""
    names = [*reductions, FAITHFUL]
    rounds = -(-launches // (replays * CALLS_PER_GRAPH))
    order = [names[number % len(names)] for number in range(rounds)]
    for start in range(0, rounds, STREAMS):
        yield order[start : start + STREAMS]


def stress(options: argparse.Namespace, log: Callable[[str], None]) -> int:
    """Run the real kernels, then the mutants; returns the exit code."""
    started = time.monotonic()
    compile_all([*options.reductions, MUTANT_REDUCTION, *mutants()], log)
    log(f"compiled after {time.monotonic() - started:.0f} s")
    run = Stress(options.seed)
    rounds = list(plan(options.launches, options.reductions, REPLAYS))
    for number, names in enumerate(rounds):
        run.run(names, REPLAYS)
        if number % 5 == 4 or number + 1 == len(rounds):
            done = sum(count.launches for count in run.counts.values())
            wrong = sum(count.differing for count in run.counts.values())
            log(f"{done} launches, {wrong} differ, {time.monotonic() - started:.0f} s")
    real = dict(run.counts)
    for name in mutants()[1:]:
        for _ in range(options.mutant_rounds):
            run.run([name] * STREAMS, REPLAYS // 2)
        count = run.counts[name]
        log(f"mutant, {name}: {count.differing} of {count.launches} launches differ")
    broken = {name: count for name, count in run.counts.items() if name not in real}
    bad = sum(count.differing + count.sums_differing for count in real.values())
    summary = {
        "machine": str(this_machine()),
        "seed": options.seed,
        "seconds": round(time.monotonic() - started, 1),
        "launches": sum(count.launches for count in real.values()),
        "differing": sum(count.differing for count in real.values()),
        "streams": STREAMS,
        "longest_delay_ns": LONGEST_DELAY,
        "kernels": {name: asdict(count) for name, count in real.items()},
        "mutants": {
            name: asdict(count) | {"caught": count.differing > 0} for name, count in broken.items()
        },
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "stress.json").write_text(json.dumps(summary, indent=1) + "\n")
    for name, count in run.counts.items():
        caught = (
            ""
            if name in real
            else " (mutant: caught)"
            if count.differing
            else " (mutant: NOT caught)"
        )
        log(
            f"{name}{caught}: {count.differing} of {count.launches} launches differ, in "
            f"{count.calls_differing} of {count.calls} calls; {count.outputs} outputs compared; "
            f"{count.sums_differing} of {count.sums_checked} first runs are not the sum of their partials"
        )
    log(
        f"{summary['launches']} launches, {bad} wrong, {summary['seconds']} s: {summary['machine']}"
    )
    return 1 if bad else 0


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--launches", type=int, default=1_000_000, help="of kernels that must be right"
    )
    parser.add_argument("--mutant-rounds", type=int, default=2, help="each is 20,000 launches")
    parser.add_argument("--reductions", nargs="+", default=list(REDUCTIONS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("shrink-bench"))
    options = parser.parse_args()
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    try:
        require_cuda()
        code = stress(options, log)
    except FliptraceKernelsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "shrink_stress.log").write_text("\n".join(lines) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
