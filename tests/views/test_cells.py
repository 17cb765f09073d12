"""The heatmap's side of the page in a real browser: switches, one cell in detail, the address, keyboard, axe, print."""

from __future__ import annotations

import base64
import dataclasses
import json
import random
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fliptrace as ft
from fliptrace.analysis.coordinates import coordinate_differences
from fliptrace.grids import Grid, LargestElements
from fliptrace.numerics import CoordinateClass
from fliptrace.sites import Coordinate, Site
from fliptrace.views import render_report
from fliptrace.views.cells import PAGE_ELEMENTS, page_cells, phase_data
from fliptrace_interventions.edits import CacheEdit, CachePart, ShrinkEdit, edits_from_json

pytestmark = pytest.mark.browser

KEYS = {"right": "\ue014", "down": "\ue015", "enter": "\ue007", "tab": "\ue004", "home": "\ue011"}


@pytest.fixture(scope="session")
def opened(load_neighbour):
    """Opens a page in Chromium."""
    return load_neighbour(Path(__file__).with_name("test_browser.py")).Page


@pytest.fixture(scope="session")
def recorded():
    """The pair that ships with the package: recorded, not made up."""
    return ft.load_pair(ft.bundled_model().recorded_pair)


@pytest.fixture(scope="session")
def recorded_page(recorded):
    """Its report."""
    return render_report(recorded.diff, recorded.reference, recorded.candidate, title="recorded")


def redrawn(page, action):
    """Do something, and wait until the heatmap was drawn again."""
    page.run("document.getElementById('heatmap').dataset.width = ''")
    action()
    page.wait("document.getElementById('heatmap').dataset.width !== ''")


def rows_shown(page):
    """The names of the drawn rows."""
    return page.run("return flip.heatmap.view().rows.map((row) => row.name)")


def drawn_values(page):
    """The values of the coloured cells, each once, hidden and not observed ones left out."""
    code = "return [...new Set(document.getElementById('heatmap').data[1].z.flat())].filter((v) => v !== null)"
    return set(page.run(code))


def command_shown(page):
    """The commands of the open cell, and the edit in them."""
    text = page.run("return document.querySelector('#cell pre').textContent")
    match = re.fullmatch(r"cat > edit\.json <<'EDIT'\n(.+)\nEDIT\n(.+)", text)
    command = shlex.split(match[2])
    assert command == ["trace-intervene", str(page.path.parent), "--edit", "edit.json"]
    (edit,) = edits_from_json(json.loads(match[1]))
    return text, edit


def test_every_switch_changes_the_picture(recorded_page, chromium, opened, tmp_path):
    """Phase, kinds of rows, layers, four colourings, the filter, the whole picture; by mouse."""
    page = opened(chromium, tmp_path, recorded_page)
    assert len(rows_shown(page)) == 72
    redrawn(page, lambda: page.click("input[value=shrink]"))
    assert {name.rpartition(" ")[2] for name in rows_shown(page)} == {"K", "V"}
    redrawn(page, lambda: page.click("input[value=key]"))
    redrawn(page, lambda: page.click("input[value=value]"))
    assert page.run("return !document.getElementById('no-rows').hidden")
    redrawn(page, lambda: page.click("input[value=shrink]"))
    assert len(rows_shown(page)) == 56
    assert not page.run("return document.querySelector('input[value=module]').matches(':enabled')")
    assert "--modules records them" in page.text(".controls")
    redrawn(page, lambda: page.click("input[value=decode]"))
    redrawn(page, lambda: page.click("input[value=layer]"))
    assert rows_shown(page) == [f"layer {number}" for number in range(8)]
    assert "each cell shows the worst of a layer's rows" in page.text("#fit")
    redrawn(page, lambda: page.click("input[name=colour][value=origin]"))
    assert drawn_values(page) == {1, 2}
    redrawn(page, lambda: page.click("input[name=origin][value=inherited]"))
    assert drawn_values(page) == {2}
    assert page.browser.find_element("css selector", ".key .away").is_displayed()
    redrawn(page, lambda: page.click("input[name=origin][value=added]"))
    assert drawn_values(page) == {1}
    redrawn(page, lambda: page.click("input[name=origin][value=unknown]"))
    assert drawn_values(page) == set()
    redrawn(page, lambda: page.click("input[name=origin][value=all]"))
    for colour, title in (("ulp", "largest distance, ULP"), ("magnitude", "max |difference|")):
        redrawn(page, lambda colour=colour: page.click(f"input[value={colour}]"))
        shade = page.run(
            "const t = document.getElementById('heatmap').data[2]; return [t.visible, t.colorbar.title.text]"
        )
        assert shade == [True, title]
    redrawn(page, lambda: page.run("Plotly.relayout('heatmap', {'xaxis.range': [2, 9]})"))
    assert page.run("return location.hash").endswith("x=2:9")
    redrawn(page, lambda: page.click("#reset"))
    assert "x=" not in page.run("return location.hash")
    page.assert_quiet()


