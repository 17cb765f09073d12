"""Settings, prompts and data sets: what is taken and what is refused; the public names."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import fliptrace
import fliptrace.pair
from fliptrace.errors import InputError
from fliptrace.pair import (
    PairSettings,
    Prompt,
    encode_prompt,
    load_engine,
    read_dataset,
    trace_pair,
)
from fliptrace.pair.prompts import GSM8K_INSTRUCTION, parse_selection


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attempts": 0}, "attempts must be at least 1; got 0"),
        ({"max_new_tokens": 0}, "max new tokens must be at least 1; got 0"),
        ({"attempts": "3"}, "attempts must be a whole number; got '3'"),
        ({"max_new_tokens": 2.0}, "max new tokens must be a whole number; got 2.0"),
        ({"until": "never"}, "'never'"),
        ({"seed": -1}, "got -1"),
        ({"seed": 2**63 - 1}, "2\\^63"),
        ({"reduction": "sum"}, "sum"),
        ({"candidate_reduction": "atomic:1000"}, "1000"),
    ],
)
def test_settings_that_mean_nothing(engine, changes, message):
    """Refused before anything runs, by the settings and by trace_pair."""
    with pytest.raises(InputError, match=message):
        PairSettings(**changes).check()
    with pytest.raises(InputError, match=message):
        trace_pair(engine, prompt="w5", **changes)


@pytest.mark.parametrize("name", ["atomic:8", "unsplit", "deterministic:4/32", "sk1"])
def test_settings_that_are_taken(name):
    """Reductions by short, long and the paper's names."""
    PairSettings(reduction=name, candidate_reduction=name, seed=2**63 - 22).check()


def test_an_unknown_setting_is_a_type_error(engine):
    """Misspelled keywords are not swallowed."""
    with pytest.raises(TypeError, match="atempts"):
        trace_pair(engine, prompt="w5", atempts=3)


def test_a_model_needs_an_adapter(models):
    """trace_pair(model) alone says what is missing."""
    with pytest.raises(InputError, match="adapter"):
        trace_pair(models.model, prompt="w5")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"engine": "warp"}, "warp"), ({"attention": "flash"}, "flash"), ({"dtype": "int8"}, "int8")],
)
def test_engines_are_chosen_by_name(models, changes, message):
    """Unknown names are refused with the known ones."""
    with pytest.raises(InputError, match=message):
        load_engine(str(models.model), str(models.adapter), device="cpu", **changes)


def test_a_prompt_with_the_chat_template(engine):
    """The template wraps the text once; no special token is added to it."""
    tokenizer = engine.loaded.tokenizer
    prompt = encode_prompt(tokenizer, "w5 w6", source="here")
    assert prompt == Prompt((5, 6), "w5 w6 ", True, "here")


def test_a_prompt_as_it_is(engine):
    """Without the template the text is what is encoded."""
    tokenizer = engine.loaded.tokenizer
    prompt = encode_prompt(tokenizer, " w5 w6", chat_template=False)
    assert prompt == Prompt((5, 6), " w5 w6", False, "given")


def test_a_tokenizer_without_template(engine, monkeypatch):
    """Applying none is no error, and the prompt says so."""
    monkeypatch.setattr(engine.loaded.tokenizer, "chat_template", None)
    assert encode_prompt(engine.loaded.tokenizer, "w5").chat_template is False


def test_a_tokenizer_of_another_make(engine):
    """As vLLM's own for Mistral's files: it takes a text and whether special tokens are added, and no more."""

    class Plain:
        def __call__(self, text, add_special_tokens=True):
            return engine.loaded.tokenizer(text, add_special_tokens=add_special_tokens)

    assert encode_prompt(Plain(), "w5 w6").ids == (5, 6)


def test_a_template_that_refuses(engine, monkeypatch):
    """The template's own complaint is passed on with a way out."""
    refusing = "{{ raise_exception('only polite questions') }}"
    monkeypatch.setattr(engine.loaded.tokenizer, "chat_template", refusing)
    with pytest.raises(InputError, match=r"only polite questions.*--no-chat-template"):
        encode_prompt(engine.loaded.tokenizer, "w5")


def test_an_engine_has_its_adapter(engine, models):
    """A second one would be ignored, and so would a prompt in its place."""
    for arguments in ((str(models.adapter), "w5"), ("w5",)):
        with pytest.raises(InputError, match="has its adapter already"):
            trace_pair(engine, *arguments)


@pytest.mark.parametrize("prompt", [None, [5, 6], b"w5"])
def test_a_prompt_of_another_type(engine, prompt):
    """Ids need a Prompt around them."""
    with pytest.raises(InputError, match="a text or a Prompt"):
        trace_pair(engine, prompt=prompt)


def test_a_prompt_that_is_no_text(engine):
    """What Python makes of bytes that are no UTF-8 on a command line."""
    with pytest.raises(InputError, match="character 1"):
        trace_pair(engine, prompt="w\udcff")


