"""Recurrent state that a trace holds by its digests alone: replayed from the last whole one, and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fliptrace.capture.engine import Engine, StateTensor
from fliptrace.errors import InputError
from fliptrace.numerics import digest_tensor

if TYPE_CHECKING:
    from fliptrace_interventions.recorded import RecordedExecution


def replayed_state(
    engine: Engine, recorded: RecordedExecution, step: int
) -> tuple[StateTensor, ...]:
    """Return the recurrent state that a step left.

    Args:
        engine: with the recording's model; its cache is another afterwards, so whoever asks writes one before stepping.
        recorded: gives rows, tokens, shrinks and the last whole state.
        step: whose state the trace does not hold whole.

    Raises:
        InputError: its digests are not the recorded ones.
    """
    held = recorded.last_whole_state(step)
    at = held + 1

    def handed_over(site: int, _: Tensor, __: Tensor) -> Tensor:
        return recorded.shrink(at, site)

    engine.write_cache(recorded.cache_before(held + 1), held + 1, recorded.state_after(held))
    with engine.intercepted(handed_over):
        for at in range(held + 1, step + 1):
            engine.step(recorded.token_ids[at - 1])
    states = engine.read_state()
    digests = torch.stack([digest_tensor(state.values) for state in states]).cpu()
    if not torch.equal(digests, recorded.state_digests(step)):
        raise InputError(
            f"the {recorded.which} holds the recurrent state after step {step} by its digests alone; replayed from "
            f"step {held} on this machine it has others. Experiments on it are possible only where it was recorded, "
            "or on a recording with whole states (state_every=1)"
        )
    return states
