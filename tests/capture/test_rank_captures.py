"""What ranks export, joined: the frames are those of one capture over all sites and whole caches. No vLLM needed."""

from __future__ import annotations

import pytest
import torch

from fliptrace.capture.arena import ArenaSlots, Slot
from fliptrace.capture.cache_digest import RollingCacheDigest
from fliptrace.capture.engine import CacheLayer
from fliptrace.capture.step_capture import ArenaCapture, CaptureKeys
from fliptrace.capture.vllm_engine.tensor_parallel.captures import RanksCapture
from fliptrace.capture.vllm_engine.tensor_parallel.layout import (
    joined_cache,
    sites_of,
    split_cache,
)
from fliptrace.capture.vllm_engine.tensor_parallel.messages import pack, unpack
from fliptrace.errors import InputError, RecordingError
from fliptrace.numerics import integer_view

CPU = torch.device("cpu")
SITES = ("layers.0.qkv[q]", "layers.0.qkv[k]", "layers.0.down")
LAYERS = (0, 3)
#: Odd sizes pad words; site 1 reads the operand of site 0.
RANK, KEYS = 5, (7, 7, 9)
SOURCES = (0, 0, 2)
HEADS, WIDTH, VOCABULARY = 2, 6, 99


def slots_of(sites, heads):
    """The slots of a decode step over this many sites of each kind."""
    slots = ArenaSlots()
    for site in range(sites):
        kind = site * len(SITES) // sites
        slots.shrinks[site] = Slot((1, RANK), torch.float32)
        slots.operands[site] = Slot((1, 1, KEYS[kind]), torch.bfloat16)
        slots.projections[site] = Slot((1, 1, 11), torch.bfloat16)
    for layer in LAYERS:
        slots.caches[layer] = Slot((heads, 1, WIDTH), torch.bfloat16)
    slots.logits = Slot((VOCABULARY,), torch.bfloat16)
    return slots


def a_step(generator, ranks):
    """Random records of every rank, and logits that all share."""

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator).to(dtype)

    return [
        {
            "shrinks": [normal(1, RANK, dtype=torch.float32) for _ in SITES],
            "operands": [normal(1, 1, KEYS[SOURCES[site]]) for site in range(len(SITES))],
            "projections": [normal(1, 1, 11) for _ in SITES],
            "caches": [(normal(HEADS, 1, WIDTH), normal(HEADS, 1, WIDTH)) for _ in LAYERS],
        }
        for _ in range(ranks)
    ], normal(VOCABULARY)


def report(capture, records, number):
    """Tell a capture of one rank's records; ``number`` turns a site into the capture's."""
    for site in range(len(SITES)):
        operand = records["operands"][SOURCES[site]]
        capture.shrink(number(site), operand, records["shrinks"][site])
        capture.projection(number(site), records["projections"][site])


