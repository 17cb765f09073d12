"""What a recorder writes is what ran, and a recording that would mislead ends with the reason."""

from __future__ import annotations

import contextlib
import dataclasses
import gc

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fliptrace.capture.arena import Arena, Slot
from fliptrace.capture.cache_digest import RollingCacheDigest, cache_row_digests
from fliptrace.capture.decoding import generate
from fliptrace.capture.engine import CacheLayer
from fliptrace.capture.observer_control import observer_control
from fliptrace.capture.recorder import CACHE_CHECK_STEPS, Recorder, RecorderOptions
from fliptrace.capture.step_capture import ArenaCapture, CaptureKeys, RowsCapture
from fliptrace.errors import RecordingError
from fliptrace.manifest import Manifest
from fliptrace.numerics.digest import digest_hex, digest_rows, digest_tensor
from fliptrace.store import TraceWriter
from fliptrace.trace import Closing, Kind

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_bits(shape, dtype, generator):
    """Tensors of any bit pattern: NaN, infinities and subnormals are records like others."""
    width = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    limits = torch.iinfo(width)
    return torch.randint(limits.min, limits.max, shape, dtype=width, generator=generator).view(
        dtype
    )


def frames_equal(first, second):
    assert [frame.kind for frame in first] == [frame.kind for frame in second]
    for one, other in zip(first, second, strict=True):
        assert one.layout == other.layout, one.kind
        assert bytes(one.payload) == bytes(other.payload), one.kind
        if one.digests is None or other.digests is None:
            assert one.digests is None
            assert other.digests is None
        else:
            assert torch.equal(one.digests, other.digests), one.kind


@settings(max_examples=60, deadline=None)
@given(
    slots=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 7), min_size=1, max_size=3)),
        min_size=1,
        max_size=9,
    ),
    seed=st.integers(0, 2**31),
)
def test_arena_digests_are_digest_rows(slots, seed):
    """One pass over all slots gives the digests that the specification gives one by one, padding or not."""
    generator = torch.Generator().manual_seed(seed)
    arena = Arena([Slot((1, *shape), dtype) for dtype, shape in slots], torch.device("cpu"))
    for _ in range(2):  # the second round must not see anything of the first
        tensors = [random_bits((1, *shape), dtype, generator) for dtype, shape in slots]
        for slot, tensor in zip(arena.slots, tensors, strict=True):
            slot.copy_(tensor)
        expected = torch.cat([digest_rows(tensor) for tensor in tensors])
        assert torch.equal(arena.digests(), expected)


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    heads=st.integers(1, 3),
    head_dim=st.integers(1, 9),
    width=st.integers(1, 21),
    vocabulary=st.integers(2, 90),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    operands=st.booleans(),
    shared=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_both_captures_give_the_same_frames(
    ranks, heads, head_dim, width, vocabulary, dtype, operands, shared, seed
):
    """Capture through the buffer equals plain capture byte by byte, digests and layouts included."""
    generator = torch.Generator().manual_seed(seed)
    keys = CaptureKeys(tuple(f"site{number}" for number in range(len(ranks))), (0, 3))
    plain = RowsCapture(keys, operands=operands)
    report_step(plain, keys, ranks, heads, head_dim, width, vocabulary, dtype, shared, generator)
    buffered = ArenaCapture(keys, plain.slots, torch.device("cpu"), operands=operands, buffers=4)
    launches = [f"launch {number}" for number in range(len(ranks))]
    for step in range(1, 4):
        state = generator.get_state()
        plain = RowsCapture(keys, operands=operands)
        first = report_step(
            plain, keys, ranks, heads, head_dim, width, vocabulary, dtype, shared, generator
        )
        generator.set_state(state)
        second = report_step(
            buffered, keys, ranks, heads, head_dim, width, vocabulary, dtype, shared, generator
        )
        assert torch.equal(first.cache_row_digests, second.cache_row_digests)
        frames_equal(first.frames(step, launches), second.frames(step, launches))


