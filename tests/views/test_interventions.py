"""What interventions add to page, JSON, story, terminal and notebook: order, honesty, escaping."""

from __future__ import annotations

import copy
import dataclasses
import html.parser
import json
import re
import typing

import jsonschema
import pytest

from fliptrace import judgements
from fliptrace.judgements import CAVEAT, Judgement
from fliptrace.verdicts import Outcome
from fliptrace.views import (
    InterventionReport,
    cause_figure,
    edit_html,
    investigation_html,
    plain_interventions,
    render_report,
    report_json,
    report_schema,
    tell_story,
    terminal_interventions,
    verdict_html,
)
from fliptrace.views.interventions import proved_claims, token_margin
from fliptrace.views.interventions_cache import cache_pictures
from fliptrace.views.interventions_checks import checks
from fliptrace.views.interventions_figures import difference_of, margin_bars
from fliptrace.views.interventions_page import continuation_texts
from fliptrace.views.interventions_words import gist


def page(pair, report):
    return render_report(
        pair.diff, pair.reference, pair.candidate, title="a pair", interventions=report
    )


def document(pair, report):
    value = report_json(pair.diff, pair.reference, pair.candidate, interventions=report)
    return json.loads(json.dumps(value, allow_nan=False))


def validator():
    jsonschema.Draft202012Validator.check_schema(report_schema())
    return jsonschema.Draft202012Validator(report_schema())


