"""trace-study repeat: N greedy generations per prompt under each reduction, repetition 0 against the rest.

Protocol: the paper, sections 5.1 and 6.3 (table 1). One item is one generation. Logits of selected tokens are compared
at positions of the matching prefix only, the first divergent one excluded. On a CPU, where arrival orders of atomics
are simulated, each repetition takes a schedule seed of its own; the rows say which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fliptrace.errors import InputError
from fliptrace.studies.amounts import check_at_least
from fliptrace.studies.engine_process_reductions import (
    IN_PROCESS,
    IN_THIS_PROCESS,
    check_mode,
    grouped,
    mode_identity,
    runs_in_processes,
    together,
)
from fliptrace.studies.engine_process_settings import EngineSettings
from fliptrace.studies.engines import (
    SEEDS_PER_PROMPT,
    ModelSettings,
    check_questions,
    check_repeats,
    describe_engine,
    encode,
    generate_once,
    identity_of,
    ids_sha256,
    reduction_of,
    simulates,
)
from fliptrace.studies.items import Item, Row
from fliptrace.studies.programs import ProgramJudge
from fliptrace.studies.sandbox import Limits, open_sandbox
from fliptrace.studies.study import Report, Worker
from fliptrace.studies.tasks import (
    Scorer,
    Selection,
    load_scorer,
    read_questions,
    score,
    scorer_sha256,
)

PAPER_REDUCTIONS = ("atomic:8", "unsplit", "deterministic:8")


@dataclass(frozen=True, slots=True)
class RepeatStudy:
    """Settings of a repeat study.

    Attributes:
        model: what runs.
        task: see read_questions.
        selection: which prompts.
        reductions: names, short or long.
        repetitions: generations per prompt and reduction, at least 2; raise it later to add to what there is.
        max_new_tokens: per generation.
        seed: where schedule seeds begin, on a CPU.
        scorer: ``module:function``, None for the comparison of final answers.
        run_programs: with MBPP, run the generated programs against their tests, in a sandbox; else they are only
            compared with each other.
        engines: with vLLM, how engines in processes of their own are made; their mode may be ``in-process``.
        batch_size: requests at once, on such an engine; 1 in the paper.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    task: str = "bundled"
    selection: Selection = field(default_factory=lambda: Selection(count=20))
    reductions: tuple[str, ...] = PAPER_REDUCTIONS
    repetitions: int = 10
    max_new_tokens: int = 256
    seed: int = 0
    scorer: str | None = None
    run_programs: bool = False
    engines: EngineSettings = field(default_factory=lambda: EngineSettings(mode=IN_PROCESS))
    batch_size: int = 1

    @property
    def name(self) -> str:
        """The subcommand."""
        return "repeat"

    def identity(self) -> dict[str, Any]:
        """Return what every row depends on; prompts, reductions and repetitions may be added later."""
        return {
            "study": self.name,
            **self.model.identity(),
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "scorer": self.scorer,
            **({"scorer_sha256": scorer_sha256(self.scorer)} if self.scorer else {}),
            **mode_identity(self.model, self.engines, self.batch_size),
            **({"run_programs": True} if self.run_programs else {}),
        }

    def items(self) -> list[Item]:
        """Return one item per prompt, reduction and repetition; a prompt's items lie together.

        Raises:
            InputError: a setting that means nothing.
        """
        check_repeats("repetitions", self.repetitions, self.seed)
        check_at_least("max new tokens", self.max_new_tokens)
        load_scorer(self.scorer)
        if self.run_programs and not self.writes_programs:
            raise InputError(
                f"programs are run with --task mbpp:PATH and without a scorer; got the task {self.task!r}"
                + (f" and the scorer {self.scorer!r}" if self.scorer else "")
            )
        check_mode(self.model, self.engines, self.batch_size)
        names = [identity_of(name) for name in self.reductions]
        questions = read_questions(self.task, self.selection)
        texts = [(question.source, question.number, question.text) for question in questions]
        groups = zip(
            grouped(questions, self.batch_size), grouped(texts, self.batch_size), strict=True
        )
        return [
            Item(
                f"{question.source} | {reduction} | repetition {repetition}",
                {
                    "question": question.arguments(),
                    "reduction": reduction,
                    "repetition": repetition,
                    **together(named, place, self.batch_size),
                },
            )
            for group, named in groups
            for reduction in names
            for repetition in range(self.repetitions)
            for place, question in enumerate(group)
        ]

    @property
    def writes_programs(self) -> bool:
        """True where answers are programs with tests."""
        return self.task.startswith("mbpp:") and self.scorer is None

    @property
    def in_processes(self) -> bool:
        """Whether vLLM engines in processes of their own run, on this machine."""
        return runs_in_processes(self.model, self.engines)

    def open(self) -> Worker:
        """Load the model, or choose production engines."""
        if self.in_processes:
            from fliptrace.studies.repeat_processes import RepeatProcessWorker

            return RepeatProcessWorker(self)
        return RepeatWorker(self)

    def report(self, rows: Sequence[Row]) -> Report:
        """Compare repetition 0 with the others."""
        from fliptrace.studies.repeat_report import repeat_report

        return repeat_report(self, rows)


