"""Greedy decoding, one forward at a time, with a stated rule for ties: the lowest token id wins."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fliptrace.capture.engine import Engine
from fliptrace.errors import RecordingError

TIE_RULE = "lowest token id"


@dataclass(frozen=True, slots=True)
class Choice:
    """The token chosen from one row of logits.

    Attributes:
        token: its id.
        top_values: the two largest logits, as FP32.
        top_ids: their ids; the lowest id first among equals.
        tied: how many tokens share the largest logit exactly.
    """

    token: int
    top_values: tuple[float, float]
    top_ids: tuple[int, int]
    tied: int


@dataclass(frozen=True, slots=True)
class Execution:
    """What one greedy generation gave.

    Attributes:
        token_ids: the generated ids, an end-of-sequence token included.
        stop_reason: ``end of sequence``, ``max new tokens`` or ``context full``.
    """

    token_ids: tuple[int, ...]
    stop_reason: str


def choose(logits: Tensor, step: int) -> Choice:
    """Choose greedily; among exactly equal logits the lowest token id.

    Args:
        logits: [vocabulary], any floating dtype.
        step: for the error message.

    Returns:
        The choice. One transfer from the device.

    Raises:
        RecordingError: the logits hold NaN: nothing can be said of such a step.
    """
    values = logits.float()
    largest, first = values.max(dim=0)  # documented: the first index among equals
    tied = (values == largest).sum()
    others = values.index_fill(0, first.unsqueeze(0), -math.inf)
    second_value, second = others.max(dim=0)
    top = torch.stack((largest, second_value)).double()
    indices = torch.stack((first, second, tied)).double()  # ids below 2**53 are exact
    best, runner_up, first_id, second_id, ties = torch.cat((top, indices)).tolist()
    if math.isnan(best) or math.isnan(runner_up):
        raise RecordingError(
            f"step {step}: the logits hold NaN, so no token can be chosen and nothing compared; "
            "check the model and adapter files, the dtype (a BF16 model run in FP16 overflows) and, in an experiment, "
            "the value that an edit puts in"
        )
    return Choice(
        token=int(first_id),
        top_values=(best, runner_up),
        top_ids=(int(first_id), int(second_id)),
        tied=int(ties),
    )


def generate(
    engine: Engine,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    end_ids: Collection[int],
    on_choice: Callable[[int, Choice, Tensor], None] | None = None,
    forced_ids: Sequence[int] = (),
) -> Execution:
    """Generate greedily from an empty cache.

    Args:
        engine: where it runs, with its reduction set.
        prompt_ids: the prompt.
        max_new_tokens: how many tokens at the most.
        end_ids: ids that end the generation; the end token itself is kept.
        on_choice: called after every step with (step, choice, logits).
        forced_ids: tokens fed instead of the chosen ones, one per step from step 0; the choice is still reported.

    Returns:
        The execution.

    Raises:
        RecordingError: NaN logits.
        InputError: the prompt does not fit.
    """
    engine.start(prompt_ids)
    token_ids: list[int] = []
    token: int | None = None
    limit = engine.context_length
    for step in range(max_new_tokens):
        if limit is not None and len(prompt_ids) + step > limit:
            return Execution(tuple(token_ids), "context full")
        logits = engine.step(token)
        choice = choose(logits, step)
        if on_choice is not None:
            on_choice(step, choice, logits)
        token = forced_ids[step] if step < len(forced_ids) else choice.token
        token_ids.append(token)
        if token in end_ids:
            return Execution(tuple(token_ids), "end of sequence")
    return Execution(tuple(token_ids), "max new tokens")