@pytest.mark.parametrize("operands", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_joined_exports_are_one_capture(ranks, operands):
    """Three steps: payloads, layouts, digests of records and of the whole cache, bit by bit."""
    generator = torch.Generator().manual_seed(ranks)
    paths = tuple(site.path for site in sites_of(SITES, ranks))
    keys, own_keys = CaptureKeys(paths, LAYERS), CaptureKeys(SITES, LAYERS)
    slots = slots_of(len(paths), HEADS * ranks)
    assert RanksCapture.fits(slots, ranks)
    joined = RanksCapture(keys, slots, CPU, operands=operands, buffers=4, ranks=ranks)
    whole = ArenaCapture(keys, slots, CPU, operands=operands, buffers=4)
    parts = [
        ArenaCapture(own_keys, slots_of(len(SITES), HEADS), CPU, operands=operands, buffers=1)
        for _ in range(ranks)
    ]
    rolling = [RollingCacheDigest(LAYERS, CPU) for _ in range(2)]
    finished = []
    for step in range(1, 4):
        records, logits = a_step(generator, ranks)
        exports = []
        for rank, part in enumerate(parts):
            report(part, records[rank], lambda site: site)
            for number, layer in enumerate(LAYERS):
                part.cache_rows(layer, *records[rank]["caches"][number])
            exports.append(bytes(part.transfer(logits).whole.view(torch.uint8).numpy()))
            report(whole, records[rank], lambda site, rank=rank: site * ranks + rank)
        for number, layer in enumerate(LAYERS):
            rows = [
                torch.cat([each["caches"][number][half] for each in records]) for half in (0, 1)
            ]
            whole.cache_rows(layer, *rows)
        joined.received(exports, [SOURCES] * ranks)
        launches = [f"launch {site}" for site in range(len(paths))]
        finished.append(
            [
                (capture.finish(logits, _roll(own, step)), launches, step)
                for capture, own in ((joined, rolling[0]), (whole, rolling[1]))
            ]
        )
    for pair in finished:
        one, other = (
            (_frames(captured.frames(step, launches)), captured.cache_digest().tolist())
            for captured, launches, step in pair
        )
        assert one == other
    assert torch.equal(rolling[0].value, rolling[1].value)


def _roll(rolling, position):
    def roll(row_digests):
        rolling.add(row_digests, position)
        return rolling.value

    return roll


def _frames(frames):
    return [
        (
            frame.step,
            frame.kind,
            frame.layout,
            bytes(frame.payload),
            None if frame.digests is None else frame.digests.tolist(),
        )
        for frame in frames
    ]


def test_a_changed_word_of_one_rank_is_seen():
    """The comparison above can fail: one bit of one rank's export is another frame."""
    paths = tuple(site.path for site in sites_of(SITES, 2))
    slots = slots_of(len(paths), HEADS * 2)
    found = []
    for flip in (0, 1):
        generator = torch.Generator().manual_seed(5)
        capture = RanksCapture(
            CaptureKeys(paths, LAYERS), slots, CPU, operands=False, buffers=4, ranks=2
        )
        records, logits = a_step(generator, 2)
        exports = []
        for rank in range(2):
            part = ArenaCapture(
                CaptureKeys(SITES, LAYERS),
                slots_of(len(SITES), HEADS),
                CPU,
                operands=False,
                buffers=1,
            )
            report(part, records[rank], lambda site: site)
            for number, layer in enumerate(LAYERS):
                part.cache_rows(layer, *records[rank]["caches"][number])
            words = part.transfer(logits).whole.clone()
            if rank:
                words[-1] ^= flip
            exports.append(bytes(words.view(torch.uint8).numpy()))
        capture.received(exports, [SOURCES] * 2)
        found.append(_frames(capture.finish(logits).frames(1, ["launch"] * len(paths))))
    assert found[0] != found[1]


def test_heads_that_fill_no_words_are_not_joined_so():
    """Then decode steps are told record by record."""
    slots = slots_of(6, 4)
    slots.caches[0] = Slot((2, 1, 3), torch.bfloat16)
    assert not RanksCapture.fits(slots, 2)


def test_caches_are_split_and_joined():
    """Heads of rank 0, then of rank 1; what does not divide, or lies elsewhere, is refused."""
    values = torch.randn(2, 5, 6, 4).bfloat16()
    content = [CacheLayer(1, values, 3, None), CacheLayer(2, values + 1, 3, 8)]
    parts = split_cache(content, 3)
    assert [each.values.shape for each in parts[2]] == [(2, 5, 2, 4)] * 2
    for before, after in zip(content, joined_cache(parts), strict=True):
        assert torch.equal(integer_view(before.values), integer_view(after.values))
        assert (before.layer, before.first_position, before.window) == (
            after.layer,
            after.first_position,
            after.window,
        )
    with pytest.raises(InputError, match="heads of 4 ranks"):
        split_cache(content, 4)
    moved = [CacheLayer(1, values, 4, None), content[1]]
    with pytest.raises(RecordingError, match="layer 1"):
        joined_cache([content, moved])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_tensors_travel_bit_by_bit(dtype):
    """NaN payloads and negative zeros, too; what arrives can be written to."""
    sent = torch.randint(-(2**15), 2**15, (3, 4)).to(torch.int64).view(torch.int16).view(-1)
    sent = sent[: 4 * dtype.itemsize].clone().view(dtype)
    got = unpack(pack(sent.view(2, -1)))
    assert got.dtype == dtype
    assert got.shape == (2, sent.numel() // 2)
    assert torch.equal(integer_view(got.view(-1)), integer_view(sent))
    got.zero_()
    assert unpack(pack(torch.empty(2, 0, dtype=dtype))).shape == (2, 0)
