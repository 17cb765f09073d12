"""trace-intervene as a user types it: what it finds, what it writes, what it leaves alone, and its exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

from fliptrace.views import InterventionReport, report_schema
from fliptrace_interventions import ShrinkEdit

QUICK = ("--shams", "2", "--max-new-tokens", "12")


@pytest.fixture
def case(planted, model_folders, tmp_path):
    """A copy of the planted pair's folder, the options that name its model, and files of its cause and a decoy."""
    plant = planted()
    folder = tmp_path / "pair"
    shutil.copytree(Path(plant.pair.reference.name).parent, folder)
    model, adapter = model_folders("llama")
    for name, coordinate in (("cause", plant.cause), ("decoy", plant.decoys[0])):
        text = json.dumps(ShrinkEdit.of_coordinate(coordinate).to_json())
        (tmp_path / f"{name}.json").write_text(text, "utf-8")
    return SimpleNamespace(
        plant=plant,
        folder=folder,
        model=("--model", model, "--adapter", adapter),
        cause=tmp_path / "cause.json",
        decoy=tmp_path / "decoy.json",
    )


def traces(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.trace")}


def written(folder):
    """The report's document, valid against its schema."""
    document = json.loads((folder / "report.json").read_text("utf-8"))
    jsonschema.Draft202012Validator(report_schema()).validate(document)
    return document


def test_a_sufficient_claim_exits_with_0_and_enters_the_report(typed, case):
    """Verdict first, both directions, receipts; report.html and report.json are made, the traces untouched."""
    before = traces(case.folder)
    result = typed(case.folder, *case.model, "--edit", case.cause, *QUICK)
    assert result.code == 0, result.err
    assert result.err == ""
    lines = result.out.splitlines()
    assert "sufficient, the donor's token" in " ".join(lines[:5])
    assert max(map(len, lines[:-1])) <= 80  # the last one is a path
    assert lines[-1] == f"The report is {case.folder / 'report.html'}"
    document = written(case.folder)
    report = InterventionReport.from_json(document["interventions"])
    assert report.investigation is None
    (claim,) = report.claims
    assert [item.recipient for item in claim.verdict.directions] == ["reference", "candidate"]
    assert all(receipt.landed for receipt in claim.verdict.directions[0].edited.receipts)
    assert len(claim.continuations) == 4
    assert report.command.startswith("trace-intervene ")
    assert 'id="interventions"' in (case.folder / "report.html").read_text("utf-8")
    assert traces(case.folder) == before
    assert not [path for path in case.folder.iterdir() if path.name.startswith(".")]


def test_an_insufficient_claim_exits_with_1(typed, case):
    """A decoy: the same commands, the other answer."""
    result = typed(case.folder, *case.model, "--edit", case.decoy, *QUICK)
    assert result.code == 1, result.err
    assert "not sufficient" in result.out
    assert written(case.folder)["interventions"]["claims"][0]["verdict"]["judgement"] == (
        "not sufficient"
    )


def test_several_claims_and_a_cache_claim_at_once(typed, case):
    """Every --edit is a claim of its own, --step another; one that is sufficient decides the exit code."""
    arguments = ("--edit", case.decoy, "--edit", case.cause, "--step", case.plant.step)
    result = typed(case.folder, *case.model, *arguments, *QUICK, "--recipient", "reference")
    assert result.code == 0, result.err
    claims = written(case.folder)["interventions"]["claims"]
    assert [claim["verdict"]["judgement"] for claim in claims] == [
        "not sufficient",
        "sufficient",
        "sufficient",
    ]
    assert all(len(claim["verdict"]["directions"]) == 1 for claim in claims)
    assert claims[2]["verdict"]["edits"][0]["edit"] == "cache"


def test_layers_alone_mean_the_cache_before_the_judged_step(typed, case):
    """Of the chosen layers only."""
    result = typed(case.folder, *case.model, "--layers", "0-1", "--recipient", "reference", *QUICK)
    assert result.code in (0, 1), result.err
    (edit,) = written(case.folder)["interventions"]["claims"][0]["verdict"]["edits"]
    assert (edit["step"], edit["layers"]) == (case.plant.step, [0, 1])


def test_json_is_the_report_and_nothing_else(typed, case):
    """The same document as on disk, alone on stdout."""
    result = typed(case.folder, *case.model, "--edit", case.decoy, *QUICK, "--json")
    assert result.code == 1
    assert json.loads(result.out) == written(case.folder)


def test_a_new_run_takes_the_place_of_the_old_one(typed, case):
    """The section is replaced, not repeated; the command that made the pair stays."""
    pair = case.plant.pair
    pair.write_report(case.folder, command="trace-pair --prompt x")
    typed(case.folder, *case.model, "--edit", case.cause, *QUICK)
    first = written(case.folder)
    assert first["command"] == "trace-pair --prompt x"
    typed(case.folder, *case.model, "--edit", case.decoy, *QUICK)
    second = written(case.folder)
    assert second["command"] == "trace-pair --prompt x"
    assert len(second["interventions"]["claims"]) == 1
    assert second["interventions"] != first["interventions"]
    page = (case.folder / "report.html").read_text("utf-8")
    assert page.count('id="interventions"') == 1


def test_what_a_report_held_of_another_pair_is_dropped(typed, case):
    """A folder whose report belongs to other traces: the report is made anew from those that are there."""
    typed(case.folder, *case.model, "--edit", case.cause, *QUICK)
    document = written(case.folder)
    document["executions"]["reference"]["generated_ids"][0] += 1
    document["command"] = "trace-pair --of-another-pair"
    (case.folder / "report.json").write_text(json.dumps(document), "utf-8")
    typed(case.folder, *case.model, "--edit", case.decoy, *QUICK)
    assert written(case.folder)["command"] is None


def test_a_damaged_report_is_written_anew(typed, case):
    """A report is made from the traces; one that cannot be read is no reason to stop."""
    (case.folder / "report.json").write_text("{", "utf-8")
    result = typed(case.folder, *case.model, "--edit", case.decoy, *QUICK)
    assert result.code == 1, result.err
    written(case.folder)


def test_out_leaves_the_pair_as_it_is(typed, case, tmp_path):
    """A new folder gets copies of the traces and the report."""
    before = traces(case.folder)
    names = {path.name for path in case.folder.iterdir()}
    out = tmp_path / "new" / "place"
    result = typed(case.folder, *case.model, "--edit", case.decoy, *QUICK, "--out", out)
    assert result.code == 1, result.err
    assert {path.name for path in case.folder.iterdir()} == names
    assert {path.name for path in out.iterdir()} == {
        "reference.trace",
        "candidate.trace",
        "report.html",
        "report.json",
    }
    assert traces(out).keys() == before.keys()
    written(out)


def test_a_pair_that_this_machine_cannot_replay_is_void(typed, case, monkeypatch):
    """Reconstruction fails: exit code 3, the reason in the report, and nothing is called sufficient."""
    from fliptrace_interventions.recorded import RecordedExecution

    original = RecordedExecution.logits_digest
    monkeypatch.setattr(
        RecordedExecution,
        "logits_digest",
        lambda self, step: original(self, step)[::-1],
    )
    result = typed(case.folder, *case.model, "--edit", case.cause, *QUICK)
    assert result.code == 3, result.out
    assert "void" in result.out
    assert written(case.folder)["interventions"]["claims"][0]["verdict"]["judgement"] == "void"


def test_an_interrupted_claim_changes_nothing(typed, case, monkeypatch):
    """Ctrl-C in a proof: one line, code 130, the report as it was."""
    from fliptrace_interventions.workbench import Workbench

    def stop(*_arguments, **_settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(Workbench, "prove", stop)
    before = {path.name for path in case.folder.iterdir()}
    result = typed(case.folder, *case.model, "--edit", case.cause)
    assert result.code == 130
    assert result.err.count("\n") == 1
    assert {path.name for path in case.folder.iterdir()} == before


def test_the_reproducer_of_a_root_is_exported(typed, case, tmp_path):
    """Beside the pair, or where --out says; the report is not touched."""
    result = typed(case.folder, *case.model, "--export-reproducer", "1")
    assert result.code == 0, result.err
    folder = case.folder / "reproducer-1"
    assert result.out.strip() == f"The reproducer is {folder / 'reproduce.py'}"
    assert {path.name for path in folder.iterdir()} == {
        "case.json",
        "operands.bin",
        "reproduce.py",
        "fliptrace_kernels",
    }
    again = typed(case.folder, *case.model, "--export-reproducer", "1")
    assert again.code == 2
    assert "not empty" in again.err
    other = typed(case.folder, *case.model, "--export-reproducer", "1", "--out", tmp_path / "x")
    assert other.code == 0, other.err
    assert not (case.folder / "report.html").exists()


def test_recorded_rounding_errors_are_another_question(typed, case, tmp_path):
    """A claim says so; a search may not take the place of the pair's own story, and gets a folder of its own."""
    refused = typed(case.folder, *case.model, *QUICK, "--continuation", "recorded")
    assert refused.code == 2
    assert "--out" in refused.err
    arguments = (*case.model, *QUICK, "--continuation", "recorded")
    result = typed(case.folder, *arguments, "--edit", case.cause, "--recipient", "reference")
    assert result.code == 0, result.err
    verdict = written(case.folder)["interventions"]["claims"][0]["verdict"]
    assert verdict["reduction"] == "unsplit/64 with the recipient's recorded rounding errors"
    page = (case.folder / "report.html").read_text("utf-8")
    assert "recorded rounding errors" in page
    story = typed(case.folder, *arguments, "--budget-runs", "1", "--out", tmp_path / "other")
    assert "recorded rounding errors" in " ".join(story.out.split())
    assert written(tmp_path / "other")["interventions"]["investigation"]["reduction"].endswith(
        "recorded rounding errors"
    )


def test_help_names_every_option_and_exit_code(typed):
    """What a person reads first."""
    text = typed("--help").out
    for word in (
        "--edit",
        "--step",
        "--layers",
        "--continue-to",
        "--recipient",
        "--reduction",
        "--continuation",
        "--repeats",
        "--shams",
        "--seed",
        "--budget-runs",
        "--budget-minutes",
        "--no-resume",
        "--json",
        "--model",
        "--answers",
        "--gold",
        "--export-reproducer",
        "Exit codes",
    ):
        assert word in text


def test_the_whole_story_enters_the_report(typed, case):
    """Exit code 0, the planted cause named, every part in the report, the journal beside the pair."""
    before = traces(case.folder)
    result = typed(case.folder, *case.model, *QUICK)
    assert result.code == 0, result.err
    assert result.out.startswith("One FP32 value is enough to flip the token")
    assert max(map(len, result.out.splitlines()[:-1])) <= 80
    found = InterventionReport.from_json(written(case.folder)["interventions"]).investigation
    cause = case.plant.cause
    best = found.best_coordinate
    assert (best.site, best.step) == (cause.site.path, cause.step)
    assert (best.position, best.rank_index) == (cause.position, cause.rank_index)
    assert all(item.equal for item in found.reconstruction)
    assert found.cache_substitution is not None
    assert found.two_by_two is not None
    assert found.roots
    assert found.layers
    assert traces(case.folder) == before
    page = (case.folder / "report.html").read_text("utf-8")
    for mark in ("cause-boundary", "cause-margins", "Past or present?", "Which part of the cache"):
        assert mark in page
    assert (case.folder / "interventions.jsonl").is_file()


def test_story_and_claim_stand_side_by_side(typed, case):
    """A claim keeps the story that is there, and a new story keeps the claim."""
    typed(case.folder, *case.model, *QUICK, "--budget-runs", "1")
    typed(case.folder, *case.model, "--edit", case.decoy, *QUICK)
    both = written(case.folder)["interventions"]
    assert both["investigation"] is not None
    assert len(both["claims"]) == 1
    typed(case.folder, *case.model, *QUICK, "--budget-runs", "2")
    after = written(case.folder)["interventions"]
    assert after["investigation"]["budget"] == "2 runs"
    assert after["claims"] == both["claims"]


def test_a_budget_is_kept_and_what_it_left_out_is_said(typed, case):
    """Nothing found within it: exit code 1, and what was not covered."""
    result = typed(case.folder, *case.model, *QUICK, "--budget-runs", "1")
    assert result.code == 1, result.out
    assert "What was not covered" in result.out
    found = written(case.folder)["interventions"]["investigation"]
    assert found["runs"] <= 1
    assert found["not_covered"]


def test_an_interrupted_search_goes_on_where_it_was(typed, case, monkeypatch):
    """Ctrl-C: code 130, one line with the command that goes on, no report; then nothing finished runs again."""
    from fliptrace_interventions.workbench import Workbench

    screen, calls = Workbench.screen, []

    def counted(self, *arguments, **settings):
        calls.append(arguments)
        if interrupted and len(calls) == 4:
            raise KeyboardInterrupt
        return screen(self, *arguments, **settings)

    monkeypatch.setattr(Workbench, "screen", counted)
    interrupted = True
    result = typed(case.folder, *case.model, *QUICK)
    assert result.code == 130
    assert result.err.count("\n") == 1
    assert "are kept" in result.err
    assert f"trace-intervene {case.folder}" in result.err
    assert not (case.folder / "report.json").exists()
    first = len(calls) - 1
    calls.clear()
    interrupted = False
    assert typed(case.folder, *case.model, *QUICK).code == 0
    resumed = len(calls)
    calls.clear()
    assert typed(case.folder, *case.model, *QUICK, "--no-resume").code == 0
    assert len(calls) == resumed + first
    calls.clear()
    assert typed(case.folder, *case.model, *QUICK).code == 0
    assert calls == []


def test_the_demonstration_copies_the_pair_that_ships(typed, tmp_path):
    """It proves what the card says or, on a processor that rounds other products, is void; the package is untouched."""
    from fliptrace.pair import bundled_model

    shipped = Path(bundled_model().recorded_pair)
    before = {path.name: path.read_bytes() for path in shipped.iterdir()}
    options = ("--gold", "137", "--shams", "2", "--budget-runs", "30")
    result = typed("--demo", *options, "--out", tmp_path / "demo")
    assert result.code in (0, 3), result.err
    found = written(tmp_path / "demo")["interventions"]["investigation"]
    if result.code == 3:
        assert "cannot be reconstructed here" in found["sentence"]
    else:
        best = found["best_coordinate"]
        assert (best["site"], best["step"]) == ("model.layers.0.self_attn.q_proj", 17)
        assert (best["position"], best["rank_index"]) == (53, 1)
        answers = {arm["answer"]: arm["correct"] for arm in found["continuations"]}
        assert answers == {"137": True, "147": False}
    assert {path.name: path.read_bytes() for path in shipped.iterdir()} == before


def test_models_are_found_by_name_and_hash(typed, case, planted, model_folders, monkeypatch):
    """Without --model and --adapter the recorded name is looked for near by; another model under it does not count."""
    model, adapter = (Path(folder) for folder in model_folders("llama"))
    manifest = planted().pair.reference.manifest
    near = case.folder.parent
    shutil.copytree(model, near / manifest.get("model.name"))
    shutil.copytree(adapter, near / manifest.get("adapter.name"))
    assert typed(case.folder, "--edit", case.decoy, *QUICK).code == 1
    config = near / manifest.get("model.name") / "config.json"
    config.write_text(config.read_text("utf-8") + "\n", "utf-8")
    result = typed(case.folder, "--edit", case.decoy, *QUICK)
    assert result.code == 2
    assert "--model" in result.err