class Skeleton(html.parser.HTMLParser):
    """Collects elements, attributes and texts, as a browser's parser would."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text.append(data)


def test_the_section_answers_in_order(pairs, made):
    """Verdict and caveat, how it was reached, the cause, past or present, layers, every arm, replay, answers, roots."""
    text = page(pairs.make(), made.report())
    marks = [
        'href="#interventions"',
        'id="interventions"',
        'class="verdict cause sufficient"',
        CAVEAT[:40],
        "How this verdict was reached",
        'id="cause-boundary"',
        'id="cause-margins"',
        "Past or present?",
        "Which part of the cache?",
        "<h3>What was found</h3>",
        "<h3>Arms of every proof",
        "Could the recordings be replayed?",
        "How the answers go on",
        "Every root that was tried",
        "All root rows together",
        "A minimal set of rows",
        "What the interventions did not cover",
        "trace-intervene pair --seed 0",
        "Surviving roots",
    ]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)
    assert "Was it proven?" in text[: text.index("<main>")]


def test_a_pair_without_interventions_has_no_section(pairs):
    """Nothing of it, and the story still says that an intervention would be needed."""
    pair = pairs.make()
    text = page(pair, None)
    assert 'id="interventions"' not in text
    assert "takes an intervention" in text
    assert "not tested: no intervention was run" in text[: text.index("<main>")]
    assert document(pair, None)["interventions"] is None


def test_the_story_no_longer_asks_for_an_intervention_that_was_made(pairs, made):
    """The doubt is replaced by the passage on what was enough, told from the same sentences as the page."""
    pair = pairs.make()
    story = tell_story(pair.diff, pair.reference, pair.candidate, made.report())
    passage = story.passage("interventions")
    assert passage.sentences[0] == made.investigation().sentence
    assert passage.sentences[-1] == CAVEAT
    assert not any("takes an intervention" in s for s in story.passage("doubts").sentences)
    assert any("budget ended" in s for s in story.passage("coverage").sentences)


@pytest.mark.parametrize("judgement", list(Judgement))
def test_every_judgement_renders_and_validates(pairs, made, judgement):
    """Page, JSON and terminal; the value reads back as it was."""
    report = made.report(judgement)
    pair = pairs.make()
    assert "</html>" in page(pair, report)
    value = document(pair, report)
    validator().validate(value)
    assert InterventionReport.from_json(value["interventions"]) == report
    assert plain_interventions(report)


def test_what_was_not_run_is_left_out_or_said(pairs, made):
    """An investigation that is void from the start has none of the parts; nothing is made up for them."""
    report = made.report(
        Judgement.VOID,
        sentence="Void: the reference could not be reconstructed.",
        cache_substitution=None,
        roots=(),
        coordinates=(),
        minimal_set=None,
        minimal_sets=(),
        layers=(),
        cache_parts=(),
        all_roots=(),
        sentences=("Void: the reference could not be reconstructed.", CAVEAT),
        first_cache_step=None,
        two_by_two=None,
        continuations=(),
        reconstruction=(
            judgements.Reconstruction("reference", 4, False, "step 3, cache of layer 2", False),
        ),
    )
    text = page(pairs.make(), report)
    assert "step 3, cache of layer 2" in text
    assert "Past or present?" not in text
    assert "How the answers go on" not in text
    assert 'id="cause-boundary"' not in text
    validator().validate(document(pairs.make(), report))
    assert plain_interventions(report).startswith("Void: the reference could not be reconstructed.")


def test_the_schema_names_exactly_the_fields_of_the_values(made):
    """A field that is added to a value and not to the schema fails here."""
    definitions = report_schema()["$defs"]
    seen = set()

    def look(kind):
        name = re.sub(r"(?<!^)([A-Z])", r"_\1", kind.__name__).lower()
        if name in seen:
            return
        seen.add(name)
        names = {field.name for field in dataclasses.fields(kind)}
        assert set(definitions[name]["properties"]) == names, name
        assert set(definitions[name]["required"]) == names, name
        assert definitions[name]["additionalProperties"] is False
        for hint in typing.get_type_hints(kind).values():
            for inner in (hint, *typing.get_args(hint)):
                if dataclasses.is_dataclass(inner):
                    look(inner)

    look(InterventionReport)
    assert {"investigation", "verdict", "arm", "two_by_two", "claim_result"} <= seen


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("surprise",), 1),
        (("investigation", "judgement"), "likely"),
        (("investigation", "two_by_two", "decided_by"), "luck"),
        (("investigation", "best_coordinate", "reference_bits"), "3c298000"),
        (("investigation", "target_step"), -1),
        (("investigation", "schema"), 2),
        (("claims", 0, "verdict", "directions", 0, "recipient"), "left"),
        (("claims", 0, "verdict", "edits", 0), {"edit": "weights"}),
        (
            ("claims", 0, "verdict", "directions", 0, "edited", "receipts", 0, "digest_before"),
            "12",
        ),
    ],
)
def test_the_schema_refuses_planted_faults(pairs, made, path, value):
    """The constraints are real ones."""
    broken = copy.deepcopy(document(pairs.make(), made.report()))
    assert validator().is_valid(broken)
    place = broken["interventions"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert not validator().is_valid(broken)


def test_hostile_texts_add_no_element(pairs, made):
    """Claims, names, sentences, texts, answers and commands that try to become markup are shown as they are."""
    report = made.hostile_report(pairs.corpus)
    text = page(pairs.make(), report)
    text.encode("utf-8")
    hostile, plain = Skeleton(text), Skeleton(page(pairs.make(), made.report()))
    assert set(hostile.tags) == set(plain.tags)
    assert hostile.tags.count("script") == 3
    assert not [name for name, _ in hostile.attributes if name.startswith("on")]
    seen = "".join(hostile.text)
    assert "<script>window.pwned=1</script>" in seen
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b\u2028\u2029]", seen)
    assert text == page(pairs.make(), report)
    validator().validate(document(pairs.make(), report))


def test_hostile_texts_do_no_harm_in_terminal_and_notebook(pairs, made):
    """At most 80 columns, no control character, no rich markup, no element in the notebook's HTML."""
    from rich.console import Console

    report = made.hostile_report(pairs.corpus)
    lines = plain_interventions(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\u2066]", "".join(lines))
    console = Console(width=80, force_terminal=True, color_system=None, record=True)
    console.print(terminal_interventions(report))
    assert "[red]rich[/red]" in console.export_text()
    for text in (
        investigation_html(report.investigation),
        verdict_html(report.claims[0].verdict),
        edit_html(pairs.corpus[0], {"edit": pairs.corpus[1]}),
    ):
        skeleton = Skeleton(text)
        assert not {"script", "img", "a", "svg", "base", "meta", "link"} & set(skeleton.tags)
        assert {name for name, _ in skeleton.attributes} <= {"style", "class", "scope", "open"}
        text.encode("utf-8")


def test_the_terminal_says_the_verdict_first_and_the_caveat_last(made):
    """Then what was judged, the cause, the arms with receipts and specificity, and what was not covered."""
    text = plain_interventions(made.report())
    assert text.startswith("One coordinate alone flips the token")
    order = ["What was judged", "What was found", "Arms", "What was not covered"]
    places = [text.index(f"\n{heading}\n") for heading in order]
    assert places == sorted(places)
    assert "1 of 1" in text
    assert "3 of 20 shams flip too" in text
    assert " ".join(text.split()).endswith(CAVEAT)


def test_a_failed_receipt_and_unequal_repeats_are_not_hidden(pairs, made):
    """Both show on the page and in the terminal."""
    lost = made.arm("edited", receipts=(made.receipt(landed=False),), repeatable=False)
    verdict = made.verdict(Judgement.VOID, directions=(made.direction(edited=lost),))
    report = InterventionReport(made.investigation(cache_substitution=verdict))
    assert "NOT landed" in page(pairs.make(), report)
    assert "0 of 1 landed" in page(pairs.make(), report)
    text = plain_interventions(report)
    assert "0 of 1" in text
    assert "NOT equal" in text


