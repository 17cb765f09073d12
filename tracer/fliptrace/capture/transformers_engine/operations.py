"""Watch every module and every functional operation of a forward, attention included.

Modules alone are not enough: attention is a function between modules, and a tool that hooks only modules blames an
unrepeatable attention on the next projection. A dispatch mode sees each ATen operation that computes; operations that
only move or view data are left out. For each, two row digests are reported: what each row depends on, and what came
out.

Which rows an output row depends on:

* operations that work row by row (linear with a weight, element-wise, norms): the same row of every input, and the
  whole of any input that has no token rows;
* scaled dot product attention: its own query row, and every key and value row up to its own position;
* everything else, with more than one input that is no weight (matrix products of activations): its own row of the
  first input, and the whole of the others.

Equal dependencies with unequal output are therefore evidence against that operation and nothing else. The rule errs to
one side: a row may be called inherited although its difference arose here. A kernel that bypasses PyTorch's dispatcher
is not seen; its effect then shows at the next operation, which the coverage statement says.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fliptrace.capture.engine import Observer
from fliptrace.capture.transformers_engine.shrink_module import Shrink, ShrinkThenRound
from fliptrace.numerics.digest import (
    combine_digests,
    digest_rows,
    digest_tensor,
    mix_words,
    position_terms,
)

_MOVES_DATA = frozenset(
    """cat clone copy_ _to_copy contiguous stack index_select select_scatter slice_scatter fill_ zero_ zeros ones empty
    empty_like zeros_like ones_like full full_like arange scalar_tensor lift_fresh _local_scalar_dense item detach
    new_empty new_zeros new_ones new_full empty_strided eye repeat expand_as unbind is_same_size equal is_nonzero
    repeat_interleave to""".split()
)
_ATTENTION = ("scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")
_PRODUCTS = frozenset("mm bmm addmm baddbmm matmul einsum dot mv addmv convolution linear".split())


class OperationObserver:
    """Reports modules and operations of one model to an observer while open."""

    def __init__(self, model: nn.Module, observer: Observer) -> None:
        """Put hooks on every module; ``close`` takes them off."""
        self.observer = observer
        self._weights = {
            tensor.untyped_storage().data_ptr()
            for tensor in [*model.parameters(), *model.buffers()]
            if tensor.numel()
        }
        self._stack: list[str] = [""]
        self._occurrences: Counter[tuple[str, str]] = Counter()
        self._rows = 1
        self._first_position = 0
        self._quiet = 0
        self._handles: list[Any] = []
        for path, module in model.named_modules():
            inside_shrink = isinstance(module, (Shrink, ShrinkThenRound)) or ".lora_A." in path
            if isinstance(module, Shrink):
                site = path.split(".lora_A.")[0]
                self._handles.append(module.register_forward_pre_hook(self._hush, prepend=True))
                self._handles.append(module.register_forward_hook(self._shrink_hook(site)))
            elif not inside_shrink:
                self._handles.append(
                    module.register_forward_pre_hook(self._enter_hook(path), prepend=True)
                )
                self._handles.append(
                    module.register_forward_hook(
                        self._leave_hook(path), with_kwargs=True, always_call=False
                    )
                )

    def close(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextlib.contextmanager
    def recording(self, rows: int, first_position: int) -> Iterator[None]:
        """Watch one forward over ``rows`` tokens."""
        self._rows, self._first_position = rows, first_position
        self._stack, self._quiet = [""], 0
        self._occurrences.clear()
        with _OperationMode(self):
            yield

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Leave operations that run inside out of the record: they are the recorder's own."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def dispatch(self, function: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Run one ATen operation and report it when it computes."""
        name = function._schema.name.split("::")[-1]
        if self._quiet or name in _MOVES_DATA or _only_views(function):
            return function(*arguments, **keywords)
        inputs = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
        activations = [tensor for tensor in inputs if not self._is_weight(tensor)]
        before = self._depends_on(name, activations) if activations else None
        result = function(*arguments, **keywords)
        outputs = [
            leaf
            for leaf in tree_leaves(result)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]
        if before is not None and outputs:
            path = self._stack[-1]
            occurrence = self._occurrences[path, name]
            self._occurrences[path, name] += 1
            with self.unseen():
                after = self._own_rows(outputs[:1])
                self.observer.operation(f"{path}/{name}#{occurrence}", False, before, after)
        return result

    def _is_weight(self, tensor: Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._weights

    def _depends_on(self, name: str, activations: list[Tensor]) -> Tensor:
        with self.unseen():
            if any(part in name for part in _ATTENTION) and len(activations) >= 3:
                return self._attention_rows(activations)
            if name in _PRODUCTS and len(activations) > 1:
                first = self._own_rows(activations[:1])
                return _bind([first, *(_whole(tensor) for tensor in activations[1:])])
            return self._own_rows(activations)

    def _own_rows(self, tensors: list[Tensor]) -> Tensor:
        """Digest each token row of every tensor together, int64 [rows, 2]; whole tensors where there are no rows."""
        return _bind([self._rows_of(tensor) for tensor in tensors])

    def _rows_of(self, tensor: Tensor) -> Tensor:
        dimension = token_dimension(tuple(tensor.shape), self._rows)
        if dimension is None:
            return _whole(tensor)
        return digest_rows(tensor.movedim(dimension, 0))

    def _attention_rows(self, tensors: list[Tensor]) -> Tensor:
        """Query row i depends on keys and values up to its own position: a running sum of their row digests."""
        query, key, value, *others = tensors
        own = digest_rows(query.movedim(2, 0))
        parts = [own]
        for tensor in (key, value):
            rows = digest_rows(tensor.movedim(2, 0))
            positions = torch.arange(rows.shape[0], device=rows.device)
            running = position_terms(rows, positions).cumsum(0)
            parts.append(mix_words(running[rows.shape[0] - own.shape[0] :]))
        return _bind([*parts, *(self._rows_of(tensor) for tensor in others)])

    def _enter_hook(self, path: str) -> Any:
        def enter(_module: nn.Module, _arguments: Any) -> None:
            self._stack.append(path)

        return enter

    def _leave_hook(self, path: str) -> Any:
        def leave(
            _module: nn.Module, arguments: Any, keywords: dict[str, Any], output: Any
        ) -> None:
            self._stack.pop()
            inputs = [
                leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)
            ]
            outputs = [
                leaf
                for leaf in tree_leaves(output)
                if isinstance(leaf, Tensor) and leaf.is_floating_point()
            ]
            if inputs and outputs and path:
                with self.unseen():
                    self.observer.operation(
                        path, True, self._own_rows(inputs), self._own_rows(outputs[:1])
                    )

        return leave

    def _hush(self, module: nn.Module, arguments: Any) -> None:
        self._quiet += 1

    def _shrink_hook(self, site: str) -> Any:
        def leave(_module: nn.Module, arguments: Any, output: Tensor) -> None:
            self.observer.operation(
                f"{site}/lora_shrink#0",
                False,
                self._own_rows([arguments[0]]),
                self._own_rows([output]),
            )
            self._quiet -= 1

        return leave


