"""The shrinks of a vLLM engine: which there are, and a place between each and the expand that consumes it.

vLLM's LoRA layers hand their work to one object per model, the punica wrapper: ``add_shrink`` fills FP32 buffers and
``add_expand`` rounds and uses them. Eager, both are plain calls, on the CPU and on CUDA (where ``add_shrink`` calls the
operator ``vllm::lora_shrink``). They are shadowed on that one object while a forward runs that somebody watches, or
whose shrinks vLLM does not compute itself; so every shrink can be computed under a chosen reduction, observed and
replaced before expand reads it. A call is told by the addresses of its weights, which vLLM allocates once per layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fliptrace.capture.engine import ConsumptionAudit, Observer, ShrinkInterceptor
from fliptrace.capture.interception import checked_replacement
from fliptrace.capture.vllm_engine.batch import BatchRows
from fliptrace.errors import RecordingError, UnsupportedModelError
from fliptrace.sites import Site
from fliptrace_kernels import ArrivalSchedule, Reduction, launch_configuration, lora_shrink


@dataclass(frozen=True, slots=True)
class Slice:
    """One shrink of a LoRA layer.

    Attributes:
        site: where.
        part: its number among the layer's slices.
        columns: its columns in the layer's output.
    """

    site: Site
    part: int
    columns: slice


@dataclass(frozen=True)
class AdaptedLayer:
    """A LoRA layer that the adapter has weights for.

    Attributes:
        name: module path in vLLM's model.
        module: the layer.
        slices: its shrinks, in the order in which vLLM computes them.
        first: number of the first slice's site.
    """

    name: str
    module: nn.Module
    slices: tuple[Slice, ...]
    first: int = 0

    @property
    def key(self) -> tuple[int, ...]:
        """What tells its calls from those of other layers."""
        return weights_key(self.module.lora_a_stacked)  # type: ignore[arg-type]


def weights_key(stacked: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the addresses of a layer's A matrices."""
    return tuple(weight.data_ptr() for weight in stacked)


@dataclass
class ShrinkRuntime:
    """What all shrinks of an engine share, changed between steps only.

    Attributes:
        reduction: how they sum; None for whatever vLLM itself runs.
        schedule: arrival schedule of simulated atomics, else None.
        step: number of the forward that runs.
        rows: token rows of that forward; 0 while nothing that should be seen runs.
        slot: where the adapter lies in vLLM's stacks.
        rank: the adapter's rank; columns beyond it are padding and zero.
        interceptor: gets every shrink before expand does, else None.
        observer: is told of every shrink, after the interceptor, else None.
        audit: is told of every shrink by its consumer, else None.
        launches: descriptions of launches by everything that shapes them.
        fired: sites that ran in this forward.
        watch: is told of base projections, shrinks and expands, None where operations are not watched.
        batch: where the request's rows lie among those of its neighbours; None for a request alone.
        map_rows: in a batch, checks that these rows have the adapter, and returns its slot.
    """

    reduction: Reduction | None
    rank: int
    slot: int
    schedule: ArrivalSchedule | None = None
    step: int = 0
    rows: int = 0
    interceptor: ShrinkInterceptor | None = None
    observer: Observer | None = None
    audit: ConsumptionAudit | None = None
    launches: dict[Any, str] = field(default_factory=dict)
    fired: list[int] = field(default_factory=list)
    watch: Any = None
    batch: BatchRows | None = None
    map_rows: Callable[[BatchRows], int] | None = None

    @property
    def first(self) -> int:
        """The request's first row among the forward's rows."""
        return 0 if self.batch is None else self.batch.first

    def own(self, rows: Tensor) -> Tensor:
        """Return the request's rows of a tensor whose first dimension holds the forward's rows."""
        first = self.first
        return rows[first : first + self.rows]


def check_fired(runtime: ShrinkRuntime, sites: Sequence[Site]) -> None:
    """Refuse a forward in which a shrink did not run exactly once, in order.

    Raises:
        RecordingError: one did not.
    """
    expected = list(range(len(sites)))
    if runtime.fired != expected and sites:
        odd = next((site for site in expected if runtime.fired.count(site) != 1), expected[0])
        raise RecordingError(
            f"every shrink must run exactly once in a forward, in order; {sites[odd].path} ran "
            f"{runtime.fired.count(odd)} times in step {runtime.step}"
        )


