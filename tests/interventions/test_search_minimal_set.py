"""A set that flips only together is found, and nothing can be left out of it, as plain executions confirm."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest

from fliptrace.judgements import Judgement
from fliptrace_interventions.budget import Budget
from fliptrace_interventions.searches.investigation import investigate
from fliptrace_interventions.searches.minimal_set import Elements, minimal_set
from fliptrace_interventions.searches.roots import root_rows
from fliptrace_interventions.searches.trials import Trials
from fliptrace_interventions.workbench import Workbench

#: q, k and v of the first layer read one operand, so that a nudge in one makes no other row an heir.
SITES = (0, 1, 2)
NUDGES = 6
#: Where the search is short on common processors; elsewhere it goes on.
LIKELY_SEED = 26


class Joint:
    """Several nudged coordinates of one prompt, and plain executions under any of them."""

    def __init__(self, planting, engine, prompt, nudges):
        self.planting, self.engine, self.prompt, self.nudges = planting, engine, prompt, nudges

    def interceptor(self, engine, nudges=None):
        hands = [n.interceptor(engine) for n in (self.nudges if nudges is None else nudges)]

        def hand_over(site, operand, z):
            for hand in hands:
                z = hand(site, operand, z)
            return z

        return hand_over

    def tokens(self, nudges):
        """Generate under some of the nudges."""
        some = SimpleNamespace(interceptor=lambda engine: self.interceptor(engine, list(nudges)))
        return self.planting.tokens_under(self.engine, self.prompt, some)

    def flips(self, nudges):
        """Decide by a plain execution from the prompt on whether some of them flip the token."""
        return self.tokens(nudges)[: len(self.flipped)] == self.flipped


@pytest.fixture(scope="session")
def joint(planting, tiny, llama, tmp_path_factory):
    """A pair that flips by several nudges together and by none of them alone."""
    for seed in dict.fromkeys((LIKELY_SEED, *range(200))):
        choose = random.Random(seed)
        prompt = tiny.prompt_ids(10, seed=choose.randrange(12))
        places = list(itertools.product(SITES, range(len(prompt))))
        nudges = [
            planting.Nudge(site, 0, {(row, choose.randrange(16)): 1})
            for site, row in choose.sample(places, NUDGES)
        ]
        found = Joint(planting, llama, prompt, nudges)
        plain, together = found.tokens([]), found.tokens(nudges)
        flip = next((s for s, token in enumerate(plain) if token != together[s]), 0)
        if flip < 1 or any(found.tokens([n])[: flip + 1] != plain[: flip + 1] for n in nudges):
            continue
        found.pair = planting.record_pair(llama, prompt, tmp_path_factory.mktemp("joint"), found)
        found.flipped = together[: flip + 1]
        return found
    raise AssertionError("no prompt flips by several nudges together only; give other seeds")


@pytest.fixture(scope="session")
def story(joint, llama):
    """The whole story of that pair."""
    return investigate(Workbench(joint.pair, llama, shams=2))


def nudges_of(joint, edits):
    """Return the nudges that edits of rows undo."""
    sites = [site.path for site in joint.engine.sites]
    places = {
        (sites.index(edit["site"]), position) for edit in edits for position in edit["positions"]
    }
    return [n for n in joint.nudges if (n.site, next(iter(n.elements))[0]) in places]


@pytest.fixture(scope="session")
def sets(story):
    """The 1-minimal sets in the reference, where no single nudge is enough: of rows, of coordinates."""
    found = [found for found in story.minimal_sets if found.recipient == "reference"]
    assert [smallest.unit for smallest in found] == ["rows", "coordinates"]
    return found


def test_a_set_is_found_where_no_single_row_is_enough(joint, story, sets):
    """The set flips in a plain execution from the prompt on, and with any one nudge less it does not."""
    assert story.judgement is Judgement.SUFFICIENT
    assert len(story.roots) == NUDGES
    smallest = sets[0]
    assert (smallest.between, smallest.whole, smallest.one_minimal) == ("recomputed", NUDGES, True)
    assert smallest.verdict.judgement is Judgement.SUFFICIENT
    kept = nudges_of(joint, smallest.edits)
    assert 2 <= len(kept) == len(smallest.edits)
    assert joint.flips(kept)
    assert not any(joint.flips(rest) for rest in itertools.combinations(kept, len(kept) - 1))


def test_the_set_is_taken_down_to_coordinates(sets):
    """Each row holds one nudge, so the coordinates are the rows'."""
    rows, coordinates = sets
    assert coordinates.one_minimal
    assert {(e["site"], *e["positions"]) for e in coordinates.edits} <= {
        (e["site"], *e["positions"]) for e in rows.edits
    }
    assert all(edit["expect"] == 1 for edit in coordinates.edits)


def test_the_sentences_name_runs_and_what_was_left(story, sets):
    """How many of how many were left, after how many runs."""
    smallest = sets[0]
    said = [s for s in story.sentences if s.startswith(f"Of {NUDGES} rows in the reference")]
    assert f"{len(smallest.edits)} were left after {smallest.runs} runs" in said[0]
    assert "need not be monotone" in said[0]


def test_a_budget_that_ends_early_claims_no_minimality(joint, llama):
    """What flips so far is returned; it is not called 1-minimal."""
    trials = Trials(Workbench(joint.pair, llama), budget=Budget(runs=1))
    rows = Elements.of_rows(root_rows(trials))
    found, spent = minimal_set(trials, rows, "reference", "recomputed")
    assert len(found.edits) == found.whole == NUDGES
    assert not found.one_minimal
    assert "no room for another run" in spent


def test_rows_that_do_not_flip_together_leave_no_set(joint, llama):
    """Half of a 1-minimal set does not flip, so nothing is searched below it."""
    trials = Trials(Workbench(joint.pair, llama))
    quiet = next(
        rows
        for size in (2, 1)
        for rows in itertools.combinations(root_rows(trials), size)
        if not joint.flips(nudges_of(joint, [e.to_json() for e in Elements.of_rows(rows).edits]))
    )
    found, spent = minimal_set(trials, Elements.of_rows(quiet), "reference", "recomputed")
    assert (found, spent) == (None, "")
    assert trials.spending.runs == 1
