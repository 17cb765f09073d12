"""A pytest plugin: the fixture ``assert_repeatable``. pytest loads it by its entry point; it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def assert_repeatable() -> Callable[..., None]:
    """fliptrace.assert_repeatable: fails unless greedy outputs of an engine, LLM or function repeat."""
    from fliptrace.studies.repeatability import assert_repeatable as check

    return check
