"""The digest of the code that is timed."""

from __future__ import annotations

import pytest

from fliptrace_kernels.bench import sources
from fliptrace_kernels.bench.sources import code_digest

FILES = {
    "__init__.py": "from fliptrace_kernels.kernel import run\n",
    "kernel.py": '"""Doc."""\nfrom fliptrace_kernels import numbers\nfrom fliptrace_kernels.sub import deep\n\n'
    'def run():\n    """Doc."""\n    return numbers.ONE  # one\n',
    "numbers.py": "import torch\nONE = 1\n",
    "other.py": "TWO = 2\n",
    "sub/__init__.py": "",
    "sub/deep.py": "THREE = 3\n",
    "sub/code.cu": "int three = 3;\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sources, "_ROOT", tmp_path)
    return tmp_path


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("kernel.py", "numbers.ONE", "-numbers.ONE"),
        ("numbers.py", "1", "2"),
        ("sub/deep.py", "3", "4"),
        ("sub/code.cu", "3", "4"),
    ],
)
def test_code_that_runs_counts(package, name, old, new):
    """The module itself, what it imports at any depth, and CUDA sources beside that."""
    before = code_digest("fliptrace_kernels.kernel")
    change(package / name, old, new)
    assert code_digest("fliptrace_kernels.kernel") != before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("kernel.py", "Doc.", "Another."),
        ("kernel.py", "# one", "# uno"),
        ("other.py", "2", "3"),
        ("__init__.py", "run", "run as go"),
    ],
)
def test_words_and_other_modules_do_not_count(package, name, old, new):
    """Docstrings, comments, and modules that the kernel does not import."""
    before = code_digest("fliptrace_kernels.kernel")
    change(package / name, old, new)
    assert code_digest("fliptrace_kernels.kernel") == before


def test_an_unknown_module_is_refused(package):
    """A digest of nothing would be the same for ever."""
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        code_digest("fliptrace_kernels.no_such")