class ShrinkPath:
    """Stands on a punica wrapper in the place of ``add_shrink`` and ``add_expand`` while a forward runs."""

    def __init__(
        self, wrapper: Any, layers: Sequence[AdaptedLayer], runtime: ShrinkRuntime
    ) -> None:
        """Know the layers; ``standing`` puts it in place."""
        self.wrapper = wrapper
        self.runtime = runtime
        self.own_shrink = wrapper.add_shrink
        self.own_expand = wrapper.add_expand
        self.layers: Mapping[tuple[int, ...], AdaptedLayer] = {layer.key: layer for layer in layers}
        self.buffers: dict[int, AdaptedLayer] = {}
        self.site_count = sum(len(layer.slices) for layer in layers)
        self._weights: dict[tuple[int, int], list[Tensor]] = {}

    @property
    def is_needed(self) -> bool:
        """Whether anything computes, watches or replaces shrinks; vLLM's own are left alone else."""
        runtime = self.runtime
        return not (
            runtime.reduction is None
            and runtime.observer is None
            and runtime.interceptor is None
            and runtime.audit is None
        )

    @contextlib.contextmanager
    def standing(self, stand_in: Any = None) -> Iterator[None]:
        """Shadow the two methods on this object while inside; its class stays as it is.

        Args:
            stand_in: whose ``add_shrink`` and ``add_expand`` are called instead; None for this path's own.
        """
        chosen = stand_in or self
        self.wrapper.add_shrink = chosen.add_shrink
        self.wrapper.add_expand = chosen.add_expand
        try:
            yield
        finally:
            self.remove()

    def remove(self) -> None:
        """Uncover the class's methods."""
        for name in ("add_shrink", "add_expand"):
            vars(self.wrapper).pop(name, None)

    def order_in(self, run: Callable[[], object]) -> list[AdaptedLayer]:
        """Return the layers in the order in which a forward runs them.

        Args:
            run: runs it, by vLLM's own shrinks.

        Raises:
            UnsupportedModelError: a layer does not run exactly once.
        """
        layers = list(self.layers.values())
        seen: list[AdaptedLayer] = []
        notes = _Notes(self, seen)
        with self.standing(notes):
            run()
        for layer in layers:
            if seen.count(layer) != 1:
                raise UnsupportedModelError(
                    f"every LoRA layer must run exactly once in a forward; {layer.name} ran {seen.count(layer)} times "
                    "(a layer that is skipped or shared cannot be traced)"
                )
        return seen

    @staticmethod
    def key_of(stacked: Sequence[Tensor]) -> tuple[int, ...]:
        """Return what tells a layer's calls from those of others."""
        return weights_key(stacked)

    def add_shrink(
        self, y: Any, x: Tensor, lora_a_stacked: Any, scale: float, **keywords: Any
    ) -> None:
        """Fill y, per slice FP32 [T, R], from x [T, K]; see vLLM's PunicaWrapperBase.add_shrink."""
        runtime = self.runtime
        layer = self.layers.get(weights_key(lora_a_stacked)) if runtime.rows else None
        if layer is None:
            self.own_shrink(y, x, lora_a_stacked, scale, **keywords)
            return
        rows = runtime.own(x.view(-1, x.shape[-1]))
        if rows.shape[0] != runtime.rows:
            raise RecordingError(
                f"{layer.name} shrinks {rows.shape[0]} rows in a forward over {runtime.rows} tokens"
            )
        self.require_adapter()
        if runtime.reduction is None or runtime.batch is not None:
            self.own_shrink(y, x, lora_a_stacked, scale, **keywords)
        if runtime.reduction is not None:
            self.reduce(layer, y, rows, lora_a_stacked, scale)
        self.buffers = {id(y): layer}
        if runtime.observer is None and runtime.interceptor is None:
            runtime.fired.extend(range(layer.first, layer.first + len(layer.slices)))
            return
        self._show(layer, y, rows, lora_a_stacked)
        if runtime.watch is not None:
            runtime.watch.shrunk(layer, rows, y)

    def add_expand(self, y: Tensor, x: Any, *arguments: Any, **keywords: Any) -> None:
        """Round the shrinks x and add their product with B to y; see vLLM's PunicaWrapperBase.add_expand."""
        audit = self.runtime.audit
        layer = self.buffers.pop(id(x), None)
        if audit is not None and self.runtime.rows and layer is not None:
            with torch.inference_mode(False), torch.no_grad():
                for offset, part in enumerate(layer.slices):
                    z = self.runtime.own(x[part.part])[:, : self.runtime.rank]
                    audit.shrink_consumed(layer.first + offset, z.contiguous())
        watch = self.runtime.watch if layer is not None and self.runtime.rows else None
        report = None if watch is None else watch.expanding(layer, y, x)
        self.own_expand(y, x, *arguments, **keywords)
        if watch is not None:
            watch.expanded(report, y)

    def require_adapter(self) -> None:
        """Refuse a forward that vLLM runs without the adapter, or with another one in the request's rows.

        Raises:
            RecordingError: it does.
        """
        wrapper = self.wrapper
        mapping = getattr(wrapper, "token_mapping_meta", None)
        without = (
            bool(mapping.no_lora_flag_cpu[0])
            if mapping is not None
            else bool(getattr(wrapper, "no_lora", False))
        )
        if without:
            raise RecordingError(
                f"step {self.runtime.step} runs without the adapter (vLLM's mapping of rows names none), so there is "
                "no shrink to record"
            )
        runtime = self.runtime
        if runtime.batch is not None and runtime.map_rows is not None:
            runtime.slot = runtime.map_rows(runtime.batch)

    def reduce(
        self, layer: AdaptedLayer, y: Any, rows: Tensor, stacked: Sequence[Tensor], scale: float
    ) -> None:
        """Sum the request's rows under the chosen reduction; slices that the adapter has no weights for give zeros."""
        runtime = self.runtime
        weights = self._weights.get((layer.first, runtime.slot))
        if weights is None:
            weights = [weight[runtime.slot, 0] for weight in stacked]
            self._weights[layer.first, runtime.slot] = weights
        reduction: Any = runtime.reduction
        if rows.device.type == "cuda":
            first = runtime.first
            out = y if y.shape[1] == runtime.rows else y[:, first : first + runtime.rows]
            lora_shrink(rows, weights, reduction=reduction, scale=scale, out=out)
            return
        for offset, part in enumerate(layer.slices):
            z = lora_shrink(
                rows,
                (weights[part.part][: runtime.rank],),
                reduction=reduction,
                scale=scale,
                schedule=runtime.schedule,
                call_key=runtime.step * self.site_count + layer.first + offset,
            )[0]
            runtime.own(y[part.part])[:, : runtime.rank] = z

    def _show(self, layer: AdaptedLayer, y: Any, rows: Tensor, stacked: Sequence[Tensor]) -> None:
        """Show the shrinks to interceptor and observer, and put in what the interceptor returned."""
        runtime = self.runtime
        # vLLM runs under inference mode, whose tensors have no version counters; observers read them.
        with torch.inference_mode(False), torch.no_grad():
            operand = rows.clone()
            shown = operand.unsqueeze(
                0
            )  # one object, so that an observer sees that all slices read it
        for offset, part in enumerate(layer.slices):
            site = layer.first + offset
            runtime.fired.append(site)
            z = runtime.own(y[part.part])[:, : runtime.rank]
            with torch.inference_mode(False), torch.no_grad():
                lent = z.contiguous()
                given = lent
                if runtime.interceptor is not None:
                    given = checked_replacement(
                        runtime.interceptor(site, operand, lent), site, lent
                    )
            if given is not z:
                z.copy_(given)
            if runtime.observer is not None:
                with torch.inference_mode(False), torch.no_grad():
                    launch = self.launch_of(rows, stacked, part)
                    runtime.observer.shrink(site, shown, given, launch)

    def launch_of(self, rows: Tensor, stacked: Sequence[Tensor], part: Slice) -> str:
        """Describe a launch in one line: what really runs, the operand's strides, and the batch, if there is one."""
        runtime = self.runtime
        batch = None if runtime.batch is None else (runtime.batch.total, runtime.batch.first)
        key = (runtime.reduction, rows.shape, rows.stride(), stacked[0].shape, len(stacked), batch)
        text = runtime.launches.get(key)
        if text is None:
            shape = tuple(stacked[0].shape[2:])
            on_cuda = rows.device.type == "cuda"
            if runtime.reduction is None:
                found = own_launch(rows, stacked, batch[0] if batch else None)
            else:
                shapes = [shape] * len(stacked) if on_cuda else [(runtime.rank, shape[1])]
                found = launch_configuration(
                    tuple(rows.shape), shapes, rows.dtype, rows.device, runtime.reduction
                )
            words = [f"{name}={value}" for name, value in found.items()]
            words.append(f"operand_strides={tuple(rows.stride())}")
            if batch is not None:
                words.append(f"batch_rows={batch[0]} first_row={batch[1]}")
            text = " ".join(words)
            runtime.launches[key] = text
        return text


