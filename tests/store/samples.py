"""Small traces whose content follows from the step number. Used by the tests and by the processes that they kill."""

from __future__ import annotations

import random

import torch

from fliptrace.manifest import Manifest
from fliptrace.numerics.digest import digest_tensor
from fliptrace.trace import Closing, Frame, Kind, Layout, LayoutEntry, StepRecord

MANIFEST = Manifest(
    {"model": {"name": "sample", "sha256": "0" * 64}, "prompt": {"text": "Grüße, 你好 \u2028 \x00"}}
)
CLOSING = Closing(True, "max new tokens", 0, "text", ("te", "xt"), ("a", "b"), ("attention",))

LAYOUTS = {
    Kind.SHRINK: Layout(
        tuple(LayoutEntry(f"layers.{n}.q_proj", "float32", (1, 16), "split 8") for n in range(4))
    ),
    Kind.OPERAND: Layout(
        tuple(LayoutEntry(f"layers.{n}.q_proj", "int64", (1, 2)) for n in range(4))
    ),
    Kind.CACHE: Layout(
        tuple(LayoutEntry(f"cache.{n}", "bfloat16", (2, 1, 3, 8)) for n in range(2))
    ),
    Kind.LOGITS_TOP: Layout((LayoutEntry("logits", "float16", (64,)),)),
}
DIGESTED = (Kind.SHRINK, Kind.CACHE, Kind.LOGITS_TOP)


def make_frame(step, kind, layout, payload, digested=True):
    frame = Frame(step, kind, layout, payload)
    if not digested:
        return frame
    rows = [digest_tensor(frame.tensor(number)) for number in range(len(layout.entries))]
    digests = torch.stack(rows) if rows else torch.empty((0, 2), dtype=torch.int64)
    return Frame(step, kind, layout, payload, digests)


def make_record(step, kinds, ids=None):
    return StepRecord(
        step=step,
        first_position=10 + step,
        token_ids=tuple(ids or (100 + step,)),
        chosen=7 * step,
        top_values=(1.5 + step, -0.0),
        top_ids=(7 * step, 3),
        tied=1,
        cache_digest=f"{step:032x}",
        cache_digest_full=f"{step:032x}" if step % 2 == 0 else "",
        frames=tuple(kind.value for kind in kinds),
    )


def make_step(step, seed=0):
    """The step's record and frames; the same in every process."""
    source = random.Random(step * 1000 + seed)
    frames = [
        make_frame(step, kind, layout, source.randbytes(layout.size_bytes), kind in DIGESTED)
        for kind, layout in LAYOUTS.items()
    ]
    return make_record(step, LAYOUTS), frames


def content(reader):
    """Everything that a reader returns, as values that compare by bits."""
    steps = [
        (
            step.to_json(),
            [
                (
                    kind.value,
                    frame.layout,
                    bytes(frame.payload),
                    None if frame.digests is None else frame.digests.tolist(),
                )
                for kind, frame in reader.step_frames(step.step).items()
            ],
        )
        for step in reader.steps
    ]
    return reader.manifest.to_json(), repr(reader.closing), repr(steps)
