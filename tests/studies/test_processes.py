"""trace-study repeat and decide on engines of vLLM's own: what is asked, counted and refused, and vLLM itself."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from fliptrace.command_line import trace_study
from fliptrace.errors import InputError
from fliptrace.studies import ModelSettings, RepeatStudy, Selection, run_study
from fliptrace.studies.decide_processes import shares_of
from fliptrace.studies.engine_process import EngineProcessError, environment
from fliptrace.studies.engine_process_lanes import run_lanes
from fliptrace.studies.engine_process_reductions import gpus_of
from fliptrace.studies.engine_process_settings import EngineSettings

VLLM_PYTHON = os.environ.get("FLIPTRACE_VLLM_PYTHON") or (
    sys.executable if importlib.util.find_spec("vllm") else None
)


@pytest.fixture
def study(stand_in, tmp_path):
    """Five prompts, three times each, under three reductions, on engines that count."""
    return RepeatStudy(
        model=ModelSettings(engine="vllm"),
        selection=Selection(count=5),
        reductions=("vllm-own", "local", "atomic:8"),
        repetitions=3,
        max_new_tokens=4,
        engines=EngineSettings(
            mode="graphs", python=str(stand_in), scratch=str(tmp_path / "scratch")
        ),
    )


def test_counts_are_what_was_planted(study, tmp_path, rows_of):
    """Atomics change every output and one of three comparable logits; the others nothing. Rows say how they ran."""
    result = run_study(study, tmp_path / "study", executor=run_lanes)
    found = result.report.summary["reductions"]
    counts = {
        name: (one["changed"]["hits"], one["logits"]["hits"], one["logits"]["trials"])
        for name, one in found.items()
    }
    assert counts == {
        "vllm-own": (0, 0, 40),
        "local:32/32": (0, 0, 40),
        "atomic:8/32": (10, 10, 30),
    }
    assert found["atomic:8/32"]["first_divergences"] == [3] * 10
    rows = rows_of(tmp_path / "study")
    assert [row["item"] for row in rows] == [item.id for item in study.items()]
    own = {(row["reduction"], row["schedule"], row["mode"], row["batch_size"]) for row in rows}
    assert own == {
        ("vllm-own", "hardware", "graphs", 1),
        ("local:32/32", "none", "graphs", 1),
        ("atomic:8/32", "hardware", "graphs", 1),
    }
    assert {row["ties"] for row in rows} == {1}
    assert {row["text"].partition(" on ")[0] for row in rows} == {"1 at once"}
    page = (tmp_path / "study/table.md").read_text("utf-8")
    assert "one per reduction; mode: graphs; requests at once: 1." in page
    sitting = json.loads((tmp_path / "study/sittings.jsonl").read_text("utf-8"))["description"]
    assert sitting["kernels"]["local:32/32"].startswith("kernel of local:32/32 in 3 layers, ")


def test_requests_at_once(study, tmp_path, rows_of):
    """Five prompts two at a time: two, two and one together; what a group gave is asked for once."""
    several = dataclasses.replace(study, batch_size=2)
    result = run_study(several, tmp_path / "study", executor=run_lanes)
    assert result.report.summary["reductions"]["atomic:8/32"]["changed"]["hits"] == 10
    rows = [row for row in rows_of(tmp_path / "study") if row["reduction"] == "atomic:8/32"]
    assert [row["text"].split()[0] for row in rows] == ["2"] * 12 + ["1"] * 3
    # One request more for each group and repetition, after the one that warms up.
    assert [row["token_ids"][-1] // 10_000 for row in rows] == [
        *(2, 2, 3, 3, 4, 4),
        *(5, 5, 6, 6, 7, 7),
        *(8, 9, 10),
    ]
    with pytest.raises(InputError, match="came of other work"):
        run_study(
            dataclasses.replace(several, selection=Selection(count=6)),
            tmp_path / "study",
            executor=run_lanes,
        )


def test_engines_are_dealt_to_gpus(study, tmp_path, rows_of, monkeypatch):
    """Round robin over the visible ones, in their names; one where one was named."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    run_study(study, tmp_path / "study", executor=run_lanes)
    places = {row["reduction"]: row["text"].split()[-1] for row in rows_of(tmp_path / "study")}
    assert places == {"vllm-own": "4", "local:32/32": "6", "atomic:8/32": "4"}
    assert gpus_of("cuda:1") == ["6"]
    assert gpus_of("cpu") == []
    with pytest.raises(InputError, match="there are 2 GPUs"):
        gpus_of("cuda:2")


def test_without_scores(study, tmp_path, monkeypatch):
    """A vLLM that gives no logits: tokens are compared, the column says not recorded."""
    monkeypatch.setenv("PLANTED", "no scores")
    result = run_study(study, tmp_path / "study", executor=run_lanes)
    one = result.report.summary["reductions"]["local:32/32"]
    assert (one["changed"]["hits"], one["changed"]["trials"], one["logits"]) == (0, 10, None)
    page = "\n".join(result.report.lines)
    assert "| not recorded | not recorded |" in page
    assert "local:32/32: no token changed in 10 comparisons" in page


