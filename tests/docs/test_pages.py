"""Every command and snippet of docs/ runs as it stands and prints what the page shows."""

from __future__ import annotations

import ast
import importlib
import re
import shlex

import pytest

# recipes.md is run by tests/interventions/test_surface_recipes.py.
EXECUTED = [
    "index.md",
    "concepts.md",
    "how-to/trace-pair.md",
    "how-to/trace-diff.md",
    "how-to/trace-intervene.md",
    "how-to/figures.md",
    "how-to/trace-study.md",
    "how-to/trace-study-fragility.md",
    "how-to/trace-study-batch.md",
    "how-to/trace-study-latency.md",
    "how-to/trace-study-train.md",
    "how-to/trace-check.md",
    "how-to/vllm.md",
    "how-to/watch.md",
    "how-to/bench.md",
    "reading-a-report.md",
    "affected.md",
    "errors.md",
]
# vLLM's own; its parser is not here. `python -m fliptrace_kernels.bench` has its own below.
OPTIONS_OF_OTHERS = {"--enable-lora", "--log", "--lora-modules", "--scope", "--user"}
VOID = "cannot be reconstructed"


def contains(printed, shown):
    """Whether a text holds the parts of another in order; `...` on a line of its own, or `…`, separates them."""
    place = 0
    for part in re.split(r"^\.\.\.\n|…", shown, flags=re.MULTILINE):
        found = printed.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return True


def test_contains_finds_a_planted_difference():
    """The comparison of outputs fails on another text and on another order, and takes dots for anything."""
    assert contains("one\ntwo\nthree\n", "one\n...\nthree\n")
    assert contains("one two three\n", "one … three\n")
    assert not contains("one\ntwo\nthree\n", "three\n...\none\n")
    assert not contains("one\ntwo\n", "one\nthree\n")


@pytest.mark.parametrize("name", EXECUTED)
def test_a_page_runs_and_prints_what_it_shows(name, executed):
    """Commands end with an exit code that is an answer, code runs, and each text block is what came out above it."""
    blocks = executed(name).blocks
    void = any(VOID in " ".join(printed.split()) for _, _, printed in blocks)
    above = None
    for block, codes, printed in blocks:
        if block.language == "text":
            assert above is not None, f"{name} shows an output of nothing:\n{block.body}"
            if not void:
                assert contains(above, block.body), f"{name} shows\n{block.body}\nbut got\n{above}"
            continue
        error = "trace-" in printed and "error" in name
        allowed = {0, 1, 2} if error else {0, 1, 3} if void else {0, 1}
        assert set(codes) <= allowed, f"{name}: exit codes {codes} of\n{block.body}\n{printed}"
        above = printed if codes else None


def test_every_page_is_executed_or_says_why_not(pages):
    """A page with code that this module does not know would never run."""
    with_code = {
        name
        for name, path in pages.items()
        if re.search(r"^```(bash|python)", path.read_text("utf-8"), re.MULTILINE)
    }
    assert with_code == {*EXECUTED, "recipes.md"} & with_code
    assert with_code >= {"index.md", "concepts.md", "how-to/vllm.md"}


@pytest.fixture(scope="module")
def module_help():
    """Options by command, asked of the parser that reads the command line."""
    import typer

    found = {}
    for name, function in (
        ("fliptrace.command_line.trace_pair", "trace_pair"),
        ("fliptrace.command_line.trace_diff", "trace_diff"),
        ("fliptrace.command_line.trace_check", "trace_check"),
        ("fliptrace_interventions.command_line.trace_intervene", "trace_intervene"),
    ):
        application = typer.Typer(add_completion=False)
        application.command()(getattr(importlib.import_module(name), function))
        command = typer.main.get_command(application)
        found[function.replace("_", "-")] = {o for p in command.params for o in p.opts} | {"--help"}
    from fliptrace.command_line.trace_study import COMMANDS, registered
    from fliptrace_interventions.command_line.fragility import fragility

    studies = {name: entry.load() for name, entry in registered().items()}
    for name, function in {**COMMANDS, **studies, "fragility": fragility}.items():
        application = typer.Typer(add_completion=False)
        application.command()(function)
        command = typer.main.get_command(application)
        found[f"trace-study {name}"] = {o for p in command.params for o in p.opts} | {"--help"}
    return found


