"""Fixtures of the store's tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture(scope="session")
def samples():
    """The module samples.py beside this file (pytest's importlib mode keeps it off sys.path)."""
    spec = importlib.util.spec_from_file_location("store_samples", FOLDER / "samples.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def record(samples):
    """A function that writes a sample trace of some steps and returns its path."""
    from fliptrace.store import TraceWriter

    def write(path, steps=3, seed=0):
        with TraceWriter(path, samples.MANIFEST) as writer:
            for step in range(steps):
                writer.write_step(*samples.make_step(step, seed))
            writer.close(samples.CLOSING)
        return path

    return write
