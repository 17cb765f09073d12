"""How often a shrink that is repeated on identical operands gives other bits, as in the paper's figure 3."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fliptrace.errors import InputError
from fliptrace.views import palette
from fliptrace.views.static.canvas import COLUMN, PAGE, drawable, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KEYS = (
    "reduction",
    "phase",
    "comparisons",
    "comparisons_differing",
    "elements",
    "elements_differing",
)
#: Panel title -> (numerator, denominator).
_PANELS = {
    "comparisons that differ": ("comparisons_differing", "comparisons"),
    "FP32 elements that differ": ("elements_differing", "elements"),
}
#: Fill and hatch of the phases: told apart in gray, too.
_FILLS = (("#0072b2", ""), ("#e69f00", "////"), ("#009e73", "...."), ("#cc79a7", "xxxx"))


@styled
def replay_picture(rows: Iterable[Mapping[str, Any]], *, width: float = COLUMN) -> Figure:
    """Draw the shares of differing comparisons and of differing elements by reduction and phase.

    A share of zero has no bar: its place says 0 and of how many.

    Args:
        rows: as a replay study writes them, one per reduction and phase: ``reduction``, ``phase``, ``comparisons``,
            ``comparisons_differing``, ``elements``, ``elements_differing``.
        width: in inches.

    Returns:
        A matplotlib figure for write_picture.

    Raises:
        InputError: no rows, or a row without one of these keys.
    """
    listed = checked_rows(rows, _KEYS)
    reductions = list(dict.fromkeys(str(row["reduction"]) for row in listed))
    phases = list(dict.fromkeys(str(row["phase"]) for row in listed))
    found = {(str(row["reduction"]), str(row["phase"])): row for row in listed}
    wide = width >= (COLUMN + PAGE) / 2
    height = 0.55 + 0.2 * len(reductions) * max(2, len(phases)) * (1.0 if wide else 2.0)
    figure = new_figure(width, height)
    axes = figure.subplots(1 if wide else 2, 2 if wide else 1, sharey=True, squeeze=False).flat
    for axis, (title, counts) in zip(axes, _PANELS.items(), strict=True):
        _draw(axis, title, counts, reductions, phases, found)
    handles, names = next(iter(figure.axes)).get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(phases), frameon=False)
    return figure


def _draw(
    axis: Axes,
    title: str,
    counts: tuple[str, str],
    reductions: list[str],
    phases: list[str],
    found: Mapping[tuple[str, str], Mapping[str, Any]],
) -> None:
    ink = palette.INK["light"]
    thick = 0.8 / len(phases)
    for number, phase in enumerate(phases):
        places, shares, labels = [], [], []
        for place, reduction in enumerate(reductions):
            row = found.get((reduction, phase))
            if row is None or not row[counts[1]]:
                continue
            hits, trials = int(row[counts[0]]), int(row[counts[1]])
            places.append(place + (number - (len(phases) - 1) / 2) * thick)
            shares.append(100 * hits / trials)
            labels.append(_label(hits, trials))
        fill, hatch = _FILLS[number % len(_FILLS)]
        axis.barh(
            places,
            shares,
            height=thick * 0.9,
            color=fill,
            hatch=hatch,
            edgecolor="white" if hatch else fill,
            linewidth=0.0,
            label=drawable(phase),
        )
        for at, share, label in zip(places, shares, labels, strict=True):
            inside = share > 55
            axis.annotate(
                label,
                (share, at),
                xytext=(-3 if inside else 3, 0),
                textcoords="offset points",
                ha="right" if inside else "left",
                va="center_baseline",
                fontsize=6.0,
                color=ink["text"],
                bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.9},
            )
    axis.set_title(title, loc="left")
    axis.set_xlim(0, 100)
    axis.set_xlabel("% of those compared")
    axis.set_yticks(range(len(reductions)), [drawable(name) for name in reductions])
    axis.set_ylim(len(reductions) - 0.5, -0.5)
    axis.grid(axis="x", color=ink["grid"], linewidth=0.5)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _label(hits: int, trials: int) -> str:
    if hits == 0:
        return f"0 of {trials:,}"
    share = 100 * hits / trials
    if hits == trials:
        return f"all {trials:,}"
    return f"{share:.3f} %" if share > 99.9 or share < 0.1 else f"{share:.2f} %"


def checked_rows(
    rows: Iterable[Mapping[str, Any]], keys: tuple[str, ...]
) -> list[Mapping[str, Any]]:
    """Return rows as a list.

    Raises:
        InputError: there are none, or one lacks a key; the message says which.
    """
    listed = list(rows)
    if not listed:
        raise InputError("there is nothing to draw: no rows were given")
    for number, row in enumerate(listed):
        missing = [key for key in keys if key not in row]
        if missing:
            raise InputError(
                f"row {number} lacks {', '.join(missing)}; each row needs {', '.join(keys)}"
            )
    return listed
