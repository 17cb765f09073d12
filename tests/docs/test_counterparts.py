"""docs/counterparts.md: written from the rows in the repository, with the figures that were planted in others."""

from __future__ import annotations

import json
import sys

import pytest


@pytest.fixture(scope="module")
def script(load_neighbour, repository_root):
    folder = repository_root / "examples/measure"
    sys.path.insert(0, str(folder))
    try:
        return load_neighbour(folder / "counterparts.py")
    finally:
        sys.path.remove(str(folder))


def test_the_page_is_what_the_rows_give(script, repository_root):
    """Whoever adds rows writes the page anew: python examples/measure/counterparts.py."""
    written = (repository_root / "docs/counterparts.md").read_text("utf-8")
    assert written == script.page(repository_root / "examples/measure/results")


def test_without_rows_there_are_no_sections(script, tmp_path):
    """What was not measured here does not stand on the page, not even as a heading."""
    assert script.page(tmp_path).count("\n## ") == 0


def line_of(page, start):
    (found,) = [line for line in page.splitlines() if line.startswith(start)]
    return [cell.strip() for cell in found.strip("|").split("|")]


def keep(script, folder, name, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script.pack(folder / "rows.jsonl", folder / f"{name}.jsonl.gz")


def repeat_row(reduction, prompt, repetition, tokens, logits, correct):
    return {
        "reduction": reduction,
        "prompt": prompt,
        "repetition": repetition,
        "token_ids": tokens,
        "selected_logits": logits,
        "margins": [1.0, 0.0 if tokens[-1] == 3 else 0.5],
        "ties": 1,
        "answer": str(tokens[-1]),
        "correct": correct,
        "text": "left out",
    }


def test_repetitions(script, tmp_path):
    """Two prompts of one changed output, one changed logit and one lost answer; a fixed order that does not repeat."""
    rows = [
        repeat_row("atomic:8/32", "p", 0, [1, 2], [1.0, 2.0], True),
        repeat_row("atomic:8/32", "p", 1, [1, 3], [1.5, 2.0], False),
        repeat_row("atomic:8/32", "q", 0, [4, 5], [1.0, 2.0], True),
        repeat_row("atomic:8/32", "q", 1, [4, 5], [1.0, 2.0], True),
        repeat_row("local:32/32", "p", 0, [1, 2], [1.0, 2.0], False),
        repeat_row("local:32/32", "p", 1, [2, 2], [1.0, 2.0], False),
    ]
    keep(script, tmp_path, "h200-study-repeat-16", rows)
    page = script.page(tmp_path)
    cells = line_of(page, "| 16 | `atomic:8/32`")
    assert [cell.partition(" (")[0] for cell in cells] == [
        *(
            "16",
            "`atomic:8/32`",
            "1 of 2",
            "1 of 2",
            "1 of 3",
            "1 of 2",
            "1, 0",
            "2 of 2",
            "1 of 1",
            "2 of 4",
        )
    ]
    assert all("; 95 %: " in cells[column] for column in (2, 5, 9))
    assert "Intervals around the paper's 17.30 %: rank 16 `atomic:8/32`." in " ".join(page.split())
    assert "changed 1 of 1 outputs" in " ".join(page.split())


def test_decisions_and_batches(script, tmp_path):
    """A flip of half a probability; a batch that differs from the prompt alone."""
    rows = [
        {
            "reduction": "unsplit/64",
            "prompt": "row 0",
            "repetition": repetition,
            "yes": yes,
            "decision": yes >= 0.5,
            "correct": yes >= 0.5,
        }
        for repetition, yes in enumerate((0.75, 0.25, 0.75))
    ]
    keep(script, tmp_path, "h200-study-decide", rows)
    rows = [
        {
            "arm": "local:32/32",
            "batch": batch,
            "arrangement": "fixed",
            "repetition": repetition,
            "prompts": ["p", "q"],
            "token_ids": [[1, 2], [3, 4 if batch == 1 else 5]],
        }
        for batch in (1, 2)
        for repetition in (0, 1)
    ]
    keep(script, tmp_path, "h200-study-batch", rows)
    page = script.page(tmp_path)
    cells = [cell.partition(" (")[0] for cell in line_of(page, "| `unsplit/64`")]
    assert cells == ["`unsplit/64`", "1 of 2", "0.25, 0.5", "1 of 2", "1 of 1", "1 of 1", "0 of 1"]
    assert "here 0 of 1 flips have 0.5" in " ".join(page.split())
    cells = [cell.partition(" (")[0] for cell in line_of(page, "| `local:32/32`")]
    assert cells == ["`local:32/32`", "0 of 4", "1 of 2", "2: 1 of 2", "nothing compared"]


def test_latencies_pair_rounds(script, tmp_path):
    """Twice the time in every round is +100 %, also between names in their long form."""
    rows = [
        {"reduction": name, "rank": 16, "batch": 1, "trial": 0, "round": turn, "seconds": seconds}
        for turn in (0, 1)
        for name, seconds in (
            ("unsplit/64", 2.0 + turn),
            ("deterministic:8/32", 1.0 + turn / 2),
            ("local:32/32", 0.5 + turn / 4),
            ("vllm-own", 1.0 + turn / 2),
        )
    ]
    keep(script, tmp_path, "h200-study-latency-16", rows)
    page = script.page(tmp_path)
    rank = line_of(page, "| 16 | +21.0 %")
    assert [cell.partition(" (")[0] for cell in rank[2:]] == [
        *("+100.0 %", "+1.62 %", "–", "+0.0 %", "-50.0 %")
    ]
    assert line_of(page, "| 16 | 1 |")[5].startswith("+300.0 %")
    assert "one start of each engine" in page
    more = [{**row, "trial": trial} for row in rows for trial in (0, 1, 2)]
    keep(script, tmp_path, "h200-study-latency-16", more)
    page = " ".join(script.page(tmp_path).split())
    assert "3 starts of all engines" in page
    assert "+100.0 % (95 %: +100.0 to +100.0, 3 trials)" in page


def test_predicted_flips(script, repository_root, tmp_path):
    """The page and the component's README name the same numbers, and the picture is drawn from the same rows."""
    results = repository_root / "examples/measure/results"
    page = script.page(results)
    readme = (repository_root / "interventions/README.md").read_text("utf-8")
    for name, label in (
        ("cpu-fragility", "CPU, simulated `atomic:8`"),
        ("h200-fragility", "H200, `atomic:8`"),
        ("h200-fragility-vllm", "H200, `vllm-own`"),
    ):
        (whole, bins) = [line for line in page.splitlines() if line.startswith(f"| {label}")]
        prompts, predicted, observed = (cell.strip() for cell in whole.split("|")[2:5])
        assert f"{name}.jsonl.gz" in readme
        said = " ".join(readme.split(f"{name}.jsonl.gz")[1].split())[:1000]
        count, _, total = observed.partition(" (")[0].partition(" of ")
        assert (
            f"In {prompts} prompts and {total} repetitions {predicted} changes were predicted and {count}"
            in said
        )
        assert bins.count(" of ") == 6
    script.draw(results, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text("utf-8").startswith("<?xml")