@pytest.mark.parametrize("command", ["repeat", "decide"])
def test_a_reduction_that_does_not_repeat_gives_exit_code_1(
    command, tmp_path, monkeypatch, run_main, stand_in
):
    """Typed as a user does, first in order and then with the fault."""
    (tmp_path / "t.csv").write_text("text,label\nTom has 3 apples.,0\nEve eats 4 eggs.,1\n")
    words = [command, *(["--csv", tmp_path / "t.csv"] if command == "decide" else [])]
    words += "--engine vllm --mode graphs --reduction local --repetitions 2 --prompts 2".split()
    words += ["--engine-python", stand_in, "--scratch", tmp_path / "s", "--quiet", "--json"]
    good = run_main(trace_study.main, *words, "--out", tmp_path / "good")
    monkeypatch.setenv("PLANTED", "varies")
    bad = run_main(trace_study.main, *words, "--out", tmp_path / "bad")
    assert (good.code, bad.code) == (0, 1), good.err + bad.err
    assert json.loads(bad.out)["complete"] is True


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        ("does not start", "engine .* did not start: PluginError: planted"),
        ("another kernel", "had to run local:32/32 and says"),
        ("fails", "planted failure"),
    ],
)
def test_an_engine_in_trouble_ends_the_sitting(study, tmp_path, monkeypatch, planted, message):
    """Finished rows are kept, and the same command ends with the rows of an unbroken run."""
    calm = dataclasses.replace(study, reductions=("vllm-own", "local"))
    monkeypatch.setenv("PLANTED", planted)
    with pytest.raises(EngineProcessError, match=message):
        run_study(calm, tmp_path / "study", executor=run_lanes)
    monkeypatch.setenv("PLANTED", "")
    assert run_study(calm, tmp_path / "study", executor=run_lanes).complete
    run_study(calm, tmp_path / "unbroken", executor=run_lanes)
    rows = (tmp_path / "study/rows.jsonl").read_bytes()
    assert rows == (tmp_path / "unbroken/rows.jsonl").read_bytes()


def test_rays_workers_give_the_same_rows(study, tmp_path):
    """Two workers, each with engines of its own."""
    pytest.importorskip("ray")
    from fliptrace.studies.ray_workers import ray_executor

    calm = dataclasses.replace(study, reductions=("vllm-own", "local"), repetitions=2)
    run_study(calm, tmp_path / "lanes", executor=run_lanes)
    run_study(calm, tmp_path / "ray", executor=ray_executor("local", 2))
    rows = (tmp_path / "ray/rows.jsonl").read_bytes()
    assert rows == (tmp_path / "lanes/rows.jsonl").read_bytes()


def test_the_report_is_written_elsewhere(study, tmp_path, run_main, stand_in, monkeypatch):
    """Rows copied to a machine without vLLM, GPU and that folder's paths: --budget-minutes 0 writes the page."""
    text = "".join(json.dumps({"prompt": f"Prompt {number}"}) + "\n" for number in range(4))
    for place in ("there", "here"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "prompts.jsonl").write_text(text)
    words = "repeat --engine vllm --reduction local --repetitions 2 --prompts 4 --quiet".split()
    words += ["--attention", "TRITON_ATTN", "--vllm-argument", "gpu_memory_utilization=0.2"]

    def arguments(place, model):
        folder = tmp_path / place
        named = ["--model", model, "--adapter", "an adapter", "--out", folder / "study"]
        return [*words, "--task", f"jsonl:{folder / 'prompts.jsonl'}", *named]

    monkeypatch.setattr(
        "fliptrace.studies.engine_process_reductions.adapter_rank", lambda adapter: 8
    )
    engines = ["--engine-python", stand_in, "--scratch", tmp_path / "s"]
    first = run_main(trace_study.main, *arguments("there", "a model"), *engines)
    assert first.code == 0, first.err
    there, here = (tmp_path / place / "study" for place in ("there", "here"))
    here.mkdir()
    for name in ("study.json", "rows.jsonl", "sittings.jsonl", "timings.jsonl"):
        shutil.copy(there / name, here / name)
    again = run_main(trace_study.main, *arguments("here", "nowhere"), "--budget-minutes", "0")
    assert again.code == 0, again.err
    assert (here / "table.md").read_text("utf-8") == (there / "table.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ModelSettings(engine="transformers")}, "'graphs' is vLLM's"),
        ({"engines": EngineSettings(mode="fast")}, "graphs, compiled, eager, in-process"),
        ({"batch_size": 0}, "got a batch size of 0"),
        (
            {"batch_size": 2, "engines": EngineSettings(mode="in-process")},
            "got a batch size of 2",
        ),
        (
            {"model": ModelSettings(engine="vllm", vllm_arguments={"enable_prefix_caching": True})},
            "leave --vllm-argument enable_prefix_caching out",
        ),
        (
            {"model": ModelSettings(engine="vllm", attention="eager")},
            "attention eager is transformers'",
        ),
    ],
)
def test_what_cannot_run_is_refused(study, change, message):
    """Before an engine starts."""
    with pytest.raises(InputError, match=message):
        dataclasses.replace(study, **change).items()


