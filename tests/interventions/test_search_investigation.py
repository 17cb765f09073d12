"""The whole story of pairs whose cause was planted: what it names, in which order it spends, how it goes on."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from fliptrace.judgements import Investigation, Judgement
from fliptrace_interventions.budget import Budget
from fliptrace_interventions.edits import ShrinkEdit
from fliptrace_interventions.journal import Journal
from fliptrace_interventions.searches.investigation import investigate
from fliptrace_interventions.searches.trials import Trials
from fliptrace_interventions.workbench import Workbench

SHAMS = 3


def workbench(plant, **settings):
    return Workbench(plant.pair, plant.engine, shams=SHAMS, **settings)


@pytest.fixture(scope="session")
def story(planted):
    """A function: an undisturbed investigation of a planted pair, run once."""
    made = {}

    def get(kind="llama"):
        if kind not in made:
            made[kind] = investigate(workbench(planted(kind)))
        return made[kind]

    return get


def place(result):
    return result.site, result.step, result.position, result.rank_index


def without_effort(found):
    """Leave out what depends on the sitting."""
    return dataclasses.replace(found, seconds=0.0, forwards=0)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_the_planted_cause_is_the_only_sufficient_coordinate(kind, planted, story):
    """The cause is named and proved; every decoy was tried and none is sufficient where it was planted."""
    plant, found = planted(kind), story(kind)
    cause = plant.cause
    expected = (cause.site.path, cause.step, cause.position, cause.rank_index)
    assert found.judgement is Judgement.SUFFICIENT
    assert place(found.best_coordinate) == expected
    assert "reference <- candidate" in found.best_coordinate.verdict.sufficient_directions
    tried = {place(c): c for c in found.coordinates}
    assert set(tried) == {expected} | {
        (d.site.path, d.step, d.position, d.rank_index) for d in plant.decoys
    }
    sufficient = {
        where
        for where, coordinate in tried.items()
        for screening in coordinate.screenings
        if screening.recipient == "reference" and screening.gives_donor_token
    }
    assert sufficient == {expected}


def test_a_story_has_all_its_parts(story, planted):
    """Nothing is left out without being said, and it survives the way through JSON."""
    found = story()
    assert found.not_covered == ()
    assert [item.equal for item in found.reconstruction] == [True, True]
    assert found.cache_substitution.judgement is Judgement.SUFFICIENT
    assert {screening.recipient for root in found.roots for screening in root.screenings} == {
        "reference",
        "candidate",
    }
    assert {root.fate for root in found.roots} <= {"propagating", "absorbed"}
    assert found.minimal_set.one_minimal
    assert found.layers
    assert found.first_cache_step.step is not None
    assert found.continuations
    assert found.roots_in_pair == len(found.roots) == len(planted("llama").pair.diff.roots)
    assert Investigation.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert found.sentences[0].startswith(found.sentence[:40])


def test_the_crossed_arms_hold_the_recorded_executions(planted, story):
    """An execution's own cache with its own shrinks is its recording, logits and all."""
    plant, square = planted("llama"), story().two_by_two
    bench = workbench(plant)
    for execution, arm in (
        (bench.reference, square.reference_cache_reference_shrinks),
        (bench.candidate, square.candidate_cache_candidate_shrinks),
    ):
        assert arm.logits_digest == execution.logits_digest(plant.step)
        assert arm.token_id == execution.token_ids[plant.step]
    assert square.decided_by in ("cache", "shrinks", "either", "both together")


def test_needed_in_one_direction_is_sufficient_in_the_other(story):
    """Leaving one layer out of the donor's cache is putting it alone into the donor: two names of one arm."""
    found = story()
    by_layer = {(need.recipient, need.layer): need for need in found.layers}
    assert by_layer
    for (recipient, layer), need in by_layer.items():
        other = by_layer["candidate" if recipient == "reference" else "reference", layer]
        assert need.needed == other.sufficient_alone


@pytest.mark.parametrize("runs", [1, 7, 18, 24, 40])
def test_a_budget_of_runs_is_never_passed(runs, planted):
    """The search ends within it, says what it did not run, and never says more than it saw."""
    found = investigate(workbench(planted("llama")), budget=Budget(runs=runs))
    assert found.runs <= runs
    assert found.budget == f"{runs} run{'s' if runs > 1 else ''}"
    assert any(f"the budget of {found.budget} has no room" in said for said in found.not_covered)
    if found.judgement is not Judgement.SUFFICIENT:
        assert f"was found within {found.runs} run" in found.sentence


