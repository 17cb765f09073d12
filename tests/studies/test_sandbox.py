"""The sandbox: hostile programs as whoever runs the tests (root, in CI), the probe, and MBPP's programs in it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fliptrace.errors import InputError
from fliptrace.studies.programs import (
    ProgramJudge,
    mbpp_prompt,
    program_digest,
    program_of,
    with_tests,
)
from fliptrace.studies.sandbox import Limits, Status, cgroup, open_sandbox
from fliptrace.studies.sandbox.bubblewrap import Bubblewrap
from fliptrace.studies.sandbox.cgroup import Group
from fliptrace.studies.sandbox.opening import BACKENDS
from fliptrace.studies.sandbox.probe import probe
from fliptrace.studies.tasks import Selection, read_questions

LIMITS = Limits(seconds=1.5, memory_bytes=128 * 2**20)
#: All others end by themselves, so that no limit of time explains their failure. Under Docker a container's own init
#: can be traced, which then never ends.
ENDLESS = {
    "a million files",
    "endless loop",
    "fork bomb",
    "ignoring signals",
    "memory in many processes",
    "threads",
    "tracing the parent",
}


@pytest.fixture(scope="module")
def sandbox():
    """The sandbox that works here; a test is skipped, with each backend's reason, where none does."""
    try:
        return open_sandbox(Limits())
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def bubblewrap():
    """Bubblewrap, where it works."""
    try:
        return open_sandbox(Limits(), "bubblewrap")
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def hostile(load_neighbour):
    """Programs that attack."""
    return load_neighbour(Path(__file__).parent / "hostile_programs.py").PROGRAMS


def groups():
    """Control groups of this process's sandboxes."""
    return [
        path
        for root, folders, _ in os.walk("/sys/fs/cgroup")
        for path in (Path(root) / name for name in folders)
        if path.name.startswith(f"fliptrace-{os.getpid()}-")
    ]


@pytest.fixture
def victim():
    """A process of this machine that programs would like to kill."""
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(300)"])
    yield process
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_hostile_programs_are_contained_and_fail(sandbox, hostile, victim, tmp_path, monkeypatch):
    """Each attack fails within its limits, nothing of this machine is touched, and nothing is left behind."""
    monkeypatch.setenv("FLIPTRACE_TEST_SECRET", "not for programs")
    assert len(hostile) >= 20
    secret, canary = tmp_path / "secret", tmp_path / "canary"
    secret.write_text("not for programs")
    canary.write_text("unchanged")
    tmp_path.chmod(0o755)
    canary.chmod(0o666)
    outcomes = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        known = {
            "VICTIM": str(victim.pid),
            "PORT": str(server.getsockname()[1]),
            "SECRET": repr(str(secret)),
            "CANARY": repr(str(canary)),
            "PREFIX": repr(sys.base_prefix),
        }
        for name, program in hostile.items():
            filled = program
            for word, value in known.items():
                filled = filled.replace(word, value if name != "the environment" else word)
            begin = time.monotonic()
            limits = LIMITS if name in ENDLESS else replace(LIMITS, seconds=10.0)
            outcomes[name] = sandbox.run(filled, limits)
            assert time.monotonic() - begin < limits.seconds + 5, name
            assert victim.poll() is None, name
    passed = [name for name, outcome in outcomes.items() if outcome.status is Status.PASSED]
    assert not passed, passed
    slow = {name for name, outcome in outcomes.items() if outcome.status is Status.TIME}
    assert slow <= ENDLESS, {name: outcomes[name].output[-300:] for name in slow - ENDLESS}
    assert {name for name, o in outcomes.items() if o.status is Status.OUTPUT} == {
        "output flood",
        "error flood",
    }
    assert all(len(outcome.output) <= LIMITS.output_bytes for outcome in outcomes.values())
    syntax = [name for name, outcome in outcomes.items() if "SyntaxError" in outcome.output]
    assert not syntax, syntax
    assert canary.read_text() == "unchanged"
    assert not Path("/usr/became-root").exists()
    assert not groups()
    assert sandbox.run("assert 1 + 1 == 2\n", Limits()).status is Status.PASSED


def without(*words):
    """Return a class of bubblewrap sandboxes whose command lacks an option and as many of its values."""

    class Weak(Bubblewrap):
        def _command(self, limits):
            command, skip = list(super()._command(limits)), 0
            for position, word in enumerate(command):
                if word == words[0]:
                    skip = len(words)
                if skip:
                    skip -= 1
                    continue
                yield command[position]

    return Weak


