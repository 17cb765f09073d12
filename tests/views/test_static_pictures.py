"""Pictures for papers: what they show is what was found, in files that are equal when they are drawn again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
import zlib

import numpy as np
import pytest

from fliptrace.errors import InputError, StorageError
from fliptrace.numerics import CoordinateClass
from fliptrace.verdicts import Outcome
from fliptrace.views import static
from fliptrace.views.palette import CLASS_COLOURS
from fliptrace.views.static.boundary import recorded_margins
from fliptrace.views.static.canvas import drawable

BEGINNINGS = {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}


@pytest.fixture(scope="module")
def results(repository_root):
    """The rows measured on an H200 that are kept in the repository."""
    folder = repository_root / "examples" / "measure" / "results"
    lines = (folder / "h200-vllm-latency.jsonl").read_text("utf-8").splitlines()
    return {
        "replay": json.loads((folder / "h200-replay.json").read_text("utf-8"))["rows"],
        "latency": [json.loads(line) for line in lines],
    }


def pixels_of(axes):
    """The colours of the cells that a map shows, [rows, columns, RGB] in 0 to 255."""
    return np.round(np.asarray(axes.images[0].get_array())[..., :3] * 255).astype(int)


def colour(text):
    return [int(text[start : start + 2], 16) for start in (1, 3, 5)]


def texts(figure):
    import matplotlib.text

    return " ".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def test_files_are_of_their_kind_and_equal_when_drawn_again(pairs, tmp_path):
    """Every format of every picture, twice: the same bytes, no date in them, fonts embedded in the PDF."""
    pair = pairs.make(layers=3)
    for name in ("one", "two"):
        written = static.write_figures(tmp_path / name, static.FORMATS, pair.diff, pair.reference)
        expected = {f"{p}.{k}" for p in ("heatmap", "classes", "boundary") for k in static.FORMATS}
        assert {path.name for path in written} == expected
    for path in written:
        data = path.read_bytes()
        assert data == (tmp_path / "one" / path.name).read_bytes()
        assert data.startswith(BEGINNINGS[path.suffix[1:]])
        assert b"Date" not in data
        if path.suffix == ".pdf":
            assert b"/FontFile2" in data
        if path.suffix == ".svg":
            assert b"<text" not in data
            assert not re.search(rb'(href|src)="(?!#|data:image/png)', data)


def test_the_map_of_classes_has_every_cell_in_its_colour(pairs):
    """Cells that were not observed have no colour, and one hatched shape covers exactly them."""
    diff = pairs.make().diff
    figure = static.heatmap_picture(diff, colour="class")
    for axes, grid in zip(figure.axes, diff.grids.values(), strict=False):
        classes, found = grid.classes.numpy(), pixels_of(axes)
        for label, tint in CLASS_COLOURS["light"].items():
            assert (found[classes == label] == colour(tint)).all()
        alpha = np.asarray(axes.images[0].get_array())[..., 3]
        assert np.array_equal(alpha == 0, classes == CoordinateClass.NOT_OBSERVED)
        (hatched,) = [patch for patch in axes.patches if patch.get_hatch()]
        corners = hatched.get_xy()
        assert corners[:, 0].min() == classes.shape[1] // 2 - 0.5
        assert corners[:, 1].tolist() == pytest.approx([2.5, 2.5, 3.5, 3.5, 2.5])
    assert "not observed" in texts(figure)


def test_magnitudes_grow_darker_and_equal_is_the_lightest(pairs):
    """In gray, too: the brightness falls with the magnitude, and equal cells are brighter than all of them."""
    grid = pairs.grid("prefill", pairs.rows(1)[:1], range(6))
    grid.classes[0, 1:] = int(CoordinateClass.SURVIVING)
    for column, magnitude in enumerate((1e-9, 1e-7, 1e-4, 1.0), start=1):
        grid.magnitudes[0, column] = magnitude
    diff = pairs.make(grids={"prefill": grid}).diff
    figure = static.heatmap_picture(diff)
    bright = pixels_of(figure.axes[0])[0] @ np.array([0.299, 0.587, 0.114])
    assert bright[0] > bright[1] > bright[2] > bright[3] > bright[4] > bright[5] == 0
    assert bright[0] - bright[1] > 40
    assert "differs without a magnitude" in texts(figure)


def test_one_coordinate_among_half_a_million_is_drawn(pairs):
    """Columns are merged to what a printer can show; the worst of each group stays, and the picture says so."""
    grid = pairs.grid("decode", pairs.rows(28), range(1, 2001))
    grid.classes[17, 1234] = int(CoordinateClass.SURVIVING)
    grid.magnitudes[17, 1234] = 1.9e-9
    diff = pairs.make(grids={"decode": grid}).diff
    figure = static.heatmap_picture(diff, colour="class")
    found = pixels_of(figure.axes[0])
    surviving = (found == colour(CLASS_COLOURS["light"][CoordinateClass.SURVIVING])).all(-1)
    assert found.shape[1] <= 400
    assert [place.tolist() for place in np.nonzero(surviving)] == [[17], [1234 // 5]]
    assert "Max-pooled" in texts(figure).replace("\n", " ")


def reliability_bin(predicted=0.25, observed=0.5, comparisons=40):
    return {
        "predicted": predicted,
        "observed": observed,
        "low": observed / 2,
        "high": 1 - observed / 2,
        "comparisons": comparisons,
    }


def test_reliability_points_are_where_the_bins_are():
    """Markers at prediction and observation in percent, larger for more comparisons, with the intervals as lines."""
    bins = [reliability_bin(), reliability_bin(0.75, 0.125, 400)]
    figure = static.reliability_picture({"prompts": bins, "steps": [reliability_bin(1.0, 1.0)]})
    (axis,) = figure.axes
    lines, markers, _, others = axis.collections
    assert markers.get_offsets().tolist() == [[25, 50], [75, 12.5]]
    assert others.get_offsets().tolist() == [[100, 100]]
    small, large = markers.get_sizes()
    assert large > small
    assert [line.tolist() for line in lines.get_segments()] == [
        [[25, 25], [25, 75]],
        [[75, 6.25], [75, 93.75]],
    ]
    assert "prompts" in texts(figure)


@pytest.mark.parametrize("width", [static.COLUMN, static.PAGE])
def test_pictures_fit_the_paper(pairs, results, width, tmp_path):
    """Each is as wide as it was asked for, in one column and in two, and nothing is cut off at its sides."""
    pair = pairs.make(layers=28)
    pictures = {
        "heatmap": static.heatmap_picture(pair.diff, pair.reference, width=width),
        "boundary": static.boundary_picture(
            pair.diff.first_propagating.coordinates[0],
            recorded_margins(pair.diff.flip),
            width=width,
        ),
        "replay": static.replay_picture(results["replay"], width=width),
        "latency": static.latency_picture(results["latency"], width=width),
        "reliability": static.reliability_picture(
            {"what ran, in as many words as a row of a table has": [reliability_bin()]}, width=width
        ),
    }
    for name, figure in pictures.items():
        path = static.write_picture(figure, tmp_path / f"{name}.png")
        from PIL import Image

        image = np.asarray(Image.open(path).convert("L"))
        assert image.shape[1] == round(width * 300)
        assert (image[:, :3] > 250).all(), f"{name} is cut off on the left"
        assert (image[:, -3:] > 250).all(), f"{name} is cut off on the right"


def test_the_boundary_names_both_values_and_both_tokens(pairs):
    """Values to the last bit, the boundary, the rounded values, and m with its sign."""
    pair = pairs.make()
    first = pair.diff.first_propagating.coordinates[0]
    said = texts(static.boundary_picture(first, recorded_margins(pair.diff.flip)))
    assert "reference 0.010345458984375" in said
    assert f"candidate {first.candidate!r}" in said
    assert "bfloat16 boundary 0.010345458984375" in said
    for rounded in (first.boundary.rounded_reference, first.boundary.rounded_candidate):
        assert repr(rounded) in said
    margins = recorded_margins(pair.diff.flip)
    assert [margin.margin for margin in margins] == [17.25 - 17.125, 17.125 - 17.1875]
    assert "m = 0.125" in said
    assert "m = -0.0625" in said


def test_a_coordinate_without_a_boundary_is_refused(pairs, tmp_path):
    """A sign of zero has no boundary: the function says so, and write_figures leaves the picture out."""
    coordinate = pairs.coordinate(0.0, -0.0)
    with pytest.raises(InputError, match="no rounding boundary"):
        static.boundary_picture(coordinate)
    diff = pairs.make(first_propagating=pairs.row(coordinate)).diff
    written = static.write_figures(tmp_path, ["svg"], diff)
    assert [path.name for path in written] == ["heatmap.svg", "classes.svg"]


def test_an_identical_pair_has_maps_and_no_boundary(pairs, tmp_path):
    """All cells equal: one colour, no colour bar, no root."""
    pair = pairs.make(Outcome.IDENTICAL)
    written = static.write_figures(tmp_path, ["png"], pair.diff, pair.reference)
    assert [path.name for path in written] == ["heatmap.png", "classes.png"]
    found = texts(static.heatmap_picture(pair.diff))
    assert "max |reference" not in found
    assert "root" not in found


def test_a_proof_shows_the_margins_that_it_measured(pairs, made):
    """With an investigation the picture is the proved coordinate's, one bar per arm."""
    from fliptrace.views.static.files import _boundary

    report = made.report()
    best = report.investigation.best_coordinate
    said = texts(_boundary(pairs.make().diff, report)).replace("\n", " ")
    assert f"rank index {best.rank_index}" in said
    assert "reference with candidate's value" in said


