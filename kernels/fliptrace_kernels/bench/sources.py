"""A digest of the code that a kernel runs, so that a table never mixes versions unseen.

It covers the module that starts the kernel, every module of this package that it imports, at any
depth, and the CUDA sources beside them. Comments, docstrings and layout of Python do not count:
they cannot change a time. Another Python version may write the same code as another digest.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PACKAGE: Final = "fliptrace_kernels"
_ROOT: Final = Path(__file__).resolve().parents[1]
_WITH_DOCSTRING: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_digest(*modules: str) -> str:
    """Return 16 hexadecimal digits for modules and what they import from this package.

    Args:
        modules: full names, such as `fliptrace_kernels.triton_shrink`.

    Raises:
        ModuleNotFoundError: if there is no such module.
    """
    waiting, texts = list(modules), {}
    while waiting:
        name = waiting.pop()
        if name in texts:
            continue
        path = _source_of(name)
        if path is None:
            raise ModuleNotFoundError(f"no module {name} to take a digest of", name=name)
        tree = ast.parse(path.read_text("utf-8"))
        waiting += [found for found in _imports(tree) if _source_of(found) is not None]
        texts[name] = _without_docstrings(tree)
        if path.parent != _ROOT:
            texts |= {cuda.name: cuda.read_text("utf-8") for cuda in path.parent.glob("*.cu")}
    digest = hashlib.sha256()
    for name in sorted(texts):
        digest.update(f"{name}\n{texts[name]}\n".encode())
    return digest.hexdigest()[:16]


def _source_of(name: str) -> Path | None:
    """Find a module's file without importing it."""
    package, *parts = name.split(".")
    if package != _PACKAGE or not parts:
        return None
    base = _ROOT.joinpath(*parts)
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield what might be modules of this package; names that are none are for the caller."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # The package itself only gathers names of its modules; whoever defines one counts.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [node.module] if node.module != _PACKAGE else []
        else:
            continue
        yield from names


def _without_docstrings(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)
