"""Prompts from a log that lm-eval 0.4.13 wrote (its model dummy), and from logs that inspect_ai writes in the test."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from fliptrace.command_line import trace_study
from fliptrace.errors import InputError
from fliptrace.studies.importers import gold_of, read_inspect, read_lm_eval
from fliptrace.studies.tasks import Selection, read_questions

SAMPLES = Path(__file__).parent / "logs" / "samples_lm_eval.jsonl"
HAS_INSPECT = importlib.util.find_spec("inspect_ai") is not None


def test_lm_evals_samples_become_questions():
    """Each document once although two filters logged it; the prompt as it was asked; the target's number as gold."""
    questions = read_questions(f"lm-eval:{SAMPLES}", Selection(("0-1",)))
    assert len(SAMPLES.read_text().splitlines()) == 4
    assert [(question.source, question.gold) for question in questions] == [
        ("lm-eval document 0", "8"),
        ("lm-eval document 1", "24"),
    ]
    assert questions[0].text.startswith("Tom has 3 apples")
    assert questions[0].text.endswith('"Final answer: N".')
    assert questions[1].row["doc"]["question"].startswith("A box")
    with pytest.raises(InputError, match="2 rows, fewer than 20; --prompts 2 takes all"):
        read_questions(f"lm-eval:{SAMPLES}", Selection(count=20))


def test_lm_evals_variants(tmp_path):
    """A folder with one file; messages of a chat template; what cannot be asked again is refused with its reason."""
    line = json.loads(SAMPLES.read_text().splitlines()[0])
    folder = tmp_path / "model"
    folder.mkdir()
    file = folder / "samples_x.jsonl"

    def write(prompt, **changes):
        arguments = {"gen_args_0": {"arg_0": prompt, "arg_1": {}}}
        file.write_text(json.dumps(line | {"arguments": arguments} | changes))

    write(
        json.dumps(
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
        )
    )
    assert read_lm_eval(tmp_path)[0]["prompt"] == "Be brief.\n\nWhy?"
    write([{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}])
    with pytest.raises(InputError, match=r"no single question .*user, assistant"):
        read_lm_eval(file)
    write("x", arguments={"gen_args_0": {"arg_0": "x"}, "gen_args_1": {"arg_0": "x"}})
    with pytest.raises(InputError, match="multiple choice"):
        read_lm_eval(file)
    file.write_text('{"prompt": "x"}')
    with pytest.raises(InputError, match="no samples file of lm-eval"):
        read_lm_eval(file)
    (folder / "samples_y.jsonl").write_text("")
    with pytest.raises(InputError, match=r"samples_x\.jsonl, samples_y\.jsonl"):
        read_lm_eval(tmp_path)


def test_numbers_of_targets():
    """After GSM8K's mark, after Final answer, or at the beginning; None without one."""
    assert [gold_of(text) for text in ("x\n#### 1,200", "Final answer: 7", "24", "blue")] == [
        "1200",
        "7",
        "24",
        None,
    ]


def test_without_inspect_ai_its_logs_are_refused(monkeypatch):
    """The way out is named."""
    monkeypatch.setitem(__import__("sys").modules, "inspect_ai.log", None)
    with pytest.raises(InputError, match=r"fliptrace\[harnesses\]"):
        read_inspect(SAMPLES)


@pytest.mark.skipif(not HAS_INSPECT, reason="inspect_ai is not installed here")
@pytest.mark.filterwarnings("ignore")
def test_inspect_ais_samples_become_questions(tmp_path):
    """Each sample of the first epoch, with the template that the solver put around it; .eval and .json alike."""
    from inspect_ai import Task
    from inspect_ai import eval as run_tasks
    from inspect_ai.dataset import Sample
    from inspect_ai.solver import generate, prompt_template

    samples = [
        Sample(id="apples", input="Tom has 3 apples and buys 5 more. How many?", target="8"),
        Sample(id="eggs", input="A box holds 4 rows of 6 eggs. How many?", target="24"),
    ]
    template = prompt_template('{prompt}\n\nEnd with one line "Final answer: N".')
    task = Task(dataset=samples, solver=[template, generate()], name="sums")
    for kind in ("eval", "json"):
        run_tasks(
            task,
            model="mockllm/model",
            log_dir=str(tmp_path / kind),
            log_format=kind,
            epochs=2,
            display="none",
        )
        (log,) = (tmp_path / kind).glob(f"*.{kind}")
        questions = read_questions(f"inspect:{log}", Selection(("0-1",)))
        assert [(question.source, question.gold) for question in questions] == [
            ("inspect sample apples", "8"),
            ("inspect sample eggs", "24"),
        ]
        assert questions[0].text.startswith("Tom has 3 apples")
        assert questions[0].text.endswith('"Final answer: N".')
    (tmp_path / "odd.eval").write_text("x")
    for name in ("odd.eval", "missing.eval"):
        with pytest.raises(InputError, match=name):
            read_inspect(tmp_path / name)


def test_a_study_on_imported_prompts(run_main, rows_of, tmp_path):
    """trace-study repeat asks the bundled model what lm-eval asked, and knows the right answers."""
    result = run_main(
        trace_study.main,
        *("repeat", "--task", f"lm-eval:{SAMPLES}", "--prompts", 2, "--repetitions", 2),
        *("--max-new-tokens", 4, "--reduction", "unsplit", "--device", "cpu", "--quiet"),
        *("--out", tmp_path / "study"),
    )
    assert result.code == 0, result.err
    assert {(row["prompt"], row["gold"]) for row in rows_of(tmp_path / "study")} == {
        ("lm-eval document 0", "8"),
        ("lm-eval document 1", "24"),
    }
