"""The folders keep the shape that lets three packages share one repository."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "tracer": "fliptrace",
    "interventions": "fliptrace_interventions",
    "kernels": "fliptrace_kernels",
}
MODULES = sorted(
    path for root, package in PACKAGES.items() for path in (ROOT / root / package).rglob("*.py")
)
LONGEST_FILE = 450


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("folder", [*PACKAGES, "examples", "tests"])
def test_top_level_folders_are_not_packages(folder):
    """`kernels/__init__.py` would hide the Hugging Face package of that name."""
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


def test_test_folders_are_not_packages():
    """With importlib mode a package in tests/ could shadow what it tests."""
    assert [relative(path) for path in (ROOT / "tests").rglob("__init__.py")] == []


@pytest.mark.parametrize(("root", "package"), PACKAGES.items())
def test_source_roots_hold_one_package_and_a_readme(root, package):
    """Anything else in a source root would become importable by a plain name."""
    assert {path.name for path in (ROOT / root).iterdir()} - {"__pycache__"} == {
        package,
        "README.md",
    }


@pytest.mark.parametrize(("root", "package"), PACKAGES.items())
def test_packages_are_typed(root, package):
    """Each package says that its annotations may be relied on."""
    assert (ROOT / root / package / "__init__.py").is_file()
    assert (ROOT / root / package / "py.typed").is_file()


def test_no_source_file_is_long():
    """A file that outgrows a sitting is split."""
    lengths = {relative(path): len(path.read_text("utf-8").splitlines()) for path in MODULES}
    assert MODULES
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE} == {}


def shadowed(path: Path, source: str) -> set[str]:
    """The top-level names that the module at `path` imports and that its own path spells, too."""
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            imported.add(node.module.partition(".")[0])
    # The first part is the source root, the second the package itself, which may import itself.
    return imported & set(Path(relative(path)).with_suffix("").parts[2:])


def test_no_module_is_named_after_a_package_it_imports():
    """`views/plotly.py` importing plotly would import itself when run as a script."""
    found = {relative(path): shadowed(path, path.read_text("utf-8")) for path in MODULES}
    assert {name: names for name, names in found.items() if names} == {}


def test_the_name_check_finds_a_planted_fault():
    """The check above fails on a file or folder named after what it imports."""
    views = ROOT / "tracer/fliptrace/views"
    assert shadowed(views / "plotly.py", "import plotly.graph_objects") == {"plotly"}
    assert shadowed(views / "plotly" / "map.py", "from plotly import graph_objects") == {"plotly"}
    assert shadowed(views / "heatmap.py", "import plotly.graph_objects\nimport fliptrace") == set()


def undocumented(source: str) -> list[str]:
    """The tests in `source` that do not say what behaviour they show."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]


def test_every_test_says_what_it_shows():
    """The docstring is the specification; the name is a handle."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    found = {relative(path): undocumented(path.read_text("utf-8")) for path in paths}
    assert {name: tests for name, tests in found.items() if tests} == {}


def test_the_docstring_check_finds_a_planted_fault():
    """A bare test is found, also inside a class; a documented one is not."""
    source = "class TestX:\n  def test_a(self): pass\n  def test_b(self): 'Says it.'"
    assert undocumented(source) == ["test_a"]