def test_the_lane_has_the_heatmaps_columns(recorded, recorded_page, chromium, opened, tmp_path):
    """Margins of both executions, ties and the flip stand below their own steps."""
    page = opened(chromium, tmp_path, recorded_page)
    redrawn(page, lambda: page.click("input[value=decode]"))
    lines = page.run(
        "return document.getElementById('heatmap').data.slice(4).map((t) => [t.name, t.xaxis, t.x, t.y])"
    )
    steps = [step for step in recorded.diff.steps if step.step > 0]
    for (name, axis, x, y), margins in zip(
        lines[:2],
        ([s.reference_margin for s in steps], [s.candidate_margin for s in steps]),
        strict=True,
    ):
        assert (name in ("reference", "candidate"), axis) == (True, "x")
        assert x == [step.step - 1 for step in steps]
        assert y == [margin if margin > 0 else None for margin in margins]
    tied = [s.step - 1 for s in steps for n in (s.reference_tied, s.candidate_tied) if n > 1]
    assert lines[2][2] == tied
    flip = page.run("return document.getElementById('heatmap').layout.shapes[0].x0")
    assert flip == recorded.diff.flip.step - 1


def test_a_cell_opens_with_all_of_a_roots_values(
    recorded, recorded_page, chromium, opened, tmp_path
):
    """By keyboard alone: the first root, its coordinates bit for bit, one of them chosen, its picture, its command."""
    page = opened(chromium, tmp_path, recorded_page)
    field = chromium.find_element("css selector", "#heatmap-field")
    page.run("document.getElementById('heatmap-field').focus()")
    assert "surviving, root" in page.text("#cell-told")
    field.send_keys(KEYS["enter"])
    root = recorded.diff.first_propagating or recorded.diff.first_surviving
    heading = page.text("#cell h3")
    assert heading.startswith(f"{root.site.name}, token position {root.position}: ")
    assert page.run("return document.activeElement.tagName") == "H3"
    assert "Added here, all of it" in page.text("#cell")
    rows = page.run(
        "return [...document.querySelectorAll('#cell tbody tr')].map((r) => r.textContent)"
    )
    assert len(rows) == root.latent + root.surviving
    first = root.coordinates[0]
    for part in (
        f"rank index {first.coordinate.rank_index}",
        first.reference_bits,
        first.candidate_bits,
        first.rounded_reference_bits,
        first.rounded_candidate_bits,
        "surviving",
    ):
        assert part in rows[0]
    _, edit = command_shown(page)
    assert edit == ShrinkEdit.of_row(root)
    chromium.find_element("css selector", "#cell tbody button").send_keys(KEYS["enter"])
    assert page.run("return document.querySelector('#cell .number-line text').textContent") == (
        f"bfloat16 boundary {first.boundary.boundary!r}"
    )
    _, edit = command_shown(page)
    assert edit == ShrinkEdit.of_coordinate(first)
    page.click("#cell .close")
    assert not chromium.find_element("css selector", "#cell").is_displayed()
    assert "cell=" not in page.run("return location.hash")
    page.assert_quiet()


