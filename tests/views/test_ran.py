"""What ran and how long the search was: said where the manifests say it, with the bound that k comparisons allow."""

from __future__ import annotations

import dataclasses
import json
import re

import jsonschema
import pytest

from fliptrace.manifest import Manifest, differing_keys
from fliptrace.numerics import CoordinateClass
from fliptrace.verdicts import Outcome
from fliptrace.views import (
    plain_summary,
    render_report,
    report_json,
    report_schema,
    tell_story,
)
from fliptrace.views.keys_values import cache_states


def sections(seed, attempt=None, **recording):
    """A manifest as the tracer writes it."""
    if attempt is not None:
        recording["attempt"] = attempt
    return {
        "model": {"name": "tiny", "architecture": "Llama", "layers": 8, "dtype": "bfloat16"},
        "adapter": {"name": "lora", "rank": 16},
        "engine": {"name": "transformers"},
        "environment": {"device": "cpu", "processor": "Some CPU"},
        "reduction": {
            "identity": "atomic:8/32",
            "schedule": f"simulated schedule, seed {seed}",
            "seed": seed,
        },
        "recording": recording,
    }


def with_manifests(pair, before, after):
    pair.reference.source.manifest, pair.candidate.source.manifest = (
        Manifest(before),
        Manifest(after),
    )
    pair.diff = dataclasses.replace(
        pair.diff,
        manifest_differences=tuple(
            differing_keys(pair.reference.manifest, pair.candidate.manifest)
        ),
    )
    return pair


def searched(pairs, outcome, attempt, **recording):
    return with_manifests(
        pairs.make(outcome),
        sections(3, 0, **recording),
        sections(3 + attempt, attempt, **recording),
    )


def told(pair) -> str:
    story = tell_story(pair.diff, pair.reference, pair.candidate)
    return "\n".join([story.verdict, *(line for part in story.passages for line in part.sentences)])


def test_a_flip_says_which_candidate_it_was(pairs):
    """Candidate k of at most n; those before it were compared by tokens only."""
    pair = searched(pairs, Outcome.TOKEN, 3, attempts_allowed=20, until="token")
    text = told(pair)
    assert "Search: candidate 3 of at most 20 was the first to choose another token." in text
    assert "Only this last candidate was compared record by record" in text
    assert "runs, the reference included" not in text
    assert "95%" not in text
    pair = searched(pairs, Outcome.TOKEN, 1, attempts_allowed=20, until="token")
    assert "Search: candidate 1 of at most 20 chose another token at once." in told(pair)
    assert "Only this last" not in told(pair)


@pytest.mark.parametrize(
    ("outcome", "until", "expected"),
    [
        (Outcome.IDENTICAL, "token", "The same tokens in 6 runs is 5 comparisons"),
        (Outcome.IDENTICAL, "surviving", "No surviving difference in 6 runs is 5 comparisons"),
        (Outcome.IDENTICAL, "any", "Repeatable in 6 runs is 5 comparisons"),
        (Outcome.LATENT, "token", "The same tokens in 6 runs is 5 comparisons"),
        (Outcome.LATENT, "surviving", "No surviving difference in 6 runs is 5 comparisons"),
        (Outcome.LATENT, "any", "The same tokens in 6 runs is 5 comparisons"),
        (Outcome.SURVIVING, "token", "The same tokens in 6 runs is 5 comparisons"),
        (Outcome.SURVIVING, "surviving", "The same tokens in 6 runs is 5 comparisons"),
        (Outcome.IDENTICAL, None, "The same tokens in 6 runs is 5 comparisons"),
    ],
)
def test_without_a_flip_agreement_is_told_with_its_bound(pairs, outcome, until, expected):
    """k+1 runs, the exact bound of k comparisons, and no more than what every candidate was compared for."""
    recording = {"attempts_allowed": 5} | ({"until": until} if until else {})
    text = told(searched(pairs, outcome, 5, **recording))
    assert "all 6 runs chose the same 24 tokens" in text.splitlines()[0]
    assert "The same tokens in 6 runs, the reference included." in text
    assert expected in text
    assert f"up to {100 * (1 - 0.05 ** (1 / 5)):.3g}% of further runs" in text
    assert ("All 5 candidates were compared record by record" in text) == (
        until in ("surviving", "any")
    )
    assert ("those before it by tokens only" in text) == (until == "token")
    assert ("was not recorded" in text) == (until is None)
    assert "deterministic" not in text


def test_the_bound_is_exact(pairs):
    """At the bound, k agreeing comparisons have a chance of 5%."""
    for attempt in (1, 2, 20):
        text = told(searched(pairs, Outcome.LATENT, attempt, until="token"))
        (share,) = re.findall(r"up to ([\d.]+)% of further runs", text)
        assert (1 - float(share) / 100) ** attempt == pytest.approx(0.05, rel=0.05)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (sections(3), sections(4)),
        (sections(3, 0), sections(4, 0)),
        (sections(3, 1), sections(4, 2)),
        (sections(3, 0), sections(9, 2)),
        (sections(3, 0), sections(5, True)),
        (sections(3, 0), sections(5, "2")),
        (sections(3, 0, until="any"), sections(5, 2, until="token")),
        ({}, sections(5, 2)),
        ({}, {}),
    ],
)
def test_nothing_is_claimed_of_traces_that_no_search_links(pairs, before, after):
    """Old, foreign or mixed traces: two runs, no candidate number, no bound beyond one comparison."""
    text = told(with_manifests(pairs.make(Outcome.IDENTICAL), before, after))
    assert "Search:" not in text
    assert "2 runs, repeatable in 2 runs, not proof of determinism" in text
    assert (
        "Repeatable in 2 runs is one comparison, which says little: at 95% confidence up to 95%"
        in text
    )
    assert "None" not in text


