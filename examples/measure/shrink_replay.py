"""Replay a model's real shrink inputs many times under each reduction and count what differs.

    python examples/measure/shrink_replay.py --folder results
    python examples/measure/shrink_replay.py --model MODEL --adapter ADAPTER --prompts gsm8k:PATH --select 0-9

Without a model the bundled one runs. Operands and weights of every shrink are taken from the prefill and the
first decode step of each prompt, run under ``unsplit``; projections that share their input are one call, as
in vLLM. Each call is then executed ``--executions`` times under each reduction, on a GPU as CUDA graphs of a
whole forward's calls, and every execution is compared with the first. On a CPU, orders of arrival of
``atomic`` come from seeds. Writes replay.json; exit code 1 if a repeatable reduction did not repeat.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fliptrace as ft
from fliptrace.errors import FliptraceError
from fliptrace.pair.prompts import parse_selection, read_dataset
from fliptrace_kernels import ArrivalSchedule, FliptraceKernelsError, lora_shrink, parse_reduction

REDUCTIONS = ("atomic:8", "atomic:vllm", "unsplit", "deterministic:8", "local:32")
PHASES = ("prefill", "first decode step")


@dataclass
class Call:
    """One shrink as a kernel gets it: x [M, K] and one A [R, K] per slice."""

    x: Tensor
    weights: list[Tensor]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the outputs, [slices, M, R]."""
        return len(self.weights), self.x.shape[0], self.weights[0].shape[0]


@dataclass
class Forward:
    """All shrinks of one forward."""

    phase: str
    calls: list[Call] = field(default_factory=list)


class Collector:
    """An observer that keeps the operands of every shrink, and which A they meet."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """``weights`` holds the A of every site."""
        self.forwards: list[Forward] = []
        self._weights = weights
        self._address = 0

    def begin_step(self, step: int, first_position: int, token_ids: Sequence[int]) -> None:
        """Start a forward."""
        self.forwards.append(Forward(PHASES[step]))
        self._address = 0

    def shrink(self, site: int, operand: Tensor, output: Tensor, launch: str) -> None:
        """Keep a copy of the operand, or add a slice to the call before if it is the same."""
        rows = operand.reshape(-1, operand.shape[-1])
        calls = self.forwards[-1].calls
        weight = self._weights[site]
        if (
            calls
            and rows.data_ptr() == self._address
            and calls[-1].weights[0].shape == weight.shape
            and torch.equal(calls[-1].x, rows)
        ):
            calls[-1].weights.append(weight)
            return
        self._address = rows.data_ptr()
        calls.append(Call(rows.clone(), [weight]))

    def projection(self, site: int, output: Tensor) -> None:
        """Nothing to keep."""

    def cache_rows(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Nothing to keep."""

    def operation(self, key: str, is_module: bool, inputs: Tensor, outputs: Tensor) -> None:
        """Nothing to keep."""

    def end_step(self, logits: Tensor) -> None:
        """Nothing to keep."""


def collect(engine: Any, prompts: Sequence[Sequence[int]]) -> list[Forward]:
    """Run prefill and first decode step of every prompt under ``unsplit`` and keep their shrinks."""
    engine.set_reduction("unsplit")
    weights = []
    for site in engine.sites:
        (module,) = engine.model.get_submodule(site.path).lora_A.values()
        weights.append(module.weight.detach().contiguous())
    collector = Collector(weights)
    with engine.observed(collector):
        for ids in prompts:
            engine.start(ids)
            token = int(engine.step().argmax())
            engine.step(token)
    return collector.forwards


@dataclass
class Tally:
    """What replays of one reduction in one phase gave.

    Attributes:
        reduction: its identity.
        phase: of the forwards whose calls were replayed.
        calls: different calls.
        comparisons: executions compared with the first of their call.
        comparisons_differing: how many had another bit.
        elements: FP32 outputs compared.
        elements_differing: how many had another bit.
        elements_surviving: how many were still different after rounding to BF16.
        mean_difference: mean of |difference| over all compared elements.
        largest_difference: largest |difference|.
    """

    reduction: str
    phase: str
    calls: int = 0
    comparisons: int = 0
    comparisons_differing: int = 0
    elements: int = 0
    elements_differing: int = 0
    elements_surviving: int = 0
    mean_difference: float = 0.0
    largest_difference: float = 0.0


class Comparison:
    """Compares outputs of a forward's calls, in one buffer, with those of the first execution."""

    def __init__(self, first: Tensor, ends: Tensor) -> None:
        """``first`` [N] FP32; ``ends`` int64, where each call's outputs end."""
        self._first = first.clone()
        self._rounded = first.bfloat16().view(torch.int16)
        self._ends = ends
        counts = {"dtype": torch.int64, "device": first.device}
        self.calls = torch.zeros((), **counts)
        self.elements = torch.zeros((), **counts)
        self.surviving = torch.zeros((), **counts)
        self.total = torch.zeros((), dtype=torch.float64, device=first.device)
        self.largest = torch.zeros((), dtype=torch.float32, device=first.device)

    def add(self, out: Tensor) -> None:
        """Count where another execution differs; nothing waits for the device."""
        unequal = out.view(torch.int32) != self._first.view(torch.int32)
        seen = torch.cumsum(unequal, 0, dtype=torch.int64)[self._ends - 1]
        self.calls += (seen > torch.nn.functional.pad(seen[:-1], (1, 0))).sum()
        self.elements += seen[-1]
        self.surviving += (out.bfloat16().view(torch.int16) != self._rounded).sum()
        difference = (out - self._first).abs()
        self.total += difference.sum(dtype=torch.float64)
        self.largest = torch.maximum(self.largest, difference.max())


