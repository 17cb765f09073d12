"""With modules watched, a fault outside the shrinks is named as the operation it is, and never blamed on a module."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fliptrace.analysis import compare
from fliptrace.capture.digest_batch import DigestBatch
from fliptrace.capture.transformers_engine import TransformersEngine, load_model
from fliptrace.capture.transformers_engine.operations import token_dimension
from fliptrace.numerics.digest import (
    combine_digests,
    digest_rows,
    digest_tensor,
    mix_words,
    position_terms,
)
from fliptrace.trace import Kind
from fliptrace.verdicts import Origin, Outcome


class FaultyOperation(TorchDispatchMode):
    """One ATen operation gives another result once, as an unrepeatable kernel does: its inputs are what they are."""

    def __init__(self, engine, name, *, step, call, row):
        super().__init__()
        self.engine, self.name, self.step, self.call, self.row = engine, name, step, call, row
        self.calls = 0
        self.planted = False

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        tensor = result[0] if isinstance(result, tuple) else result
        # The recorder's own operations come through here, too; they are on integers.
        counts = self.name in function._schema.name and tensor.is_floating_point()
        if counts and self.engine.step_number == self.step:
            if self.calls == self.call:
                rows = tensor.detach().movedim({4: 2, 3: 1, 2: 0}[tensor.dim()], 0)
                bits = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
                rows[self.row].view(bits)[..., -1:].add_(8)
                self.planted = True
            self.calls += 1
        return result


def run_pair(engine, record, prompt, fault, **options):
    reference, _ = record(engine, prompt, tokens=4, modules=True, **options)
    candidate, _ = record(engine, prompt, tokens=4, modules=True, during=fault, **options)
    assert fault.planted
    return compare(reference, candidate)


@pytest.mark.parametrize(("step", "row"), [(0, 5), (2, 0)])
@pytest.mark.parametrize("layer", [0, 2])
def test_attention_is_named_and_not_the_projection_after_it(engine, tiny, record, step, row, layer):
    """Attention lies between modules: a tool that hooks modules only blames o_proj."""
    prompt = tiny.prompt_ids(9)
    fault = FaultyOperation(engine, "scaled_dot_product", step=step, call=layer, row=row)
    found = run_pair(engine, record, prompt, fault)
    root = found.foreign_root
    assert root.kind == "operation"
    assert root.origin is Origin.ROOT
    assert root.key.startswith(f"model.layers.{layer}.self_attn/")
    assert "scaled_dot_product" in root.key
    assert (root.step, root.position) == (step, row if step == 0 else len(prompt) + step - 1)
    assert found.root_rows == 0


@pytest.mark.parametrize(
    ("name", "call", "module"),
    [
        ("aten::rsqrt", 1, "model.layers.0.post_attention_layernorm/rsqrt#0"),
        ("aten::silu", 1, "model.layers.1.mlp.act_fn/silu#0"),
        ("aten::mm", 0, None),
    ],
)
def test_other_operations_are_named(llama, tiny, record, name, call, module):
    """A norm, the activation, a matrix product of the base: the operation and its module, at its row."""
    prompt = tiny.prompt_ids(9)
    fault = FaultyOperation(llama, name, step=1, call=call, row=0)
    root = run_pair(llama, record, prompt, fault).foreign_root
    assert (root.kind, root.origin, root.step, root.position) == (
        "operation",
        Origin.ROOT,
        1,
        len(prompt),
    )
    if module is None:
        assert root.key.startswith("model.layers.0.self_attn.q_proj.base_layer/")
    else:
        assert root.key == module


def test_the_product_in_the_mlp_is_named(llama, tiny, record):
    """silu(gate) * up belongs to the MLP itself, to none of its modules."""
    fault = FaultyOperation(llama, "aten::mul", step=2, call=0, row=0)
    prompt = tiny.prompt_ids(9)
    reference, _ = record(llama, prompt, tokens=4, modules=True)
    labels = [entry.key for entry in reference.frame(2, Kind.OPERATION_OUTPUT).layout.entries]
    products = [label for label in labels if "/mul#" in label]
    fault.call = products.index("model.layers.1.mlp/mul#0")
    root = run_pair(llama, record, prompt, fault).foreign_root
    assert root.key == "model.layers.1.mlp/mul#0"
    assert root.origin is Origin.ROOT


def test_a_fault_in_a_shrink_stays_the_shrinks(llama, tiny, record):
    """Watching operations does not turn a root at a shrink into something else."""
    prompt = tiny.prompt_ids(9)

    def plant(site, operand, z):
        if site == 8 and llama.step_number == 2:
            z = z.clone()
            z[0, 5] += 0.25
        return z

    reference, _ = record(llama, prompt, tokens=4, modules=True)
    candidate, _ = record(llama, prompt, tokens=4, modules=True, during=llama.intercepted(plant))
    found = compare(reference, candidate)
    assert found.foreign_root is None
    assert found.first_difference.site == llama.sites[8]
    assert found.first_difference.origin is Origin.ROOT
    assert found.root_rows == 1


@pytest.fixture(scope="module")
def sorted_experts(tiny, tmp_path_factory):
    """A tiny Mixtral whose tokens go to one expert each: sorted by expert they are as many rows, in another order."""
    from transformers import MixtralConfig

    root = tmp_path_factory.mktemp("mixtral")
    configuration = MixtralConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=1,
        initializer_range=0.06,
    )
    model = tiny.write_model(root / "model", configuration)
    adapter = tiny.write_adapter(root / "adapter", model, target_modules=["q_proj", "o_proj"])
    return TransformersEngine(load_model(str(model), str(adapter), device="cpu"))


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_rows_that_change_places_blame_no_operation(
    sorted_experts, tiny, record, monkeypatch, implementation
):
    """A difference that enters at a shrink is followed through the experts, and nothing else is called a root."""
    engine, prompt = sorted_experts, tiny.prompt_ids(12)
    monkeypatch.setattr(engine.model.config, "_experts_implementation", implementation)
    reference, _ = record(engine, prompt, tokens=2, modules=True)
    for row in range(len(prompt)):

        def perturbed(site, operand, z, row=row):
            if site == 0 and len(z) == len(prompt):
                z[row, 3] += 1.0
            return z

        candidate, _ = record(
            engine, prompt, tokens=2, modules=True, during=engine.intercepted(perturbed)
        )
        found = compare(reference, candidate)
        assert found.foreign_root is None, found.foreign_root
        assert found.first_propagating.position == row


@pytest.mark.parametrize(("reduction", "seeds"), [("unsplit", (None, None)), ("atomic:8", (4, 4))])
def test_equal_runs_have_equal_operations(engine, tiny, record, reduction, seeds):
    """Nothing differs where nothing was planted."""
    traces = []
    for seed in seeds:
        engine.set_reduction(reduction, seed)
        traces.append(record(engine, tiny.prompt_ids(9), tokens=3, modules=True)[0])
    found = compare(*traces)
    assert found.outcome is Outcome.IDENTICAL
    assert found.foreign_root is None


def test_arrival_orders_give_shrinks_and_no_foreign_roots(llama, tiny, record):
    """Under two schedules the shrinks differ, and no other operation is accused."""
    traces = []
    for seed in (1, 2):
        llama.set_reduction("atomic:8", seed)
        traces.append(record(llama, tiny.prompt_ids(9), tokens=4, modules=True)[0])
    found = compare(*traces)
    assert found.first_difference.origin is Origin.ROOT
    assert found.foreign_root is None


def test_every_module_and_operation_is_reported(llama, tiny, record):
    """Modules, matrix products, norms, attention, activation and shrinks, each in every step, in one order."""
    trace, _ = record(llama, tiny.prompt_ids(9), tokens=3, modules=True)
    for step in range(3):
        rows = 9 if step == 0 else 1
        modules, operations = (
            trace.frame(step, Kind.MODULE_OUTPUT),
            trace.frame(step, Kind.OPERATION_OUTPUT),
        )
        assert {
            "model.layers.1.self_attn",
            "model.norm",
            "lm_head",
            "model.layers.2.mlp.act_fn",
        } <= set(modules.layout.index)
        assert not any(
            ".lora_A." in key for key in (*modules.layout.index, *operations.layout.index)
        )
        shrinks = [
            entry.key for entry in operations.layout.entries if entry.key.endswith("/lora_shrink#0")
        ]
        assert shrinks == [f"{site.path}/lora_shrink#0" for site in llama.sites]
        for site in llama.sites:
            output = operations.tensor(f"{site.path}/lora_shrink#0")
            assert output.shape == (rows, 2)
            assert torch.equal(output, digest_rows(trace.record(site.path, Kind.SHRINK, step)))
            inputs = trace.frame(step, Kind.OPERATION_INPUT).tensor(f"{site.path}/lora_shrink#0")
            assert torch.equal(inputs, trace.record(site.path, Kind.OPERAND, step))
            assert torch.equal(
                modules.tensor(site.path), trace.record(site.path, Kind.PROJECTION, step)
            )


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 4), count=st.integers(1, 6), seed=st.integers(0, 2**31), small=st.booleans()
)
def test_batched_digests_are_those_of_each_tensor(rows, count, seed, small):
    """Digesting at the end, bound or alone, equals digesting each tensor when it comes; later changes do not count."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator).bfloat16()

    import fliptrace.capture.digest_batch as module

    before, module._WAITING_BYTES = module._WAITING_BYTES, 64 if small else module._WAITING_BYTES
    try:
        batch = DigestBatch(rows)
        lists, expected = [], []
        for _ in range(count):
            parts, digests = [], []
            for kind in torch.randint(
                0, 4, (int(torch.randint(1, 4, (1,), generator=generator)),), generator=generator
            ):
                if kind == 0:
                    tensor = draw(1, rows, 5)
                    parts.append(batch.token_rows(tensor, 1))
                    digests.append(digest_rows(tensor[0]))
                elif kind == 1:
                    tensor = draw(1, 2, rows, 3)
                    parts.append(batch.token_rows(tensor, 2))
                    digests.append(digest_rows(tensor[0].transpose(0, 1)))
                elif kind == 2:
                    tensor = draw(7, 2)
                    parts.append(batch.whole(tensor))
                    digests.append(digest_tensor(tensor).unsqueeze(0))
                else:
                    tensor = draw(rows, 4)
                    digests.append(digest_rows(tensor))
                    parts.append(batch.digested(digests[-1].clone()))
                tensor.zero_()
            lists.append(parts)
            expected.append(bound(digests))
    finally:
        module._WAITING_BYTES = before
    for found, must_be in zip(batch.resolve(lists), expected, strict=True):
        assert torch.equal(found, must_be)


