"""trace-study decide: probabilities by hand, labels, counts, and the bundled model end to end."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch

import fliptrace as ft
from fliptrace.command_line import trace_study
from fliptrace.errors import InputError
from fliptrace.studies import DecideStudy, Selection
from fliptrace.studies.decide import decision
from fliptrace.studies.decide_report import decide_report


def test_probabilities_by_hand():
    """Normalised over the two labels; the mass is what both have among all tokens."""
    logits = torch.tensor([0.0, 1.0, 3.0, -math.inf]).bfloat16()
    yes, no, mass = decision(logits, 2, 1)
    assert yes == pytest.approx(math.exp(2) / (1 + math.exp(2)))
    assert yes + no == pytest.approx(1.0)
    both = math.exp(1) + math.exp(3)
    assert mass == pytest.approx(both / (1 + both))
    assert decision(torch.tensor([2.0, 2.0]), 0, 1)[0] == 0.5


def row(prompt, repetition, yes, label=True):
    return {
        "reduction": "atomic:8/32",
        "prompt": prompt,
        "repetition": repetition,
        "yes": yes,
        "decision": yes >= 0.5,
        "correct": (yes >= 0.5) == label,
        "label_mass": 0.9,
        "seed": None,
    }


def test_counts_of_the_table():
    """Exactly 0.5 is yes; drift, flips, affected texts and transitions as they are counted in the paper."""
    rows = [row("a", 0, 0.5), row("a", 1, 0.46), row("a", 2, 0.5), row("b", 0, 0.9)]
    rows += [row("b", 1, 0.9), row("b", 2, 0.8)]
    study = DecideStudy("none.csv", reductions=("atomic:8",))
    (entry,) = decide_report(study, rows).summary["reductions"]
    assert (entry["changed"]["hits"], entry["comparisons"]) == (2, 4)
    assert entry["drift_mean"] == pytest.approx((0.04 + 0.1) / 4)
    assert entry["drift_largest"] == pytest.approx(0.1)
    assert (entry["flips"]["hits"], entry["affected"]["hits"], entry["affected"]["trials"]) == (
        1,
        1,
        2,
    )
    assert (entry["right_to_wrong"], entry["wrong_to_right"], entry["right"]["hits"]) == (1, 0, 2)


def test_labels_that_the_model_would_not_say_are_named():
    """The page says what was asked, and warns where both labels together are unlikely."""
    study = DecideStudy("none.csv", question="Is it?", reductions=("atomic:8",))
    rows = [row("a", 0, 0.5), row("a", 1, 0.5)]
    likely = "\n".join(decide_report(study, rows).lines)
    assert ("Is it? (yes or no)" in likely, "unlikely answers" in likely) == (True, False)
    unlikely = [{**each, "label_mass": 0.003} for each in rows]
    assert "together they had 0.3 %" in "\n".join(decide_report(study, unlikely).lines)


@pytest.fixture
def file(tmp_path):
    """A labelled CSV made of bundled problems: is the answer right?"""
    path = tmp_path / "labelled.csv"
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["text", "label"])
        for number, prompt in enumerate(ft.bundled_model().prompts[:4]):
            writer.writerow([f"{prompt.text}\nThe answer, {prompt.answer}", number % 2])
    return path


def test_the_bundled_model_end_to_end(run_main, rows_of, undeclared, file, tmp_path):
    """The fixed order changes no probability; a cut study resumes to the same bytes; labels are read as numbers."""
    folder = tmp_path / "study"
    arguments = (
        f"decide --csv {file} --device cpu --repetitions 3 --reduction atomic:8 --reduction unsplit --quiet "
        f"--json --out {folder}"
    ).split()
    result = run_main(trace_study.main, *arguments)
    assert result.code == 0, result.err
    atomic, unsplit = json.loads(result.out)["reductions"]
    assert (unsplit["changed"]["hits"], unsplit["drift_largest"]) == (0, 0.0)
    assert atomic["changed"]["hits"] > 0
    assert atomic["comparisons"] == 8
    rows = rows_of(folder)
    assert [r["label"] for r in sorted(rows, key=lambda r: r["number"])[::6]] == [0, 1, 0, 1]
    assert all(r["yes"] + r["no"] == pytest.approx(1.0) for r in rows)
    assert undeclared(folder) == set()
    whole = (folder / "rows.jsonl").read_bytes()
    (folder / "rows.jsonl").write_bytes(whole[: len(whole) // 2])
    assert run_main(trace_study.main, *arguments).code == 0
    assert (folder / "rows.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"csv": "/nowhere.csv"}, "nowhere"),
        ({"text_column": "body"}, "body.*text, label"),
        ({"label_column": "truth"}, "truth"),
        ({"label_column": "text"}, "label is yes"),
        ({"repetitions": 1}, "2 to"),
        ({"selection": Selection(("9",))}, "row 9"),
    ],
)
def test_what_cannot_be_used_is_refused(file, change, words):
    """Before a model is loaded, with what was there."""
    settings = {"csv": str(file), "selection": Selection(("0",)), **change}
    with pytest.raises(InputError, match=words):
        DecideStudy(**settings).items()


def test_labels_of_one_token_are_refused(file):
    """Words that begin with the same token cannot be told apart."""
    with pytest.raises(InputError, match="same token"):
        DecideStudy(str(file), yes="yes", no="yes").open()
