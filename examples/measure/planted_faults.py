"""Plant faults in live executions and check that the comparison names each one, at its coordinate and nothing else.

    python examples/measure/planted_faults.py --planted 200 --unplanted 200 --seed 1

Each pair is two recorded executions of one random prompt under one repeatable reduction or one schedule seed. In the
candidate of a planted pair one element of one shrink is changed as it is handed to expand, at a random step, site,
position and rank index, and everything downstream is computed from it:

* latent: to a neighbouring FP32 value that rounds to the same 16-bit value;
* surviving: across its nearest rounding boundary, by 1 to 16 FP32 ULP beyond it.

The comparison must report that coordinate as the first difference, with both values bit for bit, its class, and as a
root; a surviving one also as the first surviving root, with the boundary it was pushed across; and no other origin.
Unplanted pairs pass through an interceptor that changes nothing, and must be identical.

Without --model and --adapter the tiny random models of the tests are used, a Llama and a Gemma 3 with sliding windows
in turn. The last line printed is a JSON summary; the exit code is 0 when every pair was reported as it must be.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fliptrace.analysis import compare
from fliptrace.capture.decoding import generate
from fliptrace.capture.recorder import Recorder, RecorderOptions
from fliptrace.capture.transformers_engine import TransformersEngine, load_model
from fliptrace.manifest import Manifest
from fliptrace.numerics import CoordinateClass, integer_view, ordered_integers, round_to
from fliptrace.numerics.rounding import nearest_boundary
from fliptrace.store import TraceWriter, open_trace
from fliptrace.trace import Closing, Trace
from fliptrace.verdicts import Origin, Outcome, PairDiff

_REDUCTIONS = ("unsplit", "unsplit", "unsplit", "deterministic:8", "atomic:8")
_LARGEST_PUSH_ULP = 16


@dataclass(frozen=True)
class Fault:
    """What to change, and where.

    Attributes:
        site: the site's index; step, row, rank_index: the rest of the coordinate, row counted within the step.
        surviving: push across the nearest boundary instead of to a neighbour that rounds alike.
        ulp: how many FP32 ULP beyond the boundary.
        upwards: which neighbour to try first for a latent fault.
    """

    site: int
    step: int
    row: int
    rank_index: int
    surviving: bool
    ulp: int
    upwards: bool


@dataclass
class Planter:
    """An interceptor that plants one fault, or none, and remembers the element before and after."""

    engine: TransformersEngine
    fault: Fault | None
    before: Tensor | None = None
    after: Tensor | None = None
    boundary: float | None = None

    def __call__(self, site: int, _operand: Tensor, z: Tensor) -> Tensor:
        """Change the element when its step and site have come."""
        fault = self.fault
        if fault is None or (site, self.engine.step_number) != (fault.site, fault.step):
            return z
        changed = z.clone()
        self.before = z[fault.row, fault.rank_index].clone()
        self.after = self._changed(self.before, fault)
        changed[fault.row, fault.rank_index] = self.after
        return changed

    def _changed(self, value: Tensor, fault: Fault) -> Tensor:
        dtype = self.engine.dtype
        if fault.surviving:
            self.boundary = nearest_boundary(float(value), dtype)
            return pushed_across(value, fault.ulp, dtype)
        directions = (1, -1) if fault.upwards else (-1, 1)
        neighbours = [moved(value, direction) for direction in directions]
        return next(
            other
            for other in neighbours
            if same_bits(round_to(other, dtype), round_to(value, dtype))
        )


def moved(value: Tensor, steps: int) -> Tensor:
    """Return the FP32 value a number of representable values further up."""
    ordered = int(ordered_integers(value)) + steps
    bits = ordered if ordered >= 0 else -(ordered + 1) - (1 << 31)
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def pushed_across(value: Tensor, ulp: int, dtype: torch.dtype) -> Tensor:
    """Return the FP32 value ``ulp`` representable values beyond the nearest boundary, seen from ``value``."""
    boundary = nearest_boundary(float(value), dtype)
    if boundary is None:
        raise ValueError(f"{float(value)} has no rounding boundary in {dtype}")
    midpoint = torch.tensor(boundary, dtype=torch.float32)
    rounded = float(round_to(value, dtype))
    return moved(midpoint, -ulp if rounded > boundary else ulp)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Tell whether two tensors are equal bit for bit."""
    return torch.equal(integer_view(first), integer_view(second))