def test_unusual_tensors_can_be_digested():
    """Complex rotary factors, booleans, tensors without elements, scalars, and strided rows."""
    batch = DigestBatch(1)
    complex_values = torch.randn(1, 1, 3, dtype=torch.complex64)
    wide = torch.randn(1, 1, 9).bfloat16()
    lists = [
        [batch.token_rows(complex_values, 1)],
        [batch.token_rows(torch.ones(1, 1, 5, dtype=torch.bool), 1)],
        [batch.whole(torch.zeros(0))],
        [batch.whole(torch.tensor(2.5))],
        [batch.token_rows(wide[..., :8], 1)],
    ]
    found = batch.resolve(lists)
    expected = [
        digest_rows(torch.view_as_real(complex_values).reshape(1, -1)),
        digest_rows(torch.ones(1, 5, dtype=torch.bool)),
        digest_tensor(torch.zeros(0)).unsqueeze(0),
        digest_tensor(torch.tensor(2.5)).unsqueeze(0),
        digest_rows(wide[0, :, :8].clone()),
    ]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def bound(digests):
    """The rule for parts that belong together, written plainly."""
    if len(digests) == 1:
        return digests[0]
    rows = max(len(part) for part in digests)
    total = torch.zeros((rows, 2), dtype=torch.int64)
    for number, part in enumerate(digests):
        total = total + position_terms(part, torch.full((len(part),), number))
    return mix_words(total)


