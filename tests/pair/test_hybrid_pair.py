"""Pairs of a hybrid (Nemotron-H): states are compared, a planted fault is found where it is, and reports tell of it."""

from __future__ import annotations

import itertools
import json

import jsonschema
import pytest
import torch

import fliptrace as ft
from fliptrace.analysis import compare
from fliptrace.analysis.propagation import propagation_graph
from fliptrace.capture.decoding import choose
from fliptrace.capture.recorder import Recorder, RecorderOptions
from fliptrace.manifest import Manifest
from fliptrace.pair import load_engine
from fliptrace.store import TraceWriter, open_trace
from fliptrace.trace import Closing, Kind
from fliptrace.verdicts import Origin, Outcome
from fliptrace.views import plain_summary, render_report, report_json, report_schema

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPT = tuple(range(80, 105))
STEPS = 6


@pytest.fixture(scope="module")
def engine(tiny, tmp_path_factory):
    """Mamba-2, attention, MLP, Mamba-2, under a fixed order of sums."""
    root = tmp_path_factory.mktemp("hybrid")
    model = tiny.write_model(root / "model", tiny.nemotron_configuration())
    adapter = tiny.write_adapter(
        root / "adapter", model, strength=0.2, target_modules=list(tiny.HYBRID_PROJECTIONS)
    )
    return load_engine(str(model), str(adapter), device="cpu")


class Recording:
    """Records executions, changed in between where asked for."""

    def __init__(self, engine, folder):
        self.engine, self.folder, self.count = engine, folder, itertools.count()

    def __call__(self, *, before=None, change=None, reduction="unsplit", seed=None, steps=STEPS):
        engine = self.engine
        path = self.folder / f"{next(self.count)}.trace"
        with engine.reducing(reduction, seed):
            sections = engine.describe() | {"prompt": {"ids_sha256": "same"}}
            with TraceWriter(path, Manifest(sections)) as writer:
                recorder, token = Recorder(engine, writer, RecorderOptions()), None
                engine.start(PROMPT)
                with engine.observed(recorder):
                    for step in range(steps):
                        if step == before:
                            change(engine, step)
                        logits = engine.step(token)
                        choice = choose(logits, step)
                        recorder.complete_step(step, choice, logits)
                        token = choice.token
                    recorder.finish()
                writer.close(Closing(True, "max new tokens", steps))
        return open_trace(path)


@pytest.fixture
def record(engine, tmp_path):
    """Record an execution."""
    return Recording(engine, tmp_path)


def nudged(layer, name, place, bits=1):
    """Return a change that flips low bits of one element of a state before a step."""

    def change(engine, step):
        states = engine.read_state()
        for state in states:
            if (state.layer, state.name) == (layer, name):
                whole = state.values.view(torch.int32 if name == "ssm" else torch.int16)
                whole[place] ^= bits
        engine.write_cache(engine.read_cache(), step, states)

    return change


def test_an_unplanted_pair_has_no_state_differences(record):
    """Bit-equal executions: every state is compared and none differs."""
    diff = compare(record(), record())
    assert diff.outcome is Outcome.IDENTICAL
    assert diff.state_differences == ()
    assert not any("recurrent state" in one for one in diff.coverage.not_observed)
    assert "recurrent state" not in " ".join(diff.coverage.missing)


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize(("name", "place"), [("ssm", (2, 5, 7)), ("conv", (11, 3))])
def test_a_planted_fault_is_found_at_its_layer_and_step(record, layer, name, place):
    """One element before step 3: the state after it is the first difference, and what is before it is equal."""
    bits = 1 << 20 if name == "ssm" else 1
    diff = compare(record(), record(before=3, change=nudged(layer, name, place, bits)))
    found = diff.foreign_root
    assert (found.kind, found.step, found.origin) == ("state", 3, Origin.ROOT)
    assert found.key.startswith(f"state.{layer}.")
    first = diff.state_differences[0]
    assert (first.step, first.layer) == (3, layer)
    assert all(entry.step >= 3 for entry in diff.state_differences)
    assert diff.first_propagating is None or found.precedes(diff.first_propagating)
    assert diff.outcome is not Outcome.IDENTICAL


