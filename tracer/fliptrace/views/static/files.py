"""The pictures of one pair, written into a folder: what ``--figures`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fliptrace.errors import StorageError
from fliptrace.views.static.boundary import (
    Margin,
    boundary_picture,
    recorded_margins,
)
from fliptrace.views.static.canvas import PAGE, write_picture
from fliptrace.views.static.heatmap import heatmap_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fliptrace.trace import Trace
    from fliptrace.verdicts import PairDiff
    from fliptrace.views.interventions import InterventionReport


def write_figures(
    folder: str | Path,
    formats: Sequence[str],
    diff: PairDiff,
    reference: Trace | None = None,
    *,
    interventions: InterventionReport | None = None,
) -> tuple[Path, ...]:
    """Write a pair's pictures: ``heatmap`` (magnitudes), ``classes`` and, where a coordinate crosses one, ``boundary``.

    The boundary is that of the coordinate that was proved to be enough, with the margins that the proof measured;
    without a proof that of the first surviving difference, with the margins that were recorded at the flip.

    Args:
        folder: made where it does not exist.
        formats: of FORMATS.
        diff: what was found.
        reference: the trace whose token texts label the columns.
        interventions: what was substituted and what came of it.

    Returns:
        The paths of the files.

    Raises:
        StorageError: one cannot be written.
    """
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"the folder {place} cannot be made ({error})") from error
    pictures: dict[str, Figure] = {}
    if any(grid.rows and grid.columns for grid in diff.grids.values()):
        pictures["heatmap"] = heatmap_picture(diff, reference)
        pictures["classes"] = heatmap_picture(diff, reference, colour="class")
    boundary = _boundary(diff, interventions)
    if boundary is not None:
        pictures["boundary"] = boundary
    return tuple(
        write_picture(figure, place / f"{name}.{kind}")
        for name, figure in pictures.items()
        for kind in formats
    )


def _boundary(diff: PairDiff, interventions: InterventionReport | None) -> Figure | None:
    """Draw the decisive coordinate; None where there is none, or none with a rounding boundary."""
    from fliptrace.views.interventions_figures import difference_of, margin_bars

    found = interventions.investigation if interventions is not None else None
    best = found.best_coordinate if found is not None else None
    if best is not None and best.verdict is not None:
        coordinate = difference_of(best, diff.rounded_dtype)
        if coordinate.boundary.boundary is not None:
            margins = [
                Margin(
                    f"{bar.execution} with {bar.value_of}'s value",
                    bar.value_of,
                    bar.margin,
                    bar.token,
                )
                for bar in margin_bars(best.verdict)
            ]
            return boundary_picture(
                coordinate,
                margins,
                title=coordinate.coordinate.name,
                margins_title="Token margin with one value substituted",
                width=PAGE,
            )
    row = diff.first_propagating or diff.first_surviving or diff.first_surviving_variant
    if row is None or not row.coordinates or row.coordinates[0].boundary.boundary is None:
        return None
    step = "" if diff.flip is None else f", generated token {diff.flip.step + 1}"
    return boundary_picture(
        row.coordinates[0],
        recorded_margins(diff.flip) if diff.flip is not None else (),
        title=row.coordinates[0].coordinate.name,
        margins_title=f"Token margin as recorded{step}",
        width=PAGE,
    )
