"""The specification at speed on a CPU: the same additions in the same order, many at a time.

The engine calls a shrink hundreds of times per decoded token with one row, so what counts here is
the number of torch calls, not arithmetic. Products of a whole call are laid out as
[rows, outputs, block_k, blocks]; the tree of halves then folds whole planes, and the blocks of one
round are neighbours. Zero blocks that fill the last round change nothing, because a partial that
started at 0.0 can never be -0.0.

A matrix product would be faster for long prompts, but its order, and so its bits, change with the
number of rows and with the processor.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fliptrace_kernels.arrival import ArrivalSchedule
from fliptrace_kernels.configurations import LOCAL_GROUP
from fliptrace_kernels.reduction import Reduction

_WORKSPACE_ELEMENTS: Final = 1 << 18  # 1 MiB of products stays in a second-level cache
_MAX_WORKSPACES: Final = 32


def shrink(
    x: Tensor,
    a_slices: Sequence[Tensor],
    mapping: Tensor | None,
    reduction: Reduction,
    scale: float,
    schedule: ArrivalSchedule | None,
    call_key: int,
) -> Tensor:
    """Compute `specification.shrink` bit for bit; arguments as there, already checked.

    Args:
        x: inputs, [M, K], contiguous, on the CPU.
        a_slices: per slice [R, K] or [adapters, R, K].
        mapping: adapter of each row, [M], or None.
        reduction: the order of the sum.
        scale: applied where the reduction says.
        schedule: orders of arrival, for `atomic`.
        call_key: names the call to the schedule.

    Returns:
        Outputs, [slices, M, R], FP32, contiguous.
    """
    rank = a_slices[0].shape[-2]
    slices = len(a_slices)
    with torch.no_grad():
        if mapping is None:
            weights = _prepared(a_slices, 0, reduction)
            values = _rows(x, weights, None, slices, reduction, scale, schedule, call_key)
        else:
            values = torch.zeros(x.shape[0], slices * rank, dtype=torch.float32)
            for adapter in sorted(set(mapping.tolist())):
                if adapter >= 0:
                    rows = torch.nonzero(mapping == adapter).view(-1)
                    weights = _prepared(a_slices, adapter, reduction)
                    values[rows] = _rows(
                        x[rows], weights, rows, slices, reduction, scale, schedule, call_key
                    )
        if slices == 1 or x.shape[0] == 1:
            return values.view(slices, x.shape[0], rank)
        return values.view(-1, slices, rank).transpose(0, 1).contiguous()


def _rows(
    x: Tensor,
    weights: Tensor,
    rows: Tensor | None,
    slices: int,
    reduction: Reduction,
    scale: float,
    schedule: ArrivalSchedule | None,
    call_key: int,
) -> Tensor:
    """Compute all outputs of the given rows of one adapter, [rows, slices * R], FP32.

    Args:
        x: inputs of these rows, [rows, K].
        weights: as `_prepared` returns them.
        rows: their row indices in the call, [rows]; None means 0, 1, 2, ...
        slices: number of slices.
        reduction: the order of the sum.
        scale: applied where the reduction says.
        schedule: orders of arrival, for `atomic`.
        call_key: names the call to the schedule.
    """
    count, size = x.shape
    outputs = weights.shape[0]
    chunk = max(1, min(count, _WORKSPACE_ELEMENTS // max(1, weights.numel())))
    ordered = schedule if reduction.needs_arrival_order else None
    if rows is None and count != 1:
        rows = torch.arange(count)
    values: list[Tensor] = []
    for start in range(0, count, chunk):
        stop = min(start + chunk, count)
        workspace = _workspace(stop - start, outputs, size, reduction)
        sums = workspace.partial_sums(x if chunk >= count else x[start:stop], weights)
        if reduction.scale_at == "partial" and scale != 1.0:
            sums.mul_(scale)
        if ordered is not None:
            order = ordered.row_orders(
                call_key,
                None if rows is None else rows[start:stop],
                slices=slices,
                rank=outputs // slices,
                splits=reduction.splits,
            )
            total = _in_order_from_zero(torch.gather(sums, 2, order).unbind(2))
        else:
            total = _total(workspace, reduction)
        if reduction.scale_at == "total" and scale != 1.0:
            total.mul_(scale)
        values.append(total)
    if len(values) == 1:
        return values[0].contiguous()
    return torch.cat(values) if values else torch.zeros(0, outputs, dtype=torch.float32)


def _total(workspace: _Workspace, reduction: Reduction) -> Tensor:
    """Add the partials in `workspace` up in a fixed order, [rows, outputs]; no view of it."""
    if reduction.kind == "tree":
        sums = workspace.sums
        while sums.shape[-1] > 1:
            sums = sums[..., 0::2] + sums[..., 1::2]
        return sums[..., 0]
    if reduction.kind == "local":
        groups = workspace.sums.view(*workspace.sums.shape[:2], -1, LOCAL_GROUP)
        return _in_order(_in_order(groups.unbind(-1)).unbind(-1))
    if reduction.splits == 1:
        return workspace.sums[..., 0].clone(memory_format=torch.contiguous_format)
    return _in_order_from_zero(workspace.columns)


def _in_order(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0] + terms[1]
    for term in terms[2:]:
        total += term
    return total


def _in_order_from_zero(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0] + 0.0
    for term in terms[1:]:
        total += term
    return total


class _Workspace:
    """Buffers and ready-made views for one shape of call; owned by one thread."""

    __slots__ = (
        "_accumulate",
        "_folds",
        "_products",
        "_x",
        "_x_full",
        "_x_tail",
        "columns",
        "sums",
    )

    def __init__(self, rows: int, outputs: int, size: int, block_k: int, splits: int) -> None:
        blocks = -(-size // block_k)
        rounds = max(1, -(-blocks // splits))
        full = size // block_k
        tail = size - full * block_k
        self._x = torch.zeros(rows, 1, block_k, rounds * splits)
        self._x_full = self._x[:, 0, :, :full].transpose(1, 2)  # [rows, full, block_k]
        self._x_tail = self._x[:, 0, :tail, full] if tail else None
        self._products = torch.zeros(rows, outputs, block_k, rounds * splits)
        self._folds: list[tuple[Tensor, Tensor]] = []
        half = block_k // 2
        while half:
            lower, upper = self._products[:, :, :half], self._products[:, :, half : 2 * half]
            self._folds.append((lower, upper))
            half //= 2
        by_round = self._products[:, :, 0].view(rows, outputs, rounds, splits).unbind(2)
        self.sums: Tensor = by_round[0]  # [rows, outputs, S]
        self._accumulate = by_round[1:]
        self.columns = self.sums.unbind(2)

    def partial_sums(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return unscaled partials, [rows, outputs, S], a view that the next call overwrites."""
        if self._x_tail is None:
            self._x_full.copy_(x.view(self._x_full.shape))
        else:
            covered = self._x_full.shape[1] * self._x_full.shape[2]
            self._x_full.copy_(x[:, :covered].view(self._x_full.shape))
            self._x_tail.copy_(x[:, covered:])
        torch.mul(self._x, weights, out=self._products)
        for lower, upper in self._folds:
            lower.add_(upper)
        self.sums.add_(0.0)
        for block in self._accumulate:
            self.sums.add_(block)
        return self.sums


