"""What the commands answer when all is well: exit codes, files, JSON, several prompts, options."""

from __future__ import annotations

import json
import resource
import sqlite3

import jsonschema
import pytest

from fliptrace.store import open_trace
from fliptrace.trace import Kind
from fliptrace.verdicts import Outcome
from fliptrace.views import report_schema

QUICK = ("--attempts", "1", "--max-new-tokens", "4", "--device", "cpu")
FILES = ["candidate.trace", "reference.trace", "report.html", "report.json"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def ask(typed, models, tmp_path):
    """A function that asks the tiny model: options in, (result, folder) out."""

    def run(*options, prompt="w5 w6 w7", folder="out"):
        out = tmp_path / folder
        given = ("--model", models.model, "--adapter", models.adapter, "--out", out, *QUICK)
        prompts = ("--prompt", prompt) if prompt else ()
        return typed("trace-pair", *given, *prompts, *options), out

    return run


@pytest.fixture
def flip(typed, flippy, tmp_path):
    """A function that searches a flip on the model that flips easily."""

    def run(*options):
        out = tmp_path / "flip"
        given = ("--model", flippy.model, "--adapter", flippy.adapter, "--prompt", flippy.prompt)
        search = ("--attempts", "20", "--max-new-tokens", "16", "--device", "cpu")
        return typed("trace-pair", *given, "--out", out, *search, *options), out

    return run


def test_a_flip_exits_with_1_and_is_told(flip, typed):
    """The four files, a readable summary, an exit code; trace-diff says the same of the stored traces."""
    result, out = flip()
    assert (result.code, result.err) == (1, "")
    assert names(out) == FILES
    assert result.out.startswith("Token flipped: ")
    assert result.out.rstrip().endswith(f"The report is {out / 'report.html'}")
    assert max(len(line) for line in result.out.splitlines()[:-1]) <= 80
    assert all(line == line.rstrip() for line in result.out.splitlines())
    document = json.loads((out / "report.json").read_text("utf-8"))
    jsonschema.validate(document, report_schema())
    assert document["verdict"]["outcome"] == Outcome.TOKEN.value
    assert document["command"].startswith("trace-pair --model ")
    again = typed("trace-diff", out / "reference.trace", out / "candidate.trace")
    assert again.code == 1
    assert again.out == result.out.partition("\nThe report is")[0]
    assert "\nWhat ran\n" in again.out
    assert "of at most 20 " in again.out.partition("  Search: candidate ")[2]


@pytest.mark.parametrize(("level", "code"), [("token", 0), ("surviving", 0), ("any", 1)])
def test_exit_code_follows_fail_on(ask, stored, typed, level, code):
    """The tiny model's difference over three tokens is latent: only `any` fails on it."""
    result, out = ask("--fail-on", level)
    document = json.loads((out / "report.json").read_text("utf-8"))
    assert document["verdict"]["outcome"] == Outcome.LATENT.value
    assert result.code == code
    assert (
        typed(
            "trace-diff", out / "reference.trace", out / "candidate.trace", "--fail-on", level
        ).code
        == code
    )


def test_rounding_to_fp32_keeps_what_bf16_hides(ask, typed):
    """--round-to moves the boundary without running the model again."""
    _, out = ask()
    pair = (out / "reference.trace", out / "candidate.trace")
    result = typed("trace-diff", *pair, "--fail-on", "surviving", "--round-to", "float32", "--json")
    document = json.loads(result.out)
    jsonschema.validate(document, report_schema())
    assert document["diff"]["rounded_dtype"] == "float32"
    for dtype in ("float16", "bfloat16"):
        other = typed("trace-diff", *pair, "--round-to", dtype, "--json")
        assert json.loads(other.out)["diff"]["rounded_dtype"] == dtype


def test_a_repeatable_reduction_is_identical(ask):
    """`unsplit` twice: no difference, exit 0, and the sentence does not claim more than two runs."""
    result, out = ask("--reduction", "unsplit", "--fail-on", "any")
    assert result.code == 0
    assert result.out.startswith("No difference found")
    document = json.loads((out / "report.json").read_text("utf-8"))
    assert document["verdict"]["outcome"] == Outcome.IDENTICAL.value
    assert "deterministic" not in document["verdict"]["sentence"]


def test_another_reduction_for_candidates_has_no_roots(ask):
    """Two reductions differ by configuration; no rounding of one is blamed."""
    result, out = ask(
        "--reduction", "unsplit", "--candidate-reduction", "deterministic:8", "--fail-on", "any"
    )
    assert result.code == 1
    diff = json.loads((out / "report.json").read_text("utf-8"))["diff"]
    assert diff["first_propagating"] is None
    assert diff["first_surviving"] is None
    with (
        open_trace(out / "reference.trace") as before,
        open_trace(out / "candidate.trace") as after,
    ):
        identities = [trace.manifest.get("reduction.identity") for trace in (before, after)]
    assert identities[0].startswith("unsplit/")
    assert identities[1].startswith("deterministic:8/")
    assert "configuration-variant" in result.out


def test_figures_are_written_beside_the_report(ask, typed, tmp_path):
    """In each format that was asked for; trace-diff needs a folder for them; other formats are refused at once."""
    result, out = ask("--figures", "svg,png")
    assert result.code == 0, result.err
    assert names(out) == sorted([*FILES, "figures"])
    drawn = [f"{name}.{kind}" for name in ("classes", "heatmap") for kind in ("png", "svg")]
    assert names(out / "figures") == drawn  # the tiny model's difference is latent: no boundary
    pair = (out / "reference.trace", out / "candidate.trace")
    compared = typed("trace-diff", *pair, "--figures", "pdf", "--out", tmp_path / "compared")
    assert compared.code == 0, compared.err
    assert names(tmp_path / "compared" / "figures") == ["classes.pdf", "heatmap.pdf"]
    nowhere = typed("trace-diff", *pair, "--figures", "pdf")
    assert (nowhere.code, len(nowhere.err.splitlines())) == (2, 1)
    assert "--out" in nowhere.err
    wrong, never = ask("--figures", "gif", folder="never")
    assert (wrong.code, never.exists()) == (2, False)
    assert "svg, pdf, png" in wrong.err


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_what_is_piped_fits_and_steers_nothing(stored, typed, monkeypatch, columns):
    """As wide as COLUMNS says and at most 80, no control characters, the map in it."""
    monkeypatch.setenv("COLUMNS", columns)
    folder = stored / "pair.pair"
    result = typed("trace-diff", folder / "reference.trace", folder / "candidate.trace")
    assert max(map(len, result.out.splitlines())) <= min(80, int(columns))
    assert all(line.isprintable() for line in result.out.splitlines())
    assert "\nMap: layers by" in result.out


def test_json_is_all_that_stdout_gets(ask):
    """A machine reads stdout whole; it equals report.json."""
    result, out = ask("--json")
    assert json.loads(result.out) == json.loads((out / "report.json").read_text("utf-8"))
    assert result.err == ""


def test_several_prompts_get_a_folder_each_and_an_index(ask, tmp_path):
    """Prompts from all three sources, in that order; the worst exit code; an index that links all."""
    (tmp_path / "prompt.txt").write_text("w8 w9", "utf-8")
    rows = "".join(json.dumps({"prompt": f"w{row} w4"}) + "\n" for row in range(10, 15))
    (tmp_path / "rows.jsonl").write_text(rows, "utf-8")
    result, out = ask(
        "--prompt-file",
        tmp_path / "prompt.txt",
        "--dataset",
        f"jsonl:{tmp_path / 'rows.jsonl'}",
        "--select",
        "0",
        "2-3",
    )
    assert result.code == 0, result.err
    folders = [f"prompt-{number:04d}" for number in range(5)]
    assert names(out) == ["index.html", *folders]
    page = (out / "index.html").read_text("utf-8")
    for folder in folders:
        assert names(out / folder) == FILES
        assert f"{folder}/report.html" in page
    sources = []
    for folder in folders:
        with open_trace(out / folder / "reference.trace") as trace:
            sources.append(trace.manifest.get("prompt.source"))
    assert sources == ["command line", "prompt.txt", "jsonl row 0", "jsonl row 2", "jsonl row 3"]
    assert len(result.out.splitlines()) == 6


def test_a_failing_prompt_among_good_ones(ask, monkeypatch):
    """One prompt's trouble is told in one line and in the index, and the others are kept; exit 2."""
    from fliptrace.capture.transformers_engine import TransformersEngine

    start = TransformersEngine.start

    def refusing(self, prompt_ids):
        start(self, prompt_ids)
        if len(prompt_ids) == 2:
            self.model.lm_head.weight.data.fill_(float("nan"))

    monkeypatch.setattr(TransformersEngine, "start", refusing)
    result, out = ask("--prompt", "w6 w7", "--json")
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert "NaN" in result.err
    assert names(out) == ["index.html", "prompt-0000"]
    assert "NaN" in (out / "index.html").read_text("utf-8")
    good, bad = json.loads(result.out)
    jsonschema.validate(good, report_schema())
    assert "NaN" in bad["error"]


def test_modules_records_more(ask):
    """--modules adds module and operation records; the pair compares."""
    result, out = ask("--modules", "--operands", "--logits", "all", "--fail-on", "any")
    assert result.code == 1, result.err
    with open_trace(out / "reference.trace") as trace:
        assert trace.frame(1, Kind.MODULE_OUTPUT) is not None
        assert trace.manifest.get("recording.modules") is True
        assert "values" in trace.manifest.get("recording.operands")


def test_the_observer_control_can_be_skipped(ask):
    """The manifest says whether the control was run."""
    said = []
    for number, options in enumerate(((), ("--no-observer-control",))):
        _, out = ask(*options, folder=f"out-{number}")
        with open_trace(out / "reference.trace") as trace:
            said.append(trace.manifest.get("recording.observer_control"))
    assert "agree" in said[0] or "equal" in said[0]
    assert "not run" in said[1]


def test_an_empty_output_folder_gives_way(ask, tmp_path):
    """A folder made beforehand, or reached through a link, is filled."""
    (tmp_path / "out").mkdir()
    result, out = ask()
    assert result.code == 0
    assert names(out) == FILES
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far")
    result, out = ask(folder="link")
    assert result.code == 0, result.err
    assert names(tmp_path / "far") == FILES
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]


