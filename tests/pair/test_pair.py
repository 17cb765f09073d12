"""Pair: what it says, how it is kept, that it leaves nothing behind."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import plotly.graph_objects
import pytest
import torch

from fliptrace.errors import InputError, StorageError, TraceMismatchError, TraceReadError
from fliptrace.pair import Pair, diff_traces, load_pair, shrink_weights, trace_pair
from fliptrace.pair.divergence import Divergence
from fliptrace.pair.pair import require_new
from fliptrace.verdicts import Outcome

FILES = ["candidate.trace", "reference.trace", "report.html", "report.json"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_pair_from_folders(models):
    """Model and adapter as paths; the pair knows what it found and in how many attempts."""
    with trace_pair(
        models.model, models.adapter, "w5 w6", attempts=2, max_new_tokens=2, device="cpu"
    ) as pair:
        assert isinstance(pair, Pair)
        assert pair.attempts == 2
        assert not pair.diverged
        assert pair.diff.outcome is Outcome.LATENT
        assert pair.divergence is None
        assert (
            pair.title
            == f"{Path(models.model).parent.name}/model + {Path(models.model).parent.name}/adapter"
        )


def test_a_pair_from_an_engine(traced):
    """An engine is used again; seeds decide what is found."""
    one, other = traced(seed=3), traced(seed=3)
    assert one.diff.to_json() == other.diff.to_json()
    assert traced(until="any", attempts=9).attempts == 1


def test_until_decides_when_the_search_ends(traced):
    """A repeatable reduction never differs, so all attempts are used up."""
    assert traced(reduction="unsplit", attempts=3, until="any").attempts == 3


def test_the_pair_shows_itself(traced):
    """repr is one line; the notebook's HTML has no script; both traces show themselves, too."""
    pair = traced()
    assert repr(pair) == f"Pair({pair.title}: latent differences only)"
    assert "<script" not in pair._repr_html_()
    assert "latent" in pair._repr_html_().lower()
    for trace in (pair.reference, pair.candidate):
        assert "\n" not in repr(trace)
        assert "3 steps" in repr(trace)
        assert "<script" not in trace._repr_html_()
    assert pair.summary().startswith("Latent differences only")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("colour", ["class", "magnitude"])
def test_the_heatmap_is_a_figure(traced, phase, colour):
    """plotly figures, for both axes and both colours."""
    assert isinstance(traced().heatmap(phase, colour), plotly.graph_objects.Figure)


def test_save_and_load(traced, tmp_path):
    """What was saved gives the same verdicts when it is opened again."""
    pair = traced()
    page = pair.save(tmp_path / "deep" / "kept")
    assert page == tmp_path / "deep" / "kept" / "report.html"
    assert names(page.parent) == FILES
    assert names(tmp_path / "deep") == ["kept"]
    with load_pair(page.parent) as again:
        assert again.diff.to_json() == pair.diff.to_json()
        assert again.attempts is None
    document = json.loads((page.parent / "report.json").read_text("utf-8"))
    assert document["diff"] == json.loads(json.dumps(pair.diff.to_json()))


def test_save_refuses_what_is_there(traced, tmp_path):
    """A folder that is not empty, and a file, stay as they are."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept.txt").write_text("kept", "utf-8")
    pair = traced()
    for target in (tmp_path / "full", tmp_path / "full" / "kept.txt"):
        with pytest.raises(InputError, match="not empty"):
            pair.save(target)
    assert names(tmp_path) == ["full"]
    assert names(tmp_path / "full") == ["kept.txt"]


def test_save_fills_an_empty_folder(traced, tmp_path, monkeypatch):
    """Also through a link; but not the working directory."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    traced().save(tmp_path / "link")
    assert names(tmp_path / "empty") == FILES
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match="working directory"):
        require_new(Path())


@pytest.mark.parametrize("error", [OSError("no room"), ValueError("odd")])
def test_save_is_all_or_nothing(traced, tmp_path, monkeypatch, error):
    """A report that cannot be written leaves no folder behind."""
    pair = traced()

    def failing(directory, **_):
        (Path(directory) / "report.html").write_text("half", "utf-8")
        raise error

    monkeypatch.setattr(pair, "write_report", failing)
    with pytest.raises(
        StorageError if isinstance(error, OSError) else ValueError, match=str(error)
    ):
        pair.save(tmp_path / "kept")
    assert names(tmp_path) == []


def test_closing_removes_the_temporary_folder(traced):
    """Unsaved traces go when the pair is closed, and once only."""
    pair = traced()
    folder = Path(pair.reference.name).parent
    assert names(folder) == ["candidate.trace", "reference.trace"]
    pair.close()
    pair.close()
    assert not folder.exists()


def test_forgetting_removes_the_temporary_folder(engine):
    """Without close(): when the last reference goes, without a warning (warnings are errors in these tests)."""
    pair = trace_pair(engine, prompt="w5", attempts=1, max_new_tokens=1, observer_control=False)
    folder = Path(pair.reference.name).parent
    assert folder.exists()
    del pair
    gc.collect()
    assert not folder.exists()