class _ThreadWorkspaces(threading.local):
    def __init__(self) -> None:
        self.by_shape: dict[tuple[int, int, int, int, int], _Workspace] = {}


_workspaces = _ThreadWorkspaces()


def _workspace(rows: int, outputs: int, size: int, reduction: Reduction) -> _Workspace:
    key = (rows, outputs, size, reduction.block_k, reduction.splits)
    by_shape = _workspaces.by_shape
    found = by_shape.get(key)
    if found is None:
        if len(by_shape) >= _MAX_WORKSPACES:
            del by_shape[next(iter(by_shape))]
        # A buffer made in inference mode could not be written to outside it.
        with torch.inference_mode(False), torch.no_grad():
            found = by_shape[key] = _Workspace(*key)
    return found


_PreparedKey = tuple[tuple[int, ...], int, int, int]


class _Prepared:
    """FP32 weights in the order of the sum, and what they were made from."""

    __slots__ = ("snapshots", "sources", "weights")

    def __init__(
        self, sources: list[weakref.ref[Tensor]], snapshots: list[Tensor], weights: Tensor
    ) -> None:
        self.sources = sources
        self.snapshots = snapshots
        self.weights = weights


_prepared_by_source: dict[_PreparedKey, _Prepared] = {}


def _prepared(a_slices: Sequence[Tensor], adapter: int, reduction: Reduction) -> Tensor:
    """Return the weights of all slices of one adapter, [slices * R, block_k, blocks], FP32.

    They are kept as long as the weight tensors live. Version counters miss writes through
    `.data` or numpy, so the bits themselves are compared with a copy on every call.
    """
    key = (tuple(map(id, a_slices)), adapter, reduction.block_k, reduction.splits)
    found = _prepared_by_source.get(key)
    if found is not None and all(
        source() is a and torch.equal(snapshot, _bits(a))
        for source, snapshot, a in zip(found.sources, found.snapshots, a_slices, strict=True)
    ):
        return found.weights
    with torch.inference_mode(False), torch.no_grad():
        snapshots = [_bits(a).clone() for a in a_slices]
        weights = torch.cat([_dealt(a[adapter] if a.ndim == 3 else a, reduction) for a in a_slices])

    def forget(_: object) -> None:
        _prepared_by_source.pop(key, None)

    sources = [weakref.ref(a, forget) for a in a_slices]
    _prepared_by_source[key] = _Prepared(sources, snapshots, weights)
    return weights


def _bits(a: Tensor) -> Tensor:
    return a.detach().view(torch.int16 if a.element_size() == 2 else torch.int32)


def _dealt(a: Tensor, reduction: Reduction) -> Tensor:
    """Lay one slice out as [R, block_k, blocks]; blocks are padded to whole rounds of splits."""
    size = a.shape[1]
    step = reduction.block_k * reduction.splits
    padded = max(1, -(-size // step)) * step
    a = torch.nn.functional.pad(a.float(), (0, padded - size))
    return a.view(a.shape[0], -1, reduction.block_k).transpose(1, 2).contiguous()
