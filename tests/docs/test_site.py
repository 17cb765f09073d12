"""The hooks of the site: links between the repository and the site, and the check of what was built."""

from __future__ import annotations

import importlib.util
import json
import logging
import re

import pytest

PAGE = (
    '<html><head><link rel="stylesheet" href="{style}"></head>'
    '<body><h2 id="there">x</h2><a href="{link}">y</a></body></html>'
)


@pytest.fixture(scope="module")
def hooks(repository_root):
    """The module that MkDocs loads."""
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    spec = importlib.util.spec_from_file_location("hooks", repository_root / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def files(hooks, pages):
    """The files of the site, as MkDocs has them."""
    from mkdocs.structure.files import File, Files

    names = [*pages, *hooks.PAGES_ELSEWHERE, "notebooks/04_a_study.md"]
    return Files([File(name, "docs", "site", use_directory_urls=False) for name in names])


def test_links_into_the_repository_become_links_of_the_site(hooks, files, caplog):
    """A README goes to its page, a page stays one, a file of the repository becomes its path."""

    def rewritten(text, page="how-to/bench.md", source="docs/how-to/bench.md"):
        return hooks.links_of_the_site(text, page, source, files)

    with caplog.at_level(logging.WARNING, "mkdocs.hooks.fliptrace"):
        assert rewritten("[a](../../kernels/README.md#how-fast)") == (
            "[a](../components/kernels.md#how-fast)"
        )
        assert rewritten("[a](../errors.md)") == "[a](../errors.md)"
        assert rewritten("[a](../docs/recipes.md)", "components/tracer.md", "tracer/README.md") == (
            "[a](../recipes.md)"
        )
        assert rewritten("[n](../../examples/notebooks/04_a_study.ipynb)") == (
            "[n](../notebooks/04_a_study.md)"
        )
        assert rewritten("[the log](../../.ci/run)") == "the log (`.ci/run`)"
        assert rewritten("[a](https://example.org)") == "[a](https://example.org)"
    assert caplog.text == ""


def test_a_link_to_nothing_is_a_warning(hooks, files, caplog):
    """MkDocs counts warnings of this logger, and a strict build fails."""
    with caplog.at_level(logging.WARNING, "mkdocs.hooks.fliptrace"):
        hooks.links_of_the_site("[a](../no-such-file.py)", "index.md", "docs/index.md", files)
    assert "no-such-file.py, which is neither a page nor a file" in caplog.text


@pytest.mark.parametrize(
    ("style", "link", "finding"),
    [
        ("page.html", "page.html#there", None),
        ("page.html", "https://example.org/#there", None),
        ("page.html", "missing.html", "links to missing.html, which was not built"),
        ("page.html", "page.html#gone", "links to page.html#gone, and there is no such heading"),
        ("page.html", "#gone", "links to #gone, and there is no such heading"),
        ("https://example.org/a.css", "page.html", "from another host"),
    ],
)
def test_the_check_of_the_built_site(hooks, tmp_path, style, link, finding):
    """A dead link, a dead heading and a request to another host are found; what is right is not."""
    (tmp_path / "page.html").write_text(PAGE.format(style=style, link=link), "utf-8")
    found = hooks.findings(tmp_path)
    assert len(found) == (finding is not None)
    assert finding is None or finding in found[0]


def test_every_page_elsewhere_is_in_the_navigation(hooks, repository_root):
    """The decision logs are reachable."""
    settings = (repository_root / "mkdocs.yml").read_text("utf-8")
    assert set(hooks.PAGES_ELSEWHERE) <= set(re.findall(r"[\w/-]+\.md", settings))
    assert all((repository_root / path).is_file() for path in hooks.PAGES_ELSEWHERE.values())


@pytest.fixture(scope="module")
def notebook_pages(repository_root):
    """The module that makes pages of notebooks."""
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    path = repository_root / "docs" / "notebook_pages.py"
    spec = importlib.util.spec_from_file_location("notebook_pages", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_notebook_is_a_page_in_the_navigation(notebook_pages, repository_root):
    """With its title first and its code; strict builds then check its links like any other page's."""
    settings = (repository_root / "mkdocs.yml").read_text("utf-8")
    found = sorted((repository_root / "examples" / "notebooks").glob("*.ipynb"))
    assert len(found) >= 4
    for path in found:
        assert f"notebooks/{path.stem}.md" in settings
        page = notebook_pages.page_of(json.loads(path.read_text("utf-8")), path.name)
        assert page.startswith("# ")
        assert f"`examples/notebooks/{path.name}`, without its outputs" in page
        assert "```python\nimport" in page or "```python\nfrom" in page


def test_outputs_become_text_or_static_html(notebook_pages):
    """Texts in fences that they cannot close, HTML in one block; no script, no progress, no figure."""

    def cell(source, *outputs):
        return {"cell_type": "code", "source": [source], "outputs": list(outputs)}

    def shown(**data):
        return {
            "output_type": "display_data",
            "data": {k.replace("_", "/"): v for k, v in data.items()},
        }

    notebook = {
        "cells": [
            {"cell_type": "markdown", "source": ["# Title"]},
            cell(
                "a",
                {
                    "output_type": "stream",
                    "name": "stdout",
                    "text": ["\x1b[1mone\x1b[0m\n```\ntwo\n"],
                },
            ),
            cell("b", {"output_type": "stream", "name": "stderr", "text": ["progress"]}),
            cell("c", shown(text_html=["<p>\n\nthree</p>"], text_plain=["no"])),
            cell("d", shown(text_html=["<script>4</script>"], text_plain=["four"])),
            cell(
                "e",
                {
                    "output_type": "display_data",
                    "data": {notebook_pages._FIGURE: {}, "text/html": "<script>"},
                },
            ),
        ]
    }
    page = notebook_pages.page_of(notebook, "x.ipynb")
    assert "````text\none\n```\ntwo\n````" in page
    assert '<div class="notebook-output"><p> three</p></div>' in page
    assert "```text\nfour\n```" in page
    assert "*An interactive figure.*" in page
    assert "progress" not in page
    assert "<script" not in page
    assert "as it was run when this site was built" in page


def test_the_build_in_ci_can_fail(repository_root):
    """With --quiet MkDocs counts no warning, and a strict build passes whatever is broken."""
    (line,) = re.findall(
        r"^.*mkdocs build.*$", (repository_root / ".ci/run").read_text("utf-8"), re.MULTILINE
    )
    assert "--strict" in line
    assert not re.search(r"\s(-q|--quiet)\b", line)
