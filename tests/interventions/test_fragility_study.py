"""trace-study fragility: shards gathered into one study, resumption, its page, and how the command finds it."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from fliptrace.command_line import trace_study
from fliptrace.errors import InputError
from fliptrace.studies import ModelSettings, Selection, run_study
from fliptrace_interventions.command_line import fragility as command
from fliptrace_interventions.fragility import (
    FragilityOptions,
    FragilityStudy,
    collect,
    gathered,
)
from fliptrace_interventions.fragility.report import cost_lines

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--select", "36", "31", "--max-new-tokens", "5", "--replays", "2", "--executions", "4"]
SMALL += ["--observed", "1", "--device", "cpu", "--quiet"]


def study(shard=(1, 1), **settings):
    torch.set_num_threads(1)
    return FragilityStudy(
        model=ModelSettings(device="cpu"),
        selection=Selection(("36", "31")),
        options=FragilityOptions(2, 4, 1e9),
        observed=2,
        max_new_tokens=5,
        shard=shard,
        **settings,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The study in one folder, and what run_study said of it."""
    folder = tmp_path_factory.mktemp("whole") / "study"
    return folder, run_study(study(), folder)


def test_shards_give_the_rows_of_one_process(whole, tmp_path):
    """Byte for byte and in the same order, whatever was gathered from where; nothing is run again."""
    folder, _ = whole
    for part in (1, 2):
        assert collect(study((part, 2)), tmp_path / str(part)) == (3, 3)
    result = run_study(
        study(), tmp_path / "study", executor=gathered([tmp_path / "2", tmp_path / "1"])
    )
    assert result.complete
    assert (tmp_path / "study/rows.jsonl").read_bytes() == (folder / "rows.jsonl").read_bytes()
    assert (tmp_path / "study/table.md").read_text("utf-8").count("part") >= 2
    assert (
        cost_lines(tmp_path / "study") == [] or "times as long" in cost_lines(tmp_path / "study")[0]
    )


def test_collecting_goes_on_where_it_was_stopped(whole, tmp_path):
    """Without a budget nothing begins; a row that is there is not run again."""
    folder, _ = whole
    assert collect(study(), tmp_path / "part", budget_minutes=0) == (0, 6)
    lines = (folder / "rows.jsonl").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "part/rows.jsonl").write_text("".join(lines[:5]) + lines[5][:30], "utf-8")
    seen = []
    done = collect(study(), tmp_path / "part", progress=lambda *told: seen.append(told))
    assert done == (6, 6)
    assert len(seen) == 1
    assert (tmp_path / "part/rows.jsonl").read_bytes() == (folder / "rows.jsonl").read_bytes()


def test_other_settings_are_not_gathered(whole, tmp_path):
    """A part that was begun with another reach holds other estimates; of the parts before it no row is taken either."""
    assert collect(study(), tmp_path / "part", budget_minutes=0) == (0, 6)
    (tmp_path / "part/rows.jsonl").touch()
    # As after a first engine started: until then, settings may still be corrected.
    begun = json.loads((tmp_path / "part/study.json").read_text("utf-8"))
    begun["artifacts"] = {"model.sha256": "0" * 64}
    (tmp_path / "part/study.json").write_text(json.dumps(begun), "utf-8")
    other = FragilityStudy(model=ModelSettings(device="cpu"), selection=Selection(("36",)))
    with pytest.raises(InputError, match="was begun with"):
        run_study(other, tmp_path / "study", executor=gathered([tmp_path / "part"]))
    with pytest.raises(InputError, match="were collected"):
        gathered([tmp_path / "part", tmp_path])
    begun["settings"]["reach"] = 3.0
    (tmp_path / "part/study.json").write_text(json.dumps(begun), "utf-8")
    with pytest.raises(InputError, match="reach = 3"):
        run_study(study(), tmp_path / "two", executor=gathered([whole[0], tmp_path / "part"]))
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["study.json"]
    assert run_study(study(), tmp_path / "two", executor=gathered([whole[0]])).complete


def test_the_page_says_who_orders_atomics_and_how_right_it_was(whole):
    """Tables, the summary, Parquet with all steps and prompts, and a figure that asks no other host for anything."""
    folder, result = whole
    page = (folder / "table.md").read_text("utf-8")
    assert "simulated schedule" in page
    assert "free repetitions" in page
    entry = json.loads((folder / "summary.json").read_text("utf-8"))["reductions"]["atomic:8/32"]
    assert entry["prompts"] == 2
    assert entry["steps"] == entry["steps_in_reach"] == 10
    assert entry["calibration"]["comparisons"] == 4
    assert result.report.figure is not None
    assert (folder / "figure.svg").is_file()
    html = (folder / "figure.html").read_text("utf-8")
    assert 'src="http' not in html
    for name in ("rows", "prompts", "steps"):
        assert (folder / f"{name}.parquet").stat().st_size > 0


def test_rows_are_declared_whole(whole, undeclared):
    """Every key of every line is in the schema, and every line fits it."""
    assert undeclared(whole[0]) == set()


