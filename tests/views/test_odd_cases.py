"""Sentences stay true where a pair is odd: variants, gaps, FP32 models, infinities, one file, one of something."""

from __future__ import annotations

import dataclasses
import json
import math

import jsonschema
import pytest
import torch

from fliptrace.manifest import Manifest
from fliptrace.numerics import CoordinateClass
from fliptrace.verdicts import ONE_FILE, Fate, ForeignRoot, Origin, Outcome
from fliptrace.views import (
    IndexRow,
    plain_summary,
    render_report,
    report_json,
    report_schema,
    tell_story,
)
from fliptrace.views.texts import pair_texts

NO_ROOTS = {"first_surviving": None, "first_propagating": None, "roots": (), "root_rows": 0}


def told(pair) -> str:
    story = tell_story(pair.diff, pair.reference, pair.candidate)
    return "\n".join([story.verdict, *(one for part in story.passages for one in part.sentences)])


def verdict(pair) -> str:
    return tell_story(pair.diff, pair.reference, pair.candidate).verdict


def covering(pair, **changes):
    """Replace fields of a pair's coverage."""
    pair.diff = dataclasses.replace(
        pair.diff, coverage=dataclasses.replace(pair.diff.coverage, **changes)
    )
    return pair


def computing_in(pair, dtype):
    """Let both manifests say that the model computes in a type."""
    for trace in (pair.reference, pair.candidate):
        sections = dict(trace.manifest.sections)
        sections["model"] = {**sections["model"], "dtype": dtype}
        trace.source.manifest = Manifest(sections)
    return pair


def variants(pairs):
    """A latent configuration-variant and a later one that survives."""
    latent = pairs.row(
        pairs.coordinate(0.5, 0.50000006, layer=0, module="self_attn.q_proj", position=1),
        origin=Origin.CONFIGURATION_VARIANT,
        order=0,
    )
    surviving = pairs.row(origin=Origin.CONFIGURATION_VARIANT)
    return latent, surviving


def test_a_surviving_row_of_another_launch_is_not_denied(pairs):
    """One reduction, another launch, equal operands: the surviving variant is named as the start."""
    latent, surviving = variants(pairs)
    pair = pairs.make(
        Outcome.SURVIVING,
        **NO_ROOTS,
        first_difference=latent,
        first_variant=latent,
        first_surviving_variant=surviving,
    )
    text = told(pair)
    assert "No shrink row with bit-equal operands" not in text
    assert "No root survives; shrinks that the two executions launched differently" in text
    assert "The first surviving configuration-variant row: layer 2 mlp.up_proj, prefill" in text
    assert "An earlier configuration-variant is latent: layer 0 self_attn.q_proj" in text
    assert IndexRow.from_diff("0", "", pair.diff).first_root.startswith("layer 2 mlp.up_proj")
    root = pairs.row()
    beside = pairs.make(first_surviving=root, first_surviving_variant=surviving)
    assert "a configuration-variant, survives, too: layer 2 mlp.up_proj" in told(beside)


def test_two_reductions_say_which_variant_is_latent_and_which_survives(pairs):
    """The surviving one is followed, so it is told in full; the latent one before it is named."""
    latent, surviving = variants(pairs)
    made = {**NO_ROOTS, "same_reduction": False, "first_variant": latent}
    text = told(pairs.make(**made, first_surviving_variant=surviving))
    assert "The first surviving configuration-variant row: layer 2 mlp.up_proj" in text
    assert "An earlier configuration-variant is latent: layer 0 self_attn.q_proj" in text
    text = told(pairs.make(**made))
    assert "The first configuration-variant row: layer 0 self_attn.q_proj" in text
    assert "No configuration-variant survives." in text
    made["first_variant"] = surviving
    pair = pairs.make(**made, first_surviving_variant=surviving)
    assert "The first configuration-variant row, which survives: layer 2 mlp.up_proj" in told(pair)
    document = json.loads(json.dumps(report_json(pair.diff, pair.reference, pair.candidate)))
    jsonschema.validate(document, report_schema())


