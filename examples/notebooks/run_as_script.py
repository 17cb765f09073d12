"""Runs the code cells of a notebook one after another, without Jupyter: for a machine that has a GPU and no browser.

    python examples/notebooks/run_as_script.py examples/notebooks/03_replace_the_kernel_in_vllm.ipynb

The value of a cell's last expression is printed. From a checkout, the vLLM plugin is made visible as if fliptrace were
installed; vLLM's worker processes import this file, too, so that everything happens in main().
"""

from __future__ import annotations

import ast
import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    """Run the notebook that the command line names; an exception in a cell ends the run with its traceback."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit(f"usage: python {sys.argv[0]} NOTEBOOK.ipynb")
    path = Path(sys.argv[1])
    if "vllm" in path.stem:
        from fliptrace.studies.engine_process_vllm import show_plugin

        os.environ.setdefault("FLIPTRACE_SHRINK", "local")
        show_plugin()
    names = {"__name__": "__notebook__"}
    cells = json.loads(path.read_text("utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for number, source in enumerate(sources, 1):
        begin = time.monotonic()
        print(f"== cell {number} of {len(sources)}", flush=True)
        run_cell(source, f"{path.name}, cell {number}", names)
        print(f"== {time.monotonic() - begin:.1f} s", flush=True)


def run_cell(source: str, name: str, names: dict[str, object]) -> None:
    """Run one cell and print the value of its last expression, as a notebook shows it."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)  # noqa: S102 (the notebook that was asked for)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval"), names)  # noqa: S307
        if value is not None:
            print(repr(value))


if __name__ == "__main__":
    main()
