"""What the tests of this folder share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def operators():
    """The module operators.py beside this file (pytest's importlib mode keeps it off sys.path)."""
    name = "vllm_plugin_operators"
    if name not in sys.modules:
        path = Path(__file__).with_name("operators.py")
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
