r"""Measure what recording costs in vLLM, eager: one engine, everything interleaved in one run.

    python examples/measure/vllm_cost.py MODEL ADAPTER --tokens 128 --rounds 5 --out cost.jsonl
    python examples/measure/vllm_cost.py MODEL ADAPTER --batch 16 --arms alone recorded --out cost.jsonl
    FLIPTRACE_SHRINK=deterministic:8 python examples/measure/vllm_cost.py MODEL ADAPTER --rounds 0 --equal 100 \
        --out cost.jsonl
    python examples/measure/vllm_cost.py MODEL ADAPTER --rounds 0 --profile --out cost.jsonl

Four arms take turns, in another order each round: ``alone`` (the LLM generates with nothing attached: vLLM's own loop
over its own engine), ``idle`` (the same while a tracer is attached to it), ``unrecorded`` (the tracer steps it) and
``recorded`` (the same, recorded into a trace). With ``--batch N`` each is of the same N requests; one of them is
recorded, the others are its neighbours. Times are of decoding, from the first token on, in ms per token of a request;
of ``recorded`` also until the trace is committed. Ratios are per round, and their median counts. Beside the time on
the clock there is the time that the main thread computed, which other processes of a busy machine change less; it
leaves out what waits for the device. ``unstored``, when asked for, is ``recorded`` without handing steps to the store:
what is missing to ``recorded`` is what the store's thread takes from the thread that runs the model. All arms must
choose the same tokens where the shrink is repeatable.

``--equal N`` runs N of the bundled word problems untraced, and then each again, traced, and compares their tokens. With
FLIPTRACE_SHRINK the untraced ones are the LLM's own, under that reduction, else those of the tracer under --reduction.
``--profile`` prints torch.profiler's dearest operations of one recorded and one unrecorded step, and how long each part
of recording takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch

import fliptrace as ft
from fliptrace.capture.decoding import choose, generate
from fliptrace.capture.recorder import Recorder, RecorderOptions
from fliptrace.capture.vllm_engine import (
    OWN_REDUCTION,
    Neighbour,
    VllmEngine,
    load_llm,
    load_tokenizer,
)
from fliptrace.manifest import Manifest
from fliptrace.store import TraceWriter
from fliptrace.studies.engine_process_vllm import show_plugin
from fliptrace.trace import Closing

QUESTION = (
    "Janet has 16 eggs. She eats three and sells the rest for $2 each. How much does she earn?"
)
ARMS = ("alone", "idle", "unrecorded", "recorded")
#: Only when asked for.
UNSTORED = "unstored"


class Bench:
    """One LLM, with and without a tracer."""

    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        """Load the model."""
        self.options = options
        self.folder = Path(folder)
        texts = [prompt.text for prompt in ft.bundled_model().prompts[1 : options.batch]]
        tokenizer = load_tokenizer(options.model)
        self.loaded = load_llm(
            options.model,
            options.adapter,
            arguments=options.vllm_arguments or {},
            neighbours=[Neighbour(ft.encode_prompt(tokenizer, text).ids) for text in texts],
        )
        self.prompt = ft.encode_prompt(self.loaded.tokenizer, QUESTION)
        self.engine: VllmEngine | None = None
        self.captured: bool | None = None

    def attach(self) -> VllmEngine:
        """Return the tracer's engine."""
        if self.engine is None:
            seed = 0 if self._simulated() else None
            self.engine = VllmEngine(self.loaded, reduction=self.options.reduction, seed=seed)
        return self.engine

    def detach(self) -> None:
        """Take the tracer off."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def _simulated(self) -> bool:
        return self.options.reduction.startswith("atomic") and not torch.cuda.is_available()

    def run(self, arm: str, tokens: int) -> dict[str, Any]:
        """Generate ``tokens`` tokens in one way; seconds of decoding, of committing, and the tokens."""
        if arm == "alone":
            self.detach()
            return self.by_llm(self.prompt.ids, tokens)
        engine = self.attach()
        if arm == "idle":
            engine._request.end()
            return self.by_llm(self.prompt.ids, tokens)
        return self.by_tracer(
            engine,
            self.prompt.ids,
            tokens,
            recorded=arm in ("recorded", UNSTORED),
            stored=arm != UNSTORED,
        )

    def by_llm(self, prompt_ids: tuple[int, ...], tokens: int) -> dict[str, Any]:
        """Step vLLM's own engine with the whole batch; the prefill ends with the first token."""
        from vllm import SamplingParams

        llm_engine, hood = self.loaded.llm.llm_engine, self.loaded.neighbours
        requests = [(prompt_ids, self.loaded.lora_request)]
        if hood is not None:
            requests += [(one.prompt_ids, one.lora_request) for one in hood.requests]
        parameters = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        name = f"cost-{time.monotonic_ns()}"
        for number, (ids, adapter) in enumerate(requests):
            llm_engine.add_request(
                f"{name}-{number}",
                {"prompt_token_ids": list(ids)},
                parameters,
                lora_request=adapter,
            )
        marks: list[tuple[float, float]] = []
        answers: dict[str, list[int]] = {}
        while llm_engine.has_unfinished_requests():
            for output in llm_engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
            if not marks:
                marks.append(now())
        marks.append(now())
        if len(answers) != len(requests):
            raise RuntimeError(f"{len(answers)} of {len(requests)} requests answered")
        return spent_between(*marks) | {"ids": answers[f"{name}-0"]}

    def by_tracer(
        self,
        engine: VllmEngine,
        prompt_ids: tuple[int, ...],
        tokens: int,
        *,
        recorded: bool,
        stored: bool = True,
    ) -> dict[str, Any]:
        """Step the engine with the tracer, recorded or not; what is not stored is thrown away with its thread idle."""
        marks: list[tuple[float, float]] = []
        recorder, writer = self.recorder(engine) if recorded else (None, None)
        if writer is not None and not stored:
            writer.write_step = lambda *_arguments: None

        def on_choice(step: int, choice: Any, logits: torch.Tensor) -> None:
            if recorder is not None:
                recorder.complete_step(step, choice, logits)
            if step == 0:
                marks.append(now())

        arguments: dict[str, Any] = {"max_new_tokens": tokens, "end_ids": set()}
        if recorder is None:
            execution = generate(engine, prompt_ids, on_choice=on_choice, **arguments)
            marks.append(now())
        else:
            with engine.observed(recorder):
                execution = generate(engine, prompt_ids, on_choice=on_choice, **arguments)
                marks.append(now())
            writer.close(Closing(complete=True, stop_reason="max new tokens", steps=tokens))
            self.captured = recorder._arena is not None and recorder._arena._finishing.is_captured
        result = spent_between(*marks) | {"ids": list(execution.token_ids)}
        if recorded:
            result["committed"] = time.perf_counter() - marks[0][0]
        return result

    def recorder(self, engine: VllmEngine) -> tuple[Recorder, TraceWriter]:
        """Make a recorder that writes into a fresh file."""
        path = self.folder / "cost.trace"
        for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
            name.unlink(missing_ok=True)
        writer = TraceWriter(path, Manifest(engine.describe()))
        return Recorder(engine, writer, RecorderOptions()), writer


