"""trace-check: is my stack affected? A minute of repeated greedy requests, the kernel that ran, and golden digests.

The verdict is of these runs: ``affected`` where a token or a bit of a logit changed, else ``repeatable in N runs`` with
its bound. A golden file holds digests of tokens and logits, to be compared on another machine or version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fliptrace.errors import InputError
from fliptrace.pair.engines import VLLM_OWN
from fliptrace.studies.amounts import check_above_zero, check_at_least
from fliptrace.studies.engines import (
    ModelSettings,
    describe_engine,
    identity_of,
    is_repeatable,
    simulates,
)
from fliptrace.studies.golden import (
    golden_differences,
    read_golden,
    require_same,
    require_writable,
    save_golden,
)
from fliptrace.studies.repeatability import (
    LEAST_ROUNDS,
    PromptRuns,
    check_rounds,
    engine_runner,
    run_rounds,
)
from fliptrace.studies.statistics import (
    Share,
    exact_share,
    rate_bound,
    ratio_interval,
    repeated_bound,
)

#: What a change has to be for the check to fail.
LEVELS = ("token", "any")
#: Asked where a person names no prompts: short, of several kinds, answered at some length.
PROMPTS = (
    "Tom has 3 apples and buys 5 more. He gives away 2. How many apples does he have?",
    "A train travels 60 miles an hour for 3 hours. How far does it go?",
    "Write a short story about a lighthouse keeper.",
    "Explain why the sky is blue.",
    "List five uses for a paper clip.",
    "What should I consider before buying a used bicycle?",
)


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """What a check asks.

    Attributes:
        model: what runs.
        reduction: a name; None for vLLM's own kernel on the vllm engine, elsewhere for what that kernel does
            (atomic:vllm), or atomic:8 with the bundled model, on whose short sums vLLM's 64 splits leave next to
            nothing to reorder.
        prompts: texts; empty for the built-in ones, or bundled problems with the bundled model.
        rounds: runs of each prompt, at most.
        seconds: begin no further round beyond; two always run.
        max_new_tokens: per generation.
        fail_on: ``token`` or ``any``.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    reduction: str | None = None
    prompts: tuple[str, ...] = ()
    rounds: int = 10
    seconds: float = 60.0
    max_new_tokens: int = 64
    fail_on: str = "any"

    @property
    def chosen_reduction(self) -> str:
        """The reduction's identity, the default filled in."""
        default = "atomic:8" if self.model.model is None else "atomic:vllm"
        if self.model.engine == "vllm":
            default = VLLM_OWN
        return identity_of(self.reduction or default)

    def texts(self) -> tuple[str, ...]:
        """Return the prompts that are asked."""
        if self.prompts:
            return self.prompts
        if self.model.model is None:
            from fliptrace.pair.bundled import bundled_model

            return tuple(bundled_model().prompts[row].text for row in (36, 31, 54, 1, 65, 52))
        return PROMPTS