def report_step(capture, keys, ranks, heads, head_dim, width, vocabulary, dtype, shared, generator):
    """Report one decode step; with ``shared`` all sites read one operand, like q, k and v."""
    common = random_bits((1, 1, width), dtype, generator)
    for layer in keys.cache_layers:
        capture.cache_rows(
            layer, *(random_bits((heads, 1, head_dim), dtype, generator) for _ in range(2))
        )
    for site, rank in enumerate(ranks):
        operand = common if shared else random_bits((1, 1, width), dtype, generator)
        capture.shrink(site, operand, random_bits((1, rank), torch.float32, generator))
        capture.projection(site, random_bits((1, 1, width + 1), dtype, generator))
    values = torch.randn(vocabulary, generator=generator)
    values = torch.linspace(-3, 3, vocabulary)[values.argsort()].to(
        dtype
    )  # topk may order exact ties as it likes
    return capture.finish(values)


def test_records_digests_match_records(engine, tiny, record):
    """The digests written beside each record are those of its bytes, in the prefill and in decode steps."""
    trace, _ = record(engine, tiny.prompt_ids(9), tokens=4)
    for step in range(4):
        for kind in (Kind.SHRINK, Kind.CACHE):
            frame = trace.frame(step, kind)
            for number in range(len(frame.layout.entries)):
                assert torch.equal(frame.digests[number], digest_tensor(frame.tensor(number)))


def test_live_steps_are_the_same_both_ways(engine, tiny, record, monkeypatch):
    """A whole generation recorded through the buffer equals one recorded tensor by tensor."""
    prompt = tiny.prompt_ids(9)
    buffered, _ = record(engine, prompt, tokens=5, operands=True)
    monkeypatch.setattr(Recorder, "begin_step", plain_begin())
    plain, _ = record(engine, prompt, tokens=5, operands=True)
    for before, after in zip(buffered.steps, plain.steps, strict=True):
        assert before == after
        frames_equal(
            [buffered.frame(before.step, Kind(kind)) for kind in before.frames],
            [plain.frame(after.step, Kind(kind)) for kind in after.frames],
        )


def plain_begin():
    original = Recorder.begin_step

    def begin(self, step, first_position, token_ids):
        original(self, step, first_position, token_ids)
        self._capture = RowsCapture(self._keys, operands=self.options.operands)

    return begin


def test_records_are_copies(engine, tiny, record):
    """Tensors changed in place right after the hooks do not change what was recorded."""
    prompt = tiny.prompt_ids(6)
    clean, _ = record(engine, prompt, tokens=3)
    seen = []

    def spoil(module, arguments, output):
        seen.append(output)

    def wreck(module, arguments, output):
        for tensor in seen:
            tensor.fill_(float("nan"))  # the FP32 shrinks, after expand has used them
        seen.clear()

    with contextlib.ExitStack() as stack:

        class After(contextlib.AbstractContextManager):
            def __enter__(self):
                for _, layer in engine._layers:
                    (name,) = layer.lora_A
                    stack.callback(layer.lora_A[name].shrink.register_forward_hook(spoil).remove)
                    stack.callback(layer.register_forward_hook(wreck).remove)

            def __exit__(self, *reason):
                return None

        spoiled, _ = record(engine, prompt, tokens=3, during=After())
    for step in range(3):
        for kind in (Kind.SHRINK, Kind.CACHE, Kind.OPERAND, Kind.PROJECTION):
            assert bytes(clean.frame(step, kind).payload) == bytes(
                spoiled.frame(step, kind).payload
            )