def executor(
    forward: Forward, reduction: str, out: Tensor
) -> tuple[Callable[[int], None], list[Any]]:
    """Return what executes a forward's calls into ``out``, given the number of the execution."""
    named = parse_reduction(reduction)
    sizes = [math.prod(call.shape) for call in forward.calls]
    regions = [
        region.view(call.shape)
        for call, region in zip(forward.calls, out.split(sizes), strict=True)
    ]

    def run(execution: int) -> None:
        for number, (call, region) in enumerate(zip(forward.calls, regions, strict=True)):
            schedule = None
            if named.needs_arrival_order and out.device.type == "cpu":
                schedule = ArrivalSchedule(execution)
            lora_shrink(
                call.x,
                call.weights,
                reduction=named,
                schedule=schedule,
                call_key=number,
                out=region,
            )

    if out.device.type == "cpu":
        return run, []
    run(0)  # compiles
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            run(0)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    return lambda _: graph.replay(), [graph]


def replay(forwards: Sequence[Forward], reduction: str, executions: int) -> list[Tally]:
    """Execute every call of every forward many times; one tally per phase."""
    identity = str(parse_reduction(reduction))
    tallies = {phase: Tally(identity, phase) for phase in PHASES}
    for forward in forwards:
        sizes = torch.tensor([math.prod(call.shape) for call in forward.calls])
        device = forward.calls[0].x.device
        out = torch.full((int(sizes.sum()),), float("nan"), device=device)
        run, keeps = executor(forward, reduction, out)
        out.fill_(float("nan"))
        run(0)
        if bool(out.isnan().any()):
            raise RuntimeError(f"{identity} left outputs unwritten, or the model's inputs are NaN")
        comparison = Comparison(out, sizes.cumsum(0).to(device))
        for execution in range(1, executions):
            out.fill_(float("nan"))
            run(execution)
            comparison.add(out)
        tally = tallies[forward.phase]
        tally.calls += len(sizes)
        tally.comparisons += len(sizes) * (executions - 1)
        tally.comparisons_differing += int(comparison.calls)
        tally.elements += int(sizes.sum()) * (executions - 1)
        tally.elements_differing += int(comparison.elements)
        tally.elements_surviving += int(comparison.surviving)
        tally.mean_difference += float(comparison.total)
        tally.largest_difference = max(tally.largest_difference, float(comparison.largest))
        for graph in keeps:
            graph.reset()
    for tally in tallies.values():
        tally.mean_difference /= max(1, tally.elements)
    return list(tallies.values())


def line_of(tally: Tally) -> str:
    """Say in one line what a tally found."""
    share = 100 * tally.comparisons_differing / max(1, tally.comparisons)
    elements = 100 * tally.elements_differing / max(1, tally.elements)
    surviving = tally.elements_surviving / max(1, tally.elements_differing)
    return (
        f"{tally.reduction}, {tally.phase}: {share:.3f} % of {tally.comparisons} comparisons differ "
        f"({tally.calls} calls), {elements:.3f} % of {tally.elements} elements; mean |difference| "
        f"{tally.mean_difference:.3g}, largest {tally.largest_difference:.3g}; {surviving:.3g} of "
        "differing elements survive rounding to BF16"
    )


def prompts_of(options: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Encode the chosen prompts."""
    select = parse_selection(options.select)
    if options.prompts is None:
        known = ft.bundled_model().prompts
        texts = [known[row % len(known)].text for row in select]
    else:
        texts = [text for _, text in read_dataset(options.prompts, select)]
    return [list(ft.encode_prompt(tokenizer, text).ids) for text in texts]


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="the bundled one if left out")
    parser.add_argument("--adapter")
    parser.add_argument("--prompts", help="gsm8k:PATH or jsonl:PATH; the bundled ones if left out")
    parser.add_argument("--select", nargs="+", default=["0-9"])
    parser.add_argument("--reductions", nargs="+", default=list(REDUCTIONS))
    parser.add_argument("--executions", type=int, default=100, help="of each call; at least 2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, default=Path("shrink-bench"))
    options = parser.parse_args()
    if options.executions < 2:
        parser.error(f"--executions must be at least 2; got {options.executions}")
    started = time.monotonic()
    try:
        bundled = ft.bundled_model()
        model = options.model or bundled.model
        adapter = options.adapter or bundled.adapter
        engine = ft.load_engine(model, adapter, device=options.device)
        forwards = collect(engine, prompts_of(options, engine.loaded.tokenizer))
        print(f"captured after {time.monotonic() - started:.0f} s", flush=True)
        tallies = [
            tally
            for reduction in options.reductions
            for tally in replay(forwards, reduction, options.executions)
        ]
    except (FliptraceError, FliptraceKernelsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for tally in tallies:
        print(line_of(tally))
    unrepeatable = [
        tally
        for tally in tallies
        if tally.comparisons_differing and parse_reduction(tally.reduction).is_repeatable
    ]
    document = {
        "machine": torch.cuda.get_device_name() if engine.device.type == "cuda" else "CPU",
        "model": Path(model).name,
        "adapter": Path(adapter).name,
        "prompts": len(forwards) // len(PHASES),
        "executions": options.executions,
        "seconds": round(time.monotonic() - started, 1),
        "rows": [asdict(tally) for tally in tallies],
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "replay.json").write_text(json.dumps(document, indent=1) + "\n")
    print(
        f"{len(forwards)} forwards, {document['seconds']} s; repeatable reductions that did not "
        f"repeat: {len(unrepeatable)}"
    )
    return 1 if unrepeatable else 0


if __name__ == "__main__":
    sys.exit(main())
