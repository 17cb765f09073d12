"""Is a stack repeatable? The same greedy requests in rounds, compared bit by bit; and the assertion for tests.

Nothing here says deterministic: what did not change in N runs is repeatable in N runs, with the bound that this gives.
Light to import: an engine is loaded by the caller, and scipy only when a bound is asked for.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fliptrace.errors import InputError
from fliptrace.studies.amounts import check_at_least


@dataclass(frozen=True, slots=True)
class Run:
    """One greedy generation of one prompt.

    Attributes:
        token_ids: generated ids.
        logits: a digest of all logits per step; empty where only tokens can be seen.
        ties: steps whose two best logits are equal; None where they cannot be seen.
    """

    token_ids: tuple[int, ...]
    logits: tuple[str, ...] = ()
    ties: int | None = None

    @property
    def tokens_digest(self) -> str:
        """A digest of the token ids."""
        return hashlib.sha256(",".join(map(str, self.token_ids)).encode()).hexdigest()[:32]

    @property
    def logits_digest(self) -> str | None:
        """A digest of all logits of all steps; None where they cannot be seen."""
        if not self.logits:
            return None
        return hashlib.sha256("".join(self.logits).encode()).hexdigest()[:32]

    def flip_from(self, first: Run) -> int | None:
        """Return the step (0-based) at which tokens first differ from another run's; None if they do not."""
        for step, (one, two) in enumerate(zip(first.token_ids, self.token_ids, strict=False)):
            if one != two:
                return step
        shorter, longer = sorted((len(first.token_ids), len(self.token_ids)))
        return None if shorter == longer else shorter

    def bits_from(self, first: Run) -> int | None:
        """Return the first step whose logits have another bit, as far as tokens match; None if none has."""
        flip = self.flip_from(first)
        # The flip's own logits come of the same prefix, so they count.
        end = len(first.logits) if flip is None else flip + 1
        for step, (one, two) in enumerate(zip(first.logits[:end], self.logits, strict=False)):
            if one != two:
                return step
        return None


@dataclass
class PromptRuns:
    """All runs of one prompt.

    Attributes:
        name: of the prompt, for people.
        ids_sha256: of its token ids, "" where they are not known.
        runs: in order; the first is what the others are compared with.
    """

    name: str
    ids_sha256: str = ""
    runs: list[Run] = field(default_factory=list)

    @property
    def flips(self) -> list[int]:
        """Steps at which runs after the first left its tokens, one per run that did."""
        found = (run.flip_from(self.runs[0]) for run in self.runs[1:])
        return [step for step in found if step is not None]

    @property
    def changed_bits(self) -> int:
        """How many runs after the first had another bit in logits of the same prefix."""
        return sum(run.bits_from(self.runs[0]) is not None for run in self.runs[1:])

    @property
    def compared_tokens(self) -> int:
        """Tokens chosen after the same prefix in a run and the first: up to the flip, the flip included."""
        total = 0
        for run in self.runs[1:]:
            flip = run.flip_from(self.runs[0])
            total += len(run.token_ids) if flip is None else flip + 1
        return total


#: Runs one prompt in one round: (prompt number, round) -> run.
Runner = Callable[[int, int], Run]
#: Without a second run there is nothing to compare.
LEAST_ROUNDS = 2


def check_rounds(rounds: int) -> None:
    """Refuse what repeats nothing.

    Raises:
        InputError: fewer than two rounds.
    """
    if rounds < LEAST_ROUNDS:
        raise InputError(f"repeating takes at least {LEAST_ROUNDS} runs; got {rounds}")


