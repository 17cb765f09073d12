from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
import train
from corpus import END, build_corpus, held_out_problems, prompt_text, train_tokenizer
from measure_model import Schedule, ScheduledShrink, first_difference, margin_histogram
from safetensors.torch import load_file
from solutions import Wording


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(0, 600, 300).save_pretrained(folder)
    return folder / "tokenizer.json"


def corpus(tokenizer_file, processes, documents=4500):
    return build_corpus(
        tokenizer_file,
        seed=3,
        documents=documents,
        width=144,
        style="adapter",
        wording=Wording(chains=True),
        processes=processes,
    )


def test_smoke_run_writes_a_loadable_model(scripts, tmp_path):
    """The one command goes through all stages on a CPU and leaves the documented files."""
    command = [sys.executable, scripts / "train.py", "--smoke", "--device", "cpu"]
    subprocess.run([*command, "--out", tmp_path / "out"], check=True, timeout=120)
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {
        "model",
        "adapter",
        "prompts.jsonl",
        "metrics.json",
    }
    weights = load_file(out / "model" / "model.safetensors")
    adapter = load_file(out / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in (*weights.values(), *adapter.values())} == {torch.bfloat16}
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["base"]["steps"] == metrics["recipe"]["base"]["steps"]
    assert metrics["evaluation"]["fixed_order_repeats_that_differ"] == 0
    assert sum(metrics["evaluation"]["margin_counts"]) > 0


def test_unknown_stage_is_refused(monkeypatch, tmp_path):
    """A misspelt stage ends the run before anything is written."""
    monkeypatch.setattr(
        "sys.argv", ["train.py", "--stages", "bsae", "--out", str(tmp_path / "out")]
    )
    with pytest.raises(SystemExit, match="no such stage: bsae"):
        train.main()
    assert not (tmp_path / "out").exists()


def test_corpus_does_not_depend_on_the_number_of_processes(tokenizer_file):
    """Chunks carry their own seeds."""
    one, two = corpus(tokenizer_file, 1), corpus(tokenizer_file, 2)
    assert np.array_equal(one.tokens, two.tokens)
    assert np.array_equal(one.prompt_lengths, two.prompt_lengths)


def test_corpus_rows_are_what_the_chat_template_gives(tokenizer_file):
    """Each row is the template's prompt, a solution, and the end token; held-out ones are absent."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_file.parent)
    made = corpus(tokenizer_file, 1, documents=200)
    held_out = {prompt_text(problem.question) for problem in held_out_problems(0, 50)}
    for row, length in zip(made.tokens.tolist(), made.prompt_lengths.tolist(), strict=True):
        ids = [token for token in row if token]
        prompt = tokenizer.decode(ids[:length])
        question = prompt.removeprefix("<|user|>").split(END)[0]
        assert prompt == prompt_text(question)
        assert prompt not in held_out
        assert ids[:length] == tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        assert ids[-1] == tokenizer.eos_token_id
        assert ids.count(tokenizer.eos_token_id) == 2


def test_held_out_problems_are_distinct_and_repeatable():
    """The same seed gives the same held-out set, without doubles, all marked held out."""
    problems = held_out_problems(1, 60)
    assert problems == held_out_problems(1, 60)
    assert max(Counter(problem.question for problem in problems).values()) == 1
    assert all(problem.held_out for problem in problems)


def test_scheduled_shrink_differs_only_in_the_last_bits():
    """Two orders give different FP32 sums, close to the exact one, and one seed one result."""
    linear = torch.nn.Linear(768, 16, bias=False)
    schedule = Schedule()
    shrink = ScheduledShrink(linear, schedule)
    x = torch.randn(64, 768)
    exact = x.double() @ linear.weight.double().T

    def run(seed):
        schedule.generator = None if seed is None else torch.Generator().manual_seed(seed)
        return shrink(x)

    zero, one = run(0), run(1)
    share = (zero.view(torch.int32) != one.view(torch.int32)).float().mean()
    assert 0.3 < share < 0.8
    assert torch.equal(zero.view(torch.int32), run(0).view(torch.int32))
    assert torch.equal(run(None).view(torch.int32), run(None).view(torch.int32))
    for result in (zero, one, run(None)):
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)


def test_scheduled_shrink_refuses_a_width_it_cannot_deal():
    """A width that leaves a split without its share is an error, not another reduction."""
    with pytest.raises(ValueError, match="8 equal splits of 32"):
        ScheduledShrink(torch.nn.Linear(96, 16, bias=False), Schedule())


def test_first_difference_and_histogram():
    """Equal, differing, and one a prefix of the other; ties apart from small margins."""
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    counts = margin_histogram([[0.0, 0.03125], [0.05, 100.0]])
    assert (counts[0], counts[1], counts[2], counts[-1], sum(counts)) == (1, 1, 1, 1, 4)
