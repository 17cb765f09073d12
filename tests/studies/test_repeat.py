"""trace-study repeat: comparisons by hand, tasks and answers, and the bundled model end to end."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fliptrace.command_line import trace_study
from fliptrace.errors import InputError
from fliptrace.studies import RepeatStudy
from fliptrace.studies.answers import final_answer, prepared_solution
from fliptrace.studies.repeat import compare_rows, comparisons_of, first_divergence
from fliptrace.studies.tasks import Selection, load_scorer, read_questions, score


def row(tokens, logits, *, repetition=0, answer=None, correct=None, prompt="p"):
    return {
        "reduction": "atomic:8/32",
        "prompt": prompt,
        "repetition": repetition,
        "token_ids": tokens,
        "selected_logits": logits,
        "answer": answer,
        "correct": correct,
    }


def test_logits_count_up_to_the_first_other_token():
    """Positions of the matching prefix; the first divergent one and what follows are left out."""
    first = row([5, 6, 7, 8], [1.0, 2.0, 3.0, 4.0], answer="7", correct=True)
    other = row([5, 6, 9, 8], [1.0, 2.5, 9.0, 9.0], repetition=1, answer="8", correct=False)
    found = compare_rows(first, other)
    assert (found.changed, found.first_divergence, found.positions) == (True, 2, 2)
    assert (found.logits_differing, found.logits_sum, found.logits_largest) == (1, 0.5, 0.5)
    assert (found.answer_changed, found.before, found.after) == (True, True, False)


def test_equal_rows_differ_in_nothing():
    """All positions count, and none differs."""
    found = compare_rows(row([5, 6], [1.0, 2.0]), row([5, 6], [1.0, 2.0], repetition=1))
    assert (found.changed, found.first_divergence, found.positions) == (False, None, 2)
    assert (found.logits_differing, found.answer_changed) == (0, None)


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_first_divergence_is_the_first(before, after):
    """Everything before it is equal, and it is not; the end of one sequence counts."""
    step = first_divergence(before, after)
    if step is None:
        assert before == after
    else:
        assert before[:step] == after[:step]
        assert before[step : step + 1] != after[step : step + 1]


def test_comparisons_wait_for_repetition_0():
    """A repetition whose repetition 0 has not run is compared with nothing."""
    rows = [
        row([1], [1.0], repetition=1, prompt="q"),
        row([1], [1.0]),
        row([2], [1.0], repetition=2),
    ]
    assert [(each.prompt, each.repetition) for each in comparisons_of(rows)] == [("p", 2)]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Final answer: 18", "18"),
        ("Final answer: 3\nno, wait.\nfinal answer: $1,200.50.", "2401/2"),
        ("**Final answer:** **-7** apples", "-7"),
        ("Final answer: 6.0", "6"),
        ("Final answer: 1/2", "1/2"),
        ("Final answer: 1/0", None),
        ("Final answer: unknown, 5 perhaps", None),
        ("Final answer:", None),
        ("The answer is 18", None),
        ("#### 18", None),
        ("", None),
    ],
)
def test_final_answers(text, answer):
    """The last marked number, exactly; what is missing or no number is none."""
    assert final_answer(text) == answer


def test_gsm8k_is_prepared_as_in_the_paper(tmp_path):
    """Annotations go, the delimiter becomes Final answer:, the prompt is question and instruction."""
    solution = "She sells 16 - 7 = <<16-7=9>>9.\nThat is 9 * 2 = $<<9*2=18>>18.\n#### 1,018"
    assert prepared_solution(solution) == (
        "She sells 16 - 7 = 9.\nThat is 9 * 2 = $18.\nFinal answer: 1,018"
    )
    file = tmp_path / "set.jsonl"
    file.write_text(json.dumps({"question": "How much?", "answer": solution}) + "\n")
    (question,) = read_questions(f"gsm8k:{file}", Selection(("0",)))
    assert question.gold == "1018"
    assert question.text.startswith("How much?\n\n")
    assert "Final answer: N" in question.text
    assert score("Final answer: 1018.0", question.gold, {}, None) == ("1018", True)
    assert score("It is 1018", question.gold, {}, None) == (None, False)


def test_more_prompts_add_to_those_drawn_before():
    """A draw of ten begins with the draw of four; another seed draws others."""
    assert Selection(count=10).of(100)[:4] == Selection(count=4).of(100)
    assert Selection(count=10).of(100) != Selection(count=10, seed=1).of(100)
    assert sorted(Selection().of(5)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"rows": ("7",)}, "row 7"),
        ({"rows": ("1", "0-2")}, "twice"),
        ({"count": 9}, "5 rows"),
        ({"count": 0}, "at least 1"),
        ({"seed": -1}, "at least 0"),
        ({"rows": ("x",)}, "numbers"),
    ],
)
def test_impossible_selections_are_refused(chosen, words):
    """The message says what there is."""
    with pytest.raises(InputError, match=words):
        Selection(**chosen).of(5)


def test_scorers(tmp_path, monkeypatch):
    """A function of one's own scores; what is no scorer, and what fails, is refused by name."""
    (tmp_path / "own_scorer.py").write_text(
        "def length(text, row): return (str(len(text)), len(text) == row['n'])\n"
        "def broken(text, row): return row['missing']\n"
        "def odd(text, row): return 'yes'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    assert score("abc", None, {"n": 3}, load_scorer("own_scorer:length")) == ("3", True)
    for name in ("broken", "odd"):
        with pytest.raises(InputError, match="scorer"):
            score("abc", None, {}, load_scorer(f"own_scorer:{name}"))
    (tmp_path / "failing_scorer.py").write_text("raise RuntimeError('on import')\n")
    for name in ("own_scorer", "own_scorer:none", "no_module:f", "failing_scorer:f"):
        with pytest.raises(InputError, match="scorer"):
            load_scorer(name)
    # Rows of an edited scorer do not mix with those before; a study without one is as it was.
    before = RepeatStudy(scorer="own_scorer:length").identity()
    with (tmp_path / "own_scorer.py").open("a") as file:
        file.write("# edited\n")
    after = RepeatStudy(scorer="own_scorer:length").identity()
    assert {name for name in before if before[name] != after[name]} == {"scorer_sha256"}
    assert len(after["scorer_sha256"]) == 64
    assert "scorer_sha256" not in RepeatStudy().identity()


def test_prompts_that_are_too_long_are_said_before_the_first_runs(run_main, tmp_path):
    """One of three is fine; the two that leave no room are named at once, and no item has run."""
    rows = [{"prompt": text} for text in ("Tom has 3 apples.", "apple " * 900, "apple " * 901)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "p.csv").write_text("text\n" + "\n".join(row["prompt"] for row in rows))
    for words in (
        f"repeat --task jsonl:{tmp_path}/p.jsonl --repetitions 2 --select 0 1 2",
        f"replay --task jsonl:{tmp_path}/p.jsonl --executions 2 --select 0 1 2",
        f"decide --csv {tmp_path}/p.csv --label-column= --repetitions 2 --select 0 1 2",
    ):
        folder = tmp_path / words.split()[0]
        asked = [*words.split(), "--device", "cpu", "--reduction", "unsplit", "--out", folder]
        result = run_main(trace_study.main, *asked, "--quiet")
        assert (result.code, result.out) == (2, "")
        (line,) = result.err.splitlines()
        assert "row 1) has " in line
        assert "1 more cannot be asked: " in line
        assert "row 2" in line
        assert not (folder / "rows.jsonl").exists()


COMMON = (
    "repeat --device cpu --select 36 31 --repetitions 3 --max-new-tokens 20 --reduction atomic:8 "
    "--reduction deterministic:8 --quiet"
).split()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a small study of the bundled model."""
    import sys

    folder = tmp_path_factory.mktemp("repeat") / "study"
    before, sys.argv = sys.argv, ["trace-study", *COMMON, "--out", str(folder)]
    try:
        with pytest.raises(SystemExit) as stopped:
            trace_study.main()
    finally:
        sys.argv = before
    assert stopped.value.code == 0
    return folder


def test_atomic_changes_and_deterministic_does_not(finished, rows_of):
    """Prompt 36 flips at step 17 under simulated atomics; the deterministic reduction repeats every bit."""
    summary = json.loads((finished / "summary.json").read_text())["reductions"]
    assert summary["deterministic:8/32"]["logits"]["hits"] == 0
    assert summary["deterministic:8/32"]["changed"]["interval"]["high"] > 0.7
    assert summary["atomic:8/32"]["logits"]["hits"] > 0
    rows = rows_of(finished)
    assert len(rows) == 12
    seeds = [row["seed"] for row in rows if row["reduction"] == "atomic:8/32"]
    assert seeds == [36000, 36001, 36002, 31000, 31001, 31002]
    assert {row["seed"] for row in rows if row["reduction"] == "deterministic:8/32"} == {None}
    page = (finished / "table.md").read_text()
    assert "simulated" in page
    assert "repeatable in these runs" in page
    assert "deterministic from" not in page
    assert "torch specification" in page


def test_parquet_holds_rows_and_comparisons(finished, rows_of, undeclared):
    """Both tables read back with the values of the rows, whose schema leaves nothing out."""
    from pyarrow import parquet

    rows = rows_of(finished)
    table = parquet.read_table(finished / "rows.parquet").to_pylist()
    assert [each["token_ids"] for each in table] == [each["token_ids"] for each in rows]
    assert [each["selected_logits"] for each in table] == [row["selected_logits"] for row in rows]
    compared = parquet.read_table(finished / "comparisons.parquet").to_pylist()
    assert len(compared) == 8
    assert undeclared(finished) == set()
    assert (finished / "figure.html").read_text().count("<title>") >= 1


def test_a_broken_run_resumes_to_the_same_bytes(finished, run_main, tmp_path):
    """Half a study, a torn line, then the rest in a new sitting: the rows of the unbroken study."""
    folder = tmp_path / "study"
    folder.mkdir()
    whole = (finished / "rows.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (folder / "rows.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:100])
    (folder / "study.json").write_bytes((finished / "study.json").read_bytes())
    result = run_main(trace_study.main, *COMMON, "--out", folder, "--json")
    assert result.code == 0
    assert json.loads(result.out)["complete"] is True
    assert (folder / "rows.jsonl").read_bytes() == whole


def test_a_file_of_options_and_a_typed_one(finished, run_main, tmp_path):
    """Options come from TOML, a typed one goes before; here the study is finished, so nothing runs."""
    (tmp_path / "study.toml").write_text(
        'device = "cpu"\nquiet = true\n[repeat]\nselect = ["36", "31"]\nrepetitions = 9\n'
        'max-new-tokens = 20\nreduction = ["atomic:8", "deterministic:8"]\n[batch]\nx = 1\n'
    )
    arguments = ["repeat", "--config", tmp_path / "study.toml", "--out", finished, "--json"]
    result = run_main(trace_study.main, *arguments, "--repetitions", "3")
    assert (result.code, json.loads(result.out)["items"]) == (0, 12)


@pytest.mark.parametrize("text", ["[repaet]\nseed = 1\n", "repeat = 3\n", "[[repeat]]\nseed = 1\n"])
def test_tables_of_nobodys_name_are_refused(run_main, tmp_path, text):
    """A misspelt table would say nothing, and a value in a table's place says nothing either: exit 2, one line."""
    (tmp_path / "study.toml").write_text(text)
    result = run_main(trace_study.main, "repeat", "--config", tmp_path / "study.toml", "--out", "x")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "[repeat]" in result.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["repeat"], ["--out"]),
        (["fly"], ["repeat", "fly"]),
        (["repeat", "--repetitions", "1", "--out", "{new}"], ["2 to 1000", "1"]),
        (["repeat", "--reduction", "atomic:0", "--out", "{new}"], ["splits"]),
        (["repeat", "--task", "gsm9k:x", "--out", "{new}"], ["gsm9k"]),
        (["repeat", "--task", "jsonl:/nowhere", "--out", "{new}"], ["/nowhere"]),
        (["repeat", "--model", "x", "--out", "{new}"], ["adapter"]),
        (["repeat", "--config", "/nowhere.toml"], ["/nowhere.toml", "TOML"]),
        (["repeat", "--scorer", "nothing", "--out", "{new}"], ["module:function"]),
        (["repeat", "--reduction", "unsplit", "--reduction", "sk1", "--out", "{new}"], ["twice"]),
    ],
)
def test_trouble_is_one_line(run_main, tmp_path, arguments, words):
    """Exit code 2, one line on stderr that says what is wrong, nothing on stdout."""
    result = run_main(
        trace_study.main, *[word.replace("{new}", str(tmp_path / "new")) for word in arguments]
    )
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert all(word in result.err for word in words), result.err