def test_options_exist(pages, executed, module_help):
    """Each option in a block belongs to the command before it, each in running text to some command."""
    from fliptrace_kernels.bench.command_line import _parser

    module_help = {**module_help, "bench": set(_parser()._option_string_actions)}
    everything = set().union(*module_help.values()) | OPTIONS_OF_OTHERS
    for name, path in pages.items():
        text = path.read_text("utf-8")
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= everything | {"--strict"}, name
    for name in EXECUTED:
        for block, _, _ in executed(name).blocks:
            lines = block.body.replace("\\\n", " ").splitlines() if block.language == "bash" else ()
            for words in map(shlex.split, lines):
                if words[:3] == ["python", "-m", "fliptrace_kernels.bench"]:
                    words[:3] = ["bench"]
                if words[0] == "trace-study":
                    words[:2] = [" ".join(words[:2])]
                if words[0] in module_help:
                    options = {word for word in words if word.startswith("--")}
                    assert options <= module_help[words[0]], words


def test_variables_exist(pages):
    """A page names no variable that nothing reads, and together they name all."""
    from fliptrace.studies import server_client
    from fliptrace.studies.sandbox import containers
    from fliptrace_kernels import vllm_plugin

    named = set()
    for path in pages.values():
        named |= set(re.findall(r"FLIPTRACE_[A-Z_]+", path.read_text("utf-8")))
    assert named == {
        vllm_plugin.SHRINK_VARIABLE,
        vllm_plugin.COUNT_VARIABLE,
        server_client.KEY_VARIABLE,
        containers.IMAGE_VARIABLE,
    }


def test_code_that_is_not_run_imports_what_exists(executed):
    """Python blocks for vLLM are valid, and their names and the keys of a status are real."""
    from fliptrace_kernels.vllm_plugin.workers import WorkerStatus

    seen = 0
    for name in EXECUTED:
        for block, _, _ in executed(name).blocks:
            if block.run or block.language != "python":
                continue
            for node in ast.walk(ast.parse(block.body)):
                if isinstance(node, ast.ImportFrom) and node.module.startswith("fliptrace"):
                    module = importlib.import_module(node.module)
                    assert all(hasattr(module, alias.name) for alias in node.names)
                # worker["rank"]: an entry of status().
                if (
                    isinstance(node, ast.Subscript)
                    and isinstance(node.slice, ast.Constant)
                    and isinstance(node.slice.value, str)
                ):
                    assert node.slice.value in WorkerStatus.__annotations__
                    seen += 1
    assert seen


def test_the_parts_of_a_report_are_those_of_the_page(pages, executed):
    """Each part that reading-a-report.md explains is a heading of a report with interventions."""
    folder = executed("how-to/trace-intervene.md").folder
    report = (folder / "proof" / "report.html").read_text("utf-8")
    headings = set(re.findall(r"<h[1-4][^>]*>([^<]+)</h", report))
    table = pages["reading-a-report.md"].read_text("utf-8").partition("| part |")[2]
    parts = re.findall(r"^\| ([A-Z][^|]+?) \|", table, re.MULTILINE)
    assert len(parts) > 10
    assert [part for part in parts if not any(h.startswith(part) for h in headings)] == []


@pytest.mark.parametrize("package", ["fliptrace", "fliptrace_interventions", "fliptrace_kernels"])
def test_the_reference_holds_every_public_name(package, pages):
    """A name added to __all__ without a place in the reference is found here."""
    listed = re.findall(
        r"^::: ([\w.]+)$", pages[f"reference/{package}.md"].read_text("utf-8"), re.MULTILINE
    )
    public = importlib.import_module(package).__all__
    assert {f"{package}.{name}" for name in public} <= set(listed)
