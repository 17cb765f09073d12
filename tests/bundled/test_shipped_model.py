from __future__ import annotations

import json

import pytest
import torch
from corpus import held_out_problems
from hypothesis import given, settings
from hypothesis import strategies as st
from measure_model import generate, load
from recipe import FULL
from safetensors.torch import load_file
from solutions import final_answer
from transformers import AutoTokenizer

from fliptrace import load_pair
from fliptrace.store import verify_trace

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LARGEST = 16_000_000


@pytest.fixture(scope="module")
def tokenizer(bundled):
    return AutoTokenizer.from_pretrained(bundled / "model")


@pytest.fixture(scope="module")
def prompts(bundled):
    return [json.loads(line) for line in (bundled / "prompts.jsonl").read_text().splitlines()]


def test_everything_is_small_and_only_safetensors(bundled):
    """At most 16 MB in all, and no format that can run code."""
    files = [path for path in bundled.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= LARGEST
    allowed = {".safetensors", ".json", ".jsonl", ".jinja", ".md", ".trace"}
    assert {path.suffix for path in files} <= allowed
    assert (bundled / "README.md").is_file()


def test_the_recorded_pair_flips(bundled):
    """The pair that ships is readable, whole and flips a token; a path leads to the flip from one of its roots."""
    folder = bundled / "recorded-pair"
    assert not [finding for path in folder.iterdir() for finding in verify_trace(path)]
    with load_pair(folder) as pair:
        assert pair.diverged
        assert pair.diff.first_propagating is not None
        assert pair.diff.propagation.path[-1] == f"flip at step {pair.diff.flip.step}"


def test_weights_are_bf16_and_finite(bundled):
    """The model computes in the type it is stored in."""
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        for tensor in load_file(bundled / name).values():
            assert tensor.dtype == torch.bfloat16
            assert tensor.isfinite().all()


def test_no_vocabulary_row_is_a_duplicate(bundled):
    """Near-ties are learned, not planted by equal rows."""
    weights = load_file(bundled / "model" / "model.safetensors")
    assert "lm_head.weight" not in weights  # tied to the embedding
    rows = weights["model.embed_tokens.weight"].view(torch.int16)
    assert len(torch.unique(rows, dim=0)) == len(rows)


def test_adapter_is_what_the_card_says(bundled):
    """Rank 16, alpha 32, all seven projections of all layers, no dropout, no variant."""
    config = json.loads((bundled / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 16, 32)
    assert sorted(config["target_modules"]) == sorted(PROJECTIONS)
    assert config["lora_dropout"] == 0.0
    assert not config["use_dora"]
    assert not config["use_rslora"]
    layers = json.loads((bundled / "model" / "config.json").read_text())["num_hidden_layers"]
    tensors = load_file(bundled / "adapter" / "adapter_model.safetensors")
    for projection in PROJECTIONS:
        for matrix in ("lora_A", "lora_B"):
            found = [t for n, t in tensors.items() if f"{projection}.{matrix}.weight" in n]
            assert len(found) == layers
            assert all(t.shape[0 if matrix == "lora_A" else 1] == 16 for t in found)
            assert all(t.any() for t in found)
    assert len(tensors) == 2 * 7 * layers


def test_every_shrink_has_eight_partials(bundled):
    """K is at least 256, so that 8 splits of 32 are all non-empty."""
    tensors = load_file(bundled / "adapter" / "adapter_model.safetensors")
    widths = {tensor.shape[1] for name, tensor in tensors.items() if "lora_A" in name}
    assert min(widths) >= 8 * 32


@given(text=st.text())
@settings(deadline=None)
def test_tokenizer_round_trip(tokenizer, text):
    """Any text, foreign or hostile, comes back unchanged."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < len(tokenizer) for token in ids)


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "héllo 世界 🙂", "\x00\x1b[31m", " \n\t ", "12345 6"]
)
def test_tokenizer_round_trip_of_awkward_text(tokenizer, text):
    """Bytes outside the training text are single-byte tokens; digits stay single."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    for piece in tokenizer.convert_ids_to_tokens(ids):
        assert sum(character.isdigit() for character in piece) <= 1


def test_chat_template_gives_the_training_format(tokenizer):
    """One user message becomes exactly the prompt the model was trained on."""
    messages = [{"role": "user", "content": "How many?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|user|>How many?<|end|><|assistant|>"
    assert tokenizer.eos_token == "<|end|>"


def test_prompts_are_the_first_held_out_problems(prompts):
    """They are not selected, and the script still generates them."""
    made = held_out_problems(FULL.seed, FULL.prompts)
    assert prompts == [{"prompt": problem.question, "answer": problem.answer} for problem in made]


def test_prompts_fit_and_are_unlike_each_other(tokenizer, prompts):
    """At least 100 distinct prompts, each with room for its answer in the context."""
    assert len({row["prompt"] for row in prompts}) == len(prompts) >= 100
    assert all(isinstance(row["answer"], int) for row in prompts)
    assert max(len(tokenizer(row["prompt"])["input_ids"]) for row in prompts) < 512 - 130


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_model_answers_held_out_prompts(bundled, prompts):
    """Of the first 8 shipped prompts at least 7 are right at batch 1, and all end themselves."""
    model, tokenizer, _ = load(bundled / "model", bundled / "adapter", "cpu")
    right = 0
    for row in prompts[:8]:
        tokens, margins = generate(model, tokenizer, [row["prompt"]], "cpu", 130)
        assert tokens[0][-1] == tokenizer.eos_token_id
        assert min(margins[0]) >= 0
        answer = final_answer(tokenizer.decode(tokens[0], skip_special_tokens=True))
        right += answer == row["answer"]
    assert right >= 7
