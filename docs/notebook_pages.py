"""Makes pages of the site from examples/notebooks: text as text, code as code, outputs where they were run.

The notebooks are kept without outputs. With NOTEBOOKS=run in the environment they are executed while the site is built,
and their outputs are shown: texts and static HTML. A plotly figure is named, not drawn, since a page of the site loads
nothing.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "notebooks"
_FIGURE = "application/vnd.plotly.v1+json"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def on_files(files: Files, config: Any) -> Files:
    """Add a page per notebook, ``notebooks/01_trace_a_pair.md``."""
    run = os.environ.get("NOTEBOOKS") == "run"
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = executed(path) if run else json.loads(path.read_text("utf-8"))
        name = f"notebooks/{path.stem}.md"
        files.append(File.generated(config, name, content=page_of(notebook, path.name)))
    return files


def executed(path: Path) -> dict[str, Any]:
    """Run a notebook in an empty folder; an exception in a cell ends the build."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    found: dict[str, Any] = json.loads(nbformat.writes(notebook))
    return found


def page_of(notebook: dict[str, Any], name: str) -> str:
    """Return a notebook as Markdown: its own title first, then where it is and how it was shown."""
    cells = [(cell["cell_type"], "".join(cell["source"]), cell) for cell in notebook["cells"]]
    ran = any(cell.get("outputs") for *_, cell in cells)
    note = (
        "as it was run when this site was built"
        if ran
        else "without its outputs: open it in Jupyter to run it, as the tests do"
    )
    parts = []
    for number, (kind, source, cell) in enumerate(cells):
        parts.append(fenced(source, "python") if kind == "code" else source.strip())
        if number == 0:
            parts.append(f"*This is `examples/notebooks/{name}`, {note}.*")
        parts += [shown for output in cell.get("outputs", ()) if (shown := output_of(output))]
    return "\n\n".join(parts) + "\n"


def output_of(output: dict[str, Any]) -> str:
    """Return one output of a cell as Markdown; "" for what a page has no use for, such as progress."""
    if output["output_type"] == "stream":
        return fenced("".join(output["text"]), "text") if output["name"] == "stdout" else ""
    data = output.get("data", {})
    if _FIGURE in data:
        return "*An interactive figure.*"
    html = "".join(data.get("text/html", ""))
    if html and "<script" not in html:
        # One line is one block of raw HTML, whatever is in it.
        return f'<div class="notebook-output">{" ".join(html.split())}</div>'
    return fenced("".join(data["text/plain"]), "text") if "text/plain" in data else ""


def fenced(text: str, language: str) -> str:
    """Return text in a fence that it cannot close."""
    text = _ESCAPES.sub("", text).rstrip("\n")
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
