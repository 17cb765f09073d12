"""The reductions written out in plain torch: what every other implementation is judged against.

Order (all accumulation in FP32, every operation rounded on its own, nothing contracted):

1. K is cut into blocks of `block_k`; the last block is filled with zeros.
2. Inside a block the products x[m, k] * a[r, k] are added as a tree of halves: element i to
   element i + block_k / 2, then the same with half as many, until one is left. BF16 and FP16
   products are exact in FP32 unless they leave its range.
3. Blocks are dealt to splits round-robin: split p takes blocks p, p + S, p + 2S, ... and adds
   them one after another to a partial that starts at 0.0.
4. Partials are scaled here if the reduction scales at the partial.
5. Partials are added up. One split is not added to anything: the partial is the total. Else
   - `deterministic`: one after another, in increasing split order, to a total that starts at 0.0;
   - `atomic`: as `deterministic`, but in the order of arrival, which is an argument here;
   - `tree`: neighbours are added (0 and 1, 2 and 3, ...), then neighbouring sums, until one is
     left; with 8 splits ((p0 + p1) + (p2 + p3)) + ((p4 + p5) + (p6 + p7));
   - `local`: partials 0 to 3, 4 to 7, ... form groups; inside a group they are added in increasing
     order, starting from its first; then the group sums in increasing order, starting from the
     first; with 8 splits (((p0 + p1) + p2) + p3) + (((p4 + p5) + p6) + p7).
6. The total is scaled here if the reduction scales at the total.

Every step is an elementwise IEEE operation, so a row's bits do not depend on the number of rows,
its neighbours, the thread count or the vector width of the processor. Matrix instructions add
inside a block in an order of their own: a kernel is judged against this file within a bound, and
against its own partials bit by bit from step 4 on.

These loops are for reading and for tests; `vectorised` does the same at speed, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fliptrace_kernels.configurations import LOCAL_GROUP
from fliptrace_kernels.errors import ReductionError, ShrinkInputError
from fliptrace_kernels.reduction import Reduction, as_reduction


def block_sums(x: Tensor, a: Tensor) -> Tensor:
    """Sum the products of one K block, steps 1 and 2.

    Args:
        x: block of inputs, [M, block_k], FP32.
        a: block of weights, [R, block_k], FP32.

    Returns:
        Sums, [M, R], FP32.
    """
    terms = x[:, None, :] * a[None, :, :]  # [M, R, block_k]
    while terms.shape[-1] > 1:
        half = terms.shape[-1] // 2
        terms = terms[..., :half] + terms[..., half:]
    return terms[..., 0]


def partials(x: Tensor, a: Tensor, reduction: Reduction | str, scale: float = 1.0) -> Tensor:
    """Compute the partial sums of one shrink, steps 1 to 4.

    Args:
        x: inputs, [M, K], BF16, FP16 or FP32.
        a: weights of one slice and one adapter, [R, K], same dtype as x.
        reduction: a `Reduction` or its name.
        scale: applied here only if the reduction scales at the partial.

    Returns:
        Partials, [S, M, R], FP32. Splits without a block are 0.0.

    Raises:
        ShrinkInputError: if the shapes or dtypes do not fit.
    """
    if x.ndim != 2 or a.ndim != 2 or x.shape[1] != a.shape[1] or x.dtype != a.dtype:
        raise ShrinkInputError(
            "partials needs x [M, K] and a [R, K] of one dtype; "
            f"got x {list(x.shape)} {x.dtype} and a {list(a.shape)} {a.dtype}"
        )
    reduction = as_reduction(reduction).for_rows(x.shape[0])
    block_k, splits = reduction.block_k, reduction.splits
    rows, size = x.shape
    blocks = -(-size // block_k)
    padding = (0, blocks * block_k - size)
    x = torch.nn.functional.pad(x.detach().float(), padding)
    a = torch.nn.functional.pad(a.detach().float(), padding)
    result = torch.zeros(splits, rows, a.shape[0], dtype=torch.float32, device=x.device)
    for split in range(splits):
        partial = result[split]
        for block in range(split, blocks, splits):
            inside = slice(block * block_k, (block + 1) * block_k)
            partial = partial + block_sums(x[:, inside], a[:, inside])
        if reduction.scale_at == "partial":
            partial = partial * scale
        result[split] = partial
    return result


def combine(
    partial_sums: Tensor,
    reduction: Reduction | str,
    scale: float = 1.0,
    order: Tensor | None = None,
) -> Tensor:
    """Add partials up, steps 5 and 6.

    Args:
        partial_sums: [S, M, R], FP32, as `partials` returns them.
        reduction: a `Reduction` or its name.
        scale: applied here only if the reduction scales at the total.
        order: for `atomic` with more than one split: order of arrival, [M, R, S], int64; entry i
            is the split that arrives i-th at that output.

    Returns:
        Outputs, [M, R], FP32.

    Raises:
        ReductionError: if an order is missing, or given to a reduction whose order is fixed.
    """
    reduction = as_reduction(reduction).for_rows(partial_sums.shape[1])
    if reduction.needs_arrival_order != (order is not None):
        raise ReductionError(
            f"{reduction} needs an order of arrival; got none"
            if order is None
            else f"{reduction} adds in an order of its own; got another"
        )
    if order is not None:
        partial_sums = torch.gather(partial_sums, 0, order.permute(2, 0, 1))
    terms = list(partial_sums)
    if reduction.kind == "tree":
        total = _add_neighbours(terms)
    elif reduction.kind == "local":
        starts = range(0, reduction.splits, LOCAL_GROUP)
        total = _add_in_order([_add_in_order(terms[i : i + LOCAL_GROUP]) for i in starts])
    elif reduction.splits == 1:
        total = terms[0]
    else:
        total = _add_in_order([torch.zeros_like(terms[0]), *terms])
    return total * scale if reduction.scale_at == "total" else total


def _add_in_order(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _add_neighbours(terms: Sequence[Tensor]) -> Tensor:
    while len(terms) > 1:
        terms = [terms[i] + terms[i + 1] for i in range(0, len(terms), 2)]
    return terms[0]


def shrink(
    x: Tensor,
    a_slices: Sequence[Tensor],
    mapping: Tensor | None,
    reduction: Reduction | str,
    scale: float = 1.0,
    orders: Tensor | None = None,
) -> Tensor:
    """Compute a whole shrink by the plain loops.

    Args:
        x: inputs, [M, K].
        a_slices: per slice [R, K] or [adapters, R, K].
        mapping: adapter of each row, [M], int32, -1 for none; None means adapter 0 for all rows.
        reduction: a `Reduction` or its name.
        scale: applied where the reduction says.
        orders: orders of arrival for `atomic`, [slices, M, R, S], int64.

    Returns:
        Outputs, [slices, M, R], FP32; rows without an adapter are 0.0.
    """
    if mapping is None:
        mapping = torch.zeros(x.shape[0], dtype=torch.int32, device=x.device)
    results = []
    for index, a in enumerate(a_slices):
        stacked = a if a.ndim == 3 else a[None]
        result = torch.zeros(x.shape[0], stacked.shape[1], dtype=torch.float32, device=x.device)
        for adapter in range(stacked.shape[0]):
            sums = partials(x, stacked[adapter], reduction, scale)
            value = combine(sums, reduction, scale, None if orders is None else orders[index])
            rows = mapping == adapter
            result = torch.where(rows[:, None], value, result)
        results.append(result)
    return torch.stack(results)