def test_a_failed_search_leaves_no_temporary_folder(engine, tmp_path, monkeypatch):
    """An error while recording removes the temporary folder; a folder that was named keeps what was recorded."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "temporary").mkdir()

    def stop(what, done, total):
        if what.startswith("candidate") and done == 2:
            raise KeyboardInterrupt

    quick = {"attempts": 1, "max_new_tokens": 3, "observer_control": False, "progress": stop}
    with pytest.raises(KeyboardInterrupt):
        trace_pair(engine, prompt="w5", **quick)
    assert names(tmp_path / "temporary") == []
    with pytest.raises(KeyboardInterrupt):
        trace_pair(engine, prompt="w5", directory=tmp_path / "named", **quick)
    assert names(tmp_path / "named") == ["candidate-1.trace", "reference.trace"]
    with pytest.raises(InputError, match="not empty"):
        trace_pair(engine, prompt="w5", directory=tmp_path / "named", **quick)


def test_diff_traces(traced, tmp_path):
    """Stored traces, another boundary; what cannot be read or compared is refused and nothing stays open."""
    folder = traced().save(tmp_path / "kept").parent
    other = traced("w5 w6 w9").save(tmp_path / "other").parent
    with diff_traces(
        folder / "reference.trace", folder / "candidate.trace", rounded_dtype="float32"
    ) as pair:
        assert pair.diff.rounded_dtype == "float32"
        assert not any("same file" in one for one in pair.diff.coverage.not_observed)
    (tmp_path / "link.trace").symlink_to(folder / "reference.trace")
    with diff_traces(folder / "reference.trace", tmp_path / "link.trace") as pair:
        assert any("same file" in one for one in pair.diff.coverage.not_observed)
    with pytest.raises(TraceReadError):
        load_pair(tmp_path)
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(TraceMismatchError, match="prompt"):
        diff_traces(folder / "reference.trace", other / "candidate.trace")
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def test_redacted_traces_have_no_text(traced):
    """Settings reach the recorder: no ids, no text; the pair compares."""
    pair = traced(redact=True)
    assert pair.reference.manifest.get("prompt.ids") is None
    assert pair.reference.manifest.get("prompt.text") is None
    assert pair.reference.closing.text == ""
    assert pair.diff.outcome is Outcome.LATENT


def test_progress_is_told(traced):
    """Each stage by name, with steps done and in all."""
    told = []
    traced(progress=lambda *news: told.append(news), observer_control=True)
    stages = list(dict.fromkeys(what for what, _, _ in told))
    assert stages[0] == "observer control"
    assert stages[1:] == ["reference", "candidate 1 of at most 1", "comparing"]
    assert ("reference", 3, 3) in told


def test_traces_are_found_from_another_folder(traced, tmp_path, monkeypatch):
    """A pair of relative paths is saved from wherever the notebook has gone, not from what lies there."""
    traced().save(tmp_path / "kept")
    traced("w5 w6 w9").save(tmp_path / "elsewhere" / "kept")
    monkeypatch.chdir(tmp_path)
    with load_pair("kept") as pair:
        monkeypatch.chdir(tmp_path / "elsewhere")
        again = pair.save(tmp_path / "again").parent
    for name in ("reference.trace", "candidate.trace"):
        assert (again / name).read_bytes() == (tmp_path / "kept" / name).read_bytes()


def test_a_new_name_with_dots_after_it_is_what_it_leads_to(tmp_path, monkeypatch):
    """new/../.. does not exist, but the folder that it resolves to does, and is not empty."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match="not empty"):
        require_new(Path("new/../.."))
    require_new(Path("new/../other"))


def test_a_latent_variant_is_no_surviving_difference(traced):
    """With two reductions the first difference is a variant; divergence is the first that survives."""
    pair = traced(reduction="deterministic:8", candidate_reduction="unsplit")
    assert pair.diff.first_variant is not None
    surviving = pair.diff.first_surviving_variant
    if surviving is not None:
        assert surviving.surviving
        assert pair.divergence == Divergence.of(surviving)
    else:
        assert pair.divergence is None
        assert "surviving difference at" not in repr(pair)


def test_a_callers_inference_mode_does_no_harm(traced):
    """Recorders read version counters, which inference tensors lack."""
    with torch.inference_mode():
        assert traced(modules=True).diff.to_json() == traced(modules=True).diff.to_json()


def test_redacted_traces_of_two_recordings_are_not_called_different_prompts(traced, tmp_path):
    """Their keys differ, so whether the prompts do is not known."""
    first = traced(redact=True).save(tmp_path / "first").parent
    second = traced(redact=True).save(tmp_path / "second").parent
    plain = traced().save(tmp_path / "plain").parent
    for one, other in ((first, second), (plain, second)):
        with pytest.raises(TraceMismatchError, match=r"redacted.*not known") as caught:
            diff_traces(one / "reference.trace", other / "candidate.trace")
        assert "first differ" not in str(caught.value)


def test_operands_and_the_engines_weights_tell_what_was_added(traced, engine, tmp_path):
    """Only with --operands; a stored pair knows no weights until it is given them, and then the same."""
    settings = {"until": "any", "attempts": 2, "max_new_tokens": 3}
    assert all(grid.added is None for grid in traced(**settings).diff.grids.values())
    pair = traced(**settings, operands=True)
    grid = pair.diff.grids["prefill"]
    shrinks = torch.tensor([kind == "shrink" for kind, _ in grid.rows])
    differs = (grid.classes > 0) & shrinks[:, None]
    assert differs.any()
    assert torch.equal(~grid.added.isnan(), differs)
    roots = grid.origins == 1
    assert roots.any()
    assert torch.equal(grid.inherited[roots], torch.zeros(int(roots.sum())))
    assert torch.equal(grid.added[roots], grid.magnitudes[roots])
    pair.save(tmp_path / "saved")
    with load_pair(tmp_path / "saved") as stored:
        assert stored.diff.grids["prefill"].added is None
        stored.separate(shrink_weights(engine))
        again = stored.diff.grids["prefill"]
        assert torch.equal(again.added.nan_to_num(-1), grid.added.nan_to_num(-1))
        with pytest.raises(InputError, match="not transposed"):
            stored.separate({path: a.T for path, a in shrink_weights(engine).items()})
