"""Decode steps fill the recorder's slots: what is recorded is what reports by calls would have been."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import fliptrace as ft
from fliptrace.capture.decoding import generate
from fliptrace.capture.vllm_engine import slot_filling
from fliptrace.errors import RecordingError
from fliptrace.store import TraceReader
from fliptrace_interventions.reproducer import export_reproducer


def digests_of(frame):
    return None if frame.digests is None else frame.digests.tolist()


def frames_of(path, steps):
    """All frames of a trace: kind, layout, bytes and digests."""
    with TraceReader(path) as trace:
        return [
            (step, kind, frame.layout, bytes(frame.payload), digests_of(frame))
            for step in range(steps)
            for kind, frame in trace.step_frames(step).items()
        ]


@pytest.mark.parametrize("operands", [False, True])
@pytest.mark.parametrize("reduction", ["unsplit", "vllm-own"])
def test_slots_hold_what_calls_report(engine, prompt, tmp_path, reduction, operands, record):
    """Every frame of eight steps is the same, byte by byte."""
    engine.set_reduction(reduction)
    for by_calls in (False, True):
        record(
            engine,
            prompt.ids,
            tmp_path / f"{by_calls}.trace",
            by_calls=by_calls,
            operands=operands,
        )
    slots, calls = (frames_of(tmp_path / f"{by_calls}.trace", 8) for by_calls in (False, True))
    assert slots == calls
    assert len(slots) >= 8 * 7


def test_a_sliding_model_is_recorded_alike(sliding_engine, tmp_path, record):
    """The same over a window of 8 positions that moves on."""
    ids = tuple(range(3, 9))
    for by_calls in (False, True):
        record(sliding_engine, ids, tmp_path / f"{by_calls}.trace", by_calls=by_calls, steps=12)
    assert frames_of(tmp_path / "False.trace", 12) == frames_of(tmp_path / "True.trace", 12)


def test_what_is_overwritten_is_copied_when_it_is_seen(engine, prompt, tmp_path, record):
    """vLLM turns queries and keys around in place: qkv's output is not held, that of gate and up is, and no operand."""
    fillers = []
    own = slot_filling.SlotFiller._learn

    def learn(filler, changed):
        own(filler, changed)
        fillers.append(filler)

    slot_filling.SlotFiller._learn = learn
    try:
        record(engine, prompt.ids, tmp_path / "one.trace", steps=3)
    finally:
        slot_filling.SlotFiller._learn = own
    (filler,) = fillers
    held = {
        layer.name.rsplit(".", 1)[1]: not at_once[1]
        for layer, at_once in zip(filler._layers[4:8], filler._at_once[4:8], strict=True)
    }
    assert held["qkv_proj"] is False
    assert held["gate_up_proj"] is True
    assert not any(operand for operand, _ in filler._at_once)


def test_a_tensor_that_changes_later_voids_the_recording(
    engine, prompt, tmp_path, monkeypatch, record
):
    """An operand overwritten in the second checked step, and in no earlier one, is noticed."""
    monkeypatch.setattr(slot_filling, "CHECK_STEPS", 3)
    operands = []

    def remember(filler, y, x, stacked, scale, **keywords):
        operands.append(x)
        own(filler, y, x, stacked, scale, **keywords)
        if filler._filled == 3 and len(operands) % 32 == 0:
            operands[-3].add_(1)

    own = slot_filling.SlotFiller.add_shrink
    monkeypatch.setattr(slot_filling.SlotFiller, "add_shrink", remember)
    with pytest.raises(RecordingError, match="was changed after it was seen"):
        record(engine, prompt.ids, tmp_path / "one.trace")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("add_shrink", r"every shrink .* in order; \S*gate_up_proj ran where \S*o_proj was due"),
        ("add_expand", r"every expand .* in order; \S*gate_up_proj ran where \S*o_proj was due"),
        ("cache_rows", "layer 1 cached no rows"),
    ],
)
def test_what_is_not_seen_in_a_later_step_ends_the_recording(
    engine, prompt, tmp_path, monkeypatch, record, name, what
):
    """One call of the second layer passes the filler by, in the third filled step."""
    own = getattr(slot_filling.SlotFiller, name)
    place, calls = {"cache_rows": 1}.get(name, 5), []

    def miss(filler, *arguments, **keywords):
        calls.append(filler._filled)
        if calls.count(2) == place + 1 and calls[-1] == 2:
            if name != "cache_rows":
                getattr(filler.path, name.replace("add", "own"))(*arguments, **keywords)
            return
        own(filler, *arguments, **keywords)

    monkeypatch.setattr(slot_filling.SlotFiller, name, miss)
    with pytest.raises(RecordingError, match=what):
        record(engine, prompt.ids, tmp_path / "one.trace")


def test_nothing_stands_while_idle(engine, prompt):
    """Between steps the wrapper is vLLM's own; a step that nobody watches under vLLM's own shrink leaves it alone."""
    engine.set_reduction("vllm-own")
    wrapper = engine._wrapper
    seen = []
    own = engine._request.forward

    def forward(*arguments):
        seen.append("add_shrink" in vars(wrapper))
        return own(*arguments)

    engine._request.forward = forward
    try:
        engine.start(prompt.ids)
        engine.step()
        engine.set_reduction("unsplit")
        engine.step(7)
    finally:
        del engine._request.forward
    assert seen == [False, True]
    assert "add_shrink" not in vars(wrapper)
    assert not any(
        module._forward_hooks or module._forward_pre_hooks
        for module in engine.host.runner.model.modules()
    )


def test_logits_of_recorded_and_unrecorded_runs_are_equal(engine, prompt, tmp_path, record):
    """Sixteen steps choose the same tokens, with or without a recorder."""
    engine.set_reduction("unsplit")
    tokens = record(engine, prompt.ids, tmp_path / "one.trace", steps=16)
    rows = []
    execution = generate(
        engine,
        prompt.ids,
        max_new_tokens=16,
        end_ids=set(),
        on_choice=lambda step, choice, logits: rows.append(logits),
    )
    assert execution.token_ids == tokens
    assert all(torch.isfinite(row.float()).all() for row in rows)


def test_a_root_under_vllms_own_shrink_is_exported(engine, prompt, tmp_path, record):
    """A planted root of a vllm-own pair becomes a folder; its script runs, and says who stands for vLLM's kernel."""
    engine.set_reduction("vllm-own")
    record(engine, prompt.ids, tmp_path / "reference.trace", steps=3)
    planted = 4

    def plant(site, operand, z):
        if site != planted or operand.shape[0] != 1:
            return z
        changed = z.clone()
        changed[0, 0] *= 1.5
        return changed

    with engine.intercepted(plant):
        record(engine, prompt.ids, tmp_path / "candidate.trace", steps=3)
    with ft.diff_traces(tmp_path / "reference.trace", tmp_path / "candidate.trace") as pair:
        root = pair.diff.first_propagating
        assert root.site.path == engine.sites[planted].path
        script = export_reproducer(pair, engine, root, tmp_path / "case")
    assert json.loads((tmp_path / "case" / "case.json").read_text())["reduction"] == "vllm-own"
    finished = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 1, finished.stderr
    assert "atomic:vllm stands for it" in finished.stdout
