"""What notebooks show: static HTML without scripts, every text escaped, the map as it was found."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

import fliptrace as ft
from fliptrace.verdicts import Outcome
from fliptrace.views import diff_html, pair_html, trace_html
from fliptrace.views.folding import fold
from fliptrace.views.notebook import map_svg
from fliptrace.views.palette import CLASS_COLOURS

RECORDED = ft.bundled_model().recorded_pair


class Elements(HTMLParser):
    """The elements of a text, and their attributes."""

    def __init__(self, text):
        super().__init__()
        self.names, self.attributes = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_hostile_texts_add_no_element(pairs):
    """A hostile pair has the elements of a plain one, no script and no handler."""
    hostile, plain = pairs.hostile(), pairs.make()
    for show in (
        lambda p: pair_html(p.diff, p.reference, p.candidate),
        lambda p: trace_html(p.reference),
        lambda p: diff_html(p.diff),
    ):
        found, expected = Elements(show(hostile)), Elements(show(plain))
        assert found.names <= expected.names
        assert "script" not in found.names
        assert not [name for name in found.attributes if name.startswith("on")]


def test_the_map_has_the_width_of_every_class(pairs):
    """The rectangles of a class cover as many cells as the folded map has; what was not observed is hatched."""
    diff = pairs.make().diff
    folded = fold(diff, width=110, height=32)
    drawn = re.findall(r'<rect [^>]*width="(\d+)"[^>]*fill="([^"]+)"', map_svg(diff))
    cells = {}
    for width, fill in drawn:
        cells[fill] = cells.get(fill, 0) + int(width) // 6
    for label in {int(value) for phase in folded.phases for value in phase.classes.ravel()}:
        expected = sum(int((phase.classes == label).sum()) for phase in folded.phases)
        tint = {int(k): v for k, v in CLASS_COLOURS["light"].items()}.get(
            label, "url(#fliptrace-hatch)"
        )
        assert cells[tint] == expected
    assert map_svg(diff).count("<circle") == 1
    assert map_svg(pairs.make(Outcome.IDENTICAL).diff) == ""


def test_a_stored_pair_shows_itself_and_its_traces():
    """Pair, trace and divergence of the pair that ships."""
    with ft.load_pair(ft.bundled_model().recorded_pair) as pair:
        assert "fliptrace-map" in pair._repr_html_()
        assert "atomic:8/32" in pair.reference._repr_html_()
        assert pair.reference._repr_html_().startswith("<table")
        assert "rank index" in pair.divergence._repr_html_()
        shown = pair.diff._repr_html_()
        assert shown.startswith('<div class="fliptrace-diff"')
        assert "token flipped" in shown
        assert pair.divergence.name in shown
        assert "fliptrace-map" in shown


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_comparison_shows_what_was_found_and_what_was_not_covered(pairs, outcome):
    """Verdict, flip and root where there are any, gaps counted, the map where something differs."""
    diff = pairs.make(outcome).diff
    gaps = dataclasses.replace(diff.coverage, missing=("a gap",) * 5)
    shown = diff_html(dataclasses.replace(diff, coverage=gaps))
    assert str(outcome) in shown
    assert ("generated token 12 (step 11)" in shown) == (outcome is Outcome.TOKEN)
    survives = outcome in (Outcome.TOKEN, Outcome.SURVIVING)
    assert ("layer 2 mlp.up_proj" in shown) == survives
    assert "2 more gaps" in shown
    assert ("fliptrace-map" in shown) == (outcome is not Outcome.IDENTICAL)
    assert diff.coverage.not_observed[0] in shown


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("ft.open_trace(path / 'reference.trace')", "fliptrace-trace"),
        ("ft.compare(*map(ft.open_trace, sorted(path.glob('*.trace'))))", "fliptrace-diff"),
    ],
)
def test_a_value_shows_itself_in_a_fresh_process(code, shown):
    """A display does not wait for another part of the package to be imported."""
    program = (
        "from pathlib import Path; import fliptrace as ft;"
        f"path = Path({str(RECORDED)!r}); print(({code})._repr_html_())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f'class="{shown}"' in done.stdout
