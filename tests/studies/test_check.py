"""trace-check and assert_repeatable: verdicts, golden digests, exit codes, the pytest plugin."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pyarrow import parquet

import fliptrace as ft
from fliptrace.command_line import trace_check
from fliptrace.errors import InputError, RecordingError
from fliptrace.pair.recording import set_reduction
from fliptrace.studies import engines
from fliptrace.studies.engines import describe_engine
from fliptrace.studies.repeatability import PromptRuns, Run, run_rounds

SHORT = "--demo --runs 2 --max-new-tokens 24 --quiet".split()


@pytest.fixture(scope="module")
def engine():
    """The bundled model on the CPU."""
    bundled = ft.bundled_model()
    return ft.load_engine(bundled.model, bundled.adapter, device="cpu")


@pytest.fixture(scope="module")
def flipping_prompt():
    """A bundled problem whose tokens change under atomic:8 within 20 steps, at schedule seeds 0 and 1."""
    return ft.bundled_model().prompts[36].text


def test_a_flip_and_its_bits():
    """The first other token, an end included; bits count up to the flip, whose logits have the same prefix."""
    first = Run((1, 2, 3), ("a", "b", "c"))
    assert Run((1, 2, 3), ("a", "b", "c")).flip_from(first) is None
    assert Run((1, 9, 3), ("a", "b", "z")).flip_from(first) == 1
    assert Run((1, 2), ("a", "b")).flip_from(first) == 2
    assert Run((1, 9, 3), ("a", "b", "z")).bits_from(first) is None
    assert Run((1, 9, 3), ("a", "x", "z")).bits_from(first) == 1
    assert Run((1, 2, 3), ("a", "b", "z")).bits_from(first) == 2


def test_tokens_are_compared_up_to_the_flip():
    """Exposure: all tokens of a run that repeats, and those up to the flip of one that does not."""
    prompt = PromptRuns("p", runs=[Run((1, 2, 3)), Run((1, 2, 3)), Run((1, 9, 9))])
    assert (prompt.flips, prompt.compared_tokens) == ([1], 5)


def test_rounds_end_with_the_time():
    """Two rounds always run; a third only if it would end in time."""
    prompts = [PromptRuns("p")]
    assert run_rounds(prompts, lambda position, number: Run((1,)), rounds=9, seconds=0.0) == 2
    assert len(prompts[0].runs) == 2
    with pytest.raises(InputError, match="at least 2"):
        run_rounds(prompts, lambda position, number: Run((1,)), rounds=1)


def test_atomics_fail_and_a_fixed_order_passes(run_main):
    """The same stack: exit 1 with simulated atomics, exit 0 with deterministic:8."""
    atomic = run_main(trace_check.main, *SHORT)
    assert atomic.code == 1
    assert "affected" in atomic.out
    assert "simulated" in atomic.out
    assert "kernel in use: atomic:8/32 torch specification" in atomic.out
    fixed = run_main(trace_check.main, *SHORT, "--reduction", "deterministic:8", "--json")
    found = json.loads(fixed.out)
    assert (fixed.code, found["passed"], found["flips"]) == (0, True, 0)
    assert found["flips_per_1000_tokens_at_most"] == pytest.approx(
        2995.73 / found["tokens_compared"], rel=1e-4
    )
    assert found["prompts_any_bit"]["interval"]["high"] == pytest.approx(1 - 0.05 ** (1 / 6))


def test_golden_digests(run_main, tmp_path):
    """Saved digests are found again; changed ones are named with exit 1; another question is refused with exit 2."""
    golden = tmp_path / "golden.json"
    fixed = [*SHORT, "--reduction", "deterministic:8", "--prompt", "Tom has 3 apples. How many?"]
    assert run_main(trace_check.main, *fixed, "--save", golden).code == 0
    again = run_main(trace_check.main, *fixed, "--against", golden)
    assert (again.code, "golden digests: equal" in again.out) == (0, True)

    document = json.loads(golden.read_text())
    document["prompts"][0]["logits"] = "0" * 32
    document["manifest"]["environment"]["versions"]["torch"] = "1.0"
    golden.write_text(json.dumps(document))
    changed = run_main(trace_check.main, *fixed, "--against", golden)
    assert changed.code == 1
    assert "other bits in logits" in changed.out
    assert "environment.versions.torch was 1.0" in changed.out

    other = [*SHORT, "--reduction", "unsplit", "--prompt", "Tom has 3 apples. How many?"]
    refused = run_main(trace_check.main, *other, "--against", golden)
    assert (refused.code, "another reduction" in refused.err) == (2, True)
    other = [*fixed[:-1], "Eve has 3 apples. How many?"]
    refused = run_main(trace_check.main, *other, "--against", golden)
    assert (refused.code, "is of other prompts;" in refused.err) == (2, True)


def test_what_did_not_repeat_is_not_saved(run_main, tmp_path, flipping_prompt):
    """No golden file of runs that changed; the answer comes all the same, the way out is named, and exit 0 never is."""
    golden = tmp_path / "golden.json"
    asked = [*SHORT, "--prompt", flipping_prompt, "--save", golden]
    result = run_main(trace_check.main, *asked)
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "affected" in result.out
    assert "deterministic:8" in result.err
    assert not golden.exists()
    # Bits of logits alone: that passes --fail-on token, and is still nothing to save.
    short = run_main(trace_check.main, *asked, "--max-new-tokens", 4, "--fail-on", "token")
    assert (short.code, "passed" in short.out, golden.exists()) == (2, True, False), short


def test_a_golden_file_that_cannot_be_made_is_said_at_once(run_main, tmp_path):
    """Before a model is loaded: its folder is not there, or its name is a folder's."""
    for path in (tmp_path / "nowhere/golden.json", tmp_path):
        result = run_main(trace_check.main, "--model", "none", "--adapter", "none", "--save", path)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert f"golden file {path} cannot be written" in result.err


