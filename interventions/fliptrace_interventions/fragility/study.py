"""trace-study fragility: how probably a fresh execution flips each prompt, and, on request, how often repetitions do.

One item is the estimate of one prompt under one reduction, or one free repetition for the calibration. Schedule seeds,
where atomics are simulated, never meet: the reference, its replays, single shrinks and repetitions have ranges of
their own within a prompt's thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fliptrace.errors import InputError
from fliptrace.studies.engines import (
    SEEDS_PER_PROMPT,
    ModelSettings,
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
from fliptrace_interventions.fragility.reference import observe_reference

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
        questions = read_questions(self.task, self.selection)[part - 1 :: parts]
        items = []
        for question in questions:
            for reduction in map(identity_of, self.reductions):
                what = {"question": question.arguments(), "reduction": reduction}
                name = f"{question.source} | {reduction}"
                items.append(Item(f"{name} | {ESTIMATE}", {**what, "part": ESTIMATE}))
                items += [
                    Item(
                        f"{name} | {OBSERVED} {number}",
                        {**what, "part": OBSERVED, "repetition": number},
                    )
                    for number in range(1, self.observed + 1)
                ]
        return items

    def _check(self) -> None:
        self.options.check()
        if not 0 <= self.observed < SEEDS_PER_PROMPT - OBSERVED_SEED:
            raise InputError(
                f"repetitions must be 0 to {SEEDS_PER_PROMPT - OBSERVED_SEED - 1}; got {self.observed}"
            )
        if self.max_new_tokens < 1:
            raise InputError(f"max new tokens must be at least 1; got {self.max_new_tokens}")
        if self.seed < 0:
            raise InputError(f"the seed must be 0 or more; got {self.seed}")
        part, parts = self.shard
        if not 1 <= part <= parts:
            raise InputError(f"a shard is K/N with 1 <= K <= N; got {part}/{parts}")
        for reduction in self.reductions:
            if is_repeatable(identity_of(reduction)):
                raise InputError(
                    f"{reduction} sums in one order by construction, so it has no flips to estimate; name one that "
                    "does not, such as atomic:8"
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
        return describe_engine(self._engine, self._study.reductions)

    def run(self, item: Item) -> dict[str, Any]:
        """Run one item."""
        question, study = item.arguments["question"], self._study
        reduction: str = item.arguments["reduction"]
        prompt = encode(
            self._engine,
            question["text"],
            question["source"],
            chat_template=study.model.chat_template,
        )
        seed = study.seed + SEEDS_PER_PROMPT * question["number"]
        repetition = item.arguments.get("repetition")
        if repetition is not None:
            seed += OBSERVED_SEED + repetition
            made = generate_once(
                self._engine,
                prompt,
                reduction=reduction,
                seed=seed,
                max_new_tokens=study.max_new_tokens,
            )
            values: dict[str, Any] = {
                "token_ids": list(made.token_ids),
                "stop_reason": made.stop_reason,
            }
        else:
            values = self._estimate(prompt.ids, reduction, seed)
        return {
            "part": item.arguments["part"],
            **reduction_of(self._engine),
            "seed": seed if simulates(self._engine, reduction) else None,
            "prompt": question["source"],
            "number": question["number"],
            "repetition": repetition,
            "prompt_ids_sha256": ids_sha256(prompt.ids),
            "prompt_tokens": len(prompt.ids),
            **values,
        }

    def _estimate(self, prompt_ids: Sequence[int], reduction: str, seed: int) -> dict[str, Any]:
        options = self._study.options
        if self._vllm:
            # A fused projection's slices are sites of one launch, which no single site can be replayed by.
            options = FragilityOptions(options.replays, 0, options.reach)
        run = observe_reference(
            self._engine,
            prompt_ids,
            reduction=reduction,
            seed=seed,
            max_new_tokens=self._study.max_new_tokens,
            shrinks=options.executions > 0,
        )
        measured = measure(self._engine, run, reduction=reduction, seed=seed, options=options)
        # Replays ran with schedules of their own; the row names the reference's.
        from fliptrace.pair.recording import set_reduction

        set_reduction(self._engine, reduction, seed)
        return {"token_ids": list(run.token_ids), "stop_reason": run.stop_reason, **measured}