@dataclass(frozen=True, slots=True)
class Stack:
    """What was checked, in words.

    Attributes:
        place: model, adapter, engine, hardware.
        kernel: of the shrinks.
        notes: what a reader must know of the runs.
        watched: what is compared besides tokens: ``bit of a logit``.
        in_logits: where it is: ``logits``.
        caution: said after runs that repeated; None where the order of sums is fixed by construction.
        simulated: arrival orders were simulated.
    """

    place: str
    kernel: str
    notes: tuple[str, ...] = ()
    watched: str = "bit of a logit"
    in_logits: str = "logits"
    caution: str | None = None
    simulated: bool = False


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    Attributes:
        stack: what ran, in words.
        description: the same as a manifest's sections.
        reduction: its identity, or ``server``.
        prompts: all runs.
        rounds: runs of each prompt.
        golden: what differs from a golden file, one sentence each; None without one.
        fail_on: see CheckSettings.
        unsaved: why golden digests that were asked for were not saved; None where they were, or nobody asked.
    """

    stack: Stack
    description: Mapping[str, Any]
    reduction: str
    prompts: Sequence[PromptRuns]
    rounds: int
    golden: Sequence[str] | None
    fail_on: str
    unsaved: str | None = None

    @property
    def flips(self) -> int:
        """Runs that left the first run's tokens."""
        return sum(len(prompt.flips) for prompt in self.prompts)

    @property
    def changed_bits(self) -> int:
        """Runs in which a logit had another bit."""
        return sum(prompt.changed_bits for prompt in self.prompts)

    @property
    def tokens(self) -> int:
        """Tokens that were compared after the same prefix."""
        return sum(prompt.compared_tokens for prompt in self.prompts)

    @property
    def repeatable(self) -> bool:
        """True when no bit changed."""
        return not self.flips and not self.changed_bits

    @property
    def passed(self) -> bool:
        """True when nothing of the kind that fail_on names changed, and nothing differs from the golden file."""
        stable = not self.flips if self.fail_on == "token" else self.repeatable
        return stable and not self.golden

    @property
    def prompts_changed(self) -> Share:
        """Prompts with a changed token, with the exact interval."""
        return exact_share(sum(bool(prompt.flips) for prompt in self.prompts), len(self.prompts))

    @property
    def prompts_any_bit(self) -> Share:
        """Prompts with any changed bit, with the exact interval."""
        changed = sum(bool(prompt.flips or prompt.changed_bits) for prompt in self.prompts)
        return exact_share(changed, len(self.prompts))

    @property
    def ties(self) -> int | None:
        """Steps of the first runs whose two best logits are exactly equal; None where they cannot be seen."""
        found = [prompt.runs[0].ties for prompt in self.prompts]
        seen = [ties for ties in found if ties is not None]
        return sum(seen) if len(seen) == len(found) else None

    def flips_per_thousand(self) -> tuple[float, float]:
        """Return flips per 1,000 compared tokens, and an upper bound (95 %).

        The bound resamples whole prompts where several of them flipped; else it is Poisson's exact one, which takes
        tokens for independent, and is the larger of the two wherever both exist.
        """
        rate = 1000 * self.flips / max(1, self.tokens)
        bound = 1000 * rate_bound(self.flips, max(1, self.tokens))
        if sum(bool(prompt.flips) for prompt in self.prompts) > 1:
            interval = ratio_interval(
                [len(prompt.flips) for prompt in self.prompts],
                [prompt.compared_tokens for prompt in self.prompts],
            )
            bound = max(bound, 1000 * interval.high)
        return rate, bound

    def sentences(self) -> list[str]:
        """Return the answer for a person."""
        stack = self.stack
        rate, bound = self.flips_per_thousand()
        compared = (
            f"{len(self.prompts)} prompts × {self.rounds} runs, {self.tokens:,} tokens compared"
        )
        lines = [stack.place, f"kernel in use: {stack.kernel}", *stack.notes]
        if self.repeatable:
            lines.append(
                f"repeatable in {self.rounds} runs: no token and no {stack.watched} changed ({compared}); "
                f"{repeated_bound(self.prompts_any_bit)}"
            )
            if stack.caution is not None:
                lines.append(stack.caution)
        else:
            lines.append(f"affected: the same greedy request gives other results ({compared})")
            lines.append(
                f"runs with other bits in {stack.in_logits} of the same prefix: {self.changed_bits} of "
                f"{(self.rounds - 1) * len(self.prompts)}; prompts with any: {self.prompts_any_bit}"
            )
        lines.append(
            f"token flips: {self.flips}, {rate:.3g} per 1,000 tokens (95 %: at most {bound:.3g}); prompts: "
            f"{self.prompts_changed}"
        )
        lines.append(
            "steps decided by tie-break in the first runs: "
            + ("cannot be seen" if self.ties is None else str(self.ties))
        )
        if self.golden is not None:
            lines += self.golden or ["golden digests: equal"]
        lines.append("passed" if self.passed else f"failed (--fail-on {self.fail_on})")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the answer for a machine."""
        rate, bound = self.flips_per_thousand()
        return {
            "passed": self.passed,
            "fail_on": self.fail_on,
            "repeatable_in_these_runs": self.repeatable,
            "reduction": self.reduction,
            "repeatable_by_construction": self.stack.caution is None,
            "simulated_atomics": self.stack.simulated,
            "kernel": self.stack.kernel,
            "rounds": self.rounds,
            "tokens_compared": self.tokens,
            "flips": self.flips,
            "flips_per_1000_tokens": rate,
            "flips_per_1000_tokens_at_most": bound,
            "runs_with_changed_bits": self.changed_bits,
            "prompts_changed": self.prompts_changed.to_json(),
            "prompts_any_bit": self.prompts_any_bit.to_json(),
            "ties": self.ties,
            "golden_differences": None if self.golden is None else list(self.golden),
            "golden_not_saved": self.unsaved,
            "prompts": [
                {
                    "name": prompt.name,
                    "ids_sha256": prompt.ids_sha256,
                    "tokens": prompt.runs[0].tokens_digest,
                    "logits": prompt.runs[0].logits_digest,
                    "flips_at": prompt.flips,
                    "runs_with_changed_bits": prompt.changed_bits,
                }
                for prompt in self.prompts
            ],
            "manifest": dict(self.description),
        }


def run_check(
    settings: CheckSettings,
    *,
    against: Path | None = None,
    save: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> CheckResult:
    """Load the model, run the check, compare with or save golden digests.

    Args:
        settings: what to ask.
        against: a golden file to compare with.
        save: where to write one; only what repeated is saved, else the result says so (unsaved).
        progress: told what goes on.

    Raises:
        InputError: something given cannot be used; the golden file is of another model, adapter or prompts.
        RecordingError: another kernel ran than was asked for.
        StorageError: the golden file cannot be written.
    """
    check_numbers(settings.fail_on, settings.rounds, settings.seconds, settings.max_new_tokens)
    if save is not None:
        require_writable(save)
    reduction = settings.chosen_reduction
    golden = None if against is None else read_golden(against)
    engine = settings.model.load()
    description = describe_engine(engine, (reduction,))
    texts = settings.texts()
    prompts = [PromptRuns(f"prompt {number}") for number in range(len(texts))]
    runner = engine_runner(
        engine,
        texts,
        prompts,
        reduction,
        settings.max_new_tokens,
        digests=True,
        chat_template=settings.model.chat_template,
    )
    if golden is not None:
        require_same(golden, description, reduction, prompts, settings.max_new_tokens, str(against))
    rounds = run_rounds(
        prompts, runner, rounds=settings.rounds, seconds=settings.seconds, progress=progress
    )
    result = CheckResult(
        stack=_stack(description, reduction, simulates(engine, reduction)),
        description=description,
        reduction=reduction,
        prompts=prompts,
        rounds=rounds,
        golden=None if golden is None else golden_differences(golden, description, prompts),
        fail_on=settings.fail_on,
    )
    return with_golden(result, save, settings.max_new_tokens)


def with_golden(result: CheckResult, save: Path | None, max_new_tokens: int) -> CheckResult:
    """Save golden digests where that was asked for, and say in the result if there were none to save.

    Raises:
        InputError: no token was generated, so that nothing was checked.
        StorageError: the file cannot be written.
    """
    if not result.tokens:
        raise InputError(
            "no prompt was answered with a single token, so nothing was compared; ask others (--prompt)"
        )
    if save is None:
        return result
    return replace(result, unsaved=save_golden(save, result, max_new_tokens))


def check_numbers(fail_on: str, rounds: int, seconds: float, max_new_tokens: int) -> None:
    """Refuse settings that mean nothing, before a model is loaded.

    Raises:
        InputError: which.
    """
    if fail_on not in LEVELS:
        raise InputError(f"a check fails on {' or '.join(LEVELS)}; got {fail_on!r}")
    check_rounds(rounds)
    check_above_zero("seconds", seconds, f"The first {LEAST_ROUNDS} runs are made in any case")
    check_at_least("max new tokens", max_new_tokens)


def _stack(description: Mapping[str, Any], reduction: str, simulated: bool) -> Stack:
    model, adapter = description.get("model", {}), description.get("adapter", {})
    notes = (
        "arrival orders of atomics are simulated here, a new schedule in each run; a GPU has orders of its own",
    )
    caution = (
        f"{reduction} has no fixed order by construction: other runs may differ, whatever these did"
    )
    if reduction == VLLM_OWN:
        caution = (
            f"{reduction} is whatever vLLM runs; nothing here says that other runs will not differ"
        )
    return Stack(
        place=f"{model.get('name')} + {adapter.get('name')}, {_place(description)}",
        kernel=str(description["kernels"][reduction]),
        notes=notes if simulated else (),
        caution=None if is_repeatable(reduction) else caution,
        simulated=simulated,
    )


def _place(description: Mapping[str, Any]) -> str:
    environment = description.get("environment", {})
    place = environment.get("gpu", {}).get("name") or environment.get("processor")
    versions = environment.get("versions", {})
    return f"engine {description['engine']['name']}, {place}, torch {versions.get('torch')}"
