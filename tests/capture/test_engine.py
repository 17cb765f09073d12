"""The engine on transformers and PEFT keeps what its protocol promises, on a Llama and on a Gemma 3."""

from __future__ import annotations

import contextlib

import pytest
import torch

from fliptrace.capture.decoding import choose, generate
from fliptrace.capture.engine import CacheLayer
from fliptrace.capture.reductions import check_launch
from fliptrace.capture.transformers_engine import TransformersEngine, load_model
from fliptrace.errors import InputError, RecordingError, UnsupportedModelError
from fliptrace_kernels import lora_shrink, parse_reduction

PROMPT = 12


class Notes:
    """An observer that keeps copies of what it is told."""

    def __init__(self):
        self.steps, self.shrinks, self.projections, self.caches, self.operations = (
            [],
            [],
            [],
            [],
            [],
        )
        self.logits = []

    def begin_step(self, step, first_position, token_ids):
        self.steps.append((step, first_position, tuple(token_ids)))

    def shrink(self, site, operand, output, launch):
        self.shrinks.append((site, operand.clone(), output.clone(), launch))

    def projection(self, site, output):
        self.projections.append((site, output.clone()))

    def cache_rows(self, layer, keys, values):
        self.caches.append((layer, keys.clone(), values.clone()))

    def operation(self, key, is_module, inputs, outputs):
        self.operations.append((key, is_module, inputs, outputs))

    def end_step(self, logits):
        self.logits.append(logits.clone())


