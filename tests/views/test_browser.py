"""The page in a real browser: it draws, reacts, fits, asks for nothing and runs nothing that it was given."""

from __future__ import annotations

import dataclasses
import json
import os
import time

import numpy as np
import pytest
import torch

from fliptrace.grids import LargestElements
from fliptrace.numerics import CoordinateClass
from fliptrace.verdicts import Outcome
from fliptrace.views import IndexRow, heatmap_figure, render_index, render_report

pytestmark = pytest.mark.browser


class Page:
    """A report opened in Chromium."""

    def __init__(self, browser, folder, text, *, scheme="light", width=1280):
        self.browser = browser
        self.path = folder / "report.html"
        self.path.write_text(text, encoding="utf-8")
        browser.get_log("performance")
        self.emulate(scheme, width)
        started = time.perf_counter()
        browser.get(self.path.as_uri())
        self.wait("document.documentElement.dataset.drawn === 'yes'")
        self.seconds = time.perf_counter() - started

    def emulate(self, scheme, width, height=1000):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        self.browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )

    def run(self, code, *arguments):
        return self.browser.execute_script(code, *arguments)

    def wait(self, condition, seconds=20):
        deadline = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition})"):
            assert time.monotonic() < deadline, f"{condition} never held"
            time.sleep(0.05)

    def click(self, selector):
        self.browser.find_element("css selector", selector).click()

    def text(self, selector):
        return self.browser.find_element("css selector", selector).text

    def overflow(self):
        return self.run("return document.documentElement.scrollWidth - window.innerWidth")

    def wait_until_it_fits(self):
        """All pictures have taken the new width, one after the other."""
        self.wait("document.documentElement.scrollWidth <= window.innerWidth")

    def assert_quiet(self):
        """No console message, no request but the page itself."""
        assert self.browser.get_log("browser") == []
        requests = []
        for entry in self.browser.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                requests.append(message["params"]["request"]["url"])
        assert [url for url in requests if not url.startswith("data:")] == [self.path.as_uri()]


def report(pair, **options):
    options = {"title": "a pair", "command": "trace-pair --demo", **options}
    return render_report(pair.diff, pair.reference, pair.candidate, **options)


def test_the_page_draws_and_stays_silent(pairs, chromium, tmp_path):
    """Verdict and flip are visible, all pictures drawn, no console message, no request."""
    page = Page(chromium, tmp_path, report(pairs.make()))
    assert page.text("#verdict").startswith("Token flipped")
    assert "generated token 12 (step 11)" in page.text("#verdict")
    assert [mark.text for mark in chromium.find_elements("css selector", "mark")] == [",", "."]
    for picture in ("heatmap", "boundary"):
        assert page.run(f"return document.querySelector('#{picture} .main-svg') !== null")
    drawn = page.run("return document.getElementById('heatmap').data[1].z")
    classes = pairs.make().diff.grids["prefill"].classes.numpy()
    seen = np.array([[-1 if value is None else value for value in line] for line in drawn])
    assert np.array_equal(seen, classes)
    page.assert_quiet()


def test_controls_change_the_picture(pairs, chromium, tmp_path):
    """Phase and colouring, by mouse and by keyboard."""
    page = Page(chromium, tmp_path, report(pairs.make()))
    page.click("input[value=decode]")
    page.wait("document.getElementById('heatmap').layout.annotations[0].text === 'step'")
    assert len(page.run("return document.getElementById('heatmap').data[1].z[0]")) == 11
    page.click("input[value=magnitude]")
    page.wait("document.getElementById('heatmap').data[2].visible === true")
    assert (
        page.run("return getComputedStyle(document.querySelector('#key li.bare')).display")
        != "none"
    )
    page.browser.find_element("css selector", "input[value=magnitude]").send_keys("\ue012")  # left
    page.wait("document.getElementById('heatmap').data[2].visible === false")
    page.click("details summary")
    assert "mlp.up_proj" in page.text("details[open] table")
    page.assert_quiet()


