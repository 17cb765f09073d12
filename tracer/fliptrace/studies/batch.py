"""trace-study batch: the same prompts in batches of several sizes, several times: the paper's table 3 and more.

Protocol: the paper, sections 5.3 and 6.5. One item is one pass over the prompts in batches of one size.
Beyond the paper: every reduction with and without VLLM_BATCH_INVARIANT, the same batches in another order, with other
neighbours, after a cold and a warm prefix cache, and the first module whose rows depend on the neighbours.

Batches are vLLM's: an engine per reduction and switch, in a process of its own, all of them at once.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fliptrace.errors import InputError
from fliptrace.pair.bundled import bundled_model
from fliptrace.pair.engines import VLLM_OWN
from fliptrace.studies.amounts import check_at_least
from fliptrace.studies.batch_comparisons import FIXED, LOCATE, PREFIXES, VARIATIONS
from fliptrace.studies.engine_process import (
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
from fliptrace.studies.engines import (
    ModelSettings,
    check_repeats,
    identity_of,
    ids_sha256,
    is_repeatable,
)
from fliptrace.studies.items import Item, Row, canonical_json
from fliptrace.studies.study import Report
from fliptrace.studies.tasks import Question, Selection, read_questions

REDUCTIONS = (VLLM_OWN, "deterministic:8", "local")
SWITCHES = ("off", "on")
BATCH_SIZES = (16, 32, 64)
_SEED = 7


@dataclass(frozen=True, slots=True)
class Arm:
    """What one engine is for.

    Attributes:
        reduction: long name, or ``vllm-own``.
        invariant: whether VLLM_BATCH_INVARIANT is on.
    """

    reduction: str
    invariant: bool

    def __str__(self) -> str:
        """Return the name used in rows and tables."""
        return f"{self.reduction} + VLLM_BATCH_INVARIANT" if self.invariant else self.reduction


@dataclass(frozen=True, slots=True)
class BatchStudy:
    """Settings of a batch study.

    Attributes:
        model: what runs, on vLLM.
        task: see RepeatStudy.
        selection: which prompts.
        reductions: names, short or long; ``vllm-own`` for vLLM's shrink.
        switches: values of VLLM_BATCH_INVARIANT: ``off``, ``on``. Atomics run with it off alone, as the plugin refuses
            them with it.
        batch_sizes: requests at once.
        alone: so many of the prompts also run one at a time; 0 for none.
        repetitions: of every batch size, at least 2.
        max_new_tokens: per request.
        stop_at_end: let a request end at its end token; the paper generates the same number for all.
        variations: ``order``, ``neighbours``, ``prefix``.
        locate: of so many prompts, name the first module that depends on the neighbours; 0 for none.
        locate_tokens: how far to look.
        engines: how the engines are made.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    task: str = "bundled"
    selection: Selection = field(default_factory=lambda: Selection(count=64))
    reductions: tuple[str, ...] = REDUCTIONS
    switches: tuple[str, ...] = SWITCHES
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    alone: int = 16
    repetitions: int = 3
    max_new_tokens: int = 150
    stop_at_end: bool = False
    variations: tuple[str, ...] = ()
    locate: int = 0
    locate_tokens: int = 16
    engines: EngineSettings = field(default_factory=EngineSettings)

    @property
    def name(self) -> str:
        """The subcommand."""
        return "batch"

    def identity(self) -> dict[str, Any]:
        """Return what every row depends on; reductions, sizes, repetitions and variations may be added later."""
        return {
            "study": self.name,
            **self.model.identity(),
            **self.engines.identity(),
            "max_new_tokens": self.max_new_tokens,
            "stop_at_end": self.stop_at_end,
            "prefix_caching": self.caches_prefixes,
        }

    @property
    def caches_prefixes(self) -> bool:
        """Whether the engines keep prefixes; passes that must not read them skip them."""
        return "prefix" in self.variations

    def arms(self) -> list[Arm]:
        """Return what runs: reductions with each switch, atomics with it off alone.

        Raises:
            InputError: an unknown reduction or switch.
        """
        for switch in self.switches:
            if switch not in SWITCHES:
                raise InputError(f"VLLM_BATCH_INVARIANT is off or on; got {switch!r}")
        names = [identity_of(name) for name in self.reductions]
        return [
            Arm(name, switch == "on")
            for switch in self.switches
            for name in names
            if switch == "off" or name == VLLM_OWN or is_repeatable(name)
        ]

    def located_arms(self) -> list[Arm]:
        """Return where the first module that differs is looked for: with the switch on, if any arm has it on."""
        arms = self.arms()
        return [arm for arm in arms if arm.invariant] or arms

    def questions(self) -> list[Question]:
        """Return the prompts."""
        return read_questions(self.task, self.selection)

    def check(self) -> None:
        """Refuse settings that mean nothing.

        Raises:
            InputError: which one.
        """
        self.engines.check(self.model.engine)
        if (self.model.model is None) != (self.model.adapter is None):
            raise InputError(
                "a model needs a LoRA adapter and an adapter its model: give both, or neither for the bundled ones"
            )
        check_repeats("repetitions", self.repetitions, 0)
        for what, number, least in (
            ("max new tokens", self.max_new_tokens, 1),
            ("the number of prompts alone", self.alone, 0),
            ("the number of prompts to locate", self.locate, 0),
            ("the tokens to locate", self.locate_tokens, 1),
        ):
            check_at_least(what, number, least)
        if not self.batch_sizes or min(self.batch_sizes) < 2:
            raise InputError(
                f"batch sizes begin at 2; got {list(self.batch_sizes)}. Requests alone are asked for by their number"
            )
        for variation in self.variations:
            if variation not in VARIATIONS:
                raise InputError(
                    f"a variation is one of {', '.join(VARIATIONS)}; got {variation!r}"
                )

    def items(self) -> list[Item]:
        """Return one item per arm, batch size and pass, and one per arm to locate.

        Raises:
            InputError: a setting that means nothing.
        """
        self.check()
        questions = self.questions()
        if max(self.batch_sizes) > len(questions):
            raise InputError(
                f"a batch of {max(self.batch_sizes)} needs as many prompts; there are {len(questions)}"
            )
        everything = canonical_json([question.text for question in questions])
        prompts = hashlib.sha256(everything.encode()).hexdigest()[:16]
        arms = self.arms()
        if not arms:
            raise InputError(
                "nothing can run: atomics are refused with VLLM_BATCH_INVARIANT on; add off, or another reduction"
            )
        passes = list(self._passes(len(questions)))
        alone, located = (min(many, len(questions)) for many in (self.alone, self.locate))
        items = [
            Item(
                f"{arm} | {f'{alone} alone' if batch == 1 else f'batch {batch}'} | {arrangement} | repetition "
                f"{repetition}",
                {
                    "reduction": arm.reduction,
                    "invariant": arm.invariant,
                    "batch": batch,
                    "arrangement": arrangement,
                    "repetition": repetition,
                    "prompts": prompts,
                    "count": alone if batch == 1 else len(questions),
                },
            )
            for repetition, batch, arrangement in passes
            for arm in arms
        ]
        if self.locate:
            items += [
                Item(
                    f"{arm} | {LOCATE} in {self.locate_tokens} tokens of {located}",
                    {
                        "reduction": arm.reduction,
                        "invariant": arm.invariant,
                        "arrangement": LOCATE,
                        "prompts": prompts,
                        "batch": min(self.batch_sizes),
                        "count": located,
                        "tokens": self.locate_tokens,
                    },
                )
                for arm in self.located_arms()
            ]
        return items

    def _passes(self, prompts: int) -> Iterator[tuple[int, int, str]]:
        """Yield (repetition, batch size, arrangement): what says most first, as a budget may end a sitting anywhere."""
        sizes = sorted({*self.batch_sizes})
        alone = [1] if self.alone else []
        yield from ((0, batch, FIXED) for batch in [*sizes, *alone])
        for batch in sizes:
            for variation in self.variations:
                if variation != "prefix" and (variation != "neighbours" or batch < prompts):
                    yield 0, batch, variation
        if self.caches_prefixes:
            for batch in [*sizes, *alone]:
                yield from ((0, batch, prefix) for prefix in PREFIXES)
        for few in (sizes, alone):
            for repetition in range(1, self.repetitions):
                yield from ((repetition, batch, FIXED) for batch in few)

    def open(self) -> BatchWorker:
        """Read the prompts; engines start when it is known which are needed."""
        return BatchWorker(self)

    def report(self, rows: Sequence[Row]) -> Report:
        """Compare passes of one size with each other, and sizes with each other."""
        from fliptrace.studies.batch_report import batch_report

        return batch_report(self, rows)


