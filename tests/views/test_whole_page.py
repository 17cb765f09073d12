"""The whole page in a real browser: every control is used, axe looks at every section, screens and print are kept."""

from __future__ import annotations

import base64
import dataclasses
import importlib.util
import itertools
import os
import time
from pathlib import Path

import numpy as np
import pypdfium2
import pytest
import torch
from PIL import Image
from selenium.webdriver import ActionChains

from fliptrace.grids import LargestElements
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
    grid, root = pair.diff.grids["prefill"], pair.diff.first_propagating
    cell = grid.rows.index(("shrink", root.site)) * len(grid.columns) + root.position
    first = root.coordinates[0]
    values = [torch.tensor([one, one * 1.5]) for one in (first.reference, first.candidate)]
    places = [
        torch.tensor(numbers, dtype=torch.int32)
        for numbers in ([cell] * 2, [root.position] * 2, [-1] * 2, [3, 9])
    ]
    grids = {
        **pair.diff.grids,
        "prefill": dataclasses.replace(grid, largest=LargestElements(*places, *values)),
    }
    pair.diff = dataclasses.replace(pair.diff, grids=grids)
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


def axe(browser, part="html"):
    """What axe-core finds: (impact, rule, where). A rule that failed on the page has seen nothing, and is a finding."""
    folder = importlib.util.find_spec("axe_core_python").submodule_search_locations[0]
    browser.execute_script(Path(folder, "axe.min.js").read_text("utf-8") + "; window.axe = axe")
    return browser.execute_async_script(
        "const done = arguments[1];"
        "const told = (v) => [v.impact, v.id, v.nodes.slice(0, 3).map((n) => n.html.slice(0, 160))];"
        "axe.run(arguments[0]).then((result) => done([...result.violations, "
        "...result.incomplete.filter((v) => v.nodes.length === 0)].map(told)))",
        part,
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
    assert "color-contrast" in [
        rule for impact, rule, _ in axe(chromium, "header") if impact == "serious"
    ]
    page.run("document.getElementById('reset').textContent = ''")
    assert "button-name" in [
        rule for impact, rule, _ in axe(chromium, ".controls") if impact == "critical"
    ]


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


def kept(tmp_path, name):
    """Where a picture of the page goes: into the folder SCREENSHOTS to be looked at, else beside the test's files."""
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def photograph(browser, path, width, height):
    """Take the whole page, however long."""
    clip = {"x": 0, "y": 0, "width": width, "height": min(height, 16_000), "scale": 1}
    shot = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip}
    )
    path.write_bytes(base64.b64decode(shot["data"]))
    return np.asarray(Image.open(path).convert("RGB"))


#: Colours of surviving cells, which each picture of the page must hold: by theme.
SURVIVING = {"light": (213, 94, 0), "dark": (240, 121, 26)}
GROUND = {"light": (255, 255, 255), "dark": (20, 24, 28)}


@pytest.mark.parametrize("screen", SCREENS)
def test_screens_are_kept_to_be_looked_at(whole, chromium, opened, tmp_path, screen):
    """The whole page, light, dark and narrow: its ground, cells in their colour, nothing cut at the right."""
    scheme, width = SCREENS[screen]
    page = opened(chromium, tmp_path, whole, scheme=scheme, width=width)
    page.run("document.getElementById('heatmap-field').focus()")
    chromium.find_element("css selector", "#heatmap-field").send_keys(KEYS["enter"])
    page.wait_until_it_fits()
    height = page.run("return document.documentElement.scrollHeight")
    seen = photograph(chromium, kept(tmp_path, f"report-{screen}.png"), width, height)
    assert seen.shape[1] == width
    for colour, least in ((GROUND[scheme], 0.3), (SURVIVING[scheme], 0.0002)):
        assert (np.abs(seen.astype(int) - colour).max(axis=2) < 3).mean() > least, colour
    right = seen[:, -4:].reshape(-1, 3).astype(int)
    assert (np.abs(right - GROUND[scheme]).max(axis=1) < 3).all()
    page.assert_quiet()


