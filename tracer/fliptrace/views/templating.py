"""Pages from templates: autoescaped, with a Content-Security-Policy that names each script and style by its hash.

Hashes rather than nonces, because a page is a file: the same verdict gives the same bytes, and nobody can reuse a hash
for other code.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from fliptrace.views.wording import unbroken_parts


@cache
def environment() -> jinja2.Environment:
    """Return the environment of the page templates: everything is escaped, an undefined name is an error.

    It is made once, since compiling the templates takes longer than filling them.
    """
    pages = jinja2.Environment(
        loader=jinja2.PackageLoader("fliptrace.views", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters["sentence"] = sentence
    return pages


def sentence(text: str) -> Markup:
    """Escape a sentence and keep its numbers and short tokens on one line each."""
    return Markup().join(
        Markup('<span class="unbroken">{}</span>').format(part) if keep else part
        for part, keep in unbroken_parts(text)
    )


def asset(name: str) -> Markup:
    """Read a script or style that ships with the package, to be embedded as it is."""
    text = resources.files("fliptrace.views").joinpath("templates", name).read_text("utf-8")
    return Markup(text)  # noqa: S704 (our own file, and the policy pins its hash)


def content_security_policy(
    scripts: list[str], styles: list[str], *, style_attributes: bool = False
) -> str:
    """Return a policy that allows exactly the given inline scripts and styles, and no request anywhere.

    Args:
        scripts: the exact texts between the script tags.
        styles: the exact texts between the style tags.
        style_attributes: allow style attributes, which plotly sets on the elements that it makes. They can run nothing
            and load nothing under this policy.
    """
    script_sources = " ".join(_hash(text) for text in scripts) or "'none'"
    style_sources = " ".join(_hash(text) for text in styles) or "'none'"
    attributes = "; style-src-attr 'unsafe-inline'" if style_attributes else ""
    return (
        f"default-src 'none'; script-src {script_sources}; style-src {style_sources}{attributes}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def embedded_json(value: Any) -> Markup:
    """Serialise data for a ``<script type="application/json">`` element that nothing in it can end.

    ASCII only (U+2028 and lone surrogates leave as escapes), and ``<``, ``>`` and ``&`` leave as escapes, too, so that
    neither ``</script>`` nor ``<!--`` can occur.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 (no character of markup is left)
