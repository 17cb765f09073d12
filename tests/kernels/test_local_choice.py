"""The layout that local:S chooses, against times measured on an NVIDIA H200."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from fliptrace_kernels.local import Arrangement
from fliptrace_kernels.local.arrangements import CANDIDATES, ROW_STEPS, choose, estimate

FILE = Path(__file__).parents[2] / "examples/measure/results/h200-local.jsonl"
HEADER, *LINES = [json.loads(line) for line in FILE.read_text("utf-8").splitlines()]
SPLITS = HEADER["splits"]
FIELDS = HEADER["arrangement"].split(".")


def times(line):
    """Return measured microseconds by arrangement, of every one that was timed."""
    return {
        Arrangement(**dict(zip(FIELDS, map(int, name.split(".")), strict=True))): time
        for name, time in line["microseconds"].items()
    }


def shape(line):
    return {name: line[name] for name in ("rows", "size", "rank", "slices")}


def over(line):
    """Return how much longer than the fastest the best by estimate took, of those timed."""
    measured = times(line)
    kept = [a for a in measured if a in CANDIDATES]
    best = min(kept, key=lambda a: estimate(a, *shape(line).values(), SPLITS))
    return measured[best] / min(measured.values())


def test_the_estimate_finds_the_fastest_layout():
    """Of 216 shapes, three are more than 5 % from the fastest layout timed, none 7 %."""
    found = {tuple(shape(line).values()): over(line) for line in LINES}
    assert len(found) == 216
    far = {key: ratio for key, ratio in found.items() if ratio > 1.05}
    assert len(far) <= 3, far
    assert max(found.values()) < 1.07
    assert all(rows >= 2048 for rows, *_ in far)
    assert sum(found.values()) / len(found) < 1.01


def test_up_to_1024_rows_the_choice_was_timed():
    """What is chosen there is no guess: it is among the layouts timed, within 5 % of the fastest."""
    for line in LINES:
        if line["rows"] > 1024:
            continue
        chosen = replace(choose(**shape(line), splits=SPLITS), depth=0)
        measured = times(line)
        assert measured[chosen] <= 1.05 * min(measured.values()), (shape(line), chosen)


@pytest.mark.parametrize("rank", [1, 8, 64, 128, 256, 512])
@pytest.mark.parametrize("size", [64, 576, 4096, 14336, 28672])
@pytest.mark.parametrize("slices", [1, 4])
def test_shapes_that_were_not_timed(rank, size, slices):
    """One row gets a small block, many rows a large one; an estimate grows with the rows."""
    chosen, times = [], []
    for rows in ROW_STEPS:
        layout = choose(rows=rows, size=size, rank=rank, slices=slices, splits=SPLITS)
        assert layout.fits(SPLITS)
        chosen.append(layout)
        times.append(estimate(layout, rows, size, rank, slices, SPLITS))
    assert all(later >= 0.95 * sooner for sooner, later in pairwise(times))
    assert chosen[0].tokens <= 8
    assert chosen[-1].tokens * chosen[-1].ranks >= 256
