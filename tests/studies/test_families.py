"""Model families: small random models through trace-study repeat and a pair.

Llama's and Gemma 3's recording is tested in tests/capture. On vLLM the same models run where it is installed and takes
them.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

import fliptrace as ft
from fliptrace.command_line import trace_check, trace_study

HAS_VLLM = importlib.util.find_spec("vllm") is not None
PROMPT = "w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FAMILIES = ["llama", "gemma3", "gemma4", "qwen3", "nemotron_h"]
ENGINES = [
    "transformers",
    pytest.param("vllm", marks=pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed")),
]


def configuration_of(family, tiny):
    """Return a small configuration: grouped heads, windows where the family has them."""
    import transformers

    common = {
        "vocab_size": tiny.VOCABULARY,
        "max_position_embeddings": tiny.CONTEXT,
        "initializer_range": 0.06,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4,
    }
    if family == "llama":
        return tiny.llama_configuration()
    if family == "gemma3":
        return tiny.gemma_configuration()
    if family == "qwen3":
        return transformers.Qwen3Config(
            hidden_size=256,
            intermediate_size=384,
            num_hidden_layers=3,
            num_key_value_heads=2,
            head_dim=64,
            **common,
        )
    if family == "gemma4":  # layers of full attention have heads of another size
        return transformers.Gemma4TextConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_key_value_heads=1,
            head_dim=32,
            global_head_dim=64,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"] * 2,
            **common,
        )
    return transformers.NemotronHConfig(
        hidden_size=128,
        intermediate_size=256,
        num_key_value_heads=2,
        head_dim=32,
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=2,
        ssm_state_size=16,
        chunk_size=16,
        layers_block_type=["mamba", "attention", "mamba", "attention"],
        **common,
    )


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    """A function that writes a family's model and adapter once."""
    made = {}

    def write(family):
        if family not in made:
            root = tmp_path_factory.mktemp(family)
            try:
                configuration = configuration_of(family, tiny)
            except AttributeError:
                pytest.skip(f"this transformers has no {family}")
            model = tiny.write_model(root / "model", configuration)
            targets = [*ATTENTION, "in_proj"] if family == "nemotron_h" else list(tiny.PROJECTIONS)
            adapter = tiny.write_adapter(root / "adapter", model, target_modules=targets)
            made[family] = str(model), str(adapter)
        return made[family]

    return write