def test_the_engine_in_this_process_stays(study):
    """Other engines, and vLLM's on request or on a CPU; its rows' settings are those from before modes."""
    plain = RepeatStudy()
    assert not plain.in_processes
    assert not {"mode", "batch_size"} & set(plain.identity())
    asked = dataclasses.replace(study, engines=EngineSettings(mode="in-process"))
    assert not asked.in_processes
    on_cpu = dataclasses.replace(
        study, model=ModelSettings(engine="vllm", device="cpu"), engines=EngineSettings()
    )
    assert not on_cpu.in_processes
    assert on_cpu.identity()["mode"] == "auto"
    assert study.in_processes


def test_shares_by_hand():
    """Normalised over the two labels, also where both are improbable; the mass is their sum."""
    yes, no, mass = shares_of(-1.0, -1.0)
    assert (yes, no) == (0.5, 0.5)
    assert mass == pytest.approx(2 / 2.718281828459045)
    yes, no, mass = shares_of(-800.0, -801.0)
    assert yes == pytest.approx(0.7310585786300049)
    assert mass == 0.0


@pytest.mark.skipif(
    VLLM_PYTHON is None, reason="needs vLLM; FLIPTRACE_VLLM_PYTHON may name its Python"
)
def test_vllm_itself_says_what_the_stepped_engine_says(tmp_path, rows_of):
    """The same prompts, tokens, logits, margins and texts, eager; a decision is about that of transformers.

    On a CPU under vLLM's own shrink, on CUDA under a fixed order.
    """
    csv = tmp_path / "t.csv"
    csv.write_text("text,label\nTom has 3 apples.,0\n")
    common = ["--repetitions", "2", "--quiet"]
    own = ["--engine", "vllm", "--reduction", "vllm-own"]
    if torch.cuda.is_available():
        own[-1:] = ["deterministic:8", "--attention", "TRITON_ATTN"]
    repeat = ["repeat", "--select", "131", "36", "--max-new-tokens", "40", *common, *own]
    decide = ["decide", "--csv", str(csv), *common]
    served = ["--mode", "eager", "--cache-gib", "0.25"]
    served += ["--engine-python", str(VLLM_PYTHON)]
    # In the Python that has vLLM, as the stepped engine needs it in its own process.
    stepped = ["--mode", "in-process"]
    commands = {
        "served": [sys.executable, *repeat, *served, "--scratch", tmp_path / "one"],
        "stepped": [VLLM_PYTHON, *repeat, *stepped],
        "decided": [sys.executable, *decide, *own, *served, "--scratch", tmp_path / "two"],
        "read": [sys.executable, *decide, "--device", "cpu", "--reduction", "unsplit"],
    }
    running = {
        name: subprocess.Popen(
            [python, "-m", "fliptrace.command_line.trace_study", *words, "--out", tmp_path / name],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, (python, *words) in commands.items()
    }
    for name, process in running.items():
        _, said = process.communicate(timeout=280)
        assert process.returncode == 0, f"{name}: {said}"
    mine, theirs = rows_of(tmp_path / "served"), rows_of(tmp_path / "stepped")
    assert len(mine) == len(theirs) == 4
    assert {row["mode"] for row in mine} == {"eager"}
    for one, two in zip(mine, theirs, strict=True):
        same = {name: value for name, value in one.items() if name != "mode"}
        assert same == {name: value for name, value in two.items() if name != "mode"}
    (decided, *_), (read, *_) = rows_of(tmp_path / "decided"), rows_of(tmp_path / "read")
    assert decided["prompt_ids_sha256"] == read["prompt_ids_sha256"]
    # Both compute in BF16, in other orders.
    for name in ("yes", "no", "label_mass"):
        assert decided[name] == pytest.approx(read[name], rel=0.1)


def test_folders_here_take_no_packages_place(tmp_path):
    """An engine's process finds a package that is named like a folder in the working directory, such as a study's."""
    (tmp_path / "xxhash.py").write_text("raise RuntimeError('a file of the working directory')\n")
    variables = environment(tmp_path, "engine", "vllm-own")
    done = subprocess.run(
        [sys.executable, "-c", "import xxhash; print(xxhash.__file__)"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, str(tmp_path) in done.stdout) == (0, False), done.stderr