class _Notes:
    """Stands in to note which layers run."""

    def __init__(self, path: ShrinkPath, seen: list[AdaptedLayer]) -> None:
        self._path, self._seen = path, seen
        self.add_expand = path.own_expand

    def add_shrink(self, y: Any, x: Tensor, stacked: Any, scale: float, **keywords: Any) -> None:
        layer = self._path.layers.get(weights_key(stacked))
        if layer is not None:
            self._seen.append(layer)
        self._path.own_shrink(y, x, stacked, scale, **keywords)


def own_launch(rows: Tensor, stacked: Sequence[Tensor], total: int | None = None) -> dict[str, Any]:
    """Say what vLLM's own shrink, or the plugin in its place, runs for an operand.

    Args:
        rows: the operand [T, K], or its rows of one request.
        stacked: per slice its weights [max_loras, 1, R, K].
        total: rows of the whole operand, where ``rows`` are some of them.
    """
    if rows.device.type != "cuda":
        return {"kernel": "vllm sgmv_shrink", "implementation": "torch einsum"}
    from vllm.lora.ops.triton_ops.utils import get_lora_op_configs

    from fliptrace_kernels.vllm_plugin.installation import installed
    from fliptrace_kernels.vllm_plugin.shrink_operator import Operator

    max_loras, _, rank, size = stacked[0].shape
    count = rows.shape[0] if total is None else total
    plugin = installed(Operator())
    if plugin is not None:
        shapes = [(int(weight.shape[-2]), int(weight.shape[-1])) for weight in stacked]
        return launch_configuration(
            (count, size), shapes, rows.dtype, rows.device, plugin.settings.reduction
        )
    configuration = get_lora_op_configs(
        "shrink",
        max_loras=max_loras,
        batch=count,
        hidden_size=size,
        rank=rank,
        num_slices=len(stacked),
    )
    return {"kernel": "vllm::lora_shrink", "implementation": "vllm", **configuration}
