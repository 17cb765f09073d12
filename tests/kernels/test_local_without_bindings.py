"""Without the package cuda-bindings a local reduction on a GPU says what to install, compiling as well as starting."""

from __future__ import annotations

import sys

import pytest

from fliptrace_kernels.errors import LaunchError
from fliptrace_kernels.local import compilation, device


@pytest.mark.parametrize(
    ("module", "used"), [("nvrtc", compilation._nvrtc), ("driver", device._driver)]
)
def test_a_missing_package_is_named(monkeypatch, module, used):
    """The message holds what was needed, what went wrong, and the ways out."""
    monkeypatch.setitem(sys.modules, f"cuda.bindings.{module}", None)
    with pytest.raises(LaunchError) as refused:
        used.__wrapped__()  # past the cache, which may hold the module
    for words in ("cuda-bindings", module, "pip install", "deterministic:8"):
        assert words in str(refused.value)
