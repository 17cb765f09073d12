"""Whatever a user gets wrong: one line on stderr, exit code 2, nothing on stdout, nothing half-written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fliptrace.errors import RecordingError

#: A good command, to which each case does one bad thing (a repeated option wins over the one before it).
GOOD = "--model {model} --adapter {adapter} --prompt w5_w6 --max-new-tokens 3 --attempts 1 --device cpu"

# name: (arguments after GOOD, words that the message must hold). {…} are folders; _ stands for a space.
PAIR_CASES = {
    "unknown model folder": ("--model {root}/nothing", ["nothing", "no folder", "hub"]),
    "unknown hub name": ("--model no-one/no-model", ["no-one/no-model", "no folder"]),
    "model is a text file": ("--model {broken}/text.txt", ["text.txt", ".gguf"]),
    "model folder is empty": ("--model {broken}/empty-folder", ["empty-folder", "loaded"]),
    "model file is cut": ("--model {broken}/cut-model", ["cut-model", "loaded"]),
    "model config no JSON": ("--model {broken}/bad-config", ["bad-config", "loaded"]),
    "model of no known kind": ("--model {broken}/odd-kind", ["odd-kind", "loaded"]),
    "model without tokenizer": ("--model {broken}/no-tokenizer", ["no-tokenizer", "tokenizer"]),
    "model quantised": ("--model {broken}/quantised", ["quantised", "GGUF"]),
    "GGUF is cut": ("--model {broken}/empty.gguf", ["empty.gguf", "loaded"]),
    "unknown adapter": ("--adapter {root}/nothing", ["nothing", "no folder", "hub"]),
    "adapter is a file": ("--adapter {broken}/text.txt", ["text.txt", "a file", "folder"]),
    "adapter for a narrower base": ("--adapter {broken}/narrow-adapter", ["another base"]),
    "adapter for more layers": ("--adapter {broken}/deep-adapter", ["another base"]),
    "adapter for fewer layers": ("--adapter {broken}/shallow-adapter", ["another base"]),
    "adapter for other names": ("--adapter {broken}/other-names", ["another base"]),
    "adapter in pickle format": ("--adapter {broken}/pickle", ["pickle", "safe_serialization"]),
    "adapter without config": ("--adapter {broken}/no-config", ["adapter_config.json"]),
    "adapter without weights": ("--adapter {broken}/no-weights", ["no weights"]),
    "adapter config no JSON": ("--adapter {broken}/bad-json", ["adapter_config.json", "JSON"]),
    "adapter weights garbage": ("--adapter {broken}/garbage", ["adapter_model", "safetensors"]),
    "adapter weights cut": ("--adapter {broken}/cut", ["adapter_model", "safetensors"]),
    "DoRA": ("--adapter {broken}/dora", ["DoRA", "rsLoRA are supported"]),
    "not LoRA": ("--adapter {broken}/prefix-tuning", ["LORA", "PREFIX_TUNING"]),
    "NaN logits": ("--model {broken}/nan", ["NaN", "step 0"]),
    "empty prompt": ("--prompt=", ["empty", "command line"]),
    "white prompt": ("--prompt ___", ["empty"]),
    "prompt no UTF-8": ("--prompt w\udcff", ["command line", "UTF-8"]),
    "prompt too long": (f"--prompt {'w5_' * 200}", ["200", "160", "shorten"]),
    "prompt fills the context": (f"--prompt {'w5_' * 160}", ["160", "room"]),
    "prompt file missing": ("--prompt-file {root}/nothing", ["nothing", "cannot be read"]),
    "prompt file not UTF-8": ("--prompt-file {broken}/latin.txt", ["latin.txt", "utf-8"]),
    "out is not empty": ("--out {full}", ["full", "not empty"]),
    "out is a file": ("--out {broken}/text.txt", ["text.txt", "not empty"]),
    "out under a file": ("--out {broken}/text.txt/x", ["text.txt"]),
    "out cannot be made": ("--out /proc/nothing/x", ["/proc/nothing"]),
    "CUDA without a GPU": ("--device cuda", ["cuda", "--device cpu"]),
    "device nonsense": ("--device nonsense", ["nonsense", "cuda:N"]),
    "device of another kind": ("--device meta", ["meta", "cuda:N"]),
    "reduction nonsense": ("--reduction nonsense", ["nonsense", "unsplit"]),
    "reduction without splits": ("--reduction atomic:0", ["splits", "1 to 64", "got 0"]),
    "candidate reduction nonsense": ("--candidate-reduction atomic:x", ["atomic:x"]),
    "no attempts": ("--attempts 0", ["attempts", "at least 1", "0"]),
    "attempts no number": ("--attempts many", ["--attempts", "many"]),
    "negative tokens": ("--max-new-tokens -1", ["at least 1", "-1"]),
    "tokens no number": ("--max-new-tokens 1.5", ["--max-new-tokens", "1.5"]),
    "negative seed": ("--seed -1", ["seed", "-1"]),
    "huge seed": ("--seed 9223372036854775807", ["seed", "2^63"]),
    "dtype nonsense": ("--dtype int8", ["--dtype", "int8", "bfloat16"]),
    "fail-on nonsense": ("--fail-on nothing", ["--fail-on", "nothing", "surviving"]),
    "engine nonsense": ("--engine warp", ["--engine", "warp", "transformers"]),
    "attention nonsense": ("--attention flash", ["--attention", "flash", "sdpa"]),
    "logits nonsense": ("--logits some", ["--logits", "some", "near-ties"]),
    "data set kind": (
        "--dataset csv:{broken}/rows.jsonl --select 0",
        ["csv", "gsm8k", "KIND:PATH"],
    ),
    "data set path": ("--dataset jsonl:{root}/nothing --select 0", ["nothing", "cannot be read"]),
    "data set without rows": ("--dataset jsonl:{broken}/rows.jsonl", ["--select"]),
    "row out of range": ("--dataset jsonl:{broken}/rows.jsonl --select 3", ["0 to 2", "3"]),
    "row without the field": (
        "--dataset jsonl:{broken}/rows.jsonl --select 1",
        ["row 1", "prompt"],
    ),
    "row no JSON": ("--dataset jsonl:{broken}/rows.jsonl --select 2", ["row 2"]),
    "select nonsense": ("--dataset jsonl:{broken}/rows.jsonl --select 0 x", ["'x'", "10-19"]),
    "select backwards": ("--dataset jsonl:{broken}/rows.jsonl --select 5-2", ["low to high"]),
    "select without a data set": ("--select 0", ["--dataset"]),
    "select without rows": ("--select", ["--select", "argument"]),
    "unknown option": ("--modle x", ["--modle", "--help"]),
    "stray words": ("stray words", ["stray"]),
    "option without value": ("--model", ["--model", "argument"]),
    "demo with a model": ("--demo", ["--demo", "--model"]),
}

DIFF_CASES = {
    "no such trace": ("{root}/nothing {good}", ["nothing"]),
    "a folder": ("{stored} {good}", ["stored"]),
    "an empty file": ("{good} {stored}/empty.trace", ["empty.trace"]),
    "garbage": ("{good} {stored}/garbage.trace", ["garbage.trace"]),
    "half of it": ("{good} {stored}/cut.trace", ["cut.trace"]),
    "its head": ("{good} {stored}/head.trace", ["head.trace"]),
    "another prompt": ("{good} {stored}/other-prompt.pair/reference.trace", ["prompt"]),
    "another adapter": ("{good} {stored}/other-adapter.pair/reference.trace", ["adapter"]),
    "another model": ("{good} {stored}/other-model.pair/reference.trace", ["model"]),
    "one trace": ("{good}", ["CANDIDATE"]),
    "no trace": ("", ["REFERENCE"]),
    "three traces": ("{good} {good} {good}", ["unexpected extra"]),
    "round-to nonsense": ("{good} {good} --round-to int8", ["--round-to", "int8", "bfloat16"]),
    "out is not empty": ("{good} {good} --out {full}", ["full", "not empty"]),
    "out cannot be made": ("{good} {good} --out /proc/nothing/x", ["/proc/nothing"]),
    "damage is verified": ("{good} {stored}/cut.trace --verify", ["cut.trace"]),
}


@pytest.fixture
def fill(models, broken, tmp_path):
    """Split a command line and fill in folders; what is in tmp_path afterwards must be what was before."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept.txt").write_text("kept", "utf-8")
    names = {
        "model": models.model,
        "adapter": models.adapter,
        "broken": broken,
        "root": tmp_path,
        "full": tmp_path / "full",
    }

    def filled(line, **more):
        return [word.replace("_", " ").format(**names, **more) for word in line.split()]

    return filled