class _OperationMode(TorchDispatchMode):
    def __init__(self, owner: OperationObserver) -> None:
        super().__init__()
        self._owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._owner.dispatch(func, args, kwargs or {})


def token_dimension(shape: tuple[int, ...], rows: int) -> int | None:
    """Return the dimension that holds token rows: of [1, heads, T, D], [1, T, N], [heads, T, D] or [T, N]."""
    for dimension in {4: (2, 1), 3: (1, 0), 2: (0,)}.get(len(shape), ()):
        if shape[dimension] == rows:
            return dimension
    return None


def _whole(tensor: Tensor) -> Tensor:
    return digest_tensor(tensor).unsqueeze(0)


def _bind(parts: list[Tensor]) -> Tensor:
    """Bind row digests of several tensors into one per row; a part of one row counts for all rows."""
    if len(parts) == 1:
        return parts[0]
    rows = max(part.shape[0] for part in parts)
    numbers = torch.arange(len(parts), device=parts[0].device)
    terms = [
        position_terms(part, number.expand(part.shape[0]))
        for part, number in zip(parts, numbers, strict=True)
    ]
    total = torch.zeros((rows, 2), dtype=torch.int64, device=parts[0].device)
    for term in terms:
        total = total + (term if term.shape[0] in (1, rows) else combine_digests(term).unsqueeze(0))
    return mix_words(total)


def _only_views(function: Any) -> bool:
    returns = function._schema.returns
    return bool(returns) and all(
        item.alias_info is not None and not item.alias_info.is_write for item in returns
    )


class QuietObserver:
    """Passes an engine's reports on, keeping the observer's own operations out of the record."""

    def __init__(self, observer: Observer, operations: OperationObserver) -> None:
        """Wrap ``observer``."""
        self._observer = observer
        self._operations = operations

    def begin_step(self, step: int, first_position: int, token_ids: Sequence[int]) -> None:
        """See Observer."""
        self._observer.begin_step(step, first_position, token_ids)

    def shrink(self, site: int, operand: Tensor, output: Tensor, launch: str) -> None:
        """See Observer."""
        with self._operations.unseen():
            self._observer.shrink(site, operand, output, launch)

    def projection(self, site: int, output: Tensor) -> None:
        """See Observer."""
        with self._operations.unseen():
            self._observer.projection(site, output)

    def cache_rows(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See Observer."""
        with self._operations.unseen():
            self._observer.cache_rows(layer, keys, values)

    def operation(self, key: str, is_module: bool, inputs: Tensor, outputs: Tensor) -> None:
        """See Observer."""
        self._observer.operation(key, is_module, inputs, outputs)

    def end_step(self, logits: Tensor) -> None:
        """See Observer."""
        self._observer.end_step(logits)
