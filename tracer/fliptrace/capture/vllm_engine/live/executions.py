"""What was recorded of each request of a watched engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fliptrace.capture.vllm_engine.live.layout import RecordLayout
from fliptrace.sites import Site


@dataclass(frozen=True)
class RecordedLayer:
    """A LoRA layer in the ring.

    Attributes:
        name: module path in vLLM's model.
        sites: of its slices that the adapters have weights for: number of the slice and place.
    """

    name: str
    sites: tuple[tuple[int, Site], ...]


@dataclass(frozen=True)
class Recording:
    """What all executions of one engine share.

    Attributes:
        layout: of a row.
        layers: in execution order, as in the layout.
        launches: description of a launch by layer and rows of the forward.
    """

    layout: RecordLayout
    layers: tuple[RecordedLayer, ...]
    launches: dict[tuple[int, int], str]


@dataclass(frozen=True)
class Execution:
    """One request.

    Attributes:
        recording: of its engine.
        number: 0-based, in order of arrival.
        request_id: vLLM's.
        prompt_ids: its prompt.
        token_ids: what was generated.
        adapter: name of its adapter, empty for none.
        cached: positions of its beginning that vLLM took from its prefix cache and did not compute.
        positions: int64 [N], ascending: the token positions that were recorded.
        forwards: int64 [N]: numbers of the forwards that ran them.
        places: int64 [N]: their rows in those forwards.
        rows: int32 [N, words], see fliptrace.capture.vllm_engine.live.layout.
        observed: bool [N, layers]: whether the layer's record is this forward's.
        void: why nothing can be said of this request; empty otherwise.
    """

    recording: Recording
    number: int
    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    adapter: str
    cached: int
    positions: Tensor
    forwards: Tensor
    places: Tensor
    rows: Tensor
    observed: Tensor
    void: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        """Return how many token rows were recorded."""
        return int(self.positions.numel())

    @property
    def expected(self) -> int:
        """How many positions were computed: every token but the cached ones and the last generated one."""
        return max(0, len(self.prompt_ids) + len(self.token_ids) - 1 - self.cached)

    def missing(self) -> int:
        """Count records (one per position and layer) that should be there and are not."""
        layers = len(self.recording.layers)
        return self.expected * layers - int(self.observed.sum())

    def shrink(self, layer: int) -> Tensor:
        """Return the FP32 shrinks of a layer at the recorded positions, [N, slices, rank]."""
        return self.recording.layout.shrinks(self.rows, layer)

    def operand_digests(self) -> Tensor:
        """Return int64 [N, layers, 2]."""
        return self.recording.layout.digests(self.rows)

    def step(self, position: int) -> int:
        """Return 0 for a position of the prompt, s for the forward that yields generated token s."""
        return max(0, position - len(self.prompt_ids) + 1)