def test_a_folder_of_a_check(run_main, rows_of, undeclared, tmp_path, flipping_prompt):
    """A row per prompt and run in JSON lines and Parquet, table, figure and summary; a folder in use is refused."""
    folder = tmp_path / "check"
    asked = [*SHORT, "--runs", 5, "--max-new-tokens", 40, "--out", folder]
    asked += ["--prompt", flipping_prompt, "--prompt", "Tom has 3 apples."]
    result = run_main(trace_check.main, *asked, "--json")
    found = json.loads(result.out)
    assert (result.code, found) == (1, json.loads((folder / "summary.json").read_text()))
    rows = rows_of(folder)
    assert undeclared(folder) == set()
    assert [(row["prompt"], row["run"]) for row in rows] == [
        (f"prompt {number}", run) for number in range(2) for run in range(found["rounds"])
    ]
    flips = [row["flip"] for row in rows if row["flip"] is not None]
    assert flips == [step for each in found["prompts"] for step in each["flips_at"]]
    assert len(flips) == found["flips"] > 0
    changed = [row for row in rows if row["changed_bits"] is not None]
    assert len(changed) == found["runs_with_changed_bits"]
    assert parquet.read_table(folder / "rows.parquet").to_pylist() == rows
    page = (folder / "table.md").read_text()
    assert "- affected:" in page
    assert "| prompt 1 | " in page
    assert "plotly" in (folder / "figure.html").read_text()
    again = run_main(trace_check.main, *asked)
    assert (again.code, again.out, again.err.count("\n")) == (2, "", 1)
    assert "must be new or empty" in again.err
    (tmp_path / "file").write_text("")
    wrong = run_main(trace_check.main, *SHORT, "--out", tmp_path / "file")
    assert (wrong.code, "cannot be used" in wrong.err) == (2, True)
    none = run_main(trace_check.main, *SHORT, "--reduction", "bogus", "--out", tmp_path / "none")
    assert (none.code, (tmp_path / "none").exists()) == (2, False)


class Stack:
    """An engine of which something is not as it says."""

    def __init__(self, engine, **changed):
        self.__dict__.update(engine=engine, **changed)

    def __getattr__(self, name):
        return getattr(self.engine, name)


def test_another_kernel_than_was_asked_for_is_refused(engine, monkeypatch):
    """Every LoRA layer must launch the reduction of the name, whatever the engine says of itself."""
    before = engine.describe()["reduction"]["identity"]
    names = ("atomic:vllm", "deterministic:8", "tree:4")
    assert describe_engine(engine, names)["kernels"]["tree:4/32"].startswith("tree:4/32")
    with pytest.raises(RecordingError, match=r"every LoRA layer .*; 1 of 57 did not"):
        describe_engine(Stack(engine, sites=(*engine.sites, engine.sites[0])), ("unsplit",))
    monkeypatch.setattr(
        engines, "set_reduction", lambda stack, *_: set_reduction(stack, "unsplit", 0)
    )
    assert describe_engine(engine, ("unsplit",))["kernels"]
    for name in ("deterministic:8", "atomic:vllm"):
        with pytest.raises(RecordingError, match=f"had to run as {name}.* and ran as unsplit/64"):
            describe_engine(engine, (name,))
    engine.set_reduction(before)


