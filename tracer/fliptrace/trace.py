"""A trace: the ordered records of one execution, with its manifest, read step by step.

Records of one kind in one step travel together in a *frame*: their bytes one after another in execution order, and a
layout that says which bytes are whose. A decode step of a 30-layer model has some 400 records of about 100 bytes; one
row of storage for each would cost more in row handling than in bytes, for the writer and, a thousand times over, for
the comparison, which can now dismiss an equal frame by one comparison of bytes. A record is still one tensor at a site:
``trace.record(site, kind, step)``.

This module knows nothing of files: a trace reads from any source with a few methods (fliptrace.store has one on disk).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from fliptrace.displays import html_of
from fliptrace.errors import SiteNotFoundError
from fliptrace.manifest import Manifest

#: The version of the records' meaning. A trace of another version is refused by name.
SCHEMA_VERSION = 1

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Kind(StrEnum):
    """What a record holds. T is the number of token rows of the step, R the LoRA rank.

    SHRINK: z = x·Aᵀ, FP32 [T, R]. OPERAND: row digests of the shrink's input x, int64 [T, 2]. OPERAND_VALUES: x itself,
    [T, K]. PROJECTION: row digests of the LoRA layer's output, int64 [T, 2]. CACHE: the key and value rows written in
    this step, [2, T, kv_heads, head_dim], one record per cache layer. STATE: the recurrent state after this step,
    whole, one record per tensor of a layer; STATE_DIGEST: its digest, int64 [1, 2], in steps that keep no more of it.
    LOGITS_TOP: the largest logits of the last row, [64]; LOGITS_TOP_IDS: their token ids, int64 [64]; LOGITS_DIGEST:
    int64 [1, 2]; LOGITS_FULL: [vocabulary], where kept. MODULE_INPUT and MODULE_OUTPUT: row digests around every
    module; OPERATION_INPUT and OPERATION_OUTPUT: row digests around every functional operation, attention included,
    both int64 [rows, 2].
    """

    SHRINK = "shrink"
    OPERAND = "operand"
    OPERAND_VALUES = "operand_values"
    PROJECTION = "projection"
    CACHE = "cache"
    STATE = "state"
    STATE_DIGEST = "state_digest"
    LOGITS_TOP = "logits_top"
    LOGITS_TOP_IDS = "logits_top_ids"
    LOGITS_DIGEST = "logits_digest"
    LOGITS_FULL = "logits_full"
    MODULE_INPUT = "module_input"
    MODULE_OUTPUT = "module_output"
    OPERATION_INPUT = "operation_input"
    OPERATION_OUTPUT = "operation_output"


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """One record's place in a frame.

    Attributes:
        key: the site's path; for cache records ``cache.<layer>``; for recurrent state ``state.<layer>.<name>``; for
            logits ``logits``; for operations the module's path, the operation's name and its occurrence within the
            module (``model.layers.0.self_attn/sdpa#0``).
        dtype: float32, bfloat16, float16, int64 or int32.
        shape: the record's shape.
        launch: for shrinks, the launch configuration and the operand's strides in one line; a difference of launch
            makes a difference of values a configuration-variant, not a root.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    launch: str = ""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of the record."""
        return _DTYPES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """How many bytes the record takes in the frame."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The records of a frame, in execution order.

    Attributes:
        entries: one per record; their bytes follow one another without gaps.
    """

    entries: tuple[LayoutEntry, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of every record, and the frame's size at the end."""
        offsets = [0]
        for entry in self.entries:
            offsets.append(offsets[-1] + entry.size_bytes)
        return tuple(offsets)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Key -> index of the record."""
        return {entry.key: number for number, entry in enumerate(self.entries)}

    @property
    def size_bytes(self) -> int:
        """The payload's size."""
        return self.offsets[-1]

    def to_json(self) -> list[list[Any]]:
        """Return a JSON value."""
        return [[entry.key, entry.dtype, list(entry.shape), entry.launch] for entry in self.entries]

    @classmethod
    def from_json(cls, value: Sequence[Sequence[Any]]) -> Layout:
        """Read what to_json returned."""
        return cls(
            tuple(
                LayoutEntry(key, dtype, tuple(shape), launch) for key, dtype, shape, launch in value
            )
        )


@dataclass(frozen=True)
class Frame:
    """The records of one kind in one step.

    Attributes:
        step: 0 for the prefill.
        kind: what the records hold.
        layout: which bytes are whose.
        payload: the records' bytes (little-endian, contiguous), ``layout.size_bytes`` long.
        digests: fliptrace digests of the records, computed where the tensors lived: int64 [records, 2] on the CPU, or
            None for kinds that are digests themselves.
    """

    step: int
    kind: Kind
    layout: Layout
    payload: bytes | bytearray | memoryview
    digests: Tensor | None = None

    def tensor(self, record: int | str) -> Tensor:
        """Return one record as a tensor of its own (a copy), by index or key.

        Raises:
            SiteNotFoundError: no record with that key.
        """
        number = record if isinstance(record, int) else self.layout.index.get(record, -1)
        if not 0 <= number < len(self.layout.entries):
            raise SiteNotFoundError(
                f"step {self.step} has no {self.kind} record at {record!r}; it has {len(self.layout.entries)}, "
                f"for example {self.layout.entries[0].key if self.layout.entries else 'none'}"
            )
        entry = self.layout.entries[number]
        start, end = self.layout.offsets[number], self.layout.offsets[number + 1]
        if start == end:
            return torch.empty(entry.shape, dtype=entry.torch_dtype)
        data = bytearray(memoryview(self.payload)[start:end])
        return torch.frombuffer(data, dtype=entry.torch_dtype).reshape(entry.shape)

    def record_bytes(self, number: int) -> memoryview:
        """Return the bytes of one record, by index."""
        return memoryview(self.payload)[
            self.layout.offsets[number] : self.layout.offsets[number + 1]
        ]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What is known of one forward besides its frames.

    Attributes:
        step: 0 for the prefill, s for the forward that yields generated token s.
        first_position: absolute position of the first token row.
        token_ids: the ids that were fed, one per row. In a redacted trace: keyed hashes of them.
        chosen: the token id that was chosen from this step's logits (generated token ``step``).
        top_values: the two largest logits as FP32.
        top_ids: their token ids, lowest id first among equals.
        tied: how many tokens share the largest logit exactly (1: no tie).
        cache_digest: rolling digest of all cache rows written so far, 32 hexadecimal digits.
        cache_digest_full: the same recomputed from the cache itself at this step, or "" when not due.
        frames: kinds of the frames that this step has, in storage order.
    """

    step: int
    first_position: int
    token_ids: tuple[int, ...]
    chosen: int
    top_values: tuple[float, float]
    top_ids: tuple[int, int]
    tied: int
    cache_digest: str
    cache_digest_full: str
    frames: tuple[str, ...]

    @property
    def margin(self) -> float:
        """Largest logit minus the second largest; 0.0 is a tie."""
        largest, second = self.top_values
        return 0.0 if largest == second else largest - second  # two infinities are a tie too

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value."""
        return {
            "step": self.step,
            "first_position": self.first_position,
            "token_ids": list(self.token_ids),
            "chosen": self.chosen,
            "top_values": list(self.top_values),
            "top_ids": list(self.top_ids),
            "tied": self.tied,
            "cache_digest": self.cache_digest,
            "cache_digest_full": self.cache_digest_full,
            "frames": list(self.frames),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StepRecord:
        """Read what to_json returned."""
        return cls(
            step=value["step"],
            first_position=value["first_position"],
            token_ids=tuple(value["token_ids"]),
            chosen=value["chosen"],
            top_values=(value["top_values"][0], value["top_values"][1]),
            top_ids=(value["top_ids"][0], value["top_ids"][1]),
            tied=value["tied"],
            cache_digest=value["cache_digest"],
            cache_digest_full=value["cache_digest_full"],
            frames=tuple(value["frames"]),
        )


@dataclass(frozen=True, slots=True)
class Closing:
    """How an execution ended.

    Attributes:
        complete: False when recording was cut short; then nothing beyond the last acknowledged step is known.
        stop_reason: "end of sequence", "max new tokens", or why recording ended early.
        steps: how many steps were acknowledged.
        text: the generated text, "" when redacted or unknown.
        piece_texts: text of every generated token, for display; empty when redacted.
        prompt_piece_texts: text of every prompt token; empty when redacted.
        not_observed: sentences that say what this trace does not cover.
    """

    complete: bool
    stop_reason: str
    steps: int
    text: str = ""
    piece_texts: tuple[str, ...] = ()
    prompt_piece_texts: tuple[str, ...] = ()
    not_observed: tuple[str, ...] = field(default=())


class TraceSource(Protocol):
    """What a trace reads from. All methods verify what they return against its seal."""

    name: str
    manifest: Manifest
    closing: Closing
    steps: Sequence[StepRecord]

    def frame(self, step: int, kind: Kind) -> Frame | None:
        """Return one frame, None when the step has none of that kind."""
        ...

    def frames(self, kind: Kind) -> Iterator[Frame]:
        """Yield the frames of one kind in step order."""
        ...


class Trace:
    """The ordered records of one execution, read lazily from a source."""

    def __init__(self, source: TraceSource) -> None:
        """Wrap a source; see fliptrace.open_trace for files."""
        self.source = source

    @property
    def name(self) -> str:
        """Where the trace comes from, usually a path."""
        return self.source.name

    @property
    def manifest(self) -> Manifest:
        """What ran."""
        return self.source.manifest

    @property
    def closing(self) -> Closing:
        """How it ended."""
        return self.source.closing

    @property
    def steps(self) -> Sequence[StepRecord]:
        """Every acknowledged step in order."""
        return self.source.steps

    @property
    def generated_ids(self) -> list[int]:
        """The generated token ids (keyed hashes of them in a redacted trace)."""
        return [step.chosen for step in self.steps]

    def frame(self, step: int, kind: Kind) -> Frame | None:
        """Return all records of one kind in one step, None when that kind was not recorded there."""
        return self.source.frame(step, kind)

    def record(self, key: str, kind: Kind, step: int) -> Tensor:
        """Return one record as a tensor.

        Args:
            key: a site's path, ``cache.<layer>`` or ``logits``.
            kind: what to read.
            step: 0 for the prefill.

        Raises:
            SiteNotFoundError: not recorded; the message says what is there.
        """
        frame = self.frame(step, kind)
        if frame is None:
            recorded = sorted({name for entry in self.steps for name in entry.frames})
            raise SiteNotFoundError(
                f"{self.name} holds no {kind} records in step {step}; it has steps 0 to {len(self.steps) - 1} "
                f"with {', '.join(recorded) or 'no records'}"
            )
        return frame.tensor(key)

    def close(self) -> None:
        """Close the source, when it is one that can be closed."""
        close = getattr(self.source, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Trace:
        """Close on leaving."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the source."""
        self.close()

    def _repr_html_(self) -> str:
        """Show itself in a notebook."""
        return html_of(self)

    def __repr__(self) -> str:
        """Say in one line what it is."""
        state = "complete" if self.closing.complete else f"INCOMPLETE ({self.closing.stop_reason})"
        return (
            f"Trace({self.name}: {len(self.steps)} steps, reduction {self.manifest.get('reduction.identity')}, "
            f"{self.manifest.get('model.name')} + {self.manifest.get('adapter.name')}, {state})"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name under which a record's dtype is stored.

    Raises:
        ValueError: a dtype that records never have.
    """
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        raise ValueError(f"records have dtype {', '.join(_DTYPES)}; got {dtype}")
    return name


def dtype_from_name(name: str) -> torch.dtype:
    """Return the torch dtype for a stored name (``bfloat16``)."""
    return _DTYPES[name]
