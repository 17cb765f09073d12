"""The frame of studies: rows survive kills, are never run twice, and are those of an unbroken run."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from fliptrace.command_line import trace_study
from fliptrace.errors import InputError, StorageError, TraceReadError
from fliptrace.studies.items import Item, row_line
from fliptrace.studies.journal import Journal
from fliptrace.studies.results import row_schema, write_parquet
from fliptrace.studies.running import run_here, run_study
from fliptrace.studies.server_client import ServerRefusalError
from fliptrace.studies.study import Column, Table


@pytest.fixture(scope="module")
def unbroken(counting, tmp_path_factory):
    """The folder of a study that ran at once."""
    folder = tmp_path_factory.mktemp("unbroken") / "study"
    run_study(counting.CountingStudy(), folder)
    return folder


def test_a_study_leaves_rows_table_and_parquet(unbroken, undeclared):
    """All rows in order, a Markdown page, a summary, and Parquet whose columns say what they mean."""
    rows = [json.loads(line) for line in (unbroken / "rows.jsonl").read_text().splitlines()]
    assert [row["item"] for row in rows] == [f"number {number}" for number in range(12)]
    page = (unbroken / "table.md").read_text()
    assert "12 of 12 items" in page
    assert repr(sum(row["square"] for row in rows)) in page
    assert json.loads((unbroken / "summary.json").read_text())["complete"] is True
    assert undeclared(unbroken) == set()
    table = parquet.read_table(unbroken / "rows.parquet")
    assert table.column("square").to_pylist() == [row["square"] for row in rows]
    assert table.column("digits").to_pylist()[11] == [1, 1]
    assert table.schema.field("digits").metadata == {b"meaning": b"of the number"}


def test_a_cut_at_any_byte_is_mended(counting, unbroken, tmp_path):
    """Whatever a kill leaves of the last lines, resuming gives the bytes of the unbroken run."""
    whole = (unbroken / "rows.jsonl").read_bytes()
    folder = tmp_path / "study"
    for end in [*range(0, len(whole), 37), len(whole) - 1, whole.rfind(b"\n", 0, -1) + 1]:
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        (folder / "study.json").write_bytes((unbroken / "study.json").read_bytes())
        (folder / "rows.jsonl").write_bytes(whole[:end])
        finished = whole[:end].count(b"\n")
        result = run_study(counting.CountingStudy(), folder)
        assert result.new == 12 - finished
        assert (folder / "rows.jsonl").read_bytes() == whole


def test_ten_kills_and_the_rows_of_an_unbroken_run(counting, tmp_path):
    """SIGKILL at ten random points; what was finished stays, and at the end nothing differs."""
    draw = random.Random(7)
    folder = tmp_path / "study"
    command = [sys.executable, counting.__file__, str(folder)]
    rows = folder / "rows.jsonl"
    for _ in range(10):
        before = rows.read_bytes() if rows.exists() else b""
        process = subprocess.Popen(command)
        deadline = time.monotonic() + 60
        wanted = before.count(b"\n") + draw.choice((0, 1, 3, 5))
        while process.poll() is None and time.monotonic() < deadline:
            if rows.exists() and rows.read_bytes().count(b"\n") >= wanted:
                break
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.06))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        kept = rows.read_bytes() if rows.exists() else b""
        whole = before[: before.rfind(b"\n") + 1]
        assert kept.startswith(whole)
    subprocess.run(command, check=True)
    run_study(counting.CountingStudy(numbers=60), tmp_path / "unbroken")
    assert rows.read_bytes() == (tmp_path / "unbroken" / "rows.jsonl").read_bytes()


def test_finished_rows_are_not_run_again(counting, tmp_path):
    """A second sitting runs nothing and loads nothing; a larger study runs what is new."""
    folder = tmp_path / "study"
    run_study(counting.CountingStudy(numbers=3), folder)
    again = run_study(counting.CountingStudy(numbers=3), folder, executor=refuse)
    assert (again.new, again.done) == (0, 3)
    more = run_study(counting.CountingStudy(numbers=5), folder)
    assert (more.new, more.total) == (2, 5)
    ran = [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]
    assert [entry["sitting"] for entry in ran] == [1, 1, 1, 2, 2]


def refuse(study, items, go_on):
    raise AssertionError("nothing was to be run")
    yield


def first_alone(study, items, go_on):
    yield from run_here(study, items[:1], go_on)


def test_a_budget_ends_a_sitting_between_items(counting, tmp_path):
    """No item begins after the budget; the page says that the study is not finished, and the next sitting goes on."""
    folder = tmp_path / "study"
    study = counting.CountingStudy(numbers=6, pause=0.2)
    first = run_study(study, folder, budget_minutes=0.25 / 60)
    assert 0 < first.new < 6
    assert not first.complete
    assert "Not finished" in (folder / "table.md").read_text()
    while not run_study(study, folder, budget_minutes=0.25 / 60).complete:
        pass
    assert len((folder / "rows.jsonl").read_text().splitlines()) == 6
    with pytest.raises(InputError, match="budget"):
        run_study(study, folder, budget_minutes=-1)


def test_no_minutes_write_the_report_of_what_is_there(counting, tmp_path):
    """Nothing runs; where no study was begun, that is said and nothing is left behind."""
    study = counting.CountingStudy(numbers=2)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new" / "study", tmp_path / "empty"):
        with pytest.raises(InputError, match=f"{folder} holds none"):
            run_study(study, folder, budget_minutes=0)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]
    run_study(study, tmp_path / "begun", executor=first_alone)
    (tmp_path / "begun" / "table.md").unlink()
    result = run_study(study, tmp_path / "begun", budget_minutes=0, executor=refuse)
    assert (result.done, result.new) == (1, 0)
    assert "Not finished" in (tmp_path / "begun" / "table.md").read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [({"offset": 0.2}, ["offset", "0.1", "0.2"]), ({"adapter": "b"}, ["adapter.sha256", "'?b"])],
)
def test_another_study_is_refused(counting, tmp_path, change, words):
    """A folder goes on with the settings and the adapter that it was begun with, and says which differs."""
    folder = tmp_path / "study"
    run_study(counting.CountingStudy(numbers=2), folder)
    before = (folder / "rows.jsonl").read_bytes()
    study = dataclasses.replace(counting.CountingStudy(numbers=3), **change)
    with pytest.raises(InputError) as refused:
        run_study(study, folder)
    assert all(word.strip("'?") in str(refused.value) for word in words)
    assert (folder / "rows.jsonl").read_bytes() == before


def test_settings_of_a_folder_in_which_nothing_ran_may_change(counting, tmp_path):
    """A device that is not there, say, is corrected in the same folder; after the first worker that is refused."""
    folder = tmp_path / "study"
    study = counting.CountingStudy(numbers=2)
    run_study(study, folder, budget_minutes=1e-9)
    corrected = dataclasses.replace(study, offset=0.2)
    run_study(corrected, folder)
    with pytest.raises(InputError, match=r"begun with offset = 0\.2"):
        run_study(study, folder)


def test_an_item_that_changed_is_refused(counting, tmp_path):
    """A row that came of another prompt of the same name is not taken for this one's."""
    folder = tmp_path / "study"
    run_study(counting.CountingStudy(numbers=2), folder)

    class Changed(counting.CountingStudy):
        def items(self):
            return [Item("number 0", {"number": 5})]

    with pytest.raises(InputError, match="number 0"):
        run_study(Changed(), folder)