def bits(tensor):
    """The bits as integers: equality of floats would merge zeros and split NaN."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def equal_bits(first, second):
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and torch.equal(bits(first), bits(second))
    )


def logits_of(engine, prompt, tokens=4):
    rows = []
    execution = generate(
        engine,
        prompt,
        max_new_tokens=tokens,
        end_ids=(),
        on_choice=lambda step, choice, row: rows.append(row.clone()),
    )
    return torch.stack(rows), execution


def hook_count(model):
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


def test_sites_are_in_execution_order(engine):
    """The seven projections of each layer follow one another as the forward calls them."""
    one = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    one += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert [(site.layer, site.module) for site in engine.sites] == [
        (layer, name) for layer in range(3) for name in one
    ]
    assert engine.cache_layers == (0, 1, 2)


def test_execution_order_wins_over_order_of_definition(llama_folders):
    """A model that defines o_proj before q_proj still reports q first."""
    loaded = load_model(*map(str, llama_folders), device="cpu")
    for layer in loaded.model.model.layers:
        attention = layer.self_attn
        modules = dict(attention._modules)
        attention._modules.clear()
        attention._modules.update(reversed(modules.items()))
    engine = TransformersEngine(loaded)
    names = [site.module for site in engine.sites[:7]]
    assert names[:4] == [f"self_attn.{name}_proj" for name in "qkvo"]
    notes = Notes()
    with engine.observed(notes):
        engine.start([5, 6])
        engine.step()
    assert [site for site, *_ in notes.shrinks] == list(range(21))
    assert [shrink.index for shrink in engine._shrinks] == list(range(21))


def test_every_layer_reports_once_per_step(engine, tiny):
    """Shrinks, projections and cache rows come once each, in order, with the shapes promised."""
    notes = Notes()
    prompt = tiny.prompt_ids(PROMPT)
    with engine.observed(notes):
        generate(engine, prompt, max_new_tokens=3, end_ids=())
    sites = list(range(len(engine.sites)))
    assert [site for site, *_ in notes.shrinks] == sites * 3
    assert [site for site, _ in notes.projections] == sites * 3
    assert [layer for layer, *_ in notes.caches] == [0, 1, 2] * 3
    assert [(step, first, len(ids)) for step, first, ids in notes.steps] == [
        (0, 0, 12),
        (1, 12, 1),
        (2, 13, 1),
    ]
    for number, (_, operand, output, launch) in enumerate(notes.shrinks):
        rows = PROMPT if number < len(sites) else 1
        assert operand.shape[:2] == (1, rows)
        assert output.shape == (rows, 16)
        assert output.dtype == torch.float32
        assert "reduction=unsplit" in launch
        assert "operand_strides=" in launch
    assert all(row.dim() == 1 for row in notes.logits)


def test_one_seed_repeats_and_another_changes_shrinks(engine, tiny):
    """A schedule seed fixes every bit; another one changes FP32 shrinks of the same operands."""
    prompt = tiny.prompt_ids(PROMPT)
    runs = []
    for seed in (7, 7, 8):
        engine.set_reduction("atomic:8", seed)
        notes = Notes()
        with engine.observed(notes):
            logits, _ = logits_of(engine, prompt)
        runs.append((notes, logits))
    assert equal_bits(runs[0][1], runs[1][1])
    first, same, other = (run[0].shrinks[0] for run in runs)
    assert equal_bits(first[2], same[2])
    assert equal_bits(first[1], other[1])
    assert not equal_bits(first[2], other[2])


@pytest.mark.parametrize("reduction", ["unsplit", "deterministic:8"])
def test_repeatable_reductions_repeat(engine, tiny, reduction):
    """Without atomics two runs are bit-equal and need no seed."""
    engine.set_reduction(reduction)
    prompt = tiny.prompt_ids(PROMPT)
    before, _ = logits_of(engine, prompt)
    after, _ = logits_of(engine, prompt)
    assert equal_bits(before, after)


def test_layers_compute_the_formula(engine, tiny):
    """Output = base(x) + scaling * B(round(shrink(x))), bit for bit."""
    notes = Notes()
    with engine.observed(notes), torch.no_grad():
        engine.start(tiny.prompt_ids(PROMPT))
        engine.step()
        for (site, operand, output, _), (_, projected) in zip(
            notes.shrinks, notes.projections, strict=True
        ):
            layer = engine._layers[site][1]
            (name,) = layer.lora_A
            expected = lora_shrink(operand[0], (layer.lora_A[name].weight,), reduction="unsplit")[0]
            assert equal_bits(output, expected)
            rounded = expected.to(torch.bfloat16).unsqueeze(0)
            total = layer.base_layer(operand) + layer.lora_B[name](rounded) * layer.scaling[name]
            assert equal_bits(projected, total)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_logits_agree_with_plain_peft(llama_folders, tiny):
    """The same adapter under unchanged PEFT gives the same logits but for the order of sums."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model, adapter = llama_folders
    engine = TransformersEngine(load_model(str(model), str(adapter), device="cpu", dtype="float32"))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, adapter)
    prompt = tiny.prompt_ids(PROMPT)
    engine.start(prompt)
    found = engine.step()
    with torch.no_grad():
        expected = plain(input_ids=torch.tensor([prompt])).logits[0, -1]
        with plain.disable_adapter():
            bare = plain(input_ids=torch.tensor([prompt])).logits[0, -1]
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, bare, rtol=1e-2, atol=1e-2)


def test_adapter_computes_in_the_dtype_of_the_model(llama):
    """PEFT would keep A and B in FP32, and the rounding boundary would be gone."""
    for _, layer in llama._layers:
        (name,) = layer.lora_A
        assert layer.lora_A[name].weight.dtype == torch.bfloat16
        assert layer.lora_B[name].weight.dtype == torch.bfloat16
    assert llama.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("reduction", "seed", "message"),
    [
        ("atomic:8", None, "seed"),
        ("atomic", 1, "atomic"),
        ("median:8", None, "median"),
        ("atomic:0", 1, "0"),
    ],
)
def test_bad_reductions_are_refused(llama, reduction, seed, message):
    """The message names what was wrong, and the reduction before it stays."""
    before = llama.describe()["reduction"]
    with pytest.raises(InputError, match=message):
        llama.set_reduction(reduction, seed)
    assert llama.describe()["reduction"] == before


