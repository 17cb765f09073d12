"""Greedy runs of an engine, plain and recorded, for tests on several engines and devices. Needs no pytest."""

from __future__ import annotations

from fliptrace.capture.decoding import generate
from fliptrace.capture.recorder import Recorder, RecorderOptions
from fliptrace.manifest import Manifest
from fliptrace.store import TraceReader, TraceWriter
from fliptrace.trace import Closing, Kind


def run(engine, ids, count):
    """Run greedily from a prompt: (token ids, logits of every step)."""
    engine.start(ids)
    tokens, rows, token = [], [], None
    for _ in range(count):
        rows.append(engine.step(token))
        token = int(rows[-1].float().argmax())
        tokens.append(token)
    return tokens, rows


class ByCalls:
    """Passes an observer's reports on and lends no slots."""

    def __init__(self, observer):
        for name in ("begin_step", "shrink", "projection", "cache_rows", "operation", "end_step"):
            setattr(self, name, getattr(observer, name))


def record(
    engine,
    ids,
    path,
    *,
    by_calls=False,
    operands=False,
    modules=False,
    steps=8,
    forced=(),
    recorder_seen=None,
):
    """Record a greedy run into a file and return its token ids; ``recorder_seen`` is called with its recorder."""
    writer = TraceWriter(path, Manifest(engine.describe()))
    recorder = Recorder(engine, writer, RecorderOptions(operands=operands, modules=modules))
    observer = ByCalls(recorder) if by_calls else recorder
    with engine.observed(observer, modules=modules):
        execution = generate(
            engine,
            ids,
            max_new_tokens=steps,
            end_ids=set(),
            on_choice=recorder.complete_step,
            forced_ids=forced,
        )
        recorder.finish()
    writer.close(Closing(complete=True, stop_reason="max new tokens", steps=steps))
    if recorder_seen is not None:
        recorder_seen(recorder)
    return execution.token_ids


def frames(path, steps=8):
    """Read (step, kind, bytes, digests) of every frame; which of equal logits were the last to be kept is not said."""
    with TraceReader(path) as trace:
        return [
            (
                step,
                kind,
                settled_ids(found) if kind is Kind.LOGITS_TOP_IDS else bytes(frame.payload),
                None if frame.digests is None else frame.digests.tolist(),
            )
            for step in range(steps)
            for found in (trace.step_frames(step),)
            for kind, frame in found.items()
        ]


def settled_ids(found):
    """Return the kept ids whose logits are larger than the least kept one, of which others may be equal."""
    values, ids = found[Kind.LOGITS_TOP].tensor(0), found[Kind.LOGITS_TOP_IDS].tensor(0)
    return tuple(ids[values > values.min()].tolist())