@pytest.mark.parametrize("rows", [1, 4])
def test_an_operand_changed_in_place_is_digested_again(rows):
    """q and k share one tensor object; when it was modified between them, k's digest is that of the new bits."""
    keys = CaptureKeys(("q", "k", "v"), ())
    x = torch.randn(1, rows, 8).bfloat16()
    capture = RowsCapture(keys, operands=False)
    slots_source = RowsCapture(keys, operands=False)
    for site in range(3):
        slots_source.shrink(site, x[:, :1], torch.zeros(1, 2))
        slots_source.projection(site, x[:, :1])
    slots_source.finish(torch.zeros(5))
    captures = [capture]
    if rows == 1:
        captures.append(
            ArenaCapture(keys, slots_source.slots, torch.device("cpu"), operands=False, buffers=2)
        )
    for one in captures:
        tensor = x.clone()
        expected = []
        for site in range(3):
            if site == 1:
                tensor[0, 0, 3] += 1
            one.shrink(site, tensor, torch.zeros(rows, 2))
            one.projection(site, tensor)
            expected.append(digest_rows(tensor[0]))
        frame = next(
            f for f in one.finish(torch.zeros(5)).frames(0, [""] * 3) if f.kind is Kind.OPERAND
        )
        for site in range(3):
            assert torch.equal(frame.tensor(site), expected[site])
        assert not torch.equal(frame.tensor(0), frame.tensor(1))
        assert torch.equal(frame.tensor(1), frame.tensor(2))


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    window=st.integers(2, 9),
    seed=st.integers(0, 2**31),
)
def test_rolling_digest_is_that_of_the_whole_cache(steps, window, seed):
    """Adding step by step equals digesting everything at once, and checks pass with and without a window."""
    generator = torch.Generator().manual_seed(seed)
    rolling = RollingCacheDigest((0, 2), torch.device("cpu"))
    rolling.watch_windows({0: None, 2: window})
    whole = RollingCacheDigest((0, 2), torch.device("cpu"))
    values = {layer: torch.zeros((2, 0, 1, 4), dtype=torch.bfloat16) for layer in (0, 2)}
    position = 0
    for number, count in enumerate(steps):
        new = {layer: random_bits((2, count, 1, 4), torch.bfloat16, generator) for layer in (0, 2)}
        rolling.add(torch.stack([cache_row_digests(new[layer]) for layer in (0, 2)]), position)
        position += count
        values = {layer: torch.cat((values[layer], new[layer]), dim=1) for layer in (0, 2)}
        kept = min(position, window - 1)
        content = [
            CacheLayer(0, values[0], 0, None),
            CacheLayer(2, values[2][:, position - kept :], position - kept, window),
        ]
        if number % 2 == 0:
            rolling.check(content, number)
    whole.add(torch.stack([cache_row_digests(values[layer]) for layer in (0, 2)]), 0)
    assert torch.equal(rolling.value, whole.value)
    assert rolling.check(content, 9) == digest_hex(whole.value)
    content[1].values[1, -1, 0, 2] = (
        content[1].values[1, -1, 0, 2].view(torch.int16).add(1).view(torch.bfloat16)
    )
    with pytest.raises(RecordingError, match="after step 9 the cache of layer 2"):
        rolling.check(content, 9)


def test_equal_rows_at_other_positions_and_layers_are_told_apart():
    """The digest binds rows to K or V, layer and position."""
    two = digest_rows(torch.arange(16.0).view(4, 4)).view(1, 2, 2, 2)
    values = set()
    for layer, order, first in (
        (0, two, 0),
        (1, two, 0),
        (0, two.flip(1), 0),
        (0, two.flip(2), 0),
        (0, two, 1),
    ):
        rolling = RollingCacheDigest((layer,), torch.device("cpu"))
        rolling.add(order, first)
        values.add(digest_hex(rolling.value))
    assert len(values) == 5


def test_full_digest_is_written_at_the_prefill_and_every_64_steps(engine, tiny, record):
    """Where it is due it equals the rolling one."""
    trace, _ = record(engine, tiny.prompt_ids(12), tokens=CACHE_CHECK_STEPS + 2)
    due = {step.step for step in trace.steps if step.cache_digest_full}
    assert due == {0, CACHE_CHECK_STEPS}
    assert all(
        step.cache_digest == step.cache_digest_full for step in trace.steps if step.step in due
    )
    assert len({step.cache_digest for step in trace.steps}) == len(trace.steps)