@pytest.mark.parametrize(
    ("weak", "message"),
    [
        (without("--unshare-net"), "network"),
        (without("--size", ""), "size of all files"),
    ],
)
def test_the_probe_refuses_a_sandbox_with_a_hole(bubblewrap, weak, message):
    """Each protection that is left out is found by the probe; with it the same backend passes."""
    with pytest.raises(InputError, match=message):
        probe(weak(), Limits())


def test_the_probe_refuses_a_sandbox_that_shows_files(bubblewrap, tmp_path, monkeypatch):
    """A folder of this machine that is mounted inside is found out."""

    class Open(Bubblewrap):
        def _command(self, limits):
            command = list(super()._command(limits))
            at = command.index("--remount-ro")
            folders = [
                word
                for folder in reversed(tmp_path.parents[:-1])
                for word in ("--dir", str(folder))
            ]
            shown = (*folders, "--ro-bind", str(tmp_path), str(tmp_path))
            return [*command[:at], *shown, *command[at:]]

    tmp_path.chmod(0o755)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(InputError, match="a file of this machine got"):
        probe(Open(), Limits())


@pytest.mark.parametrize(
    ("setting", "message"), [("memory_bytes", "memory got"), ("processes", "processes got")]
)
def test_the_probe_refuses_a_group_without_a_limit(bubblewrap, monkeypatch, setting, message):
    """A control group that does not limit memory or processes is found out."""
    make = Group.__init__
    monkeypatch.setattr(
        Group,
        "__init__",
        lambda self, found, limits: make(
            self, found, replace(limits, **{setting: 50 * getattr(limits, setting)})
        ),
    )
    with pytest.raises(InputError, match=message):
        probe(Bubblewrap(), Limits())


def test_no_backend_is_a_refusal_with_reasons(monkeypatch):
    """Where nothing works the message names every backend and its reason; nothing runs unprotected."""
    monkeypatch.setenv("PATH", "/nowhere")
    open_sandbox.cache_clear()
    try:
        with pytest.raises(InputError) as refused:
            open_sandbox(Limits())
    finally:
        open_sandbox.cache_clear()
    for name in BACKENDS:
        assert f"{name}: " in str(refused.value)
    assert "--run-programs" in str(refused.value)
    with pytest.raises(InputError, match="one of docker, podman, bubblewrap"):
        open_sandbox(Limits(), "chroot")
    open_sandbox.cache_clear()


def test_verdicts_on_programs(sandbox):
    """Right passes; wrong, raising, endless and unfinished programs do not; the last line must be reached."""
    row = {
        "text": "Add.",
        "test_list": ["assert add(2, 3) == 5"],
        "test_setup_code": "base = add(0, 0)",
    }
    judge = ProgramJudge(sandbox, Limits(seconds=4.0))
    right = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nThat is it."
    found = judge.judge(right, row)
    assert found == (program_digest("def add(a, b):\n    return a + b\n"), True, "passed")
    assert judge.judge("def add(a, b):\n    return a - b\n", row)[1:] == (False, "failed")
    assert judge.judge("no program", row)[1:] == (False, "failed")
    assert judge.judge("def add(a, b):\n    exit(0)\n", row)[1:] == (False, "failed")
    assert judge.judge("def add(a, b):\n    while True: pass\n", row)[1:] == (False, "time limit")
    assert ProgramJudge(None).judge(right, row) == (found[0], None, None)


def test_the_program_in_an_answer():
    """The first block that defines something; an open block ends with the text; without blocks all of it."""
    assert (
        program_of("```\nx = 1\n```\n```python\ndef f():\n    pass\n```") == "def f():\n    pass\n"
    )
    assert program_of("```python\r\nx = 1\r\n```\nand\n```\ny\n```") == "x = 1\n"
    assert program_of("Here\n```python\ndef f():\n    return 1") == "def f():\n    return 1\n"
    assert program_of("def f(): pass") == "def f(): pass\n"