def test_hostile_texts_are_only_texts(pairs, tmp_path):
    """Formulas are not set, markup stays markup's letters, what the font lacks is a box; nothing warns."""
    pair = pairs.hostile()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        static.write_figures(tmp_path, ["svg"], pair.diff, pair.reference)
    for path in tmp_path.glob("*.svg"):
        assert b"<script" not in path.read_bytes()
    assert drawable("a$x$\u202e") == "a$x$⟨U+202E⟩"
    assert drawable("é\U00020000") == "é□"


def test_replay_shows_shares_and_zeros_with_their_numbers(results):
    """The committed rows: atomic differs in nearly all comparisons, deterministic in 0 of 118,800."""
    figure = static.replay_picture(results["replay"])
    said = texts(figure)
    assert "all 118,800" in said
    assert said.count("0 of 118,800") == 6
    bars = [bar.get_width() for bar in figure.axes[0].patches]
    row = results["replay"][0]
    assert bars[0] == 100 * row["comparisons_differing"] / row["comparisons"]
    assert min(bars) == 0


def test_latency_ratios_are_paired_by_round(results):
    """Medians and ranges of the committed rows, computed once more by hand for one cell."""
    ratios = {(r.reduction, r.rank, r.batch): r for r in static.latency_ratios(results["latency"])}
    assert "none" not in {name for name, _, _ in ratios}
    times = {
        (row["reduction"], row["round"]): row["seconds"]
        for row in results["latency"]
        if (row["rank"], row["batch"]) == (16, 64)
    }
    by_hand = sorted(times["local", n] / times["unsplit", n] for n in range(5))
    found = ratios["local", 16, 64]
    assert (found.low, found.ratio, found.high) == (by_hand[0], by_hand[2], by_hand[4])
    assert (found.rounds, found.confidence) == (5, 0.9375)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: static.replay_picture([]), "nothing to draw"),
        (lambda: static.replay_picture([{"reduction": "unsplit"}]), "row 0 lacks phase"),
        (lambda: static.latency_picture([]), "nothing to draw"),
        (lambda: static.reliability_picture({}), "1 to 4 series of bins; got 0"),
        (lambda: static.reliability_picture({"prompts": []}), "nothing to draw"),
        (lambda: static.reliability_picture({"p": [{"predicted": 0}]}), "row 0 lacks observed"),
        (
            lambda: static.latency_picture(
                [{"reduction": "a", "rank": 1, "batch": 1, "round": 0, "seconds": 1.0}]
            ),
            "no round has both the baseline 'unsplit'",
        ),
        (lambda: static.parse_formats("svg,gif"), "got 'svg,gif'"),
        (lambda: static.parse_formats(" , "), "svg, pdf, png"),
    ],
)
def test_bad_input_is_named(draw, message):
    """What is wrong, and what is needed."""
    with pytest.raises(InputError, match=re.escape(message)):
        draw()