def test_what_ran_is_said_once_for_both(pairs):
    """Model, adapter, type, device, engine, reduction; the simulation in plain words."""
    pair = searched(pairs, Outcome.TOKEN, 2)
    passage = tell_story(pair.diff, pair.reference, pair.candidate).passage("ran")
    assert passage.sentences[0] == (
        "Both executions: tiny (Llama, 8 layers) + lora (rank 16), bfloat16, on the CPU (Some CPU), engine "
        "transformers, reduction atomic:8/32."
    )
    assert passage.sentences[1:] == (
        "Arrival orders were simulated on a CPU (schedule seeds 3 and 5); on a GPU the hardware decides them.",
        "Search: candidate 2 was the first to choose another token.",
    )


def test_what_ran_differently_is_said_for_each(pairs):
    """Another device, another reduction, hardware atomics."""
    other = sections(0)
    other["environment"] = {"device": "cuda", "gpu": {"name": "NVIDIA H200"}}
    other["reduction"] = {"identity": "unsplit/64", "schedule": "none", "seed": None}
    text = told(with_manifests(pairs.make(), sections(7), other))
    assert "Reference: tiny (Llama, 8 layers) + lora (rank 16), bfloat16, on the CPU (Some" in text
    assert "on cuda (NVIDIA H200), engine transformers, reduction unsplit/64." in text
    assert "Arrival orders of the reference were simulated on a CPU (schedule seed 7);" in text
    other["engine"] = {"name": "vllm", "tensor_parallel": {"ranks": 2}, "neighbours": {"count": 1}}
    assert "engine vllm, 2 ranks, in a batch with 1 neighbour, reduction" in told(
        with_manifests(pairs.make(), sections(7), other)
    ).replace("\n", " ")
    other["reduction"] = {"identity": "atomic:8/32", "schedule": "hardware", "seed": None}
    text = told(with_manifests(pairs.make(), other, other))
    assert "The GPU's hardware decided the arrival orders; they were not recorded." in text
    assert "simulated" not in text.split("Observer")[0]


def test_batches_that_differed_are_said_where_nothing_else_did(pairs):
    """Equal in two batches is no repetition; other neighbours in the same number are told apart, too."""
    alone, beside, other = (sections(3) for _ in range(3))
    beside["engine"]["neighbours"] = {"count": 1, "requests": [{"ids": "a"}]}
    other["engine"]["neighbours"] = {"count": 1, "requests": [{"ids": "b"}]}
    for before, after in ((alone, beside), (beside, other)):
        text = told(with_manifests(pairs.make(Outcome.IDENTICAL), before, after))
        assert "although their batches differed" in text
        assert (
            "repeatable in 2 runs in different batches, not proof of determinism or batch" in text
        )
        assert "Repeatable in 2 runs in different batches is one comparison" in text
        assert ("Their batches differed" in text) == (before is beside)
    same = told(with_manifests(pairs.make(Outcome.IDENTICAL), beside, beside))
    assert "batches" not in same
    assert "repeatable in 2 runs, not proof of determinism" in same


def test_page_and_json_say_what_ran_first(pairs):
    """Under the verdict on the page, a passage in JSON."""
    pair = searched(pairs, Outcome.SURVIVING, 4, attempts_allowed=4, until="token")
    page = render_report(pair.diff, pair.reference, pair.candidate, title="x")
    place = page.index('class="ran"')
    assert page.index('id="verdict"') < place < page.index('class="facts"')
    header = re.sub("<[^>]+>", "", page[place : page.index('class="facts"')])
    assert "4 candidates of at most 4 ran and none chose another token." in header
    assert "simulated on a CPU (schedule seeds 3 and 7)" in header
    value = json.loads(json.dumps(report_json(pair.diff, pair.reference, pair.candidate)))
    jsonschema.validate(value, report_schema())
    assert value["story"][0]["key"] == "ran"
    assert "all 5 runs" in value["verdict"]["sentence"]
    assert "all 5 runs" in plain_summary(pair.diff, pair.reference, pair.candidate)


def test_keys_and_values_that_were_not_recorded_are_not_equal(pairs):
    """A step's own flag says no; the grids say whether anything was seen."""
    pair = pairs.make(Outcome.IDENTICAL)
    assert set(cache_states(pair.diff).values()) == {"equal"}
    for grid in pair.diff.grids.values():
        rows = [number for number, (kind, _) in enumerate(grid.rows) if kind != "shrink"]
        grid.classes[rows] = int(CoordinateClass.NOT_OBSERVED)
    grid.classes[rows[0], 4] = int(CoordinateClass.EQUAL)
    states = cache_states(pair.diff)
    assert states[0] == states[4] == "not recorded"
    assert states[5] == "equal where recorded"
    page = render_report(pair.diff, pair.reference, pair.candidate, title="x")
    assert page.count("<td>not recorded</td>") == len(pair.diff.steps) - 1
    bare = pairs.make(Outcome.LATENT, grids={})
    assert set(cache_states(bare.diff).values()) == {"not recorded"}
    assert "Keys and values were not recorded." in told(bare)
    assert "No recorded key" not in told(bare)
    flipped = pairs.make()
    assert cache_states(flipped.diff)[0] == "differ"
