"""What several files of GPU tests share: the bundled model, and runs of an engine."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def engine():
    """The bundled model on the GPU; a file about another engine has one of its own."""
    from fliptrace.pair import bundled_model, load_engine

    bundled = bundled_model()
    return load_engine(bundled.model, bundled.adapter, device="cuda")


@pytest.fixture(scope="session")
def runs(load_neighbour, repository_root):
    """Greedy runs, plain and recorded."""
    return load_neighbour(repository_root / "tests" / "capture" / "greedy_runs.py")