def test_a_mount_point_is_filled(ask, small_disk, tmp_path):
    """A folder mounted into a container cannot be replaced, only filled."""
    small_disk("64m")
    result, out = ask(folder="disk")
    assert result.code == 0, result.err
    assert names(out) == FILES
    assert names(tmp_path) == ["disk"]


def test_traces_are_private_and_the_report_is_not(ask):
    """Traces hold the prompt: 0600."""
    _, out = ask()
    assert (out / "reference.trace").stat().st_mode & 0o777 == 0o600
    assert (out / "candidate.trace").stat().st_mode & 0o777 == 0o600


def test_verify_finds_a_flipped_byte(ask, typed):
    """One bit of a payload, changed behind the store's back, is found and named; exit 2."""
    _, out = ask()
    path = out / "candidate.trace"
    data = bytearray(path.read_bytes())
    with sqlite3.connect(path) as connection:
        table, column = next(
            (table, column)
            for (table,) in connection.execute("select name from sqlite_master where type='table'")
            for column in [row[1] for row in connection.execute(f"pragma table_info({table})")]
            if column == "payload"
        )
        payload = max(
            (row[0] for row in connection.execute(f"select {column} from {table}")), key=len
        )
    connection.close()
    place = data.find(bytes(payload[:64])) + 40
    assert place > 40
    data[place] ^= 0x10
    path.write_bytes(data)
    result = typed("trace-diff", out / "reference.trace", path, "--verify")
    assert result.code == 2
    assert result.out == ""
    assert len(result.err.splitlines()) == 1
    assert "candidate.trace" in result.err