def test_gaps_are_called_gaps(pairs):
    """What was not compared was not always recorded in one trace only; no sentence ends twice."""
    gaps = (
        "Step 2 and later were not compared: the token ids fed first differ at index 0 (1 and 2).",
        "shrink records ran in another order in the candidate (step 1).",
        *(f"cache record cache.{layer} is in the reference only (step 0)." for layer in range(4)),
    )
    text = told(covering(pairs.make(Outcome.IDENTICAL), missing=gaps))
    assert f"Gap: {gaps[0]}\nGap: {gaps[1]}" in text
    assert "Recorded in one trace only" not in text
    assert "1 more gap in the report." in text
    assert ".." not in text
    assert ".," not in text


def test_the_page_lists_every_gap(pairs):
    """Those that the story only counts are folded below it."""
    gaps = tuple(f"shrink record {name} is in the reference only." for name in "abcdefghijkl")
    pair = covering(pairs.make(Outcome.SURVIVING), missing=gaps)
    page = render_report(pair.diff, pair.reference, pair.candidate, title="x")
    assert "The other 7 gaps" in page
    facts, _, rest = page.partition("<main>")
    assert all(rest.count(gap) == 1 for gap in gaps)
    assert "12 records or steps without a partner; " in facts
    few = covering(pairs.make(Outcome.SURVIVING), missing=gaps[:2])
    page = render_report(few.diff, few.reference, few.candidate, title="x").partition("<main>")[0]
    assert f"{gaps[0][:-1]}; {gaps[1][:-1]}; " in page


def test_two_engines_are_not_called_two_reductions(pairs):
    """With equal reductions nothing says that they differ; what came first is named as what it is."""
    row = pairs.row(origin=Origin.CONFIGURATION_VARIANT)
    foreign = ForeignRoot("cache.0", "cache", 0, 1, Origin.UNLOCATED, "Keys differ.")
    engines = ("engine.name", "transformers", "vllm")
    made = {"same_reduction": False, "first_variant": row, "first_surviving_variant": row}
    pair = pairs.make(
        Outcome.SURVIVING, **NO_ROOTS, **made, foreign_root=foreign, manifest_differences=(engines,)
    )
    text = told(pair)
    assert "different engines (transformers and vllm)" in text
    assert "different reductions" not in text
    assert "keys or values of layer 0, prefill, token position 1" in text
    assert "different reductions" in told(pairs.make(Outcome.SURVIVING, **NO_ROOTS, **made))


def test_an_interrupted_recording_is_said_first(pairs):
    """The headline says up to where is known; nothing is concluded from a search that did not end."""
    pair = pairs.make(Outcome.SURVIVING)
    source = pair.candidate.source
    source.closing = dataclasses.replace(source.closing, complete=False, stop_reason="killed")
    whole = pairs.make(Outcome.SURVIVING)
    for one, attempt in ((pair, 1), (whole, 1)):
        for trace, number in ((one.reference, 0), (one.candidate, attempt)):
            sections = {**trace.manifest.sections, "recording": {"attempt": number}}
            trace.source.manifest = Manifest(sections)
    assert verdict(pair).endswith(
        "The recording of the candidate is incomplete: what came after step 23 is not known."
    )
    assert "incomplete" not in verdict(whole)
    assert "The same tokens in 2 runs" in told(whole)
    assert "The same tokens in 2 runs" not in told(pair)
    assert "incomplete" not in verdict(pairs.make(Outcome.TOKEN))


