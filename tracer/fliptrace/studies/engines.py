"""Engines for studies: how one is loaded, what it says about itself, and one greedy generation on it.

Studies know engines by fliptrace.capture.engine.Engine and load them by name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fliptrace.errors import InputError, RecordingError
from fliptrace.pair.bundled import bundled_model
from fliptrace.pair.engines import VLLM_OWN, load_engine
from fliptrace.pair.prompts import Prompt, encode_prompt
from fliptrace.pair.recording import set_reduction
from fliptrace.studies.amounts import check_at_least
from fliptrace.studies.items import Item
from fliptrace.studies.server_client import SERVER
from fliptrace_kernels import FliptraceKernelsError, parse_reduction

if TYPE_CHECKING:
    from torch import Tensor

#: ``name=value`` of a launch; values may hold spaces.
_LAUNCH_PART = re.compile(r"(\w+)=(.*?)(?= \w+=|$)")
#: Rows of the prefill that is observed: from 128 on, vLLM's own choice of splits is another.
_OBSERVED_ROWS = 128

#: Names of what was not chosen here.
_UNKNOWN = (VLLM_OWN, SERVER)
#: Schedule seeds of one prompt lie together, those of the next a thousand further.
SEEDS_PER_PROMPT = 1_000


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model runs, and how.

    Attributes:
        model: as load_engine takes it; None for the bundled one.
        adapter: its LoRA adapter; None for the bundled one.
        engine: see load_engine.
        device: see load_engine.
        dtype: see load_engine.
        attention: see load_engine.
        chat_template: apply the tokenizer's chat template.
        threads: of torch, on the CPU. Bits of a matrix product may depend on it, so every worker takes this number.
        vllm_arguments: see load_engine.
    """

    model: str | None = None
    adapter: str | None = None
    engine: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "sdpa"
    chat_template: bool = True
    threads: int = 1
    vllm_arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what no worker could run with, before a folder is made."""
        check_at_least("threads", self.threads)

    def identity(self) -> dict[str, Any]:
        """Return what rows depend on; model and adapter are known by their hashes, not by where they lie."""
        passed = {"vllm_arguments": dict(self.vllm_arguments)} if self.vllm_arguments else {}
        return passed | {
            "bundled_model": self.model is None,
            "engine": self.engine,
            "device": self.device,
            "dtype": self.dtype,
            "attention": self.attention,
            "chat_template": self.chat_template,
            "threads": self.threads,
        }

    def load(self) -> Any:
        """Load the engine in this process.

        Raises:
            InputError: a model without adapter or the reverse, or what load_engine refuses.
        """
        if (self.model is None) != (self.adapter is None):
            raise InputError(
                "a model needs a LoRA adapter and an adapter its model: give both, or neither for the bundled ones"
            )
        torch.set_num_threads(self.threads)
        bundled = bundled_model()
        return load_engine(
            self.model or bundled.model,
            self.adapter or bundled.adapter,
            engine=self.engine,
            device=self.device,
            dtype=self.dtype,
            attention=self.attention,
            vllm_arguments=self.vllm_arguments,
        )


def identity_of(reduction: str) -> str:
    """Return a reduction's long name, the same for its short one; ``vllm-own`` and ``server`` are their own.

    Raises:
        InputError: there is none of that name.
    """
    if reduction in _UNKNOWN:
        return reduction
    try:
        return str(parse_reduction(reduction))
    except FliptraceKernelsError as error:
        raise InputError(str(error)) from error


def is_repeatable(reduction: str) -> bool:
    """Tell whether a reduction sums in one order by construction; of what runs elsewhere nothing is known here."""
    return reduction not in _UNKNOWN and parse_reduction(reduction).is_repeatable


def simulates(engine: Any, reduction: str) -> bool:
    """Tell whether an engine takes a reduction's arrival orders from a seeded schedule."""
    return (
        reduction not in _UNKNOWN
        and bool(engine.simulates_atomics)
        and not is_repeatable(reduction)
    )


def check_repeats(what: str, count: int, seed: int) -> None:
    """Check how often something runs, and where its schedule seeds begin.

    Raises:
        InputError: fewer than two leave nothing to compare; more than SEEDS_PER_PROMPT would share seeds.
    """
    if not 2 <= count <= SEEDS_PER_PROMPT:
        raise InputError(
            f"{what} must be 2 to {SEEDS_PER_PROMPT}: the first is what the others are compared with; got {count}"
        )
    check_at_least("the seed", seed, 0)


def encode(engine: Any, text: str, source: str, *, chat_template: bool) -> Prompt:
    """Encode a prompt and see that it leaves room for a token.

    Raises:
        InputError: empty, or too long.
    """
    prompt = encode_prompt(engine.tokenizer, text, chat_template=chat_template, source=source)
    limit = engine.context_length
    if limit is not None and len(prompt.ids) >= limit:
        raise InputError(
            f"the prompt ({source}) has {len(prompt.ids)} tokens and the model's context is {limit}; leave it out"
        )
    return prompt


def check_prompts(engine: Any, prompts: Iterable[tuple[str, str]], *, chat_template: bool) -> None:
    """Refuse prompts that cannot be asked before the first is, so that none ends a study in its middle.

    Args:
        engine: from load_engine.
        prompts: text and name of each.
        chat_template: apply the tokenizer's.

    Raises:
        InputError: what is wrong with the first of them, and how many there are.
    """
    wrong: list[InputError] = []
    names: list[str] = []
    for text, source in dict.fromkeys(prompts):
        try:
            encode(engine, text, source, chat_template=chat_template)
        except InputError as error:
            wrong.append(error)
            names.append(source)
    if len(wrong) > 1:
        more = ", ".join(names[1:10])
        raise InputError(f"{wrong[0]}; {len(wrong) - 1} more cannot be asked: {more}")
    if wrong:
        raise wrong[0]


