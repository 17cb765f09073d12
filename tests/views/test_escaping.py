"""Hostile texts in every place of every view: they show as text, run nothing, ask for nothing and break nothing."""

from __future__ import annotations

import dataclasses
import html.parser
import io
import json
import re
import time
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
from rich.console import Console

from fliptrace.views import (
    boundary_figure,
    cause_figure,
    edit_html,
    heatmap_figure,
    investigation_html,
    margin_figure,
    pair_html,
    plain_interventions,
    plain_summary,
    propagation_figure,
    render_index,
    render_report,
    report_json,
    report_schema,
    row_html,
    terminal_interventions,
    terminal_summary,
    trace_html,
    verdict_html,
)
from fliptrace.views.escaping import plotly_label, quoted, said, shorten, stopped, visible

#: What no view may let through: controls but line feeds and tabs, and every character of no width of its own.
HIDDEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}


@pytest.fixture(scope="module")
def hostile(load_neighbour):
    """The module with the corpus."""
    return load_neighbour(Path(__file__).parent / "hostile.py")


@pytest.fixture
def charts(load_neighbour):
    """The module that makes propagation charts."""
    return load_neighbour(Path(__file__).parent / "test_propagation.py")


class Parsed(html.parser.HTMLParser):
    """Elements, attributes and texts, as a browser's parser would find them."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.texts = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.texts.append(data)


def hidden(text: str) -> list[str]:
    """Characters that cannot be seen, or that change how others are seen."""
    found = {c for c in set(text) - set("\n\t") if unicodedata.category(c) in HIDDEN}
    return sorted(found)


def spoilt(text, pairs, made, hostile, charts):
    """A pair, its interventions and its chart with one text everywhere."""
    pair = hostile.spoilt_pair(pairs, text)
    pair.diff = dataclasses.replace(pair.diff, propagation_chart=charts.chart(name=text))
    report = made.hostile_report((text,) * 20)
    return SimpleNamespace(pair=pair, report=report)


def page_of(case, text):
    pair = case.pair
    return render_report(
        pair.diff,
        pair.reference,
        pair.candidate,
        title=text,
        command=text,
        interventions=case.report,
    )


def assert_harmless(text: str, tags: set[str], name: str) -> Parsed:
    """Only known elements, no handler, no address but the page's own, no hidden character, UTF-8."""
    text.encode("utf-8")
    parsed = Parsed(text)
    assert set(parsed.tags) <= tags, (name, set(parsed.tags) - tags)
    for tag, attribute, value in parsed.attributes:
        assert not attribute.startswith("on"), (name, tag, attribute)
        if attribute in ("href", "src", "action", "srcdoc", "formaction", "xlink:href"):
            assert value.startswith(("#", "./")), (name, value)
    assert hidden(text) == [], name
    return parsed


TABLE = {"table", "thead", "tbody", "tr", "th", "td"}
NOTEBOOK = TABLE | {
    "div", "p", "strong", "small", "span", "details", "summary", "ul", "li", "br", "mark", "code",
    "svg", "defs", "pattern", "rect", "path", "circle", "line", "g", "text", "title",
}  # fmt: skip


def test_every_text_in_every_place_of_the_page(pairs, made, hostile, charts):
    """The page has the elements of a harmless one, as many scripts and styles, and shows the title as text."""
    plain = Parsed(page_of(spoilt("plain", pairs, made, hostile, charts), "plain"))
    for name, text in hostile.CORPUS.items():
        document = page_of(spoilt(text, pairs, made, hostile, charts), text)
        body = re.sub(r"<script>.*?</script>", "<script></script>", document, flags=re.DOTALL)
        parsed = assert_harmless(body, set(plain.tags), name)
        for tag in ("script", "style", "section", "h2", "main", "title", "footer"):
            assert parsed.tags.count(tag) == plain.tags.count(tag), (name, tag)
        if len(text) < 200:
            shown = " ".join("".join(parsed.texts).split())
            assert " ".join(visible(text).split()) in shown, name
        assert len(document) < 9_000_000, name


