"""Cells of the table."""

from __future__ import annotations

from fliptrace_kernels.bench.cells import MODELS, RANKS, ROWS, Cell, layers_of, table_cells
from fliptrace_kernels.bench.timing import calls_for


def test_the_table_has_every_layer_shape_once():
    """Three models give eleven shapes: Qwen3's down projection is Llama's output projection."""
    cells = table_cells()
    assert len(cells) == len(set(cells)) == 11 * len(ROWS) * len(RANKS)
    assert {(cell.k, cell.slices) for cell in cells} == {
        (layer.k, layer.slices) for layers in MODELS.values() for layer in layers
    }
    assert layers_of(3072, 1) == "Llama-3.2-3B o, Qwen3-0.6B down"


def test_what_matters_most_is_measured_first():
    """Rank 16 before 32 before 64, and few rows before many."""
    order = [(cell.rank, cell.rows) for cell in table_cells()]
    assert order == sorted(order)


def test_least_bytes():
    """x and two A of 16 bit are read, two FP32 outputs written."""
    assert Cell(rows=3, k=10, slices=2, rank=4).least_bytes == 2 * (3 * 10 + 2 * 4 * 10) + 4 * 24


def test_graphs_hold_fewer_calls_where_a_call_takes_longer():
    """96 short calls, 8 long ones."""
    assert calls_for(Cell(1, 576, 1, 16)) == 96
    assert calls_for(Cell(8192, 8192, 1, 64)) == 8
    counts = [calls_for(Cell(rows, 3072, 3, 16)) for rows in ROWS]
    assert counts == sorted(counts, reverse=True)
