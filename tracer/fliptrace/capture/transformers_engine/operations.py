"""Watch every module and every functional operation of a forward, attention included.

Modules alone are not enough: attention is a function between modules, and a tool that hooks only modules blames an
unrepeatable attention on the next projection. A dispatch mode sees each ATen operation that computes; operations that
only move or view data are left out. For each, two row digests are reported: what each row depends on, and what came
out.

Which rows an output row depends on:

* operations that work row by row (linear with a weight, element-wise, norms): the same row of every input, and the
  whole of any input that has no token rows;
* scaled dot product attention: its own query row, and every key and value row up to its own position;
* matrix products of activations: its own row of the first input, and the whole of the others;
* sums that take rows from elsewhere (where experts' results are gathered): the whole of every input. Picking rows
  without adding them only moves data.

Equal dependencies with unequal output are therefore evidence against that operation and nothing else. The rule errs to
one side: a row may be called inherited although its difference arose here. A kernel that bypasses PyTorch's dispatcher
is not seen; its effect then shows at the next operation, which the coverage statement says.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fliptrace.capture.digest_batch import DigestBatch, Part
from fliptrace.capture.engine import Observer
from fliptrace.capture.transformers_engine.shrink_module import Shrink
from fliptrace.numerics.digest import digest_rows, mix_words, position_terms

#: A context in which operations are not watched: they are the recorder's own.
unseen = torch._C._DisableTorchDispatch

_MOVES_DATA = frozenset(
    """cat clone copy_ _to_copy contiguous stack index_select select_scatter slice_scatter fill_ zero_ zeros ones empty
    empty_like zeros_like ones_like full full_like arange scalar_tensor lift_fresh _local_scalar_dense item detach
    new_empty new_zeros new_ones new_full empty_strided eye repeat expand_as unbind is_same_size equal is_nonzero
    repeat_interleave to index gather take flip roll""".split()
)
#: Rows of the result come from rows of other numbers, and may be sums of several.
_MIXES_ROWS = frozenset(
    """index_add index_put _index_put_impl scatter scatter_add scatter_reduce index_reduce cumsum cumprod
    logcumsumexp""".split()
)
_ATTENTION = ("scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")
_PRODUCTS = frozenset("mm bmm addmm baddbmm matmul einsum dot mv addmv convolution linear".split())


@dataclass(frozen=True, slots=True)
class _Report:
    """One module or operation that ran: what its rows depend on, and what came out."""

    key: str
    is_module: bool
    inputs: tuple[Part, ...]
    outputs: tuple[Part, ...]


class OperationObserver:
    """Reports modules and operations of one model to an observer while open.

    Tensors are copied when they are seen; digests are computed, and reported in execution order, at the end of the
    forward.
    """

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
        self._batch = DigestBatch(1)
        self._reports: list[_Report] = []
        self._computing: dict[Any, str | None] = {}
        self._handles: list[Any] = []
        self._shrinks: list[Shrink] = []
        for path, module in model.named_modules():
            if isinstance(module, Shrink):
                module.forward = self._watched_shrink(path.split(".lora_A.")[0], module)  # type: ignore[method-assign]
                self._shrinks.append(module)
            elif ".lora_A." not in path:
                self._handles.append(
                    module.register_forward_pre_hook(self._enter_hook(path), prepend=True)
                )
                self._handles.append(
                    module.register_forward_hook(self._leave_hook(path), with_kwargs=True)
                )

    def close(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        for shrink in self._shrinks:
            shrink.__dict__.pop("forward", None)
        self._handles.clear()
        self._shrinks.clear()

    @contextlib.contextmanager
    def recording(self, rows: int) -> Iterator[None]:
        """Watch one forward over ``rows`` tokens."""
        self._rows, self._batch, self._reports = rows, DigestBatch(rows), []
        self._stack = [""]
        self._occurrences.clear()
        with _OperationMode(self):
            yield
        self._report()

    def _report(self) -> None:
        reports, self._reports = self._reports, []
        if not reports:
            return
        digests = self._batch.resolve(
            [parts for report in reports for parts in (report.inputs, report.outputs)]
        )
        self._batch = DigestBatch(self._rows)
        for report, inputs, outputs in zip(reports, digests[::2], digests[1::2], strict=True):
            self.observer.operation(report.key, report.is_module, inputs, outputs)

    def dispatch(self, function: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Run one ATen operation and report it when it computes; the mode is off while this runs."""
        try:
            name = self._computing[function]
        except KeyError:
            name = self._computing[function] = _computing_name(function)
        if name is None:
            return function(*arguments, **keywords)
        activations = [
            tensor
            for tensor in tensors_in((arguments, keywords) if keywords else arguments)
            if not self._is_weight(tensor)
        ]
        before = self._depends_on(name, activations) if activations else ()
        result = function(*arguments, **keywords)
        if before:
            outputs = [tensor for tensor in tensors_in(result) if tensor.is_floating_point()]
            if outputs:
                path = self._stack[-1]
                occurrence = self._occurrences[path, name]
                self._occurrences[path, name] += 1
                self._reports.append(
                    _Report(
                        f"{path}/{name}#{occurrence}", False, before, (self._rows_of(outputs[0]),)
                    )
                )
        return result

    def _is_weight(self, tensor: Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._weights

    def _depends_on(self, name: str, activations: list[Tensor]) -> tuple[Part, ...]:
        if any(part in name for part in _ATTENTION) and len(activations) >= 3:
            return self._attention_rows(activations)
        if name.removesuffix("_") in _MIXES_ROWS:
            return tuple(self._batch.whole(tensor) for tensor in activations)
        if name in _PRODUCTS and len(activations) > 1:
            return self._rows_of(activations[0]), *(
                self._batch.whole(tensor) for tensor in activations[1:]
            )
        return tuple(self._rows_of(tensor) for tensor in activations)

    def _rows_of(self, tensor: Tensor) -> Part:
        """Each token row of a tensor; the whole tensor where it has no rows."""
        dimension = token_dimension(tuple(tensor.shape), self._rows)
        return (
            self._batch.whole(tensor)
            if dimension is None
            else self._batch.token_rows(tensor, dimension)
        )

    def _attention_rows(self, tensors: list[Tensor]) -> tuple[Part, ...]:
        """Query row i depends on keys and values up to its own position: a running sum of their row digests."""
        query, key, value, *others = tensors
        parts = [self._batch.token_rows(query, 2)]
        for tensor in (key, value):
            rows = digest_rows(tensor.movedim(2, 0))
            positions = torch.arange(rows.shape[0], device=rows.device)
            running = position_terms(rows, positions).cumsum(0)
            parts.append(self._batch.digested(mix_words(running[rows.shape[0] - query.shape[2] :])))
        return *parts, *(self._rows_of(tensor) for tensor in others)

    def _enter_hook(self, path: str) -> Any:
        def enter(_module: nn.Module, _arguments: Any) -> None:
            self._stack.append(path)

        return enter

    def _leave_hook(self, path: str) -> Any:
        def leave(
            _module: nn.Module, arguments: Any, keywords: dict[str, Any], output: Any
        ) -> None:
            self._stack.pop()
            inputs = tensors_in((arguments, keywords))
            outputs = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
            if inputs and outputs and path:
                with unseen():
                    before = tuple(self._rows_of(tensor) for tensor in inputs)
                    self._reports.append(_Report(path, True, before, (self._rows_of(outputs[0]),)))

        return leave

    def _watched_shrink(self, site: str, module: Shrink) -> Any:
        """A shrink is one operation, whatever it is made of; what it is made of does not pass the dispatch mode."""
        original = module.forward

        def forward(x: Tensor) -> Tensor:
            with unseen():
                before = (self._rows_of(x),)
                z = original(x)
                self._reports.append(
                    _Report(f"{site}/lora_shrink#0", False, before, (self._rows_of(z),))
                )
            return z

        return forward


class _OperationMode(TorchDispatchMode):
    def __init__(self, owner: OperationObserver) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._owner.dispatch(func, args, kwargs or {})


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors among arguments or results, in order; what is inside objects of other kinds is not looked at."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    found: list[Tensor] = []
    for item in value:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list, dict)):
            found += tensors_in(item)
    return found


