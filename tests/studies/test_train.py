"""trace-study train on the bundled model: splits, the loop, what is written, and that the adapter runs."""

from __future__ import annotations

import csv
import dataclasses
import json

import pytest
import torch

import fliptrace as ft
from fliptrace.command_line import trace_study
from fliptrace.errors import InputError
from fliptrace.studies.journal import half_of
from fliptrace.studies.training import TrainSettings, train_adapter
from fliptrace.studies.training.checkpoint import CHECKPOINT_NAME
from fliptrace.studies.training.data import Example, encoder, read_splits
from fliptrace.studies.training.fitting import batches, padded


@pytest.fixture
def gsm8k(tmp_path):
    """Forty rows in GSM8K's form."""
    path = tmp_path / "train.jsonl"
    rows = [
        {
            "question": f"Tom has {n} apples and buys {n} more. How many?",
            "answer": f"{n} + {n} = <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}",
        }
        for n in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def labelled(tmp_path):
    """Thirty texts, a third of them yes, one doubled and one empty."""
    path = tmp_path / "claims.csv"
    lines = [(f"{n} is a multiple of 3", "yes" if n % 3 == 0 else "no") for n in range(30)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *lines, lines[0], ("", "no")])
    return path


@pytest.fixture(scope="module")
def tokenizer():
    """The bundled model's."""
    bundled = ft.bundled_model()
    return ft.load_engine(bundled.model, bundled.adapter, device="cpu").tokenizer


def test_splits_are_fixed_by_the_seed(gsm8k, labelled):
    """5 % of GSM8K; of labelled texts classes in proportion, none in two splits; another seed draws others."""
    splits = read_splits(TrainSettings(f"gsm8k:{gsm8k}"))
    assert (len(splits.training), len(splits.validation)) == (38, 2)
    assert splits.training[0].answer.splitlines()[-1].startswith("Final answer: ")
    assert "<<" not in splits.training[0].answer
    again, other = (read_splits(TrainSettings(f"gsm8k:{gsm8k}", seed=seed)) for seed in (0, 1))
    assert again == splits
    assert other.validation != splits.validation

    found = read_splits(TrainSettings(f"csv:{labelled}", validation_rows=6, test_rows=9))
    assert (len(found.training), len(found.validation), len(found.test)) == (15, 6, 9)
    assert found.duplicates == 2
    assert sum(bool(row.label) for row in found.test) == 3
    assert sum(example.answer == "yes" for example in found.validation) == 2
    texts = [example.question for example in (*found.training, *found.validation)]
    assert not any(text.startswith(f"{row.text}\n") for row in found.test for text in texts)
    assert len(set(texts)) == 21


def test_mbpp_is_split_by_task(tmp_path):
    """Training and validation tasks by number; the test split is not touched; programs are fenced."""
    rows = [
        {"task_id": n, "text": f"Task {n}.", "code": "x = 1\r\ny = 2", "test_list": ["assert x"]}
        for n in (10, 11, 510, 511, 600, 601, 974)
    ]
    path = tmp_path / "mbpp.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    splits = read_splits(TrainSettings(f"mbpp:{path}"))
    assert [("Task 601." in e.question, e.answer) for e in splits.training] == [
        (True, "```python\nx = 1\ny = 2\n```"),
        (False, "```python\nx = 1\ny = 2\n```"),
    ]
    assert len(splits.validation) == 2


def test_an_example_is_what_will_be_asked(tokenizer):
    """Ids begin with the prompt as studies encode it and end with an end token; labels are the answer's."""
    encoded = encoder(tokenizer, chat_template=True)(Example("How many?", "Final answer: 3"))
    prompt = ft.encode_prompt(tokenizer, "How many?")
    assert encoded.ids[: encoded.prompt] == prompt.ids
    assert encoded.ids[-1] == tokenizer.eos_token_id
    _, labels, mask = padded(
        [encoded, encoder(tokenizer, chat_template=False)(Example("a", "b"))],
        0,
        torch.device("cpu"),
    )
    assert labels[0, : encoded.prompt].tolist() == [-100] * encoded.prompt
    assert labels[0, encoded.prompt :].tolist() == list(encoded.ids[encoded.prompt :])
    assert mask[1].sum() < mask[0].sum()
    assert (labels[1][mask[1] == 0] == -100).all()
    rows = [encoded] * 37
    assert sum(len(batch) for batch in batches(rows, 8, 0)) == 37