def test_a_place_that_cannot_be_written_is_named(pairs, tmp_path):
    """A file where the folder should be, and an ending that no picture has."""
    (tmp_path / "figures").write_text("taken")
    with pytest.raises(StorageError, match="figures cannot be made"):
        static.write_figures(tmp_path / "figures", ["svg"], pairs.make().diff)
    figure = static.heatmap_picture(pairs.make().diff)
    with pytest.raises(StorageError, match="cannot be written"):
        static.write_picture(figure, tmp_path / "no" / "a.svg")
    with pytest.raises(InputError, match=r"got 'a\.gif'"):
        static.write_picture(figure, tmp_path / "a.gif")


def test_drawing_changes_no_settings_and_opens_no_window():
    """pyplot is never loaded, and a person's matplotlib settings are what they were."""
    code = (
        "import sys, json; import matplotlib; matplotlib.rcParams['font.size'] = 33.0;"
        "from fliptrace.views import static;"
        "rows = [dict(reduction='unsplit', phase='prefill', comparisons=9, comparisons_differing=0,"
        " elements=9, elements_differing=0)];"
        "figure = static.replay_picture(rows);"
        "print(json.dumps(['matplotlib.pyplot' in sys.modules, matplotlib.rcParams['font.size'],"
        " figure.axes[0].title.get_fontsize()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert json.loads(done.stdout) == [False, 33.0, 8.0], done.stderr


def test_letters_of_a_pdf_can_be_searched(pairs, tmp_path):
    """TrueType with a table of characters: text of the picture can be found and copied."""
    pair = pairs.make()
    first = pair.diff.first_propagating.coordinates[0]
    path = static.write_picture(static.boundary_picture(first), tmp_path / "boundary.pdf")
    data = path.read_bytes()
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", data, re.DOTALL)
    unpacked = b"".join(zlib.decompress(part) for part in streams if part[:1] == b"x")
    assert b"boundary" in unpacked or b"begincmap" in unpacked
