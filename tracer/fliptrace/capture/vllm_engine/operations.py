"""Watch the operations between the shrinks of a vLLM model: attention, base projections, expand, norms, logits.

vLLM's kernels do not pass PyTorch's dispatcher as operations that could be told apart, so what is watched is the call
of each module that calls no other, and the parts of a LoRA layer one by one: the base projection, each shrink, expand.
For each, two row digests are reported: what each row depends on, taken before the call, and what came out. Many of
these kernels write in place (fused norms, rotary embedding), so inputs are copied before they run. What a norm gives is
two tensors, the normed rows and the residual stream; both count.

* A module gets rows: each of its rows depends on the same row of every input, and on the whole of any input without
  token rows.
* Attention: its own query row, and every key and value row up to its own position. Of cached rows the digests are kept
  from step to step, and read from the cache where somebody else wrote it.
* A collective of ranks (all-reduce, all-gather): what this rank gives; whoever knows all ranks adds the others'. A
  module that calls one and no other module is two operations: up to the collective, and from there on.

Arithmetic outside modules (a model that scales its residual stream by itself) is not watched: its effect shows as an
input that differs although no operation before it gave another result, which is called unlocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fliptrace.capture.digest_batch import DigestBatch, Part
from fliptrace.capture.engine import Observer
from fliptrace.capture.vllm_engine.cache import PagedLayer, read_rows
from fliptrace.capture.vllm_engine.collectives import CollectiveHooks
from fliptrace.capture.vllm_engine.shrinks import AdaptedLayer, ShrinkRuntime
from fliptrace.numerics.digest import digest_rows, mix_words, position_terms


@dataclass(slots=True)
class _Report:
    """One module or operation that ran."""

    key: str
    is_module: bool
    inputs: tuple[Part, ...]
    outputs: tuple[Part, ...] = ()


@dataclass(slots=True)
class _Call:
    """A module that was entered and not left yet.

    Attributes:
        path: by which it was called.
        module: its report as a module.
        operation: its report as an operation, for as long as nothing inside it has one.
    """

    path: str
    module: _Report
    operation: _Report
    is_operation: bool = True


class OperationWatch:
    """Reports modules and operations of one vLLM model to an observer while open."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[AdaptedLayer],
        paged: Sequence[PagedLayer],
        runtime: ShrinkRuntime,
        observer: Observer,
        position: Callable[[], tuple[int, dict[int, Tensor]]],
        *,
        ranks: int = 1,
    ) -> None:
        """Put hooks on every module; ``close`` takes them off.

        Args:
            model: vLLM's.
            layers: the LoRA layers whose parts are watched one by one.
            paged: the attention layers that own a cache.
            runtime: says which forwards count.
            observer: is told at the end of each.
            position: returns how many tokens were cached before the forward that runs, and the block tables.
            ranks: of the tensor-parallel group; the collectives of several are watched, too.
        """
        self.observer = observer
        self.runtime = runtime
        self.position = position
        self._rows = 0
        self._batch = DigestBatch(1)
        self._reports: list[_Report] = []
        self._occurrences: Counter[str] = Counter()
        self._calls: list[_Call] = []
        self._base: dict[int, _Report] = {}
        # Layer name -> how many positions, and the sum of their terms for keys and values.
        self._cached: dict[str, tuple[int, Tensor]] = {}
        self._handles: list[Any] = []
        self._hook(model, paged)
        self._collectives = CollectiveHooks(self) if ranks > 1 else None

    def _hook(self, model: nn.Module, paged: Sequence[PagedLayer]) -> None:
        from vllm.lora.layers import BaseLayerWithLoRA

        attention = {id(layer.module): layer for layer in paged}
        names: dict[int, list[str]] = {}
        modules: dict[int, nn.Module] = {}
        whole: list[str] = []
        for path, module in model.named_modules(remove_duplicate=False):
            if not path or any(path.startswith(f"{outer}.") for outer in whole):
                continue
            if id(module) in attention or isinstance(module, BaseLayerWithLoRA):
                whole.append(path)
            names.setdefault(id(module), []).append(path)
            modules[id(module)] = module
        for number, module in modules.items():
            before, after = self._hooks_of(names[number], attention.get(number))
            self._handles += [
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after),
            ]

    def close(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._collectives is not None:
            self._collectives.remove()

    def begin(self, rows: int) -> None:
        """A forward over ``rows`` tokens is about to run."""
        self._rows, self._batch, self._reports = rows, DigestBatch(rows), []
        self._calls, self._base = [], {}
        self._occurrences.clear()

    def forget_cache(self) -> None:
        """Somebody else wrote the cache: its rows are digested anew when attention reads them next."""
        self._cached.clear()

    def finish(self) -> None:
        """Digest everything and tell the observer, in execution order."""
        reports, self._reports = [one for one in self._reports if one.inputs and one.outputs], []
        if not reports:
            return
        digests = self._batch.resolve(
            [parts for report in reports for parts in (report.inputs, report.outputs)]
        )
        self._batch = DigestBatch(self._rows)
        for report, inputs, outputs in zip(reports, digests[::2], digests[1::2], strict=True):
            self.observer.operation(report.key, report.is_module, inputs, outputs)

    # Modules --------------------------------------------------------------------------------------

    def _hooks_of(self, paths: list[str], layer: PagedLayer | None) -> tuple[Any, Any]:
        def before(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
            if not self.runtime.rows:
                return
            path = paths[0] if len(paths) == 1 else self._called(paths)
            tensors = _tensors_in((arguments, keywords))
            if layer is not None and len(tensors) >= 3:
                inputs = self._attention_rows(layer, tensors)
            else:
                inputs = tuple(self._rows_of(tensor) for tensor in tensors)
            name = "attention" if layer is not None else type(module).__name__
            whole = _Report(path, True, inputs)
            operation = self._report(path, name, inputs)
            self._reports.append(whole)
            self._calls.append(_Call(path, whole, operation))

        def after(_module: nn.Module, _arguments: Any, output: Any) -> None:
            if not self.runtime.rows or not self._calls:
                return
            call = self._calls.pop()
            given = [tensor for tensor in _tensors_in(output) if tensor.is_floating_point()]
            call.module.outputs = tuple(self._rows_of(tensor) for tensor in given)
            if call.is_operation:
                call.operation.outputs = call.module.outputs

        return before, after

    def _called(self, paths: list[str]) -> str:
        """Return the path by which a shared module, such as one rotary embedding for all layers, is called now."""
        inside = f"{self._calls[-1].path}." if self._calls else ""
        return next((path for path in paths if path.startswith(inside)), paths[0])

    def _report(self, path: str, name: str, inputs: tuple[Part, ...]) -> _Report:
        """Add an operation; the module that it runs in is none itself."""
        if self._calls:
            self._calls[-1].is_operation = False
        label = f"{path}/{name}"
        report = _Report(f"{label}#{self._occurrences[label]}", False, inputs)
        self._occurrences[label] += 1
        self._reports.append(report)
        return report

    # Where ranks meet -----------------------------------------------------------------------------

    @property
    def is_watching(self) -> bool:
        """Whether a forward runs that counts; see MeetingObserver."""
        return self.runtime.rows > 0

    def meeting(self, name: str, given: Tensor) -> tuple[_Report, _Call | None]:
        """A collective is about to run; see MeetingObserver."""
        part = self._rows_of(given)
        call = self._calls[-1] if self._calls else None
        cut = call if call is not None and call.is_operation else None
        if cut is not None:
            cut.operation.outputs = (part,)
        return self._report("" if call is None else call.path, name, (part,)), cut

    def met(self, meeting: tuple[_Report, _Call | None], received: Tensor) -> None:
        """A collective has run; what its module does from here on is the module's operation."""
        report, cut = meeting
        part = self._rows_of(received)
        report.outputs = (part,)
        if cut is not None:
            name = report.key.rpartition("/")[2].partition("#")[0]
            cut.operation = self._report(cut.path, f"after_{name}", (*cut.module.inputs, part))
            cut.is_operation = True

    def _rows_of(self, tensor: Tensor) -> Part:
        """Each token row of a tensor that is the request's; the whole tensor where it has no rows."""
        batch = self.runtime.batch
        if tensor.dim() and tensor.shape[0] == (self._rows if batch is None else batch.total):
            return self._batch.token_rows(self.runtime.own(tensor), 0)
        if batch is not None and tensor.dim() and tensor.shape[0] == batch.requests:
            tensor = tensor[batch.place : batch.place + 1]  # logits have a row per request
        return self._batch.whole(tensor)

    def _attention_rows(self, layer: PagedLayer, tensors: Sequence[Tensor]) -> tuple[Part, ...]:
        query, key, value = tensors[:3]
        cached, tables = self.position()
        length, sums = self._cached.get(layer.name, (-1, None))
        if length != cached:
            first = layer.first_kept(cached)
            held = read_rows(layer, tables[layer.group], first, cached)
            sums = torch.stack([_terms(rows, first).sum(0) for rows in held.flatten(2)])
        parts, ends = [self._rows_of(query)], []
        for before, rows in zip(sums, (key, value), strict=True):  # type: ignore[arg-type]
            running = before + _terms(self.runtime.own(rows).flatten(1), cached).cumsum(0)
            ends.append(running[-1])
            parts.append(self._batch.digested(mix_words(running)))
        self._cached[layer.name] = (cached + self._rows, torch.stack(ends))
        return *parts, *(self._rows_of(tensor) for tensor in tensors[3:])

    # Parts of LoRA layers -------------------------------------------------------------------------

    def shrunk(self, layer: AdaptedLayer, rows: Tensor, y: Any) -> None:
        """The shrinks of a layer are ready: operand [T, K], per slice [T, R]."""
        given = (self._batch.token_rows(rows, 0),)
        # The base projection ran before; what it gave is seen when expand is entered.
        self._base[layer.first] = self._report(layer.name, "base_projection", given)
        for part in layer.slices:
            report = self._report(part.site.path, "lora_shrink", given)
            report.outputs = (self._shrink(y, part.part),)

    def expanding(self, layer: AdaptedLayer, y: Tensor, x: Any) -> _Report:
        """Expand is about to add to the base projection's output y."""
        base = self._own_rows(y)
        self._base.pop(layer.first).outputs = (base,)
        shrinks = [self._shrink(x, part.part) for part in layer.slices]
        return self._report(layer.name, "lora_expand", (base, *shrinks))

    def expanded(self, report: _Report, y: Tensor) -> None:
        """Expand has added."""
        report.outputs = (self._own_rows(y),)

    def _own_rows(self, y: Tensor) -> Part:
        return self._batch.token_rows(self.runtime.own(y.view(-1, y.shape[-1])), 0)

    def _shrink(self, y: Any, part: int) -> Part:
        return self._batch.token_rows(self.runtime.own(y[part])[:, : self.runtime.rank], 0)


def _terms(rows: Tensor, first: int) -> Tensor:
    """Bind rows [T, W] to their absolute positions: int64 [T, 2]."""
    positions = torch.arange(first, first + rows.shape[0], device=rows.device)
    return position_terms(digest_rows(rows), positions)


def _tensors_in(value: Any) -> list[Tensor]:
    """List the tensors among arguments or results, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, (tuple, list)):
        return []
    return [tensor for item in value for tensor in _tensors_in(item)]
