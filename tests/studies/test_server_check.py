"""trace-check --server against a real server around the bundled model; with vLLM installed, against vLLM's own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

import fliptrace as ft
from fliptrace.command_line import trace_check
from fliptrace.errors import InputError
from fliptrace.studies.server_check import CompletionsServer, ServerSettings, run_server_check
from fliptrace.studies.server_client import ServerClient

SHORT = "--runs 2 --max-new-tokens 24 --model tuned --quiet".split()


@pytest.fixture(scope="module")
def engine():
    """The bundled model on the CPU."""
    bundled = ft.bundled_model()
    return ft.load_engine(bundled.model, bundled.adapter, device="cpu")


@pytest.fixture(scope="module")
def prompts():
    """Two bundled problems, as options; the first flips under atomic:8 with other seeds."""
    rows = ft.bundled_model().prompts
    return [word for row in (36, 31) for word in ("--prompt", rows[row].text)]


@pytest.fixture
def served(load_neighbour, engine):
    """A function that serves the bundled model under a reduction."""
    module = load_neighbour(Path(__file__).parent / "model_server.py")
    return lambda reduction, **options: module.ModelServer(engine, reduction, **options)


def test_a_server_with_atomics_fails_and_with_a_fixed_order_passes(run_main, served, prompts):
    """Exit 1 and 0 on the same model; what cannot be known from outside is said."""
    with served("atomic:8") as server:
        affected = run_main(trace_check.main, "--server", server.url, *SHORT, *prompts)
    assert (affected.code, affected.err) == (1, "")
    assert "affected: the same greedy request gives other results" in affected.out
    assert "kernel in use: cannot be known from outside" in affected.out
    assert "vLLM 0.0-test" in affected.out
    with served("deterministic:8") as server:
        fixed = run_main(trace_check.main, "--server", server.url, *SHORT, *prompts, "--json")
    found = json.loads(fixed.out)
    assert (fixed.code, found["flips"], found["runs_with_changed_bits"]) == (0, 0, 0)
    assert found["repeatable_by_construction"] is False
    assert found["flips_per_1000_tokens_at_most"] == pytest.approx(
        2995.73 / found["tokens_compared"], rel=1e-4
    )
    assert isinstance(found["ties"], int)


def test_the_servers_tokens_are_the_engines(served, engine, prompts):
    """Token ids, ties and their number agree with the engine behind the server."""
    with served("deterministic:8") as server:
        client = CompletionsServer(server.url, "tuned")
        found = client.complete(prompts[1], 24)
    from fliptrace.studies.engines import encode, generate_once

    own = generate_once(
        engine,
        encode(engine, prompts[1], "test", chat_template=False),
        reduction="deterministic:8",
        seed=0,
        max_new_tokens=24,
    )
    assert found.token_ids == own.token_ids
    assert client.says_ids
    # The engine's logits are BF16, log-probabilities FP32: what ties there ties here.
    assert found.ties == own.ties


def test_golden_digests_of_a_server(run_main, served, prompts, tmp_path):
    """Saved from one server, equal on another with the same reduction, different with another one."""
    golden = tmp_path / "golden.json"
    with served("deterministic:8") as server:
        saved = run_main(
            trace_check.main, "--server", server.url, *SHORT, *prompts, "--save", golden
        )
    assert saved.code == 0
    for reduction, code, words in (
        ("deterministic:8", 0, "golden digests: equal"),
        ("unsplit", 1, "golden file"),
    ):
        with served(reduction) as server:
            again = run_main(
                trace_check.main, "--server", server.url, *SHORT, *prompts, "--against", golden
            )
        assert (again.code, words in again.out) == (code, True), again
    with served("atomic:8") as server:
        refused = run_main(
            trace_check.main, "--server", server.url, *SHORT, *prompts, "--save", tmp_path / "no"
        )
    assert (refused.code, "FLIPTRACE_SHRINK" in refused.err) == (1, True)
    with served("deterministic:8") as server:
        other = run_main(
            trace_check.main, "--server", server.url, *SHORT, "--prompt", "x", "--against", golden
        )
    assert (other.code, "other prompts" in other.err) == (2, True)


def test_a_server_that_is_not_vllm(run_main, served, prompts):
    """Without token ids tokens are compared as texts, and that is said."""
    with served("unsplit", vllm=False) as server:
        found = run_main(trace_check.main, "--server", server.url, *SHORT, *prompts)
    assert found.code == 0
    assert "compared as texts" in found.out
    assert "version not said" in found.out


def test_trouble_with_servers(run_main, served):
    """One line each: no server, no such model, several models, no log-probabilities, options that do not fit."""
    nowhere = run_main(trace_check.main, "--server", "http://127.0.0.1:9", *SHORT)
    assert (nowhere.code, nowhere.err.count("\n")) == (2, 1)
    assert "is it running?" in nowhere.err
    with served("unsplit", with_logprobs=False) as server:
        with pytest.raises(InputError, match="several models, name one: base, tuned"):
            CompletionsServer(server.url)
        with pytest.raises(InputError, match="no model 'other'"):
            CompletionsServer(server.url, "other")
        with pytest.raises(InputError, match="no log-probabilities"):
            CompletionsServer(server.url, "tuned").complete("Hello", 2)
    for url in ("ftp://127.0.0.1", "127.0.0.1:80", "file:///etc/passwd"):
        with pytest.raises(InputError, match="http://HOST:PORT"):
            CompletionsServer(url)
    mixed = run_main(trace_check.main, "--server", "http://x", "--reduction", "unsplit")
    assert (mixed.code, "--reduction" in mixed.err) == (2, True)
    unheard = run_main(
        trace_check.main, "--server", "http://x", "--engine", "vllm", "--device", "cpu"
    )
    assert (unheard.code, "leave out --engine and --device" in unheard.err) == (2, True)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"tokens": [], "token_logprobs": [], "top_logprobs": []}, "nothing was compared"),
        ({"tokens": ["a"], "token_logprobs": [], "top_logprobs": []}, "no log-probabilities"),
        ({"tokens": ["token_id:x"], "token_logprobs": [0.0], "top_logprobs": [{}]}, "no log-prob"),
        ({"tokens": ["a"], "token_logprobs": ["x"], "top_logprobs": [{}]}, "no log-probabilities"),
        ({"tokens": ["a"], "token_logprobs": [0.0], "top_logprobs": [[1]]}, "no log-probabilities"),
        (None, "no log-probabilities"),
    ],
)
def test_answers_that_are_none(monkeypatch, said, words):
    """A server that says nothing, or other than it should, is refused; it never passes."""
    answers = {
        "/v1/models": {"data": [{"id": "m"}]},
        "/version": {"version": "1"},
        "/v1/completions": {"choices": [{"logprobs": said}]},
    }
    monkeypatch.setattr(ServerClient, "ask", lambda self, path, body=None: answers[path])
    with pytest.raises(InputError, match=words):
        run_server_check(ServerSettings("http://x", prompts=("a",), rounds=2))


def test_a_log_probability_that_is_no_number_is_compared(monkeypatch):
    """NaN, which Python's JSON lets through, has bits like any other value."""
    logprobs = {"tokens": ["a"], "token_logprobs": [float("nan")], "top_logprobs": [{"a": 0.0}]}
    answers = {
        "/v1/models": {"data": [{"id": "m"}]},
        "/version": {"version": "1"},
        "/v1/completions": {"choices": [{"logprobs": logprobs}]},
    }
    monkeypatch.setattr(ServerClient, "ask", lambda self, path, body=None: answers[path])
    assert run_server_check(ServerSettings("http://x", prompts=("a",), rounds=2)).repeatable


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here")
def test_vllms_own_server(run_main, load_neighbour, tmp_path):
    """vLLM's server with the bundled adapter, started here: what torch sums on the CPU repeats."""
    module = load_neighbour(Path(__file__).parent / "model_server.py")
    bundled = ft.bundled_model()
    with module.vllm_server(bundled.model, bundled.adapter, tmp_path / "log") as url:
        found = run_main(trace_check.main, "--server", url, *SHORT, "--json")
    document = json.loads(found.out)
    assert (found.code, document["flips"]) == (0, 0)
    assert document["tokens_compared"] > 20
    assert document["manifest"]["server"]["version"]
