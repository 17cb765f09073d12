"""Figures: nothing that differs disappears, and what was not observed never looks equal."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fliptrace import views
from fliptrace.errors import InputError
from fliptrace.numerics import CoordinateClass
from fliptrace.sites import Site
from fliptrace.views import boundary_figure, heatmap_figure, margin_figure
from fliptrace.views.heatmap import row_tick
from fliptrace.views.palette import CLASS_COLOURS
from fliptrace.views.pooling import pool


def test_one_surviving_coordinate_in_a_million_stays(pairs):
    """Wherever it is planted, pooling to 250,000 cells or to 7 keeps its class, size and count."""
    generator = torch.Generator().manual_seed(3)
    rows = tuple(("shrink", row[1]) for row in pairs.rows(143) if row[0] == "shrink")[:1000]
    for budget in (250_000, 40_000, 999, 7):
        grid = pairs.grid("decode", rows, range(1, 1001))
        row, column = (int(n) for n in torch.randint(0, 1000, (2,), generator=generator))
        grid.classes[row, column] = int(CoordinateClass.SURVIVING)
        grid.magnitudes[row, column], grid.ulps[row, column] = 1.9e-9, 1
        grid.surviving[row, column], grid.origins[row, column] = 1, 1
        cells = pool(grid, cell_budget=budget)
        assert cells.classes.size <= budget
        assert cells.pooled
        assert "Max-pooled" in cells.badge
        (found,) = np.argwhere(cells.classes == CoordinateClass.SURVIVING)
        assert rows[row] in cells.rows[found[0]]
        assert column + 1 in cells.columns[found[1]]
        place = tuple(found)
        assert cells.magnitudes[place] == np.float32(1.9e-9)
        assert (cells.ulps[place], cells.origins[place], cells.surviving.sum()) == (1, 1, 1)


def test_pooling_keeps_a_small_grid_as_it_is(pairs):
    """Below the budget nothing changes and no badge shows."""
    grid = pairs.make().diff.grids["prefill"]
    cells = pool(grid)
    assert not cells.pooled
    assert cells.badge == ""
    assert np.array_equal(cells.classes, grid.classes.numpy())


def test_equal_and_unobserved_pool_to_unobserved(pairs):
    """A merged cell is equal only if all of it was seen to be; a difference still wins."""
    grid = pairs.grid("decode", pairs.rows(1), range(1, 5))
    grid.classes[:, 1] = int(CoordinateClass.NOT_OBSERVED)
    grid.classes[:, 2] = int(CoordinateClass.NOT_OBSERVED)
    grid.classes[:, 3] = int(CoordinateClass.LATENT)
    cells = pool(grid, cell_budget=2 * len(grid.rows))
    assert cells.classes[0].tolist() == [CoordinateClass.NOT_OBSERVED, CoordinateClass.LATENT]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("colour", ["class", "magnitude"])
def test_heatmaps_draw_every_class_in_its_place(pairs, phase, colour):
    """Values, an open hatched cell where nothing was observed, hover texts, a valid figure."""
    pair = pairs.make()
    figure = heatmap_figure(pair.diff, phase=phase, colour=colour, reference=pair.reference)
    classes = pair.diff.grids[phase].classes.numpy()
    drawn = np.asarray(figure.data[1].z)
    assert np.array_equal(np.isnan(drawn), classes == CoordinateClass.NOT_OBSERVED)
    assert np.array_equal(np.nan_to_num(drawn, nan=-1), classes)
    hatched = [value for value in figure.data[0].x if value is not None]
    assert min(hatched) == classes.shape[1] // 2 - 0.5
    assert figure.data[0].fillpattern.shape == "/"
    texts = figure.data[1].text
    assert "not observed" in texts[3][-1]
    assert json.loads(figure.to_json())["data"]
    if colour == "magnitude":
        shades = np.asarray(figure.data[2].z, dtype=float)
        assert np.array_equal(np.isfinite(shades), pair.diff.grids[phase].magnitudes.numpy() > 0)


def test_the_heatmap_marks_the_first_root_and_the_flip(pairs):
    """The ring is on the root's cell; the flip is a line in decode."""
    pair = pairs.make()
    prefill = heatmap_figure(pair.diff, phase="prefill", reference=pair.reference)
    ring = prefill.data[3]
    row = pair.diff.grids["prefill"].rows.index(("shrink", pair.diff.first_propagating.site))
    assert (ring.x[0], ring.y[0], ring.visible) == (5, row, True)
    assert "apples" in prefill.layout.xaxis.ticktext[5]
    decode = heatmap_figure(pair.diff, phase="decode")
    assert decode.layout.shapes[0].x0 == pair.diff.flip.step - 1


def test_wrong_choices_are_named(pairs):
    """The message says what there is."""
    with pytest.raises(InputError, match="phase must be one of prefill, decode; got 'warmup'"):
        heatmap_figure(pairs.make().diff, phase="warmup")
    with pytest.raises(InputError, match="colour must be one of class, magnitude"):
        heatmap_figure(pairs.make().diff, colour="red")