def now() -> tuple[float, float]:
    """Return the time when all that was launched is done, and how long this thread has computed."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.thread_time()


def spent_between(begin: tuple[float, float], end: tuple[float, float]) -> dict[str, Any]:
    """Return seconds of decoding on the clock and of this thread."""
    return {"decode": end[0] - begin[0], "thread": end[1] - begin[1]}


def measure(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Run all arms in turn, each round in another order."""
    arms = tuple(options.arms)
    for arm in arms:
        bench.run(arm, 8)
    rounds = []
    for number in range(options.rounds):
        turn = number % len(arms)
        rounds.append({arm: bench.run(arm, options.tokens) for arm in arms[turn:] + arms[:turn]})
    count = options.tokens - 1
    ratios: dict[str, list[float]] = {}
    for above, below in (
        ("idle", "alone"),
        ("unrecorded", "alone"),
        ("recorded", "alone"),
        ("recorded", "unrecorded"),
        (UNSTORED, "unrecorded"),
    ):
        if above in arms and below in arms:
            for what, suffix in (("decode", ""), ("thread", "_main_thread")):
                ratios[f"{above}_to_{below}{suffix}"] = [
                    one[above][what] / one[below][what] for one in rounds
                ]
            if above == "recorded":
                ratios[f"committed_to_{below}"] = [
                    one[above]["committed"] / one[below]["decode"] for one in rounds
                ]
    first = rounds[0][arms[0]]["ids"]
    return {
        "what": "cost",
        "batch": options.batch,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "ms_per_token": {
            arm: 1e3 * statistics.median(one[arm]["decode"] for one in rounds) / count
            for arm in arms
        },
        "ratio_median": {name: statistics.median(values) for name, values in ratios.items()},
        "ratio_min_max": {name: [min(values), max(values)] for name, values in ratios.items()},
        "tokens_equal": {arm: all(one[arm]["ids"] == first for one in rounds) for arm in arms},
        "digests_by_captured_graph": bench.captured,
        "engine": describe(bench),
    }