def test_a_void_screening_says_why(pairs, made):
    """A root that could not be judged is not shown as one that is not enough."""
    void = dataclasses.replace(
        made.screening(judgement=Judgement.VOID), reasons=("the unedited arm gives (358, '<b>')",)
    )
    root = made.root(screenings=(void,))
    text = page(pairs.make(), InterventionReport(made.investigation(roots=(root,))))
    assert "! void: the unedited arm gives (358, &#39;&lt;b&gt;&#39;)" in text


def test_margins_are_the_paper_s(made):
    """m = z(reference's token) - z(candidate's token): the same sign in both directions, 0 for a tie."""
    bars = margin_bars(made.verdict())
    assert [(bar.execution, bar.value_of, bar.margin) for bar in bars] == [
        ("reference", "reference", 0.125),
        ("reference", "candidate", 0.0),
        ("candidate", "candidate", -0.125),
        ("candidate", "reference", 0.0),
    ]
    other = made.arm(other=(999, " third"))
    assert token_margin(other, made.REFERENCE_TOKEN[0], made.CANDIDATE_TOKEN[0]) is None


def test_the_picture_holds_both_values_boundary_and_bars(made):
    """As the paper's figure 5: two number lines and the margin under each value, for a notebook to restyle."""
    figure = cause_figure(made.coordinate(), made.verdict(), "bfloat16")
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert [bar.x[0] for bar in bars] == [0.125, 0.0, -0.125, 0.0]
    labels = " ".join(annotation.text for annotation in figure.layout.annotations)
    assert "bfloat16 boundary 0.010345458984375" in labels
    assert "0 (tie)" in labels
    assert figure.layout.xaxis.domain[1] < figure.layout.xaxis3.domain[0]
    difference = difference_of(made.coordinate(), "bfloat16")
    assert difference.boundary.boundary == made.coordinate().boundary
    assert difference.distance_ulp == 2


def test_texts_are_cut_where_they_part(made):
    """At a word's end, the shared part once; one text alone is not cut."""
    arms = made.investigation().continuations
    texts = continuation_texts(arms)
    assert texts["common"] == "Mia starts with 12. She gives 5 "
    assert [part["rest"][:4] for part in texts["parts"]] == ["away", "more"]
    assert [part["correct"] for part in texts["parts"]] == ["correct", "wrong"]
    assert continuation_texts(arms[:1])["common"] == ""
    assert continuation_texts(()) is None


def test_a_claim_is_listed_once(made):
    """The best coordinate's proof is one of the coordinates' proofs, too."""
    best = made.coordinate()
    report = InterventionReport(made.investigation(coordinates=(best,), best_coordinate=best))
    kinds = [entry.kind for entry in proved_claims(report)]
    assert kinds.count("coordinate") == 1


def test_the_best_of_several_judgements_decides(made):
    """A sufficient claim beside a void one is sufficient; without one, void is not hidden by less."""

    def together(*found):
        claims = tuple(made.ClaimResult(made.verdict(judgement)) for judgement in found)
        return InterventionReport(None, claims).judgement

    assert together(Judgement.VOID, Judgement.SUFFICIENT) is Judgement.SUFFICIENT
    assert together(Judgement.NOT_SUFFICIENT, Judgement.VOID) is Judgement.VOID
    assert together(Judgement.NOT_APPLICABLE, Judgement.CHANGES) is Judgement.CHANGES


def test_the_gist_names_the_smallest_cause(made):
    """A coordinate, else one row by its name, else how many rows together; what was not found is not made up."""
    story = made.investigation
    smallest = made.minimal_set()
    several = dataclasses.replace(smallest, names=("a", "b", "c"))
    for expected, found in (
        ("one FP32 value, layer 2 mlp.up_proj", story()),
        ("layer 2 mlp.gate_proj, prefill", story(best_coordinate=None)),
        ("3 root rows together", story(best_coordinate=None, minimal_set=several)),
        ("nothing found within what was run", story(Judgement.NOT_SUFFICIENT)),
        ("the experiment is void", story(Judgement.VOID)),
    ):
        assert gist(InterventionReport(found)).startswith(expected)


def test_long_tables_are_counted(pairs, made):
    """Of many roots the first 200 are shown, the rest is a number and in report.json."""
    roots = tuple(made.root(number) for number in range(450))
    text = page(pairs.make(), InterventionReport(made.investigation(roots=roots)))
    assert "250 more in report.json." in text
    assert len(document(pairs.make(), InterventionReport(made.investigation(roots=roots)))) > 1


