"""The story says what a person needs, in the design's words, and never more than was seen."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct

import pytest
import torch
from rich.console import Console

from fliptrace.verdicts import Fate, ForeignRoot, Origin, Outcome
from fliptrace.views import IndexRow, plain_summary, tell_story, terminal_summary


def story_text(pair) -> str:
    story = tell_story(pair.diff, pair.reference, pair.candidate)
    return "\n".join(
        [story.verdict, *(sentence for part in story.passages for sentence in part.sentences)]
    )


def test_a_flip_is_told_with_everything_that_decides_it(pairs):
    """Token counted both ways, both tokens, logits, margins, no tie."""
    text = story_text(pairs.make())
    for part in (
        "generated token 12 (step 11)",
        "the reference chose “,” (id 211), the candidate “.” (id 311)",
        "Logits in the reference: “,” 17.25 and “.” 17.125; in the candidate: “,” 17.125 and “.” 17.1875.",
        "Top-2 margin: 0.125 in the reference, 0.0625 in the candidate.",
        "No tie",
    ):
        assert part in text


def test_the_root_is_told_as_in_the_paper(pairs):
    """Site, token, rank index, both values with bits, boundary with distances, both rounded values."""
    text = story_text(pairs.make())
    for part in (
        "layer 2 mlp.up_proj, prefill, token position 5 (“ apples”), rank index 3",
        "reference 0.010345458984375 (0x3c298000)",
        "0x3c297ffe",
        "the reference lies exactly on it (ties to even) and the candidate 1.86e-09 below it",
        "0.0103759765625 (0x3c2a) against 0.01031494140625 (0x3c29), 6.1e-05 apart",
        "propagating",
        "An earlier surviving root was absorbed by the 16-bit add: layer 1 mlp.gate_proj",
        "Layer 3, prefill: 111 key elements and 176 value elements differ",
    ):
        assert part in text


def test_values_read_back_to_their_bits(pairs):
    """Every FP32 value in the story is printed with enough digits."""
    pair = pairs.make()
    text = story_text(pair)
    for value, bits in re.findall(r"(?:reference|candidate) (\S+) \(0x([0-9a-f]{8})\)", text):
        assert struct.pack(">f", float(value)).hex() == bits


def test_a_tie_names_the_rule(pairs):
    """A token chosen among equals is decided by tie-break, with the sampler's rule."""
    pair = pairs.make()
    flip = dataclasses.replace(
        pair.diff.flip, reference_margin=0.0, reference_tied=2, decided_by_tie_break=("reference",)
    )
    pair.diff = dataclasses.replace(pair.diff, flip=flip)
    assert (
        "Tie: the reference has a tie of 2 tokens, its token decided by tie-break (lowest token id)."
        in story_text(pair)
    )


def test_an_identical_pair_claims_no_more_than_two_runs(pairs):
    """Repeatable in 2 runs, with the bound and what was not covered; never deterministic."""
    text = story_text(pairs.make(Outcome.IDENTICAL))
    assert "No difference found in 1,234 compared records" in text
    assert "2 runs, repeatable in 2 runs, not proof of determinism" in text
    assert "at 95% confidence up to 95% of further runs could still differ" in text
    assert "Not observed: modules between shrinks" in text
    assert "deterministic" not in text


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_has_a_story(pairs, outcome):
    """No outcome leaves a hole in a sentence."""
    text = story_text(pairs.make(outcome))
    assert text.splitlines()[0].endswith(".")
    assert "None" not in text
    assert "nan" not in text


def test_absence_is_told_for_what_it_is(pairs):
    """Without a propagating root, without any root, with two reductions."""
    bare = {"first_surviving": None, "first_propagating": None, "roots": ()}
    absorbed = pairs.row(fate=Fate.ABSORBED)
    text = story_text(pairs.make(first_propagating=None, first_surviving=absorbed))
    assert "No surviving root was seen to propagate" in text
    text = story_text(pairs.make(**bare, first_difference=None, root_rows=0))
    assert "entered where nothing was recorded" in text
    variant = pairs.row(origin=Origin.CONFIGURATION_VARIANT)
    text = story_text(pairs.make(**bare, same_reduction=False, first_variant=variant))
    assert "there are no roots, only a first configuration-variant" in text


def test_what_came_before_the_shrinks_is_named_first(pairs):
    """A foreign root that precedes the propagating root starts the story, a later one ends it."""
    key = "model.layers.0.self_attn/sdpa#0"
    foreign = ForeignRoot(key, "operation", 0, 4, Origin.ROOT, "Its inputs were equal", 3)
    pair = pairs.make(foreign_root=foreign)
    passage = tell_story(pair.diff, pair.reference, pair.candidate).passage("root")
    assert passage.sentences[0] == (
        f"The first difference did not enter through a shrink: operation {key}, prefill, token position 4."
    )
    assert passage.sentences[1] == "Its inputs were equal."
    assert "first surviving propagating root" in passage.sentences[2]
    row = IndexRow.from_diff("0", "", pair.diff)
    assert row.first_root == f"operation {key}, prefill: not a shrink"
    later = dataclasses.replace(foreign, step=2, origin=Origin.UNLOCATED)
    pair = pairs.make(foreign_root=later)
    passage = tell_story(pair.diff, pair.reference, pair.candidate).passage("root")
    assert "first surviving propagating root" in passage.sentences[0]
    assert passage.sentences[-2].startswith("Later another difference was seen outside the shrinks")
    assert IndexRow.from_diff("0", "", pair.diff).first_root.startswith("layer 2 mlp.up_proj")


