"""Rows that a GPU might have given."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fliptrace_kernels.bench.cells import Cell
from fliptrace_kernels.bench.results import Key, Machine, Row


@pytest.fixture
def machine() -> Machine:
    """A GPU."""
    return Machine("NVIDIA Test", "1.2.3", "2.11.0", "3.6.0")


@pytest.fixture
def make_row(machine: Machine) -> Callable[..., Row]:
    """Build a row from a kernel, a cell and a time."""

    def make(
        kernel: str,
        cell: Cell,
        *times: float,
        source: str = "s1",
        failure: str = "",
        on: Machine = machine,
        **details: object,
    ) -> Row:
        if kernel.startswith(("deterministic", "local", "unsplit", "tree")):
            details = {"role": "ours"} | details
        return Row(Key(on, kernel, source, cell), times, failure, details)

    return make