def test_an_identical_pair_may_hold_a_claim(pairs, made):
    """With another judged step a pair without a flip can be tested; its page has the section."""
    report = InterventionReport(None, (made.ClaimResult(made.verdict(Judgement.NOT_SUFFICIENT)),))
    assert 'id="interventions"' in page(pairs.make(Outcome.LATENT), report)


def test_the_questions_that_decide_are_answered_per_direction(made):
    """The headline's claim; every check a yes, the shams a number to weigh."""
    found = checks(made.report())
    assert found.directions == ("reference ← candidate", "candidate ← reference")
    assert found.claim.startswith("shrink of layer 2 mlp.up_proj")
    answers = {question: row[0] for question, row in found.rows}
    marks = [answer.mark for answer in answers.values()]
    assert marks == ["yes"] * 7 + ["note", "note"]
    assert answers["Would a push elsewhere have done as well?"].text == (
        "3 of 20 other coordinates flip it too"
    )
    assert answers["Verdict"].text == "✓ sufficient"
    text = answers["With the donor's value, does it give the donor's token?"].text
    assert text == "“.” (id 311), a tie of 2"


@pytest.mark.parametrize(
    ("question", "change"),
    [
        ("Without the edit", lambda m: {"unedited": m.arm("unedited", m.CANDIDATE_TOKEN)}),
        ("With the donor's value", lambda m: {"edited": m.arm("edited", m.REFERENCE_TOKEN)}),
        (
            "Did the value arrive",
            lambda m: {
                "edited": m.arm("edited", m.CANDIDATE_TOKEN, receipts=(m.receipt(landed=False),))
            },
        ),
        (
            "Did every repeat",
            lambda m: {"edited": m.arm("edited", m.CANDIDATE_TOKEN, repeatable=False)},
        ),
        (
            "Do the controls",
            lambda m: {"controls": (judgements.Control("latent sham", False, "It flips."),)},
        ),
        ("Does it hold without", lambda m: {"free": m.arm("free", m.REFERENCE_TOKEN)}),
    ],
)
def test_each_question_can_be_answered_no(made, question, change):
    """One thing wrong: its row says no, with the sign, and no other row does."""
    direction = made.direction(**change(made))
    report = InterventionReport(None, (made.ClaimResult(made.verdict(directions=(direction,))),))
    rows = checks(report).rows
    assert [name for name, row in rows if row[0].mark == "no"] == [
        name for name, _ in rows if name.startswith(question)
    ]
    assert next(row[0].sign for name, row in rows if name.startswith(question)) == "✗"


def test_what_was_not_run_is_open_and_nothing_proved_has_no_questions(pairs, made):
    """A dash for what was not run; a claim without directions has no table at all."""
    bare = made.direction(
        unedited=None,
        edited=None,
        free=None,
        controls=(),
        specificity=None,
        recipient="reference",
        judgement=Judgement.NOT_APPLICABLE,
    )
    report = InterventionReport(None, (made.ClaimResult(made.verdict(directions=(bare,))),))
    assert {row[0].mark for name, row in checks(report).rows if name != "Verdict"} == {"open"}
    nothing = InterventionReport(None, (made.ClaimResult(made.verdict(directions=())),))
    assert checks(nothing) is None
    assert "How this verdict was reached" not in page(pairs.make(), nothing)
    unequal = judgements.Reconstruction("reference", 4, False, "step 3, layer 2", False)
    found = made.investigation(reconstruction=(unequal,))
    first = checks(InterventionReport(found)).rows[0][1]
    assert [(answer.mark, answer.text) for answer in first] == [
        ("no", "differs: step 3, layer 2"),
        ("open", "not run"),
    ]


def test_the_cache_is_a_picture_per_direction(pairs, made):
    """A cell per layer, keys and values apart: enough alone, needed, neither, not run."""
    part = judgements.CachePartNeed
    found = made.investigation(
        cache_parts=(
            part("keys", (0, 1, 2, 3), "reference", True, False, 510),
            part("values", (3,), "reference", False, True, 80),
        )
    )
    (picture,) = cache_pictures(found)
    assert picture.columns == ("all", "0", "1", "2", "3")
    signs = {what: [cell.signs for cell in cells] for what, cells in picture.rows}
    assert signs == {
        "keys and values": ["✓", "·", "·", "·", "✓◆"],
        "keys": ["✓", "", "", "", ""],
        "values": ["", "", "", "", "◆"],
    }
    text = page(pairs.make(), InterventionReport(found))
    assert 'title="values of layer 3: enough alone: no; needed: yes">◆<' in text
    void = made.investigation(cache_substitution=made.verdict(Judgement.VOID), cache_parts=())
    assert cache_pictures(void)[0].rows[0][1][0].signs == ""
    assert cache_pictures(made.investigation(layers=(), cache_parts=())) == ()
