"""What cannot be traced faithfully is refused with the right error, and the message names it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from fliptrace.capture.decoding import generate
from fliptrace.capture.recorder import RecorderOptions
from fliptrace.capture.transformers_engine import TransformersEngine, load_model
from fliptrace.errors import InputError, UnsupportedModelError
from fliptrace.trace import Kind


def load(model: Path | str, adapter: Path | str, **options):
    return load_model(str(model), str(adapter), **({"device": "cpu"} | options))


def test_description_identifies_what_was_loaded(llama_folders, tmp_path):
    """Hashes follow the contents of the files, not the folders' names."""
    model, adapter = llama_folders
    first = load(model, adapter).description
    shutil.copytree(model, tmp_path / "other name")
    shutil.copytree(adapter, tmp_path / "other adapter")
    again = load(tmp_path / "other name", tmp_path / "other adapter").description
    for section in ("model", "adapter"):
        assert first[section]["sha256"] == again[section]["sha256"]
        assert len(first[section]["sha256"]) == 64
    assert first["model"]["dtype"] == "bfloat16"
    assert first["model"]["architecture"] == "LlamaForCausalLM"
    assert first["adapter"]["rank"] == 16
    assert first["adapter"]["scaling_values"] == [2.0]
    assert first["tokenizer"]["chat_template_sha256"]


def test_other_weights_give_another_hash(llama_folders, tiny, tmp_path):
    """One more adapter of the same shape is told apart."""
    model, adapter = llama_folders
    other = tiny.write_adapter(tmp_path / "other", model, seed=99)
    assert (
        load(model, other).description["adapter"]["sha256"]
        != load(model, adapter).description["adapter"]["sha256"]
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"use_qalora": True}, "QALoRA"),
        ({"alora_invocation_tokens": [5, 6]}, "activated LoRA"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer replication"),
        ({"target_parameters": ["experts.gate"]}, "bare parameters"),
        ({"trainable_token_indices": [1]}, "token embeddings"),
        ({"arrow_config": {"top_k": 2}}, "Arrow"),
        ({"megatron_config": {"a": 1}}, "Megatron"),
    ],
)
def test_lora_variants_are_refused(llama_folders, tiny, tmp_path, changes, named):
    """A variant's result is not x·Aᵀ·Bᵀ; the message says which variant and which setting."""
    model, adapter = llama_folders
    folder = tiny.copy_adapter(adapter, tmp_path / "variant", **changes)
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        load(model, folder)
    assert next(iter(changes)) in str(caught.value)


def test_a_real_dora_adapter_is_refused(llama_folders, tiny, tmp_path):
    """As PEFT itself writes it."""
    model, _ = llama_folders
    folder = tiny.write_adapter(tmp_path / "dora", model, use_dora=True)
    with pytest.raises(UnsupportedModelError, match="DoRA"):
        load(model, folder)


def test_a_randomised_initialisation_is_refused(llama_folders, tiny, tmp_path):
    """PEFT would give the base model other weights at every load; a plain decomposition is stated."""
    model, adapter = llama_folders
    random = tiny.copy_adapter(adapter, tmp_path / "a", init_lora_weights="pissa_niter_4")
    with pytest.raises(UnsupportedModelError, match=r"pissa_niter_4.*randomised"):
        load_model(str(model), str(random), device="cpu")
    plain = tiny.copy_adapter(adapter, tmp_path / "b", init_lora_weights="olora")
    loaded = load_model(str(model), str(plain), device="cpu")
    assert loaded.description["adapter"]["initialisation"] == "olora"


@pytest.mark.parametrize("kind", ["IA3", "PREFIX_TUNING", None])
def test_other_peft_types_are_refused(llama_folders, tiny, tmp_path, kind):
    """Only LORA has shrinks."""
    model, adapter = llama_folders
    folder = tiny.copy_adapter(adapter, tmp_path / "other", peft_type=kind)
    with pytest.raises(UnsupportedModelError, match=f"type LORA.*{kind}"):
        load(model, folder)


def test_rslora_and_patterns_are_traced(llama_folders, tiny, tmp_path):
    """Settings that only change scaling or rank are plain LoRA; each site has its own rank."""
    model, _ = llama_folders
    folder = tiny.write_adapter(
        tmp_path / "rs",
        model,
        use_rslora=True,
        rank_pattern={"q_proj": 5},
        target_modules=["q_proj", "down_proj"],
    )
    loaded = load(model, folder)
    assert loaded.description["adapter"]["scaling_values"] == [8.0, pytest.approx(32 / 5**0.5)]
    engine = TransformersEngine(loaded)
    assert [shrink.weight.shape[0] for shrink in engine._shrinks] == [5, 16] * 3


