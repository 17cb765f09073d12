"""The page, the index and the notebook's HTML as text: order, honesty, escaping."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import html.parser
import json
import re

import pytest

from fliptrace.verdicts import Outcome
from fliptrace.views import IndexRow, pair_html, render_index, render_report, row_html, trace_html
from fliptrace.views.templating import sentence as keep_unbroken


def report(pair, **options) -> str:
    options = {"title": "a pair", **options}
    return render_report(pair.diff, pair.reference, pair.candidate, **options)


class Skeleton(html.parser.HTMLParser):
    """Collects elements, attributes and the texts of scripts and styles, as a browser's parser would."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.blocks, self.text = [], [], [], []
        self._open = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag in ("script", "style"):
            self._open = (tag, dict(attrs).get("type", ""), [])

    def handle_data(self, data):
        (self._open[2] if self._open else self.text).append(data)

    def handle_endtag(self, tag):
        if self._open and tag == self._open[0]:
            self.blocks.append((tag, self._open[1], "".join(self._open[2])))
            self._open = None


def test_the_page_answers_in_order(pairs):
    """Verdict, where it started, heatmap, boundary, roots, texts, manifests, coverage, repetition."""
    text = report(pairs.make(), command="trace-pair --demo")
    marks = [
        'id="verdict"',
        "Where it started",
        'id="heatmap"',
        "How close each choice was",
        'id="boundary"',
        "Surviving roots",
        "Both texts",
        "Manifest keys that differ",
        "How to repeat",
        "trace-pair --demo",
        'id="coverage"',
    ]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)


def test_the_policy_allows_exactly_what_is_embedded(pairs):
    """Each script and style is named by its hash; nothing may be requested."""
    skeleton = Skeleton(report(pairs.make()))
    (policy,) = [
        value
        for tag, name, value in skeleton.attributes
        if tag == "meta" and "default-src" in value
    ]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe-eval" not in policy
    assert "unsafe-inline" not in policy.replace("style-src-attr 'unsafe-inline'", "")
    for tag, kind, text in skeleton.blocks:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert kind == "application/json" or f"'sha256-{digest}'" in policy, tag
    assert [kind for tag, kind, _ in skeleton.blocks if tag == "script"] == [
        "application/json",
        "",
        "",
    ]


def test_the_page_refers_to_nothing_outside(pairs):
    """No address in any attribute but fragments; the same pair gives the same bytes."""
    text = report(pairs.hostile(), title=pairs.corpus[1], command=pairs.corpus[3])
    attributes = Skeleton(text).attributes
    links = [v for _, name, v in attributes if name in ("src", "href", "action", "srcset", "data")]
    assert links
    assert all(link.startswith("#") for link in links)
    assert not [name for _, name, _ in attributes if name.startswith("on")]
    assert text == report(pairs.hostile(), title=pairs.corpus[1], command=pairs.corpus[3])


def test_hostile_texts_add_no_element(pairs):
    """The hostile page has only the elements that the template has, and encodes as UTF-8."""
    text = report(pairs.hostile(), title=pairs.corpus[2], command=pairs.corpus[0])
    text.encode("utf-8")
    plain = Skeleton(report(pairs.make(), command="x"))
    hostile = Skeleton(text)
    assert set(hostile.tags) == set(plain.tags)
    assert hostile.tags.count("script") == 3
    seen = "".join(hostile.text)
    assert "<script>window.pwned=1</script>" in seen
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b\u2028\u2029]", seen)
    assert "⟨U+202E⟩evil" in seen


def test_numbers_and_tokens_stay_on_one_line(pairs):
    """Signs, exponents, options and a token's leading space do not end a line; nothing is lost or unescaped."""
    sentence = "at -1.04e-07 (0xbe11) “ a<b” of layer-4, --operands, tie-break; x <i>"
    marked = str(keep_unbroken(sentence))
    kept = re.findall('<span class="unbroken">(.*?)</span>', marked)
    assert kept == ["-1.04e-07", "(0xbe11)", "“ a&lt;b”", "layer-4", "--operands"]
    assert html.unescape(re.sub("</?span[^>]*>", "", marked)) == sentence
    assert "<i>" not in marked