def test_arrow_keys_go_from_cell_to_cell(recorded_page, chromium, opened, tmp_path):
    """Right, down, home: the spoken cell follows, and a ring shows where it is."""
    page = opened(chromium, tmp_path, recorded_page)
    field = chromium.find_element("css selector", "#heatmap-field")
    page.run("document.getElementById('heatmap-field').focus()")
    started = page.text("#cell-told")
    field.send_keys(KEYS["home"])
    assert "token position 0: " in page.text("#cell-told")
    field.send_keys(KEYS["right"] * 2)
    assert "token position 2: " in page.text("#cell-told")
    name = page.text("#cell-told").split(";")[0]
    field.send_keys(KEYS["down"])
    below = page.text("#cell-told").split(";")[0]
    names = rows_shown(page)
    assert names.index(below) == names.index(name) + 1
    assert below != started
    ring = page.run(
        "const r = document.querySelector('.cell-ring').getBoundingClientRect(); return r.width > 8 && r.height > 8"
    )
    assert ring
    page.assert_quiet()


def test_keys_and_values_are_tested_in_the_cache(
    recorded, recorded_page, chromium, opened, tmp_path
):
    """A differing value row names head and element in its 16-bit bits; the edit acts before the next step."""
    grid = recorded.diff.grids["decode"]
    kinds = [kind for kind, _ in grid.rows]
    cached = [
        (row, column)
        for row, column in (grid.classes == 2).nonzero().tolist()
        if kinds[row] in ("key", "value")
    ]
    row, column = cached[0]
    step = grid.columns[column]
    page = opened(chromium, tmp_path, recorded_page)
    redrawn(page, lambda: page.run(f"location.hash = 'phase=decode&cell={row}:{step}'"))
    text = page.text("#cell")
    assert "not separable, it is made from other records" in text
    assert re.search(r"head \d+, element \d+", text)
    bits = page.run("return document.querySelector('#cell tbody .bits').textContent")
    assert re.fullmatch("0x[0-9a-f]{4}", bits)
    page.click("#cell tbody button")
    _, edit = command_shown(page)
    assert isinstance(edit, CacheEdit)
    assert (edit.step, edit.layers, edit.expect) == (step + 1, (grid.rows[row][1],), 1)
    assert edit.part is (CachePart.KEYS if kinds[row] == "key" else CachePart.VALUES)
    assert edit.positions == (recorded.reference.steps[step].first_position,)
    page.assert_quiet()


def test_the_copy_button_copies_the_command(recorded_page, chromium, opened, tmp_path):
    """What lands in the clipboard is the shown command, without any request."""
    page = opened(chromium, tmp_path, recorded_page)
    page.run("document.getElementById('heatmap-field').focus()")
    chromium.find_element("css selector", "#heatmap-field").send_keys(KEYS["enter"])
    page.click("#cell .copy")
    page.wait("document.querySelector('#cell .copy').textContent === 'Copied'")
    page.run(
        "const t = document.createElement('textarea'); t.id = 'pasted'; document.querySelector('#cell').prepend(t)"
    )
    chromium.find_element("css selector", "#pasted").send_keys("\ue009v")  # control
    assert page.run("return document.getElementById('pasted').value") == command_shown(page)[0]
    page.assert_quiet()