def test_a_pickled_adapter_is_refused_without_being_opened(llama_folders, tmp_path):
    """A pickle may run code: it is named, and not read."""
    model, adapter = llama_folders
    folder = tmp_path / "pickled"
    folder.mkdir()
    shutil.copy(adapter / "adapter_config.json", folder)
    (folder / "adapter_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(InputError, match=r"adapter_model\.bin, a pickle"):
        load(model, folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), r"no adapter_config\.json"),
        (
            lambda folder: (folder / "adapter_config.json").write_text("{"),
            r"adapter_config\.json cannot be read",
        ),
        (lambda folder: (folder / "adapter_config.json").write_text("[1]"), "type LORA.*list"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "no weights"),
        (
            lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"abc"),
            "no readable safetensors",
        ),
        (
            lambda folder: (folder / "adapter_model.safetensors").write_bytes(
                (folder / "adapter_model.safetensors").read_bytes()[:5000]
            ),
            "no readable safetensors",
        ),
    ],
)
def test_broken_adapter_folders_are_refused(llama_folders, tiny, tmp_path, spoil, message):
    """Missing, truncated or unreadable files are named with their folder."""
    model, adapter = llama_folders
    folder = tiny.copy_adapter(adapter, tmp_path / "broken")
    spoil(folder)
    with pytest.raises(InputError, match=message) as caught:
        load(model, folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 128},
        {"num_hidden_layers": 2},
        {"num_hidden_layers": 4},
        {"num_key_value_heads": 4},
    ],
)
def test_an_adapter_for_another_base_is_refused(llama_folders, tiny, tmp_path, changes):
    """Other width, fewer layers, more layers, other heads: nothing is left out or filled in without a word."""
    _, adapter = llama_folders
    other = tiny.write_model(tmp_path / "other", tiny.llama_configuration(**changes))
    with pytest.raises(InputError, match="another base model") as caught:
        load(other, adapter)
    assert str(adapter) in str(caught.value)


def test_an_adapter_for_other_layer_names_is_refused(llama_folders, tiny, tmp_path):
    """GPT-NeoX has no q_proj."""
    from transformers import GPTNeoXConfig

    _, adapter = llama_folders
    configuration = GPTNeoXConfig(
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    other = tiny.write_model(tmp_path / "neox", configuration)
    with pytest.raises(InputError, match="another base model"):
        load(other, adapter)


def test_quantised_models_are_refused(llama_folders, tmp_path):
    """A quantised configuration is refused before anything is loaded."""
    model, adapter = llama_folders
    folder = tmp_path / "quantised"
    shutil.copytree(model, folder)
    path = folder / "config.json"
    settings = json.loads(path.read_text("utf-8"))
    settings["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    path.write_text(json.dumps(settings), "utf-8")
    with pytest.raises(UnsupportedModelError, match="quantised weights"):
        load(folder, adapter)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no-such-owner/no-such-model", "no-such-model"),
        ("/no/such/folder", "/no/such/folder"),
        ("", "model"),
        ("../..//x y", "x y"),
    ],
)
def test_unknown_models_are_refused(llama_folders, model, message):
    """The message is one line and names what was asked for."""
    with pytest.raises(InputError, match=message) as caught:
        load(model, llama_folders[1])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("adapter", ["no-such-owner/no-such-adapter", "/no/such/folder", ""])
def test_unknown_adapters_are_refused(llama_folders, adapter):
    """Neither a folder nor something that the hub's cache has."""
    with pytest.raises(InputError, match="adapter") as caught:
        load(llama_folders[0], adapter)
    assert "\n" not in str(caught.value)


def test_a_file_is_no_adapter_and_only_gguf_is_a_model_file(llama_folders):
    """Files of other kinds are named."""
    model, adapter = llama_folders
    with pytest.raises(InputError, match="is a file"):
        load(model, adapter / "adapter_model.safetensors")
    with pytest.raises(InputError, match="another kind of file"):
        load(model / "config.json", adapter)


def test_a_folder_without_weights_is_no_model(llama_folders, tmp_path):
    """An empty folder, and one whose weights are gone."""
    model, adapter = llama_folders
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty"):
        load(tmp_path / "empty", adapter)
    shutil.copytree(model, tmp_path / "hollow")
    (tmp_path / "hollow" / "model.safetensors").unlink()
    with pytest.raises(InputError, match="hollow"):
        load(tmp_path / "hollow", adapter)


def test_a_truncated_model_is_refused(llama_folders, tmp_path):
    """Half a weights file is an error of the input, not a traceback."""
    model, adapter = llama_folders
    folder = tmp_path / "truncated"
    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(InputError, match="truncated"):
        load(folder, adapter)


def test_a_gguf_file_that_is_none_is_refused(llama_folders, tmp_path):
    """The ending alone does not make a GGUF file."""
    path = tmp_path / "fake.gguf"
    path.write_bytes(b"GGUF but not really" * 10)
    with pytest.raises(InputError, match=r"fake\.gguf"):
        load(path, llama_folders[1])


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_no_cuda_where_one_was_asked_for(llama_folders, device):
    """The message says that torch sees none and what to do."""
    with pytest.raises(InputError, match=f"{device}.*no CUDA device.*--device cpu"):
        load(*llama_folders, device=device)


