"""What the pages of counterparts.py are made of: rows of a file, Markdown tables, shares and wrapped sentences."""

from __future__ import annotations

import gzip
import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fliptrace.studies.statistics import clustered_share

_WIDTH = 130
#: Columns that no figure needs, and that are long.
_LEFT_OUT = ("text", "order", "ttfts", "itls", "input_lens", "output_lens")
#: For what the paper does not give.
NOTHING = "–"


def pack(rows: Path, target: Path) -> None:
    """Keep a study's rows without their texts; the same rows give the same bytes."""
    lines = []
    for line in rows.read_text("utf-8").splitlines():
        row = {name: value for name, value in json.loads(line).items() if name not in _LEFT_OUT}
        lines.append(json.dumps(row) + "\n")
    target.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    print(f"{len(lines)} rows, {target.stat().st_size:,} bytes: {target}")


def rows_of(results: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows of a file, in its order; none if it is not there."""
    packed, plain = results / f"{name}.jsonl.gz", results / f"{name}.jsonl"
    if packed.exists():
        text = gzip.decompress(packed.read_bytes()).decode()
    elif plain.exists():
        text = plain.read_text("utf-8")
    else:
        return []
    return [json.loads(line) for line in text.splitlines()]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    return [
        "| " + " | ".join(line) + " |" if line else "|" + "---|" * len(header)
        for line in (header, (), *rows)
    ]


def prose(*sentences: str) -> list[str]:
    """Return a paragraph, wrapped, with an empty line before it; nothing without a sentence."""
    said = " ".join(filter(None, sentences))
    wrapped = textwrap.wrap(said, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return ["", *wrapped] if said else []


def percent(hits: float, trials: float) -> str:
    """Say a share of so many that an interval is no news."""
    return f"{100 * hits / trials:.4g} %"


def share(groups: Sequence[Sequence[Any]], count: Callable[[Any], tuple[int, int]]) -> str:
    """Say a share of comparisons with its interval over prompts.

    Args:
        groups: the comparisons of each prompt.
        count: of a comparison: hits, of how many.
    """
    counts = [[count(each) for each in group] for group in groups]
    hits = [sum(int(hit) for hit, _ in group) for group in counts]
    return str(clustered_share(hits, [sum(of for _, of in group) for group in counts]))
