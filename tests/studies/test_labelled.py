"""Data that people bring: labelled texts of CSV files and the datasets library, JSON lines, and what can be wrong."""

from __future__ import annotations

import builtins
import json

import pytest

from fliptrace.command_line import trace_study
from fliptrace.errors import InputError
from fliptrace.studies import DecideStudy, Selection
from fliptrace.studies.json_lines import lines_of, value_of
from fliptrace.studies.labelled import distinct, read_labelled
from fliptrace.studies.tasks import read_questions
from fliptrace.studies.training import TrainSettings
from fliptrace.studies.training.data import read_splits


@pytest.fixture
def comments(tmp_path):
    """A folder with a data file of the test split, made as Civil Comments is: twelve texts, a third toxic."""
    folder = tmp_path / "comments"
    folder.mkdir()
    rows = [
        {"text": f"comment {n}", "toxicity": 0.75 if n % 3 == 0 else 0.1, "insult": 0.0}
        for n in range(12)
    ]
    rows += [{"text": "", "toxicity": 0.0, "insult": 0.0}, rows[3]]
    (folder / "test.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return folder


@pytest.fixture
def library(tmp_path, monkeypatch):
    """The datasets library with a cache of its own; skips where it is not installed."""
    datasets = pytest.importorskip("datasets", reason="pip install 'fliptrace[studies]'")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return datasets


@pytest.mark.filterwarnings("ignore")
def test_civil_comments_by_the_datasets_library(library, comments, run_main, rows_of, tmp_path):
    """trace-study decide takes a data set's split; labels are thresholded; empty and doubled texts are not drawn."""
    folder = tmp_path / "study"
    result = run_main(
        trace_study.main,
        *("decide", "--dataset", comments, "--label-column", "toxicity", "--device", "cpu"),
        *(
            "--repetitions",
            2,
            "--reduction",
            "unsplit",
            "--prompts",
            12,
            "--quiet",
            "--out",
            folder,
        ),
    )
    assert result.code == 0, result.err
    assert "split test" in result.out
    assert "2 rows without a text of their own were not drawn from" in result.out
    rows = rows_of(folder)
    assert {row["number"]: row["label"] for row in rows} == {n: n % 3 == 0 for n in range(12)}
    named = DecideStudy(
        dataset=str(comments), label_column="toxicity", selection=Selection(("12",))
    )
    with pytest.raises(InputError, match=r"row 12\) is empty"):
        named.items()


@pytest.mark.filterwarnings("ignore")
def test_training_on_a_data_set(library, comments):
    """Classes in proportion, as many rows as were asked for, and a refusal where there are not so many."""
    settings = {"split": "test", "label_column": "toxicity", "validation_rows": 3, "test_rows": 3}
    splits = read_splits(TrainSettings(f"dataset:{comments}", training_rows=3, **settings))
    assert [len(part) for part in (splits.training, splits.validation, splits.test)] == [3, 3, 3]
    assert (sum(row.label for row in splits.test), splits.duplicates) == (1, 2)
    assert sum(example.answer == "yes" for example in splits.training) == 1
    with pytest.raises(InputError, match="leave 6 for training, fewer than 7"):
        read_splits(TrainSettings(f"dataset:{comments}", training_rows=7, **settings))


@pytest.mark.filterwarnings("ignore")
def test_a_saved_data_set_and_what_is_not_there(library, comments, tmp_path):
    """What save_to_disk wrote; a split, a column and a data set that are not there; labels and texts that are none."""
    made = library.Dataset.from_dict(
        {"text": ["a", None, "c"], "label": [1, 0, None], "count": [1, 2, 3]}
    )
    library.DatasetDict({"dev": made}).save_to_disk(str(tmp_path / "saved"))
    made.save_to_disk(str(tmp_path / "one"))

    def read(name, split="dev", text="text", label="", threshold=0.5):
        from fliptrace.studies.dataset_library import read_labelled_dataset

        return read_labelled_dataset(str(name), split, text, label, threshold)

    for name in ("saved", "one"):
        assert [row.text for row in read(tmp_path / name)] == ["a", "", "c"]
    for arguments, words in (
        ({"name": tmp_path / "saved", "split": "test"}, "split 'test'"),
        ({"name": comments, "split": "dev"}, "split 'dev'"),
        ({"name": "nobody/nothing"}, "nobody/nothing"),
        ({"name": tmp_path / "one", "text": "body"}, "no column 'body'; it has text, label, count"),
        ({"name": tmp_path / "one", "label": "label"}, "row 2, column 'label'.*got ''"),
        ({"name": tmp_path / "one", "text": "count"}, "must hold texts; got 1"),
    ):
        with pytest.raises(InputError, match=words):
            read(**arguments)


def test_without_the_library_the_way_out_is_named(monkeypatch, run_main, tmp_path):
    """One line that says what to install."""
    imported = builtins.__import__

    def refuse(name, *rest, **more):
        if name == "datasets":
            raise ImportError(name)
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    result = run_main(
        trace_study.main, "decide", "--dataset", "google/civil_comments", "--out", tmp_path / "a"
    )
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "pip install 'fliptrace[studies]'" in result.err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "--csv FILE or --dataset NAME"),
        (["--csv", "a.csv", "--dataset", "b"], "--csv FILE or --dataset NAME"),
        (["--csv", "a.csv", "--split", "test"], "a CSV file has none"),
        (["--csv", "a.csv", "--server", "http://x", "--engine", "vllm"], "leave out --engine"),
    ],
)
def test_sources_that_do_not_fit(run_main, tmp_path, more, words):
    """Exit code 2, one line."""
    result = run_main(trace_study.main, "decide", *more, "--out", tmp_path / "study")
    assert (result.code, result.err.count("\n"), words in result.err) == (2, 1, True), result.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty; its first line must name its columns, 'text' among them"),
        ("text,label\n", "has no rows"),
        ("text,label\nHello,nan\n", "row 0, column 'label'.*got 'nan'"),
        ("text,label\nHello,inf\n", "got 'inf'"),
        ("text,label\nHello\n", "got ''"),
        ("text;label\nHello;1\n", "no column 'text'; it has text;label"),
        ("body,label\nHello,1\n", "no column 'text'; it has body, label"),
        ("text,label\n\xff,1\n", "cannot be read as CSV"),
    ],
)
def test_files_that_are_wrong(tmp_path, content, words):
    """Each is refused by name, with what was there."""
    path = tmp_path / "texts.csv"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=words):
        read_labelled(path, "text", "label", 0.5)