@pytest.mark.parametrize("text", ["", " ", "\n\t "])
def test_an_empty_prompt(engine, text):
    """White space is nothing to ask."""
    with pytest.raises(InputError, match="empty"):
        encode_prompt(engine.loaded.tokenizer, text)
    with pytest.raises(InputError, match="empty"):
        trace_pair("no model is loaded for it", "nor an adapter", text)


@pytest.fixture
def rows(tmp_path):
    """Paths of a GSM8K file and one with prompts; blank lines do not count."""
    gsm8k = [{"question": f"Q{row}?", "answer": "#### 1"} for row in range(3)]
    (tmp_path / "gsm8k.jsonl").write_text("\n\n".join(map(json.dumps, gsm8k)), "utf-8")
    prompts = [{"prompt": "P0"}, {"other": 1}, [1], 5]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)), "utf-8")
    return tmp_path


def test_rows_are_read_in_the_order_asked(rows):
    """GSM8K questions get the instruction; prompts come as they are."""
    assert read_dataset(f"gsm8k:{rows / 'gsm8k.jsonl'}", [2, 0]) == [
        ("gsm8k row 2", f"Q2?\n\n{GSM8K_INSTRUCTION}"),
        ("gsm8k row 0", f"Q0?\n\n{GSM8K_INSTRUCTION}"),
    ]
    assert read_dataset(f"jsonl:{rows / 'prompts.jsonl'}", [0]) == [("jsonl row 0", "P0")]


@pytest.mark.parametrize(
    ("specification", "row", "message"),
    [
        ("gsm8k", 0, "KIND:PATH"),
        ("gsm8k:", 0, "KIND:PATH"),
        ("csv:{}/gsm8k.jsonl", 0, "csv"),
        ("gsm8k:{}/none.jsonl", 0, "none.jsonl"),
        ("gsm8k:{}", 0, "cannot be read"),
        ("gsm8k:{}/gsm8k.jsonl", 3, "rows 0 to 2"),
        ("gsm8k:{}/gsm8k.jsonl", -1, "rows 0 to 2"),
        ("gsm8k:{}/prompts.jsonl", 0, "no gsm8k row"),
        ("jsonl:{}/prompts.jsonl", 1, "no jsonl row"),
        ("jsonl:{}/prompts.jsonl", 2, "no jsonl row"),
        ("jsonl:{}/prompts.jsonl", 3, "no jsonl row"),
    ],
)
def test_rows_that_cannot_be_read(rows, specification, row, message):
    """Kind, path, row and field are each named."""
    with pytest.raises(InputError, match=message):
        read_dataset(specification.format(rows), [row])


def test_an_empty_data_set_says_so(tmp_path):
    """There are no rows 0 to -1."""
    (tmp_path / "empty.jsonl").write_text("\n", "utf-8")
    with pytest.raises(InputError, match="no rows"):
        read_dataset(f"jsonl:{tmp_path / 'empty.jsonl'}", [0])


@pytest.mark.parametrize(
    ("words", "selected"),
    [
        ([], []),
        (["0"], [0]),
        (["0", "5", "10-12"], [0, 5, 10, 11, 12]),
        (["0 5 10-12"], [0, 5, 10, 11, 12]),
        (["3,1", "1"], [3, 1, 1]),
        (["7-7"], [7]),
    ],
)
def test_selections(words, selected):
    """Numbers and ranges, one word or several, in the order given."""
    assert parse_selection(words) == selected


@pytest.mark.parametrize("word", ["x", "-1", "1-", "5-2", "1-2-3", "1.5", "0x3", "0-99999999", "²"])
def test_selections_that_are_none(word):
    """What is no row is named."""
    with pytest.raises(InputError, match="got"):
        parse_selection([word])


def test_public_names():
    """fliptrace exports exactly these, all there; an unknown name is an AttributeError."""
    assert fliptrace.__all__ == [
        "Kind",
        "Neighbour",
        "Pair",
        "PairDiff",
        "PairSettings",
        "Prompt",
        "Trace",
        "assert_repeatable",
        "attach",
        "bundled_model",
        "compare",
        "compare_executions",
        "diff_traces",
        "encode_prompt",
        "load_engine",
        "load_pair",
        "open_trace",
        "prepare_watch",
        "trace_pair",
        "watch",
    ]
    for module in (fliptrace, fliptrace.pair):
        assert sorted(module.__all__) == module.__all__
        assert all(getattr(module, name) is not None for name in module.__all__)
        assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = fliptrace.no_such_name


def test_importing_loads_torch_alone():
    """`import fliptrace` and its names' modules bring neither transformers nor plotly."""
    program = (
        "import sys, fliptrace\n"
        "heavy = {'transformers', 'peft', 'plotly', 'networkx', 'pyarrow', 'typer', 'rich', 'jinja2'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "fliptrace.trace_pair, fliptrace.diff_traces\n"
        "print(sorted({'transformers', 'peft', 'plotly', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[]", "[]"]
