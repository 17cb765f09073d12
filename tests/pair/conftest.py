"""Engines on tiny models, made once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def models(tiny, tmp_path_factory):
    """Folders of a tiny Llama and its adapter."""
    root = tmp_path_factory.mktemp("models")
    model = tiny.write_model(root / "model", tiny.llama_configuration())
    return SimpleNamespace(model=model, adapter=tiny.write_adapter(root / "adapter", model))


@pytest.fixture(scope="session")
def engine(models):
    """An engine on the tiny Llama, used again and again."""
    from fliptrace.pair import load_engine

    return load_engine(str(models.model), str(models.adapter), device="cpu")


@pytest.fixture
def traced(engine):
    """A function that traces a quick pair; all are closed after the test."""
    from fliptrace.pair import trace_pair

    pairs = []
    quick = {"attempts": 1, "max_new_tokens": 3, "observer_control": False}

    def run(prompt="w5 w6 w7", **changes):
        pairs.append(trace_pair(engine, prompt=prompt, **(quick | changes)))
        return pairs[-1]

    yield run
    for pair in pairs:
        pair.close()
