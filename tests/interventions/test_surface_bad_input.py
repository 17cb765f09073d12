"""trace-intervene, whatever a user gets wrong: one line on stderr, exit code 2, nothing on stdout, nothing changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SITE = "model.layers.0.mlp.up_proj"


def shrink(**changes):
    return {"edit": "shrink", "site": SITE, "step": 0, **changes}


#: Files of edits by name: what is in them.
EDITS = {
    "good": shrink(),
    "no-json": "{edit: shrink}",
    "deep": "[" * 5000,
    "empty-list": [],
    "number": 7,
    "no-kind": {"site": SITE, "step": 0},
    "unknown-kind": {"edit": "weights", "step": 0},
    "unknown-key": shrink(rank=3),
    "no-step": {"edit": "shrink", "site": SITE},
    "negative-step": shrink(step=-1),
    "step-text": shrink(step="first"),
    "positions-text": shrink(positions="3"),
    "positions-empty": shrink(positions=[]),
    "positions-negative": shrink(positions=[-1]),
    "rank-twice": shrink(rank_indices=[2, 2]),
    "value-word": shrink(value="mine"),
    "value-nan": shrink(positions=[1], rank_indices=[1], value={"bits": "0x1ffffffff"}),
    "value-bits-text": shrink(value={"bits": "zz"}),
    "second-of-two": [shrink(), {"edit": "cache"}],
    "no-such-site": shrink(site="model.layers.9.mlp.up_proj"),
    "no-such-step": shrink(step=99),
    "no-such-position": shrink(positions=[500]),
    "no-such-rank": shrink(rank_indices=[99]),
    "more-than-expected": shrink(expect=1),
    "overlapping": [shrink(positions=[1]), shrink(positions=[1], rank_indices=[2])],
    "no-such-layer": {"edit": "cache", "step": 2, "layers": [77]},
    "cache-beyond": {"edit": "cache", "step": 99},
    "surrogate": '{"edit": "\\ud800"}',
}

# name: (arguments, words that the message must hold). {…} are folders; the pair is {pair}.
CASES = {
    "no folder at all": ("", ["must be named", "--demo"]),
    "no such folder": ("{root}/nothing", ["nothing", "does not exist"]),
    "a file": ("{edits}/good.json", ["good.json", "is a file"]),
    "no pair": ("{root}/empty", ["is no pair", "reference.trace", "candidate.trace"]),
    "half a pair": ("{root}/half", ["is no pair", "candidate.trace"]),
    "a folder of pairs": ("{root}/several", ["several pairs", "prompt-0000"]),
    "garbage traces": ("{root}/garbage", ["reference.trace"]),
    "redacted": ("{root}/redacted {model}", ["redacted", "--redact"]),
    "nothing flipped": ("{root}/same {model}", ["nothing flipped", "no token"]),
    "traces of another model": ("{pair} {other_model}", ["model.sha256", "recorded"]),
    "traces of another adapter": ("{pair} {other_adapter}", ["adapter.sha256", "recorded"]),
    "model not here": ("{pair}", ["model", "--model", "sha256"]),
    "adapter not here": ("{pair} {model_only}", ["adapter", "--adapter"]),
    "other dtype": ("{pair} {model} --dtype float16", ["model.dtype", "bfloat16", "float16"]),
    "no such model folder": (
        "{pair} --model {root}/nothing --adapter {root}/nothing",
        ["nothing"],
    ),
    "CUDA without a GPU": ("{pair} {model} --device cuda", ["cuda", "--device cpu"]),
    "engine nonsense": ("{pair} {model} --engine warp", ["--engine", "warp"]),
    "continue beyond the end": ("{pair} {model} --continue-to 999", ["999", "0 to"]),
    "continue before the start": ("{pair} {model} --continue-to -1", ["-1"]),
    "continue to nonsense": ("{pair} {model} --continue-to end", ["--continue-to", "end"]),
    "unknown layers": ("{pair} {model} --layers 77", ["77", "layer"]),
    "layers nonsense": ("{pair} --layers 2,x", ["2,x", "0,3-5"]),
    "layers backwards": ("{pair} --layers 5-2", ["low to high", "5-2"]),
    "no layers": ("{pair} --layers ,", ["0,3-5"]),
    "step beyond the flip": ("{pair} {model} --step 99", ["99"]),
    "negative step": ("{pair} {model} --step -3", ["-3"]),
    "reduction nonsense": ("{pair} {model} --reduction nonsense", ["nonsense", "unsplit"]),
    "reduction not repeatable": ("{pair} {model} --reduction atomic:8", ["atomic:8", "unsplit"]),
    "one repeat": ("{pair} {model} --repeats 1", ["twice", "1"]),
    "negative shams": ("{pair} {model} --shams -1", ["-1"]),
    "negative seed": ("{pair} {model} --seed -1", ["-1"]),
    "no budget": ("{pair} --budget-runs 0", ["budget", "0"]),
    "no time": ("{pair} --budget-minutes 0", ["budget", "0"]),
    "recipient nonsense": ("{pair} --recipient both-of-them", ["--recipient", "both-of-them"]),
    "recipient of a search": ("{pair} --recipient reference", ["--recipient", "--edit"]),
    "answers nonsense": ("{pair} --answers first", ["--answers", "first"]),
    "no tokens": ("{pair} {model} --max-new-tokens 0", ["at least 1", "0"]),
    "out is not empty": ("{pair} {model} --out {root}/half", ["half", "not empty"]),
    "demo with a pair": ("{pair} --demo --out {root}/new", ["--demo", "leave out"]),
    "demo without out": ("--demo", ["--demo", "--out"]),
    "no such edits file": ("{pair} --edit {root}/nothing.json", ["nothing.json", "cannot be read"]),
    "edits are a folder": ("{pair} --edit {root}/empty", ["empty", "cannot be read"]),
    "edits not UTF-8": ("{pair} --edit {root}/latin.json", ["latin.json", "utf-8"]),
    "no such root": ("{pair} {model} --export-reproducer 999", ["999", "1 to"]),
    "root zero": ("{pair} {model} --export-reproducer 0", ["1 to", "0"]),
    "root nonsense": ("{pair} {model} --export-reproducer first", ["first", "SITE:STEP:POSITION"]),
    "root of no row": (
        "{pair} {model} --export-reproducer nothing.here:0:3",
        ["nothing.here:0:3", "model.layers"],
    ),
    "unknown option": ("{pair} --edits x", ["--edits", "--help"]),
}

#: Which word each edits file's message must hold beside the file's name.
EDIT_WORDS = {
    "no-json": "no JSON",
    "deep": "no JSON",
    "empty-list": "at least one",
    "number": "int",
    "no-kind": "'edit'",
    "unknown-kind": "weights",
    "unknown-key": "'rank'",
    "no-step": "step",
    "negative-step": "-1",
    "step-text": "first",
    "positions-text": "positions",
    "positions-empty": "positions",
    "positions-negative": "-1",
    "rank-twice": "twice",
    "value-word": "mine",
    "value-nan": "0xffffffff",
    "value-bits-text": "zz",
    "second-of-two": "edit 1",
    "surrogate": "edit 0",
}

#: The same for edits that are well-formed and select nothing, or what is not there.
SELECTION_WORDS = {
    "no-such-site": "model.layers.9.mlp.up_proj",
    "no-such-step": "99",
    "no-such-position": "500",
    "no-such-rank": "99",
    "more-than-expected": "1",
    "overlapping": "",
    "no-such-layer": "77",
    "cache-beyond": "99",
}


@pytest.fixture(scope="module")
def places(planted, model_folders, planting, tmp_path_factory, tiny):
    """Folders and files by name, and what the options that name the models look like."""
    from fliptrace.pair import trace_pair

    root = tmp_path_factory.mktemp("bad-input")
    plant = planted()
    source = Path(plant.pair.reference.name).parent
    model, adapter = model_folders("llama")
    for name in ("empty", "half", "garbage", "several/prompt-0000"):
        (root / name).mkdir(parents=True)
    shutil.copytree(source, root / "pair")
    shutil.copy(source / "reference.trace", root / "half")
    for name in ("reference.trace", "candidate.trace"):
        (root / "garbage" / name).write_bytes(bytes(range(256)) * 40)
        shutil.copy(source / name, root / "several" / "prompt-0000")
    (root / "latin.json").write_bytes(b'{"edit": "caf\xe9"}')
    (root / "edits").mkdir()
    for name, content in EDITS.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (root / "edits" / f"{name}.json").write_text(text, "utf-8")
    quick = {"attempts": 1, "max_new_tokens": 2, "observer_control": False, "device": "cpu"}
    trace_pair(model, adapter, "w5 w6", directory=root / "same", **quick).close()
    trace_pair(model, adapter, "w5 w6", directory=root / "redacted", redact=True, **quick).close()
    other = tiny.write_model(root / "other-model", tiny.llama_configuration(), seed=9)
    other_adapter = tiny.write_adapter(root / "other-adapter", model, seed=9)
    return SimpleNamespace(
        root=root,
        pair=root / "pair",
        edits=root / "edits",
        model=f"--model {model} --adapter {adapter}",
        model_only=f"--model {model}",
        other_model=f"--model {other} --adapter {adapter}",
        other_adapter=f"--model {model} --adapter {other_adapter}",
    )


def contents(folder):
    """Every file under a folder with its bytes and time of change."""
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def refused(typed, places, arguments, words):
    """Run, and check the one line and that nothing changed."""
    before = contents(places.root)
    given = arguments.format(**vars(places)).split()
    result = typed(*given)
    assert result.code == 2, result
    assert result.out == ""
    assert result.err.startswith("trace-intervene: ")
    assert result.err.count("\n") == 1, result.err
    for word in words:
        assert word in result.err
    assert contents(places.root) == before
    return result.err


@pytest.mark.parametrize("name", CASES)
def test_trouble_is_one_line(typed, places, name):
    """Folders, models, options: what was required and what came."""
    arguments, words = CASES[name]
    refused(typed, places, arguments, words)


@pytest.mark.parametrize("name", EDIT_WORDS)
def test_malformed_edits_are_named(typed, places, name):
    """The file, the entry and the mistake are named before any model is loaded."""
    words = [f"{name}.json", EDIT_WORDS[name]]
    refused(typed, places, f"{{pair}} --edit {{edits}}/{name}.json", words)


@pytest.mark.parametrize("name", SELECTION_WORDS)
def test_edits_that_match_nothing_are_refused(typed, places, name):
    """An edit that selects nothing, more than it says, or one element twice is no experiment."""
    words = [SELECTION_WORDS[name]]
    refused(typed, places, f"{{pair}} {{model}} --edit {{edits}}/{name}.json", words)


def test_every_edits_file_is_tried():
    """No case is written and never run."""
    assert set(EDITS) == {"good", *EDIT_WORDS, *SELECTION_WORDS}


def test_a_folder_that_cannot_be_written_is_found_before_anything_runs(typed, places, tmp_path):
    """A read-only file system: one line that names the way out, in well under the time of a search."""
    place = tmp_path / "read-only"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        shutil.copytree(places.pair, place / "pair")
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        result = typed(place / "pair", *places.model.split())
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert "--out" in result.err
    assert "rewritten" in result.err


def test_two_commands_at_once_do_not_share_a_search(typed, places):
    """The second one is told that the journal is in use; the first one's runs are safe."""
    from fliptrace_interventions.command_line.pairs import JOURNAL_NAME
    from fliptrace_interventions.journal import Journal

    path = places.pair / JOURNAL_NAME
    with Journal(path):
        result = typed(places.pair, *places.model.split())
    path.unlink()
    assert result.code == 2
    assert "in use" in result.err
    assert result.err.count("\n") == 1


def test_it_runs_as_a_program(places):
    """The module's entry point in a process of its own, as the installed command starts it."""
    module = "fliptrace_interventions.command_line.trace_intervene"
    done = subprocess.run(
        [sys.executable, "-m", module, str(places.root / "nothing")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1


def test_a_name_cannot_steer_the_terminal(typed, places, tmp_path):
    """Escape sequences of an edit file come out as visible characters."""
    path = tmp_path / "hostile.json"
    path.write_text('{"edit": "shrink", "site": "evil\\u001b[31m\\u202e", "step": 0}', "utf-8")
    err = refused(typed, places, f"{{pair}} {{model}} --edit {path}", ["no site is called evil"])
    assert "\x1b" not in err
    assert "\u202e" not in err
