"""trace-study fragility: how probably a fresh execution flips each prompt, and, on request, how often repetitions do.

One item is the estimate of one prompt under one reduction, or one free repetition for the calibration. Schedule seeds,
where atomics are simulated, never meet: the reference, its replays, single shrinks and repetitions have ranges of
their own within a prompt's thousand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fliptrace.capture.sources import sha256_of
from fliptrace.errors import InputError
from fliptrace.pair.prompts import Prompt
from fliptrace.pair.recording import set_reduction
from fliptrace.store import open_trace
from fliptrace.studies.amounts import check_at_least
from fliptrace.studies.engines import (
    SEEDS_PER_PROMPT,
    ModelSettings,
    check_questions,
    describe_engine,
    encode,
    generate_once,
    identity_of,
    ids_sha256,
    is_repeatable,
    reduction_of,
    simulates,
)
from fliptrace.studies.items import Item, Row
from fliptrace.studies.tasks import Selection, read_questions
from fliptrace_interventions.fragility.measuring import (
    OBSERVED_SEED,
    FragilityOptions,
    measure,
)
from fliptrace_interventions.fragility.reference import observe_reference, reference_of_trace
from fliptrace_interventions.recorded import RecordedExecution

if TYPE_CHECKING:
    from fliptrace.studies.study import Report

ESTIMATE, OBSERVED = "estimate", "repetition"


@dataclass(frozen=True, slots=True)
class FragilityStudy:
    """Settings of a fragility study.

    Attributes:
        model: what runs.
        task: ``bundled``, ``gsm8k:PATH`` or ``jsonl:PATH``.
        selection: which prompts.
        reductions: names, short or long; repeatable ones cannot flip and are refused.
        options: how much is spent on one execution.
        observed: free repetitions per prompt to hold the estimate against; raise it later to add to what there is.
        max_new_tokens: per generation.
        seed: where schedule seeds begin, on a CPU.
        traces: paths of recorded executions, to be estimated in place of prompts; each under its own reduction.
        shard: (k, n): only every n-th prompt from the k-th (1-based) on, for one of n processes; (1, 1) for all.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    task: str = "bundled"
    selection: Selection = field(default_factory=lambda: Selection(count=20))
    reductions: tuple[str, ...] = ("atomic:8",)
    options: FragilityOptions = field(default_factory=FragilityOptions)
    observed: int = 0
    max_new_tokens: int = 64
    seed: int = 0
    traces: tuple[str, ...] = ()
    shard: tuple[int, int] = (1, 1)

    @property
    def name(self) -> str:
        """The subcommand."""
        return "fragility"

    def identity(self) -> dict[str, Any]:
        """Return what every row depends on; prompts, reductions and repetitions may be added later."""
        return {
            "study": self.name,
            **self.model.identity(),
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "replays": self.options.replays,
            "executions": self.options.executions,
            "reach": self.options.reach,
        }

    def items(self) -> list[Item]:
        """Return one item per estimate and per repetition; a prompt's items lie together.

        Raises:
            InputError: a setting that means nothing.
        """
        self._check()
        part, parts = self.shard
        subjects = [*self._subjects()]
        if parts > 1 and part > len(subjects):
            raise InputError(
                f"shard {part}/{parts} has nothing to do, as prompts times reductions make {len(subjects)}; use fewer "
                "shards"
            )
        items = []
        for name, what in subjects[part - 1 :: parts]:
            items.append(Item(f"{name} | {ESTIMATE}", {**what, "part": ESTIMATE}))
            items += [
                Item(
                    f"{name} | {OBSERVED} {number}",
                    {**what, "part": OBSERVED, "repetition": number},
                )
                for number in range(1, self.observed + 1)
            ]
        return items

    def _subjects(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what is estimated, prompt by prompt: a name and an item's arguments."""
        if self.traces:
            for path in self.traces:
                with open_trace(path) as trace:
                    reduction = str(trace.manifest.get("reduction.identity"))
                self._check_reduction(reduction)
                digest = sha256_of([Path(path)])
                yield (
                    f"{path} | {reduction}",
                    {"trace": path, "sha256": digest, "reduction": reduction},
                )
            return
        names = [identity_of(name) for name in self.reductions]
        for question in read_questions(self.task, self.selection):
            for reduction in names:
                what = {"question": question.arguments(), "reduction": reduction}
                yield f"{question.source} | {reduction}", what

    def _check(self) -> None:
        self.options.check()
        if not 0 <= self.observed < SEEDS_PER_PROMPT - OBSERVED_SEED:
            raise InputError(
                f"repetitions must be 0 to {SEEDS_PER_PROMPT - OBSERVED_SEED - 1}; got {self.observed}"
            )
        check_at_least("max new tokens", self.max_new_tokens)
        check_at_least("the seed", self.seed, 0)
        part, parts = self.shard
        if not 1 <= part <= parts:
            raise InputError(f"a shard is K/N with 1 <= K <= N; got {part}/{parts}")
        for reduction in self.reductions:
            self._check_reduction(identity_of(reduction))

    @staticmethod
    def _check_reduction(reduction: str) -> None:
        if is_repeatable(reduction):
            raise InputError(
                f"{reduction} sums in one order by construction, so it has no flips to estimate; name one that does "
                "not, such as atomic:8"
            )

    def open(self) -> FragilityWorker:
        """Load the model."""
        return FragilityWorker(self)

    def report(self, rows: Sequence[Row]) -> Report:
        """Estimate, and hold the estimates against repetitions."""
        from fliptrace_interventions.fragility.report import fragility_report

        return fragility_report(self, rows)


class FragilityWorker:
    """Runs references, replays and repetitions."""

    def __init__(self, study: FragilityStudy) -> None:
        """Load the model."""
        self._study = study
        self._engine = study.model.load()
        self._vllm = self._engine.describe()["engine"]["name"] == "vllm"

    def describe(self) -> dict[str, Any]:
        """Return what the engine says about itself, and the kernels that ran."""
        study = self._study
        if not study.traces:  # their prompts were asked before, and their files are long to hash
            check_questions(self._engine, study.items(), chat_template=study.model.chat_template)
        return describe_engine(self._engine, study.reductions)

    def run(self, item: Item) -> dict[str, Any]:
        """Run one item."""
        if "trace" in item.arguments:
            with open_trace(item.arguments["trace"]) as trace:
                recorded = RecordedExecution(trace, self._engine)
                ids = recorded.prompt_ids
                prompt = Prompt(ids, "", False, item.arguments["trace"])
                # Another thousand than the recorded schedule's, which must not be drawn again.
                number = int(trace.manifest.get("reduction.seed") or 0) // SEEDS_PER_PROMPT + 1
                return self._row(item, prompt, number, recorded)
        question = item.arguments["question"]
        prompt = encode(
            self._engine,
            question["text"],
            question["source"],
            chat_template=self._study.model.chat_template,
        )
        return self._row(item, prompt, question["number"], None)

    def _row(
        self, item: Item, prompt: Prompt, number: int, recorded: RecordedExecution | None
    ) -> dict[str, Any]:
        study, reduction = self._study, str(item.arguments["reduction"])
        repetition = item.arguments.get("repetition")
        seed = study.seed + SEEDS_PER_PROMPT * number
        if repetition is not None:
            seed += OBSERVED_SEED + repetition
            made = generate_once(
                self._engine,
                prompt,
                reduction=reduction,
                seed=seed,
                max_new_tokens=study.max_new_tokens
                if recorded is None
                else int(recorded.trace.manifest.get("decoding.max_new_tokens") or recorded.steps),
            )
            values: dict[str, Any] = {
                "token_ids": list(made.token_ids),
                "stop_reason": made.stop_reason,
            }
        else:
            values = self._estimate(prompt.ids, reduction, seed, recorded)
        # Replays ran with schedules of their own; the row names this one.
        set_reduction(self._engine, reduction, seed)
        return {
            "part": item.arguments["part"],
            **reduction_of(self._engine),
            "seed": seed if simulates(self._engine, reduction) else None,
            "prompt": prompt.source,
            "number": number,
            "repetition": repetition,
            "prompt_ids_sha256": ids_sha256(prompt.ids),
            "prompt_tokens": len(prompt.ids),
            **values,
        }

    def _estimate(
        self,
        prompt_ids: Sequence[int],
        reduction: str,
        seed: int,
        recorded: RecordedExecution | None,
    ) -> dict[str, Any]:
        options = self._study.options
        if self._vllm:
            # A fused projection's slices are sites of one launch, which no single site can be replayed by.
            options = FragilityOptions(options.replays, 0, options.reach)
        if recorded is None:
            run = observe_reference(
                self._engine,
                prompt_ids,
                reduction=reduction,
                seed=seed,
                max_new_tokens=self._study.max_new_tokens,
                shrinks=options.executions > 0,
            )
        else:
            set_reduction(self._engine, reduction, seed)
            run = reference_of_trace(self._engine, recorded)
        measured = measure(self._engine, run, reduction=reduction, seed=seed, options=options)
        return {"token_ids": list(run.token_ids), "stop_reason": run.stop_reason, **measured}