@pytest.mark.parametrize(
    ("option", "value"),
    [("device", "gpu"), ("device", "mps"), ("device", ""), ("dtype", "int8"), ("dtype", "bf16")],
)
def test_nonsense_options_are_refused(llama_folders, option, value):
    """What may be given is listed."""
    with pytest.raises(InputError, match=f"{option} must be auto") as caught:
        load(*llama_folders, **{option: value})
    assert repr(value) in str(caught.value)


def test_unknown_attention_is_refused(llama_folders):
    """transformers' own complaint becomes one line."""
    with pytest.raises(InputError, match="attention"):
        load(*llama_folders, attention="telepathy")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float16", torch.float16), ("float32", torch.float32), ("auto", torch.bfloat16)],
)
def test_the_adapter_takes_the_dtype_of_the_model(llama_folders, dtype, expected):
    """In every dtype, so that the boundary is where the model rounds."""
    loaded = load(*llama_folders, dtype=dtype)
    assert loaded.dtype == expected
    assert {p.dtype for name, p in loaded.model.named_parameters() if "lora_" in name} == {expected}


def test_lora_on_embeddings_is_reported_as_not_observed(llama_folders, tiny, tmp_path, record):
    """An embedding has no shrink: the rest is traced, and a sentence names the embedding."""
    model, _ = llama_folders
    folder = tiny.write_adapter(
        tmp_path / "embedding", model, target_modules=["embed_tokens", "q_proj"]
    )
    engine = TransformersEngine(load(model, folder))
    assert [site.module for site in engine.sites] == ["self_attn.q_proj"] * 3
    (sentence,) = engine.not_observed()
    assert "model.embed_tokens" in sentence
    trace, _ = record(engine, tiny.prompt_ids(5), tokens=2)
    assert len(trace.steps) == 2


def test_an_adapter_on_embeddings_alone_has_nothing_to_trace(llama_folders, tiny, tmp_path):
    """No shrink at all is refused, not recorded as an empty trace."""
    model, _ = llama_folders
    folder = tiny.write_adapter(tmp_path / "embedding", model, target_modules=["embed_tokens"])
    with pytest.raises(UnsupportedModelError, match="no shrink to trace"):
        TransformersEngine(load(model, folder))


def test_lora_on_the_head_is_a_site_of_its_own(llama_folders, tiny, tmp_path, record):
    """lm_head lies outside the layers and sees the last row only."""
    model, _ = llama_folders
    folder = tiny.write_adapter(tmp_path / "head", model, target_modules=["v_proj", "lm_head"])
    engine = TransformersEngine(load(model, folder))
    assert [site.path for site in engine.sites][-1] == "lm_head"
    assert engine.sites[-1].layer is None
    trace, _ = record(engine, tiny.prompt_ids(5), tokens=2)
    assert trace.record("lm_head", Kind.SHRINK, 0).shape == (1, 16)
    assert trace.record(engine.sites[0].path, Kind.SHRINK, 0).shape == (5, 16)


def test_shared_lora_layers_are_refused(llama_folders):
    """A LoRA layer that runs twice per forward has no single record per step."""
    loaded = load(*llama_folders)
    layers = loaded.model.model.layers
    layers[2].mlp = layers[1].mlp
    with pytest.raises(UnsupportedModelError, match="ran 2 times"):
        TransformersEngine(loaded)


def test_modes_do_not_leak_into_the_libraries(llama_folders):
    """Loading keeps transformers quiet and puts its verbosity back."""
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load(*llama_folders)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_recorder_options_describe_themselves():
    """What a manifest says of the recording."""
    described = RecorderOptions(operands=True, redaction_key=b"secret").describe()
    assert described["redacted"] is True
    assert "secret" not in str(described)
    assert "secret" not in repr(RecorderOptions(redaction_key=b"secret"))


@pytest.mark.smollm2
def test_a_gguf_file_loads_dequantised(smollm2_gguf, tmp_path):
    """The manifest says that the weights were dequantised on load."""
    from safetensors.torch import save_file

    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["v_proj"],
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings), "utf-8")
    weights = {}
    for layer in range(30):
        path = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        weights[f"{path}.lora_A.weight"] = torch.randn(4, 576) / 24
        weights[f"{path}.lora_B.weight"] = torch.randn(192, 4) / 50
    save_file(weights, tmp_path / "adapter_model.safetensors")
    loaded = load(smollm2_gguf, tmp_path)
    assert loaded.description["model"]["dequantised_on_load"] is True
    assert loaded.dtype == torch.bfloat16
    engine = TransformersEngine(loaded)
    assert len(engine.sites) == 30
    assert len(generate(engine, [1, 2, 3], max_new_tokens=2, end_ids=()).token_ids) == 2
