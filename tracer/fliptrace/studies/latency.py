"""trace-study latency: what a reduction costs whole requests: the counterparts of the paper's table 4 and figure 6.

Protocol: the paper, sections 5.3 and 6.6. An engine per reduction and rank, each in a process of its own, all there at
once and one at a time at work: every round times every engine at every batch size, in a new order, so that whatever
drifts on the machine meets all of them. A trial has engines that have just started; starting and warming up are not
timed. One item is one timing.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fliptrace.errors import InputError
from fliptrace.pair.bundled import bundled_model
from fliptrace.pair.engines import VLLM_OWN
from fliptrace.studies.amounts import check_at_least
from fliptrace.studies.batch import SWITCHES, Arm
from fliptrace.studies.engine_process import (
    NO_ADAPTER,
    EngineProcess,
    close_all,
    wait_for_all,
)
from fliptrace.studies.engine_process_settings import (
    ANSWER_SECONDS,
    EngineSettings,
    adapter_rank,
    verified_kernels,
)
from fliptrace.studies.engines import identity_of, is_repeatable
from fliptrace.studies.items import Item, Row
from fliptrace.studies.latency_rows import benchmark_fields
from fliptrace.studies.latency_shapes import SHAPES, shape_of, write_adapter, write_model
from fliptrace.studies.study import Report

REDUCTIONS = (NO_ADAPTER, VLLM_OWN, "atomic:8", "unsplit", "deterministic:8", "local")
BATCH_SIZES = (1, 16, 32, 64)
_WARM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class LatencyStudy:
    """Settings of a latency study.

    Attributes:
        shape: of a model with dummy weights and random adapters; None to time a model that exists.
        ranks: of the random adapters.
        model: a model that exists; with neither this nor a shape, the bundled one.
        adapters: its LoRA adapters, each timed.
        reductions: names, ``vllm-own`` for vLLM's shrink, ``none`` for no adapter.
        switches: values of VLLM_BATCH_INVARIANT; atomics run with it off alone.
        batch_sizes: requests at once.
        requests: at least so many in one timing, in whole batches, one batch after another.
        prompt_tokens: of each prompt; random ids.
        new_tokens: of each request, exactly.
        trials: times that all engines start anew.
        rounds: of each trial.
        seed: of prompts and orders.
        baseline: the reduction that others are compared with; None: ``unsplit`` if it is there, else the first.
        engines: how the engines are made.
    """

    shape: str | None = None
    ranks: tuple[int, ...] = (16, 32)
    model: str | None = None
    adapters: tuple[str, ...] = ()
    reductions: tuple[str, ...] = REDUCTIONS
    switches: tuple[str, ...] = SWITCHES[:1]
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    requests: int = 1
    prompt_tokens: int = 100
    new_tokens: int = 150
    trials: int = 2
    rounds: int = 5
    seed: int = 0
    baseline: str | None = None
    engines: EngineSettings = field(default_factory=EngineSettings)

    @property
    def name(self) -> str:
        """The subcommand."""
        return "latency"

    def identity(self) -> dict[str, Any]:
        """Return what every row depends on; reductions, sizes, trials and rounds may be added later."""
        return {
            "study": self.name,
            "shape": self.shape,
            "bundled_model": self.shape is None and self.model is None,
            **self.engines.identity(),
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "seed": self.seed,
        }

    def check(self) -> None:
        """Refuse settings that mean nothing.

        Raises:
            InputError: which one.
        """
        self.engines.check()
        if self.shape is not None:
            shape_of(self.shape)
            if self.model is not None or self.adapters:
                raise InputError(
                    "a shape has dummy weights and random adapters: give a shape, or a model and its adapters"
                )
        elif (self.model is None) != (not self.adapters):
            raise InputError(
                "a model needs a LoRA adapter and an adapter its model: give both, or neither for the bundled ones"
            )
        for what, number in (
            ("ranks", min(self.ranks, default=0)),
            ("batch sizes", min(self.batch_sizes, default=0)),
            ("requests", self.requests),
            ("prompt tokens", self.prompt_tokens),
            ("trials", self.trials),
            ("rounds", self.rounds),
        ):
            check_at_least(what, number)
        check_at_least("the seed", self.seed, 0)
        if self.new_tokens < 2:
            raise InputError(
                f"new tokens must be at least 2, else there is no time per output token; got {self.new_tokens}"
            )

    def arms(self) -> list[Arm]:
        """Return reductions with each switch; atomics with it off alone.

        Raises:
            InputError: an unknown reduction or switch.
        """
        for switch in self.switches:
            if switch not in SWITCHES:
                raise InputError(f"VLLM_BATCH_INVARIANT is off or on; got {switch!r}")
        names = [self._identity(name) for name in self.reductions]
        return [
            Arm(name, switch == "on")
            for switch in self.switches
            for name in names
            if switch == "off" or name in (NO_ADAPTER, VLLM_OWN) or is_repeatable(name)
        ]

    def _identity(self, name: str) -> str:
        return NO_ADAPTER if name == NO_ADAPTER else identity_of(name)

    def baseline_arm(self) -> str:
        """Return the arm that others are compared with.

        Raises:
            InputError: it is not among the reductions.
        """
        arms = self.arms()
        if self.baseline is not None:
            wanted = str(Arm(self._identity(self.baseline), False))
            if wanted not in map(str, arms):
                raise InputError(
                    f"the baseline {self.baseline!r} must be one of the reductions, with the switch off"
                )
            return wanted
        unsplit = str(Arm(identity_of("unsplit"), False))
        with_adapter = [str(arm) for arm in arms if arm.reduction != NO_ADAPTER]
        return unsplit if unsplit in with_adapter else (with_adapter or [str(arms[0])])[0]

    def adapter_folders(self) -> list[tuple[int, str]]:
        """Return (rank, folder) per adapter; random ones are written if they are not there."""
        if self.shape is not None:
            shape, folder = shape_of(self.shape), self.engines.folder
            return [
                (
                    rank,
                    str(
                        write_adapter(
                            folder / f"{self.shape}-adapter-r{rank}", shape, rank, seed=rank
                        )
                    ),
                )
                for rank in self.ranks
            ]
        found = self.adapters or (str(bundled_model().adapter),)
        return [(adapter_rank(adapter), adapter) for adapter in found]

    def items(self) -> list[Item]:
        """Return one item per trial, round, batch size, adapter and arm; arms in a new order each time.

        Raises:
            InputError: a setting that means nothing.
        """
        self.check()
        arms = self.arms()
        self.baseline_arm()
        if self.shape is not None:
            ranks = list(self.ranks)
        else:
            ranks = [rank for rank, _ in self.adapter_folders()]
        if len(set(ranks)) < len(ranks):
            raise InputError(f"adapters are told apart by their rank; got {ranks}")
        items = []
        for trial in range(self.trials):
            for turn in range(self.rounds):
                for batch in self.batch_sizes:
                    engines = [
                        (arm, rank)
                        for arm in arms
                        for rank in ([0] if arm.reduction == NO_ADAPTER else ranks)
                    ]
                    random.Random(f"{self.seed} {trial} {turn} {batch}").shuffle(engines)
                    items += [
                        Item(
                            f"trial {trial} | round {turn} | batch {batch} | rank {rank} | {arm}",
                            {
                                "trial": trial,
                                "round": turn,
                                "batch": batch,
                                "rank": rank,
                                "reduction": arm.reduction,
                                "invariant": arm.invariant,
                            },
                        )
                        for arm, rank in engines
                    ]
        return items

    def open(self) -> LatencyWorker:
        """Check the settings; engines start when it is known which are needed."""
        return LatencyWorker(self)

    def report(self, rows: Sequence[Row]) -> Report:
        """Compare reductions round by round."""
        from fliptrace.studies.latency_report import latency_report

        return latency_report(self, rows)


class LatencyWorker:
    """Times one engine at a time."""

    def __init__(self, study: LatencyStudy) -> None:
        """Check the settings."""
        study.check()
        self._study = study
        self._wanted: list[tuple[Arm, int]] = []
        self._engines: dict[tuple[Arm, int], EngineProcess] = {}
        self._trial: int | None = None
        self._described: dict[str, Any] = {}
        self._prompts: dict[int, list[list[int]]] = {}

    def begin(self, items: Sequence[Item]) -> None:
        """Start the engines that these items need."""
        self._wanted = sorted({_engine_of(item) for item in items}, key=str)
        self._start()

    def _start(self) -> None:
        study = self._study
        folders = dict(study.adapter_folders())
        more: dict[str, Any] = {}
        if study.shape is not None:
            model = str(
                write_model(study.engines.folder / str(study.shape), SHAPES[str(study.shape)])
            )
            more = {"load_format": "dummy", "skip_tokenizer_init": True}
            if study.engines.max_model_len is None:
                more["max_model_len"] = study.prompt_tokens + study.new_tokens + 2
        else:
            model = str(study.model or bundled_model().model)
        for arm, rank in self._wanted:
            self._engines[arm, rank] = study.engines.start(
                f"{arm}{f', rank {rank}' if rank else ''}",
                arm.reduction,
                model,
                [folders[rank]] if rank else [],
                rank=rank,
                batches=study.batch_sizes,
                variables={"VLLM_BATCH_INVARIANT": str(int(arm.invariant))},
                **more,
            )

    def describe(self) -> dict[str, Any]:
        """Wait for the engines, warm them up, and return what they read about themselves."""
        if not self._engines:
            self.begin(self._study.items())
        self._make_ready()
        return self._described

    def _make_ready(self) -> None:
        study = self._study
        wait_for_all(list(self._engines.values()), study.engines.start_seconds)
        found: dict[str, Any] = {"kernels": {}, "arms": {}}
        for (arm, rank), engine in self._engines.items():
            if not self._prompts:
                self._draw(engine.ask("describe", ANSWER_SECONDS)["engine"]["vocabulary"])
            for batch in study.batch_sizes:
                self._timed(engine, rank, batch, min(_WARM_TOKENS, study.new_tokens))
            files = study.shape is None and rank > 0 and "model" not in found
            said = engine.ask("describe", ANSWER_SECONDS, files=files)
            kernels = verified_kernels(engine.name, arm.reduction, said, invariant=arm.invariant)
            found = {**said, **found} if "engine" not in found or files else found
            found["kernels"][str(arm)] = kernels
            found["arms"][engine.name] = {
                "kernels": kernels,
                "engine": said["engine"],
                "workers": said["workers"],
                "seconds_to_start": engine.facts["ready"],
            }
        found.pop("workers", None)
        if study.shape is not None:
            found["model"], found["adapter"] = self._dummy()
        self._described = found

    def _dummy(self) -> tuple[dict[str, Any], dict[str, Any]]:
        shape = SHAPES[str(self._study.shape)]
        text = json.dumps(shape, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return (
            {
                "name": f"{self._study.shape} (dummy weights)",
                "sha256": digest,
                "dtype": shape["torch_dtype"],
            },
            {"name": "random", "sha256": f"random weights for {digest[:16]}"},
        )

    def _draw(self, vocabulary: int) -> None:
        study = self._study
        for batch in study.batch_sizes:
            draw = random.Random(f"{study.seed} prompts {batch}")
            count = batch * -(-study.requests // batch)
            self._prompts[batch] = [
                [draw.randrange(3, vocabulary) for _ in range(study.prompt_tokens)]
                for _ in range(count)
            ]

    def _timed(self, engine: EngineProcess, rank: int, batch: int, tokens: int) -> dict[str, Any]:
        prompts = self._prompts[batch]
        return engine.ask(
            "timed",
            ANSWER_SECONDS,
            prompts=prompts,
            adapters=[0 if rank else None] * len(prompts),
            tokens=tokens,
            ignore_eos=True,
            batch=batch,
        )

    def lane(self, item: Item) -> str:
        """Everything waits for everything else: one engine works at a time."""
        return ""

    def run(self, item: Item) -> dict[str, Any]:
        """Time an engine once; a new trial starts all engines anew."""
        asked = item.arguments
        if self._trial is not None and self._trial != asked["trial"]:
            close_all(self._engines.values())
            self._engines = {}
            self._start()
            self._make_ready()
        self._trial = asked["trial"]
        arm, rank = _engine_of(item)
        batch = asked["batch"]
        answer = self._timed(self._engines[arm, rank], rank, batch, self._study.new_tokens)
        prompts = self._prompts[batch]
        text = json.dumps(answer["tokens"])
        return {
            "arm": str(arm),
            "reduction": arm.reduction,
            "batch_invariant": arm.invariant,
            "rank": rank,
            "batch": batch,
            "trial": asked["trial"],
            "round": asked["round"],
            "seconds": sum(answer["seconds"]) / len(answer["seconds"]),
            "output": hashlib.sha256(text.encode()).hexdigest()[:16],
            **benchmark_fields(answer["seconds"], answer["times"], [len(ids) for ids in prompts]),
        }

    def close(self) -> None:
        """End the engines."""
        close_all(self._engines.values())


def _engine_of(item: Item) -> tuple[Arm, int]:
    asked = item.arguments
    return Arm(asked["reduction"], asked["invariant"]), asked["rank"]