class TamperAt:
    """Calls something with the engine right before a step."""

    def __init__(self, engine, step, action):
        self.engine, self.step, self.action = engine, step, action

    def __enter__(self):
        original = self.original = self.engine.step

        def stepping(token_id=None):
            if self.engine.step_number == self.step:
                self.action(self.engine)
            return original(token_id)

        self.engine.step = stepping

    def __exit__(self, *reason):
        del self.engine.step


@pytest.mark.parametrize("which", ["keys", "values"])
def test_a_cache_changed_in_place_is_detected(llama, tiny, record, which):
    """One bit of one cached element, changed between two steps, ends the recording at the next check."""

    def tamper(engine):
        rows = getattr(engine._cache.layers[1], which)
        rows.view(torch.int16)[0, 0, 3, 5] ^= 1

    with pytest.raises(RecordingError, match=r"cache of layer 1.*changed it in place"):
        record(llama, tiny.prompt_ids(6), tokens=70, during=TamperAt(llama, 20, tamper))


def test_a_cache_changed_after_the_last_check_is_detected(llama, tiny, record):
    """The check at the end catches what happened since the last of the regular ones."""

    def tamper(engine):
        engine._cache.layers[1].keys.add_(1)

    with pytest.raises(RecordingError, match=r"cache of layer 1.*changed it in place"):
        record(llama, tiny.prompt_ids(6), tokens=5, during=TamperAt(llama, 3, tamper))


def test_a_cache_changed_in_a_window_is_detected(gemma, tiny, record):
    """In a sliding layer, too, while the row is still in the window."""

    def tamper(engine):
        engine._cache.layers[0].keys.add_(1)

    with pytest.raises(RecordingError, match="cache of layer 0"):
        record(
            gemma, tiny.prompt_ids(6), tokens=70, during=TamperAt(gemma, CACHE_CHECK_STEPS, tamper)
        )


@pytest.mark.parametrize("step", [0, 2])
def test_a_disabled_adapter_is_noticed(llama, tiny, record, step):
    """PEFT skips the shrink of a disabled layer: the site is named."""
    path, layer = llama._layers[9]
    try:
        with pytest.raises(
            RecordingError, match=r"layer 1 self_attn\.v_proj reported no shrink in step"
        ):
            record(
                llama,
                tiny.prompt_ids(6),
                during=TamperAt(llama, step, lambda engine: layer.enable_adapters(False)),
            )
    finally:
        layer.enable_adapters(True)
    assert path.endswith("layers.1.self_attn.v_proj")


def test_a_removed_hook_is_noticed(llama, tiny, record):
    """A hook that someone else took off is an error, not an empty record."""
    _, layer = llama._layers[13]
    with pytest.raises(
        RecordingError, match=r"layer 1 mlp\.down_proj reported no projection in step 2.*20 of 21"
    ):
        record(
            llama,
            tiny.prompt_ids(6),
            during=TamperAt(llama, 2, lambda engine: layer._forward_hooks.clear()),
        )


def test_a_silent_shrink_is_noticed(llama, tiny, record):
    """A shrink that ran without telling the observer is an error, not an empty record."""
    shrink = llama._shrinks[13]
    runtime = shrink.runtime

    def silence(engine):
        shrink.runtime = dataclasses.replace(runtime, observer=None)

    try:
        with pytest.raises(
            RecordingError, match=r"layer 1 mlp\.down_proj reported no shrink in step 2.*20 of 21"
        ):
            record(llama, tiny.prompt_ids(6), during=TamperAt(llama, 2, silence))
    finally:
        shrink.runtime = runtime