@dataclass(frozen=True)
class Plan:
    """One pair: the prompt, how shrinks sum, how many tokens, and the fault."""

    prompt: tuple[int, ...]
    reduction: str
    seed: int | None
    tokens: int
    fault: Fault | None


def draw_plan(engine: TransformersEngine, choose: random.Random, planted: bool) -> Plan:
    """Draw a pair at random."""
    vocabulary = int(engine.model.get_input_embeddings().weight.shape[0])
    prompt = tuple(choose.randrange(4, vocabulary) for _ in range(choose.randint(4, 14)))
    reduction = choose.choice(_REDUCTIONS)
    tokens = choose.randint(3, 7)
    fault = None
    if planted:
        step = choose.randrange(tokens)
        site = choose.randrange(len(engine.sites))
        row = choose.randrange(len(prompt)) if step == 0 else 0
        fault = Fault(
            site=site,
            step=step,
            row=row,
            rank_index=choose.randrange(int(engine.loaded.description["adapter"]["rank"])),
            surviving=choose.random() < 0.5,
            ulp=choose.randint(1, _LARGEST_PUSH_ULP),
            upwards=choose.random() < 0.5,
        )
    seed = choose.randrange(10**6) if reduction.startswith("atomic") else None
    return Plan(prompt, reduction, seed, tokens, fault)


def record(engine: TransformersEngine, plan: Plan, planter: Planter, path: Path) -> Trace:
    """Record one execution of a plan with an interceptor in place."""
    engine.set_reduction(plan.reduction, plan.seed)
    sections = {**engine.describe(), "prompt": {"ids_sha256": str(plan.prompt)}}
    with TraceWriter(path, Manifest(sections)) as writer:
        recorder = Recorder(engine, writer, RecorderOptions())
        with engine.observed(recorder), engine.intercepted(planter):
            execution = generate(
                engine,
                plan.prompt,
                max_new_tokens=plan.tokens,
                end_ids=(),
                on_choice=recorder.complete_step,
            )
        writer.close(Closing(True, execution.stop_reason, len(execution.token_ids)))
    return open_trace(path)


def run_pair(engine: TransformersEngine, plan: Plan, folder: Path) -> tuple[PairDiff, Planter]:
    """Record reference and candidate of a plan and compare them."""
    planter = Planter(engine, plan.fault)
    reference = record(engine, plan, Planter(engine, None), folder / "reference.trace")
    candidate = record(engine, plan, planter, folder / "candidate.trace")
    difference = compare(reference, candidate)
    for path in folder.glob("*.trace"):
        path.unlink()
    return difference, planter


def complaints(
    engine: TransformersEngine, plan: Plan, found: PairDiff, planter: Planter
) -> list[str]:
    """Say what the comparison reported otherwise than it was planted; empty when all is as it must be."""
    fault = plan.fault
    wrong: list[str] = []

    def expect(what: str, is_value: Any, must_be: Any) -> None:
        if is_value != must_be:
            wrong.append(f"{what} is {is_value!r}, must be {must_be!r}")

    expect("foreign root", found.foreign_root, None)
    if fault is None:
        expect("outcome", found.outcome, Outcome.IDENTICAL)
        expect("first difference", found.first_difference, None)
        expect("roots", (found.root_rows, found.statistics.differing), (0, 0))
        return wrong
    if planter.before is None or planter.after is None:
        return ["the fault was never planted"]
    first = found.first_difference
    if first is None:
        return [*wrong, "no difference was reported"]
    expected_class = CoordinateClass.SURVIVING if fault.surviving else CoordinateClass.LATENT
    position = fault.row if fault.step == 0 else len(plan.prompt) + fault.step - 1
    expect("site", first.site, engine.sites[fault.site])
    expect("step and position", (first.step, first.position), (fault.step, position))
    expect("origin", first.origin, Origin.ROOT)
    expect("class", first.row_class, expected_class)
    expect(
        "coordinates",
        (first.latent, first.surviving),
        (int(not fault.surviving), int(fault.surviving)),
    )
    element = first.coordinates[0]
    expect("rank index", element.coordinate.rank_index, fault.rank_index)
    expect("class of the coordinate", element.coordinate_class, expected_class)
    for name, bits, value in (
        ("reference", element.reference_bits, planter.before),
        ("candidate", element.candidate_bits, planter.after),
    ):
        expect(f"{name} bits", int(bits, 16), int(value.view(torch.int32)) & 0xFFFFFFFF)
    expect("roots", (found.root_rows, found.surviving_root_rows), (1, int(fault.surviving)))
    if fault.surviving:
        expect("first surviving", found.first_surviving, first)
        expect("boundary", element.boundary.boundary, planter.boundary)
        expect("boundaries crossed", element.boundary.boundaries_crossed, 1)
    else:
        expect("first surviving", found.first_surviving, None)
        expect("outcome", found.outcome, Outcome.LATENT)
        expect("differing coordinates", found.statistics.differing, 1)
    return wrong


