"""The operations of all ranks as those of one engine.

Ranks run the same operations in the same order. At each place rank 0's comes first, then the others', each under the
path that sites of that rank have. A collective is one operation of all ranks: every rank gets the same, which depends
on what all gave. So what one rank adds to a sum is an input of that sum, not a difference that appears on the others.
The same holds for modules inside which ranks meet: what they give depends on what they got on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fliptrace.capture.digest_batch import DigestBatch
from fliptrace.capture.vllm_engine.collectives import COLLECTIVES
from fliptrace.capture.vllm_engine.tensor_parallel.messages import Packed, pack, unpack
from fliptrace.errors import RecordingError


@dataclass(frozen=True, slots=True)
class Operation:
    """A module or operation that ran; see Observer.operation.

    Attributes:
        key: ``module path/name#occurrence``, or a module's path.
        is_module: which of the two.
        inputs: int64 [rows, 2], digests of what each row depends on.
        outputs: likewise of what came out.
    """

    key: str
    is_module: bool
    inputs: Tensor
    outputs: Tensor

    @property
    def path(self) -> str:
        """The module's path."""
        return self.key.partition("/")[0]

    @property
    def is_collective(self) -> bool:
        """Whether all ranks meet in it."""
        name = self.key.rpartition("/")[2].partition("#")[0]
        return not self.is_module and name in COLLECTIVES

    def on_rank(self, rank: int) -> str:
        """Return its key with the rank where sites have it: at the end of the path."""
        path, slash, name = self.key.partition("/")
        return f"{path}@rank{rank}{slash}{name}"


def packed_operations(
    operations: Sequence[Operation],
) -> tuple[tuple[str, ...], tuple[bool, ...], tuple[int, ...], Packed]:
    """Make one message of them: keys, which are modules, rows of inputs and outputs in turn, all digests."""
    digests = [each for one in operations for each in (one.inputs, one.outputs)]
    return (
        tuple(one.key for one in operations),
        tuple(one.is_module for one in operations),
        tuple(each.shape[0] for each in digests),
        pack(torch.cat(digests)),
    )


def unpacked_operations(
    keys: Sequence[str], modules: Sequence[bool], rows: Sequence[int], digests: Packed
) -> list[Operation]:
    """Undo packed_operations."""
    parts = unpack(digests).split(list(rows))
    return [
        Operation(key, is_module, inputs, outputs)
        for key, is_module, inputs, outputs in zip(
            keys, modules, parts[::2], parts[1::2], strict=True
        )
    ]


def joined_operations(told: Sequence[Sequence[Operation]]) -> Iterator[Operation]:
    """Join what each rank told of one step, in the engine's order.

    Raises:
        RecordingError: ranks ran other operations, or a collective gave them different things.
    """
    _check_alike(told)
    groups = list(zip(*told, strict=True))
    meeting = {group[0].path for group in groups if group[0].is_collective}
    around = {path[:end] for path in meeting for end in _ends(path)}
    shared = [
        group
        for group in groups
        if group[0].is_collective or (group[0].is_module and group[0].key in around)
    ]
    bound = dict(zip((id(group) for group in shared), _bound_inputs(shared), strict=True))
    for group in groups:
        inputs = bound.get(id(group))
        if inputs is not None and group[0].is_collective:
            _check_received(group)
            yield Operation(group[0].key, False, inputs, group[0].outputs)
            continue
        for rank, each in enumerate(group):
            own = each.inputs if inputs is None else inputs
            yield Operation(each.on_rank(rank), each.is_module, own, each.outputs)


def _ends(path: str) -> list[int]:
    """Return where the names of the modules around a path, and its own, end."""
    return [place for place, letter in enumerate(path) if letter == "."] + [len(path)]


def _bound_inputs(groups: Sequence[Sequence[Operation]]) -> list[Tensor]:
    """Bind the input digests of all ranks, in their order, into one per row."""
    rows = max((each.inputs.shape[0] for group in groups for each in group), default=1)
    batch = DigestBatch(rows)
    return (
        batch.resolve([[batch.digested(each.inputs) for each in group] for group in groups])
        if groups
        else []
    )


def _check_alike(told: Sequence[Sequence[Operation]]) -> None:
    first = [one.key for one in told[0]]
    for rank, own in enumerate(told):
        keys = [one.key for one in own]
        if keys == first:
            continue
        place = next(
            (
                number
                for number, (mine, its) in enumerate(zip(keys, first, strict=False))
                if mine != its
            ),
            min(len(keys), len(first)),
        )
        ran = [names[place] if place < len(names) else "nothing more" for names in (keys, first)]
        raise RecordingError(
            f"ranks must run the same layers in the same order; rank {rank} ran {ran[0]} where rank 0 ran {ran[1]}"
        )


def _check_received(group: Sequence[Operation]) -> None:
    for rank, each in enumerate(group):
        if not torch.equal(each.outputs, group[0].outputs):
            raise RecordingError(
                f"the result of {each.key} must be the same on all ranks, and rank {rank} has other bits than rank 0: "
                "their collectives do not give every rank the same sum, so no execution could be told from another"
            )