def test_a_bypassed_cache_is_noticed(llama, tiny, record):
    """A cache that no longer reports is named by its layer."""
    with pytest.raises(RecordingError, match="layer 0 cached no rows in step 3"):
        record(
            llama,
            tiny.prompt_ids(6),
            during=TamperAt(llama, 3, lambda engine: setattr(engine._cache, "observer", None)),
        )


def test_a_site_that_reports_twice_is_noticed(llama, tiny, record):
    """Running a LoRA layer twice within a step ends the recording."""
    _, layer = llama._layers[2]
    original = layer.forward

    def twice(x):
        layer.lora_A["default"](x)
        return original(x)

    layer.forward = twice
    try:
        with pytest.raises(
            RecordingError, match=r"layer 0 self_attn\.v_proj reported two shrinks in step 0"
        ):
            record(llama, tiny.prompt_ids(6))
    finally:
        del layer.forward


@pytest.mark.parametrize("step", [0, 2])
def test_nan_logits_end_the_recording(llama, tiny, record, step):
    """NaN is reported with its step; the trace keeps the steps before it."""

    def nan(site, operand, z):
        return z * float("nan") if llama.step_number == step and site == 20 else z

    with pytest.raises(RecordingError, match=f"step {step}: the logits hold NaN"):
        record(llama, tiny.prompt_ids(6), during=llama.intercepted(nan))


