"""A pair on vLLM: traced, compared, reported, and its cause proved by substitution, on the installed engine."""

from __future__ import annotations

import pytest

import fliptrace as ft
from fliptrace.errors import TraceMismatchError
from fliptrace_interventions import CacheEdit, ShrinkEdit, Workbench


@pytest.fixture(scope="module")
def folder(shared_engine, bundled, tmp_path_factory):
    """A saved pair whose token flipped, with a surviving root."""
    for number, prompt in enumerate(bundled.prompts[:12]):
        root = tmp_path_factory.mktemp("pair")
        with ft.trace_pair(
            shared_engine,
            prompt=prompt.text,
            attempts=4,
            max_new_tokens=40,
            seed=10 * number,
            directory=root / "traces",
        ) as pair:
            if (
                pair.diff.flip is not None
                and pair.diff.flip.step
                and pair.diff.first_propagating is not None
            ):
                pair.save(root / "saved")
                return root / "saved"
    raise AssertionError("no prompt of twelve flipped within 40 tokens and 4 attempts")


def test_a_pair_flips_and_its_root_is_named(folder):
    """A token differs, the root is at one of the engine's sites, the report is there, the control passed."""
    with ft.load_pair(folder) as pair:
        assert pair.diverged
        row = pair.diff.first_propagating
        assert row.site.path in pair.reference.manifest.get("recording.expected_sites")
        assert "tokens and digests of all logits equal" in pair.diff.coverage.observer_control
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "report.json").stat().st_size > 1_000


def test_the_cause_is_proved_by_substitution(folder, shared_engine):
    """Both executions are rebuilt bit by bit; the donor's cache, then one coordinate, are put in and arrive."""
    with ft.load_pair(folder) as pair:
        workbench = Workbench(pair, shared_engine)
        for found in workbench.reconstruct():
            assert found.equal, found.first_mismatch
        root = pair.diff.first_propagating
        edits = [ShrinkEdit.of_coordinate(root.coordinates[0])]
        assert pair.diff.flip.step > 0
        for claim in (edits, [CacheEdit(pair.diff.flip.step)]):
            verdict = workbench.prove(claim, free=False, shams=0)
            assert str(verdict.judgement) != "void", verdict.reasons
            for direction in verdict.directions:
                assert direction.edited.receipts
                assert all(receipt.landed for receipt in direction.edited.receipts)


def test_another_engine_is_another_computation(shared_engine, bundled, folder, tmp_path):
    """Refused unless asked for; then nothing is a root, and the note says why."""
    engine = ft.load_engine(bundled.model, bundled.adapter, device="cpu")
    with (
        ft.trace_pair(
            shared_engine,
            prompt=bundled.prompts[0].text,
            reduction="unsplit",
            attempts=1,
            max_new_tokens=6,
            directory=tmp_path / "vllm",
        ),
        ft.trace_pair(
            engine,
            prompt=bundled.prompts[0].text,
            reduction="unsplit",
            attempts=1,
            max_new_tokens=6,
            directory=tmp_path / "transformers",
        ),
    ):
        pass
    files = [tmp_path / name / "reference.trace" for name in ("vllm", "transformers")]
    with pytest.raises(TraceMismatchError, match=r"is of vllm .* of transformers"):
        ft.diff_traces(*files)
    with ft.diff_traces(*files, across_engines=True) as pair:
        diff = pair.diff
        assert not diff.roots
        assert diff.first_surviving is None
        assert diff.first_propagating is None
        assert diff.first_surviving_variant is not None
        assert any("never a root" in sentence for sentence in diff.coverage.missing)
        assert pair.save(tmp_path / "saved")
