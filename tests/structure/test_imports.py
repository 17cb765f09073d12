"""Third parties are each imported in one place, and a plain import needs torch alone."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = [ROOT / "tracer", ROOT / "interventions", ROOT / "kernels"]

# Where each third party may be imported: module prefixes. torch is allowed everywhere.
HOMES = {
    "cuda": {"fliptrace_kernels.local"},
    "datasets": {"fliptrace.studies.dataset_library"},
    "inspect_ai": {"fliptrace.studies.importers"},
    "jinja2": {"fliptrace.views"},
    "matplotlib": {"fliptrace.views.static"},
    "networkx": {"fliptrace.analysis"},
    "peft": {"fliptrace.capture", "fliptrace.studies.training.adapters"},
    "plotly": {
        "fliptrace.studies.figures",
        "fliptrace.views",
        "fliptrace_interventions.fragility.figures",
    },
    "pyarrow": {"fliptrace.store", "fliptrace.studies.results"},
    "ray": {"fliptrace.studies.ray_workers"},
    "rich": {
        "fliptrace.command_line",
        "fliptrace.views",
        "fliptrace_interventions.command_line",
        "fliptrace_kernels.bench.command_line",
    },
    "scipy": {"fliptrace.studies.statistics"},
    "transformers": {"fliptrace.capture"},
    "triton": {"fliptrace_kernels"},
    "typer": {"fliptrace.command_line", "fliptrace.views", "fliptrace_interventions.command_line"},
    "vllm": {
        "fliptrace.capture.vllm_engine",
        "fliptrace.studies.engine_process_vllm",
        "fliptrace_interventions.reproduce",
        "fliptrace_kernels.bench.vllm_kernel",
        "fliptrace_kernels.vllm_plugin",
    },
    "xxhash": {"fliptrace.store"},
}
KERNELS_MAY_IMPORT = {"cuda", "fliptrace_kernels", "torch", "triton"}
NOT_AT_IMPORT = (
    "transformers",
    "peft",
    "matplotlib",
    "plotly",
    "networkx",
    "pyarrow",
    "rich",
    "scipy",
    "typer",
    "ray",
)


def module_name(path: Path) -> str:
    source_root = next(root for root in SOURCE_ROOTS if path.is_relative_to(root))
    parts = path.relative_to(source_root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


class Imports(ast.NodeVisitor):
    """Collects the top-level packages that a module imports when it runs, at any depth.

    Blocks under `if TYPE_CHECKING:` are left out, as they never run; `importlib.import_module` and
    `__import__` with a literal name count.
    """

    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit_If(self, node):
        for child in node.orelse if is_type_checking(node) else [*node.body, *node.orelse]:
            self.visit(child)

    def visit_Import(self, node):
        self.found |= {alias.name.partition(".")[0] for alias in node.names}

    def visit_ImportFrom(self, node):
        if node.level == 0:
            self.found.add(node.module.partition(".")[0])

    def visit_Call(self, node):
        name = getattr(node.func, "attr", getattr(node.func, "id", None))
        if name in ("import_module", "__import__") and node.args:
            literal = node.args[0]
            if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                self.found.add(literal.value.partition(".")[0])
        self.generic_visit(node)


def imports(source: str) -> set[str]:
    visitor = Imports()
    visitor.visit(ast.parse(source))
    return visitor.found


def misplaced(module: str, source: str) -> set[str]:
    """The third parties that `module` imports although it is not their home."""
    return {
        name
        for name in imports(source) & set(HOMES)
        if not any(module == home or module.startswith(home + ".") for home in HOMES[name])
    }


def sources() -> dict[str, str]:
    paths = [path for root in SOURCE_ROOTS for path in root.rglob("*.py")]
    return {module_name(path): path.read_text("utf-8") for path in paths}


def test_third_parties_stay_at_home():
    """plotly in views, networkx in analysis, transformers and peft in capture, and so on."""
    found = {module: misplaced(module, source) for module, source in sources().items()}
    assert {module: names for module, names in found.items() if names} == {}


def test_kernels_import_torch_and_triton_only():
    """Nothing beyond torch and triton, and vllm where it is at home: the kernels stand alone."""
    found = {
        module: imports(source) - KERNELS_MAY_IMPORT - set(HOMES) - set(sys.stdlib_module_names)
        for module, source in sources().items()
        if module.partition(".")[0] == "fliptrace_kernels"
    }
    assert found
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("fliptrace.pair", "import plotly.graph_objects as go", {"plotly"}),
        ("fliptrace.pair", "def f():\n    from transformers import AutoModel", {"transformers"}),
        ("fliptrace.pair", "import importlib\nimportlib.import_module('peft.tuners')", {"peft"}),
        ("fliptrace.viewsx", "import plotly", {"plotly"}),
        ("fliptrace.capture.engine", "if auto:\n    import vllm", {"vllm"}),
        ("fliptrace.views", "import plotly", set()),
        ("fliptrace.views.heatmap", "from plotly import graph_objects", set()),
        ("fliptrace.pair", "if TYPE_CHECKING:\n    import plotly\nelse:\n    import torch", set()),
        ("fliptrace.pair", "if typing.TYPE_CHECKING:\n    import plotly", set()),
        ("fliptrace.pair", "'import plotly'", set()),
    ],
)
def test_the_import_scan_finds_planted_faults(module, source, expected):
    """The scan sees imports at any depth and by any spelling, and nothing that never runs."""
    assert misplaced(module, source) == expected


def run_python(code: str) -> str:
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_plain_import_needs_torch_alone():
    """`import fliptrace` loads no third party but torch and what torch loads by itself."""
    code = (
        "import sys, json, torch; before = set(sys.modules); import fliptrace;"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    loaded = {name.partition(".")[0] for name in json.loads(run_python(code))}
    assert loaded.isdisjoint(NOT_AT_IMPORT)
    allowed = {"fliptrace", "fliptrace_kernels", "torch", *sys.stdlib_module_names}
    assert loaded - allowed == set()


def test_plain_import_is_fast():
    """`import fliptrace` takes under a second beyond torch: best of three on a busy machine."""
    code = (
        "import time, torch; start = time.perf_counter(); import fliptrace;"
        "print(time.perf_counter() - start)"
    )
    assert min(float(run_python(code)) for _ in range(3)) < 1.0


@pytest.mark.parametrize("package", ["fliptrace", "fliptrace_interventions", "fliptrace_kernels"])
def test_public_names_exist(package):
    """`__all__` has no double and names only what is there; ruff keeps its order."""
    module = importlib.import_module(package)
    assert len(module.__all__) == len(set(module.__all__))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