def compare_tokens(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Compare the tokens of traced and untraced requests, prompt by prompt."""
    by_plugin = bool(os.environ.get("FLIPTRACE_SHRINK"))
    tokenizer, tokens = bench.loaded.tokenizer, options.equal_tokens
    texts = [prompt.text for prompt in ft.bundled_model().prompts[: options.equal]]
    prompts = [ft.encode_prompt(tokenizer, text).ids for text in texts]
    untraced = []
    if by_plugin:
        bench.detach()
        untraced = [bench.by_llm(ids, tokens)["ids"] for ids in prompts]
    engine = bench.attach()
    if not by_plugin:
        untraced = [bench.by_tracer(engine, ids, tokens, recorded=False)["ids"] for ids in prompts]
    traced = [bench.by_tracer(engine, ids, tokens, recorded=True)["ids"] for ids in prompts]
    same = [one == other for one, other in zip(traced, untraced, strict=True)]
    return {
        "what": "tokens",
        "batch": options.batch,
        "prompts": len(prompts),
        "tokens": tokens,
        "equal": sum(same),
        "first_unequal": same.index(False) if False in same else None,
        "different_answers": len(set(map(tuple, traced))),
        "untraced": "vLLM's own loop" if by_plugin else "the tracer, unrecorded",
        "plugin": engine.plugin,
        "engine": describe(bench),
    }


def describe(bench: Bench) -> dict[str, Any]:
    """Name what ran."""
    engine = bench.attach()
    described = engine.describe()
    return {
        "reduction": described["reduction"]["identity"],
        "attention": described["model"]["attention"],
        "settings": described["engine"]["settings_read_in_worker"],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "sites": len(engine.sites),
    }


def profile(bench: Bench) -> dict[str, Any]:
    """Profile one step, unrecorded and recorded, and time the parts of recording over 48 steps."""
    engine = bench.attach()
    document: dict[str, Any] = {"what": "profile", "operations": {}}
    for recorded in (False, True):
        recorder, writer = bench.recorder(engine) if recorded else (None, None)
        name = "recorded" if recorded else "unrecorded"
        if recorder is None:
            step = stepper(engine, bench.prompt.ids, None)
            document["operations"][name] = profiled(step)
        else:
            with engine.observed(recorder):
                step = stepper(engine, bench.prompt.ids, recorder)
                document["operations"][name] = profiled(step)
            writer.close(Closing(complete=False, stop_reason="profiled", steps=0))
    document["parts_ms_per_step"] = parts(bench, engine)
    return document


def stepper(
    engine: VllmEngine, ids: tuple[int, ...], recorder: Recorder | None
) -> Callable[[], None]:
    """Start a generation; what is returned runs one step of it."""
    state: dict[str, Any] = {"token": None, "step": 0}
    engine.start(ids)

    def step() -> None:
        logits = engine.step(state["token"])
        choice = choose(logits, state["step"])
        if recorder is not None:
            recorder.complete_step(state["step"], choice, logits)
        state["token"], state["step"] = choice.token, state["step"] + 1

    return step


def profiled(step: Callable[[], None]) -> dict[str, Any]:
    """Run ten steps and profile the eleventh; prints the tables."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    for _ in range(10):
        step()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    begin = now()
    step()
    plain = now()[0] - begin[0]
    with torch_profile(activities=activities) as result:
        step()
        now()
    averages = result.key_averages()
    print(f"one step takes {1e3 * plain:.2f} ms without the profiler", file=sys.stderr)
    print(averages.table(sort_by="self_cpu_time_total", row_limit=25), file=sys.stderr)
    if torch.cuda.is_available():
        print(averages.table(sort_by="self_cuda_time_total", row_limit=25), file=sys.stderr)
    counts = {event.key: event.count for event in averages}
    times = {event.key: event.self_cpu_time_total / 1e3 for event in averages}
    dearest = sorted(times, key=lambda key: -times[key])[:40]
    return {
        "step_ms": 1e3 * plain,
        "launches": sum(count for key, count in counts.items() if "LaunchKernel" in key),
        "memory_copies": sum(count for key, count in counts.items() if "cudaMemcpy" in key),
        "synchronisations": {
            key: count for key, count in counts.items() if "Synchronize" in key or "item" in key
        },
        "self_cpu_ms": {key: [times[key], counts[key]] for key in dearest},
    }


def parts(bench: Bench, engine: VllmEngine) -> dict[str, float]:
    """Time the host side of each part of recording, without waiting for the device: ms per step."""
    recorder, writer = bench.recorder(engine)
    spent: dict[str, float] = {}

    def timed(owner: Any, name: str, label: str) -> None:
        own = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            try:
                return own(*arguments, **keywords)
            finally:
                spent[label] = spent.get(label, 0.0) + time.perf_counter() - begin

        setattr(owner, name, call)

    steps = 48
    with engine.observed(recorder):
        step = stepper(engine, bench.prompt.ids, recorder)
        for _ in range(6):
            step()
        filler, capture = engine._filler, recorder._arena
        for name in ("add_shrink", "add_expand", "cache_rows"):
            timed(filler, name, "calls seen, vLLM's own shrinks and expands included")
        for name in ("own_shrink", "own_expand"):
            timed(engine._path, name, "of it vLLM's own shrinks and expands")
        timed(filler, "finish", "copy what was held")
        timed(capture, "finish", "digests and transfer")
        timed(recorder, "_roll", "of it the cache's digest")
        timed(recorder, "complete_step", "whole completion")
        timed(writer, "write_step", "hand-over to the store")
        timed(capture, "_frames", "frames, in the store's thread")
        begin = now()
        for _ in range(steps):
            step()
        spent["whole step"] = now()[0] - begin[0]
    writer.close(Closing(complete=False, stop_reason="profiled", steps=0))
    return {label: 1e3 * seconds / steps for label, seconds in spent.items()}


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("adapter")
    parser.add_argument("--reduction", default=OWN_REDUCTION)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5, help="0: none of the arms")
    parser.add_argument("--arms", nargs="+", choices=(*ARMS, UNSTORED), default=ARMS)
    parser.add_argument("--batch", type=int, default=1, help="requests that run together")
    parser.add_argument("--equal", type=int, default=0, help="prompts whose tokens are compared")
    parser.add_argument("--equal-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--vllm-arguments", type=json.loads, default=None, help="JSON: further arguments of LLM"
    )
    parser.add_argument("--profile", action="store_true", help="profile one step and its parts")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are added to it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    show_plugin()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, folder)
        try:
            documents = [measure(bench, options)] if options.rounds else []
            if options.equal:
                documents.append(compare_tokens(bench, options))
            if options.profile:
                documents.append(profile(bench))
        finally:
            bench.detach()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file:
        for document in documents:
            print(json.dumps(document), file=file)
            print(json.dumps(document))


if __name__ == "__main__":
    main()