def test_print_is_kept_to_be_looked_at(whole, chromium, opened, tmp_path):
    """A dark screen prints light, all pictures at the sheet's width, the open cell and its boundary with them."""
    page = opened(chromium, tmp_path, whole, scheme="dark")
    page.run("document.getElementById('heatmap-field').focus()")
    chromium.find_element("css selector", "#heatmap-field").send_keys(KEYS["enter"])
    page.click("#cell tbody button")
    assert page.run("return document.querySelector('#cell svg.number-line') !== null")
    page.run("window.dispatchEvent(new Event('beforeprint'))")
    pictures = ("heatmap", "boundary", "propagation", "cause-boundary", "cause-margins")
    for name in pictures:
        page.wait(f"document.querySelector('#{name} .main-svg').clientWidth <= 700")
        ink = page.run(f"return document.querySelector('#{name} text').style.fill")
        assert ink in ("rgb(29, 35, 41)", "rgb(0, 0, 0)"), (name, ink)
    # 717 px: the text's width on A4. What is wider is cut, or makes the browser shrink the whole sheet.
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    chromium.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 717, "height": 1000, "deviceScaleFactor": 1, "mobile": False},
    )
    page.wait_until_it_fits()
    boxes = page.run(
        f"return {list(pictures)}.map((n) => document.querySelector(`#${{n}} .main-svg`).getBoundingClientRect())"
        ".map((b) => [b.left, b.top, b.right, b.bottom])"
    )
    for box in boxes:
        assert box[0] >= 0
        assert box[2] <= 717
        assert box[2] - box[0] > 600
    assert all(above[3] <= below[1] for above, below in itertools.pairwise(boxes))
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    printed = chromium.execute_cdp_cmd(
        "Page.printToPDF", {"printBackground": True, "paperWidth": 8.27, "paperHeight": 11.69}
    )
    path = kept(tmp_path, "report.pdf")
    path.write_bytes(base64.b64decode(printed["data"]))
    document = pypdfium2.PdfDocument(path)
    sheets = [np.asarray(sheet.render(scale=1.5).to_pil().convert("RGB")) for sheet in document]
    text = "".join(sheet.get_textpage().get_text_range() for sheet in document)
    assert len(sheets) > 3
    for number, sheet in enumerate(sheets, 1):
        Image.fromarray(sheet).save(kept(tmp_path, f"print-{number:02d}.png"))
        assert (sheet.reshape(-1, 3).min(axis=1) > 250).mean() > 0.4, f"sheet {number} is dark"
        assert (sheet[:, -12:] > 240).all(), f"sheet {number} is cut at the right"
    surviving = [
        np.abs(sheet.astype(int) - SURVIVING["light"]).max(axis=2) < 12 for sheet in sheets
    ]
    assert sum(int(found.sum()) for found in surviving) > 200
    for part in ("Token flipped", "The rounding boundary", "Interventions", "Coverage and doubts"):
        assert part in text
    assert "Whole picture" not in text  # a switch
    page.run("window.dispatchEvent(new Event('afterprint'))")


def reached_by_tab(page):
    """Press Tab until it comes round: what had the focus, each once, and whether it could be seen to have it."""
    chromium = page.browser
    page.run(
        "document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')"
    )
    seen = {}
    for _ in range(400):
        ActionChains(chromium).send_keys("\ue004").perform()
        found = page.run(
            "const e = document.activeElement; if (!e || e === document.body) return null;"
            "e.dataset.met ??= String(document.querySelectorAll('[data-met]').length);"
            "const s = getComputedStyle(e);"
            "return [e.dataset.met, s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 1]"
        )
        if found is None:
            continue
        if found[0] in seen:
            return seen
        seen[found[0]] = found[1]
    raise AssertionError("Tab never came round")


def test_the_keyboard_reaches_and_works_everything(whole, chromium, opened, tmp_path):
    """Tab visits every control in turn, each shows that it has the focus; Enter and Space work them all."""
    page = opened(chromium, tmp_path, whole)
    unfold(page)
    page.run("document.getElementById('heatmap-field').focus()")
    chromium.find_element("css selector", "#heatmap-field").send_keys(KEYS["enter"])
    seen = reached_by_tab(page)
    assert all(seen.values())
    missed = page.run(
        f"return [...document.querySelectorAll(`{OPERABLE}`)].filter((e) => !e.dataset.met && !e.disabled"
        " && e.getClientRects().length && !e.closest('.modebar')"
        # Of a group of radio buttons Tab visits the chosen one, arrow keys the others.
        " && !(e.type === 'radio' && document.querySelector(`input[name=${e.name}][data-met]`)))"
        ".map((e) => e.outerHTML.slice(0, 120))"
    )
    assert missed == []
    for name in ("phase", "group", "colour", "origin"):
        values = page.run(
            f"return [...document.querySelectorAll('input[name={name}]')].map((i) => i.value)"
        )
        page.run(f"document.querySelector('input[name={name}]:checked').focus()")
        for value in (*values[1:], values[0]):
            ActionChains(chromium).send_keys(KEYS["right"]).perform()
            page.wait(f"flip.state.{name} === '{value}'")
    for kind in ("shrink", "key", "value"):
        for ticked in (False, True):
            chromium.find_element("css selector", f"input[value={kind}]").send_keys(" ")
            page.wait(f"flip.state.kinds.includes('{kind}') === {str(ticked).lower()}")
    summaries = chromium.find_elements("css selector", "summary")
    assert len(summaries) > 10
    for summary in summaries:
        summary.send_keys(KEYS["enter"])
        assert not page.run("return arguments[0].parentElement.open", summary)
    page.assert_quiet()