def test_manifest_states_reduction_and_seed(llama):
    """The long identity and the schedule are in the description."""
    llama.set_reduction("atomic:8", 7)
    described = llama.describe()["reduction"]
    assert described["identity"].startswith("atomic:8/")
    assert described["seed"] == 7
    assert "7" in described["schedule"]
    llama.set_reduction("sk1")
    assert llama.describe()["reduction"]["seed"] is None


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([3, 320], "320"), ([-1], "-1"), ([4] * 160, "160"), ([4] * 500, "500")],
)
def test_bad_prompts_are_refused(llama, prompt, message):
    """Empty, outside the vocabulary, as long as the context or longer."""
    with pytest.raises(InputError, match=message):
        llama.start(prompt)


def test_steps_out_of_turn_are_refused(llama):
    """A step before start, a token with the prompt, no token afterwards, a token that does not exist."""
    with pytest.raises(RecordingError, match="start"):
        llama.step()
    llama.start([4, 5])
    with pytest.raises(InputError, match="first step"):
        llama.step(4)
    llama.step()
    with pytest.raises(InputError, match="takes one"):
        llama.step()
    with pytest.raises(InputError, match="320"):
        llama.step(320)
    llama.step(4)
    assert llama.step_number == 2


def test_full_context_is_refused(llama):
    """The context's last position can be used, the one after it cannot."""
    llama.start([4] * 158)
    llama.step()
    llama.step(5)
    llama.step(6)
    with pytest.raises(InputError, match="160 positions is full"):
        llama.step(7)


def test_a_failed_step_cannot_be_continued(llama, tiny):
    """Layers before the failure have cached rows already, so the next step would be wrong."""

    def fail(site, operand, z):
        if site == 9:
            raise RuntimeError("planted")
        return z

    llama.start(tiny.prompt_ids(5))
    llama.step()
    with llama.intercepted(fail), pytest.raises(RuntimeError, match="planted"):
        llama.step(4)
    with pytest.raises(RecordingError, match="start"):
        llama.step(4)


