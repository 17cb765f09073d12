"""Continue an execution with the rounding errors that its recording has: another question than the plain continuation.

A recorded shrink is what the continuation's reduction gives for its operand, plus the error of the order in which it
was summed when it was recorded. Computed anew, that error is gone from every shrink after an edit, and where a token
hangs by a hair that alone flips it: the experiment is void. Here the error stays, so that without an edit the
continuation is the recording, bit by bit, and what an edit changes is the edit's doing. A shrink whose operand an edit
has changed is then one that no run need ever have given: this asks what would have been, with all errors as they were.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fliptrace.capture.engine import Engine
from fliptrace.numerics import integer_view
from fliptrace_interventions.plans import Place
from fliptrace_interventions.recorded import RecordedExecution

#: Per (step, site) what the reduction gives for the recorded operand, FP32 [T, R].
Computed = Mapping[Place, Tensor]


def computed_shrinks(
    engine: Engine, recorded: RecordedExecution, last_step: int
) -> dict[Place, Tensor]:
    """Compute every shrink of a recording anew, each from its recorded operand.

    Args:
        engine: its model; the caller has chosen the reduction.
        recorded: the execution; it is replayed from an empty cache, so every operand is the recorded one.
        last_step: the last step.

    Returns:
        The shrinks on the engine's device, [T, R] FP32 each: as large together as the recorded ones.
    """
    found: dict[Place, Tensor] = {}

    def hand_over(site: int, _operand: Tensor, z: Tensor) -> Tensor:
        step = engine.step_number
        found[step, site] = z.detach().clone()
        return recorded.shrink(step, site)

    with engine.intercepted(hand_over):
        engine.start(recorded.prompt_ids)
        for step in range(last_step + 1):
            engine.step(recorded.token_ids[step - 1] if step else None)
    return found


def with_recorded_error(z: Tensor, computed: Tensor, recorded: Tensor) -> Tensor:
    """Give a shrink the rounding error of the recorded one.

    Args:
        z: what the reduction gives for the operand at hand, FP32 [T, R]; computed: for the recorded operand.
        computed: see there.
        recorded: the recorded shrink.

    Returns:
        ``recorded + (z - computed)``, rounded once to FP32; the recorded bits where z has those of ``computed``.
    """
    moved = (recorded.double() + (z.double() - computed.double())).float()
    return torch.where(integer_view(z) == integer_view(computed), recorded, moved)