def test_the_first_screen_says_whether_it_was_proven(pairs):
    """Untested is said to be so; a start from which nothing leads to the flip is not left alone."""

    def facts(pair):
        return render_report(pair.diff, pair.reference, pair.candidate, title="x").partition(
            "<main>"
        )[0]

    assert "not tested: no intervention was run" in facts(pairs.make(Outcome.SURVIVING))
    assert "not tested: no intervention was run" in facts(pairs.make(Outcome.TOKEN))
    assert "no chain of differences" not in facts(pairs.make(Outcome.TOKEN))
    cut = dataclasses.replace(pairs.make().diff.propagation, reaches_flip=False)
    assert "; no chain of differences leads from there to the flip" in facts(
        pairs.make(propagation=cut)
    )
    leading = dataclasses.replace(pairs.make().diff.first_surviving, step=3, position=9)
    shown = facts(pairs.make(propagation=dataclasses.replace(cut, leading=leading)))
    start = shown[shown.index("Where it started") :]
    assert start.index("step 3, token position 9") < start.index("does not lead to the flip")


def test_what_one_execution_alone_went_on_to_say_is_no_flip(pairs):
    """An execution that was cut short shares the compared steps' text; what follows is the other's alone."""
    pair = pairs.make(Outcome.SURVIVING)
    pieces = tuple(f" {number}" for number in range(30))
    pair.reference.source.closing = dataclasses.replace(
        pair.reference.closing, piece_texts=pieces, text="".join(pieces)
    )
    pair.candidate.source.closing = dataclasses.replace(
        pair.candidate.closing, piece_texts=(), text=""
    )
    coverage = dataclasses.replace(pair.diff.coverage, steps_compared=24)
    diff = dataclasses.replace(pair.diff, coverage=coverage)
    texts = pair_texts(diff, pair.reference, pair.candidate)
    assert texts.common == "".join(pieces[:24])
    assert [(one.token, one.rest) for one in texts.continuations] == [
        ("", "".join(pieces[24:])),
        ("", ""),
    ]
    assert texts.parts == "after the 24 compared steps"


def test_missing_records_are_no_differences_after_rounding(pairs):
    """Where only partners are missing, the verdict says so, and says nothing of rounding."""
    row = dataclasses.replace(
        pairs.row(origin=Origin.UNLOCATED),
        row_class=CoordinateClass.STRUCTURAL,
        surviving=0,
        latent=0,
        coordinates=(),
    )
    whole = pairs.make(Outcome.IDENTICAL)
    pair = pairs.make(
        Outcome.SURVIVING,
        **NO_ROOTS,
        surviving_root_rows=0,
        first_difference=row,
        cache_differences=(),
        statistics=whole.diff.statistics,
        steps=whole.diff.steps,
        propagation=None,
    )
    covering(pair, missing=("shrink record x is in the reference only (step 0).",))
    assert verdict(pair) == (
        "Other records, same tokens: both executions chose the same 24 tokens, but the traces do not hold the same "
        "records in the same order and shape; what both hold shows no surviving difference."
    )
    assert "The first difference (unlocated, structural): layer 2 mlp.up_proj" in told(pair)
    survives = covering(pairs.make(Outcome.SURVIVING), missing=("x",))
    assert "differences are left after rounding" in verdict(survives)


def unrounded_pair(pairs, dtype):
    """A pair whose survival was decided without rounding."""
    coordinate = pairs.coordinate(1.0, 1.0000001, dtype=torch.float32)
    root = pairs.row(coordinate, latent=0)
    absorbed = pairs.row(
        pairs.coordinate(1.0, 1.0000001, layer=0, dtype=torch.float32), fate=Fate.ABSORBED, latent=0
    )
    return computing_in(
        pairs.make(
            Outcome.SURVIVING,
            rounded_dtype="float32",
            first_propagating=root,
            first_surviving=absorbed,
        ),
        dtype,
    )


def test_a_model_is_said_to_compute_in_its_own_type(pairs):
    """Deciding survival in float32 does not make a BF16 model compute in FP32."""
    pair = unrounded_pair(pairs, "bfloat16")
    page = render_report(pair.diff, pair.reference, pair.candidate, title="x")
    for text in (told(pair), page):
        assert "compared without rounding to bfloat16" in text
        assert "computes in FP32" not in text
        assert "FP32 model" not in text
    assert "absorbed by the 16-bit add" in told(pair)
    assert "left after rounding" not in told(pair)


