"""What is recorded layer by layer and what at the end of a captured forward, on plain tensors."""

from __future__ import annotations

import pytest
import torch

from fliptrace.capture.vllm_engine.live.layout import LayerShape, RecordLayout
from fliptrace.capture.vllm_engine.live.ring import Ring
from fliptrace.capture.vllm_engine.live.writing import ShrinkWriter
from fliptrace.errors import UnsupportedModelError
from fliptrace.numerics import digest_rows

MAPPING = torch.zeros(16, dtype=torch.int32)


class Model:
    """Three layers whose forward hands every shrink to a writer."""

    def __init__(self, writer, overwrites=False, shares=False):
        generator = torch.Generator().manual_seed(0)
        sizes = ((32, 3), (64, 1), (16, 2))
        self.weights = [
            [torch.randn(1, 1, 8, size, generator=generator).bfloat16() for _ in range(slices)]
            for size, slices in sizes
        ]
        self.writer = writer
        self.overwrites, self.shares = overwrites, shares
        self.buffer = torch.zeros(3, 16, 8)

    def forward(self, rows, seed):
        """Return operands and shrinks of all layers as they are when the layer runs."""
        generator = torch.Generator().manual_seed(seed)
        seen, before = [], None
        for stacked in self.weights:
            x = torch.randn(rows, stacked[0].shape[-1], generator=generator).bfloat16()
            z = self.buffer[: len(stacked), :rows].contiguous() if self.shares else None
            if z is None:
                z = torch.empty(len(stacked), rows, 8)
            elif rows == 16:
                z = self.buffer[: len(stacked)]
            for part, weight in enumerate(stacked):
                z[part] = x.float() @ weight[0, 0].float().T
            seen.append((x.clone(), z.clone()))
            self.writer.show(x, stacked, z, MAPPING)
            if self.overwrites and before is not None:
                before.zero_()
            before = x
        return seen


def check(writer, first, rows, seen):
    ring, layout = writer.ring, writer.ring.layout
    slots = (first + torch.arange(rows)) % ring.capacity
    found = ring.rows[slots]
    assert found[:, 3].tolist() == [rows] * rows
    for layer, (x, z) in enumerate(seen):
        assert torch.equal(layout.digests(found)[:, layer], digest_rows(x))
        assert torch.equal(
            layout.shrinks(found, layer).view(torch.int32),
            z.transpose(0, 1).contiguous().view(torch.int32),
        )
        for row in range(rows):
            kept = ring.operand(first + row, layer)
            assert torch.equal(kept.view(torch.int16), x[row].view(torch.int16))


@pytest.mark.parametrize("at_end", [True, False])
def test_captured_forwards_are_recorded(at_end):
    """The first forward teaches the layers, the second tries the size, the third is captured; rings wrap."""
    capturing = [False]
    writer = ShrinkWriter(20, 2**20, at_end=at_end, is_capturing=lambda: capturing[0])
    model = Model(writer)
    model.forward(16, 0)
    assert writer.ring is None
    first = 1
    for seed, (rows, captured) in enumerate(
        [(4, False), (4, True), (2, True), (16, False), (4, True)]
    ):
        capturing[0] = captured
        seen = model.forward(rows, seed)
        capturing[0] = False
        writer.fill_tables()
        check(writer, first, rows, seen)
        first += rows
    assert int(writer.ring.counter) == first
    assert writer.captured == [(4, at_end), (2, False), (4, at_end)]
    assert writer.at_end == ({4, 16} if at_end else set())


@pytest.mark.parametrize("fault", ["overwrites", "shares"])
def test_what_does_not_last_until_the_end_is_recorded_at_once(fault):
    """An operand that is overwritten later, shrinks of several layers in one buffer: found when the size is tried."""
    capturing = [False]
    writer = ShrinkWriter(64, 2**20, is_capturing=lambda: capturing[0])
    model = Model(writer, **{fault: True})
    model.forward(16, 0)
    check(writer, 1, 16, model.forward(16, 1))
    capturing[0] = True
    check(writer, 17, 16, model.forward(16, 2))
    assert writer.at_end == set()
    assert writer.captured == [(16, False)]


def test_another_engines_layers_are_left_alone():
    """Their weights lie elsewhere: nothing is recorded, and the counter stands."""
    writer = ShrinkWriter(64, 2**20, is_capturing=lambda: False)
    model, other = Model(writer), Model(writer)
    for seed in range(2):
        model.forward(4, seed)
    before = writer.ring.rows.clone()
    other.forward(4, 2)
    assert torch.equal(writer.ring.rows, before)
    assert int(writer.ring.counter) == 5


def test_a_forward_larger_than_the_ring_is_counted_and_not_written():
    """Its rows would overwrite one another; their numbers pass, so that they are missed."""
    writer = ShrinkWriter(8, 2**20, is_capturing=lambda: False)
    model = Model(writer)
    model.forward(4, 0)
    model.forward(12, 1)
    assert not writer.ring.rows.any()
    assert int(writer.ring.counter) == 13
    check(writer, 13, 4, model.forward(4, 2))


def test_operands_are_kept_for_a_bounded_window():
    """With memory for three rows, the latest three are there and the digest tells an overwritten one."""
    layout = RecordLayout((LayerShape(16, 1, 8),), torch.bfloat16)
    ring = Ring(layout, torch.device("cpu"), 64, 3 * 32)
    for number in range(1, 6):
        x = torch.full((1, 16), float(number)).bfloat16()
        ring.record_layer(0, x, torch.zeros(1, 1, 8), MAPPING)
        ring.advance(1)
    assert [float(ring.operand(number, 0)[0]) for number in (3, 4, 5)] == [3.0, 4.0, 5.0]
    assert float(ring.operand(2, 0)[0]) == 5.0


def test_rows_of_odd_length_are_refused():
    """A digest is over whole 64-bit words."""
    with pytest.raises(UnsupportedModelError, match="7 elements"):
        RecordLayout((LayerShape(7, 1, 8),), torch.bfloat16)