def test_every_text_in_every_place_of_the_other_views(pairs, made, hostile, charts):
    """Index, notebook displays, terminal, JSON."""
    index = TABLE | {
        "html", "head", "meta", "title", "style", "body", "header", "h1", "bdi", "p", "main", "a",
        "br", "div", "footer",
    }  # fmt: skip
    schema = jsonschema.Draft202012Validator(report_schema())
    for name, text in hostile.CORPUS.items():
        case = spoilt(text, pairs, made, hostile, charts)
        pair, report = case.pair, case.report
        parts = (pair.diff, pair.reference, pair.candidate)
        assert_harmless(render_index(hostile.spoilt_index(text), title=text), index, name)
        for shown in (
            pair_html(*parts),
            trace_html(pair.reference),
            row_html(pair.diff.roots[0]),
            investigation_html(report.investigation),
            verdict_html(report.claims[0].verdict),
            edit_html(text, {"edit": text, text: 1}),
        ):
            assert_harmless(shown, NOTEBOOK, name)
        for printed in (plain_summary(*parts), plain_interventions(report)):
            assert hidden(printed) == [], name
            assert max(map(len, printed.splitlines())) <= 80, name
        value = json.loads(json.dumps(report_json(*parts, command=text, interventions=report)))
        schema.validate(value)
        assert value["command"] == text


def test_no_text_steers_a_terminal(pairs, made, hostile, charts):
    """What rich writes to a colour terminal holds its own styles and nothing of a text's."""
    for name, text in hostile.CORPUS.items():
        case = spoilt(text, pairs, made, hostile, charts)
        pair = case.pair
        for shown in (
            terminal_summary(pair.diff, pair.reference, pair.candidate),
            terminal_interventions(case.report),
        ):
            stream = io.StringIO()
            Console(file=stream, width=80, force_terminal=True, color_system="truecolor").print(
                shown
            )
            rest = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
            assert hidden(rest) == [], name


def figures(case):
    """Every figure that holds a text from elsewhere."""
    pair, best = case.pair, case.report.investigation.best_coordinate
    for phase, colour in (("prefill", "class"), ("decode", "magnitude")):
        yield heatmap_figure(pair.diff, phase=phase, colour=colour, reference=pair.reference)
    yield margin_figure(pair.diff)
    yield boundary_figure(pair.diff.roots[0].coordinates[0])
    yield propagation_figure(pair.diff)
    yield cause_figure(best, best.verdict, "bfloat16")


