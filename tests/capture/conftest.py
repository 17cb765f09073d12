"""Tiny models for the tests of this folder, made once per session."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from fliptrace.capture.decoding import generate
from fliptrace.capture.recorder import Recorder, RecorderOptions
from fliptrace.capture.transformers_engine import TransformersEngine, load_model
from fliptrace.manifest import Manifest
from fliptrace.store import TraceWriter, open_trace
from fliptrace.trace import Closing


@pytest.fixture(scope="session")
def llama_folders(tiny, tmp_path_factory):
    """(model folder, adapter folder) of a tiny Llama."""
    root = tmp_path_factory.mktemp("llama")
    model = tiny.write_model(root / "model", tiny.llama_configuration())
    return model, tiny.write_adapter(root / "adapter", model)


@pytest.fixture(scope="session")
def gemma_folders(tiny, tmp_path_factory):
    """(model folder, adapter folder) of a tiny Gemma 3 with sliding windows of 8."""
    root = tmp_path_factory.mktemp("gemma")
    model = tiny.write_model(root / "model", tiny.gemma_configuration())
    return model, tiny.write_adapter(root / "adapter", model)


@pytest.fixture
def llama(llama_folders):
    """An engine on the tiny Llama, unsplit."""
    model, adapter = llama_folders
    return TransformersEngine(load_model(str(model), str(adapter), device="cpu"))


@pytest.fixture
def gemma(gemma_folders):
    """An engine on the tiny Gemma 3, unsplit."""
    model, adapter = gemma_folders
    return TransformersEngine(load_model(str(model), str(adapter), device="cpu"))


@pytest.fixture(params=["llama", "gemma"])
def engine(request):
    """Both tiny engines in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def record(tmp_path):
    """A function that records one execution into a new file and opens it: (trace, execution)."""
    return Recording(tmp_path)


class Recording:
    """Records executions of engines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def __call__(self, engine, prompt, *, tokens=6, during=None, **options):
        """Record; ``during`` is a context manager entered around the generation."""
        self.count += 1
        path = self.folder / f"{self.count}.trace"
        sections = engine.describe() | {"prompt": {"ids_sha256": str(hash(tuple(prompt)))}}
        settings = RecorderOptions(**options)
        with TraceWriter(path, Manifest(sections)) as writer:
            recorder = Recorder(engine, writer, settings)
            with (
                engine.observed(recorder, modules=settings.modules),
                during or contextlib.nullcontext(),
            ):
                execution = generate(
                    engine,
                    prompt,
                    max_new_tokens=tokens,
                    end_ids=(),
                    on_choice=recorder.complete_step,
                )
                recorder.finish()
            writer.close(Closing(True, execution.stop_reason, len(execution.token_ids)))
        return open_trace(path), execution