@pytest.mark.parametrize("modules", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_hooks_are_gone_after_observing(engine, tiny, modules, fails):
    """No hook is left, whether the run ended well or by an exception, and the logits are those of before."""
    prompt = tiny.prompt_ids(PROMPT)
    before, _ = logits_of(engine, prompt)
    count = hook_count(engine.model)

    def explode(site, operand, z):
        raise KeyError("planted")

    with (
        pytest.raises(KeyError) if fails else contextlib.nullcontext(),
        engine.observed(Notes(), modules=modules),
    ):
        assert hook_count(engine.model) > count
        with engine.intercepted(explode) if fails else contextlib.nullcontext():
            generate(engine, prompt, max_new_tokens=2, end_ids=())
    assert hook_count(engine.model) == count
    assert not any("forward" in shrink.__dict__ for shrink in engine._shrinks)
    assert engine.runtime.observer is None
    after, _ = logits_of(engine, prompt)
    assert equal_bits(before, after)


def test_only_one_observer_at_a_time(llama):
    """A second observer is refused and the first keeps observing."""
    notes = Notes()
    with llama.observed(notes):
        with pytest.raises(RecordingError, match="observed already"), llama.observed(Notes()):
            pass
        llama.start([4])
        llama.step()
    assert len(notes.shrinks) == 21


def test_interceptors_change_what_expand_gets_and_are_restored(llama, tiny):
    """The observer sees what the interceptor returned; nested ones restore the outer one, exceptions the state."""
    prompt = tiny.prompt_ids(4)
    plain, _ = logits_of(llama, prompt, 1)
    notes = Notes()
    with (
        llama.observed(notes),
        llama.intercepted(lambda site, operand, z: z + 1 if site == 3 else z),
    ):
        changed, _ = logits_of(llama, prompt, 1)
        with llama.intercepted(lambda site, operand, z: z):
            inner, _ = logits_of(llama, prompt, 1)
        again, _ = logits_of(llama, prompt, 1)
    assert not equal_bits(plain, changed)
    assert equal_bits(plain, inner)
    assert equal_bits(changed, again)
    assert equal_bits(notes.shrinks[3][2], notes.shrinks[24][2] + 1)
    with pytest.raises(ZeroDivisionError), llama.intercepted(lambda site, operand, z: z * 2):
        raise ZeroDivisionError
    after, _ = logits_of(llama, prompt, 1)
    assert equal_bits(plain, after)


@pytest.mark.parametrize("wrong", [lambda z: z.bfloat16(), lambda z: z[:, :3], lambda z: None])
def test_interceptors_must_keep_shape_and_dtype(llama, wrong):
    """A replaced shrink of another dtype would move the boundary without a word."""
    llama.start([4, 5])
    with (
        llama.intercepted(lambda site, operand, z: wrong(z)),
        pytest.raises(InputError, match="interceptor"),
    ):
        llama.step()


@pytest.mark.parametrize("steps", [1, 3, 20])
def test_cache_round_trip_continues_bit_equal(engine, tiny, steps):
    """Reading a cache, writing it back and going on gives the bits of going on, within the window and beyond it."""
    prompt = tiny.prompt_ids(5)
    logits, execution = logits_of(engine, prompt, steps + 4)
    engine.start(prompt)
    for step in range(steps):
        engine.step(execution.token_ids[step - 1] if step else None)
    content = engine.read_cache()
    engine.start([9, 8, 7])
    engine.step()
    engine.write_cache(content, steps)
    assert engine.step_number == steps
    again = engine.read_cache()
    for before, after in zip(content, again, strict=True):
        assert (before.layer, before.first_position, before.window) == (
            after.layer,
            after.first_position,
            after.window,
        )
        assert equal_bits(before.values, after.values)
        assert before.values.data_ptr() != after.values.data_ptr()
    for step in range(steps, steps + 4):
        assert equal_bits(engine.step(execution.token_ids[step - 1]), logits[step])


def test_canonical_form_states_positions_and_windows(gemma, tiny):
    """Sliding layers hold the last rows only and say where these begin."""
    gemma.start(tiny.prompt_ids(PROMPT))
    gemma.step()
    sliding, full, _ = gemma.read_cache()
    assert (sliding.window, sliding.first_position, sliding.values.shape) == (8, 5, (2, 7, 1, 32))
    assert (full.window, full.first_position, full.values.shape) == (None, 0, (2, 12, 1, 32))


def test_read_cache_gives_copies(llama, tiny):
    """Changing what read_cache returned changes nothing in the engine."""
    llama.start(tiny.prompt_ids(5))
    llama.step()
    (first, *_) = llama.read_cache()
    kept = first.values.clone()
    first.values.zero_()
    assert equal_bits(llama.read_cache()[0].values, kept)


def changed_layer(content, number=1, **changes):
    layer = content[number]
    settings = {
        name: changes.get(name, getattr(layer, name))
        for name in ("layer", "values", "first_position", "window", "shares_with")
    }
    return [*content[:number], CacheLayer(**settings), *content[number + 1 :]]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda content: content[:2], r"must be given.*\[0, 1\]"),
        (
            lambda content: changed_layer(content, values=content[1].values[:, :3]),
            "end at one position|rows",
        ),
        (lambda content: changed_layer(content, values=content[1].values[:, :, :, :3]), "layer 1"),
        (
            lambda content: changed_layer(content, values=content[1].values.repeat(1, 1, 2, 1)),
            "layer 1",
        ),
        (
            lambda content: changed_layer(content, values=content[1].values.float()),
            "layer 1.*float32",
        ),
        (lambda content: changed_layer(content, values=content[1].values[0]), "layer 1"),
        (lambda content: changed_layer(content, first_position=2), "position"),
        (lambda content: changed_layer(content, layer=7), r"\[0, 7, 2\]"),
        (lambda content: [*content, content[1]], "twice"),
        (lambda content: [], r"\[\]"),
    ],
)
def test_caches_that_do_not_fit_are_refused(engine, tiny, spoil, message):
    """Missing or doubled layers, wrong shape, dtype or positions: each is named, and the engine's cache stays."""
    engine.start(tiny.prompt_ids(5))
    engine.step()
    content = list(engine.read_cache())
    with pytest.raises(InputError, match=message):
        engine.write_cache(spoil(content), 1)
    assert all(
        equal_bits(before.values, after.values)
        for before, after in zip(content, engine.read_cache(), strict=True)
    )