def test_labels_cannot_be_markup(pairs):
    """plotly reads tags, links, templates and formulas in labels; none is left."""
    pair = pairs.hostile()
    figure = heatmap_figure(pair.diff, reference=pair.reference)
    labels = [*figure.layout.xaxis.ticktext, *figure.layout.yaxis.ticktext]
    labels += [part for row in figure.data[1].text for text in row for part in text.split("<br>")]
    assert labels
    assert not [label for label in labels if set(label) & set("<>$%{}\\")]


def test_the_margin_lane_marks_ties_and_the_flip(pairs):
    """Ties are diamonds below the smallest margin; the flip is a line at its step."""
    pair = pairs.make()
    figure = margin_figure(pair.diff)
    reference, _, ties = figure.data
    assert list(ties.x) == [4]
    assert ties.y[0] < min(value for value in reference.y if value is not None)
    assert reference.y[4] is None
    assert figure.layout.shapes[0].x0 == pair.diff.flip.step
    assert figure.layout.annotations[0].text == "flip"


def test_the_boundary_picture_places_values_exactly(pairs):
    """Offsets from the boundary above, FP32 ULP below."""
    coordinate = pairs.coordinate()
    figure = boundary_figure(coordinate)
    upper, lower = figure.data[:2], figure.data[2:]
    assert [trace.x[0] for trace in upper] == [0.0, coordinate.candidate - coordinate.reference]
    assert upper[0].x[1] == 0.0103759765625 - 0.010345458984375
    assert upper[1].x[1] == 0.01031494140625 - 0.010345458984375
    assert [trace.x[0] for trace in lower] == [0.0, -2.0]
    assert "0x3c298000" in upper[0].name


@pytest.mark.parametrize(
    ("reference", "candidate", "dtype", "reason"),
    [
        (1.0, 1.0000001, torch.float32, "an FP32 model has no rounding boundary"),
        (0.0, -0.0, torch.bfloat16, "sign of zero"),
        (1.0, math.nan, torch.bfloat16, "not finite"),
    ],
)
def test_without_a_boundary_the_picture_says_why(pairs, reference, candidate, dtype, reason):
    """No number line is made up."""
    coordinate = pairs.coordinate(reference, candidate, dtype=dtype)
    figure = boundary_figure(coordinate, str(dtype).removeprefix("torch."))
    assert not figure.data
    assert reason in figure.layout.annotations[0].text


# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protan": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deutan": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritan": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}


def lab(colour: str, matrix: np.ndarray) -> np.ndarray:
    rgb = np.array([int(colour[n : n + 2], 16) for n in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(matrix @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratio = xyz @ linear / np.array([0.9505, 1.0, 1.089])
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("blindness", BLINDNESS)
def test_class_colours_stay_apart_for_the_colour_blind(theme, blindness):
    """Every two classes differ by at least 20 in CIELAB, ten times a just noticeable difference."""
    colours = CLASS_COLOURS[theme].values()
    points = [lab(colour, BLINDNESS[blindness]) for colour in colours]
    distances = [float(np.linalg.norm(a - b)) for a, b in itertools.combinations(points, 2)]
    assert min(distances) > 20, distances


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize("blindness", BLINDNESS)
def test_origin_colours_stay_apart_for_the_colour_blind(theme, blindness):
    """Equal, added here, inherited and not separable, as the page's style has them, at least 20 apart."""
    style = (Path(views.__file__).parent / "templates/report.css").read_text("utf-8")
    names = ("equal", "added", "inherited", "unknown")
    colours = [re.findall(rf"--{name}: (#\w+);", style)[theme] for name in names]
    points = [lab(colour, BLINDNESS[blindness]) for colour in colours]
    distances = [float(np.linalg.norm(a - b)) for a, b in itertools.combinations(points, 2)]
    assert min(distances) > 20, distances


def test_views_import_neither_plotly_nor_rich_by_themselves():
    """The package loads a name when it is used; the story needs neither."""
    code = (
        "import sys, fliptrace.views as v; v.tell_story; v.plain_summary;"
        "print(sorted({'plotly', 'rich', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.strip() == "[]"


def test_slices_of_a_fused_projection_can_be_told_apart():
    """Cut after 22 characters their whole names would all read the same."""
    names = [
        Site.from_path(f"model.layers.7.self_attn.qkv_proj[{part}]")
        for part in ("q_proj", "k_proj", "v_proj")
    ]
    assert [row_tick("shrink", site) for site in names] == [
        "7 [q_proj]",
        "7 [k_proj]",
        "7 [v_proj]",
    ]
    assert row_tick("shrink", Site.from_path("model.layers.7.mlp.up_proj")) == "7 mlp.up_proj"
    assert "\x1b" not in row_tick("shrink", Site.from_path("model.layers.7.x[\x1bq]"))