def token_dimension(shape: tuple[int, ...], rows: int) -> int | None:
    """Return the dimension that holds token rows: of [1, heads, T, D], [1, T, N], [heads, T, D] or [T, N]."""
    for dimension in {4: (2, 1), 3: (1, 0), 2: (0,)}.get(len(shape), ()):
        if shape[dimension] == rows:
            return dimension
    return None


def _computing_name(function: Any) -> str | None:
    """Return an operation's name when it computes, None when it only views or moves data."""
    name: str = function._schema.name.split("::")[-1]
    returns = function._schema.returns
    only_views = bool(returns) and all(
        item.alias_info is not None and not item.alias_info.is_write for item in returns
    )
    return None if only_views or name in _MOVES_DATA else name


class QuietObserver:
    """Passes an engine's reports on, keeping the observer's own operations out of the record."""

    def __init__(self, observer: Observer) -> None:
        """Wrap ``observer``."""
        self._observer = observer

    def begin_step(self, step: int, first_position: int, token_ids: Sequence[int]) -> None:
        """See Observer."""
        self._observer.begin_step(step, first_position, token_ids)

    def shrink(self, site: int, operand: Tensor, output: Tensor, launch: str) -> None:
        """See Observer."""
        with unseen():
            self._observer.shrink(site, operand, output, launch)

    def projection(self, site: int, output: Tensor) -> None:
        """See Observer."""
        with unseen():
            self._observer.projection(site, output)

    def cache_rows(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See Observer."""
        with unseen():
            self._observer.cache_rows(layer, keys, values)

    def operation(self, key: str, is_module: bool, inputs: Tensor, outputs: Tensor) -> None:
        """See Observer."""
        self._observer.operation(key, is_module, inputs, outputs)

    def end_step(self, logits: Tensor) -> None:
        """See Observer."""
        self._observer.end_step(logits)