def run_rounds(
    prompts: Sequence[PromptRuns],
    runner: Runner,
    *,
    rounds: int,
    seconds: float | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> int:
    """Run all prompts round by round.

    Args:
        prompts: filled with runs.
        runner: runs one.
        rounds: how many at the most, at least 2.
        seconds: begin no round that would end later, judged by the longest so far; two rounds always run. None for no
            limit.
        progress: told (what, done, total).

    Returns:
        How many rounds ran.

    Raises:
        InputError: fewer than two rounds, or no prompts.
    """
    check_rounds(rounds)
    if not prompts:
        raise InputError("there is nothing to ask: give at least one prompt")
    begin = time.monotonic()
    longest = 0.0
    for number in range(rounds):
        started = time.monotonic()
        if number >= LEAST_ROUNDS and seconds is not None and started - begin + longest > seconds:
            return number
        for position, prompt in enumerate(prompts):
            prompt.runs.append(runner(position, number))
            if progress is not None:
                progress(f"run {number + 1} of each prompt", position + 1, len(prompts))
        longest = max(longest, time.monotonic() - started)
    return rounds


def assert_repeatable(
    stack: Any,
    prompts: Sequence[str],
    *,
    runs: int = 3,
    max_new_tokens: int = 64,
    reduction: str | None = None,
    logits: bool = True,
    **generate_options: Any,
) -> None:
    """Fail unless greedy outputs repeat bit for bit in so many runs.

    That they did is no proof for further runs; more prompts and runs make the bound smaller.

    Args:
        stack: an engine from load_engine; vLLM's ``LLM``; or a function that takes the prompts and returns one list of
            token ids for each.
        prompts: what to ask.
        runs: of each prompt, at least 2.
        max_new_tokens: per generation (not for a function).
        reduction: on an engine, how shrinks sum; None leaves it as it is set. Simulated atomics take a new schedule
            seed in each run.
        logits: on an engine, compare all logits of matching prefixes, too, not tokens alone.
        **generate_options: further arguments of ``LLM.generate``, such as ``lora_request``.

    Raises:
        AssertionError: which prompt changed, in which run, and at which token.
        InputError: the stack is none of these, or a number is impossible.
    """
    __tracebackhide__ = True
    if isinstance(prompts, str):
        raise InputError(f"assert_repeatable takes a list of prompts; got one text: [{prompts!r}]")
    named = [PromptRuns(f"prompt {number}") for number in range(len(prompts))]
    check_at_least("max new tokens", max_new_tokens)
    before = None
    if hasattr(stack, "intercepted") and hasattr(stack, "step"):
        if generate_options:
            raise InputError(f"an engine takes no {next(iter(generate_options))!r}; leave it out")
        before = stack.describe()["reduction"]
        runner = engine_runner(stack, prompts, named, reduction, max_new_tokens, digests=logits)
    else:
        if reduction is not None:
            raise InputError(
                "a reduction is chosen here on an engine only; vLLM takes it from FLIPTRACE_SHRINK when it starts"
            )
        runner = _listing_runner(stack, list(prompts), max_new_tokens, generate_options)
    try:
        run_rounds(named, runner, rounds=runs)
    finally:
        if before is not None:
            stack.set_reduction(before["identity"], before["seed"])
    for prompt in named:
        _assert_prompt(prompt)
    if not any(prompt.compared_tokens for prompt in named):
        raise InputError("no prompt was answered with a single token, so nothing was compared")


def _assert_prompt(prompt: PromptRuns) -> None:
    __tracebackhide__ = True  # pytest then shows the line of the test that called
    first = prompt.runs[0]
    for number, run in enumerate(prompt.runs[1:], start=2):
        flip = run.flip_from(first)
        if flip is not None:
            before, after = first.token_ids[flip : flip + 1], run.token_ids[flip : flip + 1]
            raise AssertionError(
                f"{prompt.name} is not repeatable: run {number} chose another token than run 1 at generated token "
                f"{flip + 1} ({list(before) or 'the end'} against {list(after) or 'the end'})"
            )
        step = run.bits_from(first)
        if step is not None:
            raise AssertionError(
                f"{prompt.name} is not repeatable: tokens are equal, but the logits of generated token {step + 1} have "
                f"other bits in run {number} than in run 1"
            )


def engine_runner(
    engine: Any,
    texts: Sequence[str],
    prompts: Sequence[PromptRuns],
    reduction: str | None,
    max_new_tokens: int,
    *,
    digests: bool,
    chat_template: bool = True,
    seed: int = 0,
) -> Runner:
    """Return what runs prompts on an engine, and note the hashes of their ids.

    Args:
        engine: from load_engine.
        texts: one per prompt.
        prompts: their records.
        reduction: a name, None for the one that is set.
        max_new_tokens: per generation.
        digests: digest all logits.
        chat_template: apply the tokenizer's.
        seed: where schedule seeds begin, where atomics are simulated.

    Raises:
        InputError: a prompt is empty or too long.
    """
    from fliptrace.studies.engines import (
        SEEDS_PER_PROMPT,
        encode,
        generate_once,
        identity_of,
        ids_sha256,
    )

    encoded = [
        encode(engine, text, prompt.name, chat_template=chat_template)
        for text, prompt in zip(texts, prompts, strict=True)
    ]
    for prompt, ids in zip(prompts, encoded, strict=True):
        prompt.ids_sha256 = ids_sha256(ids.ids)
    name: str = identity_of(reduction or engine.describe()["reduction"]["identity"])

    def run(position: int, number: int) -> Run:
        made = generate_once(
            engine,
            encoded[position],
            reduction=name,
            seed=seed + SEEDS_PER_PROMPT * position + number,
            max_new_tokens=max_new_tokens,
            digests=digests,
        )
        return Run(made.token_ids, made.logits_digests, made.ties)

    return run


def _listing_runner(
    stack: Any, prompts: list[str], max_new_tokens: int, options: Mapping[str, Any]
) -> Runner:
    """Return what runs prompts on vLLM's LLM or a function: all of a round at once, when the first is asked for."""
    if hasattr(stack, "generate") and hasattr(stack, "get_default_sampling_params"):
        parameters = stack.get_default_sampling_params()
        parameters.temperature, parameters.max_tokens = 0.0, max_new_tokens

        def ask() -> list[Sequence[int]]:
            return [
                request.outputs[0].token_ids
                for request in stack.generate(prompts, parameters, use_tqdm=False, **options)
            ]
    elif callable(stack):

        def ask() -> list[Sequence[int]]:
            return list(stack(prompts, **options))
    else:
        raise InputError(
            "assert_repeatable takes an engine from load_engine, vLLM's LLM, or a function of the prompts; got "
            f"{type(stack).__name__}"
        )
    rounds: dict[int, list[Sequence[int]]] = {}

    def run(position: int, number: int) -> Run:
        if number not in rounds:
            rounds[number] = ask()
            if len(rounds[number]) != len(prompts):
                raise InputError(
                    f"one list of token ids per prompt is required; got {len(rounds[number])} for "
                    f"{len(prompts)} prompts"
                )
        return Run(tuple(map(int, rounds[number][position])))

    return run