def test_a_low_bit_of_an_fp32_state_is_a_real_difference(record):
    """No boundary swallows it: one element of the state differs at least, in FP32, and the pair is not called equal."""
    diff = compare(record(), record(before=2, change=nudged(3, "ssm", (0, 0, 0))))
    assert diff.outcome is not Outcome.IDENTICAL
    (first, *_) = diff.state_differences
    assert (first.layer, first.name, first.dtype, first.step) == (3, "ssm", "float32", 2)
    assert first.differing >= 1
    assert first.elements == 8 * 32 * 16


def test_states_explain_what_follows(record):
    """Differences of shrinks reach later steps through states; nothing is said to have entered elsewhere."""
    for seed in range(6):
        diff = compare(
            record(reduction="atomic:8", seed=1), record(reduction="atomic:8", seed=seed + 2)
        )
        if diff.state_differences:
            assert diff.foreign_root is None
            layers = {entry.layer for entry in diff.state_differences}
            assert layers <= {0, 3}
            return
    pytest.fail("no seed of six made a difference that survives")


def test_states_stand_in_the_graph(record):
    """A state is a record of its step and feeds what the layer caches of earlier steps."""
    one, other = record(), record(before=2, change=nudged(0, "ssm", (0, 1, 2), 1 << 22))
    diff = compare(one, other)
    graph = propagation_graph(one, other, diff)
    assert (2, "state", 0) in graph
    assert graph.has_edge((2, "state", 0), (3, "cached", 0))
    assert graph.has_edge((3, "cached", 0), (3, "state", 0))
    if diff.flip is not None:
        assert diff.propagation.reaches_flip


def test_reports_tell_of_it(record):
    """Page, terminal and JSON: the place of keys and values also names states, and the root."""
    one, other = record(), record(before=2, change=nudged(0, "ssm", (0, 1, 2), 1 << 22))
    diff = compare(one, other)
    document = report_json(diff, one, other)
    jsonschema.validate(json.loads(json.dumps(document)), report_schema())
    (told,) = [part for part in document["story"] if part["key"] == "cache"]
    assert any("recurrent state ssm (float32) after step 2" in said for said in told["sentences"])
    assert "recurrent state differs in" in told["gist"]
    assert "recurrent state ssm of layer 0" in " ".join(
        sentence for part in document["story"] for sentence in part["sentences"]
    )
    assert plain_summary(diff, one, other)
    assert "recurrent state" in render_report(diff, one, other, title="hybrid")


def test_a_trace_without_states_is_not_called_equal(record):
    """What a manifest says is kept and a trace does not hold, is named as not observed."""
    from fliptrace.trace import Trace

    class Without:
        def __init__(self, source):
            self.manifest, self.closing, self.steps = source.manifest, source.closing, source.steps
            self.name, self._source = source.name, source

        def frame(self, step, kind):
            return None if kind is Kind.STATE else self._source.frame(step, kind)

        def frames(self, kind):
            return () if kind is Kind.STATE else self._source.frames(kind)

    traces = [Trace(Without(record().source)) for _ in range(2)]
    assert any("recurrent state" in one for one in compare(*traces).coverage.not_observed)


def test_a_pair_is_recorded_and_compared(engine, tmp_path):
    """trace_pair: the observer changes nothing, and the manifest names the layers."""
    with ft.trace_pair(
        engine,
        prompt=" ".join(f"w{number}" for number in PROMPT),
        attempts=2,
        max_new_tokens=12,
        chat_template=False,
        directory=tmp_path / "pair",
    ) as pair:
        assert pair.reference.manifest.get("engine.state_layers") == [0, 3]
        assert "equal" in pair.diff.coverage.observer_control
        assert Kind.STATE in pair.reference.steps[5].frames
