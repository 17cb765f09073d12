"""What MkDocs does beyond its pages: the READMEs as pages, links into the repository, a check of what was built.

Markdown links work in the repository, where people read the files first. On the site a link to a file that is a page
goes to the page; one to another file of the repository becomes its path, since the site has no copy. A link to nothing,
and a built page that refers to nothing or asks another host for anything, is a warning, which `mkdocs build --strict`
makes a failure.
"""

from __future__ import annotations

import logging
import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

LOG = logging.getLogger("mkdocs.hooks.fliptrace")
ROOT = Path(__file__).resolve().parents[1]

#: Pages whose text lies elsewhere in the repository.
PAGES_ELSEWHERE = {
    "components/tracer.md": "tracer/README.md",
    "components/interventions.md": "interventions/README.md",
    "components/kernels.md": "kernels/README.md",
    "components/bundled-model.md": "tracer/fliptrace/bundled/README.md",
    "components/contributing.md": "CONTRIBUTING.md",
    "components/changelog.md": "CHANGELOG.md",
}

#: Where the notebooks are of which notebook_pages.py makes pages.
NOTEBOOKS = "examples/notebooks/"

_FENCED = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]\n]*(?:\n[^\]\n]*)?)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages whose text lies elsewhere."""
    for page, source in PAGES_ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Turn links into the repository into links of the site."""
    del config
    name = page.file.src_uri
    source = PAGES_ELSEWHERE.get(name, f"docs/{name}")
    if name.startswith("notebooks/"):
        source = f"{NOTEBOOKS}{Path(name).stem}.ipynb"
    parts = _FENCED.split(markdown)
    return "".join(
        part if part.startswith("```") else links_of_the_site(part, name, source, files)
        for part in parts
    )


def links_of_the_site(text: str, page: str, source: str, files: Files) -> str:
    """Rewrite the relative links of a text that lies at `source` and is shown as `page`."""

    def rewrite(match: re.Match[str]) -> str:
        label, target = match.groups()
        split = urlsplit(target)
        if split.scheme or not split.path:
            return match.group(0)
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), split.path))
        known = {place: shown for shown, place in PAGES_ELSEWHERE.items()}
        if path.startswith(NOTEBOOKS) and path.endswith(".ipynb"):
            known[path] = f"notebooks/{Path(path).stem}.md"
        if path == "README.md":
            shown = "index.md"
        elif path.startswith("docs/"):
            shown = path.removeprefix("docs/")
        else:
            shown = known.get(path, "")
        if files.get_file_from_path(shown) is not None:
            relative = posixpath.relpath(shown, posixpath.dirname(page) or ".")
            return f"[{label}]({relative}{f'#{split.fragment}' if split.fragment else ''})"
        if not (ROOT / path).exists():
            LOG.warning("%s links to %s, which is neither a page nor a file", source, target)
        return label if f"`{path}`" in label or label.strip("`") == path else f"{label} (`{path}`)"

    return _LINK.sub(rewrite, text)


class _References(HTMLParser):
    """The ids of a page, its links, and what a browser loads to show it."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect from one element."""
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect"):
            self.loaded.append(given.get("href", ""))
        if "src" in given:
            self.loaded.append(given["src"])


@event_priority(-200)  # after the plugins, some of which still write to the pages
def on_post_build(config: Any) -> None:
    """Warn of every link of the built site that leads nowhere and of everything that is loaded from another host."""
    for finding in findings(Path(config.site_dir)):
        LOG.warning("%s", finding)


def findings(site: Path) -> list[str]:
    """Return what is wrong with the links of a built site, one sentence each."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = _References()
        pages[path].feed(path.read_text("utf-8"))
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(site)
        if name.name == "404.html":  # its links are absolute, as it is shown at any address
            continue
        wrong += [
            f"{name} loads {url} from another host" for url in page.loaded if urlsplit(url).netloc
        ]
        for url in [*page.links, *page.loaded]:
            split = urlsplit(url)
            if split.scheme or split.netloc or not (split.path or split.fragment):
                continue
            target = (path.parent / unquote(split.path)).resolve() if split.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                wrong.append(f"{name} links to {url}, which was not built")
            elif (
                split.fragment
                and target in pages
                and not split.fragment.startswith("__")
                and unquote(split.fragment) not in pages[target].ids
            ):
                wrong.append(f"{name} links to {url}, and there is no such heading")
    return wrong