def check_refusal(result, words):
    lines = result.err.splitlines()
    assert len(lines) == 1, result.err
    assert result.code == 2
    assert result.out == ""
    assert lines[0].startswith(("trace-pair: ", "trace-diff: "))
    assert "run again with --debug and report it" not in lines[0]  # what nobody thought of
    for word in words:
        assert word.casefold() in lines[0].casefold()


def contents(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


@pytest.mark.parametrize("case", PAIR_CASES)
def test_trace_pair_refuses(typed, fill, tmp_path, monkeypatch, case):
    """In this process, through the command's own main()."""
    arguments, words = PAIR_CASES[case]
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    result = typed("trace-pair", "--out", tmp_path / "deep" / "out", *fill(f"{GOOD} {arguments}"))
    check_refusal(result, words)
    assert contents(tmp_path) == before
    assert (tmp_path / "full" / "kept.txt").read_text("utf-8") == "kept"


@pytest.mark.parametrize("case", DIFF_CASES)
def test_trace_diff_refuses(typed, fill, stored, tmp_path, case):
    """In this process, through the command's own main(); the traces stay as they were."""
    arguments, words = DIFF_CASES[case]
    good = stored / "pair.pair" / "reference.trace"
    before = contents(tmp_path), contents(stored), good.read_bytes()
    result = typed("trace-diff", *fill(arguments, stored=stored, good=good))
    check_refusal(result, words)
    assert (contents(tmp_path), contents(stored), good.read_bytes()) == before


@pytest.mark.parametrize("missing", ["--model", "--adapter", "--prompt", "--out"])
def test_trace_pair_names_what_is_missing(typed, models, tmp_path, missing):
    """Each thing that must be given is asked for by its option."""
    given = {
        "--model": models.model,
        "--adapter": models.adapter,
        "--prompt": "w5",
        "--out": tmp_path / "out",
    }
    given.pop(missing)
    result = typed("trace-pair", *(word for option in given.items() for word in option))
    check_refusal(result, [missing])
    assert contents(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("trace-pair", f"{GOOD} --out {{root}}/out --adapter {{broken}}/deep-adapter", ["base"]),
        ("trace-pair", f"{GOOD} --out {{root}}/out --model {{broken}}/nan", ["NaN"]),
        ("trace-pair", f"{GOOD} --out {{root}}/out --engine warp", ["warp"]),
        ("trace-diff", "{broken}/text.txt {root}/nothing", ["text.txt"]),
    ],
)
def test_a_process_of_its_own_refuses_too(spawned, fill, tmp_path, name, arguments, words):
    """In a new process nothing is imported yet, so libraries warn as they do for a user."""
    before = contents(tmp_path)
    check_refusal(spawned(name, *fill(arguments)), words)
    assert contents(tmp_path) == before