def test_the_mouse_works_everything(whole, chromium, opened, tmp_path):
    """Every switch, fold, link and button of the page, zooming by dragging, and the picture's own buttons."""
    page = opened(chromium, tmp_path, whole)
    chromium.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)}
    )
    for control in chromium.find_elements("css selector", ".controls input:enabled"):
        name, value = control.get_attribute("name"), control.get_attribute("value")
        if control.get_attribute("type") == "radio":
            control.click()
            page.wait(f"flip.state.{name} === '{value}'")
        else:
            for ticked in (False, True):
                control.click()
                page.wait(f"flip.state.kinds.includes('{value}') === {str(ticked).lower()}")
    page.run("location.hash = 'phase=prefill&colour=class'")
    page.wait("flip.state.origin === 'all' && flip.state.colour === 'class'")
    heat = "document.getElementById('heatmap')"
    page.run(f"{heat}.scrollIntoView({{block: 'center'}})")

    def x_range():
        return page.run(f"return [...{heat}._fullLayout.xaxis.range]")

    whole_range = x_range()
    middle = chromium.find_element("css selector", "#heatmap .nsewdrag")
    ActionChains(chromium).move_to_element_with_offset(
        middle, -200, -60
    ).click_and_hold().move_by_offset(60, 30).move_by_offset(60, 30).release().perform()
    page.wait("flip.state.x !== null && flip.state.y !== null")
    assert x_range()[1] - x_range()[0] < (whole_range[1] - whole_range[0]) / 2
    page.click("#reset")
    page.wait("flip.state.x === null")
    page.wait(f"{heat}._fullLayout.xaxis.range[1] === {whole_range[1]}")

    def press(title):
        ActionChains(chromium).move_to_element(middle).perform()
        button = chromium.find_element(
            "css selector", f"#heatmap .modebar-btn[data-title='{title}']"
        )
        ActionChains(chromium).move_to_element(button).click().perform()

    press("Zoom in")
    page.wait(f"{heat}._fullLayout.xaxis.range[1] < {whole_range[1]}")
    press("Zoom out")
    page.wait(f"Math.abs({heat}._fullLayout.xaxis.range[1] - {whole_range[1]}) < 1e-6")
    press("Pan")
    page.wait(f"{heat}._fullLayout.dragmode === 'pan'")
    ActionChains(chromium).move_to_element(middle).click_and_hold().move_by_offset(
        40, 0
    ).move_by_offset(40, 0).release().perform()
    page.wait(f"{heat}._fullLayout.xaxis.range[0] < {whole_range[0]}")
    press("Zoom")
    page.wait(f"{heat}._fullLayout.dragmode === 'zoom'")
    ActionChains(chromium).double_click(middle).perform()
    page.wait(f"{heat}._fullLayout.xaxis.range[0] === {whole_range[0]}")
    press("Zoom in")
    press("Reset axes")
    page.wait(f"{heat}._fullLayout.xaxis.range[0] === {whole_range[0]}")
    press("Download plot")
    deadline = time.monotonic() + 20
    while not (found := list(tmp_path.glob("*.svg"))):
        assert time.monotonic() < deadline, "no picture was downloaded"
        time.sleep(0.1)
    assert "<svg" in found[0].read_text("utf-8")
    ActionChains(chromium).move_to_element(middle).click().perform()
    page.wait("!document.getElementById('cell').hidden")
    page.click("#cell .close")
    for summary in chromium.find_elements("css selector", "summary"):
        for _ in range(2 if page.run("return arguments[0].parentElement.open", summary) else 1):
            before = page.run("return arguments[0].parentElement.open", summary)
            summary.click()
            assert page.run("return arguments[0].parentElement.open", summary) != before
    links = chromium.find_elements("css selector", "a[href]")
    assert len(links) >= 2
    for link in links:
        link.click()
        target = link.get_attribute("href").partition("#")[2]
        assert page.run("return location.hash") == f"#{target}"
        assert page.run(
            f"return document.getElementById('{target}').getBoundingClientRect().top < innerHeight"
        )
    page.assert_quiet()