def strings(value):
    """Every string of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def test_no_label_holds_markup_a_formula_or_a_template(pairs, made, hostile, charts):
    """plotly reads <tags>, $formulas$ and %{templates} in labels and hovers; only our own are left."""
    for name, text in hostile.CORPUS.items():
        if len(text) > 10_000:
            continue
        for figure in figures(spoilt(text, pairs, made, hostile, charts)):
            document = json.loads(figure.to_json())
            document["layout"].pop("template", None)
            for shown in strings(document):
                rest = re.sub(r"</?(?:br|b|extra)>|%\{(?:text|hovertext)\}", "", shown)
                assert not re.search(r"[<>$]|%\{", rest), (name, shown)
                assert hidden(shown) == [], name


def test_huge_texts_are_cut_and_said_to_be(pairs, made, hostile, charts):
    """A sentence, label or row never carries 100 kB; the two texts themselves are whole."""
    text = hostile.CORPUS["huge"]
    case = spoilt(text, pairs, made, hostile, charts)
    pair = case.pair
    printed = plain_summary(pair.diff, pair.reference, pair.candidate)
    assert "… (100000 characters)" in " ".join(printed.split())
    assert len(printed) < 60_000
    assert len(trace_html(pair.reference)) < 60_000
    text = "B" * 100_000
    edits = visible(json.dumps({"edit": text}), keep_newlines=True)
    assert text in edits  # what is copied is whole


def test_the_pieces_keep_their_promises(hostile):
    """visible, quoted, said, shorten and plotly_label, for every text and every single character up to U+3000."""
    for text in hostile.CORPUS.values():
        for made_safe in (visible(text), quoted(text), said(text), stopped(text)):
            assert hidden(made_safe) == []
            made_safe.encode("utf-8")
        assert len(shorten(text)) <= 80
        assert not set("<>$%{}\\") & set(plotly_label(text))
    for number in range(0x3000):
        assert hidden(visible(chr(number))) == []
        assert visible(chr(number))


#: The corpus in Chromium, in parts, so that each part is a test of its own.
PARTS = 4
#: Texts that share a page: laying one out takes a second, and each is alone in the tests above.
TOGETHER = 3


def pages_of(corpus):
    """Names and texts of the corpus, several together; alone what counts only as the whole of a label."""
    alone = {
        name: text for name, text in corpus.items() if set(text) & set("$%") or len(text) > 2000
    }
    others = [(name, text) for name, text in corpus.items() if name not in alone]
    groups = [others[start : start + TOGETHER] for start in range(0, len(others), TOGETHER)]
    joined = [(", ".join(n for n, _ in group), " ".join(t for _, t in group)) for group in groups]
    return [*alone.items(), *joined]


@pytest.mark.browser
@pytest.mark.parametrize("part", range(PARTS))
def test_no_text_does_anything_in_a_browser(
    pairs, made, hostile, charts, chromium, tmp_path, part, load_neighbour
):
    """In each place of the page at once: no canary, dialog, request, console message; the page is whole and usable."""
    opened = load_neighbour(Path(__file__).parent / "test_browser.py").Page
    sections = None
    for name, whole in pages_of(hostile.CORPUS)[part::PARTS]:
        text = whole[:10_000]  # laying out ten times as much takes seconds and shows nothing new
        document = page_of(spoilt(text, pairs, made, hostile, charts), text)
        page = opened(chromium, tmp_path, document)
        page.run("for (const d of document.querySelectorAll('details')) d.open = true")
        page.click("input[value=decode]")
        page.run(
            "const h = document.getElementById('heatmap'), b = h.getBoundingClientRect();"
            "for (const type of ['mousemove', 'click']) h.querySelector('.nsewdrag').dispatchEvent("
            "new MouseEvent(type, {bubbles: true, clientX: b.left + 300, clientY: b.top + 100}))"
        )
        chromium.find_element("css selector", "#propagation-scroll").send_keys("\ue014")
        assert page.run("return window.pwned === undefined"), name
        found = page.run(
            "return [...document.querySelectorAll('img, iframe, base, object, embed, form, svg a, link,"
            " [onload], [onerror], [onmouseover], [onfocus], a[href^=javascript], a[href*=example]')].length"
        )
        assert found == 0, name
        headings = page.run("return [...document.querySelectorAll('h2')].map((h) => h.textContent)")
        sections = sections or headings
        assert headings == sections, name
        assert page.run("return document.title") == " ".join(visible(text).split()), name
        assert page.overflow() <= 0, name
        page.assert_quiet()


@pytest.mark.browser
def test_the_index_and_notebooks_run_nothing(
    pairs, made, hostile, charts, chromium, tmp_path, load_neighbour
):
    """Every text in one index page, and all displays of a notebook in one page without any policy to help them."""
    rows = [row for text in hostile.CORPUS.values() for row in hostile.spoilt_index(text)]
    index = tmp_path / "index.html"
    index.write_text(render_index(rows), "utf-8")
    chromium.get(index.as_uri())
    assert len(chromium.find_elements("css selector", "tbody tr")) == len(rows)
    links = chromium.execute_script(
        "return [...document.querySelectorAll('a')].map((a) => new URL(a.href).protocol)"
    )
    assert set(links) == {"file:"}
    displays = []
    for text in hostile.CORPUS.values():
        case = spoilt(text, pairs, made, hostile, charts)
        pair, report = case.pair, case.report
        displays += [
            pair_html(pair.diff, pair.reference, pair.candidate),
            trace_html(pair.reference),
            row_html(pair.diff.roots[0]),
            verdict_html(report.claims[0].verdict),
            edit_html(text, {"edit": text}),
        ]
    notebook = tmp_path / "notebook.html"
    notebook.write_text(
        "<!doctype html><meta charset=utf-8><title>x</title><link rel=icon href=data:,>"
        + "".join(displays),
        "utf-8",
    )
    chromium.get_log("performance")
    chromium.get(notebook.as_uri())
    chromium.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    time.sleep(0.2)
    assert chromium.execute_script("return window.pwned === undefined")
    assert chromium.execute_script("return document.querySelectorAll('img, a, script').length") == 0
    assert chromium.get_log("browser") == []
    requests = [
        message["params"]["request"]["url"]
        for entry in chromium.get_log("performance")
        if (message := json.loads(entry["message"])["message"])["method"]
        == "Network.requestWillBeSent"
    ]
    assert [url for url in requests if not url.startswith("data:")] == [notebook.as_uri()]
