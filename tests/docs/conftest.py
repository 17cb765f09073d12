"""Reads the pages of docs/ and runs what they show, as a reader would type it, in this process.

A bash block holds commands, a python block code; those of one page run in the order in which they stand, in one folder
and one namespace. MODEL and ADAPTER stand for the bundled ones. A text block right after one is what it prints; `...`
on a line of its own, and `…`, stand for anything. A block whose paragraph above begins with `*Not run by the tests` is
left out, and its options and names are checked instead.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NOT_RUN = "*Not run by the tests"
_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BUNDLED = ROOT / "tracer" / "fliptrace" / "bundled"
_PLACES = {"MODEL": str(_BUNDLED / "model"), "ADAPTER": str(_BUNDLED / "adapter")}
_MODULES = {
    "trace-pair": "fliptrace.command_line.trace_pair",
    "trace-diff": "fliptrace.command_line.trace_diff",
    "trace-study": "fliptrace.command_line.trace_study",
    "trace-check": "fliptrace.command_line.trace_check",
    "trace-intervene": "fliptrace_interventions.command_line.trace_intervene",
}
# Announced by the distribution, which a checkout is not.
_ANNOUNCED = {("trace-study", "fragility"): "fliptrace_interventions.command_line.fragility"}


@dataclass
class Block:
    """One fenced block of a page."""

    language: str
    body: str
    run: bool


@dataclass
class Ran:
    """What the blocks of a page gave: (block, exit codes, all that was printed)."""

    folder: Path
    blocks: list[tuple[Block, list[int], str]] = field(default_factory=list)


def blocks_of(text):
    """The fenced blocks of a page; one is not run if the paragraph above says so."""
    found = []
    for match in _BLOCK.finditer(text):
        above = text[: match.start()].rstrip().rpartition("\n\n")[2]
        found.append(Block(match[1], match[2], not above.startswith(NOT_RUN)))
    return found


def command_lines(body):
    """The commands of a bash block: comments left out, continued lines joined."""
    lines = body.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def run_command(words):
    """Run one command, in this process where it is ours, and return its exit code."""
    if ">" in words:
        *words, _, target = words
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = run_command(words)
        Path(target).write_text(printed.getvalue(), "utf-8")
        return code
    words = [_PLACES.get(word, word) for word in words]
    module = _ANNOUNCED.get(tuple(words[:2]))
    if module is not None:
        words = words[1:]
    module = module or _MODULES.get(words[0])
    if module is not None:
        import importlib

        program = importlib.import_module(module).main
        before, sys.argv = sys.argv, list(words)
        try:
            program()
        except SystemExit as stopped:
            return stopped.code or 0
        finally:
            sys.argv = before
        return 0
    if words[:2] == ["python", "-c"]:
        exec(compile(words[2], "python -c", "exec"), {})
        return 0
    if words[0] == "python":
        words = [sys.executable, *words[1:]]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    sys.stdout.write(done.stdout + done.stderr)
    return done.returncode


def run_page(path, folder):
    """Run the blocks of a page in a folder; what a command prints on stderr counts, too."""
    ran = Ran(folder)
    (folder / "examples").symlink_to(
        ROOT / "examples"
    )  # pages name its files from a checkout's root
    names = {"__name__": "__main__"}
    before = Path.cwd()
    os.chdir(folder)
    try:
        for block in blocks_of(path.read_text("utf-8")):
            codes, printed = [], io.StringIO()
            if block.run and block.language in ("bash", "python"):
                with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                    if block.language == "python":
                        exec(compile(block.body, str(path), "exec"), names)
                        codes.append(0)
                    else:
                        lines = command_lines(block.body)
                        codes.extend(run_command(shlex.split(line)) for line in lines)
            ran.blocks.append((block, codes, printed.getvalue()))
    finally:
        os.chdir(before)
    return ran


@pytest.fixture(scope="session")
def pages():
    """The paths of all pages by their names."""
    return {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}


@pytest.fixture(scope="session")
def executed(pages, tmp_path_factory):
    """A function that runs a page once and remembers what came out."""
    done = {}

    def run(name):
        if name not in done:
            kept = {key: os.environ.get(key) for key in ("COLUMNS", "NO_COLOR")}
            os.environ.update(COLUMNS="80", NO_COLOR="1")
            try:
                done[name] = run_page(pages[name], tmp_path_factory.mktemp("page"))
            finally:
                for key, value in kept.items():
                    os.environ.pop(key) if value is None else os.environ.update({key: value})
        return done[name]

    return run
