"""Says whose the rows are that an engine's forwards record on the device, and brings them to the host.

The engine's core and its scheduler run in Python for every forward, replayed or not; the recorder stands beside the
runner and the scheduler. One asynchronous copy per forward brings its rows into pinned memory, on the stream of the
forward, so that nothing is overwritten before it was copied. What was written is told by the rows themselves: a row
whose header or whose layers carry another number than expected is missing, never equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fliptrace.capture.vllm_engine.adapted import adapted_layers
from fliptrace.capture.vllm_engine.hosting import Host
from fliptrace.capture.vllm_engine.live.comparison import LiveComparison
from fliptrace.capture.vllm_engine.live.executions import Execution, RecordedLayer, Recording
from fliptrace.capture.vllm_engine.live.layout import low_halves, row_numbers
from fliptrace.capture.vllm_engine.live.reproducer import export_root
from fliptrace.capture.vllm_engine.live.ring import Ring
from fliptrace.capture.vllm_engine.live.writing import ShrinkWriter
from fliptrace.capture.vllm_engine.shrinks import AdaptedLayer, weights_key
from fliptrace.errors import InputError, RecordingError, UnsupportedModelError
from fliptrace.numerics import digest_rows

_OTHERS = (
    "Recorded are LoRA shrinks and digests of their operands. Attention, base projections, expand, norms and logits "
    "are not, nor is a LoRA of lm_head: a difference that enters there is reported as unlocated."
)


@dataclass(frozen=True)
class _Span:
    request: str
    offset: int
    count: int
    position: int


@dataclass(frozen=True)
class _Forward:
    """One forward: where its rows lie, and whose they are."""

    number: int
    base: int
    rows: int
    spans: tuple[_Span, ...]
    event: Any


@dataclass
class _Request:
    number: int
    prompt_ids: tuple[int, ...]
    adapter: str
    cached: int
    tokens: list[int] = field(default_factory=list)
    pieces: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    void: list[str] = field(default_factory=list)


class LiveRecorder:
    """Says whose the recorded rows are and brings them to the host."""

    def __init__(self, host: Host, writer: ShrinkWriter) -> None:
        """Look the engine over.

        Raises:
            InputError: the writer learned another LLM's layers.
            UnsupportedModelError: an engine that cannot be watched.
            RecordingError: unfinished requests.
        """
        self.host = host
        self.writer = writer
        self._check()
        self._manager = host.runner.lora_manager._adapter_manager
        self._check_keys()
        self._requests: dict[str, _Request] = {}
        self._pending: list[_Forward] = []
        self._waiting = 0
        self._forwards = 0
        self._without_adapter = 0
        self._too_large = 0
        self._next_row: int | None = None
        self._mirror: Tensor | None = None
        self._adapters: set[int] = set()
        self._unseen: dict[str, None] = {}

    def _check(self) -> None:
        config = self.host.config
        lora = config.lora_config
        troubles = []
        if lora is None:
            raise UnsupportedModelError(
                "the LLM has no LoRA (enable_lora=True), so there is no shrink to watch"
            )
        if config.parallel_config.world_size != 1:
            troubles.append(
                f"one worker can be watched, and it has {config.parallel_config.world_size}"
            )
        if config.speculative_config is not None:
            troubles.append(
                "speculative decoding must be off (a forward computes tokens that are dropped)"
            )
        import vllm.envs as variables

        if getattr(variables, "VLLM_LORA_ENABLE_DUAL_STREAM", False):
            troubles.append("VLLM_LORA_ENABLE_DUAL_STREAM must be off")
        if troubles:
            raise UnsupportedModelError(f"this engine cannot be watched: {'; '.join(troubles)}")
        if self.host.scheduler.has_unfinished_requests():
            raise RecordingError(
                f"the vLLM engine has {self.host.scheduler.get_num_unfinished_requests()} unfinished requests; let "
                "them end first"
            )

    def _check_keys(self) -> None:
        known = {weights_key(module.lora_a_stacked) for _, module in self._modules()}
        if not set(self.writer.keys) <= known:
            raise InputError(
                "fliptrace.prepare_watch() was called for another LLM of this process; it records the first that is "
                "made after it. Call it again and make this LLM anew"
            )

    @property
    def ring(self) -> Ring:
        """The buffers on the device.

        Raises:
            RecordingError: no LoRA layer has run yet.
        """
        if self.writer.ring is None:
            raise RecordingError("no LoRA layer has run yet, so nothing is recorded")
        return self.writer.ring

    def begin(self) -> None:
        """Stand beside the runner and the scheduler."""
        self._learn()
        self.writer.is_watched = True
        self.writer.fill_tables()
        self._next_row = int(self.ring.counter.item())
        runner, scheduler = self.host.runner, self.host.scheduler
        own_execute, own_update = runner.execute_model, scheduler.update_from_output

        def execute_model(scheduled: Any, *arguments: Any, **keywords: Any) -> Any:
            result = own_execute(scheduled, *arguments, **keywords)
            if not keywords.get("dummy_run"):
                self._forward_ran(scheduled)
            return result

        def update_from_output(scheduled: Any, output: Any) -> Any:
            self._sampled(output)
            return own_update(scheduled, output)

        runner.execute_model = execute_model
        scheduler.update_from_output = update_from_output

    def _learn(self) -> None:
        """Let each LoRA layer run, where vLLM's warm-up has not: on the CPU it runs without adapters."""
        runner = self.host.runner
        for _ in range(2):
            if self.writer.ring is None and not self.host.is_v2:
                runner._dummy_run(1, num_active_loras=1)
        if self.writer.ring is None:
            raise RecordingError(
                "vLLM's warm-up has run no LoRA layer, so the layers are not known; let one request with an adapter "
                "end before watch(llm)"
            )

    def end(self) -> None:
        """Leave the engine as it was, and bring everything to the host."""
        vars(self.host.runner).pop("execute_model", None)
        vars(self.host.scheduler).pop("update_from_output", None)
        self.writer.is_watched = False
        self._settle()

    def _forward_ran(self, scheduled: Any) -> None:
        if not scheduled.total_num_scheduled_tokens:
            return
        starts = self._book(scheduled)
        ring = self.ring
        number, self._forwards = self._forwards, self._forwards + 1
        ids, padded = self._batch(scheduled)
        if self._is_without_adapter():
            # A graph without LoRA does not advance the counter, one that is not specialised does.
            self._without_adapter += 1
            self._next_row = int(ring.counter.item()) if padded is None else None
            return
        base, rows = self._place(ring, padded)
        spans, offset = [], 0
        for name in ids:
            count = int(scheduled.num_scheduled_tokens[name])
            spans.append(_Span(name, offset, count, starts.get(name, 0)))
            offset += count
        if rows > ring.capacity or offset > rows:
            self._too_large += 1
            return
        if self._waiting + rows > ring.capacity:
            self._settle()
        self._copy(ring, base, rows)
        event = None
        if ring.on_cuda:
            event = torch.cuda.Event()
            event.record()
        self._pending.append(_Forward(number, base, rows, tuple(spans), event))
        self._waiting += rows

    def _place(self, ring: Ring, padded: int | None) -> tuple[int, int]:
        """Return the number of the forward's first row, and how many rows it has with padding.

        Where the runner tells the rows nothing waits for the device. Else the device's counter is read.
        """
        if padded is not None and self._next_row is not None:
            base, rows = self._next_row, padded
        else:
            after = int(ring.counter.item())
            base = after - (padded or 0) if self._next_row is None else self._next_row
            rows = after - base
        self._next_row = base + rows
        return base, rows

    def _book(self, scheduled: Any) -> dict[str, int]:
        """Note new requests; return where each request's rows of this forward begin."""
        starts = {}
        for new in scheduled.scheduled_new_reqs:
            starts[new.req_id] = int(new.num_computed_tokens)
            if new.req_id in self._requests:
                self._requests[new.req_id].void.append("vLLM preempted and recomputed it")
                continue
            lora = new.lora_request
            adapter = "" if lora is None else str(lora.lora_name)
            if lora is not None:
                self._adapters.add(int(lora.lora_int_id))
            prompt = tuple(new.prompt_token_ids or ())
            self._requests[new.req_id] = _Request(
                len(self._requests), prompt, adapter, int(new.num_computed_tokens)
            )
        cached = scheduled.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, map(int, cached.num_computed_tokens), strict=True))
        for name in getattr(cached, "resumed_req_ids", None) or ():
            if name in self._requests:
                self._requests[name].void.append("vLLM preempted and recomputed it")
        return starts

    def _batch(self, scheduled: Any) -> tuple[list[str], int | None]:
        """Return the requests in the order of their rows, and the rows with padding where the runner says so."""
        runner = self.host.runner
        state = getattr(runner, "execute_model_state", None)
        batch = getattr(state, "input_batch", None)
        if batch is not None:
            padded = getattr(batch, "num_tokens_after_padding", None)
            return list(batch.req_ids), None if padded is None else int(padded)
        names = [name for name in runner.input_batch.req_ids if name is not None]
        return [name for name in names if scheduled.num_scheduled_tokens.get(name)], None

    def _is_without_adapter(self) -> bool:
        """Whether vLLM found no row with an adapter in this forward."""
        for wrapper in self._manager.punica_wrapper_mapping.values():
            mapping = getattr(wrapper, "token_mapping_meta", None)
            if mapping is not None:
                if not bool(mapping.no_lora_flag_cpu[0]):
                    return False
            elif not bool(getattr(wrapper, "no_lora", False)):
                return False
        return True

    def _copy(self, ring: Ring, base: int, rows: int) -> None:
        if self._mirror is None:
            with torch.inference_mode(False):
                self._mirror = torch.zeros(
                    tuple(ring.rows.shape), dtype=torch.int32, pin_memory=ring.on_cuda
                )
        begin = base % ring.capacity
        first = min(rows, ring.capacity - begin)
        self._mirror[begin : begin + first].copy_(
            ring.rows[begin : begin + first], non_blocking=True
        )
        if first < rows:
            self._mirror[: rows - first].copy_(ring.rows[: rows - first], non_blocking=True)

    def _settle(self) -> None:
        """Take all copied rows out of the pinned memory and give them to their requests."""
        if self._mirror is None:
            return
        layout = self.ring.layout
        for forward in self._pending:
            if forward.event is not None:
                forward.event.synchronize()
            for span in forward.spans:
                numbers = forward.base + span.offset + torch.arange(span.count)
                rows = self._mirror[numbers % self.ring.capacity]
                is_ours = (row_numbers(rows) == numbers) & (rows[:, 3] == forward.rows)
                stamps = layout.stamps(rows) == low_halves(numbers)[:, None]
                request = self._requests.get(span.request)
                if request is None:
                    continue
                request.pieces.append(
                    (
                        span.position + torch.arange(span.count),
                        torch.full((span.count,), forward.number),
                        span.offset + torch.arange(span.count),
                        rows,
                        stamps & is_ours[:, None],
                    )
                )
        self._pending, self._waiting = [], 0

    def _sampled(self, output: Any) -> None:
        sampled = getattr(output, "sampled_token_ids", None)
        if sampled is None or not len(sampled):
            return
        for name, place in output.req_id_to_index.items():
            request = self._requests.get(name)
            if request is not None and place < len(sampled):
                request.tokens.extend(int(token) for token in sampled[place])

    def _described(self) -> Recording:
        """Name the layers that the requests' adapters have weights for."""
        found: dict[tuple[int, ...], AdaptedLayer] = {}
        for number in sorted(self._adapters):
            if self._manager.get_adapter(number) is None:  # evicted by a later one
                continue
            layers, unseen = adapted_layers(self._manager, number)
            found |= {layer.key: layer for layer in layers}
            self._unseen |= dict.fromkeys(unseen)
        names = {weights_key(module.lora_a_stacked): name for name, module in self._modules()}
        layers_in_order = []
        for key in self.writer.keys:
            layer = found.get(key)
            parts = () if layer is None else tuple((p.part, p.site) for p in layer.slices)
            layers_in_order.append(RecordedLayer(names[key], parts))
        return Recording(self.ring.layout, tuple(layers_in_order), self.writer.launches)

    def _modules(self) -> list[tuple[str, Any]]:
        """LoRA layers of the engine that go through the shrink, by name."""
        return [
            (name, module)
            for name, module in self._manager.modules.items()
            if isinstance(getattr(module, "lora_a_stacked", None), (tuple, list))
        ]

    def executions(self) -> tuple[Execution, ...]:
        """Return what was recorded of every request so far, in order of arrival."""
        self._settle()
        recording = self._described()
        return tuple(
            self._execution(recording, name, request) for name, request in self._requests.items()
        )

    def _execution(self, recording: Recording, name: str, request: _Request) -> Execution:
        layout = recording.layout
        void = list(dict.fromkeys(request.void))
        if request.pieces:
            parts = [torch.cat(column) for column in zip(*request.pieces, strict=True)]
        else:
            empty = torch.empty(0, dtype=torch.int64)
            rows = torch.empty((0, layout.starts[-1]), dtype=torch.int32)
            parts = [
                empty,
                empty,
                empty,
                rows,
                torch.empty((0, len(layout.layers)), dtype=torch.bool),
            ]
        positions = parts[0]
        if positions.unique().numel() != positions.numel():
            void.append("positions were computed twice")
        order = torch.argsort(positions, stable=True)
        parts = [part[order] for part in parts]
        return Execution(
            recording=recording,
            number=request.number,
            request_id=name,
            prompt_ids=request.prompt_ids,
            token_ids=tuple(request.tokens),
            adapter=request.adapter,
            cached=request.cached,
            positions=parts[0],
            forwards=parts[1],
            places=parts[2],
            rows=parts[3],
            observed=parts[4],
            void=tuple(dict.fromkeys(void)),
        )

    def coverage(self) -> tuple[str, ...]:
        """Say what was not observed; each in a sentence."""
        executions = self.executions()
        said = [_OTHERS, *self._unseen]
        for execution in executions:
            if execution.adapter and execution.missing():
                said.append(
                    f"Request {execution.number}: {execution.missing()} of "
                    f"{execution.expected * len(execution.recording.layers)} records are missing."
                )
            if execution.cached:
                said.append(
                    f"Request {execution.number}: positions 0 to {execution.cached - 1} came from the prefix cache and "
                    "were not computed."
                )
            said += [f"Request {execution.number} is void: {why}." for why in execution.void]
        if self._without_adapter:
            said.append(f"{self._without_adapter} forwards had no row with an adapter.")
        if self._too_large:
            said.append(
                f"{self._too_large} forwards had more rows than the ring ({self.ring.capacity}): pass a larger rows= "
                "to prepare_watch."
            )
        return tuple(said)

    def operand(self, execution: Execution, row: int, layer: int) -> Tensor | None:
        """Return an operand row, [K], with the recorded digest; None if it has been overwritten."""
        number = int(row_numbers(execution.rows[row : row + 1])[0])
        found = self.ring.operand(number, layer)
        if found is None:
            return None
        digest = digest_rows(found.unsqueeze(0))[0]
        recorded = self.ring.layout.digests(execution.rows[row : row + 1])[0, layer]
        return found if torch.equal(digest, recorded) else None

    def weights(self, layer: int, execution: Execution, row: int) -> list[Tensor]:
        """Return copies of A per slice, [R, K], as a recorded row's shrink read them."""
        slot = int(execution.rows[row, 2])
        module = next(
            module
            for _, module in self._modules()
            if weights_key(module.lora_a_stacked) == self.writer.keys[layer]
        )
        return [stacked[slot, 0].detach().clone().cpu() for stacked in module.lora_a_stacked]

    def export_reproducer(self, comparison: LiveComparison, directory: str | Path) -> Path:
        """Write a folder that replays the kernel alone on the root's operands; see export_root.

        Args:
            comparison: with verdict root, whose candidate this recorder recorded last.
            directory: a new folder.

        Returns:
            The path of its script.

        Raises:
            InputError: no root, or its operand has been overwritten since.
            StorageError: the folder cannot be written.
        """
        return export_root(self, comparison, Path(directory))