def test_mbpp_rows_become_prompts_of_the_test_split(tmp_path):
    """Only task 11 to 510 are asked; prompts hold task, setup and tests, never the reference program."""
    rows = [
        {
            "task_id": number,
            "text": f"Task {number}.",
            "code": "SECRET",
            "test_setup_code": "s = 1" if number == 11 else "",
            "test_list": [f"assert f({number})", "assert f(0)"],
        }
        for number in (10, 11, 510, 511)
    ]
    path = tmp_path / "mbpp.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    questions = read_questions(f"mbpp:{path}", Selection(("0-1",)))
    assert [question.row["task_id"] for question in questions] == [11, 510]
    assert all("SECRET" not in question.text for question in questions)
    assert "s = 1" in questions[0].text
    assert "assert f(11)\nassert f(0)" in questions[0].text
    assert questions[0].text == mbpp_prompt(rows[1])
    assert with_tests("code", rows[1]).index("s = 1") < with_tests("code", rows[1]).index("assert")
    with pytest.raises(InputError, match="has 2 rows"):
        read_questions(f"mbpp:{path}", Selection(("2",)))
    path.write_text("[1]\n")
    with pytest.raises(InputError, match="no file of MBPP rows"):
        read_questions(f"mbpp:{path}", Selection(("0",)))


def test_programs_of_the_bundled_model_are_run_when_asked_for(sandbox, run_main, rows_of, tmp_path):
    """MBPP through trace-study repeat: without --run-programs nothing runs; with it each row says what became of it."""
    from fliptrace.command_line import trace_study

    path = tmp_path / "mbpp.jsonl"
    row = {"task_id": 11, "text": "Add.", "code": "", "test_list": ["assert add(1, 2) == 3"]}
    path.write_text(json.dumps(row))
    command = [
        *(
            "repeat",
            "--task",
            f"mbpp:{path}",
            "--prompts",
            1,
            "--repetitions",
            2,
            "--device",
            "cpu",
        ),
        *("--reduction", "unsplit", "--max-new-tokens", 8, "--quiet"),
    ]
    for more, outcomes in (((), {(None, None)}), (("--run-programs",), {("failed", False)})):
        out = tmp_path / f"study{len(more)}"
        result = run_main(trace_study.main, *command, *more, "--out", out)
        assert result.code == 0, result.err
        rows = rows_of(out)
        assert {(row["outcome"], row["correct"]) for row in rows} == outcomes
        assert {row["answer"] for row in rows} == {program_digest(program_of(rows[0]["text"]))}
        page = (out / "table.md").read_text()
        assert ("none was run (--run-programs)" in page) is not bool(more)
    sitting = json.loads((tmp_path / "study1" / "sittings.jsonl").read_text())
    assert sitting["description"]["programs"]["backend"] == sandbox.name
    refused = run_main(
        trace_study.main, "repeat", "--run-programs", "--device", "cpu", "--out", tmp_path / "x"
    )
    assert (refused.code, "--task mbpp:PATH" in refused.err) == (2, True)


def test_the_second_version_of_control_groups(tmp_path, monkeypatch):
    """The nearest group upwards that passes memory and pids on is taken, and a new one in it gets every limit.

    Plain folders stand for the kernel's, as a machine has one version: what is tested is which files get which values.
    """
    scope = tmp_path / "user.slice" / "session.scope"
    scope.mkdir(parents=True)
    for folder, given in (
        (tmp_path, "cpu memory pids"),
        (scope.parent, "memory pids"),
        (scope, ""),
    ):
        (folder / "cgroup.subtree_control").write_text(given)
    monkeypatch.setattr(cgroup, "_mounts", lambda: {"": tmp_path})
    monkeypatch.setattr(cgroup, "_own_groups", lambda: {"": "/user.slice/session.scope"})
    found = cgroup.find_hierarchies()
    assert (found.version, found.parents) == (2, {"": scope.parent})
    make = Path.mkdir

    def with_files(folder, *arguments, **options):
        make(folder, *arguments, **options)
        for name in ("memory.swap.max", "cpu.max"):
            (folder / name).write_text("max")

    monkeypatch.setattr(Path, "mkdir", with_files)
    group = Group(found, Limits(cpus=0.5))
    (folder,) = group.folders
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert written == {
        "memory.max": str(256 * 2**20),
        "memory.swap.max": "0",
        "pids.max": "32",
        "cpu.max": "50000 100000",
    }
    assert group.entrances == [str(folder / "cgroup.procs")]
    for given in (tmp_path, scope.parent):
        (given / "cgroup.subtree_control").write_text("cpu")
    with pytest.raises(InputError, match="passes memory and pids on"):
        cgroup.find_hierarchies()
