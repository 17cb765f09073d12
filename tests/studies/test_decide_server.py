"""trace-study decide through a server's interface: a real model behind it; with vLLM installed, vLLM's own server."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

import fliptrace as ft
from fliptrace.command_line import trace_study

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def engine():
    """The bundled model on the CPU."""
    bundled = ft.bundled_model()
    return ft.load_engine(bundled.model, bundled.adapter, device="cpu")


@pytest.fixture
def claims(tmp_path):
    """A CSV file of three texts."""
    path = tmp_path / "claims.csv"
    path.write_text("text,label\nTwo and two is 4.,yes\nOne and two is 4.,no\nTen is 4.,no\n")
    return path


def decide(run_main, url, claims, out, *more):
    command = ("decide", "--server", url, "--model", "tuned", "--csv", claims, "--out", out)
    return run_main(
        trace_study.main,
        *command,
        "--question",
        "Is that so?",
        "--repetitions",
        3,
        "--quiet",
        *more,
    )


def test_decisions_of_a_server(
    run_main, load_neighbour, engine, claims, rows_of, undeclared, tmp_path
):
    """Probabilities drift under atomics and repeat under a fixed order; the interface is named, reductions unknown."""
    serve = load_neighbour(HERE / "model_server.py").ModelServer
    found = {}
    for reduction in ("atomic:8", "deterministic:8"):
        out = tmp_path / reduction.replace(":", "-")
        with serve(engine, reduction) as server:
            result = decide(run_main, server.url, claims, out, "--json")
        assert (result.code, result.err) == (0, "")
        (found[reduction],) = json.loads(result.out)["reductions"]
        assert (
            "through the server's own structured-decision interface"
            in (out / "table.md").read_text()
        )
        assert {(row["reduction"], row["seed"]) for row in rows_of(out)} == {("server", None)}
        assert all(row["yes"] + row["no"] == pytest.approx(1) for row in rows_of(out))
        assert undeclared(out) == set()
    assert found["atomic:8"]["changed"]["hits"] > 0
    assert found["deterministic:8"]["changed"]["hits"] == 0
    assert found["deterministic:8"]["right"]["trials"] == 3


def test_trouble_with_deciding_servers(run_main, load_neighbour, engine, claims, tmp_path):
    """A server without the interface, options that do not fit, another model in a begun folder: one line each."""
    serve = load_neighbour(HERE / "model_server.py").ModelServer
    with serve(engine, "unsplit", decides=False) as server:
        refused = decide(run_main, server.url, claims, tmp_path / "a")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "decide without --server" in refused.err
    with serve(engine, "unsplit") as server:
        for more, words in (
            (("--reduction", "unsplit"), "--reduction"),
            (("--yes", "true"), "leave other words out"),
        ):
            result = decide(run_main, server.url, claims, tmp_path / "b", *more)
            assert (result.code, words in result.err) == (2, True), result.err
        assert decide(run_main, server.url, claims, tmp_path / "c").code == 0
        other = decide(run_main, server.url, claims, tmp_path / "c", "--model", "base")
        assert (other.code, "server_model" in other.err) == (2, True)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here")
def test_vllms_own_interface(run_main, load_neighbour, tiny, rows_of, tmp_path):
    """A small random Qwen3 behind vLLM's server; the engine's read of the same prompt gives the same probability."""
    import string

    from transformers import Qwen3Config

    from fliptrace.studies.decide import decision

    configuration = Qwen3Config(**tiny.llama_configuration(head_dim=64).to_dict())
    model = tiny.write_model(tmp_path / "model", configuration)
    text = (model / "tokenizer.json").read_text()
    for number, word in enumerate(["yes", "no", *string.ascii_uppercase, *string.digits], start=4):
        text = text.replace(f'"w{number}"', f'"{word}"')
    (model / "tokenizer.json").write_text(text)
    adapter = tiny.write_adapter(tmp_path / "adapter", model)
    claims = tmp_path / "claims.csv"
    claims.write_text("text,label\nw60 w61 w62,yes\nw80 w81,no\n")
    module = load_neighbour(HERE / "model_server.py")
    with module.vllm_server(model, adapter, tmp_path / "log") as url:
        result = decide(run_main, url, claims, tmp_path / "study", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["reductions"][0]["changed"]["hits"] == 0
    engine = ft.load_engine(str(model), str(adapter), device="cpu")
    asked = "w60 w61 w62\n\nQuestion: Is that so?\nyes\nno\nAnswer with yes or no only."
    prompt = ft.encode_prompt(engine.tokenizer, asked)
    engine.start(prompt.ids)
    yes, _, mass = decision(engine.step(), 4, 5)
    row = rows_of(tmp_path / "study")[0]
    assert row["prompt_tokens"] == len(prompt.ids)
    assert row["yes"] == pytest.approx(
        yes, abs=0.01
    )  # other kernels: BF16 logits of another engine
    assert row["label_mass"] == pytest.approx(mass, rel=0.05)