def test_trace_diff_needs_no_model_library(ask, spawned):
    """Traces are compared where transformers, peft and tokenizers cannot be imported, and fast."""
    first, out = ask("--fail-on", "any")
    blocker = (
        "import sys\nfor name in ('transformers', 'peft', 'tokenizers', 'safetensors'):\n"
        "    sys.modules[name] = None"
    )
    result = spawned(
        "trace-diff",
        out / "reference.trace",
        out / "candidate.trace",
        "--fail-on",
        "any",
        "--out",
        out / "again",
        before=blocker,
    )
    assert result.code == first.code == 1, result.err
    assert result.out.split("\nThe report is")[0] == first.out.split("\nThe report is")[0]
    assert names(out / "again") == FILES


def test_trace_diff_starts_within_seconds(stored, spawned):
    """Two tiny traces: start-up is all there is, most of it torch. The goal is 3 s; twice that on a busy machine.

    Processor time, because this may run beside others.
    """
    pair = stored / "pair.pair"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = spawned("trace-diff", pair / "reference.trace", pair / "candidate.trace")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.code == 0
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 6


@pytest.mark.parametrize("name", ["trace-pair", "trace-diff"])
def test_help_and_version_answer(typed, name):
    """Both exit with 0 and say nothing on stderr."""
    shown = typed(name, "--help")
    assert (shown.code, shown.err) == (0, "")
    assert "Exit codes" in shown.out
    version = typed(name, "--version")
    assert (version.code, version.err) == (0, "")
    assert version.out.startswith("fliptrace")