def test_an_fp32_model_has_nothing_that_survives_rounding(pairs):
    """It differs, without a boundary, and its additions are no 16-bit ones."""
    pair = unrounded_pair(pairs, "float32")
    text = told(pair)
    assert "values differ (an FP32 model has no rounding boundary)." in verdict(pair)
    assert "Every difference counts as surviving, none as latent: an FP32 model has" in text
    assert "absorbed by the FP32 add" in text
    for wrong in ("16-bit", "after rounding", "rounding removes", "rounding:"):
        assert wrong not in text
    assert "survive" not in "".join(
        tell_story(pair.diff, pair.reference, pair.candidate).passage("statistics").sentences
    )


@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [
        (1.0, math.inf, "the candidate is not finite"),
        (math.nan, 1.0, "the reference is not finite"),
        (math.inf, -math.inf, "neither value is finite"),
        (math.nan, math.inf, "neither value is finite"),
    ],
)
def test_infinities_have_no_distance(pairs, reference, candidate, expected):
    """No boundary is denied and counted at once, and nothing is inf or nan apart."""
    root = pairs.row(pairs.coordinate(reference, candidate))
    text = told(pairs.make(first_propagating=root, first_surviving=root))
    assert f"No rounding boundary to measure from: {expected}." in text
    for wrong in ("inf apart", "nan apart", "boundaries lie between", "ULP apart", "There is no"):
        assert wrong not in text


def test_a_value_that_rounds_to_infinity_has_its_boundary(pairs):
    """Both FP32 values are finite and one rounds to infinity: the boundary is told, the gap is not."""
    root = pairs.row(pairs.coordinate(3.38e38, 3.4e38))
    text = told(pairs.make(first_propagating=root, first_surviving=root))
    assert "The bfloat16 rounding boundary between them is" in text
    assert "inf apart" not in text


def test_only_compared_steps_are_said_to_agree(pairs):
    """Tokens of steps that were not compared are not called the same."""
    pair = covering(pairs.make(Outcome.IDENTICAL), steps_compared=2)
    assert "both executions chose the same 2 tokens in the compared steps" in verdict(pair)
    assert "chose the same 24 tokens." in verdict(pairs.make(Outcome.IDENTICAL))


def test_one_recording_is_no_repetition(pairs):
    """A trace compared with itself says nothing about how often runs agree."""
    pair = covering(pairs.make(Outcome.IDENTICAL), not_observed=(ONE_FILE,))
    assert verdict(pair) == (
        "One recording compared with itself: no difference in 1,234 compared records. Nothing ran twice, so this says "
        "nothing about repeatability."
    )
    text = plain_summary(pair.diff, pair.reference, pair.candidate)
    assert "epeatable" not in text
    assert "95%" not in text


def test_one_of_something_is_singular(pairs):
    """Verbs agree with their counts."""
    pair = pairs.make(Outcome.SURVIVING, root_rows=1, surviving_root_rows=1)
    numbers = dataclasses.replace(
        pair.diff.statistics, equal_operand_differing=1, equal_operand_surviving=1, differing=1
    )
    pair.diff = dataclasses.replace(
        pair.diff,
        statistics=dataclasses.replace(numbers, surviving=1),
        propagation=dataclasses.replace(pair.diff.propagation, nodes=1),
        cache_differences=tuple(
            dataclasses.replace(pair.diff.cache_differences[0], layer=layer) for layer in range(4)
        ),
    )
    text = told(pair)
    assert "1 row in all is a root; 1 has a surviving coordinate." in text
    assert "differs in FP32 and 1 survives rounding." in text
    assert "1 differs and 1 survives." in text
    assert "In that step 1 more layer differs:" in text
    story = tell_story(pair.diff, pair.reference, pair.candidate)
    assert story.passage("propagation").gist == "1 record differs"
