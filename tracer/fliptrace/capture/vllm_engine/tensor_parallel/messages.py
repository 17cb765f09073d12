"""What a driver and its rank processes say to one another, and how tensors travel between them.

Both ends are this package in one installation, joined by a socket that nobody else has; what travels is pickled.

A rank answers every command with one Done or Failed. While it runs a step it may say more before that: an Event tells
what an observer or an audit is told in that process, a Question asks an interceptor and waits for the answer.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from fliptrace.capture.frames import tensor_bytes
from fliptrace.trace import dtype_from_name, dtype_name


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor on its way.

    Attributes:
        dtype: its name.
        shape: its shape.
        data: its bytes in row-major order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Command:
    """What a rank is told to do.

    Attributes:
        do: name of a method of RankServer.
        arguments: its arguments.
    """

    do: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """Something that an observer or an audit is told.

    Attributes:
        name: the method's.
        place: the rank's own site number or the layer's number; None where there is neither.
        arguments: the rest; tensors are packed, None stands for the operand that was sent last.
    """

    name: str
    place: int | None
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """A shrink that an interceptor may replace.

    Attributes:
        place: the rank's own site number.
        operand: rows [T, K]; None for the operand that was sent last.
        shrink: [T, R] FP32.
    """

    place: int
    operand: Packed | None
    shrink: Packed


@dataclass(frozen=True, slots=True)
class Done:
    """A command was carried out.

    Attributes:
        value: what it gave.
    """

    value: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A command failed.

    Attributes:
        kind: the exception's class.
        text: what it said.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a rank gives for one step.

    Attributes:
        logits: the last row's, from rank 0 only.
        digest: of the logits, two 64-bit words, to compare ranks.
        records: what a decode step's capture exported, where it was asked for; see captures.
        launches: per site, None where they are those of the step before.
        sources: per site the site whose slot holds its operand; None likewise.
    """

    logits: Packed | None
    digest: tuple[int, int]
    records: bytes | None = None
    launches: tuple[str, ...] | None = None
    sources: tuple[int, ...] | None = None


def pack(tensor: Tensor) -> Packed:
    """Copy a tensor for the way; waits for its device."""
    return Packed(dtype_name(tensor.dtype), tuple(tensor.shape), tensor_bytes(tensor.cpu()))


def unpack(packed: Packed) -> Tensor:
    """Return the tensor, on the CPU and nobody else's."""
    if not packed.data:
        return torch.empty(packed.shape, dtype=dtype_from_name(packed.dtype))
    flat = torch.frombuffer(bytearray(packed.data), dtype=torch.uint8)
    return flat.view(dtype_from_name(packed.dtype)).view(packed.shape)


def send(connection: Connection, message: object) -> None:
    """Send one message.

    Raises:
        OSError: nobody is there any more.
    """
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Wait for one message.

    Raises:
        EOFError, OSError: nobody is there any more.
    """
    return pickle.loads(connection.recv_bytes())  # noqa: S301  (our own process wrote it)