def test_what_an_interrupted_run_left_is_not_overwritten(typed, fill, tmp_path):
    """The folder of an earlier run may hold the only traces of hours; it is named and kept."""
    (tmp_path / ".out.partial").mkdir()
    before = contents(tmp_path)
    result = typed("trace-pair", "--out", tmp_path / "out", *fill(GOOD))
    check_refusal(result, [".out.partial", "interrupted", "remove"])
    assert contents(tmp_path) == before


def test_the_working_directory_is_not_replaced(typed, fill, tmp_path, monkeypatch):
    """An empty folder gives way to the results, but the shell would be left in one that is gone."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    before = contents(tmp_path)
    check_refusal(typed("trace-pair", "--out", ".", *fill(GOOD)), ["working directory"])
    assert contents(tmp_path) == before


def test_a_hook_that_never_fires_is_an_error(models, tmp_path):
    """A LoRA layer that is no longer in the forward leaves a hole, which must not look like equality."""
    from fliptrace.pair import load_engine, trace_pair

    engine = load_engine(str(models.model), str(models.adapter), device="cpu")
    attention = engine.model.model.layers[1].self_attn
    attention.v_proj = attention.v_proj.base_layer
    with pytest.raises(RecordingError, match="v_proj"):
        trace_pair(engine, prompt="w5 w6", attempts=1, max_new_tokens=2, directory=tmp_path / "x")


def test_debug_shows_the_traceback(fill, tmp_path):
    """--debug lets the exception through; the output folder is cleaned all the same."""
    from fliptrace.command_line.running import run
    from fliptrace.command_line.trace_pair import trace_pair

    before = contents(tmp_path)
    arguments = ["--out", str(tmp_path / "out"), "--debug", *fill(f"{GOOD} --model {{broken}}/nan")]
    with pytest.raises(RecordingError, match="NaN"):
        run(trace_pair, "trace-pair", arguments)
    assert contents(tmp_path) == before


def test_the_check_itself_fails_on_two_lines():
    """A second line on stderr, as a library's warning would be, is found."""
    noisy = SimpleNamespace(code=2, out="", err="UserWarning: x\ntrace-pair: y\n")
    with pytest.raises(AssertionError):
        check_refusal(noisy, [])


def test_a_study_that_is_not_there_is_named(monkeypatch, capsys):
    """Its name is what is wrong, whatever options follow."""
    from fliptrace.command_line import trace_study

    monkeypatch.setattr("sys.argv", ["trace-study", "repaet", "--device", "cpu", "--out", "x"])
    with pytest.raises(SystemExit) as stopped:
        trace_study.main()
    shown = capsys.readouterr()
    assert (stopped.value.code, shown.out) == (2, "")
    assert "a study is one of batch, " in shown.err
    assert "got 'repaet'" in shown.err


@pytest.mark.parametrize("study", ["batch", "latency"])
def test_a_device_is_vllms_matter(study, tmp_path, capsys):
    """Studies on vLLM's own engines have no --device; the line says what there is in its place."""
    from fliptrace.command_line.running import run
    from fliptrace.command_line.trace_study import COMMANDS

    def line_of(*words):
        with pytest.raises(SystemExit) as stopped:
            run(COMMANDS[study], study, [*words, "--out", str(tmp_path / "none")])
        assert stopped.value.code == 2
        return capsys.readouterr().err

    line = line_of("--device", "cpu")
    assert all(
        word in line for word in ("vLLM", "got --device cpu", "Leave it out", "--engine-python")
    )
    assert "--device" not in line_of("--device", "auto", "--budget-minutes", "0")  # as if left out
    assert contents(tmp_path) == []