def repeat(run_main, folders, tmp_path, engine, *reductions):
    """Run trace-study repeat on two prompts, three times each."""
    model, adapter = folders
    task = tmp_path / "prompts.jsonl"
    task.write_text("\n".join(json.dumps({"prompt": f"w{n} {PROMPT}"}) for n in (20, 30)))
    named = [word for reduction in reductions for word in ("--reduction", reduction)]
    result = run_main(
        trace_study.main,
        *("repeat", "--model", model, "--adapter", adapter, "--engine", engine, "--device", "cpu"),
        *("--task", f"jsonl:{task}", "--prompts", 2, "--repetitions", 3, "--max-new-tokens", 24),
        *(*named, "--no-chat-template", "--quiet", "--json", "--out", tmp_path / engine),
    )
    assert result.code == 0, result.err
    return json.loads(result.out)["reductions"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_repeat_on_transformers(run_main, folders, tmp_path, family):
    """All families run; a fixed order changes neither a token nor a logit's bit."""
    found = repeat(
        run_main, folders(family), tmp_path, "transformers", "atomic:8", "deterministic:8"
    )
    assert found["deterministic:8/32"]["logits"]["hits"] == 0
    assert found["deterministic:8/32"]["changed"]["hits"] == 0
    assert found["atomic:8/32"]["logits"]["trials"] > 40


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_replay_decide_and_check(run_main, folders, tmp_path, family, engine):
    """Shrinks of every site are replayed, decisions repeat, and trace-check passes, all under a fixed order."""
    model, adapter = folders(family)
    stack = ("--model", model, "--adapter", adapter, "--engine", engine, "--device", "cpu")
    plain = (*stack, "--no-chat-template", "--quiet", "--json")
    (tmp_path / "task.jsonl").write_text(json.dumps({"prompt": PROMPT}))
    replayed = run_main(
        trace_study.main,
        *("replay", *plain, "--task", f"jsonl:{tmp_path / 'task.jsonl'}", "--prompts", 1),
        *("--executions", 2, "--reduction", "atomic:8", "--reduction", "deterministic:8"),
        *("--out", tmp_path / "replay"),
    )
    assert replayed.code == 0, replayed.err
    atomic, _, *fixed = json.loads(replayed.out)["reductions"]
    assert atomic["elements_differing"] > 0
    assert [each["elements_differing"] for each in fixed] == [0, 0]
    (tmp_path / "t.csv").write_text(f"text,label\n{PROMPT},1\n{PROMPT} w16,0\n")
    decided = run_main(
        trace_study.main,
        *("decide", *plain, "--csv", tmp_path / "t.csv", "--yes", "w5", "--no", "w6"),
        *("--question", "w7", "--repetitions", 2, "--reduction", "deterministic:8"),
        *("--out", tmp_path / "decide"),
    )
    assert decided.code == 0, decided.err
    (entry,) = json.loads(decided.out)["reductions"]
    assert (entry["changed"]["hits"], entry["changed"]["trials"]) == (0, 2)
    checked = run_main(
        trace_check.main,
        *(*plain, "--prompt", PROMPT, "--runs", 2, "--max-new-tokens", 4),
        *("--reduction", "deterministic:8"),
    )
    assert checked.code == 0, checked.err
    assert json.loads(checked.out)["kernel"].startswith("deterministic:8/32")


@pytest.mark.parametrize("family", ["gemma4", "qwen3"])
def test_a_pair_on_transformers(folders, family):
    """Every attention layer's cache is recorded, windows as the family has them, and the observer changes nothing."""
    model, adapter = folders(family)
    engine = ft.load_engine(model, adapter, device="cpu")
    with ft.trace_pair(
        engine, prompt=PROMPT, attempts=2, max_new_tokens=12, chat_template=False
    ) as pair:
        assert len(pair.reference.manifest.get("engine.cache_layers")) == len(engine.cache_layers)
        assert "equal" in pair.diff.coverage.observer_control
    windows = {"gemma4": {0: 8, 1: None, 2: 8, 3: None}, "qwen3": {0: None, 1: None, 2: None}}
    assert dict(engine.cache_windows) == windows[family]


@pytest.mark.filterwarnings("ignore")
def test_a_hybrids_state_is_that_of_a_fresh_prefill(folders):
    """Nemotron-H steps as with a fresh prefill of the same tokens; a pair of it names its Mamba layers."""
    engine = ft.load_engine(*folders("nemotron_h"), device="cpu")
    assert engine.cache_layers == (1, 3)
    ids = ft.encode_prompt(engine.tokenizer, PROMPT, chat_template=False).ids
    engine.start(ids[:8])
    engine.step()
    for token in ids[8:]:
        stepped = engine.step(token)
    engine.start(ids)
    whole = engine.step()
    assert float((stepped - whole).abs().max()) < 0.05 * float(whole.abs().max())
    with ft.trace_pair(
        engine, prompt=PROMPT, attempts=1, max_new_tokens=4, chat_template=False
    ) as pair:
        assert pair.reference.manifest.get("engine.state_layers") == [0, 2]
        assert "equal" in pair.diff.coverage.observer_control


@pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed here")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_repeat_on_vllm(run_main, folders, tmp_path, family):
    """The families that vLLM runs here: a fixed order changes nothing."""
    found = repeat(run_main, folders(family), tmp_path, "vllm", "atomic:8", "deterministic:8")
    assert found["deterministic:8/32"]["logits"]["hits"] == 0
    assert found["atomic:8/32"]["logits"]["trials"] > 40
