"""How a pair is searched and recorded."""

from __future__ import annotations

from dataclasses import dataclass

from fliptrace.errors import InputError
from fliptrace.pair.engines import VLLM_OWN
from fliptrace.verdicts import LEVELS


@dataclass(frozen=True, slots=True)
class PairSettings:
    """How a pair is searched and recorded.

    Attributes:
        reduction: of both executions, or of the reference alone.
        candidate_reduction: of the candidates, when it is another.
        attempts: how many candidates at the most.
        max_new_tokens: per execution.
        seed: schedule seed of the reference where atomics are simulated; candidates take the seeds after it.
        until: what ends the search: ``token``, ``surviving`` or ``any``.
        operands: keep the shrinks' inputs whole.
        modules: record every module and functional operation.
        full_logits: keep all logits whole.
        state_every: keep recurrent state whole in every so many steps, and digests of it in the others; interventions
            replay the steps in between.
        redact: keep text and token ids out of the traces; whoever has the model can still work them out from the
            values of its first layer.
        observer_control: run the recorded-against-unrecorded control first.
    """

    reduction: str = "atomic:8"
    candidate_reduction: str | None = None
    attempts: int = 20
    max_new_tokens: int = 256
    seed: int = 0
    until: str = "token"
    operands: bool = False
    modules: bool = False
    full_logits: bool = False
    redact: bool = False
    observer_control: bool = True
    state_every: int = 1

    def check(self) -> None:
        """Refuse settings that mean nothing.

        Raises:
            InputError: which, and what is allowed.
        """
        for what, number in (
            ("attempts", self.attempts),
            ("max new tokens", self.max_new_tokens),
            ("seed", self.seed),
            ("state_every", self.state_every),
        ):
            if not isinstance(number, int):
                raise InputError(f"{what} must be a whole number; got {number!r}")
        if self.state_every < 1:
            raise InputError(
                f"recurrent state is kept whole every so many steps, at least 1; got state_every={self.state_every}"
            )
        if self.attempts < 1:
            raise InputError(f"attempts must be at least 1; got {self.attempts}")
        if self.max_new_tokens < 1:
            raise InputError(f"max new tokens must be at least 1; got {self.max_new_tokens}")
        if self.until not in LEVELS:
            raise InputError(f"a difference is one of {', '.join(LEVELS)}; got {self.until!r}")
        if not 0 <= self.seed < (1 << 63) - self.attempts:
            raise InputError(
                f"schedule seeds (the first and one per attempt) run from 0 to 2^63 - 1; got {self.seed}"
            )
        for name in (self.reduction, self.candidate_reduction):
            if name is not None:
                _check_reduction(name)


def _check_reduction(name: str) -> None:
    from fliptrace_kernels import ReductionError, parse_reduction

    if name == VLLM_OWN:
        return  # the vllm engine's alone; others refuse it
    try:
        parse_reduction(name)
    except ReductionError as error:
        raise InputError(str(error)) from error
