"""What notebooks show: static HTML without scripts, every text escaped, the map as it was found."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import fliptrace as ft
from fliptrace.verdicts import Outcome
from fliptrace.views import pair_html, trace_html
from fliptrace.views.folding import fold
from fliptrace.views.notebook import map_svg
from fliptrace.views.palette import CLASS_COLOURS


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