@dataclass
class Summary:
    """Counts over all pairs."""

    planted: int = 0
    planted_as_expected: int = 0
    latent: int = 0
    surviving: int = 0
    propagating: int = 0
    absorbed: int = 0
    flipped_token: int = 0
    unplanted: int = 0
    unplanted_identical: int = 0
    reductions: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, plan: Plan, found: PairDiff, wrong: list[str]) -> None:
        """Count one pair."""
        self.reductions[plan.reduction] = self.reductions.get(plan.reduction, 0) + 1
        self.failures += [f"{plan}: {complaint}" for complaint in wrong]
        if plan.fault is None:
            self.unplanted += 1
            self.unplanted_identical += not wrong
            return
        self.planted += 1
        self.planted_as_expected += not wrong
        self.latent += not plan.fault.surviving
        self.surviving += plan.fault.surviving
        if plan.fault.surviving and found.first_difference is not None:
            self.propagating += found.first_difference.fate.value == "propagating"
            self.absorbed += found.first_difference.fate.value == "absorbed"
        self.flipped_token += found.flip is not None


def run_pairs(
    engines: list[TransformersEngine], *, planted: int, unplanted: int, seed: int, folder: Path
) -> Summary:
    """Run pairs on the engines in turn."""
    choose = random.Random(seed)
    order = [True] * planted + [False] * unplanted
    choose.shuffle(order)
    summary = Summary()
    for number, is_planted in enumerate(order):
        engine = engines[number % len(engines)]
        plan = draw_plan(engine, choose, is_planted)
        found, planter = run_pair(engine, plan, folder)
        summary.add(plan, found, complaints(engine, plan, found, planter))
    return summary


def tiny_engines(folder: Path) -> list[TransformersEngine]:
    """Build engines on the tiny random models of the tests."""
    path = Path(__file__).resolve().parents[2] / "tests" / "capture" / "tiny_models.py"
    tiny = _module(path)
    engines = []
    for name, configuration in (
        ("llama", tiny.llama_configuration()),
        ("gemma", tiny.gemma_configuration()),
    ):
        model = tiny.write_model(folder / name, configuration)
        adapter = tiny.write_adapter(folder / f"{name}-adapter", model)
        engines.append(TransformersEngine(load_model(str(model), str(adapter), device="cpu")))
    return engines


def _module(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    if specification is None or specification.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def main() -> int:
    """Parse the command line, run, print the summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--planted", type=int, default=200, help="pairs with a fault (default: 200)"
    )
    parser.add_argument(
        "--unplanted", type=int, default=200, help="pairs without one (default: 200)"
    )
    parser.add_argument("--seed", type=int, default=1, help="what is drawn (default: 1)")
    parser.add_argument("--model", help="a model as for trace-pair, instead of the tiny ones")
    parser.add_argument("--adapter", help="its adapter")
    arguments = parser.parse_args()
    if (arguments.model is None) != (arguments.adapter is None):
        parser.error("--model and --adapter are given together or not at all")
    torch.set_num_threads(1)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fliptrace-planted-") as name:
        folder = Path(name)
        if arguments.model is None:
            engines, models = tiny_engines(folder), "tiny random Llama and Gemma 3"
        else:
            loaded = load_model(arguments.model, arguments.adapter, device="cpu")
            engines, models = [TransformersEngine(loaded)], arguments.model
        summary = run_pairs(
            engines,
            planted=arguments.planted,
            unplanted=arguments.unplanted,
            seed=arguments.seed,
            folder=folder,
        )
    for failure in summary.failures:
        print(failure, file=sys.stderr)
    report = {
        "models": models,
        "seed": arguments.seed,
        **asdict(summary),
        "seconds": round(time.monotonic() - start, 1),
        "torch": torch.__version__,
    }
    print(json.dumps(report))
    return int(bool(summary.failures))


if __name__ == "__main__":
    sys.exit(main())