class Judge:
    """Scores what was generated: as answers or, with MBPP, as programs."""

    def __init__(self, study: RepeatStudy) -> None:
        """Load the scorer, and open the sandbox where programs are to run."""
        self._programs: ProgramJudge | None = None
        if study.writes_programs:
            limits = Limits()
            sandbox = open_sandbox(limits) if study.run_programs else None
            self._programs = ProgramJudge(sandbox, limits)
        self._scorer: Scorer | None = load_scorer(study.scorer)

    def describe(self) -> dict[str, Any]:
        """Return how programs are judged; nothing for other answers."""
        return self._programs.describe() if self._programs else {}

    def columns(self, text: str, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a row about its answer."""
        answer: str | None
        outcome = None
        if self._programs is not None:
            answer, correct, outcome = self._programs.judge(text, question["row"])
        else:
            answer, correct = score(text, question["gold"], question["row"], self._scorer)
        return {
            "text": text,
            "gold": question["gold"],
            "answer": answer,
            "correct": correct,
            "outcome": outcome,
        }


class RepeatWorker:
    """Generates, in this process."""

    def __init__(self, study: RepeatStudy) -> None:
        """Load model and judge."""
        self._study = study
        # Before the model is loaded: a refusal comes at once.
        self._judge = Judge(study)
        self._engine = study.model.load()

    def describe(self) -> dict[str, Any]:
        """Return what the engine says about itself, and the kernels that ran."""
        study = self._study
        check_questions(self._engine, study.items(), chat_template=study.model.chat_template)
        return describe_engine(self._engine, study.reductions) | self._judge.describe()

    def run(self, item: Item) -> dict[str, Any]:
        """Generate once and score the text."""
        question, study = item.arguments["question"], self._study
        repetition: int = item.arguments["repetition"]
        prompt = encode(
            self._engine,
            question["text"],
            question["source"],
            chat_template=study.model.chat_template,
        )
        reduction = item.arguments["reduction"]
        seed = study.seed + SEEDS_PER_PROMPT * question["number"] + repetition
        made = generate_once(
            self._engine,
            prompt,
            reduction=reduction,
            seed=seed,
            max_new_tokens=study.max_new_tokens,
        )
        return {
            **reduction_of(self._engine),
            **IN_THIS_PROCESS,
            "seed": seed if simulates(self._engine, reduction) else None,
            "prompt": question["source"],
            "number": question["number"],
            "repetition": repetition,
            "prompt_ids_sha256": ids_sha256(prompt.ids),
            "prompt_tokens": len(prompt.ids),
            "token_ids": list(made.token_ids),
            "selected_logits": list(made.selected_logits),
            "margins": list(made.margins),
            "ties": made.ties,
            "stop_reason": made.stop_reason,
            **self._judge.columns(made.text, question),
        }


@dataclass(frozen=True, slots=True)
class RepeatComparison:
    """A repetition against repetition 0 of the same prompt and reduction.

    Attributes:
        reduction: its identity.
        prompt: the prompt's name.
        repetition: from 1.
        changed: the token sequences differ.
        first_divergence: step (0-based) of the first token that differs, None without one.
        positions: of the matching prefix.
        logits_differing: positions whose selected token's logit has another bit; None where logits were not recorded.
        logits_sum: sum of |difference| over these positions; logits_largest: the largest.
        answer_changed: the answers differ; None where a task gives none.
        before: whether repetition 0 is right; after: whether this one is. None where it cannot be told.
    """

    reduction: str
    prompt: str
    repetition: int
    changed: bool
    first_divergence: int | None
    positions: int
    logits_differing: int | None
    logits_sum: float | None
    logits_largest: float | None
    answer_changed: bool | None
    before: bool | None
    after: bool | None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def compare_rows(first: Mapping[str, Any], other: Mapping[str, Any]) -> RepeatComparison:
    """Compare two rows of one prompt and reduction."""
    before, after = first["token_ids"], other["token_ids"]
    divergence = first_divergence(before, after)
    positions = len(before) if divergence is None else divergence
    recorded = first["selected_logits"] is not None and other["selected_logits"] is not None
    differences: list[float] = []
    if recorded:
        pairs = zip(first["selected_logits"][:positions], other["selected_logits"], strict=False)
        differences = [abs(one - two) for one, two in pairs if one != two]
    with_answer = first["answer"] is not None or other["answer"] is not None
    return RepeatComparison(
        reduction=first["reduction"],
        prompt=first["prompt"],
        repetition=other["repetition"],
        changed=divergence is not None,
        first_divergence=divergence,
        positions=positions,
        logits_differing=len(differences) if recorded else None,
        logits_sum=sum(differences) if recorded else None,
        logits_largest=max(differences, default=0.0) if recorded else None,
        answer_changed=first["answer"] != other["answer"] if with_answer else None,
        before=first["correct"],
        after=other["correct"],
    )


def comparisons_of(rows: Sequence[Row]) -> Iterator[RepeatComparison]:
    """Yield the comparisons that the rows allow: where repetition 0 has run."""
    first = {(row["reduction"], row["prompt"]): row for row in rows if row["repetition"] == 0}
    for row in rows:
        reference = first.get((row["reduction"], row["prompt"]))
        if row["repetition"] and reference is not None:
            yield compare_rows(reference, row)


def first_divergence(before: Sequence[int], after: Sequence[int]) -> int | None:
    """Return the first step at which two sequences differ, the end of one included; None if they are equal."""
    for step, (one, two) in enumerate(zip(before, after, strict=False)):
        if one != two:
            return step
    return None if len(before) == len(after) else min(len(before), len(after))
