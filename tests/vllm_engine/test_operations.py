"""Operations between the shrinks: which are watched, and that a root in each is named as that operation."""

from __future__ import annotations

import contextlib

import pytest
import torch

import fliptrace as ft
from fliptrace.store import TraceReader
from fliptrace.trace import Kind
from fliptrace.verdicts import Origin

STEPS = 4


@contextlib.contextmanager
def fault(engine, path, *, step=2):
    """Change one element of a module's output in one decode step, before anybody watches it."""
    module = engine.host.runner.model.get_submodule(path)

    def change(_module, _arguments, output):
        if engine.runtime.rows and engine.runtime.step == step:
            first = output[0] if isinstance(output, tuple) else output
            first.view(-1)[3] += 1.0

    handle = module.register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def expand_fault(engine, name, *, step=2):
    """Likewise in what expand adds to one LoRA layer."""
    own = type(engine._wrapper).add_expand
    layer = next(layer for layer in engine._layers if layer.name == name)

    def change(wrapper, y, x, lora_b_stacked, *arguments, **keywords):
        own(wrapper, y, x, lora_b_stacked, *arguments, **keywords)
        if engine.runtime.step == step and lora_b_stacked is layer.module.lora_b_stacked:
            y.view(-1)[3] += 1.0

    before = engine._path.own_expand
    engine._path.own_expand = lambda *given, **named: change(engine._wrapper, *given, **named)
    try:
        yield
    finally:
        engine._path.own_expand = before


@contextlib.contextmanager
def base_fault(engine, name, *, step=2):
    """Likewise in the base projection of one LoRA layer."""
    layer = next(layer for layer in engine._layers if layer.name == name)
    method = layer.module.base_layer.quant_method
    own = method.apply

    def change(*arguments, **keywords):
        output = own(*arguments, **keywords)
        if engine.runtime.rows and engine.runtime.step == step:
            output.view(-1)[3] += 1.0
        return output

    method.apply = change
    try:
        yield
    finally:
        method.apply = own


@pytest.fixture(scope="module")
def reference(shared_engine, prompt, record, tmp_path_factory):
    """A trace with modules, without any fault."""
    shared_engine.set_reduction("unsplit")
    path = tmp_path_factory.mktemp("modules") / "reference.trace"
    tokens = record(shared_engine, prompt.ids, path, modules=True, steps=STEPS)
    return path, tokens


def compare(record, engine, prompt, reference, path):
    """Record a candidate that is fed the reference's tokens; returns the comparison."""
    record(engine, prompt.ids, path, modules=True, steps=STEPS, forced=reference[1])
    with ft.diff_traces(reference[0], path) as pair:
        return pair.diff


def test_everything_on_the_path_is_watched(reference):
    """Per layer: two norms, rotary, attention, four base projections, four expands, seven shrinks, the activation."""
    with TraceReader(reference[0]) as trace:
        for step in (0, 1):
            frames = trace.step_frames(step)
            keys = [entry.key for entry in frames[Kind.OPERATION_OUTPUT].layout.entries]
            assert keys == [entry.key for entry in frames[Kind.OPERATION_INPUT].layout.entries]
            assert len(keys) == 8 * 20 + 3
            own = [
                key.removeprefix("model.layers.3.")
                for key in keys
                if key.startswith("model.layers.3.")
            ]
            assert own == [
                "input_layernorm/RMSNorm#0",
                "self_attn.qkv_proj/base_projection#0",
                "self_attn.qkv_proj[q_proj]/lora_shrink#0",
                "self_attn.qkv_proj[k_proj]/lora_shrink#0",
                "self_attn.qkv_proj[v_proj]/lora_shrink#0",
                "self_attn.qkv_proj/lora_expand#0",
                "self_attn.rotary_emb/RotaryEmbedding#0",
                "self_attn.attn/attention#0",
                "self_attn.o_proj/base_projection#0",
                "self_attn.o_proj/lora_shrink#0",
                "self_attn.o_proj/lora_expand#0",
                "post_attention_layernorm/RMSNorm#0",
                "mlp.gate_up_proj/base_projection#0",
                "mlp.gate_up_proj[gate_proj]/lora_shrink#0",
                "mlp.gate_up_proj[up_proj]/lora_shrink#0",
                "mlp.gate_up_proj/lora_expand#0",
                "mlp.act_fn/SiluAndMul#0",
                "mlp.down_proj/base_projection#0",
                "mlp.down_proj/lora_shrink#0",
                "mlp.down_proj/lora_expand#0",
            ]
            assert (keys[0], keys[-2]) == (
                "model.embed_tokens/VocabParallelEmbeddingWithLoRA#0",
                "model.norm/RMSNorm#0",
            )
            assert keys[-1].startswith("logits_processor/")


def test_watching_operations_changes_nothing(shared_engine, prompt, reference, record, tmp_path):
    """A second recording is bit-equal in every record, and its tokens are those of a run that nobody watches."""
    diff = compare(record, shared_engine, prompt, reference, tmp_path / "again.trace")
    assert str(diff.outcome) == "identical"
    plain = record(shared_engine, prompt.ids, tmp_path / "plain.trace", steps=STEPS)
    assert plain == reference[1]


@pytest.mark.parametrize(
    ("make", "path", "key"),
    [
        (fault, "model.layers.3.input_layernorm", "RMSNorm#0"),
        (fault, "model.layers.3.post_attention_layernorm", "RMSNorm#0"),
        (fault, "model.layers.3.self_attn.attn", "attention#0"),
        (fault, "model.layers.3.mlp.act_fn", "SiluAndMul#0"),
        (fault, "model.norm", "RMSNorm#0"),
        (base_fault, "model.layers.3.self_attn.qkv_proj", "base_projection#0"),
        (expand_fault, "model.layers.3.mlp.gate_up_proj", "lora_expand#0"),
    ],
)
def test_a_root_is_named_as_its_operation(
    shared_engine, prompt, reference, record, tmp_path, make, path, key
):
    """A fault in one operation of one step: that operation is the root, no shrink is."""
    with make(shared_engine, path):
        diff = compare(record, shared_engine, prompt, reference, tmp_path / "faulty.trace")
    assert not diff.roots
    assert diff.foreign_root is not None
    assert diff.foreign_root.key == f"{path}/{key}"
    assert diff.foreign_root.origin is Origin.ROOT
    assert diff.foreign_root.step == 2


def test_arithmetic_outside_modules_is_not_blamed_on_the_next_operation(
    shared_engine, prompt, reference, record, tmp_path
):
    """What attention's block gives is changed after its last operation: nothing watched gave another result."""
    with fault(shared_engine, "model.layers.3.self_attn"):
        diff = compare(record, shared_engine, prompt, reference, tmp_path / "faulty.trace")
    assert not diff.roots
    found = diff.foreign_root
    assert found is None or found.origin is Origin.UNLOCATED or found.kind == "module", found


def test_digests_are_of_what_was_there(reference):
    """The inputs of a norm are rows before it wrote over them: two executions of one step differ from the outputs."""
    with TraceReader(reference[0]) as trace:
        frames = trace.step_frames(1)
        for before, after in (
            (Kind.OPERATION_INPUT, Kind.OPERATION_OUTPUT),
            (Kind.MODULE_INPUT, Kind.MODULE_OUTPUT),
        ):
            place = next(
                number
                for number, entry in enumerate(frames[before].layout.entries)
                if "layers.3.post_attention_layernorm" in entry.key
            )
            assert not torch.equal(frames[before].tensor(place), frames[after].tensor(place))
