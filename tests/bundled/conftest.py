"""Where the bundled model and the scripts that make it are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "train_bundled_model"

# The scripts are no package: run as scripts, they find each other in their own folder.
sys.path.insert(0, str(SCRIPTS))


@pytest.fixture(scope="session")
def scripts() -> Path:
    """The folder of the training scripts."""
    return SCRIPTS


@pytest.fixture(scope="session")
def bundled() -> Path:
    """The folder of the shipped model."""
    return ROOT / "tracer" / "fliptrace" / "bundled"