class BatchWorker:
    """Generates on one engine per arm."""

    def __init__(self, study: BatchStudy) -> None:
        """Read the prompts."""
        study.check()
        self._study = study
        self._questions = study.questions()
        self._engines: dict[tuple[Arm, bool], EngineProcess] = {}
        self._prompts: list[list[int]] = []

    def begin(self, items: Sequence[Item]) -> None:
        """Start the engines that these items need."""
        wanted = dict.fromkeys(_engine_of(item) for item in items)
        for arm, locating in wanted:
            self._engines[arm, locating] = self._start(arm, locating)

    def _start(self, arm: Arm, locating: bool) -> EngineProcess:
        study = self._study
        bundled = bundled_model()
        adapter = str(study.model.adapter or bundled.adapter)
        variables = {
            "VLLM_BATCH_INVARIANT": str(int(arm.invariant)),
            "FLIPTRACE_COUNT_LAUNCHES": "1",
            "OMP_NUM_THREADS": str(study.model.threads),
        }
        return study.engines.start(
            f"{arm}{' (locate)' if locating else ''}",
            arm.reduction,
            str(study.model.model or bundled.model),
            [adapter],
            rank=adapter_rank(adapter),
            batches=[1, *study.batch_sizes],
            variables=variables,
            mode="eager" if locating else None,
            enable_prefix_caching=study.caches_prefixes and not locating,
        )

    def describe(self) -> dict[str, Any]:
        """Wait for the engines, let each generate, and return what they read about themselves."""
        if not self._engines:
            self.begin(self._study.items())
        wait_for_all(list(self._engines.values()), self._study.engines.start_seconds)
        (first, *_) = self._engines.values()
        texts = [question.text for question in self._questions]
        template = self._study.model.chat_template
        self._prompts = first.ask("chat", texts=texts, template=template)["prompts"]
        found: dict[str, Any] = {"kernels": {}, "arms": {}}
        for (arm, locating), engine in self._engines.items():
            engine.ask(
                "generate", ANSWER_SECONDS, prompts=self._prompts[:1], adapters=[0], tokens=2
            )
            said = engine.ask("describe", ANSWER_SECONDS, files=engine is first)
            kernels = verified_kernels(engine.name, arm.reduction, said, invariant=arm.invariant)
            if engine is first:
                found |= said
            if not locating:
                found["kernels"][str(arm)] = kernels
            found["arms"][engine.name] = {
                "kernels": kernels,
                "engine": said["engine"],
                "workers": said["workers"],
                "variables": said["environment"]["variables"],
                "seconds_to_start": engine.facts["ready"],
            }
        found.pop("workers", None)
        return found

    def lane(self, item: Item) -> str:
        """Items of one engine wait for each other."""
        arm, locating = _engine_of(item)
        return f"{arm} {locating}"

    def run(self, item: Item) -> dict[str, Any]:
        """Generate for all prompts once, in batches; or locate."""
        asked = item.arguments
        arm, locating = _engine_of(item)
        engine = self._engines[arm, locating]
        common = {
            "arm": str(arm),
            "reduction": arm.reduction,
            "batch_invariant": arm.invariant,
            "batch": asked["batch"],
            "arrangement": asked["arrangement"],
        }
        if locating:
            return common | self._locate(engine, asked)
        order = arranged(asked["count"], asked["batch"], asked["arrangement"])
        prompts = [self._prompts[number] for number in order]
        request = {
            "prompts": prompts,
            "adapters": [0] * len(prompts),
            "tokens": self._study.max_new_tokens,
            "ignore_eos": not self._study.stop_at_end,
            "batch": asked["batch"],
        }
        if asked["arrangement"] in PREFIXES:
            engine.ask("forget_prefixes")
            if asked["arrangement"] == PREFIXES[1]:
                engine.ask("generate", ANSWER_SECONDS, **request)
        else:
            request["skip_prefix_cache"] = True
        answer = engine.ask("generate", ANSWER_SECONDS, **request)
        back = sorted(range(len(order)), key=order.__getitem__)
        return common | {
            "repetition": asked["repetition"],
            "order": order,
            "prompts": [self._questions[number].source for number in sorted(order)],
            "prompt_ids_sha256": [ids_sha256(self._prompts[number]) for number in sorted(order)],
            "prompt_tokens": [len(self._prompts[number]) for number in sorted(order)],
            "cached_tokens": [answer["cached_tokens"][place] or 0 for place in back],
            "token_ids": [answer["tokens"][place] for place in back],
        }

    def _locate(self, engine: EngineProcess, asked: Any) -> dict[str, Any]:
        answer = engine.ask(
            "locate",
            ANSWER_SECONDS,
            prompts=self._prompts[: asked["batch"]],
            alone=asked["count"],
            tokens=asked["tokens"],
            ignore_eos=True,
            skip_prefix_cache=True,
        )
        requests = [
            {"prompt": self._questions[each.pop("request")].source, **each}
            for each in answer["requests"]
        ]
        return {"repetition": None, "requests": requests}

    def close(self) -> None:
        """End the engines."""
        close_all(self._engines.values())


def _engine_of(item: Item) -> tuple[Arm, bool]:
    asked = item.arguments
    return Arm(asked["reduction"], asked["invariant"]), asked["arrangement"] == LOCATE


def arranged(count: int, batch: int, arrangement: str) -> list[int]:
    """Return the order in which prompts are handed in; every ``batch`` of them run together.

    Args:
        count: of prompts.
        batch: how many run together.
        arrangement: ``order`` turns every batch around, ``neighbours`` deals the prompts to other batches.
    """
    numbers = list(range(count))
    if arrangement == "neighbours":
        random.Random(_SEED).shuffle(numbers)
    if arrangement == "order":
        batches = (numbers[first : first + batch] for first in range(0, count, batch))
        return [number for each in batches for number in reversed(each)]
    return numbers
