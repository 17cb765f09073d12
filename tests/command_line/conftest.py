"""Tiny models, broken copies of them, and two ways to run the commands as a user types them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Result:
    """What a command gave."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def models(tiny, tmp_path_factory):
    """Folders of a tiny Llama and its adapter, by name."""
    root = tmp_path_factory.mktemp("models")
    model = tiny.write_model(root / "model", tiny.llama_configuration())
    adapter = tiny.write_adapter(root / "adapter", model)
    return SimpleNamespace(model=model, adapter=adapter, root=root)


@pytest.fixture(scope="session")
def flippy(tiny, models, tmp_path_factory):
    """A tiny model whose tokens flip easily: each row of its head has a twin a bit away, and its adapter is strong.

    Twins are for tests of what is reported; the bundled model's near-ties are learned.
    """
    root = tmp_path_factory.mktemp("flippy")
    shutil.copytree(models.model, root / "model")
    file = root / "model" / "model.safetensors"
    weights = load_file(file)
    twins = weights["lm_head.weight"][0::2].clone()
    twins[:, ::16] += 2**-10
    weights["lm_head.weight"][1::2] = twins
    save_file(weights, file, metadata={"format": "pt"})
    adapter = tiny.write_adapter(root / "adapter", root / "model", strength=0.6)
    prompt = " ".join(f"w{number}" for number in tiny.prompt_ids(100, seed=1))
    return SimpleNamespace(model=root / "model", adapter=adapter, prompt=prompt)


@pytest.fixture(scope="session")
def broken(tiny, models, tmp_path_factory):
    """Models, adapters and files that must be refused, by name."""
    root = tmp_path_factory.mktemp("broken")
    narrow = tiny.write_model(root / "narrow", tiny.llama_configuration(hidden_size=128))
    deep = tiny.write_model(root / "deep", tiny.llama_configuration(num_hidden_layers=4))
    shallow = tiny.write_model(root / "shallow", tiny.llama_configuration(num_hidden_layers=2))
    for name, base in (("narrow", narrow), ("deep", deep), ("shallow", shallow)):
        tiny.write_adapter(root / f"{name}-adapter", base)
    tiny.copy_adapter(models.adapter, root / "dora", use_dora=True)
    weights = load_file(models.adapter / "adapter_model.safetensors")
    tiny.copy_adapter(models.adapter, root / "other-names")
    renamed = {name.replace("layers.", "blocks."): weight for name, weight in weights.items()}
    save_file(renamed, root / "other-names" / "adapter_model.safetensors")
    tiny.copy_adapter(models.adapter, root / "pickle")
    (root / "pickle" / "adapter_model.safetensors").unlink()
    torch.save(weights, root / "pickle" / "adapter_model.bin")
    tiny.copy_adapter(models.adapter, root / "no-config")
    (root / "no-config" / "adapter_config.json").unlink()
    tiny.copy_adapter(models.adapter, root / "no-weights")
    (root / "no-weights" / "adapter_model.safetensors").unlink()
    tiny.copy_adapter(models.adapter, root / "garbage")
    (root / "garbage" / "adapter_model.safetensors").write_bytes(b"\x00garbage" * 64)
    tiny.copy_adapter(models.adapter, root / "cut")
    file = root / "cut" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    tiny.copy_adapter(models.adapter, root / "prefix-tuning", peft_type="PREFIX_TUNING")
    tiny.copy_adapter(models.adapter, root / "bad-json")
    (root / "bad-json" / "adapter_config.json").write_text("{", "utf-8")
    shutil.copytree(models.model, root / "nan")
    file = root / "nan" / "model.safetensors"
    values = load_file(file)
    values["model.norm.weight"][3] = float("nan")
    save_file(values, file, metadata={"format": "pt"})
    shutil.copytree(models.model, root / "cut-model")
    file = root / "cut-model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    for name, settings in (
        ("odd-kind", {"model_type": "no-such-kind"}),
        ("quantised", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    ):
        shutil.copytree(models.model, root / name)
        configuration = json.loads((root / name / "config.json").read_text("utf-8"))
        (root / name / "config.json").write_text(json.dumps(configuration | settings), "utf-8")
    shutil.copytree(models.model, root / "bad-config")
    (root / "bad-config" / "config.json").write_text("{", "utf-8")
    shutil.copytree(models.model, root / "no-tokenizer")
    for file in (root / "no-tokenizer").glob("tokenizer*"):
        file.unlink()
    (root / "empty-folder").mkdir()
    (root / "text.txt").write_text("no model", "utf-8")
    (root / "latin.txt").write_bytes(b"caf\xe9")
    (root / "rows.jsonl").write_text('{"prompt": "w5 w6"}\n{"text": "w7"}\nno json\n', "utf-8")
    (root / "empty.gguf").write_bytes(b"GGUF")
    return root


@pytest.fixture
def typed(monkeypatch, capfd):
    """A function that runs a command in this process: name and arguments in, code, stdout and stderr out."""
    from fliptrace.command_line import trace_diff, trace_pair

    programs = {"trace-pair": trace_pair.main, "trace-diff": trace_diff.main}

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            programs[name]()
        out, err = capfd.readouterr()
        return Result(stopped.value.code, out, err)

    return run


@pytest.fixture(scope="session")
def spawned():
    """Run a command in a process of its own: the installed entry point's module, nothing imported before."""

    def run(name, *arguments, before="", **settings):
        module = f"fliptrace.command_line.{name.replace('-', '_')}"
        program = f"{before}\nimport runpy\nrunpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
        done = subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            **settings,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def stored(tiny, models, tmp_path_factory):
    """Stored traces by name: reference and candidate of one pair, and of another prompt, adapter and model."""
    from fliptrace.pair import trace_pair

    root = tmp_path_factory.mktemp("stored")
    other_model = tiny.write_model(root / "other-model", tiny.llama_configuration(), seed=9)
    other_adapter = tiny.write_adapter(root / "other-adapter", models.model, seed=9)
    quick = {"attempts": 1, "max_new_tokens": 3, "observer_control": False, "device": "cpu"}
    for name, model, adapter, prompt in (
        ("pair", models.model, models.adapter, "w5 w6 w7"),
        ("other-prompt", models.model, models.adapter, "w5 w6 w8"),
        ("other-adapter", models.model, other_adapter, "w5 w6 w7"),
        ("other-model", other_model, models.adapter, "w5 w6 w7"),
    ):
        trace_pair(model, adapter, prompt, directory=root / f"{name}.pair", **quick).close()
    whole = (root / "pair.pair" / "reference.trace").read_bytes()
    (root / "cut.trace").write_bytes(whole[: len(whole) // 2])
    (root / "head.trace").write_bytes(whole[:2000])
    (root / "empty.trace").write_bytes(b"")
    (root / "garbage.trace").write_bytes(bytes(range(256)) * 400)
    return root


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts a file system of so many bytes; it is gone after the test."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = []

    def mount(size):
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a file system needs root")
        mounted.append(place)
        return place

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
