"""Recurrent state on transformers: recorded whole at every step, restored bit by bit, refused where it does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fliptrace.capture.engine import StateTensor
from fliptrace.capture.transformers_engine import TransformersEngine, load_model
from fliptrace.errors import InputError, RecordingError
from fliptrace.numerics import digest_tensor, integer_view
from fliptrace.trace import Kind

PROMPT = tuple(range(5, 29))
KEYS = ((0, "conv"), (0, "ssm"), (3, "conv"), (3, "ssm"))

pytestmark = pytest.mark.filterwarnings("ignore")


def equal(one, other):
    return torch.equal(integer_view(one), integer_view(other))


def made(tiny, folder, configuration, targets, **settings):
    """Write a model and an adapter, and load both."""
    model = tiny.write_model(folder / "model", configuration)
    adapter = tiny.write_adapter(folder / "adapter", model, target_modules=list(targets))
    return TransformersEngine(load_model(str(model), str(adapter), device="cpu", **settings))


@pytest.fixture(scope="module")
def hybrid(tiny, tmp_path_factory):
    """Nemotron-H: Mamba-2, attention, MLP, Mamba-2."""
    folder = tmp_path_factory.mktemp("hybrid")
    return made(tiny, folder, tiny.nemotron_configuration(), tiny.HYBRID_PROJECTIONS)


def run(engine, count):
    """Step greedily; per step what was kept before it, then the tokens and the logits."""
    before, tokens, logits = [], [], []
    engine.start(PROMPT)
    for _ in range(count):
        before.append((engine.read_cache(), engine.read_state()))
        logits.append(engine.step(tokens[-1] if tokens else None))
        tokens.append(int(logits[-1].argmax()))
    return before, tokens, logits


def test_what_is_kept_is_named(hybrid):
    """Two tensors per Mamba layer, the state proper in FP32; the attention layer has rows."""
    assert hybrid.state_keys == KEYS
    assert hybrid.cache_layers == (1,)
    assert hybrid.describe()["engine"]["state_layers"] == [0, 3]
    hybrid.start(PROMPT)
    assert hybrid.read_state() == ()
    hybrid.step()
    found = {(state.layer, state.name): state.values for state in hybrid.read_state()}
    assert tuple(found) == KEYS
    assert found[0, "conv"].shape == (320, 4)
    assert found[0, "conv"].dtype is torch.bfloat16
    assert found[3, "ssm"].shape == (8, 32, 16)
    assert found[3, "ssm"].dtype is torch.float32


def test_every_step_can_be_restarted(hybrid):
    """From rows and states read before a step, after another prompt ran: all later logits have the same bits."""
    before, tokens, logits = run(hybrid, 7)
    for step in range(1, 7):
        hybrid.start((9, 8, 7))
        hybrid.step()
        hybrid.write_cache(before[step][0], step, before[step][1])
        for now, then in zip(hybrid.read_state(), before[step][1], strict=True):
            assert equal(now.values, then.values)
        for later in range(step, 7):
            assert equal(hybrid.step(tokens[later - 1]), logits[later]), (step, later)


def test_states_are_copies(hybrid):
    """Changing what was read changes nothing, and what is written is not aliased."""
    before, tokens, logits = run(hybrid, 4)
    hybrid.write_cache(before[3][0], 3, before[3][1])
    for state in (*hybrid.read_state(), *before[3][1]):
        state.values.zero_()
    assert equal(hybrid.step(tokens[2]), logits[3])


def test_a_changed_state_changes_what_follows(hybrid):
    """The state is used: with that of another step, the logits differ."""
    before, tokens, logits = run(hybrid, 4)
    hybrid.write_cache(before[3][0], 3, before[2][1])
    assert not equal(hybrid.step(tokens[2]), logits[3])


def test_a_recording_holds_every_state(hybrid, record):
    """The record of a step is the state that it left, with its digest; recording changes nothing."""
    before, tokens, _ = run(hybrid, 6)
    trace, execution = record(hybrid, PROMPT, tokens=6)
    assert list(execution.token_ids) == tokens
    for step in range(5):
        frame = trace.frame(step, Kind.STATE)
        for number, state in enumerate(before[step + 1][1]):
            assert frame.layout.entries[number].key == state.key
            assert equal(frame.tensor(state.key), state.values)
            assert torch.equal(frame.digests[number], digest_tensor(state.values))


def test_modules_are_recorded_beside_it(hybrid, record):
    """Digests around every operation, in-place updates of the state included, and the same states."""
    plain, _ = record(hybrid, PROMPT, tokens=3)
    watched, _ = record(hybrid, PROMPT, tokens=3, modules=True)
    for step in range(3):
        one, other = (trace.frame(step, Kind.STATE).payload for trace in (plain, watched))
        assert bytes(one) == bytes(other)
    assert watched.frame(2, Kind.OPERATION_OUTPUT) is not None


def test_a_state_that_is_not_there_ends_the_recording(hybrid, record, monkeypatch):
    """A layer whose state is missing is an error, not a hole."""
    whole = hybrid.read_state
    monkeypatch.setattr(hybrid, "read_state", lambda: whole()[:-1])
    with pytest.raises(RecordingError, match="a layer did not run"):
        record(hybrid, PROMPT, tokens=2)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda states: states[1:], "none twice"),
        (lambda states: [*states, states[0]], "none twice"),
        (lambda states: [], "none twice"),
        (lambda states: [replace(states[0], layer=1), *states[1:]], "none twice"),
        (lambda states: [replace(states[0], values=states[0].values[:3]), *states[1:]], "needs"),
        (
            lambda states: [replace(states[0], values=states[0].values.float()), *states[1:]],
            "needs",
        ),
    ],
    ids=["missing", "twice", "none", "another layer", "another shape", "another dtype"],
)
def test_states_that_do_not_fit_are_refused(hybrid, spoil, said):
    """Nothing is written then."""
    before, tokens, logits = run(hybrid, 3)
    content, states = before[2]
    hybrid.write_cache(content, 2, states)
    with pytest.raises(InputError, match=said):
        hybrid.write_cache(content, 2, spoil(list(states)))
    assert equal(hybrid.step(tokens[1]), logits[2])


def test_a_model_without_state_takes_none(llama):
    """An attention model has no state, and refuses one."""
    assert llama.state_keys == ()
    llama.start(PROMPT)
    llama.step()
    assert llama.read_state() == ()
    with pytest.raises(InputError, match="none twice"):
        llama.write_cache(llama.read_cache(), 1, [StateTensor(0, "ssm", torch.zeros(2))])


def test_a_convolution_alone_is_a_state(tiny, tmp_path, record):
    """LFM2 keeps the last inputs of its convolutions and no more."""
    from transformers import Lfm2Config

    configuration = Lfm2Config(
        vocab_size=tiny.VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["full_attention", "conv"],
    )
    engine = made(tiny, tmp_path, configuration, ["q_proj", "v_proj"])
    assert engine.state_keys == ((1, "conv"),)
    before, tokens, logits = run(engine, 4)
    engine.start((5,))
    engine.write_cache(before[2][0], 2, before[2][1])
    assert equal(engine.step(tokens[1]), logits[2])
    trace, _ = record(engine, PROMPT, tokens=3)
    assert [entry.key for entry in trace.frame(2, Kind.STATE).layout.entries] == ["state.1.conv"]


def test_both_kinds_in_one_layer(tiny, tmp_path):
    """Falcon-H1 runs attention and Mamba-2 side by side: the layer keeps rows and a state."""
    from transformers import FalconH1Config

    configuration = FalconH1Config(
        vocab_size=tiny.VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_chunk_size=16,
    )
    engine = made(tiny, tmp_path, configuration, ["q_proj", "v_proj", "in_proj"])
    assert engine.cache_layers == (0, 1)
    assert engine.state_keys == ((0, "conv"), (0, "ssm"), (1, "conv"), (1, "ssm"))
    before, tokens, logits = run(engine, 4)
    engine.start((5,))
    engine.write_cache(before[2][0], 2, before[2][1])
    assert equal(engine.step(tokens[1]), logits[2])
    assert equal(engine.step(tokens[2]), logits[3])


def test_a_model_of_state_alone_is_recorded(tiny, tmp_path, record):
    """Mamba has no rows; its states are recorded, and nothing else of a cache."""
    from transformers import MambaConfig

    configuration = MambaConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2
    )
    engine = made(tiny, tmp_path, configuration, ["in_proj"], attention="eager")
    assert engine.cache_layers == ()
    trace, _ = record(engine, PROMPT, tokens=3)
    assert trace.frame(2, Kind.CACHE) is None
    assert len(trace.frame(2, Kind.STATE).layout.entries) == 4