def test_nothing_is_run_when_a_recording_cannot_be_reconstructed(planted):
    """One replayed bit is flipped in memory: the story is void and says why."""
    bench = workbench(planted("llama"))
    shrink = bench.candidate.shrink

    def other(step, site):
        values = shrink(step, site)
        if (step, site) == (0, 2):
            values[0, 0] *= 2
        return values

    bench.candidate.shrink = other
    found = investigate(bench)
    assert found.judgement is Judgement.VOID
    assert found.runs == 0
    assert "cannot be reconstructed" in found.sentence
    assert "nothing else was run" in found.not_covered[0]


def test_where_nothing_flipped_there_is_no_token_to_reach(planted):
    """At a step before the flip both chose the same token: roots are tried, the rest is said not to apply."""
    found = investigate(workbench(planted("llama"), target=1))
    assert found.reference_token == found.candidate_token
    assert found.judgement in (Judgement.CHANGES, Judgement.NOT_APPLICABLE)
    assert found.sentence.startswith("Both executions chose")
    assert found.roots
    assert (found.best_coordinate, found.minimal_set, found.two_by_two) == (None, None, None)
    assert any("not applicable" in said for said in found.not_covered)


def test_progress_is_told(planted):
    """Every phase is named, and done never passes a total that is known."""
    told = []
    investigate(
        workbench(planted("llama")), progress=lambda *report: told.append(report), budget=Budget(30)
    )
    assert {"reconstruction", "cache substitution"} <= {what for what, _, _ in told}
    assert all(done >= 0 and (total == 0 or done <= total) for _, done, total in told)


def interrupted(plant, path, calls, **settings):
    """Investigate until the given number of reports was told, then stop as Ctrl-C does."""
    left = calls

    def progress(what, done, total):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    with Journal(path) as journal:
        try:
            return investigate(workbench(plant, **settings), journal=journal, progress=progress)
        except KeyboardInterrupt:
            return None


def test_an_interrupted_search_ends_as_an_undisturbed_one(tmp_path, planted, story):
    """Interrupted again and again anywhere: the same result, and no finished run is repeated."""
    path = tmp_path / "search.jsonl"
    choose = random.Random(3)
    found, sittings = None, 0
    while found is None:
        sittings += 1
        before = path.read_bytes() if path.exists() else b""
        found = interrupted(
            planted("llama"), path, 10**9 if sittings > 8 else choose.randint(1, 60)
        )
        assert path.read_bytes().startswith(before)
    assert sittings > 2
    assert without_effort(found) == without_effort(story())
    keys = [json.loads(line.split(" ", 1)[1])[0] for line in path.read_text().splitlines()]
    assert len(keys) == len(set(keys))


def test_a_finished_search_runs_nothing_again(tmp_path, planted, story):
    """All answers come from the journal: not one forward pass is run."""
    path = tmp_path / "search.jsonl"
    assert interrupted(planted("llama"), path, 10**9) is not None
    bench = workbench(planted("llama"))
    with Journal(path) as journal:
        found = investigate(bench, journal=journal)
    assert bench.forwards == 0
    assert without_effort(found) == without_effort(story())


def test_a_small_budget_goes_on_with_a_larger_one(tmp_path, planted, story):
    """What a first sitting spent counts, and what it found is not run again."""
    path = tmp_path / "search.jsonl"
    with Journal(path) as journal:
        investigate(workbench(planted("llama")), journal=journal, budget=Budget(25))
        known = len(journal)
    with Journal(path) as journal:
        found = investigate(workbench(planted("llama")), journal=journal)
        assert len(journal) > known
    assert without_effort(found) == without_effort(story())


@pytest.mark.parametrize(
    "change",
    [{"reduction": "unsplit/128"}, {"seed": 1}, {"target": 1}, {"continuation": "recorded"}, {}],
    ids=str,
)
def test_another_question_never_gets_an_old_answer(change, tmp_path, planted):
    """A changed reduction, seed, target or continuation is another question; the same one is answered at once."""
    plant = planted("llama")
    row = plant.pair.diff.roots[0]
    with Journal(tmp_path / "search.jsonl") as journal:
        first = Trials(workbench(plant), journal=journal)
        first.screen((ShrinkEdit.of_row(row),), "reference")
        later = Trials(workbench(plant, **change), journal=journal)
        later.screen((ShrinkEdit.of_row(row),), "reference")
        assert (later.resumed, len(journal)) == ((0, 2) if change else (1, 1))
        later.screen((ShrinkEdit.of_row(row),), "candidate")
        assert len(journal) == (3 if change else 2)


def test_another_pair_never_gets_an_old_answer(tmp_path, planted):
    """Two pairs share a journal; the edits and the settings are the same, the traces are not."""
    with Journal(tmp_path / "search.jsonl") as journal:
        for number, kind in enumerate(("llama", "gemma"), start=1):
            trials = Trials(workbench(planted(kind)), journal=journal)
            trials.reconstruct()
            assert (trials.resumed, len(journal)) == (0, number)