@pytest.mark.parametrize(
    ("reference", "candidate", "dtype", "expected"),
    [
        (0.0, -0.0, torch.bfloat16, "Only the sign of zero differs"),
        (
            1.0,
            math.inf,
            torch.bfloat16,
            "No rounding boundary to measure from: the candidate is not finite.",
        ),
        (
            1.0,
            1.0000001,
            torch.float32,
            "No rounding boundary: compared without rounding to bfloat16.",
        ),
        (1.0, 1.0000001, torch.bfloat16, "Both round to 1.0 (0x3f80)"),
        (1.0, 1.5, torch.float16, "512 boundaries lie between them"),
    ],
)
def test_special_values_have_sentences(pairs, reference, candidate, dtype, expected):
    """Signs of zero, infinities, FP32 models, latent pairs and many crossed boundaries."""
    root = pairs.row(pairs.coordinate(reference, candidate, dtype=dtype))
    assert expected in story_text(pairs.make(first_propagating=root, first_surviving=root))


def test_redacted_traces_fall_back_to_ids(pairs):
    """Where no text was kept the story names token ids."""
    pair = pairs.make()
    for trace in (pair.reference, pair.candidate):
        trace.source.closing = dataclasses.replace(
            trace.closing, text="", piece_texts=(), prompt_piece_texts=()
        )
    assert "token position 5 (token id 105, text not kept)" in story_text(pair)


def test_the_first_screen_carries_the_answer(pairs):
    """In 24 rows of 80 columns: verdict, tokens, logits, tie, root with bits and boundary, a line each for the rest."""
    pair = pairs.make()
    lines = plain_summary(pair.diff, pair.reference, pair.candidate).splitlines()
    assert lines[0].startswith("Token flipped")
    assert max(map(len, lines)) <= 80
    first = " ".join(" ".join(lines[:24]).split())
    for part in (
        "the reference chose “,” (id 211), the candidate “.” (id 311)",
        "Logits in the reference",
        "No tie",
        "The first surviving propagating root: layer 2 mlp.up_proj",
        "(0x3c298000)",
        "The bfloat16 rounding boundary between them is",
        "Rounded to bfloat16",
        "Keys and values: 111 key and 176 value elements differ, in 1 layer.",
        "Where it went: differing records lead from there to the flip's logits.",
    ):
        assert part in first
    assert "From the flip on" not in first
    assert len(lines) <= 80


def test_a_leading_space_does_not_end_a_line(pairs):
    """A token that starts with a space stays with its quotation mark."""
    pair = pairs.make(
        reference_pieces=[" Mia", " gets"],
        candidate_pieces=[" Mia", " takes"],
    )
    for width in range(60, 81):
        console = Console(width=width, color_system=None)
        with console.capture() as capture:
            console.print(terminal_summary(pair.diff, pair.reference, pair.candidate))
        assert not re.search("“ *$", capture.get(), re.MULTILINE), width


def test_terminal_and_plain_summary_say_the_same(pairs):
    """rich shows the same lines without trailing blanks, at most 80 wide, and never reads a token as markup."""
    for pair in (pairs.make(), pairs.hostile()):
        plain = plain_summary(pair.diff, pair.reference, pair.candidate)
        for width in (80, 200):
            console = Console(width=width, color_system=None)
            with console.capture() as capture:
                console.print(terminal_summary(pair.diff, pair.reference, pair.candidate))
            assert capture.get() == plain
        assert all(line == line.rstrip() for line in plain.splitlines())


def test_the_path_is_told_once_with_arrows(pairs):
    """What analysis says about digests is not said again; "->" is shown as an arrow."""
    pair = pairs.make()
    sentences = (
        "layer-2 mlp.up_proj -> layer-3 key/value -> logits of step 11.",
        "Operands were kept as digests only, so that what a later shrink adds cannot be told from what it inherits.",
    )
    told = dataclasses.replace(pair.diff.propagation, sentences=sentences)
    pair.diff = dataclasses.replace(pair.diff, propagation=told)
    text = story_text(pair)
    assert "layer-2 mlp.up_proj → layer-3 key/value → logits of step 11." in text
    assert "->" not in text
    assert text.count("Operands were kept as digests only") == 1


def test_tokens_of_equal_texts_keep_their_ids(pairs):
    """Where two tokens read alike, the logits name them by id, too."""
    pair = pairs.make()
    alike = dataclasses.replace(pair.diff.flip.candidate_token, text=",")
    pair.diff = dataclasses.replace(
        pair.diff, flip=dataclasses.replace(pair.diff.flip, candidate_token=alike)
    )
    assert "Logits in the reference: “,” (id 211) 17.25 and “,” (id 311) 17.125" in story_text(pair)


def test_no_control_character_reaches_a_terminal(pairs):
    """Escapes, bidi controls and lone surrogates leave as visible names."""
    pair = pairs.hostile()
    text = plain_summary(pair.diff, pair.reference, pair.candidate)
    text.encode("utf-8")
    assert not re.search(
        "[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]", text
    )
    assert json.loads(json.dumps(text)) == text
