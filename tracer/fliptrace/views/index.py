"""The index page of several prompts: one row each, worst news first in the counts, a link to each pair's folder."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from fliptrace.verdicts import Outcome
from fliptrace.views import templating, wording
from fliptrace.views.escaping import shorten, visible
from fliptrace.views.origin import started_elsewhere, started_in_shrink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fliptrace.verdicts import PairDiff


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One prompt's line.

    Attributes:
        name: how the prompt is called, its number or id.
        prompt: its text, shown as an excerpt; "" when redacted.
        outcome: the verdict; None when the prompt could not be run.
        flip_step: the step of the flip, None without one.
        first_root: where it started: the first surviving root's name or what came before it; "" without one.
        folder: the pair's folder, relative to the index page; "" without one.
        note: anything else in one sentence: how many attempts, or what went wrong.
    """

    name: str
    prompt: str
    outcome: Outcome | None
    flip_step: int | None = None
    first_root: str = ""
    folder: str = ""
    note: str = ""

    @classmethod
    def from_diff(
        cls, name: str, prompt: str, diff: PairDiff, *, folder: str = "", note: str = ""
    ) -> IndexRow:
        """Build a row from what a comparison found."""
        root = started_in_shrink(diff)
        return cls(
            name=name,
            prompt=prompt,
            outcome=diff.outcome,
            flip_step=diff.flip.step if diff.flip is not None else None,
            first_root=started_elsewhere(diff) or (root.name if root is not None else ""),
            folder=folder,
            note=note,
        )


def render_index(rows: Sequence[IndexRow], *, title: str = "fliptrace: pairs") -> str:
    """Return the index page: one offline HTML file without scripts.

    Args:
        rows: one per prompt, in the order in which they are shown.
        title: the page's title.
    """
    tally = Counter(row.outcome for row in rows)
    order = [*reversed(Outcome), None]
    counts = [
        f"{tally[outcome]:,} {outcome.value if outcome is not None else 'could not be run'}"
        for outcome in order
        if tally[outcome]
    ]
    css = templating.asset("report.css")
    page: str = (
        templating.environment()
        .get_template("index.html.j2")
        .render(
            policy=templating.content_security_policy([], [css]),
            css=css,
            title=visible(title),
            total=wording.count(len(rows), "prompt"),
            counts=counts,
            rows=[
                {
                    "name": visible(row.name),
                    "prompt": visible(shorten(row.prompt, 160)),
                    "outcome": row.outcome.value if row.outcome is not None else "could not be run",
                    "kind": row.outcome.name.lower() if row.outcome is not None else "failed",
                    "flip": "" if row.flip_step is None else wording.generated_name(row.flip_step),
                    "root": visible(row.first_root),
                    "link": _link(row.folder),
                    "note": visible(row.note),
                }
                for row in rows
            ],
        )
    )
    return page


def _link(folder: str) -> str:
    """Return a relative link to the pair's report: a folder's name can never become a scheme or a host."""
    if not folder:
        return ""
    path = quote(folder.encode("utf-8", "surrogatepass"), safe="/")
    return f"./{path.strip('/')}/report.html"