def test_pointing_at_a_cell_reads_it(pairs, chromium, tmp_path):
    """Site, position with token, class, origin, size, ULP; a click keeps it below the picture."""
    from selenium.webdriver import ActionChains

    page = Page(chromium, tmp_path, report(pairs.make()))
    row = (
        pairs.make()
        .diff.grids["prefill"]
        .rows.index(("shrink", pairs.make().diff.first_propagating.site))
    )
    place = page.run(
        "const h = document.getElementById('heatmap'); h.scrollIntoView({block: 'center'});"
        "const l = h._fullLayout, b = h.getBoundingClientRect();"
        f"return [b.left + l.xaxis._offset + l.xaxis.d2p(5), b.top + l.yaxis._offset + l.yaxis.d2p({row})]"
    )
    actions = ActionChains(chromium)
    actions.w3c_actions.pointer_action.move_to_location(int(place[0]) - 6, int(place[1]))
    actions.w3c_actions.pointer_action.move_to_location(int(place[0]), int(place[1]))
    actions.perform()
    page.wait("!document.getElementById('tip').hidden")
    tip = page.text("#tip")
    for part in (
        "layer 2 mlp.up_proj",
        "token position 5: apples",
        "surviving, root",
        "up to",
        "ULP",
        "max |difference|",
    ):
        assert part in tip
    actions = ActionChains(chromium)
    actions.w3c_actions.pointer_action.click()
    actions.perform()
    page.wait("document.querySelector('#cell h3')?.textContent.includes('mlp.up_proj')")
    page.assert_quiet()


def test_injected_texts_run_nothing(pairs, chromium, tmp_path):
    """The whole corpus, in every place and in hovers: text stays text."""
    page = Page(
        chromium, tmp_path, report(pairs.hostile(), title=pairs.corpus[1], command=pairs.corpus[3])
    )
    for selector in ("input[value=decode]", "input[value=magnitude]", "input[value=prefill]"):
        page.click(selector)
    page.run("for (const d of document.querySelectorAll('details')) d.open = true")
    time.sleep(0.3)
    assert page.run("return window.pwned === undefined")
    assert (
        page.run(
            "return document.querySelectorAll('img, iframe, base, a[href^=javascript]').length"
        )
        == 0
    )
    links = page.run("return [...document.querySelectorAll('svg a')].length")
    assert links == 0
    assert page.overflow() <= 0
    page.assert_quiet()


def test_interventions_draw_on_every_screen_and_theme(pairs, made, chromium, tmp_path):
    """The boundary and the margin bars, light and dark, wide and narrow, in print; folded tables open by keyboard."""
    page = Page(chromium, tmp_path, report(pairs.make(), interventions=made.report()))
    bars = "document.getElementById('cause-margins').data.filter((t) => t.type === 'bar')"
    assert page.run(f"return {bars}.map((bar) => bar.x[0])") == [0.125, 0, -0.125, 0]
    assert page.run("return document.querySelector('#cause-boundary .main-svg') !== null")
    for scheme, blue in (("light", "#0072b2"), ("dark", "#56b4e9")):
        for width in (1280, 400):
            page.emulate(scheme, width)
            page.wait(f"{bars}[0].marker.color === '{blue}'")
            page.wait(
                f"window.innerWidth === {width} && Math.abs(document.getElementById('cause-margins')"
                "._fullLayout.width - document.getElementById('cause-margins').clientWidth) < 2"
            )
            page.wait_until_it_fits()
    summary = page.browser.find_element("css selector", "#interventions details summary")
    summary.send_keys("\ue007")  # enter
    assert page.run("return document.querySelector('#interventions details').open")
    page.click("a[href='#interventions']")
    assert page.run("return location.hash") == "#interventions"
    page.assert_quiet()


def test_hostile_interventions_run_nothing(pairs, made, chromium, tmp_path):
    """Claims, sentences, texts and answers from elsewhere stay text, also as labels of the bars."""
    interventions = made.hostile_report(pairs.corpus)
    page = Page(chromium, tmp_path, report(pairs.make(), interventions=interventions))
    page.run("for (const d of document.querySelectorAll('details')) d.open = true")
    time.sleep(0.3)
    assert page.run("return window.pwned === undefined")
    assert page.run("return document.querySelectorAll('img, iframe, base, svg a').length") == 0
    assert page.overflow() <= 0
    page.assert_quiet()