@pytest.mark.parametrize("name", ["a pair", "it's $HOME & `id` -x", "plain-1.2"])
def test_the_copied_command_runs(chromium, opened, tmp_path, name):
    """What the page offers, pasted into a shell elsewhere, judges the claim on the pair beside the page."""
    folder = tmp_path / name
    with ft.load_pair(ft.bundled_model().recorded_pair) as pair:
        pair.save(folder)
    page = opened(chromium, folder, (folder / "report.html").read_text("utf-8"))
    page.run("location.hash = 'phase=decode&cell=0:17'")
    page.wait("document.querySelector('#cell pre') !== null")
    text, _ = command_shown(page)
    assert "the folder is the one in which this page lies" in page.text("#cell")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = "from fliptrace_interventions.command_line.trace_intervene import main; main()"
    quick = "--shams 0 --recipient reference --json"
    stands_for = f'trace-intervene() {{ "{sys.executable}" -c "{code}" "$@" {quick}; }}\n'
    if name == "a pair":
        done = subprocess.run(
            ["bash", "-c", stands_for + text],
            cwd=elsewhere,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (0, 1, 3), done.stderr
        (claim,) = json.loads(done.stdout)["interventions"]["claims"]
        assert "q_proj" in claim["verdict"]["claim"]
    else:  # how the shell reads it
        printed = 'trace-intervene() { printf "%s\\n" "$@"; }\n' + text
        done = subprocess.run(
            ["bash", "-c", printed], cwd=elsewhere, capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines() == [str(folder), "--edit", "edit.json"]
    assert page.text("section[aria-labelledby=roots-heading] code").startswith(
        text.splitlines()[-1].partition(" --edit")[0]
    )


def test_a_folder_that_a_terminal_acts_upon_is_not_put_into_a_command(
    recorded_page, chromium, opened, tmp_path
):
    """A line break, an escape or a direction mark in its name: the placeholder stays, and says what it stands for."""
    for name in ("a\nb", "a\x1b[2Jb", "a\u202eb"):
        folder = tmp_path / name
        folder.mkdir()
        page = opened(chromium, folder, recorded_page)
        page.run("location.hash = 'cell=0:4'")
        page.wait("document.querySelector('#cell pre') !== null")
        assert (
            page.text("#cell pre").splitlines()[-1] == "trace-intervene PAIR_DIR --edit edit.json"
        )
        assert "PAIR_DIR is the folder of this pair" in page.text("#cell")


def test_the_address_brings_the_view_back(recorded_page, chromium, opened, tmp_path):
    """Everything chosen is in the fragment; loading it again, or editing it, shows the same."""
    page = opened(chromium, tmp_path, recorded_page)
    for selector in (
        "input[value=decode]",
        "input[name=colour][value=ulp]",
        "input[value=layer]",
        "input[name=origin][value=inherited]",
        "input[value=key]",
    ):
        redrawn(page, lambda selector=selector: page.click(selector))
    page.run("document.getElementById('heatmap-field').focus()")
    field = chromium.find_element("css selector", "#heatmap-field")
    field.send_keys(KEYS["right"] + KEYS["enter"])
    redrawn(page, lambda: page.run("Plotly.relayout('heatmap', {'xaxis.range': [1.5, 12.25]})"))
    seen = "return [location.hash, document.querySelector('#cell h3').textContent, document.getElementById('heatmap').layout.xaxis.range, [...document.querySelectorAll('.controls input')].map((i) => i.checked)]"  # noqa: E501
    before = page.run(seen)
    assert before[0].startswith(
        "#phase=decode&colour=ulp&group=layer&origin=inherited&kinds=shrink-value&cell="
    )
    chromium.get("about:blank")
    chromium.get(page.path.as_uri() + before[0])
    page.wait("document.documentElement.dataset.drawn === 'yes'")
    assert page.run(seen) == before
    redrawn(page, lambda: page.run("location.hash = 'colour=magnitude'"))
    assert page.run("return document.querySelector('input[value=magnitude]').checked")
    assert page.run("return document.getElementById('cell').hidden")
    for broken in ("phase=x&cell=9:9:9&x=a:b&kinds=", "cell=-1:99999&element=NaN", "cell=1e9:0.5"):
        redrawn(page, lambda broken=broken: page.run(f"location.hash = '{broken}'"))
    page.click("a[href='#coverage']")
    assert page.run("return location.hash") == "#coverage"
    assert page.browser.get_log("browser") == []


def test_rounding_in_the_browser_is_that_of_the_comparison(
    recorded_page, chromium, opened, tmp_path
):
    """Random, neighbouring and special FP32 bits: rounded bits, boundary, distances, ULP and class, for both types."""
    chance = random.Random(5)
    special = (
        0,
        1,
        0x80000000,
        0x80000001,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x7F7F8000,
        0x477FF000,
        0x33000000,
        0x387FF000,
        0x7F800000,
    )
    pairs = [(one, other) for one in special for other in special if one != other]
    for _ in range(600):
        one = chance.getrandbits(32)
        near = (one + chance.choice((1, 2, 0x8000, 0x10000, -1, -0x1000))) % 2**32
        middle = 0x30000000 + chance.getrandbits(28)
        pairs += [
            (one, near),
            (one, chance.getrandbits(32)),
            (middle & ~0xFFF, middle & ~0xFFF ^ 0x1000),
        ]
    values = torch.tensor(pairs, dtype=torch.int64).to(torch.int32).view(torch.float32)
    finite = values.isfinite().all(1) | torch.tensor([n < 110 for n in range(len(pairs))])
    pairs = [pair for pair, kept in zip(pairs, finite.tolist(), strict=True) if kept]
    values = values[finite].contiguous()
    site = Site.from_path("model.layers.0.mlp.up_proj")
    places = [Coordinate(site, 0, 0, 0)] * len(pairs)
    page = opened(chromium, tmp_path, recorded_page)
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        found = page.run(
            f"return {json.dumps(pairs)}.map(([a, b]) => flip.rounding.compare(a, b, '{name}'))"
            ".map((c) => [c.rounded, c.boundary, c.crossed, c.distances, c.ulp, c.survives])"
        )
        wanted = coordinate_differences(places, values[:, 0], values[:, 1], dtype)
        for pair, mine, other in zip(pairs, found, wanted, strict=True):
            report = other.boundary
            rounded = [
                int(bits, 16)
                for bits in (other.rounded_reference_bits, other.rounded_candidate_bits)
            ]
            distances = None
            if report.boundary is not None:
                distances = [report.reference_distance, report.candidate_distance]
            surviving = other.coordinate_class is CoordinateClass.SURVIVING
            expected = [
                rounded,
                report.boundary,
                report.boundaries_crossed,
                distances,
                other.distance_ulp,
                surviving,
            ]
            assert mine == expected, (name, [hex(bits) for bits in pair])


def test_print_shows_whole_pictures(recorded_page, chromium, opened, tmp_path):
    """Light colours, no switches, nothing wider than a sheet, the open cell without buttons; a PDF comes out."""
    page = opened(chromium, tmp_path, recorded_page, scheme="dark")
    redrawn(page, lambda: page.run("window.dispatchEvent(new Event('beforeprint'))"))
    assert page.run("return document.querySelector('#heatmap .main-svg').clientWidth") == 700
    assert (
        page.run("return document.getElementById('heatmap').data[1].colorscale[0][1]") == "#cfd3d8"
    )
    ink = page.run("return getComputedStyle(document.querySelector('#heatmap .ytick text')).fill")
    assert ink == "rgb(29, 35, 41)"
    printed = base64.b64decode(
        chromium.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    )
    (tmp_path / "report.pdf").write_bytes(printed)
    assert printed.startswith(b"%PDF")
    redrawn(page, lambda: page.run("window.dispatchEvent(new Event('afterprint'))"))
    assert page.run("return document.querySelector('#heatmap .main-svg').clientWidth") > 700


def with_modules(pairs):
    """A pair whose modules were recorded: one differing output."""
    pair = pairs.make()
    sites = [site for kind, site in pair.diff.grids["prefill"].rows if kind == "shrink"]
    attention = Site.from_path("model.layers.2.self_attn")
    rows = tuple(("module", site) for site in (*sites[:18], attention))
    grids = {}
    for phase, grid in pair.diff.grids.items():
        made: Grid = pairs.grid(phase, rows, grid.columns)
        made.classes[18, 2] = int(CoordinateClass.SURVIVING)
        grids[phase] = made
    return dataclasses.replace(pair.diff, module_grids=grids), pair


def test_recorded_modules_can_be_shown(pairs, chromium, opened, tmp_path):
    """Off at first; each follows the shrink of its own path; a cell says that only digests were kept."""
    diff, pair = with_modules(pairs)
    page = opened(
        chromium, tmp_path, render_report(diff, pair.reference, pair.candidate, title="x")
    )
    assert len(rows_shown(page)) == len(diff.grids["prefill"].rows)
    redrawn(page, lambda: page.click("input[value=module]"))
    names = rows_shown(page)
    assert names[:2] == ["layer 0 self_attn.q_proj", "layer 0 self_attn.q_proj output"]
    row = names.index("layer 2 self_attn output")
    redrawn(page, lambda: page.run(f"location.hash = 'kinds=module&cell={row}:2'"))
    assert len(rows_shown(page)) == 19
    assert "Only digests of this output were kept" in page.text("#cell")
    assert "cannot be put in by itself" in page.text("#cell")
    page.assert_quiet()


def test_elements_beyond_the_budget_are_the_least_telling(pairs):
    """Surviving roots first, then other surviving cells, then one of every cell; the rest is counted."""
    pair = pairs.make()
    rows = pairs.rows(28)
    grid = pairs.grid("decode", rows, range(1, 1025))
    grid.classes[:] = int(CoordinateClass.LATENT)
    grid.magnitudes[:] = 1e-9
    grid.classes[250, 1000] = int(CoordinateClass.SURVIVING)
    grid.origins[250, 1000] = 1
    cells = torch.arange(grid.classes.numel()).repeat_interleave(2)
    ones = torch.ones(len(cells))
    largest = LargestElements(
        cells.to(torch.int32), cells.to(torch.int32), -torch.ones_like(cells, dtype=torch.int32),
        torch.zeros_like(cells, dtype=torch.int32), ones, ones * 2, cache_dtype="bfloat16",
    )  # fmt: skip
    grid = dataclasses.replace(grid, largest=largest)
    diff = dataclasses.replace(pair.diff, grids={"decode": grid})
    ((grid, pooled),) = page_cells(diff).values()
    data = phase_data(diff, grid, pooled, pair.reference)["elements"]
    kept = torch.frombuffer(bytearray(base64.b64decode(data["cells"]["base64"])), dtype=torch.int32)
    assert len(kept) == PAGE_ELEMENTS
    assert data["left_out"] == len(cells) - PAGE_ELEMENTS
    assert (kept == 250 * 1024 + 1000).sum() == 2
    assert (kept.unique().shape[0]) == PAGE_ELEMENTS - 1


def test_parts_of_a_difference_are_told_apart(pairs, chromium, opened, tmp_path):
    """Where operands and weights were kept: the colour says which part is larger, the cell both."""
    pair = pairs.make()
    grid = pair.diff.grids["prefill"]
    rows, columns = grid.classes.shape
    inherited, added = (torch.full((rows, columns), torch.nan) for _ in range(2))
    places = (grid.origins == 2).nonzero().tolist()[:2]
    assert len(places) == 2
    for (row, column), parts in zip(places, ((2e-5, 3e-8), (1e-9, 4e-8)), strict=True):
        inherited[row, column], added[row, column] = parts
    told = dataclasses.replace(grid, inherited=inherited, added=added)
    diff = dataclasses.replace(pair.diff, grids={**pair.diff.grids, "prefill": told})
    page = opened(
        chromium, tmp_path, render_report(diff, pair.reference, pair.candidate, title="x")
    )
    redrawn(page, lambda: page.run("location.hash = 'colour=origin'"))
    drawn = page.run("return document.getElementById('heatmap').data[1].z")
    assert [drawn[row][column] for row, column in places] == [2, 1]
    assert "accounts for more of the difference" in page.text("#key")
    for (row, column), words in zip(places, (("0.00002", "3e-8"), ("1e-9", "4e-8")), strict=True):
        redrawn(
            page, lambda row=row, column=column: page.run(f"location.hash = 'cell={row}:{column}'")
        )
        text = page.text("#cell")
        assert "Told apart, as operands and weights were kept" in text
        assert all(word in text for word in words)
    other = next(place for place in (grid.origins == 2).nonzero().tolist() if place not in places)
    redrawn(page, lambda: page.run(f"location.hash = 'cell={other[0]}:{other[1]}'"))
    assert "not separable" in page.text("#cell")
    page.assert_quiet()


def test_hostile_names_stay_text_in_an_open_cell(pairs, chromium, opened, tmp_path):
    """The site's path goes into the command as ASCII JSON, and nothing of it runs."""
    pair = pairs.hostile()
    page = opened(
        chromium, tmp_path, render_report(pair.diff, pair.reference, pair.candidate, title="x")
    )
    redrawn(page, lambda: page.run("location.hash = 'cell=0:4'"))
    time.sleep(0.1)
    assert page.run("return window.pwned === undefined")
    assert (
        page.run("return document.querySelectorAll('#cell img, #cell a, #cell script').length") == 0
    )
    page.assert_quiet()