def test_a_report_outside_a_step_is_refused(llama, tmp_path):
    """Nothing is recorded before the engine has begun a step."""
    with TraceWriter(tmp_path / "t.trace", Manifest({})) as writer:
        recorder = Recorder(llama, writer, RecorderOptions())
        with pytest.raises(RecordingError, match="outside a step"):
            recorder.cache_rows(0, torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
        writer.close(Closing(False, "test", 0))


def test_a_recording_begins_with_the_prefill(llama, tiny, tmp_path):
    """A recorder that comes late has not seen the cache being written, and says so."""
    llama.start(tiny.prompt_ids(5))
    llama.step()
    with TraceWriter(tmp_path / "late.trace", Manifest({})) as writer:
        recorder = Recorder(llama, writer, RecorderOptions())
        with (
            llama.observed(recorder),
            pytest.raises(RecordingError, match=r"begins with the prefill.*step 1 came first"),
        ):
            llama.step(5)


def test_redaction_hides_ids_and_keeps_them_comparable(llama, tiny, record):
    """Ids become keyed hashes: equal under one key, different under another, and no whole logits are kept."""
    prompt = tiny.prompt_ids(6)
    plain, execution = record(llama, prompt, full_logits=True)
    first, _ = record(llama, prompt, redaction_key=b"key", full_logits=True)
    second, _ = record(llama, prompt, redaction_key=b"key")
    other, _ = record(llama, prompt, redaction_key=b"another")
    assert plain.generated_ids == list(execution.token_ids)
    assert first.generated_ids == second.generated_ids
    assert not set(first.generated_ids) & set(other.generated_ids)
    mapping = dict(zip(plain.generated_ids, first.generated_ids, strict=True))
    assert len(mapping) == len(set(mapping.values()))
    for step in first.steps:
        assert min((*step.token_ids, *step.top_ids, step.chosen)) > 2**20
        assert step.top_ids[0] == step.chosen
        assert first.frame(step.step, Kind.LOGITS_FULL) is None
        ids = first.record("logits", Kind.LOGITS_TOP_IDS, step.step)
        assert int(ids[0]) == step.chosen
        assert int(ids.min()) > 2**20
    assert first.steps[1].token_ids == (first.steps[0].chosen,)


def test_full_logits_are_kept_on_request_and_near_ties(llama, tiny, record):
    """On request every step has them; their digest is the recorded one, and the top list agrees."""
    trace, _ = record(llama, tiny.prompt_ids(6), tokens=3, full_logits=True)
    for step in range(3):
        full = trace.record("logits", Kind.LOGITS_FULL, step)
        assert full.shape == (320,)
        assert torch.equal(
            digest_rows(full.unsqueeze(0)), trace.record("logits", Kind.LOGITS_DIGEST, step)
        )
        top, ids = (
            trace.record("logits", Kind.LOGITS_TOP, step),
            trace.record("logits", Kind.LOGITS_TOP_IDS, step),
        )
        assert torch.equal(full[ids], top)
        assert int(ids[0]) == trace.steps[step].chosen
    lean, _ = record(llama, tiny.prompt_ids(6), tokens=3)
    near = [step.step for step in lean.steps if step.margin <= 0.02]
    kept = [step.step for step in lean.steps if str(Kind.LOGITS_FULL) in step.frames]
    assert set(near) <= set(kept)


def test_whole_operands_match_their_digests(llama, tiny, record):
    """With operands kept, each row's digest is that of the row."""
    trace, _ = record(llama, tiny.prompt_ids(6), tokens=3, operands=True)
    for step in range(3):
        values, digests = trace.frame(step, Kind.OPERAND_VALUES), trace.frame(step, Kind.OPERAND)
        for number in range(21):
            assert torch.equal(digest_rows(values.tensor(number)), digests.tensor(number))


@pytest.mark.parametrize(
    ("reduction", "seed"), [("unsplit", None), ("deterministic:8", None), ("atomic:8", 7)]
)
@pytest.mark.parametrize("modules", [False, True])
def test_recording_changes_nothing(engine, tiny, record, reduction, seed, modules):
    """Tokens and logits digests of a recorded run are those of an unrecorded one."""
    engine.set_reduction(reduction, seed)
    prompt = tiny.prompt_ids(9)
    digests = []
    plain = generate(
        engine,
        prompt,
        max_new_tokens=4,
        end_ids=(),
        on_choice=lambda step, choice, logits: digests.append(digest_rows(logits.unsqueeze(0))),
    )
    trace, execution = record(engine, prompt, tokens=4, modules=modules)
    assert execution == plain
    for step in range(4):
        assert torch.equal(trace.record("logits", Kind.LOGITS_DIGEST, step), digests[step])
    assert "recorded and unrecorded" in observer_control(
        engine, prompt, end_ids=(), options=RecorderOptions(modules=modules), steps=3
    )


def test_memory_does_not_grow_with_the_trace(tiny, tmp_path):
    """From 64 to 512 generated tokens the process grows by less than the buffers' fixed size would explain."""
    from fliptrace.capture.transformers_engine import TransformersEngine, load_model

    configuration = tiny.llama_configuration(
        max_position_embeddings=1024, hidden_size=64, intermediate_size=64
    )
    model = tiny.write_model(tmp_path / "model", configuration)
    adapter = tiny.write_adapter(tmp_path / "adapter", model)
    engine = TransformersEngine(load_model(str(model), str(adapter), device="cpu"))
    process = psutil.Process()
    marks = {}

    with TraceWriter(tmp_path / "long.trace", Manifest({})) as writer:
        recorder = Recorder(engine, writer, RecorderOptions())

        def complete(step, choice, logits):
            recorder.complete_step(step, choice, logits)
            if step in (64, 511):
                gc.collect()
                marks[step] = process.memory_info().rss, recorder_bytes(recorder)

        with engine.observed(recorder):
            generate(engine, tiny.prompt_ids(8), max_new_tokens=512, end_ids=(), on_choice=complete)
        writer.close(Closing(True, "max new tokens", 512))
    assert marks[511][1] == marks[64][1]
    assert marks[511][0] - marks[64][0] < 6 * 2**20


def recorder_bytes(recorder):
    """Bytes of all tensors that a recorder and its parts hold."""
    seen, stack, total = (
        set(),
        [recorder._arena, recorder._rolling, recorder._operations, recorder._launches],
        0,
    )
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            total += item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif hasattr(item, "__dict__"):
            stack.extend(vars(item).values())
    return total
