"""The whole page in a real browser: every control is used, axe looks at every section, screens and print are kept."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from fliptrace.verdicts import Outcome
from fliptrace.views import IndexRow, render_index, render_report

pytestmark = pytest.mark.browser

KEYS = {
    "enter": "\ue007",
    "escape": "\ue00c",
    "left": "\ue012",
    "up": "\ue013",
    "right": "\ue014",
    "down": "\ue015",
}
#: What a person can operate; scroll areas count, as the keyboard must reach them.
OPERABLE = "a[href], button, input, select, textarea, summary, [tabindex='0'], .modebar-btn"
SCREENS = {"light": ("light", 1280), "dark": ("dark", 1280), "narrow": ("light", 375)}


@pytest.fixture(scope="module")
def opened(load_neighbour):
    """Opens a page in Chromium."""
    return load_neighbour(Path(__file__).with_name("test_browser.py")).Page


@pytest.fixture
def whole(pairs, made, load_neighbour):
    """A page with all of its sections: heatmap, boundary, propagation graph, interventions."""
    chart = load_neighbour(Path(__file__).with_name("test_propagation.py")).chart()
    pair = pairs.make(propagation_chart=chart)
    return render_report(
        pair.diff,
        pair.reference,
        pair.candidate,
        title="a pair",
        command="trace-pair --demo",
        interventions=dataclasses.replace(made.report(), command="trace-intervene pair"),
    )


def unfold(page):
    page.run("for (const d of document.querySelectorAll('details')) d.open = true")


def axe(browser):
    """What axe-core finds: (impact, rule, where). A rule that failed on the page has seen nothing, and is a finding."""
    folder = importlib.util.find_spec("axe_core_python").submodule_search_locations[0]
    browser.execute_script(Path(folder, "axe.min.js").read_text("utf-8") + "; window.axe = axe")
    return browser.execute_async_script(
        "const done = arguments[0];"
        "const told = (v) => [v.impact, v.id, v.nodes.slice(0, 3).map((n) => n.html.slice(0, 160))];"
        "axe.run().then((result) => done([...result.violations, "
        "...result.incomplete.filter((v) => v.nodes.length === 0)].map(told)))"
    )


@pytest.mark.parametrize("screen", SCREENS)
def test_axe_finds_nothing_in_any_section(whole, chromium, opened, tmp_path, screen):
    """All sections unfolded, a cell open: no finding of any impact, serious ones least of all."""
    scheme, width = SCREENS[screen]
    page = opened(chromium, tmp_path, whole, scheme=scheme, width=width)
    unfold(page)
    page.run("document.getElementById('heatmap-field').focus()")
    chromium.find_element("css selector", "#heatmap-field").send_keys(KEYS["enter"])
    assert page.run("return document.querySelectorAll('#interventions table').length") > 8
    assert page.run("return document.querySelectorAll('#propagation-section table').length") == 1
    assert axe(chromium) == []


def test_axe_finds_a_planted_fault(whole, chromium, opened, tmp_path):
    """Text without contrast and a control without a name."""
    page = opened(chromium, tmp_path, whole)
    page.run("document.documentElement.style.setProperty('--muted', '#eeeeee')")
    assert "color-contrast" in [rule for impact, rule, _ in axe(chromium) if impact == "serious"]
    page.run("document.getElementById('reset').textContent = ''")
    assert "button-name" in [rule for impact, rule, _ in axe(chromium) if impact == "critical"]


def test_axe_finds_nothing_in_the_index(pairs, chromium, tmp_path):
    """The page of several pairs, wide and narrow."""
    rows = [
        IndexRow(
            str(n),
            "How many apples are left? " * 8,
            list(Outcome)[n % 4],
            flip_step=n,
            first_root="layer 2",
            folder=str(n),
        )
        for n in range(6)
    ]
    path = tmp_path / "index.html"
    path.write_text(render_index(rows), encoding="utf-8")
    for width in (1280, 375):
        chromium.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        chromium.get(path.as_uri())
        assert axe(chromium) == []
