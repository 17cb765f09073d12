"""Continuations that keep the recorded rounding errors: without an edit they are the recording itself."""

from __future__ import annotations

import pytest
import torch

from fliptrace.errors import InputError
from fliptrace.judgements import Judgement
from fliptrace.numerics import integer_view
from fliptrace_interventions import CacheEdit, ForcedTokens, Journal, ShrinkEdit, Source, Workbench
from fliptrace_interventions.rounding_errors import with_recorded_error
from fliptrace_interventions.searches.trials import Trials

TARGET = 5


class Errors:
    """Errors of a 16-bit ULP or so in every shrink of an execution, drawn from a seed."""

    def __init__(self, seed):
        self.seed = seed

    def interceptor(self, engine):
        """Add them to executions on an engine."""

        def hand_over(site, operand, z):
            draw = torch.Generator().manual_seed(
                self.seed * 10**6 + engine.step_number * 1000 + site
            )
            return z * (1 + torch.randn(z.shape, generator=draw) / 400)

        return hand_over


@pytest.fixture(scope="module", params=["llama", "gemma"])
def erroneous(request, planting, tiny, tmp_path_factory, llama, gemma):
    """An engine and a pair recorded with other errors in each execution, whose flip is not before the judged step."""
    engine = {"llama": llama, "gemma": gemma}[request.param]
    folder = tmp_path_factory.mktemp("erroneous")
    for seed in range(20):
        pair = planting.record_pair(
            engine,
            tiny.prompt_ids(10, seed=seed),
            folder / str(seed),
            Errors(2 * seed + 1),
            reference=Errors(2 * seed),
            tokens=TARGET + 1,
        )
        if pair.diff.flip is None or pair.diff.flip.step >= TARGET:
            return engine, pair
    raise AssertionError("every prompt's pair flips early; give smaller errors")


def bench_of(erroneous, continuation):
    """A workbench on that pair."""
    engine, pair = erroneous
    return Workbench(pair, engine, target=TARGET, continuation=continuation)


@pytest.mark.parametrize("step", [0, 1, 3, TARGET])
@pytest.mark.parametrize("recipient", ["reference", "candidate"])
def test_without_an_edit_it_is_the_recording(erroneous, recipient, step):
    """From every start the unedited arm leaves the recorded logits, bit by bit; a plain one does not."""

    def digest(continuation):
        bench = bench_of(erroneous, continuation)
        edit = ShrinkEdit(bench.engine.sites[0].path, step, rank_indices=(0,), value=Source.DONOR)
        plan = bench._resolve([edit], recipient, "recorded")[1].unedited()
        with bench._bench.continuing():
            run = bench._bench.run(plan)
        return [state.logits for state in run.states], [
            bench.execution(recipient).logits_digest(at) for at in range(step, TARGET + 1)
        ]

    found, recorded = digest("recorded")
    assert found == recorded
    if step < TARGET:
        plain, recorded = digest("computed")
        assert plain != recorded


def test_where_the_recording_has_no_errors_nothing_changes(plant):
    """The planted pairs were recorded under the continuation's reduction: both questions have one answer."""
    edits = [ShrinkEdit.of_coordinate(place) for place in (plant.cause, *plant.decoys[:3])]
    plain = Workbench(plant.pair, plant.engine)
    other = Workbench(plant.pair, plant.engine, continuation="recorded")
    for edit in (*edits, CacheEdit(plant.step), ForcedTokens(0, (3,))):
        for recipient in ("reference", "candidate"):
            first, second = (bench.screen([edit], recipient) for bench in (plain, other))
            assert first.judgement is second.judgement
            assert first.edited.logits_digest == second.edited.logits_digest
            assert first.edited.token_ids == second.edited.token_ids


def test_a_proof_says_which_question_it_answers(plant):
    """Controls pass, the cause is sufficient, and reduction tells the two questions apart."""
    bench = Workbench(plant.pair, plant.engine, shams=3, continuation="recorded")
    verdict = bench.prove([ShrinkEdit.of_coordinate(plant.cause)])
    assert verdict.judgement is Judgement.SUFFICIENT
    assert verdict.reduction == "unsplit/64 with the recipient's recorded rounding errors"
    assert Workbench(plant.pair, plant.engine).reduction == "unsplit/64"
    assert all(control.passed is not False for d in verdict.directions for control in d.controls)


def test_free_continuations_go_on_beyond_the_recording(plant):
    """After the judged step no error was recorded for the tokens that are fed; the arm ends as asked."""
    bench = Workbench(plant.pair, plant.engine, continuation="recorded", max_new_tokens=14)
    plain = Workbench(plant.pair, plant.engine, max_new_tokens=14)
    edit = [ShrinkEdit.of_coordinate(plant.cause)]
    first, second = (one.continue_freely(edit) for one in (bench, plain))
    assert len(first.token_ids) == 14
    assert first.token_ids == second.token_ids


def test_the_error_is_kept_and_nothing_else():
    """Equal results keep the recorded bits, signs of zero included; others move by what the result moved."""
    recorded = torch.tensor([-0.0, 1.0000001, 3.0, 2.0])
    computed = torch.tensor([-0.0, 1.0, 3.0, 2.0000002])
    z = torch.tensor([-0.0, 1.0, 5.0, 1.0])
    found = with_recorded_error(z, computed, recorded)
    expected = torch.tensor([-0.0, 1.0000001, 5.0, 0.99999976])
    assert torch.equal(integer_view(found), integer_view(expected))


def test_an_old_answer_is_no_answer_to_the_other_question(plant, tmp_path):
    """A journal keeps both apart."""
    edit = (ShrinkEdit.of_coordinate(plant.cause),)
    with Journal(tmp_path / "journal.jsonl") as journal:
        for number, continuation in enumerate(("computed", "recorded"), start=1):
            bench = Workbench(plant.pair, plant.engine, continuation=continuation)
            trials = Trials(bench, journal=journal)
            trials.screen(edit, "reference")
            assert (trials.resumed, len(journal)) == (0, number)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"continuation": "kept"}, "one of computed, recorded"),
        (
            {"continuation": "recorded", "reduction": "atomic:8", "allow_unrepeatable": True},
            "does not",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(planted, settings, words):
    """Another word, or a reduction whose own order would be taken for the recorded error."""
    plant = planted()
    with pytest.raises(InputError, match=words):
        Workbench(plant.pair, plant.engine, **settings)