def test_no_button_sends_the_chart_away(pairs, chromium, tmp_path):
    """plotly's own set of buttons has one that opens a server's page and hands it the chart's data."""
    page = Page(chromium, tmp_path, report(pairs.make()))
    titles = page.run(
        "return [...new Set([...document.querySelectorAll('.modebar-btn')].map((b) => b.dataset.title))]"
    )
    assert sorted(titles) == ["Download plot", "Pan", "Reset axes", "Zoom", "Zoom in", "Zoom out"]
    settings = page.run(
        "const c = document.getElementById('heatmap')._context; return [c.showSendToCloud, c.plotlyServerURL]"
    )
    assert settings == [False, ""]


def test_the_page_fits_every_screen_and_theme(pairs, chromium, tmp_path):
    """No sideways scrolling, contrast of at least 7, and pictures that follow the theme without a reload."""
    page = Page(chromium, tmp_path, report(pairs.make()))
    page.click("input[value=magnitude]")
    page.wait("document.getElementById('heatmap').data[2].visible === true")
    equal = "document.getElementById('heatmap').data[1].colorscale[0][1]"
    for scheme, gray in (("light", "#cfd3d8"), ("dark", "#4a5058")):
        for width in (1280, 400):
            page.emulate(scheme, width)
            page.wait(f"{equal} === '{gray}'")
            page.wait(
                f"window.innerWidth === {width} && Math.abs(document.getElementById('heatmap')"
                "._fullLayout.width - document.getElementById('heatmap').clientWidth) < 2"
            )
            page.wait_until_it_fits()
            colours = page.run(
                "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
            )
            light, dark = sorted((luminance(colour) for colour in colours), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 7
            tick = page.run("return document.querySelector('#heatmap .ytick text').style.fill")
            assert abs(luminance(tick) - luminance(colours[0])) < 0.01
    page.assert_quiet()


def luminance(colour: str) -> float:
    rgb = np.array([int(part) for part in colour.strip("rgb()").split(",")]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ np.array([0.2126, 0.7152, 0.0722]))


def test_a_planted_cell_is_seen_on_the_screen(pairs, chromium, tmp_path):
    """One surviving coordinate in a million: its colour is among the pixels, at 1280 and at 400 px."""
    rows = tuple(row for row in pairs.rows(143) if row[0] == "shrink")[:1000]
    grid = pairs.grid("decode", rows, range(1, 1001))
    grid.classes[617, 403] = int(CoordinateClass.SURVIVING)
    grid.magnitudes[617, 403], grid.ulps[617, 403], grid.surviving[617, 403] = 1.9e-9, 1, 1
    pair = pairs.make(
        grids={"decode": grid}, first_propagating=None, first_surviving=None, flip=None, steps=()
    )
    page = Page(chromium, tmp_path, report(pair))
    assert page.seconds < 10
    for width in (1280, 400):
        page.emulate("light", width, height=6000)
        heat = "document.getElementById('heatmap')"
        page.wait(f"window.innerWidth === {width} && {heat}.dataset.width == {heat}.clientWidth")
        found = chromium.execute_script(
            "const picture = new Image(); picture.src = 'data:image/png;base64,' + arguments[0];"
            "return picture.decode().then(() => {"
            "const c = document.createElement('canvas'); c.width = picture.width; c.height = picture.height;"
            "const x = c.getContext('2d'); x.drawImage(picture, 0, 0);"
            "const d = x.getImageData(0, 0, c.width, c.height).data; let n = 0;"
            "for (let i = 0; i < d.length; i += 4) if (d[i] > 190 && d[i + 1] < 130 && d[i + 2] < 60) n += 1;"
            "return n; })",
            chromium.find_element("css selector", "#heatmap").screenshot_as_base64,
        )
        assert found >= 4, width
    drawn = (
        "document.getElementById('heatmap').data[1].z.flat().filter((value) => value === 2).length"
    )
    for half in (125, 60, 20, 5, 1):  # embedded columns: four steps each
        for group in ("row", "layer"):
            page.run(
                f"location.hash = 'x={100.5 - half}:{101.5 + half}&group={group}'; "
                "document.getElementById('heatmap').dataset.width = ''"
            )
            page.wait("document.getElementById('heatmap').dataset.width !== ''")
            assert page.run(f"return {drawn}") == 1, (half, group)
    assert "Max-pooled" in page.text("#badges")
    assert "617" not in page.text("#badges")
    page.assert_quiet()


def test_a_big_page_is_small_and_quick_enough(pairs, chromium, tmp_path):
    """28 layers, 7 modules, 512 positions and 1,024 steps, all cells differing with four values each: under 15 MB."""
    rows = pairs.rows(28)
    grids = {}
    generator = torch.Generator().manual_seed(1)
    for phase, columns in (("prefill", range(512)), ("decode", range(1, 1025))):
        grid = pairs.grid(phase, rows, columns)
        shape = grid.classes.shape
        grid.classes[:] = torch.randint(1, 3, shape, generator=generator)
        grid.magnitudes[:] = torch.rand(shape, generator=generator)
        grid.ulps[:] = torch.randint(1, 1 << 20, shape, generator=generator)
        grid.surviving[:] = torch.randint(0, 1024, shape, generator=generator)
        cells = torch.arange(grid.classes.numel()).repeat_interleave(4)
        values = torch.rand((2, len(cells)), generator=generator)
        index = torch.arange(len(cells)) % 16
        places = [each.to(torch.int32) for each in (cells, cells, index, index)]
        grids[phase] = dataclasses.replace(grid, largest=LargestElements(*places, *values))
    text = report(pairs.make(grids=grids))
    assert len(text.encode()) < 15e6
    page = Page(chromium, tmp_path, text)
    # Wanted: 3 s. Asserted: 10 s, because other work may share the machine.
    measured = (
        f"{len(text.encode()) / 1e6:.1f} MB, {page.seconds:.2f} s, load {os.getloadavg()[0]:.1f}"
    )
    print(measured)  # noqa: T201 (shown by pytest -rP)
    assert page.seconds < 10, measured
    page.assert_quiet()


def test_without_scripts_everything_but_the_pictures_is_there(pairs, chromium, tmp_path):
    """The story, tables and texts are HTML; a note stands for the pictures."""
    path = tmp_path / "plain.html"
    path.write_text(report(pairs.make()), encoding="utf-8")
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    chromium.get(path.as_uri())
    body = chromium.find_element("css selector", "body").text
    for part in (
        "Token flipped",
        "0.010345458984375",
        "The pictures need JavaScript",
        "Final answer",
    ):
        assert part in body
    assert not chromium.find_element("css selector", "#heatmap").is_displayed()


def test_a_notebook_figure_draws_without_a_formula_or_link(pairs, chromium, tmp_path):
    """heatmap_figure's own hover texts and labels, hostile ones, in plotly's own page."""
    pair = pairs.hostile()
    path = tmp_path / "figure.html"
    figure = heatmap_figure(pair.diff, colour="magnitude", reference=pair.reference)
    figure.write_html(path, include_plotlyjs=True)
    chromium.get(path.as_uri())
    deadline = time.monotonic() + 20
    while not chromium.execute_script(
        "return document.querySelector('.heatmaplayer image') !== null"
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert chromium.execute_script("return window.pwned === undefined")
    assert chromium.execute_script("return document.querySelectorAll('svg a').length") == 0
    ticks = [tick.text for tick in chromium.find_elements("css selector", ".xtick text")]
    assert any("<script" in tick for tick in ticks)


def test_the_index_opens(pairs, chromium, tmp_path):
    """No console message, narrow screens included, hostile prompts as text."""
    rows = [
        IndexRow(
            str(n),
            text[:300],
            list(Outcome)[n % 4],
            flip_step=n,
            first_root=text[:80],
            folder=str(n),
        )
        for n, text in enumerate(pairs.corpus)
    ]
    path = tmp_path / "index.html"
    path.write_text(render_index(rows), encoding="utf-8")
    chromium.get(path.as_uri())
    assert chromium.execute_script("return window.pwned === undefined")
    assert chromium.get_log("browser") == []
    assert len(chromium.find_elements("css selector", "tbody tr")) == len(pairs.corpus)
