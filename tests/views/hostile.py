"""Texts that try to become more than text, and a pair of whose every text one of them takes the place.

Each script would set ``window.pwned``. Values are named by what they try; a test that fails says the name.
"""

from __future__ import annotations

import dataclasses

from fliptrace.manifest import Manifest, differing_keys
from fliptrace.sites import Coordinate, Site
from fliptrace.verdicts import ForeignRoot, Origin
from fliptrace.views import IndexRow

CORPUS = {
    # elements and the ends of elements that a page has
    "script": "<script>window.pwned=1</script>",
    "script, upper case": "<SCRIPT/x>window.pwned=1</SCRIPT\t>",
    "script in a split tag": "<scr<script>ipt>window.pwned=1</scr</script>ipt>",
    "end of script": "</script><script>window.pwned=1</script>",
    "end of script in JSON": '"}</script><script>window.pwned=1</script>{"',
    "end of style": "]]></style><style>*{display:none}</style>",
    "end of title": "</title><script>window.pwned=1</script>",
    "end of table": "</td></tr></table></section></main><script>window.pwned=1</script>",
    "end of details": "</bdi></li></ul></details></template><plaintext>",
    "comment": "<!--<script>",
    "end of comment": "--><script>window.pwned=1</script><!-- --!>",
    "CDATA": "<![CDATA[<script>window.pwned=1</script>]]>",
    "image": "<img src=x onerror=window.pwned=1>",
    "svg": "<svg/onload=window.pwned=1><animate onbegin=window.pwned=1>",
    "frame": '<iframe srcdoc="<script>parent.pwned=1</script>"></iframe>',
    "request": '<link rel=stylesheet href=https://example.invalid/x><img src="//example.invalid/y">',
    "base and refresh": "<base href=https://example.invalid/><meta http-equiv=refresh content=0>",
    "form": "<form action=https://example.invalid><button autofocus onfocus=window.pwned=1>",
    # attributes and entities
    "attribute, double quotes": '" onmouseover="window.pwned=1" autofocus onfocus="window.pwned=1',
    "attribute, single quotes": "' onmouseover='window.pwned=1' x='",
    "attribute, backquotes": "`onmouseover=window.pwned=1`",
    "entities": "&lt;script&gt;window.pwned=1&lt;/script&gt;&#60;img src=x onerror=window.pwned=1&#62;",
    "entity without an end": "&ltscript&gtwindow.pwned=1&lt/script&gt &quot onload=&quot",
    "javascript link": '<a href="javascript:window.pwned=1">link</a>',
    "javascript, split": "java\tscript:window.pwned=1",
    # templates and what plotly reads in labels
    "jinja": "{{ 7*7 }}{% raw %}{# #}{{ config }}{% for x in y %}",
    "template literal": "${window.pwned=1}`${alert(1)}`#{7*7}",
    "plotly hover": "%{customdata}%{x:$.2f}<extra></extra>",
    "plotly markup": '<b>bold</b><br><sup>1</sup><a href="https://example.invalid">x</a>',
    "plotly style": '<span style="background:url(https://example.invalid/z)">x</span>',
    "formula": "$\\href{javascript:window.pwned=1}{x}$ $\\require{html}$",
    "rich markup": "[red]rich[/red][link=https://example.invalid]x[/link][/]",
    # characters that lie about the text around them, or that no encoder accepts
    "right to left": "\u202eevil\u202c \u2066isolated\u2069 \u200fmark",
    "zero width": "in\u200bvi\u200csi\u200dble\ufeff\u2060\u00ad",
    "tags": "\U000e0041\U000e0042 plane 14",
    "line separators": "one\u2028two\u2029three\x85four\x0bfive\x0csix\r\nseven",
    "controls": "\x00\x01\x07\x08\x7f\x80\x9b",
    "escapes": "\x1b[31mred\x1b[2J\x1b]8;;https://example.invalid\x07link\x1b]8;;\x07\x9b1m",
    "lone surrogates": "\ud800 lone \udfff \udc80",
    "private and unassigned": "\ue000 \U0010ffff \u0378 \ufffe",
    "combining": "Z" + "\u0351" * 300,
    # paths, sizes and nothing at all
    "path": "../../../../etc/passwd\\..\\x?y=1#z",
    "scheme": "javascript:window.pwned=1//",
    "data": "data:text/html,<script>window.pwned=1</script>",
    "huge": "A" * 100_000,
    "huge, with spaces": "<b> " * 25_000,
    "prototype": "__proto__",
    "empty": "",
    "space": " ",
}


def spoilt_pair(pairs, text):
    """A made-up pair in which one text stands wherever a text from elsewhere can stand."""
    pair = pairs.make(
        prompt=(text, "one", " and", " the", " other", text, " end"),
        reference_pieces=["so ", text, " 7"],
        candidate_pieces=["so ", f"{text}!", text],
    )
    for trace in (pair.reference, pair.candidate):
        trace.source.name = f"{text}/{trace.name}{text}"
        trace.source.manifest = Manifest(
            {
                **trace.manifest.sections,
                "model": {"name": text, "dtype": "bfloat16", text: [text, {"x": text}]},
                "adapter": {"name": text, "rank": text},
                "reduction": {"identity": text, "schedule": text, "seed": text},
                "engine": {"name": text},
                "environment": {"device": text, "processor": text, "gpu": {"name": text}},
                f"{text}section": {text: text, "x": trace.name},
            }
        )
        trace.source.closing = dataclasses.replace(
            trace.closing, stop_reason=text, complete=False, not_observed=(text,)
        )
    diff = pair.diff
    site = Site(path=f"model.layers.2.{text}", layer=2, module=text, slice=text)
    flip = dataclasses.replace(
        diff.flip,
        tie_rule=text,
        reference_tied=2,
        decided_by_tie_break=("reference",),
        reference_token=dataclasses.replace(diff.flip.reference_token, text=text),
        candidate_token=dataclasses.replace(diff.flip.candidate_token, text=f"{text}!"),
    )
    pair.diff = dataclasses.replace(
        diff,
        flip=flip,
        grids={
            name: dataclasses.replace(grid, rows=(("shrink", site), *grid.rows[1:]))
            for name, grid in diff.grids.items()
        },
        first_surviving=_moved(diff.first_surviving, site),
        first_propagating=_moved(diff.first_propagating, site),
        roots=tuple(_moved(root, site) for root in diff.roots),
        foreign_root=ForeignRoot(text, "operation", 0, 1, Origin.ROOT, text, 0),
        coverage=dataclasses.replace(
            diff.coverage, not_observed=(text,), missing=(text,), observer_control=text
        ),
        propagation=dataclasses.replace(diff.propagation, sentences=(text,), path=(text,)),
        manifest_differences=tuple(
            differing_keys(pair.reference.manifest, pair.candidate.manifest)
        ),
    )
    return pair


def _moved(row, site):
    places = tuple(
        dataclasses.replace(
            one,
            coordinate=Coordinate(
                site, one.coordinate.step, one.coordinate.position, one.coordinate.rank_index
            ),
        )
        for one in row.coordinates
    )
    return dataclasses.replace(row, site=site, coordinates=places)


def spoilt_index(text):
    """Rows of an index page whose every text is the same."""
    return [IndexRow(text, text, None, None, text, folder, text) for folder in (text, "")]