def test_a_stranger_folder_is_refused(counting, tmp_path):
    """A folder with other files is left as it is."""
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match=r"letter\.txt"):
        run_study(counting.CountingStudy(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("line", ["{", "[]", '{"item": "number 1"}', "{}"])
def test_damage_in_the_middle_is_named(counting, tmp_path, line):
    """A line that no kill can leave is refused by its number, never skipped."""
    folder = tmp_path / "study"
    run_study(counting.CountingStudy(numbers=3), folder)
    rows = folder / "rows.jsonl"
    lines = rows.read_text().splitlines()
    rows.write_text("\n".join([lines[0], line, lines[2]]) + "\n")
    with pytest.raises(TraceReadError, match="line 2"):
        run_study(counting.CountingStudy(numbers=3), folder)


def test_two_writers_are_refused(tmp_path):
    """A second process does not write to the same study; after the first is gone it may."""
    with Journal(tmp_path, {}), pytest.raises(InputError, match="another process"):
        Journal(tmp_path, {})
    with Journal(tmp_path, {}):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_keeps_what_was_there(counting, tmp_path):
    """The error names the file; rows before it are kept and the study goes on when there is room."""
    folder = tmp_path / "study"
    run_study(counting.CountingStudy(numbers=2), folder)
    kept = tmp_path / "kept"
    (folder / "rows.jsonl").rename(kept)
    with Journal(folder, counting.CountingStudy().identity()) as journal:
        (folder / "rows.jsonl").symlink_to("/dev/full")
        with pytest.raises(StorageError, match=r"rows\.jsonl"):
            journal.add({"item": "x", "key": "y"}, "here", 0.0)
    (folder / "rows.jsonl").unlink()
    kept.rename(folder / "rows.jsonl")
    assert run_study(counting.CountingStudy(numbers=3), folder).new == 1


def test_rows_of_workers_come_into_order(counting, unbroken, tmp_path):
    """Rows that arrive in any order give the bytes of a run in order."""

    def shuffled(study, items, go_on):
        items = list(items)
        random.Random(3).shuffle(items)
        return run_here(study, items, go_on)

    folder = tmp_path / "study"
    run_study(counting.CountingStudy(), folder, executor=shuffled)
    assert (folder / "rows.jsonl").read_bytes() == (unbroken / "rows.jsonl").read_bytes()


def test_a_row_against_its_schema(counting, undeclared, tmp_path):
    """Another type than the schema says fails; other keys are named; every kind of column can be written."""
    folder = tmp_path / "study"
    run_study(counting.CountingStudy(numbers=2), folder)
    rows = folder / "rows.jsonl"
    kept = rows.read_text()
    rows.write_text(kept.replace('"square":', '"cube":'))
    assert undeclared(folder) == {"cube"}
    rows.write_text(kept.replace("[0]", '["0"]'))
    with pytest.raises(jsonschema.ValidationError, match="is not valid under any"):
        undeclared(folder)
    values = {"string": "a", "int": 1, "float": 0.5, "bool": True, "strings": ["a"], "ints": [1]}
    values |= {"floats": [0.5], "int_lists": [[1], []], "numbers": {"p": 0.5}, "objects": [{}]}
    schema = row_schema("all", [Column(name, name, "a meaning") for name in values])
    for row in (values, dict.fromkeys(values)):
        jsonschema.validate({"item": "i", "key": "k", **row}, schema)
    del values["objects"]  # JSON alone
    columns = tuple(Column(name, name, "a meaning") for name in values)
    write_parquet(tmp_path / "all.parquet", Table("all", columns, [values, {}]))
    found = parquet.read_table(tmp_path / "all.parquet").to_pylist()
    assert found == [{**values, "numbers": [("p", 0.5)]}, dict.fromkeys(values)]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.dictionaries(
        st.text(max_size=4),
        st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.text(), st.none()),
        max_size=4,
    )
)
def test_lines_read_back_bit_for_bit(values):
    """A row is one line whatever is in it, and its floats come back with the same bits."""
    line = row_line(values)
    assert line.count("\n") == 1
    assert line.endswith("\n")
    assert repr(json.loads(line)) == repr(values)