def test_seeds_of_references_replays_and_repetitions_never_meet(whole):
    """A repetition with a replay's schedule would be no evidence."""
    folder, _ = whole
    seeds = []
    for line in (folder / "rows.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        seeds += [row["seed"], *(replay["seed"] for replay in row.get("replays", ()))]
    assert len(seeds) == len(set(seeds)) == 2 * (1 + 2 + 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reductions": ("unsplit",)}, "one order by construction"),
        ({"shard": (3, 2)}, "1 <= K <= N"),
        (
            {"shard": (3, 4), "selection": Selection(("36", "31"))},
            "shard 3/4 has nothing to do, .* make 2; use fewer",
        ),
        ({"seed": -1}, "seed must be"),
        ({"observed": 600}, "repetitions must be"),
        ({"max_new_tokens": 0}, "at least 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused_before_a_model_loads(settings, words):
    """Each message says what is required and what came."""
    with pytest.raises(InputError, match=words):
        FragilityStudy(**settings).items()


def test_a_prompt_that_is_too_long_is_said_before_the_first_runs(tmp_path):
    """The one before it is fine, and has not run either."""
    rows = [{"prompt": "Tom has 3 apples."}, {"prompt": "apple " * 900}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    asked = FragilityStudy(
        model=ModelSettings(device="cpu"),
        task=f"jsonl:{tmp_path / 'p.jsonl'}",
        selection=Selection(("0", "1")),
    )
    with pytest.raises(InputError, match=r"row 1\) has \d+ tokens"):
        run_study(asked, tmp_path / "study")
    assert not (tmp_path / "study/rows.jsonl").exists()


def test_the_entry_point_is_the_command():
    """What the distribution will announce exists and is this function."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    target = project["entry-points"][trace_study.STUDIES_GROUP]["fragility"]
    module, _, name = target.partition(":")
    assert getattr(importlib.import_module(module), name) is command.fragility


@pytest.fixture
def announced(tmp_path, monkeypatch):
    """A distribution on the path that announces the study, as an installation does."""
    info = tmp_path / "site" / "announced-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: announced\nVersion: 1\n", "utf-8")
    (info / "entry_points.txt").write_text(
        "[fliptrace.studies]\nfragility = fliptrace_interventions.command_line.fragility:fragility\n",
        "utf-8",
    )
    monkeypatch.syspath_prepend(str(info.parent))


def run(monkeypatch, capfd, main, *arguments):
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main()
    captured = capfd.readouterr()
    return stopped.value.code or 0, captured.out, captured.err


def test_trace_study_runs_what_is_announced(announced, monkeypatch, capfd, tmp_path):
    """As one process, as a shard, and gathered; a TOML file gives options as for the other studies."""
    toml = tmp_path / "study.toml"
    toml.write_text("[fragility]\nreach = 1000.0\n", "utf-8")
    out = tmp_path / "part"
    code, shown, _ = run(
        monkeypatch,
        capfd,
        trace_study.main,
        "fragility",
        *SMALL,
        "--config",
        toml,
        "--shard",
        "1/2",
        "--out",
        out,
    )
    assert code == 0
    assert "Fragility: bundled" in shown
    code, shown, _ = run(
        monkeypatch,
        capfd,
        trace_study.main,
        "fragility",
        *SMALL,
        "--reach",
        "1000",
        "--gather",
        out,
        "--out",
        tmp_path / "study",
        "--json",
    )
    assert code == 0
    assert json.loads(shown)["finished"] == 2
    assert json.loads(shown)["items"] == 4


def test_a_recorded_execution_is_estimated(monkeypatch, capfd, tmp_path):
    """In place of prompts, under the reduction that it was recorded with, with schedules other than its own."""
    from fliptrace.pair import bundled_model, load_engine, trace_pair

    bundled = bundled_model()
    torch.set_num_threads(1)
    with trace_pair(
        load_engine(bundled.model, bundled.adapter, device="cpu"),
        prompt=bundled.prompts[5].text,
        reduction="atomic:8",
        max_new_tokens=4,
        attempts=1,
        directory=tmp_path / "pair",
    ) as pair:
        tokens = pair.reference.generated_ids
        seeds = {trace.manifest.get("reduction.seed") for trace in (pair.reference, pair.candidate)}
    options = ["--replays", 2, "--executions", 4, "--observed", 1, "--reach", 1000]
    code, shown, _ = run(
        monkeypatch,
        capfd,
        command.main,
        "--trace",
        tmp_path / "pair/reference.trace",
        *options,
        "--device",
        "cpu",
        "--quiet",
        "--out",
        tmp_path / "study",
    )
    assert code == 0
    assert "recorded executions" in shown
    first, second = map(json.loads, (tmp_path / "study/rows.jsonl").read_text("utf-8").splitlines())
    assert first["token_ids"] == tokens
    assert len(second["token_ids"]) <= 4
    used = {first["seed"], second["seed"], *(replay["seed"] for replay in first["replays"])}
    assert not used & seeds


def test_unknown_studies_are_told_of_it(announced, monkeypatch, capfd):
    """The list names studies of other packages, too."""
    code, _, error = run(monkeypatch, capfd, trace_study.main, "fragile")
    assert code == 2
    assert "fragility" in error


def test_the_module_runs_by_itself(monkeypatch, capfd, tmp_path):
    """From a checkout, where nothing is announced; a shard of another form is refused in one line."""
    code, _, error = run(
        monkeypatch, capfd, command.main, *SMALL, "--shard", "half", "--out", tmp_path / "study"
    )
    assert code == 2
    assert (
        error.strip() == "trace-study fragility: a shard is written K/N, such as 1/12; got 'half'"
    )
