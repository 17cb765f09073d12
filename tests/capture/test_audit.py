"""An audit sees what arrives: shrinks at the rounding, keys and values at attention, the last residual stream."""

from __future__ import annotations

import pytest
import torch

from fliptrace.errors import RecordingError


class Ledger:
    """Keeps copies of what is consumed."""

    def __init__(self):
        self.shrinks, self.caches, self.residuals, self.tokens = {}, {}, [], []

    def tokens_consumed(self, token_ids):
        self.tokens.append(token_ids.tolist())

    def shrink_consumed(self, site, z):
        self.shrinks[site] = z.clone()

    def needs_cached_rows(self, layer):
        return True

    def cache_consumed(self, layer, keys, values):
        self.caches[layer] = torch.stack((keys, values)).clone()

    def residual(self, values):
        self.residuals.append(values.clone())


def test_the_audit_sees_what_interceptors_gave(engine, tiny):
    """Every site's consumer reports the tensor that the interceptor handed over, bit for bit."""
    given = {}

    def double(site, operand, z):
        given[site] = z * 2
        return given[site]

    ledger = Ledger()
    engine.start(tiny.prompt_ids(12))
    with engine.audited(ledger), engine.intercepted(double):
        engine.step()
    assert list(ledger.shrinks) == list(range(len(engine.sites)))
    for site, z in ledger.shrinks.items():
        assert torch.equal(z.view(torch.int32), given[site].view(torch.int32))


def test_the_audit_sees_the_tokens_that_the_embedding_reads(engine, tiny):
    """The whole prompt, then each fed token; nothing once the audit has ended."""
    ledger = Ledger()
    engine.start(tiny.prompt_ids(5))
    with engine.audited(ledger):
        engine.step()
        engine.step(7)
    engine.step(8)
    assert ledger.tokens == [list(tiny.prompt_ids(5)), [7]]


def test_the_audit_sees_the_cache_that_attention_reads(engine, tiny):
    """Cached rows first, then the step's own; a sliding window only as far as it keeps rows."""
    ledger = Ledger()
    engine.start(tiny.prompt_ids(12))
    engine.step()
    before = {layer.layer: layer for layer in engine.read_cache()}
    with engine.audited(ledger):
        engine.step(7)
    after = {layer.layer: layer.values for layer in engine.read_cache()}
    assert engine.cache_windows == {number: layer.window for number, layer in before.items()}
    assert sorted(ledger.caches) == sorted(before)
    for number, seen in ledger.caches.items():
        rows = seen.transpose(1, 2).view(torch.int16)  # [2, T, kv_heads, head_dim]
        assert rows.shape[1] == before[number].values.shape[1] + 1
        assert torch.equal(rows[:, :-1], before[number].values.view(torch.int16))
        assert torch.equal(rows[:, -1], after[number][:, -1].view(torch.int16))


def test_the_residual_is_that_before_the_last_norm(engine, tiny):
    """All rows, as the final norm takes them."""
    ledger, taken = Ledger(), []
    norm = engine.model.model.norm
    handle = norm.register_forward_pre_hook(lambda module, arguments: taken.append(arguments[0][0]))
    try:
        engine.start(tiny.prompt_ids(9))
        with engine.audited(ledger):
            engine.step()
            engine.step(5)
    finally:
        handle.remove()
    assert [tuple(values.shape[:1]) for values in ledger.residuals] == [(9,), (1,)]
    for seen, values in zip(ledger.residuals, taken, strict=True):
        assert torch.equal(seen.view(torch.int16), values.view(torch.int16))


def test_audits_leave_nothing_behind(engine, tiny):
    """After an exception inside, nothing is reported and no hook is left; two audits at once are refused."""
    layer = engine._last_layer()
    hooks = len(layer._forward_hooks)
    ledger = Ledger()
    engine.start(tiny.prompt_ids(5))

    def audited_run():
        with engine.audited(ledger):
            engine.step()
            with pytest.raises(RecordingError, match="audited already"), engine.audited(Ledger()):
                pass
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        audited_run()
    seen = len(ledger.shrinks), len(ledger.residuals)
    ledger.shrinks.clear()
    engine.step(4)
    assert (len(ledger.shrinks), len(ledger.residuals)) == (0, seen[1])
    assert len(layer._forward_hooks) == hooks
    assert engine.runtime.audit is None


def test_reducing_restores_the_reduction(llama, tiny):
    """The reduction and its schedule are those from before, also after an exception."""
    llama.set_reduction("atomic:8", 3)
    before = llama.describe()["reduction"]

    def reduced_run():
        with llama.reducing("unsplit"):
            assert llama.describe()["reduction"]["identity"] == "unsplit/64"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        reduced_run()
    assert llama.describe()["reduction"] == before


def test_text_of_token_ids(llama):
    """Special tokens are left out unless asked for."""
    assert llama.text_of([5, 6, 2]) == "w5 w6"
    assert llama.text_of([5, 2], special=True).endswith("</s>")
