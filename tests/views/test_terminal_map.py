"""The map of characters: the worst of merged cells wins, classes need no colour, and every width is kept."""

from __future__ import annotations

import io
import re

import pytest
import torch

from fliptrace.numerics import CoordinateClass
from fliptrace.verdicts import Outcome
from fliptrace.views import plain_summary, terminal_summary
from fliptrace.views.folding import fold
from fliptrace.views.terminal_map import CHARACTERS, ROOT, map_lines

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def rows_of(lines):
    """The cells of each layer by its name."""
    label = max(
        len(found[0]) for line in lines if (found := re.match(r"  layer [\d-]+ +", line.text))
    )
    names = [(line.text[:label].strip(), line.text[label:]) for line in lines[1:]]
    return {name: cells for name, cells in names if re.fullmatch(r"layer [\d-]+|margin|flip", name)}


def printed(pair, width, **settings):
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=width, **settings)
    console.print(terminal_summary(pair.diff, pair.reference, pair.candidate))
    return out.getvalue()


def test_every_class_has_its_own_character():
    """Told apart without colour, in ASCII, and none is the root's."""
    signs = [*CHARACTERS.values(), ROOT]
    assert len(set(signs)) == len(CoordinateClass) + 1
    assert all(sign.isascii() and sign.isprintable() for sign in signs)


def test_a_small_map_shows_every_cell(pairs):
    """With room for all columns each character is the worst of a layer at one position or step."""
    pair = pairs.make()
    lines = map_lines(pair.diff, 80)
    prefill, decode = rows_of(lines)["layer 2"].split("|")
    grid = pair.diff.grids["prefill"]
    members = [n for n, (_, place) in enumerate(grid.rows) if getattr(place, "layer", place) == 2]
    worst = grid.classes[members].max(dim=0).values.tolist()
    expected = [CHARACTERS[CoordinateClass(value)] for value in worst]
    expected[pair.diff.first_propagating.position] = ROOT
    assert prefill == "".join(expected)
    assert len(decode) == len(pair.diff.grids["decode"].columns)


@pytest.mark.parametrize("width", [24, 40, 80])
def test_one_surviving_coordinate_stays_at_any_width(pairs, width):
    """Planted anywhere in 143 layers × 1,000 steps, it is the one # of the map."""
    generator = torch.Generator().manual_seed(width)
    rows = pairs.rows(143)
    for _ in range(5):
        grid = pairs.grid("decode", rows, range(1, 1001))
        row = int(torch.randint(len(rows), (1,), generator=generator))
        column = int(torch.randint(1000, (1,), generator=generator))
        grid.classes[row, column] = int(CoordinateClass.SURVIVING)
        diff = pairs.make(grids={"decode": grid}, first_propagating=None, first_surviving=None).diff
        lines = map_lines(diff, width)
        assert max(len(line.text) for line in lines) <= width
        cells = {k: v for k, v in rows_of(lines).items() if k.startswith("layer")}
        assert len(cells) <= 24
        assert "".join(cells.values()).count("#") == 1
        (name,) = [name for name, line in cells.items() if "#" in line]
        place = rows[row][1]
        layer = place if isinstance(place, int) else place.layer
        first, _, last = name.removeprefix("layer ").partition("-")
        assert int(first) <= layer <= int(last or first)


def test_what_was_not_observed_never_looks_equal(pairs):
    """Merged with equal it stays unobserved; a difference wins over both."""
    grid = pairs.grid("prefill", pairs.rows(1), range(4))
    grid.classes[2, 1] = int(CoordinateClass.NOT_OBSERVED)
    grid.classes[:, 2] = int(CoordinateClass.NOT_OBSERVED)
    grid.classes[:, 3] = int(CoordinateClass.NOT_OBSERVED)
    grid.classes[0, 3] = int(CoordinateClass.LATENT)
    diff = pairs.make(grids={"prefill": grid}, first_propagating=None, first_surviving=None).diff
    assert rows_of(map_lines(diff, 80))["layer 0"] == ".??-"
    assert fold(diff, width=2, height=4).phases[0].classes.tolist() == [
        [CoordinateClass.NOT_OBSERVED, CoordinateClass.LATENT]
    ]


def test_the_lane_shows_margins_ties_and_the_flip(pairs):
    """Step 4 is a tie, step 11 the flip with a margin below 0.1; the prefill's margin is at its last position."""
    pair = pairs.make()
    rows = rows_of(map_lines(pair.diff, 80))
    prefill, decode = rows["margin"].split("|")
    assert prefill == " " * 17 + "2"
    assert decode == "".join("=" if n == 4 else "1" if n == 11 else margin(n) for n in range(1, 12))
    assert rows["flip"].index("^") == len(prefill) + 1 + 10


def margin(step):
    value = 0.5 + step % 5 * 1.7
    return "2" if value < 1 else "3"


def test_an_identical_pair_has_no_map(pairs):
    """A picture of nothing but dots would tell nothing; one that was not observed would."""
    pair = pairs.make(Outcome.IDENTICAL)
    assert map_lines(pair.diff, 80) == []
    assert "Map:" not in plain_summary(pair.diff, pair.reference, pair.candidate)
    pair.diff.grids["decode"].classes[0, 0] = int(CoordinateClass.NOT_OBSERVED)
    assert rows_of(map_lines(pair.diff, 80))["layer 0"].count("?") == 1


@pytest.mark.parametrize("width", [40, 80])
def test_the_summary_keeps_the_width_with_and_without_colour(pairs, width):
    """Plain text, a terminal, and a terminal without colour hold the same lines, none too wide."""
    pair = pairs.make(layers=28)
    plain = plain_summary(pair.diff, pair.reference, pair.candidate, width=width)
    assert max(map(len, plain.splitlines())) <= width
    assert "\x1b" not in plain
    styled = printed(pair, width, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in styled
    bare = printed(pair, width, force_terminal=True, no_color=True)
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|38|9[0-7])[;m]", bare)
    for text in (styled, bare):
        lines = [line.rstrip() for line in ESCAPES.sub("", text).splitlines()]
        assert lines == [line.rstrip() for line in plain.splitlines()]
