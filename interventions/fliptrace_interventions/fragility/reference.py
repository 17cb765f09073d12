"""The execution whose fragility is asked for: its choices, the operands and outputs of its shrinks, its cache.

It is either run here and observed, or a recorded trace is run again with its tokens forced and its recorded shrinks
handed over, which restores every operand bit by bit (fliptrace_interventions.reconstruction proves the same).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fliptrace.capture.decoding import Choice, generate
from fliptrace.errors import InputError
from fliptrace.pair.recording import set_reduction

if TYPE_CHECKING:
    from fliptrace.capture.engine import CacheLayer
    from fliptrace.capture.engine import Engine as EngineProtocol
    from fliptrace_interventions.recorded import RecordedExecution

#: The largest logits of a step that are kept and followed in replays.
TOP = 4


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """What the reference chose in a step, and how narrowly.

    Attributes:
        token: the chosen id.
        values: the TOP largest logits as FP32, largest first.
        ids: their token ids, the lowest id first among equals.
        ulp: one unit in the last place of the largest logit, in the type of the logits (of the model, where they are
            FP32).
    """

    token: int
    values: tuple[float, ...]
    ids: tuple[int, ...]
    ulp: float

    @property
    def margin(self) -> float:
        """The largest logit less the second, in ULP; 0 is a tie."""
        return (self.values[0] - self.values[1]) / self.ulp


@dataclass(frozen=True, slots=True)
class ShrinkCall:
    """A shrink that ran: step, site number, operand rows [T, K], output [T, R] FP32."""

    step: int
    site: int
    operand: Tensor
    output: Tensor


@dataclass
class ReferenceRun:
    """One execution.

    Attributes:
        prompt_ids: the prompt.
        token_ids: generated ids.
        stop_reason: see fliptrace.capture.decoding.Execution.
        steps: one per generated token.
        calls: every shrink in execution order; empty where they were not asked for.
        cache: the whole cache at the end, empty where it was not asked for.
        has_state: the model keeps recurrent state, of which only the end's could be read.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    stop_reason: str = ""
    steps: list[ReferenceStep] = field(default_factory=list)
    calls: list[ShrinkCall] = field(default_factory=list)
    cache: tuple[CacheLayer, ...] = ()
    has_state: bool = False

    def near_steps(self, reach: float) -> list[int]:
        """Return the steps whose margin is at most ``reach`` ULP."""
        return [number for number, step in enumerate(self.steps) if step.margin <= reach]

    @property
    def restarts(self) -> bool:
        """Whether an execution can begin at any step: the cache holds every row, and no recurrent state is needed."""
        return (
            bool(self.cache)
            and not self.has_state
            and all(layer.first_position == 0 for layer in self.cache)
        )


class _Watching:
    """An observer that copies operands and outputs of all shrinks."""

    def __init__(self, calls: list[ShrinkCall]) -> None:
        self.step = -1
        self._calls = calls

    def begin_step(self, step: int, first_position: int, token_ids: Sequence[int]) -> None:
        """Note the step."""
        self.step = step

    def shrink(self, site: int, operand: Tensor, output: Tensor, launch: str) -> None:
        """Keep copies."""
        rows = operand.reshape(-1, operand.shape[-1])
        self._calls.append(ShrinkCall(self.step, site, rows.clone(), output.clone()))

    def projection(self, site: int, output: Tensor) -> None:
        """Nothing to keep."""

    def cache_rows(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Nothing to keep."""

    def operation(self, key: str, is_module: bool, inputs: Tensor, outputs: Tensor) -> None:
        """Nothing to keep."""

    def end_step(self, logits: Tensor) -> None:
        """Nothing to keep."""


def observe_reference(
    engine: Any,
    prompt_ids: Sequence[int],
    *,
    reduction: str,
    seed: int,
    max_new_tokens: int,
    shrinks: bool = True,
) -> ReferenceRun:
    """Generate greedily and keep what later replays need.

    Args:
        engine: from load_engine.
        prompt_ids: the prompt.
        reduction: how shrinks sum.
        seed: arrival schedule, where atomics are simulated.
        max_new_tokens: at the most.
        shrinks: keep operands, shrinks and the cache; without them only forced replays from the prompt are possible.
            They take as much memory as the operands of all steps.
    """
    set_reduction(engine, reduction, seed)
    run = ReferenceRun(tuple(prompt_ids))
    with engine.observed(_Watching(run.calls)) if shrinks else contextlib.nullcontext():
        execution = generate(
            engine,
            run.prompt_ids,
            max_new_tokens=max_new_tokens,
            end_ids=engine.end_ids,
            on_choice=_keeper(engine, run),
        )
    run.token_ids, run.stop_reason = execution.token_ids, execution.stop_reason
    if shrinks:
        run.cache, run.has_state = engine.read_cache(), bool(engine.state_keys)
    return run


def reference_of_trace(engine: EngineProtocol, recorded: RecordedExecution) -> ReferenceRun:
    """Run a recorded execution again, with its tokens and its recorded shrinks.

    Args:
        engine: with the trace's model; its reduction decides what is computed and not used.
        recorded: the trace.

    Raises:
        InputError: the engine does not choose the recorded tokens, so this is not the recorded stack.
    """
    run = ReferenceRun(recorded.prompt_ids, recorded.token_ids, recorded.trace.closing.stop_reason)
    watching = _Watching(run.calls)
    chosen: list[int] = []
    keep = _keeper(engine, run)

    def on_choice(step: int, choice: Choice, logits: Tensor) -> None:
        keep(step, choice, logits)
        chosen.append(choice.token)

    def handed_over(site: int, _: Tensor, __: Tensor) -> Tensor:
        return recorded.shrink(watching.step, site)

    with engine.intercepted(handed_over), engine.observed(watching):
        generate(
            engine,
            run.prompt_ids,
            max_new_tokens=len(run.token_ids),
            end_ids=(),
            on_choice=on_choice,
            forced_ids=run.token_ids,
        )
    for step, (made, wanted) in enumerate(zip(chosen, run.token_ids, strict=True)):
        if made != wanted:
            raise InputError(
                f"{recorded.trace.name} has token {wanted} in step {step}; with its recorded shrinks this machine "
                f"chooses {made}. Its fragility can be asked for only on the stack that recorded it"
            )
    run.cache, run.has_state = engine.read_cache(), bool(engine.state_keys)
    return run


def _keeper(engine: Any, run: ReferenceRun) -> Any:
    def keep(_: int, choice: Choice, logits: Tensor) -> None:
        values, ids = logits.float().topk(min(TOP, logits.shape[0]))
        pairs = sorted(
            zip(values.tolist(), ids.tolist(), strict=True), key=lambda pair: (-pair[0], pair[1])
        )
        # topk promises no order among equals, and may leave out the lowest id of many.
        if choice.token not in ids.tolist():
            pairs[-1:] = [(choice.top_values[0], choice.token)]
            pairs.sort(key=lambda pair: (-pair[0], pair[1]))
        run.steps.append(
            ReferenceStep(
                choice.token,
                tuple(value for value, _ in pairs),
                tuple(number for _, number in pairs),
                ulp_of(
                    choice.top_values[0],
                    engine.dtype if logits.dtype is torch.float32 else logits.dtype,
                ),
            )
        )

    return keep


def ulp_of(value: float, dtype: torch.dtype) -> float:
    """Return one unit in the last place of a value in a type."""
    _, exponent = torch.frexp(torch.tensor(value, dtype=torch.float64))
    return float(torch.finfo(dtype).eps * 2.0 ** (int(exponent) - 1))
