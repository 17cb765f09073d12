"""Commands to ranks, and what they say until each is done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from fliptrace.capture.vllm_engine.tensor_parallel.delivering import Delivery
from fliptrace.capture.vllm_engine.tensor_parallel.messages import (
    Command,
    Done,
    Event,
    Failed,
    Question,
)
from fliptrace.capture.vllm_engine.tensor_parallel.processes import RankGroup
from fliptrace.capture.vllm_engine.tensor_parallel.troubles import error_of
from fliptrace.errors import RecordingError

#: The longest that a rank may take for one answer.
ANSWER_SECONDS = 600.0


class Conversation:
    """Talks to the ranks of a group, one command at a time."""

    def __init__(self, group: RankGroup) -> None:
        """Talk to these."""
        self.group = group

    def one(self, rank: int, command: Command) -> Any:
        """Give a command to one rank, where ranks need not meet.

        Raises:
            FliptraceError: it failed.
        """
        with self._undisturbed():
            self.group.send(rank, command)
            answer = self.group.receive(rank, ANSWER_SECONDS)
        if isinstance(answer, Failed):
            raise error_of(answer, rank, self.group.count)
        return answer.value

    def all_of(self, command: Command, delivery: Delivery | None = None) -> list[Any]:
        """Give one command to all ranks and return what each gave; see ``each``."""
        return self.each([command] * self.group.count, delivery)

    def each(self, commands: Sequence[Command], delivery: Delivery | None = None) -> list[Any]:
        """Give each rank its command, and take messages of all in step until all are done.

        A failure of whoever is told does not stop the ranks in the middle of a forward: what they still say is taken
        and not delivered, and the first failure is raised at the end.

        Args:
            commands: one per rank.
            delivery: where events and questions go.

        Returns:
            What each rank gave.

        Raises:
            FliptraceError: a rank failed or died.
            Exception: whatever an observer, interceptor or audit raised.
        """
        answers: list[Any] = [None] * self.group.count
        trouble: Exception | None = None
        with self._undisturbed():
            for rank, command in enumerate(commands):
                self.group.send(rank, command)
            while not all(isinstance(each, (Done, Failed)) for each in answers):
                found = self._round(answers, delivery if trouble is None else None)
                trouble = trouble or found
        if trouble is not None:
            raise trouble
        for rank, each in enumerate(answers):
            if isinstance(each, Failed):
                raise error_of(each, rank, self.group.count)
        return [each.value for each in answers]

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """End the ranks when a command is left before all have answered.

        Whatever they said next would be taken for the answer to another command.
        """
        try:
            yield
        except BaseException as error:
            if not self.group.trouble:
                self.group.fail(f"a command was interrupted ({type(error).__name__})")
            raise

    def _round(self, answers: list[Any], delivery: Delivery | None) -> Exception | None:
        """Take one message of every rank that is not done; return what went wrong in telling."""
        trouble: Exception | None = None
        for rank, last in enumerate(answers):
            if isinstance(last, (Done, Failed)):
                continue
            answers[rank] = message = self.group.receive(rank, ANSWER_SECONDS)
            if not isinstance(message, Question):
                continue
            given = None
            if trouble is None and delivery is not None:
                try:
                    given = delivery.answer(rank, message)
                except Exception as error:  # noqa: BLE001  (raised when all ranks are done)
                    trouble = error
            self.group.send(rank, given)
        if trouble is not None or delivery is None:
            return trouble
        kinds = {type(each) for each in answers}
        if kinds in ({Done}, {Question}) or Failed in kinds:
            return None
        if kinds != {Event}:
            said = ", ".join(
                f"rank {rank} {type(each).__name__}" for rank, each in enumerate(answers)
            )
            return RecordingError(
                f"ranks must run the same layers in the same order; they said {said}"
            )
        try:
            delivery.deliver(answers)
        except Exception as error:  # noqa: BLE001  (raised when all ranks are done)
            return error
        return None
