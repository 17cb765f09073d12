"""Latency of reductions against a baseline, round by round, as in the paper's figure 6 (there as throughput)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fliptrace.errors import InputError
from fliptrace.views import palette
from fliptrace.views.static.canvas import PAGE, drawable, new_figure, styled
from fliptrace.views.static.replay import checked_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KEYS = ("reduction", "rank", "batch", "round", "seconds")
#: Runs without an adapter: they have no reduction that could be compared.
_NOT_A_REDUCTION = "none"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_MARKERS = ("o", "s", "^", "D", "v", "P")


@dataclass(frozen=True, slots=True)
class LatencyRatio:
    """Seconds of a reduction over those of the baseline, both measured in the same rounds.

    Attributes:
        reduction: which; rank: of the adapter; batch: requests at once.
        ratio: the median over the rounds.
        low: the smallest of the rounds; high: the largest.
        rounds: how many.
    """

    reduction: str
    rank: int
    batch: int
    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def confidence(self) -> float:
        """How surely ``low`` to ``high`` holds the true median, if rounds are independent: 1 - 2^(1 - rounds)."""
        return 1.0 - 2.0 ** (1 - self.rounds)


def latency_ratios(
    rows: Iterable[Mapping[str, Any]], *, baseline: str = "unsplit"
) -> tuple[LatencyRatio, ...]:
    """Pair every reduction with the baseline, round by round.

    Args:
        rows: one per measurement: ``reduction``, ``rank``, ``batch``, ``round``, ``seconds``.
        baseline: the reduction whose time is 1.

    Returns:
        In the order in which reductions first come, then by rank and batch; rounds without a baseline are left out.

    Raises:
        InputError: no rows, a key is missing, or nothing can be paired.
    """
    times: dict[tuple[str, int, int], dict[int, float]] = {}
    for row in checked_rows(rows, _KEYS):
        if row["reduction"] == _NOT_A_REDUCTION:
            continue
        key = (str(row["reduction"]), int(row["rank"]), int(row["batch"]))
        times.setdefault(key, {})[int(row["round"])] = float(row["seconds"])
    order = list(dict.fromkeys(name for name, _, _ in times))
    found = []
    for (name, rank, batch), rounds in times.items():
        against = times.get((baseline, rank, batch), {})
        ratios = [rounds[number] / against[number] for number in rounds if against.get(number)]
        if name != baseline and ratios:
            median = statistics.median(ratios)
            found.append(
                LatencyRatio(name, rank, batch, median, min(ratios), max(ratios), len(ratios))
            )
    if not found:
        raise InputError(
            f"no round has both the baseline {baseline!r} and another reduction; there are "
            f"{', '.join(order) or 'no reductions'}"
        )
    return tuple(sorted(found, key=lambda r: (order.index(r.reduction), r.rank, r.batch)))


@styled
def latency_picture(
    rows: Iterable[Mapping[str, Any]], *, baseline: str = "unsplit", width: float = PAGE
) -> Figure:
    """Draw latency ratios over batch sizes, one panel per rank.

    Points are medians of the rounds' ratios, whiskers span all rounds; the axis says what interval that is.

    Args:
        rows: see latency_ratios.
        baseline: the reduction that is 1.
        width: in inches.

    Returns:
        A matplotlib figure for write_picture.

    Raises:
        InputError: see latency_ratios.
    """
    from matplotlib.ticker import FuncFormatter

    ratios = latency_ratios(rows, baseline=baseline)
    names = list(dict.fromkeys(ratio.reduction for ratio in ratios))
    ranks = sorted({ratio.rank for ratio in ratios})
    batches = sorted({ratio.batch for ratio in ratios})
    stacked = width < 1.8 * len(ranks)
    shape = (len(ranks), 1) if stacked else (1, len(ranks))
    figure = new_figure(width, (1.7 if stacked else 2.1) * shape[0] + 0.5)
    axes = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False).flat
    ink = palette.INK["light"]
    for axis, rank in zip(axes, ranks, strict=True):
        axis.axhline(1.0, color=ink["text"], linewidth=0.8, linestyle="--", zorder=1)
        for number, name in enumerate(names):
            kept = [r for r in ratios if r.reduction == name and r.rank == rank]
            shift = (number - (len(names) - 1) / 2) * 0.7 / max(1, len(names))
            axis.errorbar(
                [batches.index(r.batch) + shift for r in kept],
                [r.ratio for r in kept],
                yerr=[[r.ratio - r.low for r in kept], [r.high - r.ratio for r in kept]],
                fmt=_MARKERS[number % len(_MARKERS)],
                color=_COLOURS[number % len(_COLOURS)],
                markersize=4.0,
                capsize=2.0,
                elinewidth=0.8,
                label=drawable(name),
                zorder=2,
            )
        axis.set_title(f"rank {rank}", loc="left")
        axis.set_xticks(range(len(batches)), [f"{batch}" for batch in batches])
        axis.set_xlim(-0.5, len(batches) - 0.5)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2f}"))
        axis.grid(axis="y", color=ink["grid"], linewidth=0.5)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        if not stacked or rank == ranks[-1]:
            axis.set_xlabel("requests in a batch")
    figure.supylabel(f"latency / {drawable(baseline)}'s", fontsize=7.0)
    rounds = sorted({ratio.rounds for ratio in ratios})
    surely = f"{100 * min(ratio.confidence for ratio in ratios):.3g} %"
    count = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    handles, labels = next(iter(figure.axes)).get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=3 if stacked else min(6, len(names)),
        frameon=False,
        title=f"whiskers: range of {count} rounds, a {surely} interval of the median",
        title_fontsize=6.0,
    )
    return figure