def test_options_from_a_file(run_main, tmp_path):
    """The table [check] is trace-check's; a table of a study is passed over, one of nobody's name is refused."""
    path = tmp_path / "fliptrace.toml"
    path.write_text(
        "quiet = true\n[repeat]\nrepetitions = 3\n[check]\ndemo = true\nruns = 9\n"
        'max-new-tokens = 2\nreduction = "unsplit"\njson = true\n'
    )
    result = run_main(trace_check.main, "--config", path, "--runs", 2)
    found = json.loads(result.out)
    assert (result.code, found["rounds"], found["reduction"]) == (0, 2, "unsplit/64")
    for text, words in (("[chekc]\nruns = 2\n", "'chekc'"), ("check = 3\n", "'check'")):
        path.write_text(text)
        result = run_main(trace_check.main, "--config", path)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert words in result.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--model", "--demo"]),
        (["--demo", "--model", "x"], ["--demo"]),
        (["--model", "x"], ["--adapter"]),
        (["--demo", "--fail-on", "mood"], ["mood", "token"]),
        (["--demo", "--runs", "1"], ["at least 2"]),
        (["--demo", "--against", "/nowhere.json"], ["/nowhere.json", "No such file", "--save"]),
        (["--demo", "--reduction", "sometimes"], ["sometimes"]),
    ],
)
def test_trouble_is_one_line(run_main, arguments, words):
    """Exit code 2, one line on stderr, nothing on stdout."""
    result = run_main(trace_check.main, *arguments)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert all(word in result.err for word in words), result.err


def test_assert_repeatable_on_an_engine(engine, flipping_prompt):
    """It fails on simulated atomics, naming prompt, run and token, passes on a fixed order, and restores the engine."""
    engine.set_reduction("tree:8")
    with pytest.raises(AssertionError, match=r"prompt 0 is not repeatable.*run [23]"):
        ft.assert_repeatable(engine, [flipping_prompt], max_new_tokens=20, reduction="atomic:8")
    assert engine.describe()["reduction"]["identity"].startswith("tree:8")
    ft.assert_repeatable(engine, [flipping_prompt], runs=2, max_new_tokens=20)
    with pytest.raises(InputError, match="lora_request"):
        ft.assert_repeatable(engine, [flipping_prompt], lora_request=1)


def test_assert_repeatable_on_a_function():
    """A function of the prompts: equal lists pass, another token fails, a list too few is refused."""
    calls = []

    def stable(prompts):
        return [[len(prompt), 7] for prompt in prompts]

    def unstable(prompts):
        calls.append(prompts)
        return [[1, 2, 3 + (len(calls) == 3)] for _ in prompts]

    ft.assert_repeatable(stable, ["a", "bc"])
    with pytest.raises(AssertionError, match=r"prompt 0 .* run 3 .* generated token 3 \(\[3\]"):
        ft.assert_repeatable(unstable, ["a", "b"])
    with pytest.raises(InputError, match="got 1 for 2"):
        ft.assert_repeatable(lambda prompts: [[1]], ["a", "b"])
    with pytest.raises(InputError, match="int"):
        ft.assert_repeatable(5, ["a"])
    with pytest.raises(InputError, match="FLIPTRACE_SHRINK"):
        ft.assert_repeatable(stable, ["a"], reduction="unsplit")
    with pytest.raises(InputError, match=r"one text: \['abc'\]"):
        ft.assert_repeatable(stable, "abc")
    with pytest.raises(InputError, match="nothing was compared"):
        ft.assert_repeatable(lambda prompts: [[] for _ in prompts], ["a", "b"])


def test_the_plugin_gives_the_fixture_and_is_light(tmp_path):
    """A test file of a user's own: the fixture fails and passes; without a use nothing heavy is loaded."""
    (tmp_path / "test_own.py").write_text(
        "import sys\n"
        "def test_light():\n    assert 'torch' not in sys.modules and 'scipy' not in sys.modules\n"
        "def test_good(assert_repeatable):\n    assert_repeatable(lambda prompts: [[1]], ['a'])\n"
        "def test_bad(assert_repeatable):\n"
        "    rounds = iter(range(9))\n"
        "    assert_repeatable(lambda prompts: [[next(rounds)]], ['a'])\n"
    )
    plugin = "fliptrace.studies.pytest_plugin"
    installed = (
        "import importlib.metadata as m; print([e.value for e in m.entry_points(group='pytest11')])"
    )
    names = subprocess.run(
        [sys.executable, "-c", installed], capture_output=True, text=True, check=True
    )
    extra = [] if plugin in names.stdout else ["-p", plugin]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *extra,
        "test_own.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "not repeatable" in done.stdout
