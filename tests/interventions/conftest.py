"""Tiny engines and pairs with a planted cause, made once per session."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(scope="session")
def planting(load_neighbour):
    """The module that records pairs with a planted cause."""
    return load_neighbour(Path(__file__).parent / "planting.py")


@pytest.fixture(scope="session")
def model_folders(tiny, tmp_path_factory):
    """A function: (model folder, adapter folder) of a tiny model whose adapter counts for much."""
    made = {}

    def make(kind, *, adapter_seed=1, **settings):
        key = (kind, adapter_seed, tuple(sorted(settings.items())))
        if key not in made:
            root = tmp_path_factory.mktemp(kind)
            configuration = {
                "llama": tiny.llama_configuration,
                "gemma": lambda: tiny.gemma_configuration(tie_word_embeddings=False),
            }[kind]()
            model = tiny.write_model(root / "model", configuration, **settings)
            adapter = tiny.write_adapter(root / "adapter", model, strength=1.0, seed=adapter_seed)
            made[key] = model, adapter
        return made[key]

    return make


@pytest.fixture(scope="session")
def load(model_folders):
    """A function that loads an engine on a tiny model."""
    from fliptrace.pair import load_engine

    def engine(kind, *, dtype="auto", attention="sdpa", **settings):
        model, adapter = model_folders(kind, **settings)
        return load_engine(str(model), str(adapter), device="cpu", dtype=dtype, attention=attention)

    return engine


@pytest.fixture(scope="session")
def llama(load):
    """An engine on a tiny Llama."""
    return load("llama")


@pytest.fixture(scope="session")
def gemma(load):
    """An engine on a tiny Gemma 3: two of its three layers have a sliding window of 8."""
    return load("gemma")


@pytest.fixture(scope="session")
def planted(planting, tiny, tmp_path_factory, llama, gemma):
    """A function: the planted pair of ``llama`` or ``gemma``, recorded once."""
    torch.set_num_threads(1)
    made = {}

    def get(kind="llama"):
        if kind not in made:
            engine = {"llama": llama, "gemma": gemma}[kind]
            # Where the search is short on common processors; elsewhere it goes on.
            likely = {"llama": (1, 2, 10, 5), "gemma": (0, 11)}[kind]
            seeds = dict.fromkeys((*likely, *range(30)))
            prompts = {seed: tiny.prompt_ids(10, seed=seed) for seed in seeds}
            folder = tmp_path_factory.mktemp("planted")
            with engine.reducing("unsplit"):
                made[kind] = planting.planted_pair(engine, prompts, folder)
        return made[kind]

    return get


@pytest.fixture(params=["llama", "gemma"])
def plant(request, planted):
    """Both planted pairs in turn."""
    return planted(request.param)


@pytest.fixture
def typed(monkeypatch, capfd):
    """A function that runs trace-intervene in this process: arguments in; code, stdout and stderr out."""
    from fliptrace_interventions.command_line import trace_intervene

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["trace-intervene", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            trace_intervene.main()
        out, err = capfd.readouterr()
        return SimpleNamespace(code=stopped.value.code, out=out, err=err)

    return run
