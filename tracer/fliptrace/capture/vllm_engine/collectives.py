"""Where ranks of a tensor-parallel group meet in a forward: what this rank gives to a collective, and what it gets.

Layers add up or join their ranks' parts through one object per process, vLLM's group of ranks. Its methods are shadowed
on that object, so every layer that sums over ranks is seen, whichever it is, and nothing has to be known of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from fliptrace.errors import RecordingError

#: Every rank gives a part, and all get the same.
COLLECTIVES = ("all_reduce", "all_gather")
#: Ranks get different things: what a rank gets depends on all, and nothing of it could be told apart.
_REFUSED = ("gather", "reduce_scatter", "reduce_scatterv", "all_gatherv")


class MeetingObserver(Protocol):
    """Is told of collectives."""

    @property
    def is_watching(self) -> bool:
        """A forward runs that counts; what else runs is left alone."""

    def meeting(self, name: str, given: Tensor) -> Any:
        """This rank gives a tensor; returned is what ``met`` gets."""

    def met(self, meeting: Any, received: Tensor) -> None:
        """The collective is done."""


class CollectiveHooks:
    """Tells an observer of the collectives of this process's tensor-parallel group until ``remove``."""

    def __init__(self, observer: MeetingObserver) -> None:
        """Shadow the group's methods on this one object; its class stays as it is."""
        from vllm.distributed import get_tp_group

        self._group: Any = get_tp_group()
        for name in COLLECTIVES:
            vars(self._group)[name] = _told(getattr(self._group, name), name, observer)
        for name in _REFUSED:
            own = getattr(self._group, name, None)  # not every version of vLLM has all
            if own is not None:
                vars(self._group)[name] = _refusing(own, name, observer)

    def remove(self) -> None:
        """Uncover the class's methods; harmless when they are."""
        for name in (*COLLECTIVES, *_REFUSED):
            vars(self._group).pop(name, None)


def _told(own: Callable[..., Tensor], name: str, observer: MeetingObserver) -> Callable[..., Any]:
    def collective(input_: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        if not observer.is_watching:
            return own(input_, *arguments, **keywords)
        # Some communicators write the sum over what they were given, so it is looked at before.
        meeting = observer.meeting(name, input_)
        received = own(input_, *arguments, **keywords)
        observer.met(meeting, received)
        return received

    return collective


def _refusing(own: Callable[..., Any], name: str, observer: MeetingObserver) -> Callable[..., Any]:
    def collective(*arguments: Any, **keywords: Any) -> Any:
        if not observer.is_watching:
            return own(*arguments, **keywords)
        raise RecordingError(
            f"operations of a model whose ranks meet in {name} cannot be recorded: only "
            f"{' and '.join(COLLECTIVES)} are seen. Leave --modules out"
        )

    return collective