def test_ray_gives_the_same_rows(counting, unbroken, tmp_path, monkeypatch):
    """Two local workers of Ray: the bytes of a run in one process, both named in the sittings."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'fliptrace[studies]')")
    from fliptrace.studies.ray_workers import ray_executor

    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, *sys.path]))
    folder = tmp_path / "study"
    executor = ray_executor("local", 2)
    result = run_study(counting.CountingStudy(pause=0.05), folder, executor=executor)
    assert result.complete
    assert (folder / "rows.jsonl").read_bytes() == (unbroken / "rows.jsonl").read_bytes()
    sittings = [json.loads(line) for line in (folder / "sittings.jsonl").read_text().splitlines()]
    assert [entry["worker"] for entry in sittings] == ["ray 0", "ray 1"]
    ran = [
        json.loads(line)["worker"] for line in (folder / "timings.jsonl").read_text().splitlines()
    ]
    assert set(ran) == {"ray 0", "ray 1"}


def test_what_a_worker_of_ray_refuses_is_said_as_it_is(run_main, tmp_path):
    """A model that is not there: the one line that it is without Ray, not Ray's traceback."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'fliptrace[studies]')")
    asked = ("repeat", "--model", tmp_path / "none", "--adapter", tmp_path / "none", "--quiet")
    plain = run_main(trace_study.main, *asked, "--out", tmp_path / "here")
    result = run_main(trace_study.main, *asked, "--ray", "--out", tmp_path / "ray")
    assert (plain.code, result.code, result.err) == (2, 2, plain.err)
    assert plain.err.count("\n") == 1


def test_a_cluster_that_is_not_there_is_refused_at_once(run_main, tmp_path):
    """Nobody listens at the address: one line within seconds, where Ray would wait for minutes."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'fliptrace[studies]')")
    begin = time.monotonic()
    asked = ("repeat", "--ray", "127.0.0.1:9", "--quiet", "--out", tmp_path / "study")
    result = run_main(trace_study.main, *asked)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "Ray at '127.0.0.1:9' cannot be reached" in result.err
    assert time.monotonic() - begin < 15


def test_errors_travel_between_processes():
    """What a worker refuses comes back whole: a server's code, too."""
    error = pickle.loads(pickle.dumps(ServerRefusalError(404, "no such model")))
    assert (type(error), error.status, str(error)) == (ServerRefusalError, 404, "no such model")


def test_ctrl_c_keeps_finished_rows(run_main, undeclared, tmp_path):
    """SIGINT while the bundled model generates: one line, exit 130; a report is then written from what is there."""
    folder = tmp_path / "study"
    words = f"repeat --device cpu --select 36 31 --repetitions 40 --quiet --out {folder}".split()
    process = subprocess.Popen(
        [sys.executable, "-m", "fliptrace.command_line.trace_study", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        # A job that a shell runs in the background ignores SIGINT, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    rows = folder / "rows.jsonl"
    deadline = time.monotonic() + 60
    while not rows.exists() or rows.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count("\n")) == (130, "", 1), err
    assert "finished rows are kept" in err
    kept = rows.read_bytes()
    report = run_main(trace_study.main, *words, "--budget-minutes", 0, "--json")
    assert (report.code, json.loads(report.out)["complete"]) == (0, False)
    assert json.loads(report.out)["finished"] == kept.count(b"\n") >= 3
    assert rows.read_bytes() == kept
    assert undeclared(folder) == set()