def test_files_as_spreadsheets_write_them(tmp_path):
    """A byte order mark, line ends of Windows, a comma and a line feed inside a text; a threshold must be a number."""
    path = tmp_path / "texts.csv"
    path.write_bytes(b'\xef\xbb\xbftext,label\r\n"One, two\nthree",0.5\r\n,0\r\nFour,No\r\n')
    rows = read_labelled(path, "text", "label", 0.5)
    assert [(row.text, row.label) for row in rows] == [
        ("One, two\nthree", True),
        ("", False),
        ("Four", False),
    ]
    assert [row.number for row in distinct([*rows, *rows])] == [0, 2]
    with pytest.raises(InputError, match="threshold"):
        read_labelled(path, "text", "label", float("nan"))


def test_json_lines_end_at_line_feeds_alone(tmp_path):
    """U+2028 and U+0085 inside a text, Windows' line ends, a byte order mark; NaN is no JSON, and no rows are said."""
    path = tmp_path / "prompts.jsonl"
    text = "one\u2028two\x85three"
    line = json.dumps({"prompt": text}, ensure_ascii=False)
    path.write_text(f"\ufeff{line}\r\n\n{line}\n", "utf-8", newline="")
    assert len(lines_of(path.read_text("utf-8"))) == 2
    found = read_questions(f"jsonl:{path}", Selection(("0", "1")))
    assert [question.text for question in found] == [text, text]
    for word in ("NaN", "Infinity", "-Infinity"):
        with pytest.raises(ValueError, match=f"{word} is no JSON"):
            value_of(f'{{"prompt": {word}}}')
    path.write_text('{"prompt": "a", "score": NaN}\n')
    with pytest.raises(InputError, match=r"row 0 is no jsonl row: .*NaN is no JSON"):
        read_questions(f"jsonl:{path}", Selection(("0",)))
    for kind, row, words in (
        ("jsonl", "[1]", "an object is required, not list"),
        ("jsonl", '{"prompt": null}', "'prompt' must be a text, not None"),
        ("jsonl", '{"text": "a"}', "'prompt'"),
        ("gsm8k", '{"question": 5, "answer": "#### 1"}', "'question' must be a text, not 5"),
        ("gsm8k", '{"question": "a", "answer": null}', "no gsm8k row"),
        ("mbpp", '{"text": "a", "test_list": [1]}', "no mbpp row"),
        ("mbpp", "[1]", "no file of MBPP rows"),
    ):
        path.write_text(f"{row}\n")
        with pytest.raises(InputError, match=words):
            read_questions(f"{kind}:{path}", Selection(("0",)))
    path.write_text("\n")
    with pytest.raises(InputError, match="the data set is empty"):
        read_questions(f"jsonl:{path}", Selection(count=1))