def test_shapes_with_token_rows():
    """Where token rows are in the shapes that transformers uses."""
    assert token_dimension((1, 4, 9, 64), 9) == 2
    assert token_dimension((1, 9, 4, 64), 9) == 1
    assert token_dimension((1, 9, 256), 9) == 1
    assert token_dimension((9, 256), 9) == 0
    assert token_dimension((1, 64, 20), 9) is None
    assert token_dimension((), 1) is None
    assert combine_digests(digest_rows(torch.zeros(1, 2))).shape == (2,)


def test_eager_attention_is_named_by_its_operation(llama_folders, tiny, record):
    """Without a fused kernel the softmax is an operation of the attention module."""
    engine = TransformersEngine(
        load_model(*map(str, llama_folders), device="cpu", attention="eager")
    )
    fault = FaultyOperation(engine, "softmax", step=1, call=1, row=0)
    root = run_pair(engine, record, tiny.prompt_ids(9), fault).foreign_root
    assert root.key == "model.layers.1.self_attn/_softmax#0"
    assert (root.kind, root.origin, root.position) == ("operation", Origin.ROOT, 9)


def test_a_kernel_that_bypasses_the_dispatcher_is_not_blamed_on_the_projection(
    llama, tiny, record, monkeypatch
):
    """Memory changed behind PyTorch's back after attention: the place is given as unlocated, not as o_proj's root."""
    original = torch.nn.functional.scaled_dot_product_attention
    prompt = tiny.prompt_ids(9)
    reference, _ = record(llama, prompt, tokens=3, modules=True)
    calls = []

    def attention(*arguments, **keywords):
        result = original(*arguments, **keywords)
        if llama.step_number == 1:
            calls.append(result)
            if len(calls) == 2:
                result.view(torch.int16).numpy()[0, 1, 0, 3] += 1
        return result

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    candidate, _ = record(llama, prompt, tokens=3, modules=True)
    assert len(calls) == 3
    root = compare(reference, candidate).foreign_root
    assert root.origin is Origin.UNLOCATED
    assert root.kind == "operand"
    assert "attention of layer 1" in root.explanation