def test_help_groups_the_options(typed, monkeypatch):
    """A newcomer finds the few that matter under headings."""
    monkeypatch.setenv("COLUMNS", "100")
    shown = typed("trace-pair", "--help").out
    places = [shown.index(f"─ {panel} ─") for panel in ("Model", "Prompt", "Search", "Recording")]
    assert places == sorted(places)
    assert "…" not in shown


def test_a_closed_pipe_is_one_line(spawned, stored):
    """`trace-diff … | head -1` ends without a traceback."""
    pair = stored / "pair.pair"
    before = "import os, sys\nread, write = os.pipe()\nos.close(read)\nos.dup2(write, 1)"
    result = spawned(
        "trace-diff", pair / "reference.trace", pair / "candidate.trace", before=before
    )
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert "closed" in result.err


@pytest.mark.parametrize(
    "option", [("--dtype", "float32"), ("--attention", "eager"), ("--no-chat-template",)]
)
def test_the_demonstration_ignores_no_option(typed, tmp_path, option):
    """What it would not do is refused."""
    result = typed("trace-pair", "--demo", *option, "--out", tmp_path / "demo")
    assert result.code == 2
    assert option[0] in result.err
    assert not (tmp_path / "demo").exists()


def test_the_demonstration_falls_back_to_the_recorded_pair(typed, tmp_path):
    """When no seed flips within the budget, the pair that ships is opened, and said to be a recorded one."""
    out = tmp_path / "demo"
    result = typed(
        "trace-pair",
        "--demo",
        "--out",
        out,
        "--attempts",
        "1",
        "--max-new-tokens",
        "2",
        "--no-observer-control",
    )
    assert result.code == 1, result.err
    assert "recorded pair that ships" in result.out
    assert names(out) == FILES


def test_an_interruption_keeps_finished_prompts(typed, models, tmp_path, monkeypatch):
    """Ctrl-C at the second of three prompts leaves the first one's pair and an index that says so."""
    import fliptrace.pair

    traced = []
    trace = fliptrace.pair.trace_pair

    def interrupted(*arguments, **options):
        traced.append(options["prompt"].source)
        if len(traced) == 2:
            raise KeyboardInterrupt
        return trace(*arguments, **options)

    monkeypatch.setattr(fliptrace.pair, "trace_pair", interrupted)
    out = tmp_path / "out"
    prompts = [word for text in ("w5 w6", "w6 w7", "w7 w8") for word in ("--prompt", text)]
    result = typed(
        "trace-pair",
        "--model",
        models.model,
        "--adapter",
        models.adapter,
        "--out",
        out,
        *QUICK,
        *prompts,
    )
    assert result.code == 2
    assert "interrupted after 1 of 3 prompts" in result.err
    assert names(out) == ["index.html", "prompt-0000"]
    assert names(out / "prompt-0000") == FILES
    assert "interrupted" in (out / "index.html").read_text("utf-8")