@pytest.mark.parametrize("rank", [16, 32])
def test_a_few_steps_learn_and_repeat(run_main, gsm8k, tmp_path, rank):
    """The loss falls, a second run gives the same weights, the adapter is as asked and runs on the engine."""
    command = [
        *("train", "--task", f"gsm8k:{gsm8k}", "--rank", rank, "--batch", 8, "--epochs", 2),
        *("--learning-rate", "2e-3", "--device", "cpu", "--quiet", "--json"),
    ]
    folders = [tmp_path / "one", tmp_path / "two"] if rank == 16 else [tmp_path / "one"]
    for folder in folders:
        result = run_main(trace_study.main, *command, "--out", folder)
        assert result.code == 0, result.err
        record = json.loads(result.out)
        assert record["losses"][record["best_epoch"]][1] < 0.8 * record["losses"][0][1]
        assert record["steps"] == 10
    weights = [(folder / "adapter_model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[-1]
    configuration = json.loads((folders[0] / "adapter_config.json").read_text())
    assert (configuration["r"], configuration["lora_alpha"]) == (rank, 2 * rank)
    assert configuration["base_model_name_or_path"] == "bundled/model"
    card = (folders[0] / "README.md").read_text()
    for words in (f"r = {rank}, alpha = {2 * rank}", "38 for training, 2 for validation", "Seed 0"):
        assert words in card
    engine = ft.load_engine(ft.bundled_model().model, str(folders[0]), device="cpu")
    assert engine.describe()["adapter"]["rank"] == rank
    assert engine.shrink_weight(0).dtype == torch.bfloat16
    engine.start(ft.encode_prompt(engine.tokenizer, "How many?").ids)
    assert bool(engine.step().isfinite().all())


@pytest.mark.filterwarnings("ignore:Could not find a config file")
@pytest.mark.parametrize("steps", [4, 7, 13])
def test_a_stopped_training_goes_on_to_the_same_bits(gsm8k, tmp_path, steps):
    """Stopped in the first, second and third epoch: the same weights and losses as unbroken, and no checkpoint left."""
    settings = TrainSettings(f"gsm8k:{gsm8k}", batch=8, epochs=3, learning_rate=2e-3, device="cpu")
    whole = train_adapter(settings, tmp_path / "whole")
    seen = []

    def stop(_, step, total):
        assert total == 15
        seen.append(step)
        if step == steps and len(seen) == steps:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_adapter(settings, tmp_path / "broken", progress=stop)
    if steps > 5:
        other = dataclasses.replace(settings, seed=1)
        with pytest.raises(InputError, match=r"seed = 0, and this one has 1; give the same"):
            train_adapter(other, tmp_path / "broken")
    made = train_adapter(settings, tmp_path / "broken", progress=stop)
    assert seen[steps:] == list(range(5 * ((steps - 1) // 5) + 1, 16))
    assert (made.losses, made.steps, made.best_epoch) == (
        whole.losses,
        whole.steps,
        whole.best_epoch,
    )
    one, two = (tmp_path / name / "adapter_model.safetensors" for name in ("whole", "broken"))
    assert one.read_bytes() == two.read_bytes()
    assert not (tmp_path / "broken" / CHECKPOINT_NAME).exists()


@pytest.mark.parametrize("data", [b"half a file", b"", b"PK\x03\x04half", b"\x80\x02."])
def test_a_spoilt_checkpoint_is_named(gsm8k, tmp_path, data):
    """Half a file is no state: what to do is said, and the file stays."""
    settings = TrainSettings(f"gsm8k:{gsm8k}", batch=8, max_steps=2, device="cpu")
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / CHECKPOINT_NAME).write_bytes(data)
    with pytest.raises(InputError, match="remove it to train from the beginning"):
        train_adapter(settings, folder)
    assert (folder / CHECKPOINT_NAME).exists()


@pytest.mark.filterwarnings("ignore:Could not find a config file")
def test_half_a_checkpoint_is_in_nobodys_way(gsm8k, tmp_path):
    """What a kill in the first epoch's writing left: the training begins again, and takes it away."""
    settings = TrainSettings(f"gsm8k:{gsm8k}", batch=8, max_steps=2, device="cpu")
    folder = tmp_path / "adapter"
    folder.mkdir()
    half_of(folder / CHECKPOINT_NAME).write_bytes(b"half")
    train_adapter(settings, folder)
    assert (folder / "adapter_model.safetensors").exists()
    assert not half_of(folder / CHECKPOINT_NAME).exists()


def test_a_labelled_set_leaves_a_test_file_for_decide(run_main, labelled, tmp_path):
    """test.csv holds the rows kept back, and decide takes it with the new adapter."""
    out = tmp_path / "adapter"
    trained = run_main(
        trace_study.main,
        *("train", "--task", f"csv:{labelled}", "--validation-rows", 6, "--test-rows", 9),
        *("--question", "Is that so?", "--max-steps", 2, "--device", "cpu", "--quiet"),
        *("--out", out),
    )
    assert trained.code == 0, trained.err
    assert "validation loss" in trained.out
    with (out / "test.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 9
    decided = run_main(
        trace_study.main,
        *("decide", "--csv", out / "test.csv", "--question", "Is that so?", "--prompts", 2),
        *("--model", ft.bundled_model().model, "--adapter", out, "--device", "cpu"),
        *("--repetitions", 2, "--reduction", "unsplit", "--quiet", "--json"),
        *("--out", tmp_path / "study"),
    )
    assert decided.code == 0, decided.err
    assert json.loads(decided.out)["reductions"][0]["right"]["trials"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "poems:x"], "gsm8k:PATH"),
        (["--task", "gsm8k:/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--task", "gsm8k:{file}", "--rank", "0"], "rank must be at least 1"),
        (["--task", "gsm8k:{file}", "--learning-rate", "2"], "between 0 and 1"),
        (["--task", "gsm8k:{file}", "--max-length", "4"], "raise --max-length"),
        (["--task", "mbpp:{file}"], "leaves 0 rows"),
    ],
)
def test_trouble_is_one_line(run_main, gsm8k, tmp_path, arguments, words):
    """Exit code 2 and one line on stderr; nothing is written."""
    filled = [argument.format(file=gsm8k) for argument in arguments]
    out = tmp_path / "adapter"
    result = run_main(
        trace_study.main, "train", *filled, "--device", "cpu", "--out", out, "--quiet"
    )
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert words in result.err
    assert not out.exists()


def test_a_folder_in_use_is_refused(run_main, gsm8k, tmp_path):
    """An adapter is never written over something."""
    (tmp_path / "note").write_text("mine")
    result = run_main(trace_study.main, "train", "--task", f"gsm8k:{gsm8k}", "--out", tmp_path)
    assert result.code == 2
    assert "new or empty" in result.err
    with pytest.raises(InputError, match="label column"):
        read_splits(TrainSettings(f"csv:{gsm8k}", label_column=""))
