"""Traces made in memory, and ways to plant differences in them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from fliptrace.manifest import Manifest
from fliptrace.trace import Closing, Frame, Kind, Layout, LayoutEntry, StepRecord, Trace, dtype_name

MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@dataclass
class MemorySource:
    """A trace source without a file; records are edited through ``edit``."""

    manifest: Manifest
    closing: Closing
    steps: list[StepRecord]
    stored: dict[tuple[int, Kind], Frame]
    name: str = "memory"

    def frame(self, step: int, kind: Kind) -> Frame | None:
        return self.stored.get((step, kind))

    def frames(self, kind: Kind) -> Iterator[Frame]:
        return (frame for (_, k), frame in sorted(self.stored.items()) if k == kind)


@dataclass(frozen=True)
class Made:
    """How a made trace looks."""

    layers: int = 2
    prompt: int = 5
    steps: int = 4
    rank: int = 4
    seed: int = 0
    dtype: str = "bfloat16"
    reduction: str = "atomic:8/32"
    launch: str = "grid 8"
    operations: bool = False
    drop: tuple[Kind, ...] = ()
    chosen: Mapping[int, int] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        return [f"model.layers.{layer}.{name}" for layer in range(self.layers) for name in MODULES]


def frame_of(step: int, kind: Kind, tensors: Mapping[str, torch.Tensor], launch: str = "") -> Frame:
    """Pack tensors into a frame."""
    entries = tuple(
        LayoutEntry(key, dtype_name(tensor.dtype), tuple(tensor.shape), launch)
        for key, tensor in tensors.items()
    )
    payload = b"".join(
        bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        for tensor in tensors.values()
    )
    return Frame(step, kind, Layout(entries), payload)


def _step_frames(made: Made, step: int, generator: torch.Generator) -> dict[Kind, Frame]:
    rows = made.prompt if step == 0 else 1

    def digests(count: int = rows) -> torch.Tensor:
        return torch.randint(-(2**62), 2**62, (count, 2), generator=generator)

    keys = made.keys
    shrinks = {key: torch.randn(rows, made.rank, generator=generator) for key in keys}
    cache = {
        f"cache.{layer}": torch.randn(2, rows, 2, 3, generator=generator).to(torch.bfloat16)
        for layer in range(made.layers)
    }
    frames = {
        Kind.SHRINK: frame_of(step, Kind.SHRINK, shrinks, made.launch),
        Kind.OPERAND: frame_of(step, Kind.OPERAND, {key: digests() for key in keys}),
        Kind.PROJECTION: frame_of(step, Kind.PROJECTION, {key: digests() for key in keys}),
        Kind.CACHE: frame_of(step, Kind.CACHE, cache),
        Kind.LOGITS_TOP: frame_of(
            step, Kind.LOGITS_TOP, {"logits": torch.arange(8.0, 0.0, -1).to(torch.bfloat16)}
        ),
        Kind.LOGITS_TOP_IDS: frame_of(step, Kind.LOGITS_TOP_IDS, {"logits": torch.arange(10, 18)}),
        Kind.LOGITS_DIGEST: frame_of(step, Kind.LOGITS_DIGEST, {"logits": digests(1)}),
    }
    if made.operations:
        names = []
        for layer in range(made.layers):
            at = f"model.layers.{layer}"
            names += [f"{at}.input_layernorm/rms_norm#0"]
            names += [f"{at}.{name}/lora_shrink#0" for name in MODULES[:3]]
            names += [f"{at}.self_attn/scaled_dot_product_attention#0"]
            names += [f"{at}.{name}/lora_shrink#0" for name in MODULES[3:]]
        modules = [f"model.layers.{layer}.self_attn" for layer in range(made.layers)] + made.keys
        for kind in (Kind.OPERATION_INPUT, Kind.OPERATION_OUTPUT):
            frames[kind] = frame_of(step, kind, {name: digests() for name in names})
        for kind in (Kind.MODULE_INPUT, Kind.MODULE_OUTPUT):
            frames[kind] = frame_of(step, kind, {name: digests() for name in modules})
    return {kind: frame for kind, frame in frames.items() if kind not in made.drop}


def make_trace(made: Made = Made(), manifest: Mapping[str, Any] | None = None) -> Trace:
    """Make a trace; equal arguments make equal traces."""
    generator = torch.Generator().manual_seed(made.seed)
    steps, stored, fed = [], {}, tuple(range(100, 100 + made.prompt))
    position = 0
    for step in range(made.steps):
        frames = _step_frames(made, step, generator)
        stored |= {(step, kind): frame for kind, frame in frames.items()}
        chosen = made.chosen.get(step, 10)
        steps.append(
            StepRecord(
                step=step,
                first_position=position,
                token_ids=fed,
                chosen=chosen,
                top_values=(8.0, 7.0),
                top_ids=(10, 11),
                tied=1,
                cache_digest="",
                cache_digest_full="",
                frames=tuple(frames),
            )
        )
        position += len(fed)
        fed = (chosen,)
    sections = {
        "model": {"name": "made", "sha256": "m", "dtype": made.dtype},
        "adapter": {"name": "made", "sha256": "a", "scaling_sha256": "s"},
        "prompt": {"ids_sha256": "p"},
        "reduction": {"identity": made.reduction},
        **(manifest or {}),
    }
    closing = Closing(
        True, "max new tokens", made.steps, piece_texts=tuple("abcdefghij"[: made.steps])
    )
    return Trace(MemorySource(Manifest(sections), closing, steps, stored))


def edited(trace: Trace, step: int, kind: Kind, key: str, change: Any) -> Trace:
    """Return a trace in which ``change`` was applied to one record's tensor."""
    source = copy.copy(trace.source)
    source.stored = dict(source.stored)
    frame = source.stored[step, kind]
    tensors = {entry.key: frame.tensor(number) for number, entry in enumerate(frame.layout.entries)}
    tensors[key] = change(tensors[key])
    launch = frame.layout.entries[0].launch
    source.stored[step, kind] = frame_of(step, kind, tensors, launch)
    return Trace(source)


def flipped_bit(place: tuple[int, ...], bit: int = 0) -> Any:
    """Return a change that flips one bit of one element."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        view = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
        view[place] ^= 1 << bit
        return tensor

    return change


def set_to(place: tuple[int, ...], value: float) -> Any:
    """Return a change that sets one element."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[place] = value
        return tensor

    return change


def with_step(trace: Trace, step: int, **changes: Any) -> Trace:
    """Return a trace whose step record is changed."""
    source = copy.copy(trace.source)
    source.steps = list(source.steps)
    source.steps[step] = replace(source.steps[step], **changes)
    return Trace(source)


class Kit:
    """Everything above, for tests (they cannot import each other's modules)."""

    Made = Made
    MemorySource = MemorySource
    MODULES = MODULES
    make_trace = staticmethod(make_trace)
    edited = staticmethod(edited)
    flipped_bit = staticmethod(flipped_bit)
    set_to = staticmethod(set_to)
    with_step = staticmethod(with_step)
    frame_of = staticmethod(frame_of)


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    """Ways to make traces and to plant differences."""
    return Kit