def check_questions(engine: Any, items: Iterable[Item], *, chat_template: bool) -> None:
    """Check the prompts of items that hold a question; see check_prompts.

    Raises:
        InputError: as check_prompts.
    """
    questions = [item.arguments["question"] for item in items if "question" in item.arguments]
    prompts = ((question["text"], question["source"]) for question in questions)
    check_prompts(engine, prompts, chat_template=chat_template)


def ids_sha256(ids: Sequence[int]) -> str:
    """Return the hash of token ids that manifests carry, too."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Generation:
    """One greedy generation.

    Attributes:
        token_ids: generated ids, an end token included.
        stop_reason: see Execution.
        text: decoded, without special tokens.
        selected_logits: the selected token's raw logit, per step.
        margins: the largest logit less the second, per step; 0 is a tie.
        logits_digests: digest of all logits per step, where asked for.
    """

    token_ids: tuple[int, ...]
    stop_reason: str
    text: str
    selected_logits: tuple[float, ...]
    margins: tuple[float, ...]
    logits_digests: tuple[str, ...]

    @property
    def ties(self) -> int:
        """In how many steps the two best logits were exactly equal."""
        return sum(margin == 0.0 for margin in self.margins)


def generate_once(
    engine: Any,
    prompt: Prompt,
    *,
    reduction: str,
    seed: int,
    max_new_tokens: int,
    digests: bool = False,
) -> Generation:
    """Generate greedily under a reduction; the seed counts only where atomics are simulated."""
    from fliptrace.capture.decoding import Choice, generate
    from fliptrace.numerics import digest_hex, digest_rows

    selected: list[float] = []
    margins: list[float] = []
    digested: list[str] = []

    def on_choice(_: int, choice: Choice, logits: Tensor) -> None:
        selected.append(choice.top_values[0])
        margins.append(choice.top_values[0] - choice.top_values[1])
        if digests:
            digested.append(digest_hex(digest_rows(logits.unsqueeze(0))[0]))

    set_reduction(engine, reduction, seed)
    execution = generate(
        engine,
        prompt.ids,
        max_new_tokens=max_new_tokens,
        end_ids=engine.end_ids,
        on_choice=on_choice,
    )
    return Generation(
        token_ids=execution.token_ids,
        stop_reason=execution.stop_reason,
        text=engine.text_of(execution.token_ids),
        selected_logits=tuple(selected),
        margins=tuple(margins),
        logits_digests=tuple(digested),
    )


def describe_engine(engine: Any, reductions: Sequence[str]) -> dict[str, Any]:
    """Return the engine's manifest sections and, per reduction, the kernels that ran a prefill and a decode step.

    A prefill of 128 rows and a decode step are observed under each reduction; what they report is what was launched.

    Raises:
        RecordingError: a LoRA layer launched another reduction, or none at all.
    """
    described = {name: dict(section) for name, section in engine.describe().items()}
    described.pop("reduction", None)
    described["kernels"] = {
        identity: _launched(engine, identity) for identity in map(identity_of, reductions)
    }
    return described


def reduction_of(engine: Any) -> Mapping[str, Any]:
    """Return identity and schedule of the engine's reduction as it says them now."""
    section: Mapping[str, Any] = engine.describe()["reduction"]
    return {"reduction": section["identity"], "schedule": section["schedule"]}


class _Launches:
    """An observer that keeps what ran."""

    def __init__(self) -> None:
        self.kernels: set[str] = set()
        self.reductions: set[str] = set()
        self.calls: list[set[int]] = []

    def begin_step(self, step: int, first_position: int, token_ids: Sequence[int]) -> None:
        """Start a forward."""
        self.calls.append(set())

    def shrink(self, site: int, operand: Tensor, output: Tensor, launch: str) -> None:
        """Keep implementation and kernel of a launch, and where it was."""
        words = dict(_LAUNCH_PART.findall(launch))
        self.calls[-1].add(site)
        self.reductions.add(words.get("reduction", launch))
        names = [words.get(name, "") for name in ("reduction", "implementation", "kernel")]
        self.kernels.add(" ".join(filter(None, names)) or launch)

    def projection(self, site: int, output: Tensor) -> None:
        """Nothing to keep."""

    def cache_rows(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Nothing to keep."""

    def operation(self, key: str, is_module: bool, inputs: Tensor, outputs: Tensor) -> None:
        """Nothing to keep."""

    def end_step(self, logits: Tensor) -> None:
        """Nothing to keep."""


def _launched(engine: Any, reduction: str) -> str:
    set_reduction(engine, reduction, 0)
    launches = _Launches()
    limit = engine.context_length or _OBSERVED_ROWS + 2
    rows = min(_OBSERVED_ROWS, limit - 2)
    with engine.observed(launches):
        engine.start([0] * rows)
        engine.step()
        engine.step(0)
    silent = len(engine.sites) - min(map(len, launches.calls))
    if silent:
        raise RecordingError(
            f"every LoRA layer must launch a shrink under {reduction}; {silent} of {len(engine.sites)} did not. Please "
            "report it with the model's architecture"
        )
    if reduction not in _UNKNOWN:
        named = parse_reduction(reduction)
        odd = launches.reductions - {str(named.for_rows(count)) for count in (1, rows)}
        if odd:
            raise RecordingError(
                f"shrinks had to run as {reduction} and ran as {', '.join(sorted(odd))}; nothing computed here would "
                "belong to that name"
            )
    return ", ".join(sorted(launches.kernels))
