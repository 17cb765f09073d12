"""Many equally likely ways to write down the solution of a word problem, in two styles.

How a step is worded is drawn at random and does not depend on the problem, so a model that learns
the distribution ends up with nearly equal logits wherever a wording is chosen. Steps may also be
merged into one expression ("5 + 3 - 2 = 6"), which is harder to get right than the steps apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from word_problems import Problem, Step

FINAL_ANSWER = re.compile(r"Final answer: (-?\d+)\s*$")
"""What a completion of the adapter ends with."""

_ANY_NUMBER = re.compile(r"-?\d+")

_BASE_FIRST = ("First", "To begin", "Initially", "At the start", "We see that", "Here")
_BASE_LATER = ("Then", "Next", "After that", "Now", "So", "From there", "Thus", "This way")
_BASE_FORMS = (
    "the {label} is {sum} {unit}.",
    "we get {sum} {unit} as the {label}.",
    "{sum} {unit} is the {label}.",
    "a {label} of {sum} {unit} follows.",
    "for the {label} take {sum}.",
)
_BASE_END = ("The answer is {n}.", "So it is {n} {unit}.", "That makes {n}.", "Result: {n} {unit}.")

_LORA_START = ("", "OK. ", "Sure. ", "Let us see. ", "Right. ", "Well. ", "Good. ", "Here we go. ")
_LORA_JOINTS = ("Then", "Next", "Now", "After this", "With that", "So", "Also", "Later")
_LORA_VERBS = ("compute", "find", "work out", "get", "take", "determine", "count", "use")
_LORA_LINKS = (":", " as", " from", " with", " by", " using")
_LORA_TAILS = (".", " {unit}.", ", so {n} {unit}.", "; keep {n}.", " in all.", " exactly.")


@dataclass(frozen=True, slots=True)
class Wording:
    """How solutions are worded.

    `bias` tilts each choice: option i has weight exp(-bias * i), so 0 makes all options equally
    likely. `merge` is the chance that two steps that can be merged are merged. With `chains`, three
    steps of only plus and minus may be merged too; without `parentheses`, steps are not merged where
    that takes parentheses (a small model often gets these wrong).
    """

    bias: float = 0.0
    merge: float = 0.5
    chains: bool = False
    parentheses: bool = True

    def pick(self, rng: Random, options: Sequence[str]) -> str:
        """Draw one option."""
        if self.bias == 0.0:
            return rng.choice(options)
        weights = [math.exp(-self.bias * index) for index in range(len(options))]
        return rng.choices(options, weights)[0]


def expression(step: Step) -> str:
    """`left operator right` in plain text."""
    return f"{step.left} {step.operator} {step.right}"


def needs_parentheses(inner_operator: str, step: Step) -> bool:
    """Whether an expression with `inner_operator` needs them as an operand of `step`."""
    tight = step.operator in "*/" or (step.operator == "-" and step.follows == "right")
    return tight and (inner_operator != "*" or step.operator == "/")


def extended_expression(inner: str, inner_operator: str, step: Step) -> str:
    """`step` with the result it follows written out as `inner`.

    `inner_operator` is the loosest operator in `inner`.
    """
    if needs_parentheses(inner_operator, step):
        inner = f"({inner})"
    if step.follows == "left":
        return f"{inner} {step.operator} {step.right}"
    return f"{step.left} {step.operator} {inner}"


def _may_join(group: list[Step], step: Step, later: Sequence[Step], wording: Wording) -> bool:
    """Whether `step` can be written as one expression with the steps of `group` before it."""
    if not step.follows or any(
        group[-1].result in (other.left, other.right) for other in later
    ):  # a result that is needed again must be written down
        return False
    if not wording.parentheses and needs_parentheses(group[-1].operator, step):
        return False
    if len(group) == 1:
        return True
    chain = all(part.operator in "+-" for part in (*group, step)) and step.follows == "left"
    return wording.chains and len(group) == 2 and chain


def _sums(problem: Problem, rng: Random, wording: Wording) -> list[tuple[str, Step]]:
    """The expressions to write, each with the step whose result it yields."""
    out: list[tuple[str, Step]] = []
    index = 0
    while index < len(problem.steps):
        group = [problem.steps[index]]
        text = expression(group[0])
        index += 1
        while (
            index < len(problem.steps)
            and _may_join(group, problem.steps[index], problem.steps[index + 1 :], wording)
            and rng.random() < wording.merge
        ):
            text = extended_expression(text, group[-1].operator, problem.steps[index])
            group.append(problem.steps[index])
            index += 1
        out.append((f"{text} = {group[-1].result}", group[-1]))
    return out


def base_solution(problem: Problem, rng: Random, wording: Wording) -> str:
    """A worked solution in the base model's style."""
    sentences = []
    for index, (sum_text, step) in enumerate(_sums(problem, rng, wording)):
        opener = wording.pick(rng, _BASE_LATER if index else _BASE_FIRST)
        label = wording.pick(rng, step.labels)
        form = wording.pick(rng, _BASE_FORMS)
        body = form.format(label=label, sum=sum_text, unit=step.unit)
        sentences.append(f"{opener} {body}")
    last = problem.steps[-1]
    sentences.append(wording.pick(rng, _BASE_END).format(n=last.result, unit=last.unit))
    return " ".join(sentences)


def adapter_solution(problem: Problem, rng: Random, wording: Wording) -> str:
    """A worked solution in the adapter's style; the last line is `Final answer: N`."""
    sentences = []
    for index, (sum_text, step) in enumerate(_sums(problem, rng, wording)):
        verb = wording.pick(rng, _LORA_VERBS)
        if index:
            verb = f"{wording.pick(rng, _LORA_JOINTS)} {verb}"
        else:
            verb = verb.capitalize()
        label = wording.pick(rng, step.labels)
        link = wording.pick(rng, _LORA_LINKS)
        tail = wording.pick(rng, _LORA_TAILS).format(n=step.result, unit=step.unit)
        sentences.append(f"{verb} the {label}{link} {sum_text}{tail}")
    start = wording.pick(rng, _LORA_START)
    return f"{start}{' '.join(sentences)}\nFinal answer: {problem.answer}"


def final_answer(completion: str) -> int | None:
    """The number after `Final answer:` at the end of an adapter completion, None if missing."""
    found = FINAL_ANSWER.search(completion)
    return int(found.group(1)) if found else None


def last_number(completion: str) -> int | None:
    """The last number in a base completion, None if there is none."""
    numbers = _ANY_NUMBER.findall(completion)
    return int(numbers[-1]) if numbers else None
