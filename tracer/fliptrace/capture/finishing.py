"""What a decode step computes from its slots: where the results lie, and how to launch it all at once on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fliptrace.capture.arena import Slot
from fliptrace.numerics.digest import mix_words, position_terms, shape_mixed

_WORD_BYTES = 8

#: Turns int64 [cache layers, 2, T, 2] digests of new cache rows into the whole cache's, int64 [2].
Roll = Callable[[Tensor], Tensor]


def no_cache_digest(row_digests: Tensor) -> Tensor:
    """Stand for a roll where nobody keeps the whole cache's digest."""
    return row_digests.new_zeros(2)


@dataclass(frozen=True, slots=True)
class Parts:
    """Views of one buffer.

    Attributes:
        digests: int64 [slots, 2], the rows' digests.
        shrinks: int64 [sites, 2], digests of the shrinks as records.
        caches: int64 [cache layers, 2], digests of the cache rows as records.
        cache: int64 [2], the digest of the whole cache.
        top_values: the largest logits, in their dtype.
        top_ids: int64, their ids.
    """

    digests: Tensor
    shrinks: Tensor
    caches: Tensor
    cache: Tensor
    top_values: Tensor
    top_ids: Tensor


@dataclass(frozen=True, slots=True)
class TravellingParts:
    """How much room results take before the slots, and where each lies.

    Attributes:
        slots: how many slots are digested.
        shrinks: how many of them are shrinks.
        caches: how many caches have two of them.
        top: how many logits are kept.
        logits_dtype: their dtype.
    """

    slots: int
    shrinks: int
    caches: int
    top: int
    logits_dtype: torch.dtype

    @property
    def _value_words(self) -> int:
        return -(-self.top * self.logits_dtype.itemsize // _WORD_BYTES)

    @property
    def _sizes(self) -> tuple[int, ...]:
        pairs = (2 * self.slots, 2 * self.shrinks, 2 * self.caches)
        return (*pairs, self.top, self._value_words, 2)

    @property
    def words(self) -> int:
        """64-bit words of all parts; the cache's two are the last."""
        return sum(self._sizes)

    def parts(self, buffer: Tensor) -> Parts:
        """View an int64 buffer of ``words`` as the parts."""
        digests, shrinks, caches, ids, values, cache = buffer.split(self._sizes)
        return Parts(
            digests.view(-1, 2),
            shrinks.view(-1, 2),
            caches.view(-1, 2),
            cache,
            values.view(self.logits_dtype)[: self.top],
            ids,
        )


class RecordDigests:
    """Turns row digests of one step into digest_tensor of its records, all records of a kind at once."""

    def __init__(
        self, shrinks: Sequence[Slot], caches: Sequence[Slot], device: torch.device
    ) -> None:
        """Make the constants.

        Args:
            shrinks: a slot per site.
            caches: a slot for keys and one for values per layer.
            device: where to compute: the host too, wherever digests lie.
        """
        places = {device.type: device, "cpu": torch.device("cpu")}
        rows = torch.zeros(len(shrinks), dtype=torch.int64)
        self._rows = {name: rows.to(place) for name, place in places.items()}
        self._ranks = _columns([(slot.shape[1],) for slot in shrinks], places)
        halves = torch.tensor([0, 1], dtype=torch.int64).repeat(len(caches) // 2)
        self._halves = {name: halves.to(place) for name, place in places.items()}
        shapes = [(2, 1, slot.shape[0], slot.shape[2]) for slot in caches[::2]]
        self._sizes = _columns(shapes, places)

    def of_shrinks(self, rows: Tensor) -> Tensor:
        """Row digests [sites, 2] to those of the records [1, R]."""
        digest = mix_words(position_terms(rows, self._rows[rows.device.type]))
        digest = shape_mixed(digest, 1)
        for sizes in self._ranks[rows.device.type]:
            digest = shape_mixed(digest, sizes)
        return digest

    def of_caches(self, rows: Tensor) -> Tensor:
        """Row digests of K and V [2 * layers, 2] to those of the records [2, 1, kv_heads, head_dim]."""
        digest = mix_words(
            position_terms(rows, self._halves[rows.device.type]).view(-1, 2, 2).sum(1)
        )
        for sizes in self._sizes[rows.device.type]:
            digest = shape_mixed(digest, sizes)
        return digest


def _columns(
    shapes: Sequence[tuple[int, ...]], places: Mapping[str, torch.device]
) -> dict[str, list[Tensor]]:
    """Return per place and dimension the sizes of all shapes, int64 [shapes, 1]."""
    columns = [
        torch.tensor(sizes, dtype=torch.int64).view(-1, 1) for sizes in zip(*shapes, strict=True)
    ]
    return {name: [column.to(place) for column in columns] for name, place in places.items()}


class HostBuffers:
    """Where one decode step's bytes arrive, in one transfer: what was computed, then the exported slots."""

    def __init__(self, whole: Tensor, travelling: TravellingParts) -> None:
        """View an int64 buffer on the host."""
        self.whole = whole
        self.parts = travelling.parts(whole[: travelling.words])
        self.records = whole[travelling.words :].view(torch.uint8)


class Replay:
    """Runs a computation over fixed addresses; on CUDA from the third time on as one captured graph.

    Some hundred small launches a step cost more than the step's other records together. What the graph computes is
    compared with the plain computation once, bit by bit, before it is used; where it cannot be captured or differs, the
    computation stays as it is.
    """

    #: Plain runs before a graph is captured: kernels are loaded, and short recordings need none.
    PLAIN_RUNS = 2

    def __init__(self, compute: Callable[[], None], result: Tensor) -> None:
        """Prepare.

        Args:
            compute: reads and writes tensors that stay where they are, and never waits for the device.
            result: all that it writes, to compare.
        """
        self._compute = compute
        self._result = result
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._may_capture = result.device.type == "cuda"

    @property
    def is_captured(self) -> bool:
        """Whether a graph runs."""
        return self._graph is not None

    def run(self) -> None:
        """Compute once more."""
        if self._graph is not None:
            with torch.cuda.device(self._result.device):
                self._graph.replay()
            return
        self._compute()
        self._runs += 1
        if self._may_capture and self._runs >= self.PLAIN_RUNS:
            self._may_capture = False
            with torch.cuda.device(self._result.device):
                self._capture()

    def _capture(self) -> None:
        expected = self._result.clone()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        # Not torch.cuda.graph: it collects garbage first, which takes longer than many a recording.
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(stream):
                # Other threads, such as the store's, may wait for events meanwhile.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._compute()
                finally:
                    graph.capture_end()
            torch.cuda.synchronize()
            self._result.zero_()
            graph.replay()
            if torch.equal(self._result, expected):
                self._graph = graph
        except RuntimeError:
            # Not to be captured here, for whatever reason: the plain computation gives the same.
            torch.cuda.synchronize()
        if self._graph is None:
            self._result.copy_(expected)