def test_the_ring_is_explained_only_where_it_is(pairs):
    """It marks the first surviving propagating root, else the first surviving root, else nothing."""
    assert "</span>first surviving propagating root</li>" in report(pairs.make())
    absorbed = pairs.row()
    text = report(pairs.make(first_propagating=None, first_surviving=absorbed))
    assert "</span>first surviving root</li>" in text
    assert "swatch ring" not in report(pairs.make(Outcome.IDENTICAL)).split("</style>", 1)[1]


def test_the_data_is_json_that_nothing_ends_early(pairs):
    """It reads back, hostile strings included."""
    text = report(pairs.hostile())
    ((_, _, data),) = [block for block in Skeleton(text).blocks if block[1] == "application/json"]
    assert "<" not in data
    assert data.isascii()
    assert json.loads(data)["heatmaps"]["prefill"]["columns"]


def test_an_identical_pair_says_so_honestly(pairs):
    """Two runs, not proof, and what was not covered."""
    text = "".join(Skeleton(report(pairs.make(Outcome.IDENTICAL))).text)
    assert "No difference found in 1,234 compared records" in text
    assert "repeatable in 2 runs, not proof of determinism" in text
    assert "modules between shrinks were not recorded" in text
    assert "None among the compared rows." in text


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_renders(pairs, outcome):
    """Also without steps, grids and texts."""
    assert "</html>" in report(pairs.make(outcome))
    pair = pairs.make(outcome, steps=(), grids={})
    for trace in (pair.reference, pair.candidate):
        trace.source.closing = dataclasses.replace(
            trace.closing, text="", piece_texts=(), prompt_piece_texts=()
        )
    assert "The traces hold no texts" in report(pair)


def test_long_root_lists_are_counted(pairs):
    """The first 200 rows are shown, the rest is a number."""
    root = pairs.row()
    text = report(pairs.make(roots=(root,) * 450, surviving_root_rows=12_345))
    assert "Shown: the first 200 of 12,345." in text
    assert text.count("<td>layer 2 mlp.up_proj</td>") >= 200


def test_the_flip_is_marked_in_both_texts(pairs):
    """Common text once, then each continuation with its differing token marked."""
    text = report(pairs.make())
    assert text.count("<mark>") == 2
    assert "<mark><bdi>,</bdi></mark>" in text
    assert "<mark><bdi>.</bdi></mark>" in text


def test_the_index_links_to_folders_only(pairs):
    """One row each; a folder's name cannot leave the index's own folder or run anything."""
    rows = [
        IndexRow.from_diff("0", "Mia has 12 apples", pairs.make().diff, folder="prompt 0"),
        IndexRow.from_diff("1", pairs.corpus[0], pairs.make(Outcome.IDENTICAL).diff, folder="1"),
        IndexRow(
            pairs.corpus[3], pairs.corpus[9], None, folder="javascript:alert(1)", note="too long"
        ),
        IndexRow("3", "", Outcome.LATENT, folder="//example.invalid/x\udc80"),
    ]
    skeleton = Skeleton(render_index(rows))
    links = [value for _, name, value in skeleton.attributes if name == "href"]
    assert links == [
        "./prompt%200/report.html",
        "./1/report.html",
        "./javascript%3Aalert%281%29/report.html",
        "./example.invalid/x%ED%B2%80/report.html",
    ]
    text = "".join(skeleton.text)
    assert (
        "4 prompts: 1 token flipped, 1 latent differences only, 1 identical, 1 could not be run."
        in text
    )
    assert "generated token 12 (step 11)" in text
    assert "script" not in skeleton.tags


def test_notebook_html_is_self_contained_and_escaped(pairs):
    """No script, no link, no handler, no hostile element in any of the three; pictures are inline SVG."""
    pair = pairs.hostile()
    for text in (
        pair_html(pair.diff, pair.reference, pair.candidate),
        trace_html(pair.reference),
        row_html(pair.diff.roots[0]),
    ):
        skeleton = Skeleton(text)
        outside = {"script", "img", "a", "image", "use", "foreignobject", "base", "meta", "link"}
        assert not outside & set(skeleton.tags)
        for tag, name, value in skeleton.attributes:
            assert not name.startswith("on"), (tag, name)
            assert name not in ("href", "xlink:href", "src", "srcset", "action", "data"), (
                tag,
                name,
            )
            assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)", value))
        text.encode("utf-8")
    assert "Token flipped" in pair_html(pair.diff, pair.reference, pair.candidate)
