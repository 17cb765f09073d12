"""docs/errors.md lists the messages that the code has: quoted as they are, and none of the smaller classes left out."""

from __future__ import annotations

import ast
import re

import pytest

# Of these every message is on the page; of the others those that a person is likely to meet.
COMPLETE = [
    "UnsupportedModelError",
    "TraceMismatchError",
    "RecordingError",
    "ObserverEffectError",
    "TraceReadError",
    "TraceVersionError",
    "PluginError",
]
SOURCES = ("tracer", "interventions", "kernels")


def template(node):
    """The text of a string expression, with … where something is put in; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
    return None


def named(call):
    return call.func.id if isinstance(call.func, ast.Name) else ""


@pytest.fixture(scope="module")
def messages(repository_root):
    """(class, template) of every message that is written where its exception is made; all texts; all classes."""
    raised, texts, classes = [], set(), set()
    for folder in SOURCES:
        for path in sorted((repository_root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Constant | ast.JoinedStr) and template(node):
                    texts.add(template(node))
                if isinstance(node, ast.ClassDef) and path.name == "errors.py":
                    classes.add(node.name)
                if isinstance(node, ast.Call) and named(node).endswith("Error") and node.args:
                    text = template(node.args[0])
                    if text:
                        raised.append((named(node), text))
    return raised, texts, classes


@pytest.fixture(scope="module")
def quoted(pages):
    """The messages in the first columns of the page's tables, by section."""
    found = {}
    section = ""
    for line in pages["errors.md"].read_text("utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:]
        if line.startswith("| `"):
            found.setdefault(section, []).extend(re.findall(r"`([^`]+)`", line.split(" | ")[0]))
    return found


def fits(message, text):
    """Whether a quoted message is (the beginning of) a text or a part of it; `…` stands for anything in both."""
    place = 0
    for piece in (part.strip() for part in re.split("…", message)):
        found = text.find(piece, place)
        if found < 0:
            return False
        place = found + len(piece)
    return True


def test_fits_finds_a_planted_difference():
    """A word that the code does not have, or another order, does not fit."""
    assert fits("… has steps 0 to …", "… has steps 0 to …; got step …")
    assert not fits("… has steps 1 to …", "… has steps 0 to …; got step …")
    assert not fits("got step … has", "… has steps 0 to …; got step …")


def test_every_quoted_message_is_in_the_code(messages, quoted):
    """A message that was reworded or removed is found here."""
    _, texts, _ = messages
    listed = [message for section in quoted.values() for message in section]
    assert len(listed) > 120
    assert [message for message in listed if not any(fits(message, text) for text in texts)] == []


@pytest.mark.parametrize("name", COMPLETE)
def test_no_message_of_a_class_is_left_out(name, messages, quoted):
    """A new message of one of these classes needs a row."""
    raised, _, _ = messages
    texts = {text for kind, text in raised if kind == name}
    assert texts
    missing = [text for text in texts if not any(fits(m, text) for m in quoted[name])]
    assert missing == []


def test_every_class_has_a_section(messages, pages):
    """Also those that no message is listed of."""
    _, _, classes = messages
    text = pages["errors.md"].read_text("utf-8")
    sections = set(re.findall(r"^## (\w+)$", text, re.MULTILINE))
    assert classes - sections == {"FliptraceError", "FliptraceKernelsError"}