def test_a_cache_precedes_a_decode_step(llama, tiny):
    """Step 0 is the prefill and has no cache."""
    llama.start(tiny.prompt_ids(5))
    llama.step()
    with pytest.raises(InputError, match="at least 1"):
        llama.write_cache(llama.read_cache(), 0)


def test_choice_prefers_the_lowest_id_and_counts_ties():
    """Exact ties are counted, and the lowest id wins among them."""
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0], dtype=torch.bfloat16)
    choice = choose(logits, 3)
    assert (choice.token, choice.top_ids, choice.tied, choice.top_values) == (
        1,
        (1, 3),
        3,
        (2.0, 2.0),
    )
    single = choose(torch.tensor([0.5, -1.0]), 0)
    assert (single.token, single.tied, single.top_ids) == (0, 1, (0, 1))


def test_nan_logits_are_refused():
    """One NaN anywhere ends it, wherever it stands."""
    for place in range(4):
        logits = torch.zeros(4)
        logits[place] = float("nan")
        with pytest.raises(RecordingError, match=r"step 5.*NaN"):
            choose(logits, 5)


def test_forced_tokens_are_fed_and_the_choice_is_still_reported(llama, tiny):
    """With forced tokens the execution holds them, and the callback the model's own choice."""
    prompt = tiny.prompt_ids(5)
    _, free = logits_of(llama, prompt, 3)
    seen = []
    forced = generate(
        llama,
        prompt,
        max_new_tokens=3,
        end_ids=(),
        forced_ids=(9,),
        on_choice=lambda s, c, row: seen.append(c.token),
    )
    assert forced.token_ids[0] == 9
    assert seen[0] == free.token_ids[0]


def test_generation_stops_at_the_end_token(llama, tiny):
    """The end token is kept and the reason named."""
    prompt = tiny.prompt_ids(5)
    _, free = logits_of(llama, prompt, 4)
    stopped = generate(llama, prompt, max_new_tokens=4, end_ids={free.token_ids[1]})
    place = free.token_ids.index(free.token_ids[1])
    assert stopped.token_ids == free.token_ids[: place + 1]
    assert stopped.stop_reason == "end of sequence"


def test_generation_stops_when_the_context_is_full(llama):
    """A prompt near the end of the context gives what fits."""
    execution = generate(llama, [4] * 157, max_new_tokens=50, end_ids=())
    assert execution.stop_reason == "context full"
    assert len(execution.token_ids) == 4


def test_an_unused_lora_layer_is_refused(llama_folders):
    """A LoRA layer that the forward never calls cannot be traced."""
    loaded = load_model(*map(str, llama_folders), device="cpu")
    loaded.model.model.layers[1].mlp.forward = lambda x: x
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.\w+_proj ran 0 times"):
        TransformersEngine(loaded)


def test_a_reduction_that_cannot_run_is_refused_before_a_forward():
    """On CUDA local has no FP32; the sentence says what to use, where a forward would have ended in a traceback."""
    local = parse_reduction("local")
    check_launch(local, (16, 64), torch.float32, torch.device("cpu"))
    with pytest.raises(InputError, match=r"local:32/32 on CUDA takes bfloat16.*deterministic:32"):
        check_launch(local, (16, 64), torch.float32, torch.device("cuda"))
